"""Announcing a worker on the local network, and hearing those that are announced: multicast DNS."""

from __future__ import annotations

import importlib
import ipaddress
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import DiscoveryError
from ...transport.address import Address
from ...transport.token import read_token_file
from .announcement import (
    SERVICE,
    Announcement,
    Interface,
    Recogniser,
    hosts_to_announce,
    multicast_hosts,
)

logger = logging.getLogger(__name__)

# Somebody may fill the network with announcements.
_MOST_HEARD = 256


@dataclass(frozen=True)
class Heard:
    """What was announced: the workers of our token, and how many services were not of it."""

    ours: list[Announcement]
    num_others: int


def own_interfaces() -> list[Interface]:
    """The addresses of this machine with their networks.

    Raises:
        DiscoveryError: If the extra ``discovery`` is not installed.
    """
    found: list[Interface] = []
    for adapter in _library("ifaddr").get_adapters():
        for each in adapter.ips:
            host = each.ip if each.is_IPv4 else each.ip[0]
            found.append(ipaddress.ip_interface(f"{host}/{each.network_prefix}"))
    return found


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
