"""Under accumulation Lightning's hooks, files and bars are those of a run on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.callbacks import PipelineTimeline

from ..equality import assert_close, differing, weights_of
from ..models import TinyModule, fit, loader
from .shapes import SHAPES, shaped
from .yardstick import NUM_LAYERS

WINDOW = 4


def piped(workers: list[str]) -> HeteroPipelineStrategy:
    return HeteroPipelineStrategy(workers, shaped(workers, SHAPES["both ends, two workers"], 1))


def hooks_of(kind: type) -> list[str]:
    """The hooks that return nothing, so that it can be noted when they are called."""
    return [name for name in dir(kind) if name.startswith("on_") and name != "on_gpu"]


def noting(base: type, seen: list[Any]) -> Any:
    """A class that notes each of its hooks, with what a progress bar would show then."""

    def hook(name: str) -> Any:
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            run = args[0] if args and isinstance(args[0], pl.Trainer) else self.trainer
            metrics = {key: float(value) for key, value in run.progress_bar_metrics.items()}
            at = run.global_step, run.fit_loop.total_batch_idx
            seen.append((base.__name__, name, at, metrics))
            return getattr(base, name)(self, *args, **kwargs)

        return noted

    return type(base.__name__, (base,), {name: hook(name) for name in hooks_of(base)})


class Logging(TinyModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss


class Run:
    """A run with checkpoints and a CSV file, and what was seen in it."""

    def __init__(self, folder: Path, strategy: Any) -> None:
        self.seen: list[Any] = []
        saving = ModelCheckpoint(folder / "kept", every_n_train_steps=2, save_top_k=-1)
        self.module = fit(
            noting(Logging, self.seen)(NUM_LAYERS),
            strategy,
            loader(14, 1),
            loader(2, 1),
            max_epochs=2,
            accumulate_grad_batches=WINDOW,
            val_check_interval=3,
            log_every_n_steps=1,
            logger=CSVLogger(folder, "", ""),
            enable_checkpointing=True,
            callbacks=[noting(Callback, self.seen)(), saving],
        )
        self.metrics = (folder / "metrics.csv").read_text()
        self.checkpoints = {
            path.name: torch.load(path, weights_only=True) for path in (folder / "kept").iterdir()
        }


def test_hooks_files_and_bars_are_those_of_one_device(workers: list[str], tmp_path: Path) -> None:
    """Validation comes within windows, checkpoints behind optimizer steps, the last window is
    short."""
    found = Run(tmp_path / "piped", piped(workers))
    expected = Run(tmp_path / "alone", "auto")
    assert found.seen == expected.seen
    assert {name for _, name, _, _ in found.seen} >= {
        *("on_before_backward", "on_after_backward", "on_before_zero_grad"),
        *("on_train_batch_end", "on_validation_batch_end", "on_save_checkpoint"),
    }
    assert found.metrics == expected.metrics
    assert found.checkpoints.keys() == expected.checkpoints.keys()
    assert len(found.checkpoints) == 4
    for name, checkpoint in found.checkpoints.items():
        other = expected.checkpoints[name]
        for part in ("state_dict", "optimizer_states", "loops", "lr_schedulers"):
            torch.testing.assert_close(checkpoint[part], other[part], rtol=0, atol=0)
    assert differing(found.module, expected.module) == []


class Several(TinyModule):
    """Takes a batch of each loader."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return sum(  # type: ignore[return-value]
            super(Several, self).training_step(part, batch_idx) for part in batch.values()
        )


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
def test_several_loaders_have_the_weights_of_one_device(workers: list[str], mode: str) -> None:
    """A micro-batch visits the stages twice; what its visits add up has another order here."""

    def trained(strategy: Any) -> Several:
        loaders = {"one": loader(10, 1), "other": loader(7, 1)}
        data = CombinedLoader(loaders, mode)  # type: ignore[arg-type]
        return fit(Several(NUM_LAYERS), strategy, data, accumulate_grad_batches=WINDOW)

    found, expected = weights_of(trained(piped(workers))), weights_of(trained("auto"))
    assert_close(found, expected, floor=1e-2)


def test_the_timeline_of_a_step_is_that_of_its_window(workers: list[str], tmp_path: Path) -> None:
    """All batches are in it."""
    timeline = PipelineTimeline(steps=(1, 2), dirpath=tmp_path)
    plan = shaped(workers, SHAPES["both ends, two workers"], 1)
    fit(
        TinyModule(NUM_LAYERS),
        HeteroPipelineStrategy(workers, plan),
        loader(10, 1),
        accumulate_grad_batches=WINDOW,
        callbacks=[timeline],
    )
    whole, short = timeline.recorded
    assert (whole.num_batches, short.num_batches) == (WINDOW, 2)
    for step in (whole, short):
        forwards = [each for each in step.processes[1].actions if each.kind == "forward"]
        numbers = {each.microbatch for each in forwards if each.stage == 1}
        assert numbers == set(range(step.num_batches))
