"""One sequence in slices along its tokens: the step against one device, and memory by length.

Sleeping stages take a time for each token, so two cores are enough for any number of stages. On
two pinned cores a Llama trains on one sequence of 2,048 tokens. The memory of a worker is its peak
above its memory before the first step, for sequences of several lengths and slices of one length;
once more with the head of a large vocabulary on the worker.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Cache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from benchmarks.processes import (
    be_quiet,
    machine,
    memory_bytes,
    on_core,
    pin,
    two_cores,
    wide_console,
    worker_process,
)
from benchmarks.sleeping_stages.main import HIDDEN_SIZE, Sleep
from benchmarks.training import Decoder, Sequences, build, fit, llama, random_tokens
from lightning_hetero import HeteroPipelineStrategy, PipelineProfiler, Plan, StagePlan
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.boundary import Activation, Gradients, Surroundings
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.pipeline.stage import Stage
from lightning_hetero.pipeline.token_slices import SliceCut, work_of
from lightning_hetero.plan import Recompute
from lightning_hetero.planner.feasibility import candidate_of
from lightning_hetero.transport.token import FILE_VARIABLE

NUM_LAYERS = 12
SLEEPING_TOKENS = 1024
CORE_TOKENS = 2048
CORE_CONFIG = llama(256, 8, 4_000)
MEMORY_CONFIG = llama(256, 4, 1_000)
HEAD_CONFIG = llama(256, 4, 64_000)
SLICE_TOKENS = 512
MIB = 2**20
RECOMPUTES: dict[str, Recompute] = {"true": True, "layers": "layers"}


class SleepingAttention(nn.Module):
    """A causal layer that keeps its input as keys, and sleeps for each token."""

    is_causal = True

    def __init__(self, layer_idx: int, seconds: float) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.seconds = seconds
        self.scale = nn.Parameter(torch.ones(HIDDEN_SIZE))

    def forward(self, hidden_states: Tensor, past_key_values: Cache | None = None) -> Tensor:
        keys = hidden_states[:, None]
        if past_key_values is not None:
            past_key_values.update(keys, keys, self.layer_idx)
        seconds = self.seconds * hidden_states.shape[1]
        slept: Tensor = Sleep.apply(hidden_states, seconds, 2 * seconds)
        return slept * self.scale


class Sleepy(pl.LightningModule):
    """Sleeping layers between an embedding and a loss that take no time worth the name."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.ones(HIDDEN_SIZE))
        layers = (SleepingAttention(number, seconds) for number in range(NUM_LAYERS))
        self.blocks = nn.ModuleList(layers)
        self.marks: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.marks.append(time.perf_counter())

    @property
    def step_seconds(self) -> list[float]:
        """Of each step but the first."""
        return [end - start for start, end in itertools.pairwise(self.marks)]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = batch * self.embedding
        for block in self.blocks:
            hidden = block(hidden, past_key_values=None)
        return hidden.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def even_plan(
    workers: Sequence[str],
    num_layers: int,
    num_slices: int,
    recompute: Recompute,
    head: bool = False,
) -> Plan:
    """The same number of layers for each worker, none for the coordinator; the last worker may have
    the head."""
    held = num_layers // len(workers)
    stages = [
        StagePlan([name], (held * number, held * (number + 1)), recompute)
        for number, name in enumerate(workers)
    ]
    return Plan([*stages[:-1], replace(stages[-1], head=head)], num_slices)


def strategy_of(
    workers: Sequence[str],
    num_layers: int,
    num_slices: int,
    recompute: Recompute = False,
    head: bool = False,
    **options: Any,
) -> HeteroPipelineStrategy:
    """Slices over workers; one slice is the whole sequence."""
    plan = even_plan(workers, num_layers, num_slices, recompute, head)
    return HeteroPipelineStrategy([*workers], plan, micro_batching="tokens", **options)


def sleeping_seconds(num_workers: int, num_slices: int, options: argparse.Namespace) -> float:
    """The median step over some workers; without workers, of one device."""
    seconds = options.milliseconds / 1e3 / SLEEPING_TOKENS
    module = Sleepy(seconds)
    data = torch.randn(options.steps, SLEEPING_TOKENS, HIDDEN_SIZE)
    names = [f"local-{number}" for number in range(1, num_workers + 1)]
    plan = even_plan(names, NUM_LAYERS, num_slices, recompute=False) if names else None
    strategy: Any = "auto"
    if plan is not None:
        strategy = HeteroPipelineStrategy(
            num_workers, plan, layers="blocks", micro_batching="tokens"
        )
    fit(module, DataLoader(data, batch_size=1), strategy)
    return median(module.step_seconds)


def sleeping(options: argparse.Namespace, console: Console) -> None:
    """Print the step of two and three sleeping stages against one device."""
    one = sleeping_seconds(0, 1, options)
    table = Table(title=f"compute replaced by sleeps; one device {one * 1e3:.0f} ms")
    for column in ("stages", "slices", "step, ms", "times one device", "bound"):
        table.add_column(column, justify="right")
    for num_workers, num_slices in itertools.product((2, 3), options.slices):
        seconds = sleeping_seconds(num_workers, num_slices, options)
        bound = num_workers * num_slices / (num_slices + num_workers - 1)
        row = (num_workers, num_slices, f"{seconds * 1e3:.0f}", f"{one / seconds:.2f}")
        table.add_row(*map(str, row), f"{bound:.2f}")
    console.print(table)


