"""Loops, loaders, overridden hooks: what a project does with Lightning, it may do over stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import ModelError

from ..models import VOCABULARY, TinyModule, fit, loader, sequences, trainer
from ..pairwise import keeping

Batch = dict[str, Tensor]


class Streamed(IterableDataset[Batch]):
    def __iter__(self) -> Any:
        return iter(sequences(20))


class OfTwoLoaders(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        loss: Tensor = self.model(**parts[0]).loss + 0.5 * self.model(**parts[1]).loss
        return loss


class OneOfTwo(TinyModule):
    """The shorter loader ends first."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = [self.model(**part).loss for part in batch if part is not None]
        return torch.stack(losses).sum()


class OfTwoValidations(TinyModule):
    def validation_step(  # type: ignore[override]
        self, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.log("val_loss", self.model(**batch).loss)


class OwnSteps(TinyModule):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 1e-4 * (1 + self.trainer.global_step)
        super().optimizer_step(*args, **kwargs)


class OwnClipping(TinyModule):
    def configure_gradient_clipping(self, optimizer: Any, *_args: Any, **_kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class TorchClipping(TinyModule):
    def configure_gradient_clipping(self, optimizer: Any, *_args: Any, **_kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class Skipping(TinyModule):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs:
            super().on_train_batch_end(outputs, batch, batch_idx)


class EndsEpochs(TinyModule):
    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:  # type: ignore[override]
        return -1 if batch_idx == 3 else None


class Reloading(TinyModule):
    """Has other data in every epoch."""

    def train_dataloader(self) -> Any:
        return loader(8 + 4 * self.current_epoch, 4)


class OfThreeKinds(TinyModule):
    """Returns the loss, a dict with more than the loss, or nothing."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 3 == 2:
            return None
        return loss if batch_idx % 3 else {"loss": loss, "ids": batch["input_ids"], "name": "a"}

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if not outputs:
            return
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx % 3 == 0:
            assert torch.equal(outputs["ids"], batch["input_ids"])
            assert outputs["name"] == "a"


class LogsTwice(TinyModule):
    """On step the later value counts, over an epoch both do."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for factor in (2, 3):
            self.log("twice", factor * loss, on_step=True, on_epoch=True)
        return loss


class Plateau(TinyModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=9.0)
        config = {"scheduler": schedule, "monitor": "train_loss", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": config}


class ChangesItsBatch(TinyModule):
    """Takes the labels out of its batch, and changes tokens in place: twice would be too often."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        labels = batch.pop("labels")
        batch["input_ids"].add_(1).remainder_(VOCABULARY)
        if batch_idx == 3:
            self.log("fourth", float(batch["input_ids"].sum()), reduce_fx="sum")
        loss: Tensor = self.model(**batch, labels=labels).loss
        return loss


class LeavesOutLabels(TinyModule):
    """Leaves out some labels in place, and none of the first batch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        batch["labels"][batch["labels"] < 12 * (batch_idx > 0)] = -100
        return super().training_step(batch, batch_idx)


class FetchesBatches(TinyModule):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, *_ = next(dataloader_iter)
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, batch_size=4)
        return loss


EXAMPLE = torch.ones(2, 3, dtype=torch.long)


class WithExample(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = EXAMPLE

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens).logits
        return logits


class WarmRestarts(TinyModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def two_loaders(mode: Any) -> CombinedLoader:
    return CombinedLoader([loader(20, 4), loader(12, 4)], mode)


def named_loaders() -> CombinedLoader:
    return CombinedLoader({"first": loader(20, 4), "second": loader(12, 4)}, "min_size")


def ordinary() -> Any:
    return loader(20, 4)


# For what happens between two epochs.
TWICE = {"max_epochs": 2}

CASES: dict[str, tuple[type[TinyModule], Callable[[], Any], Any, dict[str, Any]]] = {
    "iterable": (TinyModule, lambda: DataLoader(Streamed(), batch_size=4), None, TWICE),
    "shortest of two": (OfTwoLoaders, lambda: two_loaders("min_size"), None, {}),
    "longest of two": (OfTwoLoaders, lambda: two_loaders("max_size_cycle"), None, {}),
    "named loaders": (OfTwoLoaders, named_loaders, None, {}),
    "two validations": (OfTwoValidations, ordinary, [loader(8, 4), loader(4, 4)], {}),
    "fast_dev_run": (TinyModule, ordinary, loader(8, 4), {"fast_dev_run": 2}),
    "overfit_batches": (TinyModule, ordinary, loader(8, 4), {"overfit_batches": 2, **TWICE}),
    "val_check_interval, inference_mode, profiler": (
        TinyModule,
        ordinary,
        loader(8, 4),
        {"val_check_interval": 2, "inference_mode": False, "profiler": "simple"},
    ),
    "limits": (
        TinyModule,
        ordinary,
        loader(8, 4),
        {"limit_train_batches": 0.5, "limit_val_batches": 1},
    ),
    "longest of two, once": (OneOfTwo, lambda: two_loaders("max_size"), None, {}),
    "part of an epoch": (TinyModule, ordinary, loader(8, 4), {"val_check_interval": 0.5}),
    "across epochs": (
        TinyModule,
        ordinary,
        loader(8, 4),
        {"val_check_interval": 7, "check_val_every_n_epoch": None, **TWICE},
    ),
    "part of the data": (TinyModule, ordinary, None, {"overfit_batches": 0.4, **TWICE}),
    "new loaders": (
        Reloading,
        lambda: None,
        None,
        {"reload_dataloaders_every_n_epochs": 1, **TWICE},
    ),
    "changed batches": (ChangesItsBatch, ordinary, None, {"accumulate_grad_batches": 2, **TWICE}),
    "fetched batches": (FetchesBatches, ordinary, None, TWICE),
    "three kinds of results": (OfThreeKinds, ordinary, None, {}),
    "logs twice": (LogsTwice, ordinary, None, {}),
    "plateau every step": (Plateau, ordinary, None, {}),
    "all steps at once, max_time": (
        TinyModule,
        ordinary,
        None,
        {"max_steps": 7, "max_epochs": -1, "max_time": "00:00:05:00"},
    ),
    "barebones": (TinyModule, ordinary, None, {"barebones": True, "logger": None}),
    "short last window": (TinyModule, ordinary, None, {"accumulate_grad_batches": 3, **TWICE}),
    # It keeps a traceback for each operation.
    "detect_anomaly": (
        TinyModule,
        ordinary,
        None,
        {"detect_anomaly": True, "limit_train_batches": 1},
    ),
    "optimizer_step": (OwnSteps, ordinary, None, {}),
    "configure_gradient_clipping": (OwnClipping, ordinary, None, {}),
    "skipped batches": (Skipping, ordinary, None, {"accumulate_grad_batches": 2, **TWICE}),
    "ended epochs": (EndsEpochs, ordinary, None, TWICE),
    "warm restarts": (WarmRestarts, ordinary, None, {}),
}


# Lightning alone makes of these which batches come, and how often; that is nothing to a strategy.
OF_LIGHTNING_ALONE = (
    *("shortest of two", "longest of two", "fast_dev_run", "overfit_batches", "limits"),
    *("part of an epoch", "across epochs", "part of the data", "all steps at once, max_time"),
    *("warm restarts", "new loaders", "named loaders", "iterable"),
)


@pytest.mark.parametrize(
    "case", keeping([case for case in CASES if case not in OF_LIGHTNING_ALONE], CASES)
)
def test_training_is_that_of_one_device(case: str, workers: list[str]) -> None:
    kind, data, validation, options = CASES[case]
    runs = []
    for strategy in ("auto", HeteroPipelineStrategy(workers[:2], plan="even", micro_batches=2)):
        module = kind()
        run = trainer(strategy, **{"max_epochs": 1, **options})
        run.fit(module, data(), validation)
        metrics = {name: float(value) for name, value in run.callback_metrics.items()}
        runs.append((module, run.global_step, metrics))
    (expected, steps, expected_metrics), (found, found_steps, metrics) = runs
    assert found_steps == steps
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)
    assert metrics == pytest.approx(expected_metrics, rel=1e-4)
    for parameter, wanted in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, wanted, rtol=1e-4, atol=1e-5)


class ReplacesLabels(TinyModule):
    """Does so with a new tensor."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        is_out = batch["labels"] < 12 * (batch_idx > 0)
        batch["labels"] = batch["labels"].masked_fill(is_out, -100)
        return super().training_step(batch, batch_idx)


class LeavesOutLabelsEarlier(TinyModule):
    """Does so before the strategy counts them."""

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        least = 12 * (self.trainer.fit_loop.batch_idx > 0)
        batch["labels"][batch["labels"] < least] = -100
        return batch


@pytest.mark.follows(
    "do so in the dataset or in `on_after_batch_transfer`, or use the safe mode, "
    "`micro_batching='boundary'`"
)
@pytest.mark.parametrize("kind", [LeavesOutLabels, ReplacesLabels])
def test_labels_left_out_by_the_step_are_said_before_any_is(
    kind: type[TinyModule], workers: list[str]
) -> None:
    """The strategy has counted them then. The safe mode has the numbers of one device."""
    expected = fit(kind(), data=ordinary())
    with pytest.warns(UserWarning, match=r"changes the `labels` of its batch, and the losses"):
        found = fit(kind(), even(workers), ordinary())
    assert found.losses != pytest.approx(expected.losses, rel=1e-4)
    found = fit(kind(), even(workers, micro_batching="boundary"), ordinary())
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)
    expected = fit(LeavesOutLabelsEarlier(), data=ordinary())
    found = fit(LeavesOutLabelsEarlier(), even(workers), ordinary())
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)


class WithExampleOfClass(WithExample):
    @property
    def example_input_array(self) -> Tensor:
        return EXAMPLE

    @example_input_array.setter
    def example_input_array(self, example: Any) -> None:
        pass


@pytest.mark.follows("For these use `ModelSummary(module)` before the run.")
@pytest.mark.parametrize("kind", [WithExample, WithExampleOfClass])
def test_a_summary_does_not_call_layers_on_workers(
    workers: list[str], kind: type[WithExample]
) -> None:
    """An `example_input_array` would make it do so; after the run the module has it again."""
    module = kind()
    example = module.example_input_array
    assert ModelSummary(module).total_flops > 0
    with pytest.warns(UserWarning, match="`example_input_array` is None during the run"):
        fit(module, even(workers), ordinary(), enable_model_summary=True)
    assert module.example_input_array is example
    assert module.losses == pytest.approx(fit(TinyModule(), data=ordinary()).losses, rel=1e-4)


def even(workers: list[str], **options: Any) -> HeteroPipelineStrategy:
    return HeteroPipelineStrategy(workers[:2], plan="even", micro_batches=2, **options)


def test_clipping_by_hand_is_refused(workers: list[str]) -> None:
    """It would see the gradients of this process alone."""
    strategy = HeteroPipelineStrategy(workers[:2], plan="even", micro_batches=2)
    with pytest.raises(ModelError, match=r"clip them with `self\.clip_gradients"):
        trainer(strategy, max_epochs=1).fit(TorchClipping(), ordinary())
