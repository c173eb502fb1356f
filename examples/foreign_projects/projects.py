"""Training entries of other people's projects, each called as its documentation calls it.

Only `strategy` differs from one run to the next. Dropout is off, since its masks are others over
workers than on one device, and the losses could not be compared.
"""

from __future__ import annotations

import importlib.util
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

SEED = 1
NUM_STEPS = 10


@dataclass(frozen=True)
class Project:
    """A project, where its model has its layers, and how it trains.

    Args:
        name: Its distribution.
        package: What is imported; the project is skipped without it.
        arguments: For `HeteroPipelineStrategy`.
        train: Takes a strategy, a callback and a folder for what the project writes.
    """

    name: str
    package: str
    arguments: dict[str, Any]
    train: Callable[[Any, pl.Callback, Path], None]

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


class Losses(pl.Callback):
    """What every step's loss was."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.append(float(outputs["loss"]))


def losses(project: Project, strategy: Any, folder: Path) -> list[float]:
    """The losses of a project's training run, with the same seed for every strategy."""
    pl.seed_everything(SEED, verbose=False)
    recorded = Losses()
    project.train(strategy, recorded, folder)
    return recorded.seen


def without_dropout(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(part, nn.MultiheadAttention):
            part.dropout = 0.0
    return module


def train_lightning_transformer(strategy: Any, callback: pl.Callback, folder: Path) -> None:
    """The language model of `lightning.pytorch.demos`, which reads this file."""
    from lightning.pytorch.demos.transformer import LightningTransformer, WikiText2

    class Transformer(LightningTransformer):
        def prepare_data(self) -> None:
            """Its text is here and need not be downloaded."""

    (folder / "wikitext-2.txt").write_text(Path(__file__).read_text("utf-8"), "utf-8")
    data = WikiText2(folder, download=False, block_size=12)
    model = without_dropout(Transformer(data.vocab_size))
    trainer = pl.Trainer(
        **options(folder), max_steps=NUM_STEPS, strategy=strategy, callbacks=[callback]
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))


def train_patch_tst(strategy: Any, callback: pl.Callback, folder: Path) -> None:
    """A forecasting transformer of GluonTS: its estimator makes the Trainer from our arguments."""
    from gluonts.dataset.common import ListDataset
    from gluonts.torch import PatchTSTEstimator

    series = [{"start": "2026-01-01", "target": wave(number, 200)} for number in range(8)]
    estimator = PatchTSTEstimator(
        prediction_length=24,
        context_length=96,
        patch_len=16,
        num_encoder_layers=4,
        dropout=0.0,
        batch_size=16,
        num_batches_per_epoch=NUM_STEPS,
        trainer_kwargs={
            **options(folder),
            "enable_checkpointing": True,  # it reads its best checkpoint
            "max_epochs": 1,
            "strategy": strategy,
            "callbacks": [callback],
        },
    )
    estimator.train(ListDataset(series, freq="h"), cache_data=True)


def train_decoder_mlp(strategy: Any, callback: pl.Callback, folder: Path) -> None:
    """A network of PyTorch Forecasting, with its own data set, loss, metrics and validation."""
    import pandas as pd
    from pytorch_forecasting import DecoderMLP, TimeSeriesDataSet

    rows = [
        {"series": str(number), "time": time, "value": value, "season": math.cos(time / 5)}
        for number in range(6)
        for time, value in enumerate(wave(number, 100))
    ]
    data = TimeSeriesDataSet(
        pd.DataFrame(rows),
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=24,
        max_prediction_length=8,
        time_varying_known_reals=["time", "season"],
        time_varying_unknown_reals=["value"],
    )
    model = DecoderMLP.from_dataset(data, hidden_size=32, n_hidden_layers=5, dropout=0.0)
    trainer = pl.Trainer(
        **options(folder),
        max_epochs=1,
        limit_train_batches=NUM_STEPS,
        gradient_clip_val=0.1,
        strategy=strategy,
        callbacks=[callback],
    )
    trainer.fit(model, data.to_dataloader(batch_size=16), data.to_dataloader(train=False))


def options(folder: Path) -> dict[str, Any]:
    """Arguments of every Trainer here."""
    return {
        "accelerator": "cpu",
        # In float32 the last bits, which another order of sums changes, grow from step to step.
        "precision": "64-true",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }


def wave(number: int, length: int) -> list[float]:
    """A series to forecast."""
    noise = random.Random(number)
    return [math.sin(time / 7 + number) + noise.gauss(0.0, 0.1) for time in range(length)]


PROJECTS = (
    Project(
        "lightning",
        "lightning",
        {"layers": "model.transformer.encoder.layers"},
        train_lightning_transformer,
    ),
    Project(
        "gluonts",
        "gluonts",
        # It scales a series of which it knows nothing as the others of its batch.
        {"layers": "model.encoder.layers", "micro_batching": "boundary"},
        train_patch_tst,
    ),
    Project(
        "pytorch-forecasting",
        "pytorch_forecasting",
        {"layers": "mlp.sequential"},
        train_decoder_mlp,
    ),
)
