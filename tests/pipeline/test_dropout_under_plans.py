"""With dropout, training has the same bits under every plan, and under one without workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hetero.coordinator.local_layers import adjust_own, seed_own
from lightning_hetero.model.layers import DecoderLayer
from lightning_hetero.pipeline.boundary import Activation
from lightning_hetero.pipeline.driver import (
    BatchWork,
    Driver,
    Limits,
    MicrobatchStep,
    StepGradients,
)
from lightning_hetero.pipeline.random_numbers import Draws
from lightning_hetero.pipeline.stage import Stage
from lightning_hetero.pipeline.turns import current_turn
from lightning_hetero.plan import COORDINATOR, Plan, StagePlan

from .chain import Chain, request_for, threads

NUM_LAYERS = 6
NUM_MICROBATCHES = 4
NUM_STEPS = 2
WIDTH = 6
SEED = 12

SHARES: dict[str, list[tuple[str, int]]] = {
    "coordinator": [(COORDINATOR, 6)],
    "coordinator, worker": [(COORDINATOR, 2), ("a", 4)],
    "worker, coordinator": [("a", 4), (COORDINATOR, 2)],
    "worker": [("a", 6)],
    "worker, worker, coordinator": [("a", 2), ("b", 3), (COORDINATOR, 1)],
    "coordinator, worker, worker, worker": [(COORDINATOR, 1), ("a", 1), ("b", 2), ("c", 2)],
    "both ends": [(COORDINATOR, 1), ("a", 2), ("b", 2), (COORDINATOR, 1)],
}


def plan_of(shares: Sequence[tuple[str, int]], recompute: bool = False) -> Plan:
    stages, first = [], 0
    for name, count in shares:
        stages.append(StagePlan([name], (first, first + count), recompute=recompute))
        first += count
    return Plan(stages)


class Block(nn.Module):
    """A decoder layer that drops by a module and by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = nn.functional.dropout(torch.tanh(self.line(hidden)), 0.2, self.training)
        return hidden + self.dropout(mixed)


def blocks(has_adapters: bool) -> list[nn.Module]:
    layers: list[nn.Module] = [Block() for _ in range(NUM_LAYERS)]
    if has_adapters:
        config = LoraConfig(target_modules=["line"], lora_dropout=0.4, init_lora_weights=False)
        layers = [inject_adapter_in_model(config, layer) for layer in layers]
    return layers


