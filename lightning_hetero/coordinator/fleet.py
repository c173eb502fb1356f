"""The workers of a run: local processes, machines that are listening, or workers that dial us."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from ..devices.description import equipment_here
from ..devices.device import devices_beside
from ..discovery.find import Lookout, find_workers
from ..errors import WorkerUnreachable
from ..events import Observers
from ..launch.cluster import ClusterFile, read_cluster
from ..launch.join import Door, open_door
from ..launch.launcher import Joining, Launcher, RestartingLauncher
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
from ..transport.tls import Credentials, credentials_of
from ..transport.token import Token, find_token_file
from .member import Source
from .session import Coordinator, Listening


class _Relaunching:
    """The door of a launcher that starts an ended worker again when the run looks for it."""

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


class Fleet:
    """Knows the workers by the names that plans use.

    Args:
        workers: That many local processes; a list of ``"host:port"``; ``"auto"`` for those that
            are announced on the local network; a cluster file; or a launcher, whose workers dial
            this process.
        token_file: The file of the token, if the user named one. The token itself is read for each
            run and not kept, so that no copy of this object contains it.
    """

    def __init__(
        self,
        workers: int | Sequence[str] | Literal["auto"] | Launcher | ClusterFile,
        token_file: str | Path | None,
    ) -> None:
        self._start_command = ""
        if isinstance(workers, ClusterFile):
            self._start_command = f"lightning-hetero up {shlex.quote(workers.path)}"
            cluster = read_cluster(workers.path)
            workers, token_file = cluster.addresses, token_file or cluster.token_file
        self._workers = workers
        self._found: dict[str, Address] = {}
        self._token_file = token_file
        self._local: list[LocalWorker] = []
        self._door: Door | None = None
        self._lookout: Lookout | None = None
        self._threads_before: int | None = None

    @property
    def restart(self) -> list[str]:
        """What the user has to do before another run can use the workers, as words of a list."""
        is_ours = isinstance(self._workers, Launcher) and not isinstance(self._workers, Joining)
        return [] if isinstance(self._workers, int) or is_ours else ["start the worker again"]

    def find(
        self, device: torch.device, deadlines: Deadlines, named: Sequence[str] = ()
    ) -> list[str]:
        """The workers' names in plans, once for each run.

        With ``"auto"`` it searches for workers; with a launcher it waits for them.

        Args:
            device: The device that this process computes on.
            deadlines: How long each kind of waiting may take.
            named: The workers that the user's plan names, if there is one.

        Raises:
            DiscoveryError: If no worker is found, or no search is possible here.
            JoinError: If too few workers join in time.
            TokenError: If the token cannot be used.
            WorkerError: If workers cannot be started, or cannot dial this process.
        """
        if isinstance(self._workers, int):
            return local_worker_names(self._workers)
        if isinstance(self._workers, Launcher):
            if not self._found:
                self._found = self._gather(self._workers, device, deadlines, named)
        elif self._workers != "auto":
            return list(self._workers)
        elif not self._found:
            self._found = self._search(device, deadlines)
        return list(self._found)

    def connect(
        self,
        names: Sequence[str],
        imports: set[str],
        device: torch.device,
        deadlines: Deadlines,
        observers: Observers | None = None,
    ) -> Coordinator:
        """Connect to some of the workers. If local ones are wanted, all of them are started.

        Args:
            names: Some of the names.
            imports: The modules that local workers may import to build layers.
            device: The device that this process computes on.
            deadlines: How long each kind of waiting may take.
            observers: Read the events of the run.

        Raises:
            WorkerError: If a local worker cannot be started, or a worker does not answer or
                refuses.
            TokenError: If the token cannot be used.
        """
        identity = Identity(equipment_here(device))
        source: Source | None = None
        if isinstance(self._workers, int):
            if names and not self._local:
                self._start(devices_beside(device, self._workers), imports)
            for worker in self._local:
                identity = dataclasses.replace(identity, credentials=worker.credentials)
            addresses = {worker.name: worker.address for worker in self._local}
            seconds = max(deadlines.connect_seconds, START_SECONDS)
            deadlines = dataclasses.replace(deadlines, connect_seconds=seconds)
        elif self._door is not None:
            addresses, source = self._found, self._door
            if isinstance(self._workers, RestartingLauncher):
                source = _Relaunching(self._door, self._workers)
        else:
            named = self._workers if isinstance(self._workers, (list, tuple)) else ()
            addresses = self._found or {text: Address.parse(text) for text in named}
            identity = dataclasses.replace(identity, credentials=self._credentials())
        workers = [(name, addresses[name]) for name in names]
        source = source or Listening(addresses, deadlines, identity)
        try:
            coordinator = Coordinator(workers, deadlines, identity, device, source, observers)
        except WorkerUnreachable as error:
            if not self._start_command:
                raise
            raise WorkerUnreachable(
                f"{error} `{self._start_command}` starts what does not run."
            ) from error
        if self._door is None:
            run = coordinator.connections.run
            self._lookout = Lookout(addresses, deadlines, identity, run)
        return coordinator

    def waiting(self, used: Collection[str], num_members: int) -> list[str]:
        """The names of the workers that could join the run now.

        Args:
            used: The names that the run has.
            num_members: How many workers it has.
        """
        if self._door is not None and isinstance(self._workers, Launcher):
            most = self._workers.most
            return self._door.spares(used, math.inf if most is None else most - num_members)
        return [] if self._lookout is None else self._lookout.free(used)

    def note_members(self, names: Collection[str]) -> None:
        """Note which workers the run has, for what others are told that come."""
        if self._door is not None:
            self._door.note_members(names)

    def end(self, deadlines: Deadlines) -> None:
        """End the processes that were started, and take no worker in any more.

        May be called twice.
        """
        door, self._door = self._door, None
        if door is not None:
            door.close()
        lookout, self._lookout = self._lookout, None
        if lookout is not None:
            lookout.close()
        if isinstance(self._workers, Launcher):
            self._workers.stop()
        local, self._local = self._local, []
        self._found = {}
        stop_local_workers(local, deadlines)
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None

    def _search(self, device: torch.device, deadlines: Deadlines) -> dict[str, Address]:
        identity = Identity(equipment_here(device), self._credentials())
        search = find_workers(find_token_file(self._token_file), identity, deadlines)
        search.check_not_empty()
        shown = ", ".join(str(worker) for worker in search.workers)
        rank_zero_info(f"workers found within {search.seconds:g} s: {shown}")
        for sentence in search.left_out:
            rank_zero_info(f"left out: {sentence}")
        return {str(worker.address): worker.address for worker in search.workers}

    def _gather(
        self, launcher: Launcher, device: torch.device, deadlines: Deadlines, named: Sequence[str]
    ) -> dict[str, Address]:
        """Start the workers of a launcher, wait for them, and choose among those that come."""
        token = Token.new() if launcher.brings_token else None
        credentials = self._credentials() if token is None else Credentials(token)
        identity = Identity(equipment_here(device), credentials)
        where = Address.parse(launcher.listen)
        self._door = open_door(where, identity, deadlines, launcher.least, named, rank_zero_info)
        try:
            launcher.start(self._door.address, token)
            self._door.wait(launcher.wait_seconds, launcher.faults)
            return self._door.begin(launcher.most)
        except BaseException:
            self.end(deadlines)
            raise

    def _credentials(self) -> Credentials | None:
        return credentials_of(find_token_file(self._token_file))

    def _start(self, devices: Sequence[str], imports: set[str]) -> None:
        """Start local workers, wait until they are ready, and share the cores with them."""
        threads = threads_per_process(len(devices) + 1)
        self._local = start_local_workers(devices, threads, Allowed.just(imports))
        if "OMP_NUM_THREADS" not in os.environ:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(threads)
        for worker in self._local:
            worker.wait_until_ready()  # it says so once
