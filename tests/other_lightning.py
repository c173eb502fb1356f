"""A project on `pytorch_lightning`, which runs in a process of its own.

`python -m tests.other_lightning FOLDER WORKER WORKER` prints the name of each function below that
has ended well, one a line. Nothing here may import `lightning`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.callbacks import PipelineTimeline, StageMonitor, StageWeightAveraging


class Small(pl.LightningModule):
    """A module with its own data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.losses: list[float] = []

    def train_dataloader(self) -> DataLoader[Tensor]:
        samples = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(samples, batch_size=8)  # type: ignore[arg-type]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        loss = batch.square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def trainer_of(folder: Path, **options: Any) -> Any:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return pl.Trainer(**{**quiet, **options})


def strategy_of(workers: list[str]) -> HeteroPipelineStrategy:
    plan = Plan([StagePlan([workers[0]], (0, 2)), StagePlan([workers[1]], (2, 4))], 2)
    return HeteroPipelineStrategy(workers, plan, layers="layers")


def weights_of(module: nn.Module) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in module.state_dict().values()])


def training_equals_one_device(folder: Path, workers: list[str]) -> None:
    for precision, tolerance in (("32-true", 1e-5), ("bf16-mixed", 2e-2)):
        plain, piped = Small(), Small()
        trainer_of(folder, precision=precision).fit(plain)
        trainer = trainer_of(
            folder,
            precision=precision,
            strategy=strategy_of(workers),
            gradient_clip_val=100.0,
        )
        trainer.fit(piped)
        assert len(piped.losses) == 3
        torch.testing.assert_close(piped.losses, plain.losses, rtol=tolerance, atol=1e-6)
        allowed = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(weights_of(piped), weights_of(plain), **allowed)


def callbacks_and_checkpoints_work(folder: Path, workers: list[str]) -> None:
    trainer = trainer_of(
        folder,
        strategy=strategy_of(workers),
        callbacks=[
            StageMonitor(every_n_steps=1),
            PipelineTimeline(steps=(2,)),
            StageWeightAveraging(0.5),
        ],
        enable_checkpointing=True,
        enable_progress_bar=True,
        logger=pl.loggers.CSVLogger(folder),
        log_every_n_steps=1,
    )
    trainer.fit(Small())
    content = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)
    Small().load_state_dict(content["state_dict"])
    [metrics] = folder.rglob("metrics.csv")
    assert "pipeline/step_seconds" in metrics.read_text()
    assert list(folder.rglob("timeline.json"))


def the_name_of_the_strategy_is_registered(folder: Path, workers: list[str]) -> None:
    registry = pl.strategies.StrategyRegistry
    assert type(registry.get("hetero_pipeline")) is HeteroPipelineStrategy


def the_door_has_the_same_classes(folder: Path, workers: list[str]) -> None:
    import lightning_hetero.pytorch_lightning as door  # noqa: PLC0415

    assert door.HeteroPipelineStrategy is HeteroPipelineStrategy
    assert door.StageMonitor is StageMonitor
    assert door.Plan is Plan


def the_first_lightning_is_not_imported(folder: Path, workers: list[str]) -> None:
    assert "lightning" not in sys.modules


ACTS = (
    training_equals_one_device,
    callbacks_and_checkpoints_work,
    the_name_of_the_strategy_is_registered,
    the_door_has_the_same_classes,
    the_first_lightning_is_not_imported,
)

if __name__ == "__main__":
    for act in ACTS:
        act(Path(sys.argv[1]), sys.argv[2:])
        print("well:", act.__name__, flush=True)
