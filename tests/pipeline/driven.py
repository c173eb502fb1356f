"""A model whose layers are behind a chain, and its driver, in one process."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.pipeline.boundary import Activation
from lightning_hetero.pipeline.driver import (
    BatchWork,
    Driver,
    Limits,
    MicrobatchStep,
    StepGradients,
)
from lightning_hetero.pipeline.random_numbers import Draws
from lightning_hetero.pipeline.turns import current_turn

from .chain import Chain, cut_into_stages, request_for, threads

NUM_LAYERS = 4

Layers = dict[int, nn.Module]

Through = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    threads.close()
    assert set(threading.enumerate()) <= before


class Block(nn.Module):
    """A decoder layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(torch.tanh(self.linear(hidden)))


class Model(nn.Module):
    """What the coordinator keeps: a body that is elsewhere goes between its two ends."""

    def __init__(self, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 9, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def embed(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(self.embedding(tokens))
        return hidden

    def loss(self, hidden: Tensor) -> Tensor:
        return self.head(self.dropout(hidden)).logsumexp(-1).square().mean()

    def forward(self, tokens: Tensor, through: Through) -> Tensor:
        return self.loss(through(self.embed(tokens)))


def microbatches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(9, (2, 5), generator=generator) for _ in range(count)]


Step = Callable[[Model, Through, Tensor], Any]


def ordinary_step(model: Model, through: Through, tokens: Tensor) -> Any:
    return model(tokens, through)


@dataclass
class Pipeline:
    """A model whose layers are behind a chain, and its driver.

    Args:
        num_stages: Remote stages.
        timing: Seed of the chain's timing.
        max_started: How many micro-batches may have begun; None for as many as are in flight.
        processes: The process of each stage; None for one each.
        training_step: What runs for each micro-batch.
    """

    num_stages: int = 2
    timing: int | None = None
    training_step: Step = ordinary_step
    tied: bool = False
    dropout: float = 0.0
    recompute: bool = False
    max_started: int | None = None
    processes: tuple[int, ...] | None = None
    model: Model = field(init=False)
    layers: Layers = field(init=False)
    chain: Chain = field(init=False)
    driver: Driver = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model(self.tied, self.dropout)
        self.layers = {number: Block(self.dropout) for number in range(NUM_LAYERS)}
        stages = cut_into_stages(self.layers, self.num_stages, self.recompute, seed=11)
        self.chain = Chain(stages, self.timing, self.processes)
        local = list(self.model.parameters())
        shared = [self.model.embedding.weight] if self.tied else []
        gradients = StepGradients(local, shared)
        self.driver = Driver(self.chain, gradients, lambda loss: loss, Draws(12), threads)

    def twin(self) -> Pipeline:
        """Another one with the same weights and flags, and no history."""
        twin = replace(self)
        twin.model, twin.layers = copy.deepcopy((self.model, self.layers))
        for module in (twin.model, *twin.layers.values()):
            module.zero_grad()
        return twin

    def hand_over(self, hidden: Tensor) -> Tensor:
        turn = current_turn()
        assert turn is not None
        returned: Activation = turn.hand_over(request_for(hidden, self.layers))
        return returned.hidden

    def run(
        self,
        inputs: list[Tensor],
        limit: int,
        factors: list[float] | None = None,
        accumulate: bool = False,
        is_compared: bool = False,
    ) -> list[Any]:
        """One step, with its gradients in ``.grad`` at the end."""
        factors = factors or [1 / len(inputs)] * len(inputs)
        work = [
            MicrobatchStep(
                lambda tokens=tokens: self.training_step(self.model, self.hand_over, tokens),  # type: ignore[misc]
                partial(float, factor),
            )
            for tokens, factor in zip(inputs, factors, strict=True)
        ]
        batch = BatchWork(work, self.chain.step + 1, accumulate, is_compared=is_compared)
        results = self.driver.run(batch, Limits(limit, self.max_started))
        if not accumulate:
            self.model.zero_grad()
        self.driver.gradients.publish()
        return results

    def gradients(self) -> dict[str, Tensor | None]:
        named = list(self.model.named_parameters())
        for number, layer in self.layers.items():
            named += [(f"{number}.{name}", p) for name, p in layer.named_parameters()]
        return {name: None if p.grad is None else p.grad.clone() for name, p in named}


def visit_twice(model: Model, through: Through, tokens: Tensor) -> Tensor:
    hidden = model.embed(tokens)
    return model.loss(through(through(hidden) * 0.5 + hidden))


def visits_by_content(model: Model, through: Through, tokens: Tensor) -> Tensor:
    """One to three visits; the head's weights are used in between."""
    hidden = through(model.embed(tokens))
    for _ in range(int(tokens[1, 2]) % 3):  # 3, 1, 1, 2 and 3 visits
        hidden = through(hidden + model.embed(tokens) * model.loss(hidden))
    return model.loss(hidden)


def separate_visits(model: Model, through: Through, tokens: Tensor) -> Tensor:
    """Two branches, of which one is left out of the loss."""
    through(model.embed(tokens))
    return model(tokens.flip(0), through)
