"""Forecasts of time series."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from project import NUM_STEPS, Project, wave


def train_patch_tst(options: dict[str, Any], folder: Path) -> None:
    """A transformer of GluonTS: its estimator makes the Trainer from our arguments."""
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
        # It reads its best checkpoint.
        trainer_kwargs={**options, "enable_checkpointing": True, "max_epochs": 1},
    )
    estimator.train(ListDataset(series, freq="h"), cache_data=True)


def train_decoder_mlp(options: dict[str, Any], folder: Path) -> None:
    """A network of PyTorch Forecasting, with its own data set, loss, metrics and validation."""
    import lightning.pytorch as pl
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
    limits = {"max_epochs": 1, "limit_train_batches": NUM_STEPS, "gradient_clip_val": 0.1}
    trainer = pl.Trainer(**options, **limits)
    trainer.fit(model, data.to_dataloader(batch_size=16), data.to_dataloader(train=False))


def train_nbeats(options: dict[str, Any], folder: Path) -> None:
    """N-BEATS of Darts: each stack takes away what it explains, and the forecasts are added up."""
    import numpy as np
    from darts import TimeSeries
    from darts.models import NBEATSModel

    series = [TimeSeries.from_values(np.array(wave(number, 100))) for number in range(4)]
    model = NBEATSModel(
        input_chunk_length=24,
        output_chunk_length=8,
        num_stacks=4,
        num_blocks=1,
        num_layers=2,
        layer_widths=32,
        batch_size=16,
        n_epochs=1,
        random_state=1,
        work_dir=str(folder),
        pl_trainer_kwargs={**options, "limit_train_batches": NUM_STEPS},
    )
    model.fit(series)


def train_nhits(options: dict[str, Any], folder: Path) -> None:
    """N-HiTS of NeuralForecast, whose models make a Trainer from what they do not know."""
    import pandas as pd
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS

    days = pd.date_range("2026-01-01", periods=100, freq="D")
    series = [
        pd.DataFrame({"unique_id": str(number), "ds": days, "y": wave(number, 100)})
        for number in range(4)
    ]
    model = NHITS(
        h=8,
        input_size=24,
        max_steps=NUM_STEPS,
        mlp_units=3 * [[32, 32]],
        batch_size=4,
        windows_batch_size=16,
        **options,
    )
    NeuralForecast([model], freq="D").fit(pd.concat(series))


PROJECTS = (
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
    Project("darts", "darts", {"layers": "stacks"}, train_nbeats, "pytorch_lightning"),
    Project(
        "neuralforecast",
        "neuralforecast",
        # Its step draws windows from the series of the batch.
        {"layers": "blocks", "micro_batching": "boundary"},
        train_nhits,
        "pytorch_lightning",
    ),
)
