"""What trials find of whole batches that must not be cut, or in another way."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.coordinator.batch_trials import TriedBatches
from lightning_hetero.errors import BatchError, StageFailed
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.boundary import Activation, Surroundings, join_activations
from lightning_hetero.pipeline.handover import Request
from lightning_hetero.pipeline.microbatch import BatchOptions
from lightning_hetero.plan import Plan, StagePlan

from .handed_over import BATCH, Computing, request_with

Layer = Callable[[Tensor], Tensor]


def by_sample(hidden: Tensor) -> Tensor:
    return hidden * 2 + hidden.mean(1, keepdim=True)


def mixed(hidden: Tensor) -> Tensor:
    return hidden - hidden.mean(0)


class Stages:
    """Runs a layer in this process, and notes the shapes that it gets."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, pieces: Sequence[Request], dim: int) -> Activation:
        self.shapes += [tuple(piece.hidden.shape) for piece in pieces]
        assert not any(piece.surroundings.grad_enabled for piece in pieces)
        return join_activations([Activation(self._layer(p.hidden)) for p in pieces], dim)


def whole_batches(
    stages: Stages, module: nn.Module | None = None, pieces: int = 4, **options: Any
) -> TriedBatches:
    plan = Plan([StagePlan(["coordinator"], (0, 1)), StagePlan(["w"], (1, 2))], pieces)
    layers = {1: module or nn.Linear(3, 3)}
    return TriedBatches(layers, plan, BatchOptions(**{"check": "stop", **options}), stages)


def request_of(hidden: Tensor = BATCH, grad: bool = True, training: bool = True) -> Request:
    call = LayerCall(1, training, (), {})
    return Request(hidden, Surroundings(grad, None, [call]))


def cut(
    batches: TriedBatches, request: Request | None = None, count: int | None = 4
) -> tuple[list[Request], int]:
    batches.num_samples = count
    return batches.pieces(request or request_of())


def test_samples_that_stand_alone_are_cut_and_compared_once_for_each_kind() -> None:
    stages = Stages(by_sample)
    batches = whole_batches(stages)
    pieces, dim = cut(batches)
    assert (len(pieces), dim) == (4, 0)
    assert stages.shapes == [(2, 6, 3), (1, 6, 3), (1, 6, 3)]
    cut(batches)
    assert len(stages.shapes) == 3
    cut(batches, request_of(grad=False, training=False))
    assert len(stages.shapes) == 6


