from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from lightning_hetero.profiling.sample import NoSample, SampleBatch, sample_batch

from ..models import TinyModule, loader, sequences, trainer


def sample(data: Any, module: TinyModule | None = None, **options: Any) -> SampleBatch:
    """The sample of a run that is about to train."""
    run = trainer(**options)
    module = module or TinyModule(1)
    run.strategy._lightning_module = module
    module.trainer = run
    run.state.fn = TrainerFn.FITTING
    run._data_connector.attach_data(module, train_dataloaders=data)
    return sample_batch(run)


def test_it_is_the_first_batch_and_can_be_cut() -> None:
    found = sample(loader(8, 4))
    expected = next(iter(loader(8, 4)))
    assert torch.equal(found.batch["input_ids"], expected["input_ids"])
    assert found.size == 4
    assert len(found.first(3)["labels"]) == 3
    assert found.form == "4x10 int64, 4x10 int64, 4x10 int64"


def test_shuffled_data_comes_in_the_same_order_afterwards() -> None:
    def shuffled() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        sampler = RandomSampler(sequences(8), generator=generator)  # type: ignore[arg-type]
        return DataLoader(sequences(8), 4, sampler=sampler, generator=generator)  # type: ignore[arg-type]

    looked_at, untouched = shuffled(), shuffled()
    sample(looked_at)
    for found, expected in zip(looked_at, untouched, strict=True):
        assert torch.equal(found["input_ids"], expected["input_ids"])


def test_no_process_is_started_for_it() -> None:
    data = DataLoader(sequences(8), 4, num_workers=2, prefetch_factor=2)  # type: ignore[arg-type]
    sample(data)
    assert (data.num_workers, data.prefetch_factor, data._iterator) == (2, 2, None)


def test_several_loaders_give_a_batch_of_each() -> None:
    found = sample([loader(8, 4), loader(8, 4)])
    assert found.of_several_loaders
    assert [len(part["labels"]) for part in found.first(2)] == [2, 2]
    named = sample(CombinedLoader({"a": loader(8, 4), "b": loader(8, 4)}, "min_size"))
    assert set(named.batch) == {"a", "b"}


class Stream(IterableDataset[Tensor]):
    """Starts anew whenever it is read."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(12.0).reshape(6, 2))


def test_a_stream_is_read_and_starts_anew() -> None:
    stream = DataLoader(Stream(), batch_size=3)
    assert sample(stream).size == 3
    assert len(list(stream)) == 2


class Slices:
    """Goes on where it was left, as some libraries' loaders do."""

    def __init__(self, copies: bool) -> None:
        self.batches: Any = list(torch.arange(12.0).reshape(3, 2, 2))
        if not copies:
            self.lock = threading.Lock()

    def __iter__(self) -> Iterator[Tensor]:
        while self.batches:
            yield self.batches.pop(0)


def test_data_that_goes_on_where_it_was_left_is_copied_or_left_alone() -> None:
    slices = Slices(copies=True)
    assert sample(slices).size == 2
    assert len(slices.batches) == 3
    with pytest.raises(NoSample, match="cannot be copied"):
        sample(Slices(copies=False))


class Noisy(list[Any]):
    """A dataset with random numbers of its own."""

    def __init__(self) -> None:
        super().__init__(range(8))
        self.random = random.Random(0)
        self.numpy = np.random.default_rng(0)
        self.old = np.random.RandomState(0)

    def __getitem__(self, index: Any) -> Any:
        return self.random.random() + self.numpy.random() + self.old.rand()


def test_random_numbers_of_the_data_itself_stay_where_they_were() -> None:
    looked_at, untouched = Noisy(), Noisy()
    sample(DataLoader(looked_at, 4))
    assert looked_at[0] == untouched[0]


def test_a_batch_that_cannot_be_cut_is_one_piece() -> None:
    found = sample([{"text": "a"}, {"text": "b"}])
    assert found.size is None
    assert found.first(1) is found.batch


@pytest.mark.parametrize(
    ("data", "options", "reason"),
    [
        (iter([torch.ones(2, 2)]), {}, "read only once"),
        ([], {}, "has no batch"),
        (loader(4, 4), {"limit_train_batches": 0}, "no train_dataloader"),
    ],
)
def test_without_a_batch_there_is_a_reason(data: Any, options: Any, reason: str) -> None:
    with pytest.raises(NoSample, match=reason):
        sample(data, **options)


def test_a_step_that_takes_the_loader_itself_is_no_sample() -> None:
    class Taking(TinyModule):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            raise NotImplementedError

    with pytest.raises(NoSample, match="dataloader_iter"):
        sample(loader(4, 4), Taking(1))
