"""What the first-batch check takes, in samples that run forward and in CPU time, and what the audit
of a later batch takes, in bytes over the link too.

A Llama trains for a few steps on one worker. The check is timed where it runs: the CPU time of both
processes, beside that of a forward of one batch on one device and that of a training step. The twin
test, which is a part of it, is timed by itself too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from benchmarks.overhead.operators import cpu_seconds
from benchmarks.processes import (
    WorkerProcess,
    be_quiet,
    machine,
    on_core,
    pin,
    two_cores,
    wide_console,
    worker_process,
)
from benchmarks.training import Decoder, Sequences, fit, random_tokens
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.coordinator.batch_trials import TriedBatches
from lightning_hetero.coordinator.handover import HandOvers
from lightning_hetero.coordinator.layers import RemoteLayers
from lightning_hetero.coordinator.optimizers import RemoteOptimizer, RemoteOptimizers
from lightning_hetero.coordinator.steps import RemoteStages
from lightning_hetero.guard.audit import Audit
from lightning_hetero.guard.first_batch import FirstBatchCheck
from lightning_hetero.guard.step_guard import TwinCheck
from lightning_hetero.model.placeholders import tensors_in

# Where each check runs, by the mode.
CHECKS: dict[str, tuple[type, str]] = {
    "step": (FirstBatchCheck, "run"),
    "step, twins": (TwinCheck, "run"),
    "boundary": (TriedBatches, "pieces"),
    "boundary, twins": (HandOvers, "_compare_twins"),
}
TWINS = TwinCheck.run
NUM_LAYERS = 8
NUM_LOCAL_LAYERS = 3
BATCH_SIZE = 16
NUM_MICROBATCHES = 8
SEQUENCE_LENGTH = 128
CONFIG = LlamaConfig(
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=4,
    vocab_size=2048,
    use_cache=False,
)


@dataclass
class Taken:
    """CPU seconds of both processes, and samples that went to the worker meanwhile."""

    cpu_seconds: float = 0.0
    samples: int = 0


@contextmanager
def counting(taken: Taken) -> Iterator[None]:
    """Inside, the samples that go to the worker are counted."""
    original = RemoteStages.send_forward

    def counted(stages: RemoteStages, key: Any, hidden: Tensor, *rest: Any, **options: Any) -> None:
        taken.samples += hidden.shape[0]
        original(stages, key, hidden, *rest, **options)

    with patch.object(RemoteStages, "send_forward", counted):
        yield


@contextmanager
def watching(owner: type, name: str, worker: WorkerProcess, taken: Taken) -> Iterator[None]:
    """Inside, the first call of a method is measured."""
    original: Callable[..., Any] = getattr(owner, name)

    def measured(*args: Any, **kwargs: Any) -> Any:
        before = time.process_time() + cpu_seconds(worker.pid)
        try:
            with counting(taken) if not taken.cpu_seconds else nullcontext():
                return original(*args, **kwargs)
        finally:
            after = time.process_time() + cpu_seconds(worker.pid)
            taken.cpu_seconds = taken.cpu_seconds or after - before

    with patch.object(owner, name, measured):
        yield


def train(mode: str, worker: WorkerProcess, check: str, num_steps: int) -> tuple[Taken, float]:
    """What the check took, and the CPU seconds of a step."""
    tokens = random_tokens(BATCH_SIZE * num_steps, SEQUENCE_LENGTH, CONFIG.vocab_size)
    stages = [
        StagePlan(["coordinator"], (0, NUM_LOCAL_LAYERS)),
        StagePlan([worker.address], (NUM_LOCAL_LAYERS, NUM_LAYERS)),
    ]
    strategy = HeteroPipelineStrategy(
        [worker.address],
        Plan(stages, micro_batches=NUM_MICROBATCHES),
        micro_batching=mode.partition(",")[0],  # type: ignore[arg-type]
        check_first_batch=check,  # type: ignore[arg-type]
    )
    module, taken = Decoder(CONFIG), Taken()
    worker_before = cpu_seconds(worker.pid)
    with watching(*CHECKS[mode], worker, taken):
        fit(module, DataLoader(Sequences(tokens), batch_size=BATCH_SIZE), strategy)
    worker_seconds = cpu_seconds(worker.pid) - worker_before - taken.cpu_seconds / 2
    return taken, median(module.step_cpu_seconds) + worker_seconds / num_steps


@dataclass
class Audited(Taken):
    """What an audit has taken: the bytes that the worker has sent for it, too."""

    sent_bytes: int = 0
    is_running: bool = False

    def weighing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A function that fetches tensors, with its results weighed while an audit runs."""

        def weigh(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            if self.is_running:
                self.sent_bytes += sum(tensor.nbytes for tensor in tensors_in(found))
            return found

        return weigh

    def measuring(
        self, original: Callable[..., None], worker: WorkerProcess, taken: Taken
    ) -> Callable[..., None]:
        """A part of the audit that is measured; ``taken`` counts the samples of the run."""

        def measure(*args: Any, is_first: bool = False, **kwargs: Any) -> None:
            if is_first:  # the twin test before the first step
                original(*args, is_first=is_first, **kwargs)
                return
            if original is TWINS:
                kwargs["is_first"] = False
            before, samples = time.process_time() + cpu_seconds(worker.pid), taken.samples
            self.is_running = True
            original(*args, **kwargs)
            self.is_running = False
            self.cpu_seconds += time.process_time() + cpu_seconds(worker.pid) - before
            self.samples += taken.samples - samples

        return measure


def audit(worker: WorkerProcess) -> tuple[Audited, float]:
    """What the audit of the 10th batch has taken, and the CPU seconds of a step."""
    found, run = Audited(), Taken()
    fetching: list[tuple[Any, str]] = [
        (RemoteLayers, "fetch"),
        (RemoteOptimizer, "remote_state"),
        (RemoteOptimizers, "fetch_gradients"),
    ]
    with ExitStack() as patches:
        for owner, name in fetching:
            weighing = found.weighing(getattr(owner, name))
            patches.enter_context(patch.object(owner, name, weighing))
        for owner, name in ((Audit, "before_step"), (Audit, "after_step"), (TwinCheck, "run")):
            measuring = found.measuring(getattr(owner, name), worker, run)
            patches.enter_context(patch.object(owner, name, measuring))
        patches.enter_context(counting(run))
        _, step = train("step", worker, "stop", 10)
    return found, step


def forward_seconds() -> float:
    """The CPU time of a forward of one batch without gradients on one device."""
    model = Decoder(CONFIG).model
    tokens = random_tokens(BATCH_SIZE, SEQUENCE_LENGTH, CONFIG.vocab_size)
    times = []
    for _ in range(5):
        start = time.process_time()
        with torch.no_grad():
            model(input_ids=tokens, labels=tokens)
        times.append(time.process_time() - start)
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of each mode (default: 5)")
    parser.add_argument("--steps", type=int, default=4, help="of each run (default: 4)")
    options = parser.parse_args()
    be_quiet()
    first, second = two_cores()
    pin(first)
    console = wide_console()
    console.print(machine())
    table = Table("mode", "samples, in batches", "/ forward of a batch", "/ step")
    with worker_process(on_core(second)) as worker:
        for mode in CHECKS:
            ratios, shares, counts = [], [], []
            for _ in range(options.rounds):
                forward = forward_seconds()
                plain, step = train(mode, worker, "off", options.steps)
                taken, _ = train(mode, worker, "stop", options.steps)
                counts.append((taken.samples - plain.samples) / BATCH_SIZE)
                ratios.append((taken.cpu_seconds - plain.cpu_seconds) / forward)
                shares.append(ratios[-1] * forward / step)
            numbers = median(counts), median(ratios), median(shares)
            table.add_row(mode, *(f"{number:.2f}" for number in numbers))
        found, step = audit(worker)
    console.print(table)
    console.print(
        f"the audit of one layer at the 10th batch: {found.sent_bytes / 2**20:.2f} MiB from the "
        f"worker, {found.samples / BATCH_SIZE:.2f} batches of samples, "
        f"{found.cpu_seconds / step:.2f} of a step's CPU time"
    )


if __name__ == "__main__":
    main()
