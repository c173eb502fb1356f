"""Checkpoints there and back: in mid-epoch, adapters only, by every door of Lightning."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.errors import WorkerLost
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame, FrameReader

from ..conftest import worker_process
from ..equality import assert_same
from ..families import NUM_LAYERS, tiny_model
from ..models import TinyModule, fit, loader, trainer
from ..pairwise import keeping
from ..plans import strategy_of
from ..qlora import in_four_bits

BATCH_SIZE = 6
NUM_BATCHES = 5


class Loader:
    """A data loader that knows its place."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        batches = list(loader(BATCH_SIZE * NUM_BATCHES, BATCH_SIZE))
        while self.place < NUM_BATCHES:
            self.place += 1
            yield batches[self.place - 1]
        self.place = 0

    def __len__(self) -> int:
        return NUM_BATCHES

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Watching(TinyModule):
    """Notes which batches it has seen, by their first tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.seen.append(int(batch["input_ids"][0, 0]) * 100 + int(batch["input_ids"][0, 1]))


def run_in_mid_epoch(strategy: Any, data: Any, **options: Any) -> Watching:
    """Two epochs, the first perhaps from its third batch on."""
    module = Watching()
    path = options.pop("ckpt_path", None)
    trainer(strategy, max_epochs=2, **options).fit(module, data, ckpt_path=path)
    return module


def in_mid_epoch(folder: Path) -> dict[str, Any]:
    """Save after the second of five batches, and so on."""
    saver = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    return {"callbacks": [saver], "enable_checkpointing": True}


def forgetful() -> Any:
    """An ordinary data loader, which cannot be told where it was."""
    return loader(BATCH_SIZE * NUM_BATCHES, BATCH_SIZE)


@pytest.mark.parametrize("data", keeping([Loader], [forgetful, Loader]))
def test_a_run_resumed_in_mid_epoch_is_lightnings_own(
    workers: list[str], tmp_path: Path, data: Any
) -> None:
    def resumed(name: str, made: Any) -> tuple[Watching, Watching]:
        whole = run_in_mid_epoch(made(), data(), **in_mid_epoch(tmp_path / name))
        path = tmp_path / name / "step=2.ckpt"
        return whole, run_in_mid_epoch(made(), data(), ckpt_path=path)

    whole, plain = resumed("plain", lambda: "auto")
    ours_whole, ours = resumed("ours", lambda: strategy_of(workers))
    assert ours.seen == plain.seen
    torch.testing.assert_close(ours.losses, plain.losses, rtol=1e-5, atol=0)
    assert_same(dict(ours.state_dict()), dict(plain.state_dict()))
    if data is Loader:  # Lightning asks any other for its first batch again
        assert ours.seen == ours_whole.seen[2:]
        assert ours.losses == ours_whole.losses[2:]
        assert_same(dict(ours.state_dict()), dict(whole.state_dict()))


class Adapted(TinyModule):
    """LoRA on a frozen Llama, whole or in 4 bits."""

    def __init__(self, folder: str | None = None) -> None:
        super().__init__()
        model = tiny_model("llama") if folder is None else in_four_bits("llama", Path(folder))
        torch.manual_seed(3)
        config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
        self.model = get_peft_model(model, config)  # type: ignore[assignment,arg-type]
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Lenient(Adapted):
    strict_loading = False


def adapters_only(
    workers: list[str], layers: Sequence[int] = (1, 1, NUM_LAYERS - 2), weights: Any = "trainable"
) -> HeteroPipelineStrategy:
    return strategy_of(workers, layers, micro_batches=2, checkpoint_weights=weights)


def fit_adapted(module: Adapted, strategy: Any, epochs: int, **options: Any) -> Adapted:
    data = loader(BATCH_SIZE * 2, BATCH_SIZE)
    return fit(module, strategy, data, max_epochs=epochs, **options)


@pytest.mark.parametrize("kind", keeping(["four bits"], ["whole", "four bits"]))
def test_adapters_alone_are_saved_and_resume_anywhere(
    workers: list[str], tmp_path: Path, kind: str
) -> None:
    folder = None if kind == "whole" else str(tmp_path / "model")
    whole = fit_adapted(Adapted(folder), adapters_only(workers), 2)
    saving = trainer(
        adapters_only(workers),
        max_epochs=1,
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    module = Adapted(folder)
    saving.fit(module, loader(BATCH_SIZE * 2, BATCH_SIZE))
    path = saving.checkpoint_callback.best_model_path  # type: ignore[union-attr]

    written = torch.load(path, weights_only=True)
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert list(written["state_dict"]) == trained
    assert len(written["optimizer_states"][0]["state"]) == len(trained)
    saving.save_checkpoint(tmp_path / "after.ckpt")
    after = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert_same(after["state_dict"], written["state_dict"])

    ways = {
        "another split": (Adapted, adapters_only(workers, (2, NUM_LAYERS - 2))),
        "all": (Adapted, adapters_only(workers, (0, 2, NUM_LAYERS - 2), "all")),
        "one device": (Lenient, "auto"),
    }
    for way, (made, where) in ways.items():
        resumed = fit_adapted(made(folder), where, 2, ckpt_path=path)
        torch.testing.assert_close(resumed.losses, whole.losses[2:], rtol=1e-4, atol=0, msg=way)
    loaded = Adapted.load_from_checkpoint(path, strict=False, weights_only=True)
    assert_same({k: v for k, v in loaded.state_dict().items() if k in trained}, after["state_dict"])


class SavingAt(Callback):
    """Saves after the first step, and counts the bytes of the tensors that come for it."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.num_bytes = 0
        advance = FrameReader.advance
        self.is_saving = False

        def counting(reader: FrameReader, num_bytes: int) -> Frame | None:
            frame = advance(reader, num_bytes)
            if frame and self.is_saving and isinstance(frame.message, m.TensorContent):
                self.num_bytes += sum(tensor.nbytes for tensor in frame.tensors)
            return frame

        monkeypatch.setattr(FrameReader, "advance", counting)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            self.is_saving = True
            trainer.save_checkpoint(self.path)
            self.is_saving = False


