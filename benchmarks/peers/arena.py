"""Runs one peer once: two processes, one for each core, the second one slowed."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.job import Job, Role, heard
from benchmarks.peers.links import LOOPBACK, Link, link
from benchmarks.peers.throttle import How, slowed
from benchmarks.peers.workload import NUM_LAYERS, SMALL, WORKLOADS
from benchmarks.processes import environment, memory_bytes, on_core, worker_process

EVEN = "torch 1F1B, even split"
TORCH = ("torch 1F1B", EVEN, "torch GPipe")
DDP, UNEQUAL_DDP = "torch DDP", "torch DDP, unequal"
CUT, REPLICAS = "hetero, cut layers", "hetero, replicas"
SPLIT_REPLICAS = "hetero, replicas, optimizer split"
BESIDE = "hetero, replicas, a worker beside"
SHARING = (REPLICAS, SPLIT_REPLICAS, BESIDE)
"""Those with one stage on both cores."""
HETERO = (
    *("hetero", CUT, *SHARING),
    *("hetero, coordinator first", "hetero, 16-bit wire"),
)
PLANNED = ("hetero", CUT)
"""Those that take a plan, if one is given."""

SHARED = " + "
"""Between the holders of a stage, where a plan is told in words."""


@dataclass(frozen=True)
class Setting:
    """What the peers run on.

    Args:
        name: In tables.
        share: Of its core that the second process has.
        rate: Of the link between the two, as `tc` writes it; None for loopback.
    """

    name: str
    share: float = 1
    rate: str | None = None


@dataclass(frozen=True)
class Memory:
    """The peak of a process, and what it had before there was a model."""

    peak_bytes: int
    baseline_bytes: int


@dataclass(frozen=True)
class Outcome:
    """What one run was like.

    Args:
        step_seconds: Of every step but the first.
        losses: Of every step.
        tokens_per_step: That it trained on.
        split: Layers (micro-batches) that the first process had.
        memory: Of the first process and, if there is one, of the second.
        plan: Of the strategy, in words.
    """

    step_seconds: list[float]
    losses: list[float]
    tokens_per_step: int
    split: int
    memory: list[Memory]
    plan: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Over the median step."""
        return self.tokens_per_step / median(self.step_seconds)


