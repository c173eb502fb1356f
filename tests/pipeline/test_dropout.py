"""With dropout, a gradient belongs to the forward that ran, recomputed or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.boundary import Activation, BatchNumbers, Gradients, Surroundings
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.pipeline.stage import Stage

NUM_LAYERS = 2
WIDTH = 4
NUDGE = 1e-6


class Dropped(nn.Module):
    """A layer whose half is dropped, once by a module and once by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.dropout = nn.Dropout(0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = nn.functional.dropout(torch.tanh(self.line(hidden)), 0.3, self.training)
        return hidden + self.dropout(mixed)


@pytest.fixture(params=[False, True], ids=["", "recompute"])
def stage(request: pytest.FixtureRequest) -> Stage:
    torch.manual_seed(0)
    layers = nn.ModuleDict({str(number): Dropped() for number in range(NUM_LAYERS)})
    return Stage(layers, torch.device("cpu"), 1, recompute=request.param, seed=7)


def run(
    stage: Stage, hidden: Tensor, microbatch: int = 0, dropout_step: int = 3, first: int = 0
) -> Tensor:
    calls = [LayerCall(number, True, (), {}) for number in range(NUM_LAYERS)]
    incoming = Activation(hidden.detach().requires_grad_())
    batch = BatchNumbers(dropout_step, first)
    around = Surroundings(True, None, calls, batch=batch)
    return stage.forward(Key(microbatch), incoming, around).hidden


def slopes(stage: Stage, hidden: Tensor, moved: Tensor, direction: Tensor) -> Tensor:
    """How the stage's output along a direction changes with every entry of a tensor."""
    found = torch.zeros_like(moved)
    for place in range(moved.numel()):
        ends = []
        for nudge in (NUDGE, -2 * NUDGE):
            moved.view(-1)[place] += nudge
            ends.append((run(stage, hidden) * direction).sum())
        moved.view(-1)[place] += NUDGE
        found.view(-1)[place] = (ends[0] - ends[1]) / (2 * NUDGE)
    return found


def test_gradients_equal_finite_differences(stage: Stage) -> None:
    hidden = torch.randn(3, WIDTH, dtype=torch.float64)
    direction = torch.randn(3, WIDTH, dtype=torch.float64)
    run(stage, hidden)
    # Others draw random numbers, and other micro-batches go forward, before the backward comes.
    run(stage, hidden, microbatch=1)
    torch.randn(100)
    (gradient,) = stage.backward(Key(0), Gradients((direction,))).tensors
    assert gradient is not None
    with torch.no_grad():
        torch.testing.assert_close(
            gradient, slopes(stage, hidden, hidden, direction), rtol=1e-5, atol=1e-7
        )
        weight = stage.layers["0"].line.weight
        assert isinstance(weight, nn.Parameter)
        assert weight.grad is not None
        torch.testing.assert_close(
            weight.grad, slopes(stage, hidden, weight.data, direction), rtol=1e-5, atol=1e-7
        )


def test_the_masks_are_others_for_another_microbatch_and_another_step(stage: Stage) -> None:
    hidden = torch.randn(3, WIDTH, dtype=torch.float64)
    first = run(stage, hidden)
    assert torch.equal(run(stage, hidden), first)
    assert not torch.equal(run(stage, hidden, microbatch=1), first)
    assert not torch.equal(run(stage, hidden, dropout_step=4), first)


def test_a_micro_batch_draws_by_its_place_in_its_batch(stage: Stage) -> None:
    hidden = torch.randn(3, WIDTH, dtype=torch.float64)
    second = run(stage, hidden, microbatch=1)
    assert torch.equal(run(stage, hidden, microbatch=6, first=5), second)
