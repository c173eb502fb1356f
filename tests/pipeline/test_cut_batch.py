"""A batch and its micro-batches."""

from __future__ import annotations

import pytest
import torch

from lightning_hetero.errors import BatchError
from lightning_hetero.pipeline.copies import PlainCopies
from lightning_hetero.pipeline.cut_batch import CutBatch
from lightning_hetero.pipeline.microbatch import Samples, find_samples

ROWS = torch.arange(10).view(5, 2)
COPIES = PlainCopies(torch.device("cpu"))


def test_the_first_micro_batches_are_a_batch_of_their_own() -> None:
    batch = CutBatch.of({"x": ROWS}, 3, find_samples(ROWS))
    assert list(batch.num_samples) == [2, 2, 1]
    first = batch.first(2)
    assert torch.equal(first.whole["x"], ROWS[:4])
    assert torch.equal(torch.cat([piece["x"] for piece in first.microbatches]), ROWS[:4])
    assert first.samples == Samples(4)
    assert batch.first(3) is batch


def test_micro_batches_along_the_second_dimension() -> None:
    first = CutBatch.of(ROWS, 2, Samples(2, dim=1)).first(1)
    assert torch.equal(first.whole, ROWS[:, :1])


def test_a_batch_of_several_loaders_has_the_samples_of_one() -> None:
    batch = CutBatch.of([None, {"x": ROWS}], 2, None)
    assert list(batch.num_samples) == [3, 2]
    assert batch.weights("samples", COPIES).all == [0.6, 0.4]


def test_an_uncut_batch_is_its_own_micro_batch() -> None:
    thing = object()
    assert CutBatch.uncut(thing).microbatches == [thing]
    for weighting in ("labels", "sum", lambda _: 0.0):
        assert CutBatch.uncut(thing).weights(weighting, COPIES).all == [1.0]
    with pytest.raises(BatchError):
        CutBatch.of([None, None], 2, None)