@dataclass(frozen=True)
class Arena:
    """Where peers run.

    Args:
        cores: Of the first and of the second process.
        setting: Which speed and which link.
        how: How the second core is slowed.
        num_steps: Of each run.
        micro_batches: Of each batch.
        link: Between the two.
        plan: Of the strategy, where not that of a split.
        in_flight: Of the strategy.
        trains: The name of the workload.
    """

    cores: tuple[int, int]
    setting: Setting
    how: How
    num_steps: int
    micro_batches: int
    link: Link = LOOPBACK
    plan: str | None = None
    in_flight: int | None = None
    trains: str = SMALL

    @contextmanager
    def linked(self) -> Iterator[Arena]:
        """With the setting's link made, and removed at the end."""
        if self.setting.rate is None:
            yield self
        else:
            with link(self.setting.rate) as made:
                yield dataclasses.replace(self, link=made)

    def alone(self, peer: str, core: int, num_layers: int = NUM_LAYERS) -> Outcome:
        """Run a peer of one process: 0 the fast core, 1 the slowed one."""
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            job = self._job(peer, num_layers, folder, num_layers)
            process = self._start(stack, job, core)
            if core == 1:
                self._slow(stack, process.wait_for("ready"))
            facts = process.wait_for("losses")
            process.finish()
        return self._outcome([facts])

    def both_alone(self, peer: str) -> list[Outcome]:
        """Run a peer of one process on each core at the same time: what two processes have of this
        machine that share nothing but its memory."""
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda core: self.alone(peer, core), (0, 1)))

    def run(self, peer: str, split: int) -> Outcome:
        """Run a peer of two processes."""
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            job = self._job(peer, split, folder)
            if peer in HETERO:
                return self._run_hetero(stack, job)
            if peer in (*TORCH, DDP, UNEQUAL_DDP):
                return self._run_torch(stack, job)
            return self._run_server(stack, job)

    def _run_hetero(self, stack: ExitStack, job: Job) -> Outcome:
        host = self.link.addresses[1]
        worker = stack.enter_context(worker_process(self._before(1), host))
        baseline_bytes = memory_bytes(worker.pid, "VmRSS")
        self._slow(stack, {"ready": worker.worker_pid})
        job = dataclasses.replace(job, worker=worker.address)
        if job.peer == BESIDE:
            beside = stack.enter_context(worker_process(self._before(0), self.link.addresses[0]))
            job = dataclasses.replace(job, beside=beside.address)
        process = self._start(stack, job, 0)
        facts = process.wait_for("losses")
        second = {
            "peak_bytes": memory_bytes(worker.pid, "VmHWM"),
            "baseline_bytes": baseline_bytes,
        }
        process.finish()
        return self._outcome([facts, second])

    def _run_torch(self, stack: ExitStack, job: Job) -> Outcome:
        second = self._start(stack, job, 1)
        self._slow(stack, second.wait_for("ready"))
        first = self._start(stack, job, 0)
        facts = [first.wait_for("split"), second.wait_for("split")]
        first.finish()
        second.finish()
        return self._outcome(facts)

    def _run_server(self, stack: ExitStack, job: Job) -> Outcome:
        process = self._start(stack, job, 0)
        self._slow(stack, process.wait_for("ready"))
        facts = process.wait_for("losses")
        process.finish()
        return self._outcome([facts, facts["second_memory"]])

    def _slow(self, stack: ExitStack, ready: dict[str, Any]) -> None:
        pid, core = ready["ready"], self.cores[1]
        stack.enter_context(slowed(pid, self.setting.share, self.how, core))

    def _job(self, peer: str, split: int, folder: str, num_layers: int = NUM_LAYERS) -> Job:
        return Job(
            peer=peer,
            role="first",
            split=split,
            num_layers=num_layers,
            num_steps=self.num_steps,
            micro_batches=self.micro_batches,
            folder=folder,
            interface=self.link.interface,
            addresses=self.link.addresses,
            before_second=self._before(1),
            plan=self.plan if peer in PLANNED else None,
            in_flight=self.in_flight,
            trains=self.trains,
        )

    def _start(self, stack: ExitStack, job: Job, end: int) -> _Process:
        role: Role = "second" if end == 1 else "first"
        told = dataclasses.replace(job, role=role).write()
        command = [*self._before(end), sys.executable, "-m", "benchmarks.peers.child", told]
        return stack.enter_context(_running(command, Path(job.folder, f"{role}.log")))

    def _before(self, end: int) -> list[str]:
        return [*self.link.before(end), *on_core(self.cores[end])]

    def _outcome(self, facts: list[dict[str, Any]]) -> Outcome:
        """What the processes tell together."""
        together = {key: value for each in reversed(facts) for key, value in each.items()}
        memory = [Memory(each["peak_bytes"], each["baseline_bytes"]) for each in facts]
        num_tokens = WORKLOADS[self.trains].tokens_per_step(self.micro_batches)
        seconds, losses = together["step_seconds"], together["losses"]
        plan = together.get("plan", "")
        return Outcome(seconds, losses, num_tokens, together["split"], memory, plan)


class _Process:
    """A process that tells what it does."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def wait_for(self, fact: str) -> dict[str, Any]:
        """The next facts in which this one is.

        Raises:
            RuntimeError: If the process ends before, with what it wrote last.
        """
        for line in self._process.stdout or ():
            facts = heard(line)
            if fact in facts:
                return facts
        raise self._failure()

    def finish(self) -> None:
        """Wait until it has ended by itself."""
        self._process.communicate()
        if self._process.returncode:
            raise self._failure()

    def _failure(self) -> RuntimeError:
        code = self._process.wait()
        return RuntimeError(f"ended with code {code}: {self._log.read_text()[-3000:]}")


@contextmanager
def _running(command: list[str], log: Path) -> Iterator[_Process]:
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment()
        )
    try:
        yield _Process(process, log)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
