"""Announce a worker on the local network by multicast DNS, and hear the announcements of others.

    token ── HKDF-SHA256 ──▶ key;  tag = HMAC-SHA256(key, nonce, hosts, port)

A process needs the token to make a tag or to recognise it. For everyone else the tag is random and
different for each worker, so it hides which workers belong together. The tag only decides which
workers to dial; trust comes from TLS.
"""

from __future__ import annotations

import hmac
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
from ..optional import import_extra
from ..transport.address import MOST_PORT, Address
from ..transport.token import Token, read_token_file

# DNS-SD allows fifteen characters between the underscore and the dot.
SERVICE = "_light-hetero._tcp.local."

Interface = ipaddress.IPv4Interface | ipaddress.IPv6Interface

_SALT = b"lightning-hetero"
_PURPOSE = b"recognition of announcements, version 2"
_KEY_BYTES = 32
_NONCE_BYTES = 16
# The fields of an announcement beside hosts and port, as carried by DNS-SD.
_PROPERTIES = ("nonce", "tag")
# A machine may have many addresses, and each silent address costs a try.
MOST_HOSTS = 8
# Each one is dialled.
_MOST_FOUND = 256

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Announcement:
    """The addresses of a worker, in its own words.

    Args:
        hosts: IP addresses of the machine.
        port: The port, the same on all addresses.
        nonce: Makes each tag different.
        tag: Proves the worker's token to processes with the same token.
    """

    hosts: tuple[str, ...]
    port: int
    nonce: str
    tag: str

    @property
    def instance(self) -> str:
        """A unique name without information about the worker."""
        return f"worker-{self.nonce[:16]}"

    @property
    def properties(self) -> dict[str, str]:
        """The fields beside hosts and port, as carried by DNS-SD."""
        return {name: getattr(self, name) for name in _PROPERTIES}

    @classmethod
    def heard(
        cls, hosts: Iterable[str], port: int | None, properties: Mapping[bytes, bytes | None]
    ) -> Announcement | None:
        """The announcement in a service's DNS records, if all fields are present and right."""
        texts = [properties.get(name.encode()) for name in _PROPERTIES]
        decoded = [text.decode("utf-8", "replace") for text in texts if text]
        if len(decoded) != len(texts) or port is None or not 0 < port <= MOST_PORT:
            return None
        return cls(tuple(sorted(hosts)[:MOST_HOSTS]), port, *decoded)


class Recogniser:
    """Makes the announcements of a token, and recognises them."""

    def __init__(self, token: Token) -> None:
        self._key = HKDF(hashes.SHA256(), _KEY_BYTES, _SALT, _PURPOSE).derive(token.secret)

    def announcement(self, hosts: Iterable[str], port: int) -> Announcement:
        """A new announcement, with a nonce of its own."""
        chosen, nonce = tuple(sorted(list(hosts)[:MOST_HOSTS])), secrets.token_hex(_NONCE_BYTES)
        unmarked = Announcement(chosen, port, nonce, "")
        return replace(unmarked, tag=self._tag(unmarked))

    def recognises(self, announcement: Announcement) -> bool:
        """Whether our token made this announcement, and all fields are unchanged."""
        expected = self._tag(announcement).encode()
        return hmac.compare_digest(announcement.tag.encode(), expected)

    def _tag(self, about: Announcement) -> str:
        said = [about.nonce, about.port, *about.hosts]
        return hmac.digest(self._key, json.dumps(said).encode(), "sha256").hex()


def hosts_to_announce(listening: str, own: Sequence[Interface]) -> list[str]:
    """The addresses at which others reach a listener on this IP address, routable ones first."""
    address = ipaddress.ip_address(listening)
    if not address.is_unspecified:
        return [str(address)]
    found = [one.ip for one in own if one.version == address.version and _is_seen_by_others(one)]
    # Link-local addresses work only between machines on one cable.
    return [str(ip) for ip in sorted(found, key=lambda ip: ip.is_link_local)]


