"""Entries of batches that become another kind are told from those that stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetero.devices.copies import PlainCopies
from lightning_hetero.guard.check_schedule import BatchKindReader

ONES = torch.ones(2, 3, dtype=torch.long)


def new_in(first: Tensor, later: Tensor) -> set[Any]:
    """The kinds of a later batch that the first one has not."""
    reader = BatchKindReader(PlainCopies(torch.device("cpu")))
    known = reader.read({"batch": first}).names()
    return reader.read({"batch": later}).names() - known


@pytest.mark.parametrize(
    ("first", "later", "kind"),
    [
        (ONES, ONES.tril(), "several values"),
        (ONES.bool(), ONES.tril().bool(), "several values"),
        (0 * ONES, ONES, "a number that is not zero"),
        (ONES.tril(), ONES.tril() * -100, "labels that are left out"),
        (ONES.tril().float(), ONES.tril() / ONES.tril(), "NaN"),
        (ONES.tril(), torch.ones(2, 4, dtype=torch.long).tril(), "another length"),
    ],
)
def test_a_kind_that_no_batch_had_is_new(first: Tensor, later: Tensor, kind: str) -> None:
    assert new_in(first, later) == {("data", "batch", kind)}


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (ONES.tril(), ONES),
        (torch.rand(2, 3), torch.rand(4, 3)),
        (ONES.tril() * -100, ONES.tril()),
        (torch.eye(3).to_sparse(), torch.eye(3).to_sparse()),
        (torch.tensor(1.0), torch.tensor(2.0)),
        (torch.empty(0, 3), torch.empty(0, 3)),
    ],
    ids=["one value", "more samples", "nothing left out", "sparse", "a number", "empty"],
)
def test_a_batch_of_a_known_kind_has_nothing_new(first: Tensor, later: Tensor) -> None:
    assert new_in(first, later) == set()
