"""Announcing a worker on the local network, and hearing those that are announced: multicast DNS.

What a worker tells its local network, and which of such announcements are ours: without I/O.

    token ── HKDF-SHA256 ──▶ key;  tag = HMAC-SHA256(key, nonce, hosts, port, versions)

Only who has the token can make the tag or recognise it. To others a tag is random, and no two
workers have the same, so that nobody else sees which workers belong together. The tag decides whom
to dial, and nothing more: trust comes from TLS.
"""

from __future__ import annotations

import hmac
import importlib
import ipaddress
import json
import logging
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ..errors import DiscoveryError
from ..protocol.messages import PROTOCOL_VERSION
from ..transport.address import MOST_PORT, Address
from ..transport.token import Token, read_token_file
from ..version import __version__

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


logger = logging.getLogger(__name__)

# Somebody may fill the network with announcements.
_MOST_HEARD = 256


@dataclass(frozen=True)
class Heard:
    """What was announced: the workers of our token, and how many services were not of it."""

    ours: list[Announcement]
    num_others: int


def own_interfaces() -> list[Interface]:
    """The IP addresses of this machine with their networks."""
    addresses = (each for addresses in psutil.net_if_addrs().values() for each in addresses)
    families = (socket.AF_INET, socket.AF_INET6)
    return [_interface(each.address, each.netmask) for each in addresses if each.family in families]


def _interface(address: str, netmask: str | None) -> Interface:
    # A link-local IPv6 address carries the name of its interface behind a percent sign.
    ip = ipaddress.ip_address(address.partition("%")[0])
    if netmask is None:
        return ipaddress.ip_interface(ip)
    # A network of IPv6 is written with the length of its mask alone.
    return ipaddress.ip_interface(f"{ip}/{int(ipaddress.ip_address(netmask)).bit_count()}")


@contextmanager
def announced(announcement: Announcement, hosts: Sequence[str]) -> Iterator[None]:
    """Answer whoever asks for workers, as long as the block lasts.

    Args:
        announcement: What is answered.
        hosts: On which interfaces, each by its IPv4 address.

    Raises:
        DiscoveryError: If the network cannot be used for that.
    """
    name = announcement.instance
    service = _library("zeroconf").ServiceInfo(
        SERVICE,
        f"{name}.{SERVICE}",
        port=announcement.port,
        properties=announcement.properties,
        server=f"{name}.local.",
        addresses=[_packed(host) for host in announcement.hosts],
    )
    with _network(hosts) as network:
        # Nobody else has the name, so nobody has to be asked, which would take a second.
        network.register_service(service, cooperating_responders=True)
        yield


def hear(recogniser: Recogniser, hosts: Sequence[str], seconds: float) -> Heard:
    """Ask for workers and take in what is answered within so many seconds.

    Args:
        recogniser: Knows which are ours.
        hosts: On which interfaces, each by its IPv4 address.
        seconds: There is no telling whether everybody has answered, so all of them pass.

    Raises:
        DiscoveryError: If the network cannot be used for that.
    """
    library = _library("zeroconf")
    names: set[str] = set()

    def note(name: str, **_: Any) -> None:
        if len(names) < _MOST_HEARD:
            names.add(name)

    with _network(hosts) as network:
        # Answers go to everyone: one that goes to the asker alone comes to any of those who share
        # the port on this machine, such as a worker.
        everyone = library.DNSQuestionType.QM
        library.ServiceBrowser(network, SERVICE, handlers=[note], question_type=everyone)
        time.sleep(seconds)
        services = [library.ServiceInfo(SERVICE, name) for name in sorted(names)]
        heard = [_announcement_in(each) for each in services if each.load_from_cache(network)]
    ours = [each for each in heard if each is not None and recogniser.recognises(each)]
    return Heard(ours, len(heard) - len(ours))


@contextmanager
def announced_worker(
    wanted: bool | None, where: Address, token_file: Path | None
) -> Iterator[None]:
    """Announce a worker that others can reach, as long as the block lasts.

    Args:
        wanted: None announces where it can be done and else says why not.
        where: Where the worker listens.
        token_file: For whom.

    Raises:
        DiscoveryError: If it is wanted, and cannot be done.
    """
    with ExitStack() as stack:
        if wanted or (wanted is None and not where.is_loopback):
            try:
                hosts = stack.enter_context(_announced_at(where, token_file))
                logger.info("announced on the local network as %s", ", ".join(hosts))
            except DiscoveryError as error:
                if wanted:
                    raise
                logger.info("not announced on the local network: %s", error)
        yield


@contextmanager
def _announced_at(where: Address, token_file: Path | None) -> Iterator[tuple[str, ...]]:
    announcement = _announcement_of(where, token_file)
    with announced(announcement, multicast_hosts(own_interfaces())):
        yield announcement.hosts


def _announcement_of(where: Address, token_file: Path | None) -> Announcement:
    if where.is_loopback or token_file is None:
        raise DiscoveryError(
            f"A worker on {where} is not announced, since others cannot reach it; listen on "
            "0.0.0.0 with a token, or name the worker's address to the strategy."
        )
    hosts = hosts_to_announce(where.host, own_interfaces())
    if not hosts:
        raise DiscoveryError(f"This machine has no address by which others would reach {where}.")
    return Recogniser(read_token_file(token_file)).announcement(hosts, where.port)


@contextmanager
def _network(hosts: Sequence[str]) -> Iterator[Any]:
    if not hosts:
        raise DiscoveryError(
            "This machine has no network, or none with IPv4, so workers can neither be announced "
            "nor found; name their addresses."
        )
    library = _library("zeroconf")
    try:
        # With a loop of its own, as that of a notebook would wait for us.
        network = library.Zeroconf(
            list(hosts), ip_version=library.IPVersion.V4Only, use_asyncio=False
        )
    except OSError as error:
        raise DiscoveryError(
            f"Multicast DNS cannot be used on {', '.join(hosts)}: {error}; name the workers' "
            "addresses."
        ) from error
    with network:
        yield network


def _announcement_in(service: Any) -> Announcement | None:
    return Announcement.heard(service.parsed_addresses(), service.port, service.properties)


def _packed(host: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DiscoveryError(
            f"{name} is not installed here, and workers are announced and found with it ({error}); "
            "pip install 'lightning-hetero[discovery]', or name the workers' addresses."
        ) from error
