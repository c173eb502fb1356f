"""A coordinator with a tenth of a core and a link of 20 Mbit/s, beside one with a whole core.

One worker has the whole model: the embedding, all layers, the head and the loss. So the coordinator
sends token ids and labels, and receives losses. Both coordinators train over a worker on the same
core, in turns. It needs root, iproute2 and cgroups.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import lightning.pytorch as pl
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.peers.links import LOOPBACK, Link, link, missing
from benchmarks.peers.throttle import best_way, slowed
from benchmarks.processes import (
    be_quiet,
    environment,
    machine,
    on_core,
    two_cores,
    wide_console,
    worker_process,
)
from benchmarks.training import Decoder, Sequences, fit, llama, random_tokens
from lightning_hetero import HeteroPipelineStrategy, PipelineProfiler, Plan, StagePlan

VOCABULARY, LENGTH = 8192, 256
BATCH_SIZE, NUM_MICROBATCHES = 16, 4
READY = "ready"


class Begin(pl.Callback):
    """Says when the weights have been sent, and waits for a line: until then the process has its
    whole core.
    """

    def on_train_start(self, *_: Any) -> None:
        print(READY, flush=True)
        sys.stdin.readline()


def coordinate(worker: str, options: argparse.Namespace) -> None:
    """Train, and print the seconds of each step."""
    be_quiet()
    config = llama(options.hidden_size, options.layers, VOCABULARY)
    stage = StagePlan([worker], (0, options.layers), embedding=True, head=True)
    plan = "auto" if options.auto else Plan([stage], NUM_MICROBATCHES)
    tokens = random_tokens((options.steps + 1) * BATCH_SIZE, LENGTH, VOCABULARY)
    strategy = HeteroPipelineStrategy([worker], plan, check_first_batch="off")
    module = Decoder(config)
    data: DataLoader[dict[str, Tensor]] = DataLoader(Sequences(tokens), BATCH_SIZE)
    with TemporaryDirectory() as folder:
        profiler = PipelineProfiler(options.budget, path=Path(folder, "profile.yaml"))
        callbacks = [Begin(), *([profiler] if options.auto else [])]
        fit(module, data, strategy, callbacks=callbacks)
    print(*module.step_seconds)


def step_seconds(where: Link, rate_share: float, options: argparse.Namespace) -> list[float]:
    """The seconds of the steps of a coordinator with a share of a core."""
    here, there = two_cores()
    with ExitStack() as stack:
        before = [*where.before(1), *on_core(there)]
        worker = stack.enter_context(worker_process(before, where.addresses[1]))
        command = [*where.before(0), *on_core(here), sys.executable, __file__, "--worker"]
        command += [worker.address, "--steps", str(options.steps)]
        command += ["--hidden-size", str(options.hidden_size), "--layers", str(options.layers)]
        command += ["--auto", "--budget", str(options.budget)] if options.auto else []
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = stack.enter_context(
            subprocess.Popen(command, text=True, env=environment(), **pipes)
        )
        assert process.stdin is not None
        assert process.stdout is not None
        is_slow = rate_share < 1
        slow = slowed(process.pid, rate_share, best_way(), here) if is_slow else nullcontext()
        with slow if options.auto else nullcontext():
            _await_ready(process.stdout)
            with nullcontext() if options.auto else slow:
                process.stdin.write("\n")
                process.stdin.flush()
                said = process.stdout.read()
    return [float(each) for each in said.split()]


def _await_ready(lines: IO[str]) -> None:
    """Wait until the weights have been sent; print the lines before, such as a verdict."""
    for line in lines:
        if line.strip() == READY:
            return
        print(line, end="", file=sys.stderr)
    raise RuntimeError("The coordinator has ended before it trained.")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="after the first one")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.1, help="of a core")
    parser.add_argument("--rate", default="20mbit")
    parser.add_argument(
        "--auto", action="store_true", help="let the planner choose; slow from start"
    )
    parser.add_argument("--budget", type=float, default=20, help="seconds for measuring")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.worker:
        coordinate(options.worker, options)
        return
    if reason := missing():
        sys.exit(f"This needs a link of its own, and {reason}.")
    table = Table("coordinator", "seconds of a step", title=machine())
    ratios, whole, weak = [], [], []
    for _ in range(options.rounds):
        whole.append(statistics.median(step_seconds(LOOPBACK, 1.0, options)))
        with link(options.rate) as between:
            weak.append(statistics.median(step_seconds(between, options.share, options)))
        ratios.append(weak[-1] / whole[-1])
    table.add_row("a core, loopback", f"{statistics.median(whole):.2f}")
    table.add_row(f"{options.share:g} core, {options.rate}", f"{statistics.median(weak):.2f}")
    rounds = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    table.add_row("ratio in each round", f"{statistics.median(ratios):.3f} ({rounds})")
    wide_console().print(table)


if __name__ == "__main__":
    main()
