"""The recipe: how a worker rebuilds its layers, without weights and without user code.

A recipe names a model class of transformers and holds its config; for layers of other classes it is
a description of them (`custom_layers.py`). On the worker a recipe is text from the network: it is
checked against its type, and it can name only code of transformers, torch.nn and the modules
allowed by the worker's owner.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import msgspec
import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
)

from ..errors import ModelError
from ..plan import HEAD_LAYERS
from .allowed_imports import Allowed
from .attribute_values import META
from .captured_outputs import collect_from, collected_in, install_hooks
from .compiled_layers import without_wrapper_names
from .custom_layers import BlocksRecipe, build_blocks, describe_blocks
from .head import HeadLoss, loss_of_transformers
from .hf_config import (
    check_size,
    experts_kind,
    hubs_shut_off,
    in_one_line,
    layers_key,
    plain_config,
    read_config,
)
from .layers import (
    EMBEDDING_LAYER,
    LOSS_LAYER,
    Adapters,
    DecoderLayer,
    EmbeddingOptions,
    models_around,
    name_of,
    without_wrappers,
)
from .partial_layers import absent_in, half_of
from .stored import FourBit, describe_stored, format_here
from .wings import check_code, code_of, describe_adapters, inject_adapters

# The calls of torch that building takes, a few seconds of them. The decoders of transformers in
# their default sizes take fewer than 10,000.
MOST_CALLS = 2**17

NOTHING_ALLOWED = Allowed()


class Recipe(msgspec.Struct, frozen=True, tag="model"):
    """How to build a stage's layers as parts of a Hugging Face model.

    Args:
        model_class: Name of a class of transformers, such as ``LlamaForCausalLM``.
        config: The model's config as in its ``config.json``.
        attention: The attention implementation; it decides the masks of the layers.
        layers: From the number of each layer in the plan to its path inside the model.
        experts: The implementation of a mixture's experts; None for the fastest on the worker.
        four_bit: The tensors in 4 bits inside the layers, by path in the model.
        adapters: The adapters inside the layers.
        embedding: The options of the input embedding, if it is among the layers.
            The loss among the layers is that of the model class.
        absent: The absent children of halves, by the numbers of the halves.
        code: The digest of each function run by the layers; None if nothing compares them.
    """

    model_class: str
    config: dict[str, Any]
    attention: str
    layers: dict[int, str]
    experts: str | None = None
    four_bit: dict[str, FourBit] = {}
    adapters: Adapters | None = None
    embedding: EmbeddingOptions | None = None
    absent: dict[int, dict[str, bool]] = {}
    code: dict[str, str] | None = {}
    imports: ClassVar[list[str]] = []
    """The Python modules that the worker's owner must have allowed: none."""

    def to_json(self) -> str:
        """The recipe as text for the wire."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str) -> Recipe | BlocksRecipe:
        """Decode a recipe of either kind.

        Raises:
            ModelError: If the text is not a recipe.
        """
        try:
            return msgspec.json.decode(text, type=Recipe | BlocksRecipe)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ModelError(f"The recipe cannot be read: {error}.") from error


def write_recipe(
    root: nn.Module, layers: Sequence[tuple[int, DecoderLayer]]
) -> Recipe | BlocksRecipe:
    """Write the recipe for numbered layers of a LightningModule.

    Raises:
        ModelError: If a worker could not rebuild the layers.
    """
    found = _owner_of(root, layers)
    if found is None and any(number in HEAD_LAYERS for number, _ in layers):
        raise ModelError(
            f"{layers[0][1].name} is in no model of a class of transformers, so workers cannot "
            "build its head. Take `head: true` out of the plan."
        )
    if found is None and any(absent_in(layer.module) for _, layer in layers):
        raise ModelError(
            f"{layers[0][1].name} is in no model of a class of transformers, so workers cannot "
            "build halves of it. Leave out `cut_layers`."
        )
    if found is None:
        outputs = collected_in(root, layers)
        return msgspec.structs.replace(describe_blocks(layers), outputs=outputs)
    owner_name, owner = found
    prefix = f"{owner_name}." if owner_name else ""
    paths = {
        number: without_wrapper_names(layer.name.removeprefix(prefix)) for number, layer in layers
    }
    return Recipe(
        model_class=type(owner).__name__,
        config=plain_config(owner.config),
        attention=owner.config._attn_implementation or "eager",
        layers=paths,
        experts=experts_kind(owner.config),
        four_bit={
            f"{paths[number]}.{without_wrappers(path)}": four_bit
            for number, layer in layers
            for path, four_bit in describe_stored(layer.module).items()
        },
        adapters=describe_adapters(
            owner,
            [layer.module for _, layer in layers],
            models_around(root, [owner_name]),
        ),
        embedding=next(
            (EmbeddingOptions.of(layer.module) for n, layer in layers if n == EMBEDDING_LAYER), None
        ),
        absent={number: absent for number, layer in layers if (absent := absent_in(layer.module))},
        code=code_of((layer.module for _, layer in layers), owner.config._attn_implementation),
    )


def imports_of(root: nn.Module, layers: Sequence[tuple[int, DecoderLayer]]) -> Sequence[str]:
    """The Python modules that a worker must import to build numbered layers of a LightningModule.

    Raises:
        ModelError: If a worker could not rebuild layers of one's own.
    """
    if _owner_of(root, layers) is not None:
        return Recipe.imports
    return write_recipe(root, layers).imports


def joined(recipes: Iterable[Recipe]) -> list[Recipe]:
    """Fewer recipes for the same layers, as each recipe takes a whole model to build.

    Recipes with adapters or tensors in 4 bits stay apart, because these change the whole model.
    """
    found: list[Recipe] = []
    for recipe in recipes:
        last = found[-1] if found else None
        if last is not None and _model_of(last) == _model_of(recipe):
            found[-1] = msgspec.structs.replace(
                last,
                layers=last.layers | recipe.layers,
                embedding=last.embedding or recipe.embedding,
                absent=last.absent | recipe.absent,
                code=None if recipe.code is None else {**(last.code or {}), **recipe.code},
            )
        else:
            found.append(recipe)
    return found


def _model_of(recipe: Recipe) -> Any:
    """The identity of a recipe's model; the recipe itself if its model is its own."""
    if recipe.adapters is not None or recipe.four_bit:
        return recipe
    return recipe.model_class, recipe.config, recipe.attention, recipe.experts


