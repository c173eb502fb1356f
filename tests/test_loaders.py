"""What data loaders say of their batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero.loaders import BatchReader, Collated, collated_by
from lightning_hetero.pipeline.microbatch import Samples

from .models import TinyModule, trainer

ROWS: Any = [torch.zeros(7) for _ in range(10)]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(ROWS)


@pytest.mark.parametrize(
    ("loader", "batch_idx", "known"),
    [
        (DataLoader(ROWS, batch_size=4), 0, Collated(4)),
        (DataLoader(ROWS, batch_size=4), 2, Collated(2)),
        (DataLoader(ROWS, batch_size=4, collate_fn=list), 0, Collated(4, may_be_listed=True)),
        (DataLoader(Stream(), batch_size=4), 5, Collated(4)),
        (DataLoader(ROWS, batch_size=None), 0, Collated()),
        (ROWS, 0, Collated()),
        (None, 0, Collated()),
    ],
)
def test_a_loader_says_how_many_samples_it_collates(
    loader: Any, batch_idx: int, known: Collated
) -> None:
    assert collated_by(loader, batch_idx) == known


class Reading(TinyModule):
    """Notes where the samples of its batches are."""

    def __init__(self) -> None:
        super().__init__(num_layers=1)
        self.found: list[Samples] = []

    def on_fit_start(self) -> None:
        self.reader = BatchReader(self.trainer, None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.found.append(self.reader.find(batch, [batch_idx]))
        return next(self.parameters()).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.found.append(self.reader.find(batch, [batch_idx, dataloader_idx]))


def test_the_present_loop_s_loader_is_asked() -> None:
    module = Reading()
    along = DataLoader(ROWS, batch_size=4, collate_fn=lambda rows: torch.stack(rows, 1))
    listed = DataLoader(ROWS, batch_size=5, collate_fn=list)
    run = trainer(max_epochs=1, limit_val_batches=1)
    run.fit(module, along, [listed, DataLoader(ROWS, batch_size=3)])
    assert module.found == [
        Samples(4, dim=1),
        Samples(4, dim=1),
        Samples(2, dim=1),
        Samples(5, are_listed=True),
        Samples(3),
    ]


def test_a_batch_without_tensors_has_no_count() -> None:
    assert BatchReader(trainer(), None).count(["text"], [0]) is None