def test_layers_that_begin_to_mix_samples_later_are_warned_of() -> None:
    """As behind a gate that is a parameter of zero at first."""
    gate = 0.0

    def gated(hidden: Tensor) -> Tensor:
        return by_sample(hidden) + gate * hidden.mean(0)

    stages = Stages(gated)
    batches = whole_batches(stages)
    for _ in range(9):
        cut(batches)
    assert len(stages.shapes) == 3
    gate = 1.0
    with pytest.warns(UserWarning, match="They mix the samples of a batch"):
        cut(batches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(89):
            cut(batches)
    with pytest.warns(UserWarning, match="They mix the samples of a batch"):
        cut(batches)


class Looking(Stages):
    """Runs such a layer.

    Attributes:
        has_failed: Whether it has raised. A worker's layer that raises ends the step.
    """

    has_failed = False

    def __init__(self, layer: Callable[..., Tensor]) -> None:
        self._with = layer
        super().__init__(by_sample)

    def __call__(self, pieces: Sequence[Request], dim: int) -> Activation:
        self.shapes += [tuple(piece.hidden.shape) for piece in pieces]
        try:
            found = [self._with(p.hidden, *p.surroundings.calls[0].args) for p in pieces]
        except (RuntimeError, AssertionError) as error:
            self.has_failed = True
            raise StageFailed(str(error)) from error
        return join_activations([Activation(hidden) for hidden in found], dim)


def looking(layer: Callable[..., Tensor], **options: Any) -> TriedBatches:
    return whole_batches(Looking(layer), Computing(layer), **options)


def test_an_argument_that_is_cut_for_the_first_time_is_compared() -> None:
    """A table with as many rows as the batch has samples, which comes later or by chance."""
    stages = Looking(lambda hidden, *tables: hidden + sum(table.sum() for table in tables))
    batches = whole_batches(stages)
    cut(batches)
    cut(batches, request_with(torch.ones(5, 2)))
    assert len(stages.shapes) == 6
    pieces, _ = cut(batches, request_with(torch.ones(4, 2)))
    assert len(stages.shapes) > 6
    assert [piece.surroundings.calls[0].args[0].shape for piece in pieces] == [(4, 2)] * 4


def test_a_table_with_equal_rows_is_compared_again_when_they_differ() -> None:
    """The first tables, such as zeros, give the same result however they are cut."""

    def shifted(hidden: Tensor, table: Tensor) -> Tensor:
        return hidden + table.mean()

    stages = Looking(shifted)
    batches = whole_batches(stages, Computing(shifted))
    cut(batches, request_with(torch.zeros(4, 2)))
    compared = len(stages.shapes)
    cut(batches, request_with(torch.ones(4, 2)))
    assert len(stages.shapes) == compared
    table = torch.arange(8.0).view(4, 2)
    pieces, _ = cut(batches, request_with(table))
    assert all(torch.equal(piece.surroundings.calls[0].args[0], table) for piece in pieces)


def test_rows_are_those_along_the_samples() -> None:
    """Samples are the second dimension here, and the positions of the table always differ."""

    def shifted(hidden: Tensor, table: Tensor) -> Tensor:
        return hidden + table.mean()

    def of(table: Tensor) -> Request:
        hidden = BATCH.transpose(0, 1)
        return Request(hidden, Surroundings(True, None, [LayerCall(1, True, (table,), {})]))

    stages = Looking(shifted)
    batches = whole_batches(stages, Computing(shifted), dim=1)
    table = torch.arange(24.0).view(6, 4, 1)
    cut(batches, of(table[:, :1].expand(6, 4, 1)))
    compared = len(stages.shapes)
    pieces, _ = cut(batches, of(table))
    assert len(stages.shapes) > compared
    assert all(torch.equal(piece.surroundings.calls[0].args[0], table) for piece in pieces)


def test_arguments_of_each_layer_are_looked_at() -> None:
    """Rows of one layer's argument differ from the start, and those of another layer's later."""

    def shifted(hidden: Tensor, table: Tensor) -> Tensor:
        return hidden + table.mean()

    def of(second: Tensor) -> Request:
        tables = torch.arange(8.0).view(4, 2), second
        calls = [LayerCall(number, True, (table,), {}) for number, table in enumerate(tables, 1)]
        return Request(BATCH, Surroundings(True, None, calls))

    stages = Stages(by_sample)
    batches = whole_batches(stages, Computing(shifted))
    batches.layers = {1: Computing(shifted), 2: Computing(shifted)}
    cut(batches, of(torch.zeros(4, 2)))
    compared = len(stages.shapes)
    cut(batches, of(torch.ones(4, 2)))
    assert len(stages.shapes) == compared
    cut(batches, of(torch.arange(8.0).view(4, 2)))
    assert len(stages.shapes) > compared


def test_a_mask_with_equal_rows_is_compared_once() -> None:
    """Layers cannot compute with a piece of the batch and the whole mask, so no other cut fits."""

    def masked(hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden * mask[..., None]

    stages = Looking(masked)
    batches = whole_batches(stages, Computing(masked))
    cut(batches, request_with(torch.ones(4, 6)))
    compared = len(stages.shapes)
    cut(batches, request_with(MASK))
    assert len(stages.shapes) == compared


def test_a_carried_table_with_equal_rows_is_compared_again_when_they_differ() -> None:
    def shifted(pieces: Sequence[Request], dim: int) -> Activation:
        found = [p.hidden + p.surroundings.carried["table"].mean() for p in pieces]
        return join_activations([*map(Activation, found)], dim)

    def of(table: Tensor) -> Request:
        return Request(
            BATCH, Surroundings(True, None, [LayerCall(1, True, (), {})], carried={"table": table})
        )

    batches = whole_batches(shifted)  # type: ignore[arg-type]
    cut(batches, of(torch.zeros(4, 2)))
    with pytest.raises(BatchError, match="They mix the samples of a batch"):
        cut(batches, of(torch.arange(8.0).view(4, 2)))


def test_a_batch_stays_whole_with_samples_along_another_dimension_of_an_argument() -> None:
    """Positions of text and images are counted in three rows, before the samples."""

    def counted(hidden: Tensor, positions: Tensor) -> Tensor:
        return hidden * positions.sum(0)[..., None]

    stages = Looking(counted)
    batches = whole_batches(stages, Computing(counted))
    with pytest.warns(UserWarning, match="can compute with the batch, and not with pieces"):
        assert len(cut(batches, request_with(torch.ones(3, 4, 6)))[0]) == 1
    assert len(cut(batches, request_with(torch.ones(3, 4, 6)))[0]) == 1
    assert not stages.has_failed


HEADS = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
MASK = torch.ones(4, 6).tril(2)


@pytest.mark.parametrize(
    "layer",
    [
        lambda hidden, mask, table: hidden * mask[..., None] + table.sum(),
        lambda hidden, mask, table: (
            hidden * mask[..., None] + (hidden[:, :4, :1] * table).sum(1)[..., None]
        ),
    ],
    ids=["a layer that sums it up", "a layer that cannot run with a part of it"],
)
def test_a_table_beside_a_mask_of_samples_stays_whole(layer: Callable[..., Tensor]) -> None:
    stages = Looking(layer)
    batches = whole_batches(stages, Computing(layer))
    for _ in range(2):
        pieces, dim = cut(batches, request_with(MASK, HEADS))
        assert dim == 0
        for number, piece in enumerate(pieces):
            mask, table = piece.surroundings.calls[0].args
            assert torch.equal(mask, MASK[number : number + 1])
            assert torch.equal(table, HEADS)
    assert not stages.has_failed


def attention(hidden: Tensor, masks: Tensor, is_by_head: bool = False) -> Tensor:
    """Adds, for each head, the positions that a mask of torch's form lets through."""
    samples, length, _ = hidden.shape
    heads = 8 // len(BATCH)
    assert len(masks) == samples * heads, masks.shape
    shape = (heads, samples) if is_by_head else (samples, heads)
    each = masks.view(*shape, length, length)
    return hidden + (each.transpose(0, 1) if is_by_head else each).sum(1) @ hidden


MASKS = torch.rand(8, 6, 6, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("check", ["stop", "off"])
def test_a_mask_for_each_sample_and_head_is_cut_so(check: str) -> None:
    batches = looking(attention, check=check)
    pieces, _ = cut(batches, request_with(MASKS))
    for number, piece in enumerate(pieces):
        (masks,) = piece.surroundings.calls[0].args
        assert torch.equal(masks, MASKS[2 * number : 2 * number + 2])
    found = [attention(p.hidden, *p.surroundings.calls[0].args) for p in pieces]
    assert torch.equal(torch.cat(found), attention(BATCH, MASKS))
    # The last batch of an epoch has fewer samples.
    rest = replace(request_with(MASKS[:4]), hidden=BATCH[:2])
    pieces, _ = cut(batches, rest, 2)
    assert [len(p.surroundings.calls[0].args[0]) for p in pieces] == [2, 2]


@pytest.mark.parametrize("check", ["stop", "off"])
def test_a_first_batch_of_one_sample_shows_nothing_of_the_others(check: str) -> None:
    batches = looking(attention, check=check)
    cut(batches, replace(request_with(MASKS[:2]), hidden=BATCH[:1]), 1)
    pieces, _ = cut(batches, request_with(MASKS))
    assert [len(piece.surroundings.calls[0].args[0]) for piece in pieces] == [2] * 4


def test_a_mask_for_each_head_and_sample_is_refused() -> None:
    """Its rows are those of another order."""
    with pytest.raises(BatchError, match="They mix the samples of a batch"):
        cut(looking(partial(attention, is_by_head=True)), request_with(MASKS))


@pytest.mark.follows("Pass a tensor then.")
def test_a_list_with_an_entry_for_each_sample_is_named() -> None:
    def of_lengths(hidden: Tensor, lengths: Any) -> Tensor:
        wanted = torch.as_tensor(lengths)[: len(hidden), None]
        return hidden * (torch.arange(6) < wanted)[..., None]

    lengths = [6, 2, 4, 3]
    with pytest.raises(BatchError, match=r"the argument 0 is a list.*Pass a tensor then"):
        cut(looking(of_lengths), request_with(lengths))
    batches = looking(of_lengths)
    cut(batches, request_with([6] * 4))
    with pytest.raises(BatchError, match="the argument 0 is a list"):
        cut(batches, request_with(lengths))
    pieces, _ = cut(looking(of_lengths), request_with(torch.tensor(lengths)))
    assert len(pieces) == 4


def test_layers_that_mix_samples_stop_the_run() -> None:
    with pytest.raises(BatchError, match=r"the difference is \d+ % .*`micro_batches=1`.*'warn'"):
        cut(whole_batches(Stages(mixed)))


@pytest.mark.follows(
    "This repairs it: …. To go on all the same, set `check_first_batch='warn'`.",
    "With `micro_batches=1` the batch stays whole.",
)
def test_or_they_are_said() -> None:
    batches = whole_batches(Stages(mixed), check="warn")
    with pytest.warns(UserWarning, match="mix the samples"):
        pieces, _ = cut(batches)
    assert len(pieces) == 4
    cut(batches)  # once is enough
    assert len(cut(whole_batches(Stages(mixed), pieces=1))[0]) == 1


def test_or_nobody_looks() -> None:
    stages = Stages(mixed)
    assert len(cut(whole_batches(stages, check="off"))[0]) == 4
    assert stages.shapes == []


def test_the_other_dimension_is_named_where_it_repairs_it() -> None:
    def by_second(hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(0, keepdim=True)

    square = torch.randn(4, 4, 3)
    with pytest.raises(BatchError, match="`batch_dim=1`, or"):
        cut(whole_batches(Stages(by_second)), request_of(square))
    pieces, dim = cut(whole_batches(Stages(by_second), dim=1), request_of(square))
    assert (len(pieces), dim) == (4, 1)


def test_a_remedy_that_the_layers_cannot_run_is_not_named() -> None:
    def picky(hidden: Tensor) -> Tensor:
        if hidden.shape[1] < 6:
            raise StageFailed("too short")
        return mixed(hidden)

    with pytest.raises(BatchError) as raised:
        cut(whole_batches(Stages(picky)))
    assert "batch_dim" not in str(raised.value)


def test_layers_that_draw_random_numbers_are_not_judged() -> None:
    batches = whole_batches(Stages(lambda hidden: hidden + torch.randn_like(hidden)))
    assert len(cut(batches)[0]) == 4


def stacked(hidden: Tensor) -> Tensor:
    """Keys and values, before the samples."""
    return torch.stack([hidden, -hidden])


def test_samples_along_another_dimension_of_a_result_are_said_by_shapes() -> None:
    shapes = "(2, 2, 6, 3) for a batch, and of shape (4, 1, 6, 3)"
    with pytest.raises(BatchError, match=re.escape(shapes)):
        cut(whole_batches(Stages(stacked)))


def test_an_evaluation_with_wrong_pieces_goes_on_whole() -> None:
    batches = whole_batches(Stages(mixed))
    with pytest.warns(UserWarning, match="batches of evaluations stay whole"):
        assert len(cut(batches, request_of(grad=False, training=False))[0]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            assert len(cut(batches, request_of(grad=False, training=False))[0]) == 1
    with pytest.raises(BatchError, match="mix the samples"):
        cut(batches)


def test_in_one_piece_nothing_is_compared() -> None:
    stages = Stages(mixed)
    assert len(cut(whole_batches(stages, pieces=1))[0]) == 1
    assert stages.shapes == []