class Model(nn.Module):
    """An embedding and a head with dropout, and layers between them."""

    def __init__(self, has_adapters: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.layers = nn.ModuleList(blocks(has_adapters))
        self.head = nn.Linear(WIDTH, 9)


Body = Callable[[Tensor], Tensor]
Step = Callable[[Model, Body, Tensor], Tensor]


def loss_of(model: Model, body: Body, tokens: Tensor) -> Tensor:
    hidden = body(model.dropout(model.embedding(tokens)))
    return model.head(model.dropout(hidden)).logsumexp(-1).square().mean()


def several_calls(model: Model, body: Body, tokens: Tensor) -> Tensor:
    """Calls the layers twice, and once more without a gradient, and draws by itself."""
    noise = torch.rand(())
    first = loss_of(model, body, tokens)
    with torch.no_grad():
        target = loss_of(model, body, tokens)
    return first + (loss_of(model, body, tokens) - target * torch.rand(())).square() * noise


@dataclass
class Training:
    """A model whose layers are where a plan has them.

    Args:
        plan: Says where.
        step: What runs for each micro-batch.
        timing: Seed of the workers' timing.
        max_in_flight: The most micro-batches in flight.
        has_adapters: Whether only adapters of the layers train.
        checkpoints: How the model checkpoints the coordinator's layers, if it does.
    """

    plan: Plan
    step: Step = loss_of
    timing: int | None = None
    max_in_flight: int = 2
    has_adapters: bool = False
    checkpoints: dict[str, Any] | None = None
    model: Model = field(init=False)
    driver: Driver = field(init=False)
    draws: Draws = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model(self.has_adapters)
        layers = [DecoderLayer(str(n), layer) for n, layer in enumerate(self.model.layers)]
        self.draws = draws = Draws(SEED)
        adjust_own(layers, [stage for stage in self.plan.stages if stage.is_local])
        self.own = {
            number: layers[number].module
            for stage in self.plan.stages
            if stage.is_local
            for number in stage.layer_indices
        }
        seed_own(self.own, draws)
        self.away = {n: each.module for n, each in enumerate(layers) if n not in self.own}
        stages = [
            Stage(
                nn.ModuleDict({str(n): self.away[n] for n in stage.layer_indices}),
                torch.device("cpu"),
                number,
                stage.recompute,
                SEED,
            )
            for number, stage in enumerate(self.plan.remote_stages, start=1)
        ]
        self.chain = Chain(stages, self.timing)
        away = {p for layer in self.away.values() for p in layer.parameters()}
        local = [p for p in self.model.parameters() if p not in away]
        gradients = StepGradients(local, [])
        self.driver = Driver(self.chain, gradients, lambda loss: loss, draws, threads)

    def body(self, hidden: Tensor) -> Tensor:
        """The layers, and code that draws before each one and multiplies behind the last one."""
        noise = torch.ones(())
        for number, layer in enumerate(self.model.layers):
            noise = noise * (0.5 + torch.rand(()))
            if number in self.own and self.checkpoints is not None:
                hidden = checkpoint(layer, hidden, **self.checkpoints)
            elif number in self.own:
                hidden = layer(hidden)
            elif number < max(self.away):
                self.draws.pass_by(number)
            else:
                turn = current_turn()
                assert turn is not None
                returned: Activation = turn.hand_over(request_for(hidden, self.away))
                hidden = returned.hidden
        return hidden * noise

    def run(self) -> dict[str, Tensor]:
        """Some steps of SGD; the losses of all micro-batches, and the weights at the end."""
        generator = torch.Generator().manual_seed(3)
        losses: list[Tensor] = []
        for step in range(NUM_STEPS):
            tokens = [
                torch.randint(9, (2, 5), generator=generator) for _ in range(NUM_MICROBATCHES)
            ]
            work = [
                MicrobatchStep(
                    partial(self.step, self.model, self.body, each),
                    partial(float, 1 / NUM_MICROBATCHES),
                )
                for each in tokens
            ]
            losses += self.driver.run(
                BatchWork(work, step + 1, accumulates=False), Limits(self.max_in_flight)
            )
            self.driver.gradients.publish()
            with torch.no_grad():
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
            # The user's own code draws, too.
            torch.rand(step)
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        return {"losses": torch.stack(losses), **weights}


@cache
def alone(step: Step = loss_of, has_adapters: bool = False) -> dict[str, Tensor]:
    """The plan without workers, one micro-batch after the other."""
    plan = plan_of(SHARES["coordinator"])
    return Training(plan, step, max_in_flight=1, has_adapters=has_adapters).run()


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, each in expected.items() if not torch.equal(found[name], each)] == []


def assert_same_masks(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The losses of the first step have the same bits.

    Gradients of several calls are added in another order than in one backward, so that later losses
    and weights are only close.
    """
    assert torch.equal(*(each["losses"][:NUM_MICROBATCHES] for each in (found, expected)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


CHECKS = {loss_of: assert_same_bits, several_calls: assert_same_masks}


@pytest.mark.parametrize("has_adapters", [False, True], ids=["", "adapters"])
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("shares", SHARES)
def test_every_plan_has_the_bits_of_the_plan_without_workers(
    shares: str, recompute: bool, has_adapters: bool
) -> None:
    training = Training(plan_of(SHARES[shares], recompute), has_adapters=has_adapters)
    assert_same_bits(training.run(), alone(has_adapters=has_adapters))


@settings(max_examples=25)
@given(
    st.sampled_from(list(SHARES)),
    st.sampled_from([loss_of, several_calls]),
    st.integers(0, 2**16),
    st.integers(1, 6),
    st.booleans(),
)
def test_no_timing_changes_a_bit(
    shares: str, step: Step, timing: int, max_in_flight: int, recompute: bool
) -> None:
    training = Training(plan_of(SHARES[shares], recompute), step, timing, max_in_flight)
    CHECKS[step](training.run(), alone(step))


# Some calls are without a gradient.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("step", [loss_of, several_calls])
@pytest.mark.parametrize("shares", ["coordinator", "both ends"])
def test_gradient_checkpointing_of_the_coordinators_layers_changes_no_bit(
    shares: str, step: Step, use_reentrant: bool, recompute: bool
) -> None:
    plan = plan_of(SHARES[shares], recompute)
    checkpoints = {"use_reentrant": use_reentrant}
    found = Training(plan, step, timing=1, checkpoints=checkpoints).run()
    CHECKS[step](found, alone(step))