def train(strategy: Any, config: Any, length: int, num_steps: int, **options: Any) -> float:
    """The median step of a Llama on batches of one sequence."""
    module = Decoder(config)
    tokens = random_tokens(num_steps, length, config.vocab_size)
    fit(module, DataLoader(Sequences(tokens), batch_size=1), strategy, **options)
    return median(module.step_seconds)


def on_cores(options: argparse.Namespace, console: Console) -> None:
    """Print the step over two pinned workers against one core, in turns."""
    first, second = two_cores()
    pin(first)
    ratios: dict[int, list[float]] = {count: [] for count in options.slices}
    with ExitStack() as stack:
        workers = [
            stack.enter_context(worker_process(on_core(core))).address for core in (first, second)
        ]
        for _ in range(options.rounds):
            one = train("auto", CORE_CONFIG, CORE_TOKENS, options.steps)
            for count, found in ratios.items():
                strategy = strategy_of(workers, CORE_CONFIG.num_hidden_layers, count)
                found.append(one / train(strategy, CORE_CONFIG, CORE_TOKENS, options.steps))
    table = Table(title=f"two pinned cores, one sequence of {CORE_TOKENS} tokens")
    for column in ("slices", "times one core", "least", "most"):
        table.add_column(column, justify="right")
    for count, found in ratios.items():
        numbers = (median(found), min(found), max(found))
        table.add_row(str(count), *(f"{number:.2f}" for number in numbers))
    console.print(table)


