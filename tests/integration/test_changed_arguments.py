"""What a model changes between two calls of layers is equal to one device, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.errors import HeteroError

from .. import argument_layers as models
from ..along_layers import LENGTH, WIDTH
from ..conftest import worker_process
from ..equality import assert_close, weights_of
from ..models import fit
from ..pairwise import covering

BATCH = 4


@pytest.fixture(scope="module")
def allowing() -> Iterator[list[str]]:
    """Two workers that may import the layers."""
    with worker_process("--allow", "tests") as first, worker_process("--allow", "tests") as second:
        yield [first.address, second.address]


def strategy(workers: list[str], micro_batches: int) -> HeteroPipelineStrategy:
    stages = [StagePlan([workers[0]], (0, 2)), StagePlan([workers[1]], (2, 4))]
    plan = Plan([*stages, StagePlan(["coordinator"], (4, 4))], micro_batches=micro_batches)
    return HeteroPipelineStrategy(workers, plan, layers="layers")


def data() -> DataLoader[Tensor]:
    shape = (BATCH * 3, LENGTH, WIDTH)
    samples = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return DataLoader(samples, batch_size=BATCH)  # type: ignore[arg-type]


EQUAL = [
    models.NewInTable,
    models.NewInOrderedTable,
    models.NewInOutput,
    models.NewInRow,
    models.Freezes,
]


@pytest.mark.parametrize(
    ("kind", "micro_batches"),
    covering(product(EQUAL, [1, 2])),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_equals_one_device(
    kind: type[models.Model], micro_batches: int, allowing: list[str]
) -> None:
    expected = fit(kind(), data=data())
    found = fit(kind(), strategy(allowing, micro_batches), data())
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert_close(weights_of(found), weights_of(expected))


REFUSED = {
    models.FreezesForOneCall: "`requires_grad` of parameters of layer 1 was set after",
    models.SetsForOneCall: r"The attribute layers\.0\.factor was changed after the model",
    models.AddsToNumber: r"float32 of the shape \(4, 1, 1\) was changed in place .* called layer 0",
    models.ChangesReadOnce: r"of the shape \(4, 1, 8\) was changed in place .* called layer 0",
    models.MovesNumber: r"float32 of the shape \(4, 1, 1\) was changed in place .* called layer 0",
    models.AddsInEvaluation: r"of the shape \(4, 1, 1\) was changed in place .* called layer 0",
    models.AddsToHidden: r"of the shape \(4, 5, 8\) was changed in place .* called layer 0",
    models.FirstWithoutGraph: "Layer 2 is called under another grad mode than the layers",
    models.OneInBfloat16: "Layer 1 is called under another dtype of autocast than the layers",
    models.LossesInList: r"layer 0 \(Collects\) changed its argument '0' on a worker",
    models.CountsCalls: r"layer 0 \(Counts\) changed its argument '0' on a worker",
    models.Overwritten: "changes its hidden states in place",
}


@pytest.mark.follows(
    "Set it before the forward and leave it until the backward, or keep the layer with the "
    "coordinator.",
    "Change it in `on_train_batch_start` or earlier, pass it as an argument, or keep the layer",
    "Change a copy of it (`clone`; `x = x + y` for `x += y`), or keep these layers with the "
    "coordinator.",
    "and workers compute all layers of a forward alike. …, or keep these layers with the",
    "Return what is new, or keep the layer with the coordinator.",
    "Write `x = x + y` for `x += y`, or keep the layer with the coordinator.",
)
@pytest.mark.filterwarnings("ignore:The plan has no stage on a worker")
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_would_differ_is_refused(kind: type[models.Model], allowing: list[str]) -> None:
    with pytest.raises(HeteroError, match=REFUSED[kind]):
        fit(kind(), strategy(allowing, 1), data(), data())
    here = Plan([StagePlan(["coordinator"], (0, 4))], micro_batches=1)
    if kind is models.AddsToHidden:
        return  # one device does not train it either
    found = fit(kind(), HeteroPipelineStrategy(allowing, here, layers="layers"), data(), data())
    assert_close(weights_of(found), weights_of(fit(kind(), "auto", data(), data())))
