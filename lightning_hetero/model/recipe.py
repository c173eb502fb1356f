"""The recipe: what a worker needs to rebuild its layers, without weights and without our code.

A recipe names a model class of the transformers library and carries its config. It is text from
the network on the worker's side: it is checked against its type, and nothing in it can name code
outside of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ..errors import ModelError
from .collecting import install_hooks
from .layers import DecoderLayer

# Other names, flash attention's too where its package is missing, make transformers fetch kernels
# from a hub and run them.
ATTENTION_KINDS = ("eager", "sdpa", "flex_attention")

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
    """

    model_class: str
    config: dict[str, Any]
    attention: str
    layers: dict[int, str]

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
    return Recipe(
        model_class=type(owner).__name__,
        config=_plain_config(owner.config),
        attention=owner.config._attn_implementation or "eager",
        layers={number: layer.name.removeprefix(prefix) for number, layer in layers},
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
    config = _read_config(model_class, recipe)
    with torch.device("meta"):
        model = model_class._from_config(config, attn_implementation=recipe.attention)
    install_hooks(model, list(recipe.layers.values()))
    try:
        found = {str(n): model.get_submodule(path) for n, path in recipe.layers.items()}
    except AttributeError as error:
        raise ModelError(f"{recipe.model_class} has no such layer: {error}.") from error
    return nn.ModuleDict(found)


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


def _read_config(model_class: type[PreTrainedModel], recipe: Recipe) -> PretrainedConfig:
    if recipe.attention not in ATTENTION_KINDS:
        raise ModelError(
            f"The attention implementation {recipe.attention!r} is not allowed on a worker; "
            f"use one of {', '.join(ATTENTION_KINDS)}."
        )
    content = {k: v for k, v in recipe.config.items() if "attn_implementation" not in k}
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
