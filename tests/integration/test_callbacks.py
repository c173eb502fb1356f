"""Lightning's own callbacks do over stages what they do on one device, or say that they cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import callbacks as c
from lightning.pytorch.loggers import CSVLogger

from lightning_hetero import HeteroPipelineStrategy

from ..models import TinyModule, loader, trainer


class TunableModule(TinyModule):
    """Has what the finders look for."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3
        self.batch_size = 4

    def train_dataloader(self) -> Any:
        return loader(24, self.batch_size)

    def val_dataloader(self) -> Any:
        return loader(8, 4)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}


def train(
    callbacks: Sequence[c.Callback], strategy: Any, folder: Path, **options: Any
) -> TunableModule:
    module = TunableModule()
    options = {
        "max_epochs": 2,
        "limit_train_batches": 3,
        "default_root_dir": folder,
        **options,
    }
    trainer(strategy, callbacks=[*callbacks], **options).fit(module)
    return module


# Those that leave each other alone share a run.
CALLBACKS: dict[str, Callable[[Path], Sequence[c.Callback]]] = {
    "learning rate finder": lambda _: [c.LearningRateFinder(num_training_steps=6)],
    "batch size finder": lambda _: [c.BatchSizeFinder(max_trials=2, steps_per_trial=2)],
    "early stopping, rich": lambda _: [
        c.EarlyStopping("val_loss", patience=0, min_delta=10.0),
        c.RichProgressBar(),
    ],
    "accumulation, monitors, summary": lambda _: [
        c.GradientAccumulationScheduler({0: 1, 1: 2}),
        c.LearningRateMonitor("step"),
        c.DeviceStatsMonitor(cpu_stats=False),
        c.Timer(),
        c.ModelSummary(max_depth=-1),
    ],
    "best and last, weights every third step, tqdm": lambda folder: [
        c.ModelCheckpoint(folder / "best", monitor="val_loss", save_top_k=2, save_last=True),
        c.ModelCheckpoint(
            folder / "third", every_n_train_steps=3, save_top_k=-1, save_weights_only=True
        ),
        c.TQDMProgressBar(),
    ],
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_has_the_effect_that_it_has_on_one_device(
    name: str, workers: list[str], tmp_path: Path
) -> None:
    runs = []
    for strategy in ("auto", HeteroPipelineStrategy(workers[:2], plan="even", micro_batches=2)):
        folder = tmp_path / type(strategy).__name__
        options: dict[str, Any] = {"enable_checkpointing": "best" in name}
        options["enable_progress_bar"] = "tqdm" in name or "rich" in name
        options["logger"] = CSVLogger(folder)
        module = train(CALLBACKS[name](folder), strategy, folder, **options)
        files = sorted(path.relative_to(folder) for path in folder.rglob("*.ckpt"))
        runs.append((module, files))
    (expected, expected_files), (found, files) = runs
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.lr == pytest.approx(expected.lr, rel=1e-4)
    assert found.batch_size == expected.batch_size
    assert files == expected_files
    for parameter, wanted in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, wanted, rtol=1e-4, atol=1e-6)


class Thawing(c.BaseFinetuning):
    """Lightning's own way of training in phases."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.lm_head)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        self.unfreeze_and_add_param_group(pl_module.model.lm_head, optimizer)


@pytest.mark.parametrize(
    "callback",
    [
        c.StochasticWeightAveraging(1e-3),
        c.WeightAveraging(),
        c.EMAWeightAveraging(),
        Thawing(),
        c.ModelPruning("l1_unstructured"),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_a_callback_that_would_look_for_weights_that_are_elsewhere_is_refused(
    callback: c.Callback, workers: list[str], tmp_path: Path
) -> None:
    strategy = HeteroPipelineStrategy(workers[:2], plan="even", micro_batches=2)
    with pytest.raises(
        MisconfigurationException,
        match=rf"^{type(callback).__name__} .* this process does not have",
    ):
        train([callback], strategy, tmp_path)
