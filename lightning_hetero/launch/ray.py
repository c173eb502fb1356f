"""Workers placed by Ray: an actor in each bundle of a placement group starts a worker.

    driver ── start ──▶ actor in bundle 0 ── stdin ──▶ lightning-hetero worker --join …
       │                actor in bundle 1 ── stdin ──▶ …
       └── door ◀────────────── each worker dials ─────────┘

Ray places and restarts; tensors and state stay out of it. A worker ends with its actor. The actor
starts an ended worker again. If a node is lost, Ray starts its actors again on nodes with room for
their bundles. If there is no room for a bundle, Ray's autoscaler adds nodes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import PlanError, WorkerError
from ..optional import import_extra
from ..transport.address import Address
from ..transport.token import Token
from .launcher import check_wishes

# If the coordinator is gone and the actor lives on, the worker ends by itself after this time.
_REJOIN_SECONDS = 60
_CONNECT_SECONDS = 10.0
# Ray starts a cluster of its own for these, and the workers would all be here.
_OWN_CLUSTER = (None, "", "local")
_NO_ANSWER = (ConnectionError, RuntimeError, ValueError, OSError)
# An actor asks for these resources by arguments of their own.
_ARGUMENTS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}


@dataclass
class RayWorkers:
    """Starts a worker in each of Ray's bundles of resources, and ends the workers with the run.

    Plans call the workers ``ray-0``, ``ray-1``, …, in the order of the bundles. The nodes need this
    package, in Ray's Python or in ``python``, and the token's file.

    Args:
        bundles: The resources of each worker, such as ``[{"GPU": 1}] * 4``. Ray places the first
            ``least`` of them together, and each of the others as soon as it fits.
        address: The cluster as for ``ray.init``; ``"auto"`` is the cluster of this machine. A
            missing cluster is an error: the run does not start a new one.
        python: The Python with this package on the nodes; by default Ray's own.
        options: More options of ``lightning-hetero worker``, such as ``["--allow", "my_layers"]``.
        join: The ``host:port`` at which the nodes reach this process; by default Ray's address of
            this machine.
        listen: Where this process waits for the workers, as ``host:port``; port 0 takes a free
            port.
        least: How many workers the run needs; 0 for all.
        most: How many workers the run takes; by default all.
        wait_seconds: How long to wait for them, and for new nodes of Ray.

    Raises:
        PlanError: If an argument is invalid.
    """

    bundles: list[dict[str, float]]
    address: str = "auto"
    python: str | None = None
    options: list[str] = field(default_factory=list)
    join: str | None = None
    listen: str = "0.0.0.0:0"
    least: int = 0
    most: int | None = None
    wait_seconds: float = 600.0
    brings_token: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.bundles or not all(self.bundles):
            raise PlanError(
                f"The argument `bundles` of RayWorkers is {self.bundles!r}; name the resources of "
                "each worker, such as [{'GPU': 1}] * 4."
            )
        if self.address in _OWN_CLUSTER:
            raise PlanError(
                f"The argument `address` of RayWorkers is {self.address!r}: with it, Ray would "
                'start a cluster on this machine alone; write "auto" or the address of a cluster.'
            )
        self.least = self.least or len(self.bundles)
        check_wishes(self, len(self.bundles), self.join)
        self._placed: _Placed | None = None

    def start(self, join: Address, token: Token | None) -> None:
        """Ask Ray for the bundles; their workers start as soon as Ray has placed them.

        Raises:
            WorkerError: If Ray is not installed, or the cluster does not answer.
        """
        ray = import_extra("ray", "ray", "RayWorkers need it", WorkerError)
        is_ours = not ray.is_initialized()
        if is_ours:
            self._connect(ray)
        self._placed = _Placed(ray, is_ours)
        try:
            where = Address.parse(self.join) if self.join else _reachable_in(ray, join)
            self._start_actors(self._placed, where)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the actors, and with them the workers. May be called twice."""
        placed, self._placed = self._placed, None
        if placed is not None:
            placed.end()

    def faults(self, is_late: bool) -> list[str]:
        """A sentence for each failed worker, and, if it is late, on bundles without a node.

        The failed workers are reported if fewer than ``least`` workers are left.
        """
        if self._placed is None:
            return []
        failed = [words for actor in self._placed.actors if (words := self._placed.ask(actor))]
        if not is_late:
            return failed if len(self.bundles) - len(failed) < self.least else []
        return [*failed, *self._placed.without_node()]

    def _connect(self, ray: Any) -> None:
        try:
            _check_answers(self.address)
            ray.init(address=self.address, log_to_driver=False, configure_logging=False)
        except _NO_ANSWER as error:
            raise WorkerError(
                f"No Ray cluster answers at {self.address!r}: {error}. Start one with `ray start "
                "--head` on one machine and `ray start --address=...` on the others, or name the "
                "address of a cluster with `address=`."
            ) from error

    def _start_actors(self, placed: _Placed, join: Address) -> None:
        """Ask Ray for an actor in each bundle; the actor starts a worker there."""
        ray = placed.ray
        node_class = ray.remote(_actor_class())
        strategies = import_extra("ray.util.scheduling_strategies", "ray", "RayWorkers need it")
        together, others = self.bundles[: self.least], self.bundles[self.least :]
        for bundles in (together, *([each] for each in others)):
            group = ray.util.placement_group(bundles, strategy="SPREAD")
            placed.groups.append(group)
            for number, bundle in enumerate(bundles):
                in_bundle = strategies.PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=number
                )
                name = f"ray-{len(placed.actors)}"
                actor = node_class.options(
                    **_needs(bundle),
                    scheduling_strategy=in_bundle,
                    max_restarts=-1,
                    max_task_retries=0,
                ).remote(self.python, self._words(join, name))
                placed.actors.append(_Actor(name, actor, actor.failure.remote()))

    def _words(self, join: Address, name: str) -> list[str]:
        words = ["-m", "lightning_hetero", "worker", "--join", str(join), "--name", name]
        words += ["--stop-with-stdin", "--rejoin-seconds", str(_REJOIN_SECONDS)]
        return [*words, "--log-level", "WARNING", *self.options]


