"""The workers of a run: local processes that it starts and ends, or machines that are listening."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from ..devices.description import equipment_here
from ..devices.device import devices_beside
from ..discovery.find import find_workers
from ..launch.local import (
    START_SECONDS,
    LocalWorker,
    local_worker_names,
    start_local_workers,
    stop_local_workers,
    threads_per_process,
)
from ..model.allowed_imports import Allowed
from ..transport.address import Address
from ..transport.deadlines import Deadlines
from ..transport.handshake import Identity
from ..transport.tls import Credentials, credentials_of
from ..transport.token import find_token_file
from .session import Coordinator


class Fleet:
    """Knows the workers by the names that plans use.

    Args:
        workers: That many local processes, a list of ``"host:port"``, or ``"auto"`` for those that
            are announced on the local network.
        token_file: The file of the token, if the user named one. The token itself is read for each
            run and not kept, so that no copy of this object contains it.
    """

    def __init__(
        self, workers: int | Sequence[str] | Literal["auto"], token_file: str | Path | None
    ) -> None:
        self._workers = workers
        self._found: dict[str, Address] = {}
        self._token_file = token_file
        self._local: list[LocalWorker] = []
        self._threads_before: int | None = None

    @property
    def restart(self) -> list[str]:
        """What the user has to do before another run can use the workers, as words of a list."""
        return [] if isinstance(self._workers, int) else ["start the worker again"]

    def find(self, device: torch.device, deadlines: Deadlines) -> list[str]:
        """The workers' names in plans. With ``"auto"`` it searches for workers once in each run.

        Raises:
            DiscoveryError: If no worker is found, or no search is possible here.
            TokenError: If the token cannot be used.
        """
        if isinstance(self._workers, int):
            return local_worker_names(self._workers)
        if self._workers != "auto":
            return list(self._workers)
        if not self._found:
            self._found = self._search(device, deadlines)
        return list(self._found)

    def connect(
        self, names: Sequence[str], imports: set[str], device: torch.device, deadlines: Deadlines
    ) -> Coordinator:
        """Connect to some of the workers. If local ones are wanted, all of them are started.

        Args:
            names: Some of the names.
            imports: The modules that local workers may import to build layers.
            device: The device that this process computes on.
            deadlines: How long each kind of waiting may take.

        Raises:
            WorkerError: If a local worker cannot be started, or a worker does not answer or
                refuses.
            TokenError: If the token cannot be used.
        """
        identity = Identity(equipment_here(device))
        if isinstance(self._workers, int):
            if names and not self._local:
                self._start(devices_beside(device, self._workers), imports)
            for worker in self._local:
                worker.wait_until_ready()
                identity = dataclasses.replace(identity, credentials=worker.credentials)
            addresses = {worker.name: worker.address for worker in self._local}
            seconds = max(deadlines.connect_seconds, START_SECONDS)
            deadlines = dataclasses.replace(deadlines, connect_seconds=seconds)
        else:
            named = () if self._workers == "auto" else self._workers
            addresses = self._found or {text: Address.parse(text) for text in named}
            identity = dataclasses.replace(identity, credentials=self._credentials())
        workers = [(name, addresses[name]) for name in names]
        return Coordinator(workers, deadlines, identity, device, list(addresses.values()))

    def end(self, deadlines: Deadlines) -> None:
        """End the local processes. May be called twice."""
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

    def _credentials(self) -> Credentials | None:
        return credentials_of(find_token_file(self._token_file))

    def _start(self, devices: Sequence[str], imports: set[str]) -> None:
        """Start local workers, and share the cores with them."""
        threads = threads_per_process(len(devices) + 1)
        self._local = start_local_workers(devices, threads, Allowed.just(imports))
        if "OMP_NUM_THREADS" not in os.environ:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(threads)
