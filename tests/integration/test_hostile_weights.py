"""A coordinator that sends 4-bit weights or adapters that do not fit harms no worker."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lightning_hetero.coordinator.run_part import Contents, Loaded
from lightning_hetero.coordinator.session import Coordinator
from lightning_hetero.coordinator.worker_stages import RemoteStage
from lightning_hetero.errors import StageFailed
from lightning_hetero.model.four_bit import FourBit, apply_all, describe_all, pack
from lightning_hetero.model.layers import find_decoder_layers
from lightning_hetero.model.recipe import Recipe, write_recipe
from lightning_hetero.model.tensors import locate, named_tensors, stored_in_four_bits
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.deadlines import Deadlines

from ..families import tiny_model

BYTES = torch.uint8


def model_on_meta() -> Any:
    """A model of which one linear layer is in 4 bits."""
    model = tiny_model("llama").to("meta")
    apply_all(model, {"model.layers.0.mlp.up_proj": FourBit([24, 16], "nf4", True)})
    return model


def stage_of(model: Any) -> RemoteStage:
    first = find_decoder_layers(model)[0]
    recipe = write_recipe(model, [(0, first)])
    layers = {0: first.module}
    return RemoteStage(recipe, layers, partial(contents, layers), recompute=False)


def contents(layers: dict[int, nn.Module], **changed: Any) -> Contents:
    """Random weights; for one in 4 bits other bytes, or other parts of its state, if said."""
    for name, tensor in named_tensors(layers):
        if not stored_in_four_bits(layers, name):
            yield Loaded(name, torch.rand(tensor.shape, dtype=tensor.dtype), {})
            continue
        packed, state = pack(*locate(layers, name)[:2], torch.rand(24, 16))
        packed = changed.get("packed", packed)
        state = {part: changed.get(part, value) for part, value in state.items()}
        yield Loaded(name, packed, {} if changed.get("no_state") else state)


def deploy(address: str, stage: RemoteStage) -> None:
    coordinator = Coordinator([(address, Address.parse(address))], Deadlines(), Identity())
    try:
        list(coordinator.layers.deploy([stage]))
    finally:
        coordinator.close()


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "scales end early": ({"absmax": torch.zeros(1, dtype=BYTES)}, "its scales should be"),
    "scales of scales end early": ({"nested_absmax": torch.zeros(0)}, "scales' scales"),
    "a code book ends early": ({"quant_map": torch.zeros(2)}, "code book"),
    "bytes end early": ({"packed": torch.zeros(3, 1, dtype=BYTES)}, "should have the shape"),
    "bytes have another type": ({"packed": torch.zeros(192, 1, dtype=torch.int8)}, "packed bytes"),
    "no description": (
        {"quant_state.bitsandbytes__nf4": torch.zeros(4, dtype=BYTES)},
        "cannot be read",
    ),
    "to be packed, with another shape": (
        {"packed": torch.rand(16, 24), "no_state": True},
        r"does not fit \[24, 16\]",
    ),
    "to be packed, and packed already": ({"no_state": True}, "failed before the first step"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_4_bit_tensor_that_does_not_fit_is_refused(name: str, workers: list[str]) -> None:
    changed, expected = HOSTILE[name]
    stage = stage_of(model_on_meta())
    hostile = replace(stage, contents=partial(contents, stage.layers, **changed))  # type: ignore[arg-type]
    with pytest.raises(StageFailed, match=expected):
        deploy(workers[0], hostile)
    deploy(workers[0], stage)


def with_adapter_config(**changes: Any) -> RemoteStage:
    """A stage whose recipe says something else about its adapter than the model has."""
    config = LoraConfig(r=2, target_modules=["q_proj"])
    stage = stage_of(get_peft_model(tiny_model("llama"), config).base_model.model)
    assert isinstance(stage.recipe, Recipe)
    assert stage.recipe.adapters is not None
    content = {**stage.recipe.adapters.configs["default"], **changes}
    adapters = replace(stage.recipe.adapters, configs={"default": content})
    recipe = Recipe.from_json(stage.recipe.to_json())
    assert isinstance(recipe, Recipe)
    fields = {name: getattr(recipe, name) for name in recipe.__struct_fields__}
    return replace(stage, recipe=Recipe(**{**fields, "adapters": adapters}))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"peft_type": "XLORA"}, "'XLORA' cannot live on workers"),
        ({"peft_type": "NONE"}, "'NONE' cannot live on workers"),
        ({"unknown": 1}, "cannot inject the adapter 'default'"),
        ({"r": 0}, "cannot inject the adapter 'default'"),
        ({"r": "two"}, "cannot inject the adapter 'default'"),
        ({"target_modules": ["nothing"]}, "cannot inject the adapter 'default'"),
        ({"target_modules": ["k_proj"]}, "differ from the coordinator's"),
    ],
)
def test_an_adapter_that_cannot_be_injected_is_refused(
    changes: dict[str, Any], expected: str, workers: list[str]
) -> None:
    with pytest.raises(StageFailed, match=expected):
        deploy(workers[0], with_adapter_config(**changes))
    deploy(workers[0], stage_of(model_on_meta()))


def test_a_module_named_by_an_adapter_is_not_imported(workers: list[str]) -> None:
    core = {"megatron_core": "no.such.module", "megatron_config": {"a": 1}}
    deploy(workers[0], with_adapter_config(**core))


def test_the_description_that_a_worker_reads_is_that_of_the_model() -> None:
    recipe = stage_of(model_on_meta()).recipe
    assert isinstance(recipe, Recipe)
    described = describe_all(model_on_meta().model.layers[0])
    assert recipe.four_bit == {f"model.layers.0.{k}": v for k, v in described.items()}
