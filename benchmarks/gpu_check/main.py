"""One GPU: coordinator and worker on it together, and each of them with the other on the CPU.

Losses are checked against the same training on the GPU alone. Then how fast it copies, with and
without pinned memory, and how much of what is copied is hidden behind what is computed.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from benchmarks.processes import be_quiet, machine, wide_console, worker_process
from benchmarks.training import Decoder, Sequences, fit, random_tokens
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.devices.device import device_for
from lightning_hetero.pipeline.boundary import Activation

GPU = torch.device("cuda", 0)
CONFIG = LlamaConfig(
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    vocab_size=10_000,
    use_cache=False,
)
SEQUENCE_LENGTH = 256
BATCH_SIZE = 16
NUM_MICROBATCHES = 8
# fp32 throughout; a GPU and a processor add up in other orders.
TOLERANCE = 1e-3
COPIED_BYTES = 64 * 2**20
NUM_COPIES = 20


@dataclass(frozen=True)
class Case:
    """Who computes where."""

    coordinator: str
    worker: str

    def __str__(self) -> str:
        return f"coordinator on {self.coordinator}, worker on {self.worker}"


CASES = (Case("gpu", "gpu"), Case("gpu", "cpu"), Case("cpu", "gpu"))


@dataclass(frozen=True)
class Rates:
    """Bytes per second between main memory and the GPU, and the share of copies that is hidden."""

    found: dict[str, float]
    hidden_share: float


def train(
    num_steps: int, accelerator: str, strategy: pl.strategies.Strategy | str = "auto"
) -> Decoder:
    """Train without anything else."""
    module = Decoder(CONFIG)
    tokens = random_tokens(num_steps * BATCH_SIZE, SEQUENCE_LENGTH, CONFIG.vocab_size)
    data = DataLoader(Sequences(tokens), batch_size=BATCH_SIZE)
    fit(module, data, strategy, accelerator=accelerator)
    return module


def strategy_for(worker: str) -> HeteroPipelineStrategy:
    """Half of the layers on the worker."""
    num_layers = CONFIG.num_hidden_layers
    stages = [
        StagePlan(["coordinator"], (0, num_layers // 2)),
        StagePlan([worker], (num_layers // 2, num_layers)),
    ]
    return HeteroPipelineStrategy([worker], Plan(stages, NUM_MICROBATCHES))


def largest_deviation(found: list[float], expected: list[float]) -> float:
    """The greatest difference of losses, relative to what they should be."""
    return max(abs(f - e) / abs(e) for f, e in zip(found, expected, strict=True))


def compare(case: Case, rounds: int, num_steps: int) -> tuple[list[float], float]:
    """Steps' seconds over those of the GPU alone, round by round, and how far losses are off."""
    ratios, deviation = [], 0.0
    device = "cuda:0" if case.worker == "gpu" else "cpu"
    for _ in range(rounds):
        plain = train(num_steps, "gpu")
        with worker_process([], device=device) as worker:
            ours = train(num_steps, case.coordinator, strategy_for(worker.address))
        ratios.append(median(ours.step_seconds) / median(plain.step_seconds))
        deviation = max(deviation, largest_deviation(ours.losses, plain.losses))
    return ratios, deviation


def count_waits(num_steps: int) -> float:
    """Calls of torch per step, in this process, that wait for the GPU; the model's are among them,
    and one by which the benchmark reads the loss."""
    with (
        worker_process([], device="cuda:0") as worker,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            train(num_steps, "gpu", strategy_for(worker.address))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in said) / num_steps


def seconds_of(work: Callable[[], None]) -> float:
    """Median of three, on an idle GPU, until it is idle again; one run before to warm up."""
    work()
    taken = []
    for _ in range(3):
        torch.cuda.synchronize(GPU)
        start = time.perf_counter()
        work()
        torch.cuda.synchronize(GPU)
        taken.append(time.perf_counter() - start)
    return median(taken)


def copy_rates() -> Rates:
    """What the GPU's link does, and what the package's own copies make of it."""
    on_gpu = torch.zeros(COPIED_BYTES // 4, device=GPU)
    hosts = {
        "pageable": torch.zeros(COPIED_BYTES // 4),
        "pinned": torch.zeros(COPIED_BYTES // 4).pin_memory(),
    }
    found = {}
    for kind, host in hosts.items():
        ways: dict[str, tuple[Tensor, Tensor]] = {"to": (on_gpu, host), "from": (host, on_gpu)}
        for way, (target, source) in ways.items():
            seconds = seconds_of(lambda t=target, s=source: t.copy_(s, non_blocking=True))  # type: ignore[misc]
            found[f"{way} the GPU, {kind}"] = COPIED_BYTES / seconds
    return Rates(found, hidden_share(on_gpu, hosts["pinned"]))


def hidden_share(on_gpu: Tensor, host: Tensor) -> float:
    """How much of the copies' time is not added to that of computing, as stages copy."""
    copies = device_for(GPU).copies()
    matrix = torch.randn(4096, 4096, device=GPU)

    def compute() -> None:
        for _ in range(8):
            torch.mm(matrix, matrix)

    def copy() -> None:
        leaving = copies.to_host([on_gpu])
        copies.to_device([host], lambda tensors: Activation(*tensors)).land()
        leaving.wait()

    def both() -> None:
        leaving = []
        for _ in range(NUM_COPIES):
            leaving.append(copies.to_host([on_gpu]))
            coming = copies.to_device([host], lambda tensors: Activation(*tensors))
            compute()
            coming.land()
            if len(leaving) > 2:
                leaving.pop(0).wait()

    copying = NUM_COPIES * seconds_of(copy)
    added = seconds_of(both) - NUM_COPIES * seconds_of(compute)
    return min(1.0, max(0.0, 1 - added / copying))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="per run; the first is not timed")
    options = parser.parse_args()
    be_quiet()
    console = wide_console()
    if not torch.cuda.is_available():
        console.print(
            f"There is no CUDA or ROCm device for torch {torch.__version__} here, so "
            "there is nothing to check."
        )
        return
    report_rates(copy_rates(), console)
    report_cases({case: compare(case, options.rounds, options.steps) for case in CASES}, console)
    console.print(f"calls that wait for the GPU: {count_waits(options.steps):.1f} per step")
    console.print(f"{torch.cuda.get_device_name(GPU)}, {machine()}")


def report_rates(rates: Rates, console: Console) -> None:
    """Print what copies take."""
    table = Table(title=f"copies of {COPIED_BYTES // 2**20} MiB")
    table.add_column("way", justify="right")
    table.add_column("GB/s", justify="right")
    for way, rate in rates.found.items():
        table.add_row(way, f"{rate / 1e9:.1f}")
    console.print(table)
    console.print(f"{rates.hidden_share:.0%} of the copies' time is hidden behind computing")


def report_cases(found: dict[Case, tuple[list[float], float]], console: Console) -> None:
    """Print the steps and the losses.

    Raises:
        SystemExit: If losses are not those of one device.
    """
    table = Table(title="against the GPU alone")
    for column in ("run", "step", "largest deviation of a loss"):
        table.add_column(column, justify="right")
    for case, (ratios, deviation) in found.items():
        table.add_row(str(case), f"{median(ratios) - 1:+.1%}", f"{deviation:.1e}")
    console.print(table)
    wrong = [str(case) for case, (_, deviation) in found.items() if not deviation <= TOLERANCE]
    if wrong:
        raise SystemExit(f"The losses are not those of one device: {'; '.join(wrong)}.")


if __name__ == "__main__":
    main()
