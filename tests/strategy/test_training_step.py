"""Data loaders and their batches, and the loss of a step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero.devices.copies import PlainCopies, StreamedCopies
from lightning_hetero.errors import BatchError, ModelError
from lightning_hetero.pipeline.microbatch import Samples
from lightning_hetero.pipeline.results import loss_of
from lightning_hetero.strategy.training_step import (
    BatchReader,
    Collated,
    LossScaling,
    as_computed,
    collated_by,
)

from ..devices.made_up_streams import MadeUpStreams, on_device
from ..models import TinyModule, trainer

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


def test_the_loader_of_the_running_loop_is_asked() -> None:
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


def test_the_loss_is_found_where_lightning_looks_for_it() -> None:
    loss = torch.tensor(1.0)
    assert loss_of(loss) is loss
    assert loss_of({"loss": loss, "other": 1}) is loss
    assert loss_of(None) is None


@pytest.mark.parametrize("result", [1.0, {"lose": torch.tensor(1.0)}, {"loss": None}, "loss"])
def test_a_result_without_a_loss_is_refused(result: Any) -> None:
    with pytest.raises(BatchError, match="without a loss tensor"):
        loss_of(result)


def test_backward_shows_the_gradients_that_were_computed() -> None:
    shown: list[bool] = []
    loss = as_computed(torch.tensor(2.0), lambda _gradient: shown.append(True))
    assert loss.item() == 2.0
    assert shown == []
    (loss / 3).backward()
    assert shown == [True]


def test_a_loss_scaled_on_its_way_to_backward_is_refused() -> None:
    scaling = LossScaling(PlainCopies(torch.device("cpu")))
    loss = as_computed(torch.tensor(2.0), partial(scaling.note, expected=1.0))
    with pytest.raises(ModelError, match="scaled by 2 on its way"):
        (loss * 2).backward()


def test_if_reading_the_scale_means_waiting_the_next_step_refuses_it() -> None:
    streams = MadeUpStreams()
    scaling = LossScaling(StreamedCopies(streams))
    scaling.check_last()
    for scale in (1.0, 2.0):
        scaling.note(on_device(torch.tensor(scale)), 1.0)
        if scale == 1.0:
            scaling.check_last()
    with pytest.raises(ModelError, match="scaled by 2 on its way"):
        scaling.check_last()
    scaling.check_last()  # it is said once
