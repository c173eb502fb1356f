"""The recipe: what a worker needs to rebuild its layers, without weights and without our code.

A recipe names a model class of the transformers library and carries its config. It is text from
the network on the worker's side: it is checked against its type, and nothing in it can name code
outside of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ..errors import ModelError
from .adapters import Adapters, describe_adapters, inject_adapters, without_wrappers
from .collecting import install_hooks
from .four_bit import FourBit, apply_four_bit, describe_four_bit
from .layers import DecoderLayer

# Other names, flash attention's too where its package is missing, make transformers fetch kernels
# from a hub and run them.
ATTENTION_KINDS = ("eager", "sdpa", "flex_attention")
EXPERTS_KINDS = (None, "eager", "batched_mm", "grouped_mm")

# The recipe says these itself.
_NOT_FROM_CONFIG = ("attn_implementation", "experts_implementation", "quantization_config")

# Building is on `meta` and takes no memory, but each layer takes time; the deepest published
# decoders have fewer than 200 layers.
MOST_LAYERS = 1024


@dataclass(frozen=True)
class Recipe:
    """How to build a stage's layers.

    Args:
        model_class: Name of a class of transformers, such as ``LlamaForCausalLM``.
        config: The model's config as in its ``config.json``.
        attention: The attention implementation; it decides which masks the layers expect.
        layers: Number of each layer of the stage in the plan, and its path inside the model.
        experts: The implementation of a mixture's experts, as ``attention``; None lets the worker
            take the fastest that it has.
        four_bit: How tensors inside the layers are stored in 4 bits, by their paths in the model.
        adapters: The adapters inside the layers.
    """

    model_class: str
    config: dict[str, Any]
    attention: str
    layers: dict[int, str]
    experts: str | None = None
    four_bit: dict[str, FourBit] = field(default_factory=dict)
    adapters: Adapters | None = None

    def to_json(self) -> str:
        """The recipe as text for the wire."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Read a recipe from the wire.

        Raises:
            ModelError: If the text is no recipe.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ModelError(f"The recipe cannot be read: {error}.") from error


def write_recipe(root: nn.Module, layers: Sequence[tuple[int, DecoderLayer]]) -> Recipe:
    """The recipe for numbered layers of a LightningModule.

    Raises:
        ModelError: If the layers do not belong to one Hugging Face model.
    """
    owner_name, owner = _owner_of(root, [layer for _, layer in layers])
    prefix = f"{owner_name}." if owner_name else ""
    paths = {number: layer.name.removeprefix(prefix) for number, layer in layers}
    return Recipe(
        model_class=type(owner).__name__,
        config=_plain_config(owner.config),
        attention=owner.config._attn_implementation or "eager",
        layers=paths,
        experts=_experts_kind(owner.config),
        four_bit={
            f"{paths[number]}.{without_wrappers(path)}": four_bit
            for number, layer in layers
            for path, four_bit in describe_four_bit(layer.module).items()
        },
        adapters=describe_adapters(owner, [layer.module for _, layer in layers]),
    )


def build_layers(recipe: Recipe) -> nn.ModuleDict:
    """The layers of a recipe on the ``meta`` device, keyed by their numbers.

    Raises:
        ModelError: If the recipe names something that transformers does not have.
    """
    model_class = getattr(transformers, recipe.model_class, None)
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise ModelError(
            f"transformers {transformers.__version__} has no model class {recipe.model_class!r}; "
            "install the coordinator's version on this worker."
        )
    model = _build_model(model_class, recipe)
    install_hooks(model, list(recipe.layers.values()))
    try:
        found = {str(n): model.get_submodule(path) for n, path in recipe.layers.items()}
    except AttributeError as error:
        raise ModelError(f"{recipe.model_class} has no such layer: {error}.") from error
    return nn.ModuleDict(found)


def _build_model(model_class: type[PreTrainedModel], recipe: Recipe) -> PreTrainedModel:
    config = _read_config(model_class, recipe)
    options: dict[str, Any] = {"attn_implementation": recipe.attention}
    if recipe.experts is not None:
        options["experts_implementation"] = recipe.experts
    with torch.device("meta"):
        model: PreTrainedModel = model_class._from_config(config, **options)
    apply_four_bit(model, recipe.four_bit)
    # PEFT asks for it and then wraps 4-bit layers with classes of their own.
    model.is_loaded_in_4bit = bool(recipe.four_bit)  # type: ignore[assignment]
    if recipe.adapters is not None:
        inject_adapters(model, recipe.adapters)
    return model


def _owner_of(root: nn.Module, layers: Sequence[DecoderLayer]) -> tuple[str, PreTrainedModel]:
    """The outermost Hugging Face model that holds all the layers."""
    for name, module in root.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, PreTrainedModel) and all(
            layer.name.startswith(prefix) for layer in layers
        ):
            if not hasattr(transformers, type(module).__name__):
                break
            return name, module
    raise ModelError(
        f"The layer {layers[0].name!r} ({type(layers[0].module).__name__}) is not part of a model "
        "class of the transformers library, and a worker can only rebuild those in this version."
    )


def _plain_config(config: PretrainedConfig) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return plain


def _experts_kind(config: PretrainedConfig) -> str | None:
    kind = config._experts_implementation
    # What transformers takes by itself wherever it can.
    return None if kind == "grouped_mm" else kind


def _read_config(model_class: type[PreTrainedModel], recipe: Recipe) -> PretrainedConfig:
    if recipe.attention not in ATTENTION_KINDS:
        raise ModelError(
            f"The attention implementation {recipe.attention!r} is not allowed on a worker; "
            f"use one of {', '.join(ATTENTION_KINDS)}."
        )
    if recipe.experts not in EXPERTS_KINDS:
        raise ModelError(
            f"The experts implementation {recipe.experts!r} is not allowed on a worker; "
            f"use one of {', '.join(map(str, EXPERTS_KINDS))}."
        )
    content = {
        key: value
        for key, value in recipe.config.items()
        if not any(part in key for part in _NOT_FROM_CONFIG)
    }
    config_class = model_class.config_class
    if config_class is None:
        raise ModelError(f"{recipe.model_class} cannot be built from a config.")
    # Some families have a name of their own for it, such as GPT-2's n_layer.
    key = config_class.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    num_layers = content.get(key)
    if not isinstance(num_layers, int) or not 0 < num_layers <= MOST_LAYERS:
        raise ModelError(f"The config's {key} is {num_layers!r}; it must be 1 to {MOST_LAYERS}.")
    config: PretrainedConfig = config_class.from_dict(content)
    return config