class Peak(pl.Callback):
    """The peak of a worker's session above its memory before the first step."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._before = 0
        self.bytes = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self._before = self._before or memory_bytes(self._worker.pid, "VmRSS")

    def on_train_batch_end(self, *_: Any) -> None:
        self.bytes = memory_bytes(self._worker.pid, "VmHWM") - self._before


def peak_bytes(
    length: int,
    num_slices: int,
    recompute: Recompute,
    config: LlamaConfig = MEMORY_CONFIG,
    head: bool = False,
) -> int:
    """The peak of one worker with all layers."""
    with worker_process([]) as worker:
        peak = Peak(worker)
        # The trial of the first batch takes a layer's graph for two slices.
        strategy = strategy_of(
            [worker.address],
            config.num_hidden_layers,
            num_slices,
            recompute,
            head,
            check_first_batch="off",
        )
        train(strategy, config, length, 3, callbacks=[peak])
        return peak.bytes


def kept_bytes(length: int, recompute: Recompute) -> int:
    """Inputs, outputs and gradients of a stage, and the keys and values of its layers with their
    gradients; with ``layers`` the input of each layer too."""
    size, num_layers = 4 * MEMORY_CONFIG.hidden_size * length, MEMORY_CONFIG.num_hidden_layers
    inputs = num_layers - 1 if recompute == "layers" else 0
    return (3 + inputs + 4 * num_layers) * size


def longest(length: int, num_slices: int) -> int:
    """The tokens of the first slice; later ones attend to more, so they are shorter."""
    cut = SliceCut(num_slices, work_of([*build(MEMORY_CONFIG).model.layers]))
    return cut.slices(length)[0].end


def memory(options: argparse.Namespace, console: Console) -> None:
    """Print the peak of a worker by the length of the sequence."""
    table = Table(title=f"peak of a worker, slices of {SLICE_TOKENS} tokens on average")
    columns = ("recompute", "tokens", "slices", "longest slice", "peak, MiB")
    for column in (*columns, "keys, values, inputs", "rest", "whole, MiB"):
        table.add_column(column, justify="right")
    for name, length in itertools.product(options.recompute, options.lengths):
        recompute = RECOMPUTES[name]
        num_slices, kept = length // SLICE_TOKENS, kept_bytes(length, recompute)
        found = peak_bytes(length, num_slices, recompute)
        whole = peak_bytes(length, 1, recompute)
        row = (name, length, num_slices, longest(length, num_slices))
        numbers = (found, kept, found - kept, whole)
        table.add_row(*map(str, row), *(f"{n / MIB:.0f}" for n in numbers))
    console.print(table)


def head(options: argparse.Namespace, console: Console) -> None:
    """Print the peak of a worker with the head by the length of the sequence."""
    vocabulary = HEAD_CONFIG.vocab_size
    table = Table(title=f"peak of a worker with the head, {vocabulary:,} entries, MiB")
    columns = ("tokens", "logits", "of the longest slice", "slices", "slices, recompute: true")
    for column in (*columns, "one slice, recompute: true"):
        table.add_column(column, justify="right")
    work = work_of([*build(HEAD_CONFIG).model.layers])
    for length in options.lengths:
        num_slices, of_token = length // SLICE_TOKENS, 4 * vocabulary
        slices = SliceCut(num_slices, work).slices(length)
        longest = max(each.end - each.start for each in slices)
        found = [length * of_token, longest * of_token]
        for count, recompute in ((num_slices, False), (num_slices, True), (1, True)):
            found.append(peak_bytes(length, count, recompute, HEAD_CONFIG, head=True))
        table.add_row(str(length), *(f"{n / MIB:,.0f}" for n in found))
    console.print(table)


class OneStage:
    """The layers of a Llama in this process, as a stage has them."""

    def __init__(self, config: LlamaConfig) -> None:
        self._layers = build(config).model.layers
        tables = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(CORE_TOKENS)[None])
        kwargs = {"attention_mask": None, "position_embeddings": tables, "past_key_values": None}
        self._calls = [LayerCall(n, True, (), dict(kwargs)) for n in range(len(self._layers))]
        layers = nn.ModuleDict({str(n): layer for n, layer in enumerate(self._layers)})
        self._stage = Stage(layers, torch.device("cpu"), 1)
        self._hidden = torch.randn(1, CORE_TOKENS, config.hidden_size)
        self._work = work_of([*self._layers])

    def step(self, num_slices: int) -> None:
        """Forward and backward of one sequence; one slice is the whole."""
        slices = SliceCut(num_slices, self._work).slices(CORE_TOKENS)
        for number, each in enumerate(slices):
            calls = [
                each.cut_call(c, self._layers[c.layer_index], num_slices > 1) for c in self._calls
            ]
            leaf = each.cut(self._hidden).clone().requires_grad_()
            self._stage.forward(Key(number), Activation(leaf), Surroundings(True, None, calls))
        for number in reversed(range(len(slices))):
            gradient = slices[number].cut(self._hidden)
            self._stage.backward(Key(number), Gradients((gradient,)))

    def cpu_seconds(self, num_slices: int, rounds: int) -> float:
        """The least CPU time of a step, which other processes change little."""
        found = []
        for _ in range(rounds):
            start = time.process_time()
            self.step(num_slices)
            found.append(time.process_time() - start)
        return min(found)


def cost(options: argparse.Namespace, console: Console) -> None:
    """Print the CPU time of slices against the whole sequence, in one process."""
    table = Table(title=f"CPU time of {CORE_TOKENS} tokens in slices against the whole")
    for column in ("hidden size", "slices", "times the whole"):
        table.add_column(column, justify="right")
    for hidden_size in (256, 512):
        stage = OneStage(llama(hidden_size, 4, 1_000))
        whole = stage.cpu_seconds(1, options.rounds)
        for count in options.slices:
            seconds = stage.cpu_seconds(count, options.rounds)
            table.add_row(str(hidden_size), str(count), f"{seconds / whole:.2f}")
    console.print(table)


class Planned(pl.Callback):
    """The plan of a run, and its predicted step."""

    num_slices, predicted_seconds = 0, 0.0

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        plan, profile = strategy.deployment.plan, strategy.plan_choice.profile
        self.num_slices = plan.micro_batches
        self.predicted_seconds = candidate_of(plan, profile).step_seconds


def planned(options: argparse.Namespace, console: Console) -> None:
    """Print the predicted step of the plan that `plan="auto"` makes against the measured one."""
    table = Table(title="compute replaced by sleeps, the plan by measurements")
    for column in ("workers", "slices", "predicted, ms", "measured, ms", "predicted / measured"):
        table.add_column(column, justify="right")
    data = torch.randn(options.steps, SLEEPING_TOKENS, HIDDEN_SIZE)
    for num_workers in (2, 3):
        module, plan = Sleepy(options.milliseconds / 1e3 / SLEEPING_TOKENS), Planned()
        strategy = HeteroPipelineStrategy(num_workers, layers="blocks", micro_batching="tokens")
        profiler = PipelineProfiler(force=True)
        fit(module, DataLoader(data, batch_size=1), strategy, callbacks=[profiler, plan])
        measured, predicted = median(module.step_seconds), plan.predicted_seconds
        numbers = (f"{predicted * 1e3:.0f}", f"{measured * 1e3:.0f}", f"{predicted / measured:.2f}")
        table.add_row(str(num_workers), str(plan.num_slices), *numbers)
    console.print(table)


PARTS = {
    "planned": planned,
    "sleeping": sleeping,
    "cores": on_cores,
    "memory": memory,
    "head": head,
    "cost": cost,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=[*PARTS])
    parser.add_argument("--slices", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=3, help="of the pinned cores")
    parser.add_argument("--steps", type=int, default=4, help="per run; the first is not timed")
    parser.add_argument("--milliseconds", type=float, default=40, help="a sleeping layer's forward")
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--recompute", nargs="*", choices=RECOMPUTES, default=[*RECOMPUTES])
    options = parser.parse_args()
    be_quiet()
    # The token in the user's home would put all runs under TLS.
    os.environ[FILE_VARIABLE] = ""
    console = wide_console()
    for name in options.parts:
        PARTS[name](options, console)
    console.print(machine())


if __name__ == "__main__":
    main()