def addresses_to_try(announcement: Announcement, own: Sequence[Interface]) -> list[Address]:
    """The addresses at which to dial a worker, the likeliest first.

    If this machine has the same address, such as the address of a container bridge, it leads back
    to this machine. It counts only if all announced addresses are like this: then the worker is on
    this machine.
    """
    ours = {one.ip for one in own}
    announced = [ip for host in announcement.hosts if (ip := _ip_address(host)) is not None]
    elsewhere = [ip for ip in announced if ip not in ours]

    def likelihood(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> tuple[bool, int]:
        return not any(ip in one.network for one in own), ip.version

    tried = sorted(elsewhere or announced, key=likelihood)
    return [Address(str(ip), announcement.port) for ip in tried]


def multicast_hosts(own: Sequence[Interface]) -> list[str]:
    """The IPv4 addresses of the interfaces for announcements. An announcement may still name IPv6
    addresses.
    """
    return [str(one.ip) for one in own if one.version == 4 and _is_seen_by_others(one)]


def _is_seen_by_others(interface: Interface) -> bool:
    # A link-local IPv6 address is valid only together with an interface of the dialling machine.
    is_scoped = interface.version == 6 and interface.ip.is_link_local
    return not interface.ip.is_loopback and not is_scoped


def _ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


@dataclass(frozen=True)
class Heard:
    """The announcements of our token, and the number of services of other tokens."""

    ours: list[Announcement]
    num_others: int

    @classmethod
    def among(cls, announcements: Iterable[Announcement], recogniser: Recogniser) -> Heard:
        """Sort out announcements by their tags.

        Anyone may fill the network with announcements, and repeat true ones under other names. So
        only true announcements count towards the limit, and each place counts once.
        """
        ours: dict[tuple[tuple[str, ...], int], Announcement] = {}
        others: set[str] = set()
        for each in announcements:
            if not recogniser.recognises(each):
                others.add(each.nonce)
            elif len(ours) < _MOST_FOUND:
                # By the place and not by the nonce: a restarted worker has another nonce, and its
                # earlier announcements may be repeated too.
                ours.setdefault((each.hosts, each.port), each)
        return cls(list(ours.values()), len(others))


def own_interfaces() -> list[Interface]:
    """The IP addresses of this machine with their networks."""
    addresses = (each for addresses in psutil.net_if_addrs().values() for each in addresses)
    families = (socket.AF_INET, socket.AF_INET6)
    return [_interface(each.address, each.netmask) for each in addresses if each.family in families]


def _interface(address: str, netmask: str | None) -> Interface:
    # A link-local IPv6 address carries the name of its interface after a percent sign.
    ip = ipaddress.ip_address(address.partition("%")[0])
    if netmask is None:
        return ipaddress.ip_interface(ip)
    # A network of IPv6 is written with the length of its mask alone.
    return ipaddress.ip_interface(f"{ip}/{int(ipaddress.ip_address(netmask)).bit_count()}")


@contextmanager
def announced(announcement: Announcement, hosts: Sequence[str]) -> Iterator[None]:
    """Answer queries for workers with the announcement until the block ends.

    Args:
        announcement: The answer.
        hosts: The interfaces to answer on, each by its IPv4 address.

    Raises:
        DiscoveryError: If multicast DNS cannot be used here.
    """
    name = announcement.instance
    service = _zeroconf().ServiceInfo(
        SERVICE,
        f"{name}.{SERVICE}",
        port=announcement.port,
        properties=announcement.properties,
        server=f"{name}.local.",
        addresses=[ipaddress.ip_address(host).packed for host in announcement.hosts],
    )
    with _network(hosts) as network:
        # The name is unique. Asking the network whether it is taken would cost a second.
        network.register_service(service, cooperating_responders=True)
        yield


def hear(recogniser: Recogniser, hosts: Sequence[str], seconds: float) -> Heard:
    """Ask for workers and collect the answers.

    Args:
        recogniser: Recognises the announcements of our token.
        hosts: The interfaces to ask on, each by its IPv4 address.
        seconds: How long to listen. More answers may come at any time, so the call always lasts
            this long.

    Raises:
        DiscoveryError: If multicast DNS cannot be used here.
    """
    library = _zeroconf()
    # Without a limit: strangers could use it up. zeroconf keeps all of their records too.
    names: set[str] = set()

    def note(name: str, **_: Any) -> None:
        names.add(name)

    with _network(hosts) as network:
        # Ask for multicast answers: a unicast answer may reach another process at the same port of
        # this machine, such as a worker.
        everyone = library.DNSQuestionType.QM
        library.ServiceBrowser(network, SERVICE, handlers=[note], question_type=everyone)
        time.sleep(seconds)
        return Heard.among(announcements_in(network, sorted(names)), recogniser)


def announcements_in(network: Any, names: Iterable[str]) -> Iterator[Announcement]:
    """The announcements among zeroconf's records.

    Args:
        network: Holds the records in its ``cache``.
        names: The announced services; anyone may have chosen their names.
    """
    library = _zeroconf()
    for name in names:
        try:
            service = library.ServiceInfo(SERVICE, name)
        except library.BadTypeInNameException:
            continue
        if service.load_from_cache(network):
            addresses, properties = service.parsed_addresses(), service.properties
            announcement = Announcement.heard(addresses, service.port, properties)
            if announcement is not None:
                yield announcement


@contextmanager
def announced_worker(
    wanted: bool | None, where: Address, token_file: Path | None
) -> Iterator[None]:
    """Announce a worker until the block ends.

    Args:
        wanted: True announces or raises. False does not announce. By default, announce if other
            machines can reach the worker, and log the reason if the announcement fails.
        where: The address at which the worker listens.
        token_file: The token. Processes with the same token recognise the announcement.

    Raises:
        DiscoveryError: If an announcement is wanted and cannot be made.
    """
    with ExitStack() as stack:
        if wanted or (wanted is None and not where.is_loopback):
            try:
                announcement = _announcement_of(where, token_file)
                hosts = multicast_hosts(own_interfaces())
                stack.enter_context(announced(announcement, hosts))
                logger.info("announced on the local network as %s", ", ".join(announcement.hosts))
            except DiscoveryError as error:
                if wanted:
                    raise
                logger.info("not announced on the local network: %s", error)
        yield


def _announcement_of(where: Address, token_file: Path | None) -> Announcement:
    if where.is_loopback or token_file is None:
        raise DiscoveryError(
            f"A worker on {where} is not announced, because other machines cannot reach it; listen "
            "on 0.0.0.0 with a token, or name the worker's address to the strategy."
        )
    hosts = hosts_to_announce(where.host, own_interfaces())
    if not hosts:
        raise DiscoveryError(
            f"Other machines cannot reach {where}, because this machine has no address in a "
            "network; connect it to a network, or name the worker's address to the strategy."
        )
    return Recogniser(read_token_file(token_file)).announcement(hosts, where.port)


@contextmanager
def _network(hosts: Sequence[str]) -> Iterator[Any]:
    if not hosts:
        raise DiscoveryError(
            "This machine has no network, or no IPv4 network, so it can neither announce nor find "
            "workers; name their addresses."
        )
    library = _zeroconf()
    try:
        # zeroconf runs an event loop of its own: the loop of a notebook would wait for this call.
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


def _zeroconf() -> Any:
    need = "workers are announced and found with it, unless you name their addresses"
    return import_extra("zeroconf", "discovery", need, DiscoveryError)