@pytest.mark.parametrize("weights", keeping(["trainable"], ["all", "trainable"]))
def test_frozen_weights_are_not_sent_for_a_checkpoint(
    workers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    saving = SavingAt(tmp_path / "first.ckpt", monkeypatch)
    strategy = adapters_only(workers, weights=weights)
    module = fit_adapted(Adapted(), strategy, 1, callbacks=[saving])
    away = [p for name, p in module.named_parameters() if "layers." in name and ".0." not in name]
    expected = sum(p.nbytes for p in away if weights == "all" or p.requires_grad)
    assert saving.num_bytes == expected > 0


def test_loading_refuses_only_missing_trained_weights_and_unknown_names(
    workers: list[str], tmp_path: Path
) -> None:
    module = Adapted()
    run = trainer(adapters_only(workers), max_steps=1)
    run.fit(module, loader(BATCH_SIZE, BATCH_SIZE))
    run.save_checkpoint(tmp_path / "whole.ckpt")
    saved = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    state = saved["state_dict"]
    lost = next(name for name in reversed(state) if "layers.3." in name)
    content = state.pop(lost)
    torch.save(saved, tmp_path / "lacking.ckpt")
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{lost}"\. *$'):
        trainer(adapters_only(workers, (2, NUM_LAYERS - 2))).validate(
            Adapted(), loader(BATCH_SIZE, BATCH_SIZE), ckpt_path=tmp_path / "lacking.ckpt"
        )
    state.update({lost: content, "model.unknown": content})
    torch.save(saved, tmp_path / "unknown.ckpt")
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "model.unknown"'):
        trainer(adapters_only(workers, (2, NUM_LAYERS - 2))).validate(
            Adapted(), loader(BATCH_SIZE, BATCH_SIZE), ckpt_path=tmp_path / "unknown.ckpt"
        )


class Normed(TinyModule):
    """Frozen statistics that change all the same, on this process."""

    def __init__(self) -> None:
        super().__init__()
        self.model.requires_grad_(False)
        self.model.model.layers[-1].requires_grad_(True)
        self.norm = nn.BatchNorm1d(1).requires_grad_(False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.norm(batch["input_ids"].float().reshape(-1, 1))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.filterwarnings("ignore:.*has BatchNorm")
def test_statistics_of_frozen_layers_are_kept(workers: list[str], tmp_path: Path) -> None:
    module = Normed()
    run = trainer(adapters_only(workers, (1, 2, 2)), max_steps=2)
    run.fit(module, loader(BATCH_SIZE * 2, BATCH_SIZE))
    run.save_checkpoint(tmp_path / "normed.ckpt")
    state = torch.load(tmp_path / "normed.ckpt", weights_only=True)["state_dict"]
    ours = [key for key in state if key.startswith("norm.")]
    assert ours == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    resumed = Normed()
    trainer(adapters_only(workers, (2, 3))).validate(
        resumed, loader(BATCH_SIZE, BATCH_SIZE), ckpt_path=tmp_path / "normed.ckpt", verbose=False
    )
    assert torch.equal(resumed.norm.running_mean, module.norm.running_mean)  # type: ignore[arg-type]
    assert_same(dict(resumed.state_dict()), dict(module.state_dict()))


def test_best_last_and_weights_alone(workers: list[str], tmp_path: Path) -> None:
    saver = ModelCheckpoint(
        tmp_path,
        monitor="train_loss",
        save_weights_only=True,
        save_last=True,
        every_n_train_steps=1,
    )
    module = TinyModule()
    run = trainer(strategy_of(workers), max_steps=4, callbacks=[saver], enable_checkpointing=True)
    batches = loader(BATCH_SIZE * 4, BATCH_SIZE)
    run.fit(module, batches)
    trained = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for which, path in (("best", saver.best_model_path), ("last", saver.last_model_path)):
        written = torch.load(path, weights_only=True)
        assert "optimizer_states" not in written
        expected = TinyModule.load_from_checkpoint(path, weights_only=True)
        assert_same(dict(expected.state_dict()), written["state_dict"])
        (found,) = run.test(dataloaders=batches, ckpt_path=which, verbose=False)
        (plain,) = trainer().test(expected, batches, verbose=False)
        assert found == pytest.approx(plain, rel=1e-5)
        assert_same(dict(module.state_dict()), written["state_dict"])
    assert_same(written["state_dict"], trained)  # the last one
    assert not list(tmp_path.glob(".unfinished-*"))


def test_a_worker_lost_while_gathering_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """Its death comes between two of its layers."""
    with worker_process() as worker:

        class Module(TinyModule):
            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                if self.global_step == 1:
                    hook = kill_at_second_layer
                    self.model.model.layers[2].mlp.register_state_dict_pre_hook(hook)

        def kill_at_second_layer(*_: Any) -> None:
            worker.process.kill()
            worker.process.wait()

        saver = ModelCheckpoint(
            tmp_path, every_n_train_steps=1, filename="only", enable_version_counter=False
        )
        run = trainer(
            HeteroPipelineStrategy([worker.address], Plan([StagePlan([worker.address], (0, 5))])),
            max_steps=3,
            callbacks=[saver],
            enable_checkpointing=True,
        )
        with pytest.raises(WorkerLost, match=rf"stage 1 on {worker.address} was lost in step 2"):
            run.fit(Module(), loader(BATCH_SIZE * 3, BATCH_SIZE))
    assert os.listdir(tmp_path) == ["only.ckpt"]
    assert torch.load(tmp_path / "only.ckpt", weights_only=True)["global_step"] == 1
