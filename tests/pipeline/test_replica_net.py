"""Replicas add the same numbers in the same order, whatever their links and workers do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

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
from lightning_hetero.pipeline.placement import Placement
from lightning_hetero.pipeline.random_numbers import Draws
from lightning_hetero.pipeline.turns import current_turn
from lightning_hetero.plan import Plan, StagePlan

from .chain import request_for, threads
from .replica_net import ReplicaNet

NUM_MICROBATCHES = 9
PLANS = {
    "two replicas": [(["a", "b"], (0, 4), [1, 1])],
    "behind each other": [(["a", "b"], (0, 2), [2, 1]), (["c", "d", "e"], (2, 4), [1, 3, 2])],
    "crosswise": [(["a", "b"], (0, 2), [2, 1]), (["b", "a"], (2, 4), [1, 1])],
    "a spare": [(["a"], (0, 1), [1]), (["b", "c"], (1, 4), [0, 1])],
}


class Model(nn.Module):
    """What the coordinator keeps; it visits the layers once, or twice for every third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 9, bias=False)


def step(
    seed: int | None,
    stages: Sequence[tuple[list[str], tuple[int, int], list[int]]],
    visits: int,
    ran: Mapping[int, list[int]] | None = None,
) -> dict[str, Tensor]:
    """All gradients after one step, by the process that has them, and their parameters.

    ``ran`` gets, for each visit, the micro-batches in the order in which their code ran behind it.
    """
    torch.manual_seed(0)
    model, layers = Model(), {n: nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for n in range(4)}
    plan = Plan([StagePlan(names, span, shares=shares) for names, span, shares in stages])
    net = ReplicaNet(layers, Placement.of(plan), seed)
    gradients = StepGradients([*model.parameters()], [])
    driver = Driver(net, gradients, lambda loss: loss, Draws(12), threads)
    generator = torch.Generator().manual_seed(3)

    def training_step(number: int, tokens: Tensor) -> Tensor:
        hidden: Tensor = model.embedding(tokens)
        for visit in range(visits if number % 3 == 0 else 1):
            turn = current_turn()
            assert turn is not None
            returned: Activation = turn.hand_over(request_for(hidden, layers))
            hidden = returned.hidden
            if ran is not None:
                ran[visit].append(number)
        loss: Tensor = model.head(hidden).logsumexp(-1).square().mean()
        return loss

    work = []
    for number in range(NUM_MICROBATCHES):
        tokens = torch.randint(9, (2, 5), generator=generator)
        run = lambda number=number, tokens=tokens: training_step(number, tokens)  # noqa: E731
        work.append(MicrobatchStep(run, lambda: 1 / NUM_MICROBATCHES))
    driver.run(BatchWork(work, 1, accumulates=False), Limits(4))
    gradients.publish()
    found = {name: p.grad for name, p in model.named_parameters()}
    for (number, worker), held in net.held.items():
        found |= {f"{number} {worker} {name}": p.grad for name, p in held.named_parameters()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


@pytest.mark.parametrize("visits", [1, 2])
@pytest.mark.parametrize("name", PLANS)
def test_every_timing_gives_the_same_bits(name: str, visits: int) -> None:
    expected = step(None, PLANS[name], visits)
    for seed in range(15):
        found = step(seed, PLANS[name], visits)
        assert found.keys() == expected.keys()
        assert [n for n, each in expected.items() if not torch.equal(found[n], each)] == []


@pytest.mark.parametrize("visits", [1, 2])
@pytest.mark.parametrize("name", PLANS)
def test_code_behind_the_layers_runs_in_the_order_of_the_micro_batches(
    name: str, visits: int
) -> None:
    for seed in range(5):
        ran = defaultdict[int, list[int]](list)
        step(seed, PLANS[name], visits, ran)
        in_order = {0: [*range(NUM_MICROBATCHES)], 1: [*range(0, NUM_MICROBATCHES, 3)]}
        assert ran == {visit: in_order[visit] for visit in range(visits)}


def test_a_worker_adds_up_its_own_micro_batches_alone() -> None:
    alone = step(None, [(["a"], (0, 4), [1])], 1)
    shared = step(None, PLANS["two replicas"], 1)
    for name, gradient in alone.items():
        if name.startswith("1 a"):
            total = shared[name] + shared[name.replace(" a ", " b ")]
            torch.testing.assert_close(total, gradient)
            assert not torch.equal(shared[name], gradient)
