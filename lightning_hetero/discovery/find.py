"""Find the workers of our token on the local network, greet them, ask for a worker's status, and
look for free workers during a run.
"""

from __future__ import annotations

import ipaddress
import secrets
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty

from ..errors import DiscoveryError, HeteroError, WorkerUnreachable
from ..protocol import messages as m
from ..protocol.frames import Frame
from ..transport.address import Address
from ..transport.channel import Inbox
from ..transport.compatibility import Identity
from ..transport.deadlines import Deadlines
from ..transport.handshake import dial
from ..transport.token import read_token_file
from .mdns import (
    Announcement,
    Interface,
    Recogniser,
    addresses_to_try,
    hear,
    multicast_hosts,
    own_interfaces,
)

# A worker may have several addresses, and an unreachable one must not delay the next.
_MOST_CONNECT_SECONDS = 3.0
_MOST_AT_ONCE = 16
# Between two looks for free workers, and the longest wait for one worker's answer.
LOOK_SECONDS = 5.0
_MOST_LOOKOUT_SECONDS = 2.0

NAME_THEM = (
    "Multicast does not pass through a VPN, WireGuard or a router; name the workers on its "
    "other side by their addresses, such as 10.88.0.2:9999."
)


@dataclass(frozen=True)
class FoundWorker:
    """A worker, after its answer at this address."""

    address: Address
    equipment: m.Equipment

    def __str__(self) -> str:
        device = self.equipment.device_name or self.equipment.device
        return f"{self.address} ({device})" if device else str(self.address)


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Args:
        workers: The answering workers, ordered by address.
        left_out: A sentence for each unusable worker of our token.
        num_others: How many announced services belong to other tokens.
        seconds: How long the search listened.
    """

    workers: tuple[FoundWorker, ...]
    left_out: tuple[str, ...]
    num_others: int
    seconds: float

    def check_not_empty(self) -> None:
        """Check that the search found a worker.

        Raises:
            DiscoveryError: If it did not find a worker; the message names the remedies.
        """
        if self.workers:
            return
        others = f", but {self.num_others} of another token" if self.num_others else ""
        raise DiscoveryError(
            f"The search found no usable worker of this token within {self.seconds:g} s{others}. "
            f"{' '.join((*self.left_out, ''))}Start workers with `lightning-hetero worker "
            "--listen 0.0.0.0:9999` and the same token file, in a Python that has the extra "
            f"`discovery`, and open UDP port 5353 in the firewalls. {NAME_THEM}"
        )


def find_workers(token_file: Path | None, identity: Identity, deadlines: Deadlines) -> SearchResult:
    """Search for workers and greet each of them.

    Raises:
        DiscoveryError: If multicast DNS cannot be used here, or the token is missing.
        TokenError: If the token cannot be used.
    """
    if token_file is None:
        raise DiscoveryError(
            "A search finds workers by their common token with this process, and this process "
            "has no token; make one with `lightning-hetero token`, and copy it to all machines "
            "as that command says."
        )
    own = own_interfaces()
    seconds = deadlines.discovery_seconds
    heard = hear(Recogniser(read_token_file(token_file)), multicast_hosts(own), seconds)
    answers = speak_with(heard.ours, own, identity, deadlines)
    found = {each.address: each for each in answers if isinstance(each, FoundWorker)}
    return SearchResult(
        tuple(sorted(found.values(), key=lambda worker: _place(worker.address))),
        tuple(sorted(each for each in answers if isinstance(each, str))),
        heard.num_others,
        seconds,
    )


def speak_with(
    announcements: Sequence[Announcement],
    own: Sequence[Interface],
    identity: Identity,
    deadlines: Deadlines,
) -> list[FoundWorker | str]:
    """Greet the announced workers, each at its likeliest address first. For each announcement: the
    worker, or a sentence on why it cannot be used.
    """
    seconds = min(deadlines.connect_seconds, _MOST_CONNECT_SECONDS)
    quick = replace(deadlines, connect_seconds=seconds)

    def answer(announcement: Announcement) -> FoundWorker | str:
        reasons = []
        for address in addresses_to_try(announcement, own):
            try:
                return FoundWorker(address, _equipment_of(address, quick, identity))
            except WorkerUnreachable as error:
                reasons.append(str(error))
        return next(iter(reasons), f"A worker announced {announcement.hosts}: no IP address.")

    with ThreadPoolExecutor(_MOST_AT_ONCE) as threads:
        return list(threads.map(answer, announcements))


@dataclass(frozen=True)
class WorkerStatus:
    """A worker's equipment, and its present work."""

    equipment: m.Equipment
    status: m.Status


