"""What recovery costs in a run in which no connection breaks: CPU time of both processes.

Runs with and without it take turns over one worker, each process on a core of its own.
"""

from __future__ import annotations

import os
from statistics import median, quantiles

from rich.console import Console
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from benchmarks.overhead.microbatch import WARM_UP, StepCpu
from benchmarks.processes import WorkerProcess, on_core, pin, two_cores, worker_process
from benchmarks.training import Decoder, Sequences, fit, random_tokens
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan

NUM_LOCAL_LAYERS = 3
BATCH_SIZE = 16
NUM_MICROBATCHES = 8

Round = tuple[float, float]
"""CPU seconds of a step in both processes, without recovery and with it."""


class SessionCpu(StepCpu):
    """CPU seconds per step of this process and of the worker's, which each run has anew."""

    def __init__(self, worker: WorkerProcess) -> None:
        super().__init__({})
        self._worker = worker

    def on_train_start(self, *_: object) -> None:
        """The process is there now."""
        self._pids = {"here": os.getpid(), "there": self._worker.pid}


def measure(config: LlamaConfig, length: int, rounds: int, num_steps: int) -> list[Round]:
    """Train with and without recovery, round by round; who begins alternates."""
    first_core, second_core = two_cores()
    pin(first_core)
    found = []
    with worker_process(on_core(second_core)) as worker:
        for number in range(rounds):
            seconds: dict[bool, float] = {}
            for recovers in (False, True) if number % 2 else (True, False):
                step_cpu = SessionCpu(worker)
                tokens = random_tokens(
                    (num_steps + 1 + WARM_UP) * BATCH_SIZE, length, config.vocab_size
                )
                data = DataLoader(Sequences(tokens), batch_size=BATCH_SIZE)
                strategy = _over(worker.address, config.num_hidden_layers, recovers)
                fit(Decoder(config), data, strategy, 1, [step_cpu])
                seconds[recovers] = sum(step_cpu.seconds.values())
            found.append((seconds[False], seconds[True]))
    return found


def _over(address: str, num_layers: int, recovers: bool) -> HeteroPipelineStrategy:
    stages = [
        StagePlan(["coordinator"], (0, NUM_LOCAL_LAYERS)),
        StagePlan([address], (NUM_LOCAL_LAYERS, num_layers)),
    ]
    return HeteroPipelineStrategy([address], Plan(stages, NUM_MICROBATCHES), recovery=recovers)


def report(rounds: list[Round], console: Console) -> None:
    """Print how much more CPU time a step takes with recovery."""
    ratios = [with_it / without for without, with_it in rounds]
    quarter, middle, rest = quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    listed = ", ".join(f"{ratio - 1:+.1%}" for ratio in ratios)
    console.print(
        f"recovery, in a run in which nothing breaks: a step takes {middle - 1:+.1%} CPU time of "
        f"both processes (the middle half {quarter - 1:+.1%} to {rest - 1:+.1%}; rounds {listed}); "
        f"a step without it takes {median(without for without, _ in rounds) * 1e3:.0f} ms"
    )