def build_layers(
    recipe: Recipe | BlocksRecipe,
    allowed: Allowed = NOTHING_ALLOWED,
    device: torch.device = META,
) -> nn.ModuleDict:
    """Build the layers of a recipe on the ``meta`` device, keyed by their numbers.

    Args:
        recipe: Of `write_recipe`.
        allowed: The allowed imports.
        device: Where the layers will compute.

    Raises:
        ModelError: If the recipe names code, layers or options that are missing or not allowed, or
            if the layers' code is not the coordinator's.
    """
    if isinstance(recipe, BlocksRecipe):
        layers = build_blocks(recipe, allowed, device)
        collect_from(layers, recipe.outputs)
        check_code(layers.values(), recipe.code)
        return layers
    model_class = getattr(transformers, recipe.model_class, None)
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise ModelError(
            f"transformers {transformers.__version__} has no model class {recipe.model_class!r}; "
            "install the coordinator's version on this worker."
        )
    if not _is_decoder(model_class):
        raise ModelError(
            f"{recipe.model_class} is no decoder, so workers do not build it; cut the decoder "
            "inside it, or keep its layers with the coordinator."
        )
    config = _read_config(model_class, recipe)
    try:
        with hubs_shut_off(), _Budget():
            layers = _build_parts(model_class, config, recipe)
    except ModelError:
        raise
    except Exception as error:  # the code of transformers and peft, with data from the network
        raise ModelError(
            f"{recipe.model_class} cannot be built from the recipe ({in_one_line(error)}); install "
            "the coordinator's versions of torch and transformers on this worker."
        ) from error
    check_code(layers.values(), recipe.code, config._attn_implementation)
    return layers


