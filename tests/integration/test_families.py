"""Any decoder: the gradients of the first step and the weights after three equal one device's."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import PeftModel
from transformers import PreTrainedModel

from lightning_hetero import HeteroPipelineStrategy

from ..families import (
    CONFIGS,
    MIXTURES,
    assert_equal_runs,
    fit_by_hand,
    fit_family,
    plan_over,
    tiny_model,
)
from ..pairwise import each_value, keeping
from ..qlora import in_four_bits, with_lora


@pytest.mark.parametrize(
    ("family", "frozen"),
    keeping(
        [("llama", False), ("gpt2", True), ("falcon", False), ("gemma3", False)],
        each_value([f for f in CONFIGS if f not in MIXTURES], [False, True]),
    ),
)
def test_family_equals_one_device(family: str, frozen: bool, workers: list[str]) -> None:
    def model() -> PreTrainedModel:
        made = tiny_model(family)
        made.get_input_embeddings().requires_grad_(not frozen)
        return made

    expected = fit_family(model())
    found = fit_family(model(), HeteroPipelineStrategy(workers[:2], plan_over(workers)))
    assert_equal_runs(found, expected)


# The router's loss of a micro-batch is not that of the batch, which the first-batch check says.
@pytest.mark.filterwarnings("ignore:The loss of the first batch")
@pytest.mark.parametrize(
    ("family", "frozen"), keeping([("qwen3_moe", True)], each_value(MIXTURES, [False, True]))
)
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
    assert_equal_runs(fit_family(model(), strategy, padded=False), expected)


@pytest.mark.parametrize("family", keeping(["mixtral"], [*MIXTURES, "gpt2", "falcon"]))
def test_a_whole_batch_at_the_boundary_equals_one_device(family: str, workers: list[str]) -> None:
    expected = fit_family(tiny_model(family))
    strategy = HeteroPipelineStrategy(workers[:2], plan_over(workers), micro_batching="boundary")
    assert_equal_runs(fit_family(tiny_model(family), strategy), expected)


# Llama and GPT-2 are below.
@pytest.mark.parametrize(
    "family",
    keeping(
        ["gpt_neox"],
        ["llama", "qwen2", "phi", "gpt_neox", "opt", "falcon", "qwen3_moe"],
    ),
)
def test_lora_equals_one_device(family: str, workers: list[str]) -> None:
    options = {"output_router_logits": False} if family in MIXTURES else {}

    def model() -> PeftModel:
        return with_lora(tiny_model(family, **options), family)

    expected = fit_family(model())
    found = fit_family(model(), HeteroPipelineStrategy(workers[:2], plan_over(workers)))
    assert_equal_runs(found, expected)


@pytest.mark.parametrize(
    "family", keeping(["gpt2"], ["llama", "qwen3", "gemma3", "gpt2", "mixtral"])
)
def test_lora_on_four_bits_equals_one_device(
    family: str, workers: list[str], tmp_path: Path
) -> None:
    options = {"output_router_logits": False} if family in MIXTURES else {}

    def model() -> PeftModel:
        return with_lora(in_four_bits(family, tmp_path, **options), family)

    expected = fit_family(model())
    found = fit_family(model(), HeteroPipelineStrategy(workers[:2], plan_over(workers)))
    assert_equal_runs(found, expected)
