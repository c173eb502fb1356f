"""Checkpoints are Lightning's own: complete, and at home with any plan, or with none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import LlamaForCausalLM

from ..equality import assert_same
from ..models import TinyModule, fit, loader, trainer
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
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyModule, dict[str, Any]]:
    """Lightning alone: the module after the run and its checkpoint of step 10."""
    folder = tmp_path_factory.mktemp("plain")
    module = epochs(2, **saver(folder))
    return module, torch.load(folder / "step=10.ckpt", weights_only=True)


def test_a_checkpoint_has_the_weights_and_optimizer_state_of_a_plain_one(
    workers: list[str], plain: tuple[TinyModule, dict[str, Any]], tmp_path: Path
) -> None:
    epochs(1, strategy_of(workers), **saver(tmp_path))
    written = torch.load(tmp_path / "step=10.ckpt", weights_only=True)
    _, expected = plain
    assert written.keys() == expected.keys()
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        assert_same(written[key], expected[key], key)


@pytest.mark.parametrize("resume_on", ["another split", "one device"])
def test_a_resumed_run_continues_on_the_same_curve(
    workers: list[str], plain: tuple[TinyModule, dict[str, Any]], tmp_path: Path, resume_on: str
) -> None:
    epochs(1, strategy_of(workers), **saver(tmp_path))
    strategy = strategy_of(workers, (2, 3)) if resume_on == "another split" else "auto"
    resumed = epochs(2, strategy, ckpt_path=tmp_path / "step=10.ckpt")
    module, _ = plain
    torch.testing.assert_close(resumed.losses, module.losses[10:], rtol=1e-5, atol=0)
    assert_same(dict(resumed.state_dict()), dict(module.state_dict()))


def test_a_plain_checkpoint_resumes_over_workers(
    workers: list[str], plain: tuple[TinyModule, dict[str, Any]], tmp_path: Path
) -> None:
    epochs(1, **saver(tmp_path))
    resumed = epochs(2, strategy_of(workers, (0, 2, 3)), ckpt_path=tmp_path / "step=10.ckpt")
    module, _ = plain
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
