"""What Lightning does to a data loader reaches the loader of which windows are made."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan, windows
from lightning_hetero.errors import BatchError

from ..equality import differing
from ..models import TinyModule, fit, loader, sequences, trainer

NUM_LAYERS = 1

pytestmark = pytest.mark.filterwarnings("ignore:The plan has no stage on a worker")


def alone() -> HeteroPipelineStrategy:
    return HeteroPipelineStrategy(0, Plan([StagePlan(["coordinator"], (0, NUM_LAYERS))], 1))


def both(given: Any, size: int, module: Any = TinyModule, **options: Any) -> tuple[Any, Any]:
    """A run of windows, and the run of plain Lightning that accumulates."""
    found, expected = module(NUM_LAYERS), module(NUM_LAYERS)
    pl.seed_everything(3, workers=True, verbose=False)
    fit(expected, "auto", given(), accumulate_grad_batches=size, **options)
    pl.seed_everything(3, workers=True, verbose=False)
    fit(found, alone(), windows(given(), size), **options)
    return found, expected


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(sequences(5))


class Drawing:
    """Rows with noise from a generator that only the processes of a loader have seeded."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        row = sequences(4)[index]
        return {**row, "input_ids": (row["input_ids"] + random.randrange(40)) % 48}


LOADERS: dict[str, Any] = {
    "shuffled": lambda: DataLoader(sequences(5), batch_size=1, shuffle=True),  # type: ignore[arg-type]
    "without length": lambda: DataLoader(Stream(), batch_size=1),
    "uncollated": lambda: DataLoader(
        [{name: row[None] for name, row in each.items()} for each in sequences(5)],  # type: ignore[arg-type]
        batch_size=None,
    ),
    "in processes": lambda: DataLoader(Drawing(), batch_size=1, num_workers=1, shuffle=True),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", LOADERS)
def test_every_loader_gives_its_batches_in_their_order(kind: str) -> None:
    found, expected = both(LOADERS[kind], 2, max_epochs=2)
    assert differing(found, expected) == []


class OfTwo(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch["a"]).loss + self.model(**batch["b"]).loss
        return loss


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
def test_several_loaders_make_pieces_together(mode: Any) -> None:
    def given() -> CombinedLoader:
        return CombinedLoader({"a": loader(5, 1), "b": loader(6, 2)}, mode)

    found, expected = both(given, 2, OfTwo)
    assert differing(found, expected) == []
    assert found.trainer.num_training_batches == {"min_size": 2, "max_size_cycle": 3}[mode]


@pytest.mark.follows(
    "Wrap them together: `windows(CombinedLoader(loaders, 'max_size_cycle'), size)`",
)
def test_one_of_several_loaders_may_not_give_windows() -> None:
    given = {"a": windows(loader(4, 1), 2), "b": loader(4, 1)}
    with pytest.raises(BatchError, match="Wrap them together"):
        fit(OfTwo(NUM_LAYERS), alone(), given)
    loaders = {"a": loader(4, 1), "b": loader(4, 1)}
    fit(OfTwo(NUM_LAYERS), alone(), windows(CombinedLoader(loaders, "max_size_cycle"), 2))


class Order(torch.utils.data.Sampler[int]):
    epochs: list[int]

    def __init__(self) -> None:
        self.epochs = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("is_combined", [False, True])
def test_a_sampler_is_told_the_epoch(is_combined: bool) -> None:
    order = Order()
    data: Any = DataLoader(sequences(4), sampler=order)  # type: ignore[arg-type]
    module: Any = TinyModule if not is_combined else OfTwo
    if is_combined:
        data = CombinedLoader({"a": data, "b": loader(4, 1)}, "min_size")
    fit(module(NUM_LAYERS), alone(), windows(data, 2), max_epochs=3)
    assert order.epochs == [0, 1, 2]


def test_overfitting_takes_the_same_windows_in_every_epoch() -> None:
    class Noting(TinyModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            rows = [int(row) for piece in batch.pieces for row in piece["input_ids"][:, 0]]
            self.losses.extend(rows)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            pass

    module = Noting(NUM_LAYERS)
    data = DataLoader(sequences(6), batch_size=1, shuffle=True)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="turning off the train dataloader shuffling"):
        fit(module, alone(), windows(data, 2), overfit_batches=1, max_epochs=2)
    first = [int(row["input_ids"][0]) for row in sequences(2)]
    assert module.losses == first * 2


def test_lightning_counts_windows() -> None:
    class Counting(TinyModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.batches = getattr(self, "batches", 0) + 1

        def on_validation_start(self) -> None:
            self.validations = getattr(self, "validations", 0) + 1

    data = windows(loader(12, 1), 2)
    module = Counting(NUM_LAYERS)
    options: Any = {"limit_train_batches": 4, "val_check_interval": 2}
    fit(module, alone(), data, loader(2, 2), **options)
    assert (module.batches, module.validations, module.global_step) == (4, 2, 4)


def test_a_datamodule_may_give_windows() -> None:
    class Data(pl.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.kinds: list[type] = []

        def train_dataloader(self) -> Any:
            return windows(loader(6, 1), 3)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.kinds.append(type(batch))
            return batch

    class Scheduled(TinyModule):
        def configure_optimizers(self) -> Any:
            self.steps = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    module, data = Scheduled(NUM_LAYERS), Data()
    trainer(alone(), max_epochs=2).fit(module, datamodule=data)
    assert module.steps == 4
    assert data.kinds == [dict] * 12
    # The hooks are the user's own again.
    assert "_on_before_batch_transfer" not in vars(module)


@pytest.mark.follows(
    "Give the Trainer that loader without `windows(...)`",
)
@pytest.mark.parametrize("function", ["fit", "validate", "test", "predict"])
def test_windows_are_refused_where_nothing_trains(function: str) -> None:
    run, module = trainer(alone(), max_epochs=1), TinyModule(NUM_LAYERS)
    given = windows(loader(4, 1), 2)
    data = (loader(4, 1), given) if function == "fit" else (given,)
    with pytest.raises(BatchError, match="only a training takes apart"):
        getattr(run, function)(module, *data)
    whole = (loader(4, 1), loader(4, 1)) if function == "fit" else (loader(4, 1),)
    getattr(trainer(alone(), max_epochs=1), function)(TinyModule(NUM_LAYERS), *whole)


class Resuming:
    """A loader that goes on where its state says."""

    def __init__(self) -> None:
        self.batches = [*loader(10, 1)]
        self.begin = self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.position, self.begin = self.begin, 0
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["position"]


class ResumingStream(Resuming):
    """It does not know how many batches come."""

    def __len__(self) -> int:
        raise TypeError


@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("kind", [Resuming, ResumingStream])
def test_a_run_resumes_in_mid_epoch_with_the_next_window(
    kind: Any, limit: int | None, tmp_path: Path
) -> None:
    def run(steps: int, path: Path | None = None) -> TinyModule:
        keeping = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        options: Any = {"max_steps": steps, "enable_checkpointing": True, "callbacks": [keeping]}
        module = TinyModule(NUM_LAYERS)
        data = windows(kind(), 3)
        return fit(module, alone(), data, ckpt_path=path, limit_train_batches=limit, **options)

    whole = run(4)
    for step in (2, 3):
        resumed = run(4, tmp_path / f"step={step}.ckpt")
        assert resumed.losses == whole.losses[step:]
        assert differing(resumed, whole) == []
