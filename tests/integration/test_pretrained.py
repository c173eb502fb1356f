"""`from_pretrained`: the model is never whole in one place, and trains as if it were."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import lightning_hetero
from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.errors import ModelError
from lightning_hetero.model import checkpoint_reader
from lightning_hetero.model.checkpoint_reader import Checkpoint
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame, encode_frame
from lightning_hetero.transport import channel

from ..conftest import worker_process
from ..families import NUM_LAYERS, plan_over
from ..models import VOCABULARY, TinyModule, fit, loader, trainer
from ..pairwise import keeping, repeats
from ..pretrained import (
    BATCH_SIZE,
    LORA,
    PretrainedModule,
    build_from_checkpoint,
    build_whole,
    save_tiny,
)
from .dying_worker import dying
from .lost_runs import NEVER, assert_same_run, run

NUM_STEPS = 3


def train(build: Any, strategy: Any = "auto") -> PretrainedModule:
    data = loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE, padded=True)
    return fit(PretrainedModule(build), strategy, data)


@pytest.mark.parametrize(
    ("family", "quantize"),
    keeping(
        [("mixtral", False), ("gemma3", True)],
        product(["llama", "qwen2", "gemma3", "mixtral"], [False, True]),
    ),
    ids=lambda value: {False: "", True: "nf4"}.get(value, value),
)
def test_lora_on_a_model_that_stays_on_disk(
    family: str, quantize: bool, workers: list[str], tmp_path: Path
) -> None:
    folder = save_tiny(family, tmp_path)
    expected = train(lambda: build_whole(folder, quantize, lora=True), "auto")
    strategy = HeteroPipelineStrategy(workers[:2], plan_over(workers))
    found = train(lambda: build_from_checkpoint(folder, quantize, lora=True), strategy)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    # What trains came back; what does not is still on disk.
    wanted = {n: p for n, p in expected.named_parameters() if p.requires_grad}
    trained = {n: p for n, p in found.named_parameters() if p.requires_grad}
    assert trained.keys() == wanted.keys()
    for name, parameter in wanted.items():
        torch.testing.assert_close(trained[name], parameter, rtol=1e-4, atol=1e-6)
    away = [name for name, p in found.named_parameters() if p.is_meta]
    assert away
    assert all(".layers.0." not in name and ".layers." in name for name in away)


@pytest.mark.parametrize("family", keeping(["gpt2"], ["llama", "gpt2"]))
def test_all_weights_train_and_come_back(family: str, workers: list[str], tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path)
    expected = train(lambda: build_whole(folder, quantize=False, lora=False), "auto")
    strategy = HeteroPipelineStrategy(workers[:2], plan_over(workers))
    found = train(lambda: build_from_checkpoint(folder, quantize=False, lora=False), strategy)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert not [name for name, p in found.named_parameters() if p.is_meta]


def test_weights_in_pieces_have_the_same_bits(
    workers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny("llama", tmp_path)

    def run() -> PretrainedModule:
        strategy = HeteroPipelineStrategy(workers[:2], plan_over(workers))
        return train(lambda: build_from_checkpoint(folder, quantize=False, lora=False), strategy)

    whole = run()
    monkeypatch.setattr(checkpoint_reader, "LARGE_BYTES", 0)
    monkeypatch.setattr(checkpoint_reader, "PIECE_BYTES", 256)
    assert run().losses == whole.losses


@repeats("test_weights_in_pieces_have_the_same_bits")
def test_a_lost_worker_gets_its_weights_in_pieces_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnDisk(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.model.save_pretrained(tmp_path / "saved")
            self.model = lightning_hetero.from_pretrained(tmp_path / "saved")

    monkeypatch.setattr(checkpoint_reader, "LARGE_BYTES", 0)
    monkeypatch.setattr(checkpoint_reader, "PIECE_BYTES", 256)
    with worker_process() as first, worker_process() as second:
        names = [first.address, second.address]
        expected = run(names, tmp_path / "calm", NEVER, module=OnDisk)
    died = tmp_path / "died"
    with worker_process() as other, worker_process(before=dying("forward", 14, died)) as victim:
        names = [victim.address, other.address]
        found = run(names, tmp_path / "run", NEVER, module=OnDisk)
    assert died.exists()
    assert_same_run(found, expected)


def test_packing_on_the_worker_gives_the_same_bits(workers: list[str], tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    runs = [
        train(
            lambda where=where: build_from_checkpoint(folder, True, True, quantize_on=where),
            HeteroPipelineStrategy(workers[:2], plan_over(workers)),
        )
        for where in ("coordinator", "worker")
    ]
    assert runs[0].losses == runs[1].losses


def test_a_four_bit_checkpoint_trains_as_on_one_device(workers: list[str], tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    whole = build_whole(folder, quantize=True, lora=False)
    whole.save_pretrained(tmp_path / "nf4")
    expected = train(lambda: build_whole(folder, quantize=True, lora=True), "auto")
    strategy = HeteroPipelineStrategy(workers[:2], plan_over(workers))
    found = train(lambda: build_from_checkpoint(tmp_path / "nf4", False, lora=True), strategy)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)


@repeats(
    "test_lora_on_a_model_that_stays_on_disk",
    "integration/test_four_bits.py::test_an_adapter_saved_in_the_run_and_after_it_is_the_trained_one",
)
def test_the_saved_adapter_is_whole(workers: list[str], tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    strategy = HeteroPipelineStrategy(workers[:2], plan_over(workers))
    found = train(lambda: build_from_checkpoint(folder, False, lora=True), strategy)
    found.model.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(folder)
    reloaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    expected = train(lambda: build_whole(folder, False, lora=True), "auto").model.eval()
    (batch,) = loader(BATCH_SIZE, BATCH_SIZE)
    with torch.no_grad():
        torch.testing.assert_close(
            reloaded(**batch).logits, expected(**batch).logits, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("weights", keeping(["trainable"], ["all", "trainable"]))
def test_a_lightning_checkpoint_holds_the_trained_weights_and_resumes(
    workers: list[str], tmp_path: Path, weights: Any
) -> None:
    folder = save_tiny("llama", tmp_path)

    def build() -> Any:
        return build_from_checkpoint(folder, True, lora=True)

    def strategy() -> HeteroPipelineStrategy:
        plan = plan_over(workers)
        return HeteroPipelineStrategy(workers[:2], plan, checkpoint_weights=weights)

    first = PretrainedModule(build)
    run = trainer(strategy(), max_epochs=1)
    run.fit(first, loader(BATCH_SIZE * 2, BATCH_SIZE))
    whole = PretrainedModule(build)
    whole_run = trainer(strategy(), max_epochs=2)
    whole_run.fit(whole, loader(BATCH_SIZE * 2, BATCH_SIZE))

    saved = PretrainedModule(build)
    saving = trainer(strategy(), max_epochs=1, enable_checkpointing=True, default_root_dir=tmp_path)
    saving.fit(saved, loader(BATCH_SIZE * 2, BATCH_SIZE))
    path = saving.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    names = torch.load(path, weights_only=True)["state_dict"].keys()
    assert names
    assert all("lora_" in name for name in names)
    resumed = PretrainedModule(build)
    trainer(strategy(), max_epochs=2).fit(
        resumed, loader(BATCH_SIZE * 2, BATCH_SIZE), ckpt_path=path
    )
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=1e-6)


@repeats("test_weights_that_are_frozen_after_training_are_kept")
def test_fit_twice(workers: list[str], tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    module = PretrainedModule(lambda: build_from_checkpoint(folder, True, lora=True))
    for _ in range(2):
        strategy = HeteroPipelineStrategy(workers[:2], plan_over(workers))
        trainer(strategy, max_epochs=1).fit(module, loader(BATCH_SIZE * 2, BATCH_SIZE))
    assert module.losses[2] < module.losses[0]


@repeats(
    "test_all_weights_train_and_come_back",
    "test_a_lightning_checkpoint_holds_the_trained_weights_and_resumes",
)
def test_a_run_that_trains_all_weights_resumes(workers: list[str], tmp_path: Path) -> None:
    """What the checkpoint brings replaces what is read from the model's folder."""
    folder = save_tiny("llama", tmp_path)

    def build() -> Any:
        return build_from_checkpoint(folder, quantize=False, lora=False)

    def run(**options: Any) -> Any:
        strategy = HeteroPipelineStrategy(workers[:2], plan_over(workers))
        return trainer(strategy, **options)

    batches = loader(BATCH_SIZE * 2, BATCH_SIZE)
    whole = PretrainedModule(build)
    run(max_epochs=2).fit(whole, batches)
    saving = run(max_epochs=1)
    saving.fit(PretrainedModule(build), batches)
    saving.save_checkpoint(tmp_path / "half.ckpt")
    resumed = PretrainedModule(build)
    run(max_epochs=2).fit(resumed, batches, ckpt_path=tmp_path / "half.ckpt")
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=1e-6)


