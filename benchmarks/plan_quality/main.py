"""How good plans are: predicted, measured and even steps with a slowed worker; a re-planned run.

Every process has a core of its own: the coordinator, and two workers where there are three cores,
one otherwise. The last worker gets a share of its core. The bound is the sum of the devices' speeds
on the same training: that of one core, measured without workers, for each device by its share; once
with whole batches, once with the micro-batches that the plan has, accumulated as Lightning does.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from benchmarks.peers.throttle import How, best_way, slowed
from benchmarks.processes import be_quiet, machine, on_core, pin, wide_console, worker_process
from benchmarks.training import Decoder, Sequences, fit, random_tokens
from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.callbacks import PipelineProfiler
from lightning_hetero.planner.solver import Wishes, solve

VOCABULARY = 2000
# A step that takes so many times the median before is one of the slowed worker.
SLOWED_FROM = 1.3
REPLAN_MICRO_BATCHES = 16


@dataclass(frozen=True)
class Work:
    """What is trained."""

    config: LlamaConfig
    sequence_length: int
    batch_size: int

    def data(self, num_steps: int, pieces: int = 1) -> DataLoader[Any]:
        """As many batches, or as many pieces of each."""
        tokens = random_tokens(num_steps * self.batch_size, self.sequence_length, VOCABULARY)
        return DataLoader(Sequences(tokens), batch_size=self.batch_size // pieces)


@dataclass(frozen=True)
class Worker:
    """A worker on a core of its own."""

    address: str
    pid: int
    core: int


@dataclass(frozen=True)
class Row:
    """One share of the slowed worker; the median seconds of a step.

    Args:
        bound: By the speed of one core with whole batches.
        bound_in_pieces: By that with the plan's micro-batches.
    """

    share: float
    micro_batches: int
    predicted: float
    even: float
    auto: float
    bound: float
    bound_in_pieces: float


class SlowsDown(pl.Callback):
    """Gives a worker a share of its core from a step on, until the run ends."""

    def __init__(self, worker: Worker, share: float, how: How, at_step: int) -> None:
        self._slowing = slowed(worker.pid, share, how, worker.core)
        self._at_step = at_step
        self._stack = ExitStack()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == self._at_step:
            self._stack.enter_context(self._slowing)

    def teardown(self, *_: object, **__: object) -> None:
        self._stack.close()


class Notices(logging.Handler):
    """After how many steps something was said of drifts, and after how many layers moved."""

    def __init__(self, module: Decoder) -> None:
        super().__init__()
        self._module = module
        self.said: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append((len(self._module.marks), record.getMessage()))


def main() -> None:
    options = arguments()
    be_quiet()
    work = Work(
        LlamaConfig(
            hidden_size=options.hidden_size,
            intermediate_size=3 * options.hidden_size,
            num_hidden_layers=options.layers,
            num_attention_heads=4,
            vocab_size=VOCABULARY,
            use_cache=False,
        ),
        options.sequence_length,
        options.batch_size,
    )
    how = options.how or best_way()
    console = wide_console()
    with cores_and_workers() as workers, tempfile.TemporaryDirectory() as folder:
        rows = []
        for share in options.shares:
            with slowed(workers[-1].pid, share, how, workers[-1].core):
                rows.append(compare(work, workers, share, options, Path(folder)))
            report(console, rows[-1:])
        if len(rows) > 1:
            report(console, rows)
        replanned(console, work, workers, options, how)
    console.print(f"{machine()}; {len(workers)} workers, slowed by {how}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=7, help="of each timed run")
    parser.add_argument("--shares", type=float, nargs="*", default=[1.0, 0.5, 0.25])
    parser.add_argument("--how", choices=["cgroup", "signals"], help="the best there is")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--micro-batches", type=int, help="of a batch; default: the plan's choice")
    parser.add_argument("--budget-seconds", type=float, default=30, help="for measuring")
    parser.add_argument("--replan-share", type=float, default=0.5, help="in mid-run")
    parser.add_argument("--replan-steps", type=int, default=45)
    return parser.parse_args()


@contextmanager
def cores_and_workers() -> Iterator[list[Worker]]:
    """This process on a core, and workers on others."""
    first, *others = sorted(os.sched_getaffinity(0))[:3]
    if not others:
        raise SystemExit("This benchmark gives each process a core of its own; here is only one.")
    pin(first)
    with ExitStack() as stack:
        found = [(core, stack.enter_context(worker_process(on_core(core)))) for core in others]
        yield [Worker(worker.address, worker.worker_pid, core) for core, worker in found]


def compare(
    work: Work,
    workers: Sequence[Worker],
    share: float,
    options: argparse.Namespace,
    folder: Path,
) -> Row:
    """The even plan and the one that is made for what is measured."""
    addresses = [worker.address for worker in workers]
    auto = HeteroPipelineStrategy(addresses, "auto", micro_batches=options.micro_batches)
    profiler = PipelineProfiler(options.budget_seconds, path=folder / f"{share}.yaml", force=True)
    auto_seconds = median_step(work, auto, options.steps, [profiler])
    profile = auto.plan_choice.profile
    assert profile is not None
    chosen = solve(profile, Wishes(micro_batches=options.micro_batches))
    pieces = chosen.plan.micro_batches
    even = HeteroPipelineStrategy(addresses, "even", micro_batches=pieces)
    even_seconds = median_step(work, even, options.steps)
    speed = len(workers) + share
    return Row(
        share,
        pieces,
        chosen.chosen.step_seconds,
        even_seconds,
        auto_seconds,
        alone(work, options.steps) / speed,
        alone(work, options.steps, pieces) / speed,
    )


def alone(work: Work, num_steps: int, pieces: int = 1) -> float:
    """The median step on this core without workers."""
    module = Decoder(work.config)
    fit(module, work.data(num_steps, pieces), accumulate=pieces)
    return median(module.step_seconds)


def median_step(
    work: Work, strategy: Any, num_steps: int, callbacks: list[pl.Callback] | None = None
) -> float:
    """The median step of a run, its first one left out."""
    return median(train(work, strategy, num_steps, callbacks).step_seconds)


def train(
    work: Work, strategy: Any, num_steps: int, callbacks: list[pl.Callback] | None = None
) -> Decoder:
    module = Decoder(work.config)
    fit(module, work.data(num_steps), strategy, callbacks=callbacks)
    return module


def report(console: Console, rows: Sequence[Row]) -> None:
    table = Table(title="seconds of a step (medians)")
    columns = (
        "share",
        "micro-batches",
        "predicted",
        "even",
        "auto",
        "bound",
        "reached",
        "bound in pieces",
        "reached",
        "even / auto",
        "error",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row.share:.2f}",
            str(row.micro_batches),
            *(f"{value:.3f}" for value in (row.predicted, row.even, row.auto)),
            f"{row.bound:.3f}",
            f"{row.bound / row.auto:.0%}",
            f"{row.bound_in_pieces:.3f}",
            f"{row.bound_in_pieces / row.auto:.0%}",
            f"{row.even / row.auto:.2f}",
            f"{row.predicted / row.auto - 1:+.0%}",
        )
    console.print(table)


def replanned(
    console: Console,
    work: Work,
    workers: Sequence[Worker],
    options: argparse.Namespace,
    how: How,
) -> None:
    """A worker is slowed in mid-run, and layers move."""
    addresses = [worker.address for worker in workers]
    num_steps, share = options.replan_steps, options.replan_share
    at_step = num_steps // 3
    pieces = options.micro_batches or REPLAN_MICRO_BATCHES
    quiet = HeteroPipelineStrategy(addresses, "even", micro_batches=pieces)
    undisturbed = train(work, quiet, num_steps)
    strategy = HeteroPipelineStrategy(addresses, "even", micro_batches=pieces, replan=True)
    module = Decoder(work.config)
    notices = Notices(module)
    logger = logging.getLogger("lightning_hetero.replan.watch")
    logger.addHandler(notices)
    try:
        slowing = SlowsDown(workers[-1], share, how, at_step)
        fit(module, work.data(num_steps), strategy, callbacks=[slowing])
    finally:
        logger.removeHandler(notices)
    for step, said in notices.said:
        console.print(f"after step {step}: {said}")
    seconds = module.step_seconds
    before = median(seconds[: at_step - 1])
    slow = [n for n, s in enumerate(seconds) if n >= at_step - 1 and s > SLOWED_FROM * before]
    noticed = [step for step, _ in notices.said if step > at_step]
    if not slow or not noticed:
        console.print(f"Slowed to {share:.0%} after step {at_step}: not noticed.")
        return
    # Entry n is the step after mark n.
    after = median(seconds[-10:])
    bound = alone(work, options.steps) / (len(workers) + share)
    console.print(
        f"Slowed to {share:.0%} after step {at_step}, noticed {noticed[0] - slow[0] - 1} slow "
        f"steps later. A step takes {before:.3f} s before, {seconds[slow[0]]:.3f} s when slowed, "
        f"{after:.3f} s at the end; the new bound is {bound:.3f} s, {bound / after:.0%} of it is "
        "reached."
    )
    pairs = zip(module.losses, undisturbed.losses, strict=True)
    worst = max(abs(a - b) / abs(b) for a, b in pairs)
    console.print(f"Largest relative difference of a loss to the undisturbed run: {worst:.1e}")


if __name__ == "__main__":
    main()
