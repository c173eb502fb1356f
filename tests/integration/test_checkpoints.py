"""Checkpoints are Lightning's own: complete, and at home with any plan, or with none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import LlamaForCausalLM

from lightning_hetero.errors import ModelError

from ..conftest import WorkerProcess
from ..equality import assert_same
from ..models import TinyModule, fit, loader, trainer
from ..pairwise import keeping, repeats
from ..plans import strategy_of

BATCH_SIZE = 12


def epochs(count: int, strategy: Any = "auto", **options: Any) -> TinyModule:
    """A run over so many epochs of ten steps."""
    data = loader(BATCH_SIZE * 10, BATCH_SIZE, padded=True)
    return fit(TinyModule(), strategy, data, max_epochs=count, **options)


def saver(folder: Path) -> dict[str, Any]:
    """Save at the end of each epoch: at step 10 and at step 20."""
    callback = ModelCheckpoint(
        folder, save_on_train_epoch_end=True, save_top_k=-1, filename="{step}"
    )
    return {"callbacks": [callback], "enable_checkpointing": True}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyModule, Path]:
    """Lightning alone: the module after the run and the path of its checkpoint of step 10."""
    folder = tmp_path_factory.mktemp("plain")
    return epochs(2, **saver(folder)), folder / "step=10.ckpt"


@pytest.fixture(scope="module")
def written(
    worker_processes: list[WorkerProcess], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The checkpoint of step 10, written over workers."""
    folder = tmp_path_factory.mktemp("written")
    epochs(1, strategy_of([worker.address for worker in worker_processes]), **saver(folder))
    return folder / "step=10.ckpt"


def test_a_checkpoint_has_the_weights_and_optimizer_state_of_a_plain_one(
    written: Path, plain: tuple[TinyModule, Path]
) -> None:
    found, expected = (torch.load(path, weights_only=True) for path in (written, plain[1]))
    assert found.keys() == expected.keys()
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        assert_same(found[key], expected[key], key)


@pytest.mark.parametrize("resume_on", keeping(["another split"], ["another split", "one device"]))
def test_a_resumed_run_continues_on_the_same_curve(
    workers: list[str], written: Path, plain: tuple[TinyModule, Path], resume_on: str
) -> None:
    strategy = strategy_of(workers, (2, 3)) if resume_on == "another split" else "auto"
    resumed = epochs(2, strategy, ckpt_path=written)
    module, _ = plain
    torch.testing.assert_close(resumed.losses, module.losses[10:], rtol=1e-5, atol=0)
    assert_same(dict(resumed.state_dict()), dict(module.state_dict()))


@repeats(
    "test_a_checkpoint_has_the_weights_and_optimizer_state_of_a_plain_one",
    "test_a_resumed_run_continues_on_the_same_curve",
)
def test_a_plain_checkpoint_resumes_over_workers(
    workers: list[str], plain: tuple[TinyModule, Path]
) -> None:
    module, path = plain
    resumed = epochs(2, strategy_of(workers, (0, 2, 3)), ckpt_path=path)
    torch.testing.assert_close(resumed.losses, module.losses[10:], rtol=1e-5, atol=0)


def test_after_fit_the_module_is_an_ordinary_one(workers: list[str], tmp_path: Path) -> None:
    module = TinyModule()
    parameters = dict(module.named_parameters())
    run = trainer(strategy_of(workers), max_steps=5)
    run.fit(module, loader(60, BATCH_SIZE))
    assert dict(module.named_parameters()) == parameters
    assert not any(tensor.is_meta for tensor in module.state_dict().values())
    assert len(run.optimizers[0].state) == len(parameters)

    run.save_checkpoint(tmp_path / "after.ckpt")
    loaded = TinyModule.load_from_checkpoint(tmp_path / "after.ckpt", weights_only=True)
    assert_same(dict(loaded.state_dict()), dict(module.state_dict()))

    module.model.save_pretrained(tmp_path / "model")
    reloaded = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert_same(dict(reloaded.state_dict()), dict(module.model.state_dict()))


def test_state_dict_during_training_holds_the_present_weights(workers: list[str]) -> None:
    seen: list[dict[str, torch.Tensor]] = []

    class Module(TinyModule):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch, batch_idx)
            seen.append({k: v.clone() for k, v in self.state_dict().items()})

    module = fit(Module(), strategy_of(workers))
    assert_same(seen[-1], dict(module.state_dict()))
    name = "model.model.layers.4.mlp.up_proj.weight"
    assert not torch.equal(seen[0][name], seen[1][name])


NUM_SAVES = 3


class SavingTogether(pl.Callback):
    """Three threads save at once at the end of the second step.

    Attributes:
        errors: What the saves raised.
        written: The checkpoints that were written.
    """

    def __init__(self, folder: Path) -> None:
        self.errors: list[BaseException] = []
        self.written: list[Path] = []
        self._folder = folder
        self._others_ended = threading.Semaphore(0)

    def hold(self) -> None:
        """Wait in the middle of a save until the other saves have ended."""
        for _ in range(NUM_SAVES - 1):
            assert self._others_ended.acquire(timeout=60)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != 2:
            return
        module = trainer.lightning_module
        assert isinstance(module, HeldInSaves)
        module.hold = self.hold
        threads = [
            threading.Thread(target=self._save, args=(trainer, number), daemon=True)
            for number in range(NUM_SAVES)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        module.hold = None

    def _save(self, trainer: pl.Trainer, number: int) -> None:
        path = self._folder / f"{number}.ckpt"
        try:
            trainer.save_checkpoint(path)
            self.written.append(path)
        except BaseException as error:
            self.errors.append(error)
        finally:
            self._others_ended.release()


class HeldInSaves(TinyModule):
    hold: Callable[[], None] | None = None

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = super().state_dict(*args, **kwargs)
        if self.hold is not None:
            self.hold()
        return found


@pytest.mark.follows(
    "both would read what the workers answer. Save in one thread, after each other, as "
    "callbacks do.",
)
def test_threads_that_save_at_once_get_an_error_and_one_saves(
    workers: list[str], tmp_path: Path
) -> None:
    """Each of them would take what the workers answer to the others."""
    saves = SavingTogether(tmp_path)
    data = loader(BATCH_SIZE * 3, BATCH_SIZE, padded=True)
    module = fit(HeldInSaves(), strategy_of(workers), data, callbacks=[saves])
    assert len(saves.errors) == NUM_SAVES - 1
    for error in saves.errors:
        assert isinstance(error, ModelError)
        assert "while another thread saves one" in str(error)
    (path,) = saves.written
    expected = fit(TinyModule(), "auto", data)
    assert_same(dict(module.state_dict()), dict(expected.state_dict()))
    two_steps = fit(TinyModule(), "auto", data, max_steps=2)
    written = torch.load(path, weights_only=True)
    assert_same(written["state_dict"], dict(two_steps.state_dict()))
    for name in ("first", "second"):
        module.trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
