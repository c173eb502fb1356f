"""How hand-overs of whole batches are cut by shapes alone, and when they stay whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.coordinator.handover import WholeBatches
from lightning_hetero.model.carried_tensors import ENTERED, Arithmetic, Carried
from lightning_hetero.pipeline.handover import Request
from lightning_hetero.pipeline.microbatch import BatchOptions
from lightning_hetero.plan import Plan, StagePlan

from .handed_over import Computing, request_with


def whole_batches(layer: nn.Module | Callable[..., Tensor] = torch.tanh) -> WholeBatches:
    plan = Plan([StagePlan(["coordinator"], (0, 1)), StagePlan(["w"], (1, 2))], 4)
    module = layer if isinstance(layer, nn.Module) else Computing(layer)
    return WholeBatches({1: module}, plan, BatchOptions())


def cut(
    batches: WholeBatches, request: Request | None = None, count: int | None = 4
) -> list[Request]:
    batches.num_samples = count
    pieces, dim = batches.pieces(request or request_with())
    assert dim == 0
    return pieces


def test_what_cannot_be_cut_stays_whole_and_is_said_once() -> None:
    batches = whole_batches()
    with pytest.warns(UserWarning, match=r"in one piece.*The batch has 5 samples"):
        assert len(cut(batches, count=5)) == 1
    assert len(cut(batches, count=5)) == 1


def test_a_trial_of_the_safe_mode_says_nothing_of_the_run() -> None:
    batches = whole_batches()
    batches.num_samples = 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(batches.cut(request_with())[0]) == 1
    with pytest.warns(UserWarning, match="in one piece"):
        cut(batches, count=5)


def test_a_batch_of_which_nothing_is_known_stays_whole() -> None:
    batches = whole_batches()
    assert len(cut(batches, count=None)) == 1
    cut(batches)
    assert len(cut(batches, count=None)) == 4


def test_layers_with_batch_norm_get_a_batch_whole_in_training_alone() -> None:
    norm = nn.Sequential(nn.BatchNorm1d(6))
    batches = whole_batches(norm)
    with pytest.warns(UserWarning, match=r"Layer 1 has BatchNorm \(0\)"):
        assert len(cut(batches)) == 1
    norm.eval()
    assert len(cut(batches)) == 4


MASK = torch.ones(4, 6).tril(2)
TABLE = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
MASKS = torch.rand(8, 6, 6, generator=torch.Generator().manual_seed(2))


def masked(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden * mask[..., None]


def by_head(hidden: Tensor, masks: Tensor) -> Tensor:
    return hidden + masks.view(len(hidden), 2, 6, 6).sum(1) @ hidden


def with_table(hidden: Tensor, table: Tensor) -> Tensor:
    return hidden + (hidden[:, :4, :1] * table).sum(1)[..., None]


@pytest.mark.parametrize(
    ("layer", "argument", "rows"),
    [(masked, MASK, 1), (by_head, MASKS, 2), (with_table, TABLE, 0)],
    ids=["a row for each sample", "two rows for each sample", "a table for all"],
)
def test_shapes_decide_how_an_argument_is_cut(
    layer: Callable[..., Tensor], argument: Tensor, rows: int
) -> None:
    pieces = cut(whole_batches(layer), request_with(argument))
    assert len(pieces) == 4
    for number, piece in enumerate(pieces):
        [found] = piece.surroundings.calls[0].args
        assert torch.equal(found, argument[rows * number : rows * number + rows] if rows else TABLE)


def summed(hidden: Tensor, table: Any) -> Tensor:
    return hidden + torch.as_tensor(table).sum()


@pytest.mark.parametrize("argument", [TABLE, [6, 2, 4, 3]], ids=["a table", "a list of numbers"])
def test_a_batch_stays_whole_where_shapes_do_not_decide(argument: Any) -> None:
    """The whole package compares results then: see the trials of whole batches."""
    batches = whole_batches(summed)
    wanted = r"in one piece.*whether the argument 0 .*`coordinator.batch_trials`.* is missing"
    with pytest.warns(UserWarning, match=wanted):
        assert len(cut(batches, request_with(argument))) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(cut(batches, request_with(argument))) == 1  # it is said once
        assert len(cut(batches, request_with(torch.ones(5, 6)))) == 4


def test_a_batch_stays_whole_with_an_argument_that_fits_in_no_way() -> None:
    """Two rows for each sample are looked for in arguments of three dimensions."""

    def in_pairs(hidden: Tensor, pairs: Tensor) -> Tensor:
        return hidden * pairs.view(len(hidden), 2, 6).sum(1)[..., None]

    with pytest.warns(UserWarning, match="can compute with the batch, and not with pieces"):
        assert len(cut(whole_batches(in_pairs), request_with(torch.ones(8, 6)))) == 1


def test_a_batch_stays_whole_with_a_tensor_of_as_many_rows_beside_it() -> None:
    step = Arithmetic("sum", "add", (Carried(ENTERED), torch.ones(4, 1, 1)), False)
    with pytest.warns(UserWarning, match="whether a tensor that goes along"):
        assert len(cut(whole_batches(), request_with(arithmetic=(step,)))) == 1
    step = Arithmetic("sum", "add", (Carried(ENTERED), torch.ones(1, 1, 3)), False)
    assert len(cut(whole_batches(), request_with(arithmetic=(step,)))) == 4