def ask_status(
    address: Address, deadlines: Deadlines, identity: Identity, run: str = ""
) -> WorkerStatus:
    """Ask a worker for its status; its run goes on.

    Args:
        address: Where the worker listens.
        deadlines: How long each kind of waiting may take.
        identity: The credentials and equipment of this process.
        run: The name of the run with this worker as a spare. The worker names this run to other
            watchers for a while.

    Raises:
        WorkerUnreachable: If the worker does not answer, or refuses.
    """
    inbox = Inbox()
    channel, welcome = dial(address, "watcher", run, deadlines, identity)
    channel.start(inbox)
    try:
        content = inbox.get(timeout=deadlines.connect_seconds).content
    except Empty:
        content = None
    finally:
        channel.close()
    if isinstance(content, Frame) and isinstance(content.message, m.Status):
        return WorkerStatus(welcome.equipment, content.message)
    said = content.message if isinstance(content, Frame) else content
    raise WorkerUnreachable(
        f"The worker at {address} did not report its status: {said or 'no answer arrived'}."
    )


def _equipment_of(address: Address, deadlines: Deadlines, identity: Identity) -> m.Equipment:
    """The equipment of the worker at an address; the worker is free again afterwards."""
    name = secrets.token_hex(16)
    channel, welcome = dial(address, "coordinator", name, deadlines, identity)
    channel.start(Inbox())
    channel.close(m.Goodbye())
    return welcome.equipment


def _place(address: Address) -> tuple[int, int, int]:
    ip = ipaddress.ip_address(address.host)
    return ip.version, int(ip), address.port


class Lookout:
    """Looks now and then for free workers outside a run, so that they may join it.

    It asks them in a thread of its own. The thread begins with the first `free`.

    Args:
        addresses: By the workers' names, where they listen.
        deadlines: How long each kind of waiting may take.
        identity: The credentials and equipment of this process.
        run: The name of the run. Each look reports it to the free workers: they are spares of the
            run.
    """

    def __init__(
        self, addresses: Mapping[str, Address], deadlines: Deadlines, identity: Identity, run: str
    ) -> None:
        seconds = min(deadlines.connect_seconds, _MOST_LOOKOUT_SECONDS)
        self._deadlines = replace(deadlines, connect_seconds=seconds, linger_seconds=0)
        self._addresses, self._identity, self._run = addresses, identity, run
        self._used: Collection[str] = ()
        self._free: list[str] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, name="lookout", daemon=True)

    def free(self, used: Collection[str]) -> list[str]:
        """The workers free at the latest look, without the workers in use by the run."""
        self._used = {*used}
        if self._thread.ident is None and self._used != {*self._addresses}:
            self._thread.start()
        return [name for name in self._free if name not in self._used]

    def close(self) -> None:
        """Stop looking. May be called twice."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _look(self) -> None:
        while not self._closing.is_set():
            others = [name for name in self._addresses if name not in self._used]
            self._free = [name for name in others if self._is_free(name)]
            self._closing.wait(LOOK_SECONDS)

    def _is_free(self, name: str) -> bool:
        try:
            found = ask_status(self._addresses[name], self._deadlines, self._identity, self._run)
        except (HeteroError, OSError):
            return False  # it does not run at present
        return found.status.stage is None