def test_weights_that_are_frozen_after_training_are_kept(
    workers: list[str], tmp_path: Path
) -> None:
    folder = save_tiny("llama", tmp_path)
    module = PretrainedModule(lambda: build_from_checkpoint(folder, quantize=False, lora=False))
    batches = loader(BATCH_SIZE, BATCH_SIZE)

    def fit_again() -> Any:
        strategy = HeteroPipelineStrategy(workers[:2], plan_over(workers))
        run = trainer(strategy, max_epochs=1)
        run.fit(module, batches)
        return run

    fit_again()
    trained = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("embed_tokens" in name)
    fit_again().save_checkpoint(tmp_path / "after.ckpt")
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)["state_dict"]
    for found in (module.state_dict(), saved):
        for name, tensor in trained.items():
            if "embed_tokens" not in name:
                torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_four_bits_move_a_seventh_of_the_bytes(
    workers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    layers = model.model.layers[1:]
    full_bytes = sum(p.nbytes for layer in layers for p in layer.parameters())
    sent: list[int] = []

    def counting(frame: Frame) -> list[memoryview]:
        buffers = encode_frame(frame)
        if isinstance(frame.message, m.LoadTensor):
            sent.append(sum(len(buffer) for buffer in buffers))
        return buffers

    monkeypatch.setattr(channel, "encode_frame", counting)
    strategy = HeteroPipelineStrategy(workers[:2], plan_over(workers))
    # Sent is what trains, too: an adapter so small that it does not count.
    module = PretrainedModule(lambda: build_from_checkpoint(tmp_path, True, lora=True))
    monkeypatch.setitem(LORA, "r", 1)
    trainer(strategy, max_steps=1).fit(module, loader(BATCH_SIZE, BATCH_SIZE))
    assert sum(sent) <= 0.14 * full_bytes


class EvaluatedModule(PretrainedModule):
    """With the other loops."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.model(**batch).loss)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits: Tensor = self.model(**batch).logits
        return logits


def evaluate(module: EvaluatedModule, strategy: Any) -> list[Any]:
    """What validating, testing and predicting one after the other give."""
    batches = loader(BATCH_SIZE, BATCH_SIZE, padded=True)
    run = trainer(strategy)
    found: list[Any] = [run.validate(module, batches, verbose=False)]
    found.append(run.test(module, batches, verbose=False))
    found.append(run.predict(module, batches))
    return found


@repeats(
    "test_lora_on_a_model_that_stays_on_disk",
    "integration/test_evaluation.py::test_validate_and_test_give_the_metrics_of_one_device",
)
@pytest.mark.parametrize("quantize", [False, True], ids=["", "nf4"])
def test_evaluating_before_and_after_training(
    quantize: bool, workers: list[str], tmp_path: Path
) -> None:
    folder = save_tiny("llama", tmp_path)
    whole = EvaluatedModule(lambda: build_whole(folder, quantize, lora=True))
    on_disk = EvaluatedModule(lambda: build_from_checkpoint(folder, quantize, lora=True))
    batches = loader(BATCH_SIZE * 2, BATCH_SIZE)
    results: list[list[Any]] = []
    for module in (whole, on_disk):

        def strategy(module: EvaluatedModule = module) -> Any:
            if module is whole:
                return "auto"
            return HeteroPipelineStrategy(workers[:2], plan_over(workers))

        before = evaluate(module, strategy())
        trainer(strategy(), max_epochs=1).fit(module, batches, loader(BATCH_SIZE, BATCH_SIZE))
        results.append([before, evaluate(module, strategy()), module.losses])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "quantize"),
    keeping([("mixtral", True)], product(["llama", "mixtral"], [False, True])),
    ids=lambda value: {False: "", True: "nf4"}.get(value, value),
)
def test_without_workers_everything_is_read_here(
    family: str, quantize: bool, tmp_path: Path
) -> None:
    folder = save_tiny(family, tmp_path)
    expected = train(lambda: build_whole(folder, quantize, lora=True), "auto")
    alone = Plan([StagePlan(["coordinator"], (0, NUM_LAYERS))], micro_batches=3)
    strategy = HeteroPipelineStrategy([], alone)
    with pytest.warns(UserWarning, match="the model runs here alone"):
        found = train(lambda: build_from_checkpoint(folder, quantize, lora=True), strategy)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert not [name for name, p in found.named_parameters() if p.is_meta]


def test_biases_of_the_checkpoint_can_train(workers: list[str], tmp_path: Path) -> None:
    folder = save_tiny("qwen2", tmp_path)
    config = LoraConfig(**LORA, bias="lora_only")

    def whole() -> Any:
        torch.manual_seed(3)
        return get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)

    def on_disk() -> Any:
        torch.manual_seed(3)
        return lightning_hetero.from_pretrained(folder, peft_config=config)

    strategy = HeteroPipelineStrategy(workers[:2], plan_over(workers))
    expected, found = train(whole, "auto"), train(on_disk, strategy)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    biases = {n: p for n, p in expected.named_parameters() if n.endswith("q_proj.base_layer.bias")}
    assert len(biases) == NUM_LAYERS
    for name, parameter in found.named_parameters():
        if name in biases:
            torch.testing.assert_close(parameter, biases[name], rtol=1e-4, atol=1e-6)


def test_plain_lightning_is_told_that_weights_are_missing(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    with pytest.raises(ModelError, match="HeteroPipelineStrategy"):
        train(lambda: build_from_checkpoint(folder, False, lora=True), "auto")


def test_after_training_the_model_says_that_it_is_not_here(
    workers: list[str], tmp_path: Path
) -> None:
    folder = save_tiny("llama", tmp_path)
    strategy = HeteroPipelineStrategy(workers[:2], plan_over(workers))
    found = train(lambda: build_from_checkpoint(folder, False, lora=True), strategy)
    (batch,) = loader(BATCH_SIZE, BATCH_SIZE)
    with pytest.raises(ModelError, match=r"layers\.1\..* is still in the checkpoint"):
        found.model(**batch)


def test_an_interrupted_stream_of_weights_leaves_workers_free(
    workers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny("llama", tmp_path)
    read, count = Checkpoint.read, iter(range(100))

    def interrupted(self: Checkpoint, name: str) -> dict[str, Tensor]:
        if next(count) == 12:
            raise KeyboardInterrupt
        return read(self, name)

    monkeypatch.setattr(Checkpoint, "read", interrupted)
    strategy = HeteroPipelineStrategy(workers[:2], plan_over(workers))
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        train(lambda: build_from_checkpoint(folder, True, lora=True), strategy)
    monkeypatch.undo()
    strategy = HeteroPipelineStrategy(workers[:2], plan_over(workers))
    train(lambda: build_from_checkpoint(folder, True, lora=True), strategy)
