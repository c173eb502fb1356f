"""Training on 4-bit weights: evaluating in between changes nothing, and checkpoints resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import lightning.pytorch as pl
import pytest
import torch
from bitsandbytes.functional import has_avx512bf16
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan
from lightning_hetero.errors import StageFailed
from lightning_hetero.model.four_bit import keep_layout

from ..conftest import worker_process
from ..families import NUM_LAYERS, plan_over, tiny_model
from ..models import fit, loader
from ..pairwise import keeping, repeats

BATCH_SIZE = 6
# What bitsandbytes repacks must have rows and columns in multiples of its blocks.
WIDE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
NF4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
)
LORA = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model on disk."""
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", **WIDE).save_pretrained(path)
    return path


class FourBitModule(pl.LightningModule):
    """An ordinary module: quantises in `configure_model` and trains adapters.

    ``gradients`` are the sums that plain SGD with momentum 1 has seen, step by step.
    """

    def __init__(self, folder: Path, repacks: bool = False) -> None:
        super().__init__()
        self.folder = folder
        self.repacks = repacks
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        model = AutoModelForCausalLM.from_pretrained(
            self.folder, quantization_config=NF4, dtype=torch.float32
        )
        torch.manual_seed(3)
        self.model = get_peft_model(model, LORA).train()
        generator = torch.Generator().manual_seed(2)
        for name, parameter in self.named_parameters():
            if "lora_B" in name:
                numbers = torch.empty(parameter.shape, device="cpu").normal_(
                    std=0.1, generator=generator
                )
                parameter.data.copy_(numbers)
        for module in self.modules():
            if isinstance(module, bnb.nn.Linear4bit):
                module.support_avx512bf16_for_cpu = self.repacks

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def train(
    module: FourBitModule, workers: list[str] | None, plan: Plan | None = None, **options: Any
) -> FourBitModule:
    """Two steps an epoch, by default for two epochs."""
    strategy: Any = "auto"
    if workers is not None:
        strategy = HeteroPipelineStrategy(workers[:2], plan or plan_over(workers))
    data = loader(BATCH_SIZE * 2, BATCH_SIZE)
    return fit(module, strategy, data, **{"max_epochs": 2, **options})


def trained(module: FourBitModule) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


# Some processors repack nothing.
REPACKS = [False, True] if has_avx512bf16() else [False]


@pytest.mark.parametrize("repacks", keeping(REPACKS[-1:], REPACKS))
def test_validating_between_steps_changes_no_gradient(
    repacks: bool, folder: Path, workers: list[str]
) -> None:
    alone = train(FourBitModule(folder), None)
    found = train(FourBitModule(folder, repacks), workers)
    data, module = loader(BATCH_SIZE, BATCH_SIZE), FourBitModule(folder, repacks)
    validated = train(module, workers, validation=data, num_sanity_val_steps=1)
    assert validated.losses == found.losses
    for name, parameter in trained(found).items():
        assert torch.equal(trained(validated)[name], parameter), name
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.skipif(not has_avx512bf16(), reason="this CPU repacks nothing")
def test_a_model_evaluated_before_the_run_trains_from_its_present_weights(
    folder: Path, workers: list[str]
) -> None:
    def evaluated() -> FourBitModule:
        module = FourBitModule(folder, repacks=True)
        module.configure_model()
        (batch,) = loader(BATCH_SIZE, BATCH_SIZE)
        with torch.no_grad():
            module.model.eval()(**batch)
        states = [m.weight.quant_state for m in module.modules() if hasattr(m, "quant_state")]
        assert any(getattr(state, "packing_format_for_cpu", False) for state in states)
        return module

    expected = evaluated()
    keep_layout(expected)
    train(expected, None)
    assert train(evaluated(), workers).losses == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.filterwarnings("ignore:The plan has no stage on a worker")
@pytest.mark.parametrize("resume_on", keeping(["another split"], ["another split", "no worker"]))
def test_a_checkpoint_with_four_bits_resumes(
    resume_on: str, folder: Path, workers: list[str], tmp_path: Path
) -> None:
    whole = train(FourBitModule(folder), None)
    saved = FourBitModule(folder)
    train(saved, workers, max_epochs=1, enable_checkpointing=True, default_root_dir=tmp_path)
    path = saved.trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    ends = (3, NUM_LAYERS) if resume_on == "another split" else (NUM_LAYERS,)
    stages = [StagePlan(["coordinator"], (0, ends[0]))]
    stages += [StagePlan([workers[0]], ends)] if len(ends) > 1 else []
    resumed = FourBitModule(folder)
    train(resumed, workers, ckpt_path=path, plan=Plan(stages, micro_batches=3))
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=1e-5)


@repeats(
    "test_a_checkpoint_with_four_bits_resumes",
    "integration/test_round_trips.py::test_adapters_alone_are_saved_and_resume_anywhere",
)
def test_a_checkpoint_with_four_bits_resumes_on_one_device(
    folder: Path, workers: list[str], tmp_path: Path
) -> None:
    whole = train(FourBitModule(folder), None)
    saved = FourBitModule(folder)
    train(saved, workers, max_epochs=1, enable_checkpointing=True, default_root_dir=tmp_path)
    path = saved.trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    resumed = FourBitModule(folder)
    # Without this, Lightning calls the states unexpected keys, whoever has written them.
    resumed.strict_loading = False
    assert train(resumed, None, ckpt_path=path).losses == pytest.approx(whole.losses[2:], rel=1e-5)


class SavesInStep(FourBitModule):
    def __init__(self, folder: Path, target: Path) -> None:
        super().__init__(folder)
        self.target = target
        self.seen: dict[str, Tensor] = {}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if len(self.losses) == 4:
            self.model.save_pretrained(self.target / "in the run")


def test_an_adapter_saved_in_the_run_and_after_it_is_the_trained_one(
    folder: Path, workers: list[str], tmp_path: Path
) -> None:
    module = SavesInStep(folder, tmp_path)
    train(module, workers)
    module.model.save_pretrained(tmp_path / "after it")
    (batch,) = loader(BATCH_SIZE, BATCH_SIZE)
    with torch.no_grad():
        expected = module.model.eval()(**batch).logits
    for name in ("in the run", "after it"):
        base = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=NF4, dtype=torch.float32
        )
        keep_layout(base)
        reloaded = PeftModel.from_pretrained(base, tmp_path / name).eval()
        with torch.no_grad():
            torch.testing.assert_close(reloaded(**batch).logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("library", ["bitsandbytes", "peft"])
def test_a_worker_without_the_library_says_so_and_lives_on(library: str, folder: Path) -> None:
    missing = f"import sys; sys.modules[{library!r}] = None"
    with worker_process(before=missing) as worker:
        plan = Plan([StagePlan([worker.address], (0, NUM_LAYERS))], micro_batches=2)
        for _ in range(2):
            with pytest.raises(StageFailed, match=rf"{library} is not installed.*pip install"):
                train(FourBitModule(folder), [worker.address], plan=plan)
        assert worker.process.poll() is None


class GivesAllToTheOptimizer(FourBitModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_an_optimizer_of_parameters_that_do_not_train(
    folder: Path, workers: list[str], tmp_path: Path
) -> None:
    whole = train(GivesAllToTheOptimizer(folder), None)
    saved = GivesAllToTheOptimizer(folder)
    train(saved, workers, max_epochs=1, enable_checkpointing=True, default_root_dir=tmp_path)
    path = saved.trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    resumed = train(GivesAllToTheOptimizer(folder), workers, ckpt_path=path)
    assert [*saved.losses, *resumed.losses] == pytest.approx(whole.losses, rel=1e-5)
