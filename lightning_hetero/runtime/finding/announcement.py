"""What a worker tells its local network, and which of such announcements are ours: without I/O.

    token ── HKDF-SHA256 ──▶ key;  tag = HMAC-SHA256(key, nonce, hosts, port, versions)

Only who has the token can make the tag or recognise it. To others a tag is random, and no two
workers have the same, so that nobody else sees which workers belong together. The tag decides whom
to dial, and nothing more: trust comes from TLS.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ...protocol.messages import PROTOCOL_VERSION
from ...transport.address import MOST_PORT, Address
from ...transport.token import Token
from ...version import __version__

# DNS-SD allows fifteen characters between the underscore and the dot.
SERVICE = "_light-hetero._tcp.local."

Interface = ipaddress.IPv4Interface | ipaddress.IPv6Interface

_SALT = b"lightning-hetero"
_PURPOSE = b"recognition of announcements, version 1"
_KEY_BYTES = 32
_NONCE_BYTES = 16
# A machine may have many; each costs a try when it does not answer.
MOST_HOSTS = 8


@dataclass(frozen=True)
class Announcement:
    """Where a worker listens, as it says itself.

    Args:
        hosts: IP addresses of the machine.
        port: The same on all of them.
        protocol: What the worker speaks.
        version: Of its lightning-hetero.
        nonce: Makes every tag another one.
        tag: Shows the worker's token to those who have it.
    """

    hosts: tuple[str, ...]
    port: int
    protocol: str
    version: str
    nonce: str
    tag: str

    @property
    def instance(self) -> str:
        """A name that no other worker has, and that says nothing."""
        return f"worker-{self.nonce[:16]}"

    @property
    def properties(self) -> dict[str, str]:
        """What stands beside hosts and port."""
        return {
            "protocol": self.protocol,
            "version": self.version,
            "nonce": self.nonce,
            "tag": self.tag,
        }

    @classmethod
    def heard(
        cls, hosts: Iterable[str], port: int | None, properties: Mapping[bytes, bytes | None]
    ) -> Announcement | None:
        """What the network says about a service of our kind; None if that is no announcement."""
        texts = [properties.get(name) for name in (b"protocol", b"version", b"nonce", b"tag")]
        decoded = [text.decode("utf-8", "replace") for text in texts if text]
        if len(decoded) != len(texts) or port is None or not 0 < port <= MOST_PORT:
            return None
        return cls(tuple(sorted(hosts)[:MOST_HOSTS]), port, *decoded)


class Recogniser:
    """Makes announcements for a token, and recognises those that were made with it."""

    def __init__(self, token: Token) -> None:
        self._key = HKDF(hashes.SHA256(), _KEY_BYTES, _SALT, _PURPOSE).derive(token.secret)

    def announcement(self, hosts: Iterable[str], port: int) -> Announcement:
        """What this process announces; no other one has the same."""
        chosen, nonce = tuple(sorted(list(hosts)[:MOST_HOSTS])), secrets.token_hex(_NONCE_BYTES)
        unmarked = Announcement(chosen, port, str(PROTOCOL_VERSION), __version__, nonce, "")
        return replace(unmarked, tag=self._tag(unmarked))

    def recognises(self, announcement: Announcement) -> bool:
        """Whether it was made with our token, and is as it was made."""
        expected = self._tag(announcement).encode()
        return hmac.compare_digest(announcement.tag.encode(), expected)

    def _tag(self, about: Announcement) -> str:
        said = [about.nonce, about.port, about.protocol, about.version, *about.hosts]
        return hmac.digest(self._key, json.dumps(said).encode(), "sha256").hex()


def hosts_to_announce(listening: str, own: Sequence[Interface]) -> list[str]:
    """Where others reach whoever listens on this IP address; the best known ways first."""
    address = ipaddress.ip_address(listening)
    if not address.is_unspecified:
        return [str(address)]
    found = [one.ip for one in own if one.version == address.version and _is_seen_by_others(one)]
    # Addresses that machines give themselves work only between neighbors on one cable.
    return [str(ip) for ip in sorted(found, key=lambda ip: ip.is_link_local)]


def addresses_to_try(announcement: Announcement, own: Sequence[Interface]) -> list[Address]:
    """Where to dial a worker, the likeliest way first.

    An address that this machine has too, as that of a bridge for containers, leads to this machine;
    it is the worker's way only if the worker is on this machine, and has no other addresses.
    """
    ours = {one.ip for one in own}
    announced = [ip for host in announcement.hosts if (ip := _ip_address(host)) is not None]
    elsewhere = [ip for ip in announced if ip not in ours]

    def likelihood(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> tuple[bool, int]:
        return not any(ip in one.network for one in own), ip.version

    tried = sorted(elsewhere or announced, key=likelihood)
    return [Address(str(ip), announcement.port) for ip in tried]


def multicast_hosts(own: Sequence[Interface]) -> list[str]:
    """The addresses whose interfaces carry announcements, which name IPv6 addresses too."""
    return [str(one.ip) for one in own if one.version == 4 and _is_seen_by_others(one)]


def _is_seen_by_others(interface: Interface) -> bool:
    # One of the latter kind means something only together with the interface of whoever uses it.
    is_scoped = interface.version == 6 and interface.ip.is_link_local
    return not interface.ip.is_loopback and not is_scoped


def _ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