# Functions that fill new parameters. On `meta` there is nothing to fill, and trying takes time.
_FILLING = frozenset(
    {nn.init.constant_, nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_}
)


class _Budget(TorchFunctionMode):
    """Ends a building after too many calls of torch in this thread, and leaves parameters unfilled.

    Only the code of its model knows the cost of a config: counts multiply.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_calls = 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._num_calls += 1
        if self._num_calls > MOST_CALLS:
            raise ModelError(
                f"The layers take more than {MOST_CALLS} calls of torch to build, so a worker does "
                "not build them; the recipe's config has too many parts."
            )
        if function in _FILLING and kwargs["tensor"].is_meta:
            return kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def _build_parts(
    model_class: type[PreTrainedModel], config: PretrainedConfig, recipe: Recipe
) -> nn.ModuleDict:
    model = _build_model(model_class, config, recipe)
    paths = {n: path for n, path in recipe.layers.items() if n != LOSS_LAYER}
    install_hooks(model, [path for n, path in paths.items() if n not in HEAD_LAYERS])
    try:
        found = {str(n): model.get_submodule(path) for n, path in paths.items()}
    except AttributeError as error:
        raise ModelError(f"{recipe.model_class} has no such layer: {error}.") from error
    for number, absent in recipe.absent.items():
        if number not in recipe.layers:
            raise ModelError(f"The recipe has a half {number} that is not among its layers.")
        found[str(number)] = half_of(found[str(number)], absent)
    if recipe.embedding is not None and EMBEDDING_LAYER in recipe.layers:
        recipe.embedding.apply(found[str(EMBEDDING_LAYER)])
    if LOSS_LAYER in recipe.layers:
        found[str(LOSS_LAYER)] = HeadLoss(loss_of_transformers(model))
    return nn.ModuleDict(found)


def _build_model(
    model_class: type[PreTrainedModel], config: PretrainedConfig, recipe: Recipe
) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = model_class._from_config(config)
    if recipe.four_bit:
        format_here().apply_all(model, recipe.four_bit)
    # PEFT reads it, and then wraps 4-bit layers with classes of their own.
    model.is_loaded_in_4bit = bool(recipe.four_bit)  # type: ignore[assignment]
    if recipe.adapters is not None:
        inject_adapters(model, recipe.adapters)
    return model


def _owner_of(
    root: nn.Module, layers: Sequence[tuple[int, DecoderLayer]]
) -> tuple[str, PreTrainedModel] | None:
    """The name and module of the outermost decoder of Hugging Face with all the layers.

    None if the layers, or the models around them down to the decoder, are of other classes.
    """
    # The parts of a head have been looked at before.
    others = (layer.module for number, layer in layers if number not in HEAD_LAYERS)
    if not all(map(_is_of_transformers, others)):
        return None
    for model in models_around(root, [layer.name for _, layer in layers]):
        if getattr(transformers, type(model).__name__, None) is not type(model):
            return None
        if _is_decoder(type(model)):
            return name_of(root, model), model
    return None


def _is_decoder(model_class: type[PreTrainedModel]) -> bool:
    """Whether a class is a language model with layers of its own.

    Models of several models (vision and language, retrieval) are not: their config may name any
    class for a part. The language model inside is one.
    """
    config_class = model_class.config_class
    if config_class is None:
        return False
    if layers_key(config_class) not in inspect.signature(config_class).parameters:
        return False
    return config_class.base_config_key == "text_config" or any(
        config_class in auto_class._model_mapping
        for auto_class in (AutoModelForCausalLM, AutoModelForSeq2SeqLM)
    )


def _is_of_transformers(module: nn.Module) -> bool:
    if type(module) is nn.Embedding:
        return True  # the input embedding of most models
    return type(module).__module__.partition(".")[0] == transformers.__name__


def _read_config(model_class: type[PreTrainedModel], recipe: Recipe) -> PretrainedConfig:
    config_class: Any = model_class.config_class
    config = read_config(config_class, recipe.config, recipe.attention, recipe.experts)
    check_size(recipe.config, config_class)
    return config
