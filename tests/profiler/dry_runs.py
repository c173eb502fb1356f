"""Dry runs of modules in a Trainer, and conversations with devices about trials."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_hetero.coordinator.dry_run import OptimizerSettings, no_trace
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.model.layers import find_decoder_layers
from lightning_hetero.pipeline.boundary import Surroundings
from lightning_hetero.profiler.embedding_and_head import EndsRunner, Example
from lightning_hetero.profiler.measured_model import (
    Blueprint,
    MadeUpOutputs,
    Subject,
    kinds_of_layers,
)
from lightning_hetero.profiler.trials import DeviceResult, Outcome, Trial, Trials

from ..families import tiny_model
from ..models import TinyModule, loader, tiny_llama, trainer

Device = Callable[[Trial], Outcome]


class OfFamily(TinyModule):
    def __init__(self, family: str, **options: Any) -> None:
        super().__init__()
        self.model = tiny_model(family, **options)


def runner_of(module: TinyModule) -> EndsRunner:
    """Runs the training step of a module in a Trainer."""
    layers = find_decoder_layers(module)
    run = trainer()
    run.strategy.connect(module)
    module.trainer = run
    drawn = Blueprint.draw(module, layers, kinds_of_layers(layers, first_wants_gradient=True))
    outputs = MadeUpOutputs(drawn, drawn.bench(torch.device("cpu")))
    return EndsRunner(module, layers, drawn.on_meta(), outputs)


@contextmanager
def running(module: TinyModule) -> Iterator[tuple[EndsRunner, Any]]:
    """A runner that leaves no trace in a module, and a batch for it."""
    runner = runner_of(module)
    with no_trace(module, [layer.module for layer in runner.layers]):
        yield runner, next(iter(loader(2, 2)))


def example(size: int) -> Example:
    calls = {1: LayerCall(1, True, (), {})}
    inputs = dict.fromkeys(range(2), torch.empty(size, 3, 16, device="meta"))
    return Example(inputs, True, Surroundings(True, None, []), calls)


def subject(sizes: list[int]) -> Subject:
    model = tiny_llama(2)
    return Subject(
        blueprint=Blueprint.draw(model, find_decoder_layers(model), ["layer", "layer"]),
        wants_gradient=[True, True],
        examples={size: example(size) for size in sizes},
        optimizer=OptimizerSettings("SGD", {"lr": 0.1}, {"lr": 0.1}),
        dtype="float32",
        converts_weights=True,
    )


class Clock:
    """Advances by a second at each reading."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1
        return self.seconds


def talk(conversation: Trials, device: Device) -> tuple[DeviceResult, list[Trial]]:
    asked: list[Trial] = []
    try:
        trial = next(conversation)
        while True:
            asked.append(trial)
            trial = conversation.send(device(trial))
    except StopIteration as end:
        return end.value, asked