@dataclass
class _Actor:
    """An actor, and its pending answer to the question why its worker has failed."""

    name: str
    handle: Any
    answer: Any


@dataclass(frozen=True)
class _Placed:
    """A run's part in Ray.

    Args:
        ray: The library.
        is_ours: Whether this run has connected to the cluster, and must disconnect.
        groups: The placement groups.
        actors: One for each bundle.
    """

    ray: Any
    is_ours: bool
    groups: list[Any] = field(default_factory=list)
    actors: list[_Actor] = field(default_factory=list)

    def ask(self, actor: _Actor) -> str:
        """Why an actor's worker has failed; empty while the reason is unknown."""
        if not self.ray.wait([actor.answer], timeout=0)[0]:
            return ""
        try:
            why = str(self.ray.get(actor.answer))
        except self.ray.exceptions.ActorUnavailableError:
            why = ""  # its node is lost, and Ray starts it elsewhere
        except self.ray.exceptions.RayError as error:
            why = f"The actor of {actor.name} failed: {str(error).splitlines()[0]}"
        actor.answer = actor.handle.failure.remote()
        return why

    def without_node(self) -> list[str]:
        """A sentence on the bundles without a node."""
        tables = [self.ray.util.placement_group_table(group) for group in self.groups]
        waiting = [table for table in tables if table["state"] != "CREATED"]
        if not waiting:
            return []
        bundles = [bundle for table in waiting for bundle in table["bundles"].values()]
        return [
            f"Ray has not placed the bundles {bundles}: the cluster has "
            f"{self.ray.cluster_resources()}, and {self.ray.available_resources()} are free. Add "
            "nodes with the missing resources, or ask for less with `bundles`."
        ]

    def end(self) -> None:
        """End all actors and groups; the loss of the cluster has ended them already."""
        try:
            for actor in self.actors:
                with contextlib.suppress(*_NO_ANSWER):
                    self.ray.kill(actor.handle, no_restart=True)
            for group in self.groups:
                with contextlib.suppress(*_NO_ANSWER):
                    self.ray.util.remove_placement_group(group)
        finally:
            if self.is_ours:
                self.ray.shutdown()


def _check_answers(address: str) -> None:
    """Connect to a cluster once, because Ray itself waits for minutes for an absent cluster.

    Raises:
        OSError: If the cluster does not answer.
    """
    with contextlib.suppress(PlanError):  # "auto" or a name that only Ray knows
        where = Address.parse(address.removeprefix("ray://"))
        socket.create_connection((where.host, where.port), _CONNECT_SECONDS).close()


def _reachable_in(ray: Any, join: Address) -> Address:
    """The address of this process for the nodes."""
    if join.host not in ("0.0.0.0", "::"):  # noqa: S104 - compared, not listened on
        return join
    return Address(ray.util.get_node_ip_address(), join.port)


def _needs(bundle: Mapping[str, float]) -> dict[str, Any]:
    """The arguments for an actor to take all of its bundle."""
    named = {_ARGUMENTS[name]: count for name, count in bundle.items() if name in _ARGUMENTS}
    others = {name: count for name, count in bundle.items() if name not in _ARGUMENTS}
    return {"num_cpus": 0, **named, "resources": others}


def _actor_class() -> type:
    """The class of the actors.

    Ray copies a class of a function by value, so Ray's Python on the nodes does not need this
    package. The class may use the standard library only.
    """

    class WorkerOnNode:
        """Keeps a worker running beside itself; the worker ends with this process."""

        def __init__(self, python: str | None, words: list[str]) -> None:
            self._command = [python or sys.executable, *words]
            self._failure = ""
            threading.Thread(target=self._keep, daemon=True).start()

        def failure(self) -> str:
            """Wait until the worker has failed twice in a row, and return the reason."""
            while not self._failure:
                time.sleep(0.2)
            return self._failure

        def _keep(self) -> None:
            failures = 0
            while True:
                began = time.monotonic()
                why = self._run()
                # Restart a killed worker; report a worker that never works.
                failures = 1 if time.monotonic() - began > 60 else failures + 1
                if failures > 1:
                    self._failure = why
                time.sleep(0.5)

        def _run(self) -> str:
            """Run a worker until it ends; returns why it has ended."""
            shown = " ".join(self._command[:4])
            with tempfile.TemporaryFile() as printed:
                try:
                    worker = subprocess.Popen(  # noqa: S603 - the user's own words
                        self._command,
                        stdin=subprocess.PIPE,
                        stdout=printed,
                        stderr=subprocess.STDOUT,
                    )
                except OSError as error:
                    return f"`{shown}` cannot be started on {os.uname().nodename}: {error}."
                # An empty line: the worker reads its token from a file.
                with contextlib.suppress(OSError):
                    worker.stdin.write(b"\n")  # type: ignore[union-attr]
                    worker.stdin.flush()  # type: ignore[union-attr]
                code = worker.wait()
                printed.seek(0, os.SEEK_END)
                printed.seek(max(0, printed.tell() - 800))
                said = " ".join(printed.read().decode(errors="replace").split())
                where = os.uname().nodename
                return f"`{shown}` ended on {where} with status {code}. It printed: {said}"

    return WorkerOnNode
