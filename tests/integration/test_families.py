"""Any decoder: the gradients of the first step and the weights after five equal one device's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import lightning.pytorch as pl
import pytest
import torch
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from lightning_hetero import HeteroPipelineStrategy, Plan, StagePlan

from ..families import CONFIGS, MIXTURES, NUM_LAYERS, tiny_model
from ..models import loader, trainer

BATCH_SIZE = 6
NUM_STEPS = 5
NUM_MICROBATCHES = 3
TOLERANCE = 1e-5


class FamilyModule(pl.LightningModule):
    """Trains whatever requires a gradient; ``gradients`` are those of the first step.

    Momentum starts as the gradient, so the optimizer's state shows it wherever it was computed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []
        self.gradients: dict[str, Tensor] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        if batch_idx == 0:
            state = self.trainer.optimizers[0].state_dict()["state"]
            names = [name for name, p in self.named_parameters() if p.requires_grad]
            self.gradients = {
                names[index]: entry["momentum_buffer"].clone()
                for index, entry in state.items()
                if entry.get("momentum_buffer") is not None
            }

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trainable = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trainable, lr=0.05, momentum=0.9)


def plan_over(workers: list[str]) -> Plan:
    """One layer on the coordinator, one on the first worker, the others on the second."""
    return Plan(
        [
            StagePlan(["coordinator"], (0, 1)),
            StagePlan([workers[0]], (1, 2)),
            StagePlan([workers[1]], (2, NUM_LAYERS)),
        ],
        micro_batches=NUM_MICROBATCHES,
    )


def fit(model: PreTrainedModel, strategy: Any, padded: bool = True) -> FamilyModule:
    module = FamilyModule(model)
    run = trainer(strategy, max_steps=NUM_STEPS, max_epochs=1)
    run.fit(module, loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE, padded=padded))
    return module


def fit_by_hand(model: PreTrainedModel) -> FamilyModule:
    """One device, over the same micro-batches: for losses that are no mean over the samples."""
    module = FamilyModule(model)
    optimizer = module.configure_optimizers()
    for step, batch in enumerate(loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE)):
        optimizer.zero_grad()
        losses = []
        for start in range(0, BATCH_SIZE, BATCH_SIZE // NUM_MICROBATCHES):
            end = start + BATCH_SIZE // NUM_MICROBATCHES
            piece = {name: tensor[start:end] for name, tensor in batch.items()}
            loss = model(**piece).loss / NUM_MICROBATCHES
            loss.backward()
            losses.append(float(loss.detach()))
        if step == 0:
            module.gradients = {
                name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None
            }
        optimizer.step()
        module.losses.append(sum(losses))
    return module


def assert_equal_runs(found: FamilyModule, expected: FamilyModule) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert_close(found.gradients, expected.gradients)
    assert_close(found.state_dict(), expected.state_dict())


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Every tensor is within the tolerance, relative to its norm.

    Some gradients are zero but for rounding, a key's bias for one, so there is a floor.
    """
    assert found.keys() == expected.keys()
    norms = {name: float(tensor.float().norm()) for name, tensor in expected.items()}
    floor = 1e-2 * max(norms.values())
    for name, tensor in expected.items():
        error = float((found[name] - tensor).float().norm()) / max(norms[name], floor)
        assert error <= TOLERANCE, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen-embeddings"])
@pytest.mark.parametrize("family", [f for f in CONFIGS if f not in MIXTURES])
def test_family_equals_one_device(family: str, frozen: bool, workers: list[str]) -> None:
    def model() -> PreTrainedModel:
        made = tiny_model(family)
        made.get_input_embeddings().requires_grad_(not frozen)
        return made

    expected = fit(model(), "auto")
    found = fit(model(), HeteroPipelineStrategy(workers[:2], plan_over(workers)))
    assert_equal_runs(found, expected)


# The router's loss of a micro-batch is not that of the batch, which the first-batch check says.
@pytest.mark.filterwarnings("ignore:The loss of the first batch")
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen-embeddings"])
@pytest.mark.parametrize("family", MIXTURES)
def test_mixture_of_experts_trains_with_its_router_loss(
    family: str, frozen: bool, workers: list[str]
) -> None:
    def model() -> PreTrainedModel:
        made = tiny_model(family, router_aux_loss_coef=0.5)
        made.get_input_embeddings().requires_grad_(not frozen)
        return made

    # The router loss of a batch is no mean of those of its pieces, so one device gets the pieces.
    expected = fit_by_hand(model())
    strategy = HeteroPipelineStrategy(workers[:2], plan_over(workers), loss_weighting="samples")
    assert_equal_runs(fit(model(), strategy, padded=False), expected)


@pytest.mark.parametrize("family", [*MIXTURES, "gpt2", "falcon"])
def test_a_whole_batch_at_the_boundary_equals_one_device(family: str, workers: list[str]) -> None:
    expected = fit(tiny_model(family), "auto")
    strategy = HeteroPipelineStrategy(workers[:2], plan_over(workers), micro_batching="boundary")
    assert_equal_runs(fit(tiny_model(family), strategy), expected)


LORA_TARGETS = {
    "gpt2": ["c_attn", "c_proj"],
    "gpt_neox": ["query_key_value", "dense"],
    "falcon": ["query_key_value", "dense"],
    "falcon-alibi": ["query_key_value", "dense"],
    "phi": ["q_proj", "v_proj", "dense"],
    "opt": ["q_proj", "v_proj", "out_proj"],
}


def with_lora(model: PreTrainedModel, family: str, **options: Any) -> PeftModel:
    """The model with adapters whose every part has a say in the loss from the start."""
    targets = LORA_TARGETS.get(family, ["q_proj", "k_proj", "v_proj", "o_proj"])
    config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **options)
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1, generator=generator)
    return adapted


def in_four_bits(family: str, folder: Path, **options: Any) -> PreTrainedModel:
    """The family's model, quantised as a user does it."""
    tiny_model(family, **options).save_pretrained(folder)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32
    )
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False  # plain Lightning has nobody to do it
        experts = getattr(module, "experts", None)
        if experts is not None:
            for name in ("gate_up_proj", "down_proj"):
                replace_parameter_4bit(experts, name, compress_statistics=True, quant_type="nf4")
    return model


@pytest.mark.parametrize("family", CONFIGS)
def test_lora_equals_one_device(family: str, workers: list[str]) -> None:
    options = {"output_router_logits": False} if family in MIXTURES else {}

    def model() -> PeftModel:
        return with_lora(tiny_model(family, **options), family)

    expected = fit(model(), "auto")
    found = fit(model(), HeteroPipelineStrategy(workers[:2], plan_over(workers)))
    assert_equal_runs(found, expected)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "mixtral"])
def test_lora_on_four_bits_equals_one_device(
    family: str, workers: list[str], tmp_path: Path
) -> None:
    options = {"output_router_logits": False} if family in MIXTURES else {}

    def model() -> PeftModel:
        return with_lora(in_four_bits(family, tmp_path, **options), family)

    expected = fit(model(), "auto")
    found = fit(model(), HeteroPipelineStrategy(workers[:2], plan_over(workers)))
    assert_equal_runs(found, expected)
