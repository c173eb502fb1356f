"""Adapters of PEFT on layers that live on workers: as on one device, or refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    get_peft_model,
    inject_adapter_in_model,
)
from transformers import PreTrainedModel

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import ModelError

from ..families import BATCH_SIZE, FamilyModule, assert_equal_runs, plan_over, tiny_model
from ..models import fit, loader
from ..pairwise import keeping, repeats
from ..qlora import in_four_bits

ATTENTION = ["q_proj", "v_proj"]


def train(model: Any, workers: list[str] | None, module: Any = None) -> FamilyModule:
    """Two steps, by Lightning alone where there are no workers."""
    strategy: Any = "auto"
    if workers is not None:
        strategy = HeteroPipelineStrategy(workers[:2], plan_over(workers))
    data = loader(BATCH_SIZE * 2, BATCH_SIZE, padded=True)
    return fit(module or FamilyModule(model), strategy, data)


def shaken(model: Any) -> Any:
    """Change the adapters at random, so that each of their parts affects the first loss."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "ia3_" in name:
                drawn = torch.empty(parameter.shape, dtype=parameter.dtype)
                parameter.add_(drawn.normal_(std=0.1, generator=generator).to(parameter.device))
    return model


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ATTENTION, "task_type": "CAUSAL_LM", **options})


# Options that leave each other alone share a run: each shows in its losses, gradients or weights.
CONFIGS: dict[str, Callable[[], Any]] = {
    "rslora, some layers": lambda: lora(use_rslora=True, layers_to_transform=[0, 2]),
    "dora": lambda: lora(use_dora=True),
    "all-linear, excluded": lambda: lora(
        target_modules="all-linear", exclude_modules=["down_proj"]
    ),
    "regex, pissa": lambda: lora(
        target_modules=r".*layers\.[13]\..*\.(up|down)_proj", init_lora_weights="pissa"
    ),
    "patterns, biases": lambda: lora(
        rank_pattern={"q_proj": 2}, alpha_pattern={r"layers.2.*v_proj": 32}, bias="lora_only"
    ),
    "head and norms saved, lora bias": lambda: lora(
        modules_to_save=["lm_head", "input_layernorm"], lora_bias=True
    ),
    "kasa": lambda: lora(kasa_config={}),
    "mica": lambda: lora(init_lora_weights="mica"),
    "loha": lambda: LoHaConfig(r=4, target_modules=ATTENTION),
    "oft": lambda: OFTConfig(oft_block_size=4, target_modules=ATTENTION),
    "norms tuned": lambda: LNTuningConfig(target_modules=["input_layernorm"]),
    "ia3": lambda: IA3Config(
        target_modules=["k_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        task_type="CAUSAL_LM",
    ),
}


# Workers build the others in `tests/model/test_adapters.py`, or as one of these.
TRAINED = (
    "patterns, biases",
    "head and norms saved, lora bias",
    "kasa",
    "mica",
    "loha",
    "norms tuned",
)


@pytest.mark.parametrize("name", keeping(TRAINED, CONFIGS))
def test_every_kind_of_adapter_equals_one_device(name: str, workers: list[str]) -> None:
    def model() -> Any:
        torch.manual_seed(1)
        return shaken(get_peft_model(tiny_model("qwen2"), CONFIGS[name]()))

    assert_equal_runs(train(model(), workers), train(model(), None))


@pytest.mark.parametrize(
    "name",
    keeping(["dora"], ["rslora, some layers", "dora", "all-linear, excluded", "ia3"]),
)
def test_every_kind_of_adapter_on_four_bits(name: str, workers: list[str], tmp_path: Path) -> None:
    def model() -> Any:
        quantized = in_four_bits("llama", tmp_path)
        torch.manual_seed(1)
        return shaken(get_peft_model(quantized, CONFIGS[name]()))

    assert_equal_runs(train(model(), workers), train(model(), None))


def two_adapters(active: str) -> PeftModel:
    torch.manual_seed(1)
    model: PeftModel = get_peft_model(tiny_model("llama"), lora())
    model.add_adapter("second", lora(r=2, target_modules=["q_proj", "up_proj"]))
    model.set_adapter(active)
    return shaken(model)


def injected() -> PreTrainedModel:
    torch.manual_seed(1)
    return shaken(inject_adapter_in_model(lora(), tiny_model("llama")))


def added() -> PreTrainedModel:
    torch.manual_seed(1)
    model = tiny_model("llama")
    model.add_adapter(lora())
    return shaken(model)


WAYS: dict[str, Callable[[], Any]] = {
    "first of two": lambda: two_adapters("default"),
    "second of two": lambda: two_adapters("second"),
    "injected": injected,
    "add_adapter": added,
}


@pytest.mark.parametrize("way", keeping(["second of two", "injected"], WAYS))
def test_however_adapters_came_into_the_model(way: str, workers: list[str]) -> None:
    assert_equal_runs(train(WAYS[way](), workers), train(WAYS[way](), None))


def test_dropout_in_an_adapter_trains(workers: list[str]) -> None:
    model = shaken(get_peft_model(tiny_model("llama"), lora(lora_dropout=0.3)))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, workers)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "lora_" in name}


