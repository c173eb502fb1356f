"""Workers without a list by the user: local processes, announced workers, workers that dial us."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from ..devices.description import equipment_here
from ..devices.device import devices_beside
from ..discovery.find import Lookout, find_workers
from ..errors import WorkerUnreachable
from ..launch.join import Door
from ..launch.launcher import Joining, RestartingLauncher
from ..launch.local import (
    START_SECONDS,
    LocalWorker,
    local_worker_names,
    start_local_workers,
    stop_local_workers,
    threads_per_process,
)
from ..model.allowed_imports import Allowed
from ..protocol import messages as m
from ..transport.address import Address
from ..transport.channel import Channel
from ..transport.compatibility import Identity
from ..transport.deadlines import Deadlines
from ..transport.tls import Credentials
from ..transport.token import Token, find_token_file
from ..worker_sources import Launcher
from .listed_workers import ListedWorkers
from .member import Source


class _Relaunching:
    """The door of a launcher; it starts an ended worker again when the run looks for it."""

    def __init__(self, door: Door, launcher: RestartingLauncher) -> None:
        self._door = door
        self._launcher = launcher

    def names(self) -> Sequence[str]:
        return self._door.names()

    def admit(self, name: str, session_name: str) -> tuple[Channel, m.Welcome, Address]:
        try:
            return self._door.admit(name, session_name)
        except WorkerUnreachable:
            if said := self._launcher.start_again(name):
                rank_zero_info(said)
            raise

    def admit_beside(self, address: Address, session_name: str) -> tuple[Channel, m.Welcome]:
        return self._door.admit_beside(address, session_name)


class LocalWorkers(ListedWorkers):
    """Starts worker processes on this machine, and ends them.

    Args:
        count: How many.
    """

    restart = ()
    least_seconds = START_SECONDS

    def __init__(self, count: int) -> None:
        super().__init__(local_worker_names(count), None, Lookout)
        self._local: list[LocalWorker] = []
        self._threads_before: int | None = None

    @override
    def _reached(
        self, names: Sequence[str], imports: set[str], device: torch.device
    ) -> tuple[Mapping[str, Address], Credentials | None, Source | None]:
        if names and not self._local:
            self._start(devices_beside(device, len(self._names)), imports)
        addresses = {worker.name: worker.address for worker in self._local}
        return addresses, self._local[-1].credentials if self._local else None, None

    @override
    def end(self, deadlines: Deadlines) -> None:
        """End the started processes. May be called twice."""
        super().end(deadlines)
        local, self._local = self._local, []
        stop_local_workers(local, deadlines)
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None

    def _start(self, devices: Sequence[str], imports: set[str]) -> None:
        """Start local workers, wait until they are ready, and share the cores with them."""
        threads = threads_per_process(len(devices) + 1)
        self._local = start_local_workers(devices, threads, Allowed.just(imports))
        if "OMP_NUM_THREADS" not in os.environ:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(threads)
        for worker in self._local:
            worker.wait_until_ready()  # it says so once


class AnnouncedWorkers(ListedWorkers):
    """Knows the workers announced on the local network with the token."""

    @override
    def find(
        self, device: torch.device, deadlines: Deadlines, named: Sequence[str] = ()
    ) -> list[str]:
        """Search for workers, once for each run.

        Raises:
            DiscoveryError: If a search is not possible here, or finds zero workers.
            TokenError: If the token cannot be used.
        """
        if not self._found:
            identity = Identity(equipment_here(device), self._credentials())
            search = find_workers(find_token_file(self._token_file), identity, deadlines)
            search.check_not_empty()
            shown = ", ".join(str(worker) for worker in search.workers)
            rank_zero_info(f"workers found within {search.seconds:g} s: {shown}")
            for sentence in search.left_out:
                rank_zero_info(f"left out: {sentence}")
            self._found = {str(worker.address): worker.address for worker in search.workers}
        return super().find(device, deadlines, named)


class LaunchedWorkers(ListedWorkers):
    """Knows the workers of a launcher by their own names; they dial this process.

    Args:
        launcher: Starts the workers.
        token_file: The file of the token, if the user named one.
    """

    def __init__(self, launcher: Launcher, token_file: str | Path | None) -> None:
        super().__init__((), token_file, Lookout)
        self.restart = ListedWorkers.restart if isinstance(launcher, Joining) else ()
        self._launcher = launcher
        self._door: Door | None = None

    @override
    def find(
        self, device: torch.device, deadlines: Deadlines, named: Sequence[str] = ()
    ) -> list[str]:
        """Start the workers, wait for them, and choose among the arriving ones, once for each run.

        Raises:
            JoinError: If too few workers join in time.
            TokenError: If the token cannot be used.
            WorkerError: If workers cannot be started, or cannot dial this process.
        """
        if self._found:
            return super().find(device, deadlines, named)
        launcher = self._launcher
        token = Token.new() if launcher.brings_token else None
        credentials = self._credentials() if token is None else Credentials(token)
        identity = Identity(equipment_here(device), credentials)
        where = Address.parse(launcher.listen)
        self._door = Door(where, identity, deadlines, launcher.least, named, rank_zero_info)
        try:
            launcher.start(self._door.address, token)
            self._door.wait(launcher.wait_seconds, launcher.faults)
            self._found = self._door.begin(launcher.most)
        except BaseException:
            self.end(deadlines)
            raise
        return super().find(device, deadlines, named)

    @override
    def waiting(self, used: Collection[str], num_members: int) -> list[str]:
        if self._door is None:
            return []
        most = self._launcher.most
        return self._door.spares(used, math.inf if most is None else most - num_members)

    @override
    def note_members(self, names: Collection[str]) -> None:
        """Note the workers of the run, for the door's reports to later workers."""
        if self._door is not None:
            self._door.note_members(names)

    @override
    def end(self, deadlines: Deadlines) -> None:
        """End the started workers, and close the door."""
        super().end(deadlines)
        door, self._door = self._door, None
        if door is not None:
            door.close()
        self._launcher.stop()

    @override
    def _reached(
        self, names: Sequence[str], imports: set[str], device: torch.device
    ) -> tuple[Mapping[str, Address], Credentials | None, Source | None]:
        if self._door is not None and isinstance(self._launcher, RestartingLauncher):
            return self._found, None, _Relaunching(self._door, self._launcher)
        return self._found, None, self._door