def test_merged_adapters_are_refused(workers: list[str]) -> None:
    model = get_peft_model(tiny_model("llama"), lora())
    model.merge_adapter()
    with pytest.raises(ModelError, match="unmerge_adapter"):
        train(model, workers)


def test_adapters_that_change_while_training_are_refused(workers: list[str]) -> None:
    config = AdaLoraConfig(total_step=10, target_modules=ATTENTION, task_type="CAUSAL_LM")
    with pytest.raises(ModelError, match="'ADALORA' cannot live on workers; use one of"):
        train(get_peft_model(tiny_model("llama"), config), workers)


class DisablesInStep(FamilyModule):
    """Disables the adapters for a part of the step, as preference losses do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.model.disable_adapter():
            reference = self.model(**batch).loss
        return super().training_step(batch, batch_idx) - reference


@pytest.mark.follows(
    "Leave adapters as they are during the run (do not call `disable_adapter()`), or keep the "
    "layers that have adapters with the coordinator.",
)
def test_switching_adapters_off_for_a_forward_is_refused(workers: list[str]) -> None:
    model = shaken(get_peft_model(tiny_model("llama"), lora()))
    with pytest.raises(ModelError, match="switched, scaled or merged .* `disable_adapter"):
        train(model, workers, module=DisablesInStep(model))
    model = shaken(get_peft_model(tiny_model("llama"), lora()))
    train(model, workers)


@repeats("model/test_adapters.py::test_a_scale_set_by_hand_is_said")
def test_a_scale_set_by_hand_goes_with_the_layer(workers: list[str]) -> None:
    def model() -> Any:
        made = shaken(get_peft_model(tiny_model("llama"), lora()))
        for module in made.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("default", 3.0)
        return made

    assert_equal_runs(train(model(), workers), train(model(), None))


@repeats("model/test_adapters.py::test_adapters_that_are_switched_off_stay_so")
def test_adapters_that_are_switched_off_stay_so(workers: list[str]) -> None:
    def model() -> Any:
        made = shaken(
            get_peft_model(tiny_model("llama"), lora(modules_to_save=["input_layernorm"]))
        )
        made.base_model.disable_adapter_layers()
        made.base_model.model.model.norm.weight.requires_grad_(True)
        return made

    assert_equal_runs(train(model(), workers), train(model(), None))


class FreezesLate(FamilyModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora_B" in name)
        return super().configure_optimizers()


@repeats("integration/test_freezing.py::test_phases_equal_one_device")
def test_freezing_during_the_run_equals_one_device(workers: list[str]) -> None:
    models = [get_peft_model(tiny_model("llama"), lora()) for _ in range(2)]
    found = train(models[0], workers, module=FreezesLate(models[0]))
    assert_equal_runs(found, train(models[1], None, module=FreezesLate(models[1])))


class ChangesAtTheEnd(FamilyModule):
    """Changes the adapters after training, while the layers are still on workers."""

    def __init__(self, model: Any, change: Callable[[Any], Any]) -> None:
        super().__init__(model)
        self.change = change

    def on_train_end(self) -> None:
        self.change(self.model)


def assert_layers_are_trained(found: FamilyModule) -> None:
    """The weights that the workers trained came back."""
    expected = train(shaken(get_peft_model(tiny_model("llama"), lora())), None)
    parameters = dict(found.named_parameters())
    for name, parameter in expected.named_parameters():
        if any(f".layers.{number}." in name for number in (1, 2, 3)):
            torch.testing.assert_close(parameters[name], parameter, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "method", keeping(["merge_and_unload"], ["merge_adapter", "merge_and_unload"])
)
def test_merging_into_layers_that_are_away_is_refused(method: str, workers: list[str]) -> None:
    model = shaken(get_peft_model(tiny_model("llama"), lora()))
    module = ChangesAtTheEnd(model, lambda model: getattr(model, method)())
    with pytest.raises(ModelError, match="merge them after the run"):
        train(model, workers, module=module)
    assert_layers_are_trained(module)


def test_an_adapter_that_comes_when_layers_are_away_harms_no_other(workers: list[str]) -> None:
    model = shaken(get_peft_model(tiny_model("llama"), lora()))
    module = ChangesAtTheEnd(model, lambda model: model.add_adapter("late", lora()))
    assert_layers_are_trained(train(model, workers, module=module))
