"""The decoder layers of a LightningModule, its input embedding, and the numbers of its head.

The input embedding can live on the first worker as layer -1 of the pipeline:

    token ids ─▶ embedding ─▶ layer 0 ─▶ … ─▶ exchange(token ids, [call -1, call 0, …])

A model may then pass the embedding's output to its first layer, and do arithmetic with it before
(`placeholders.py`). The head can live on the last worker as the last three layers (`head.py`).
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, TypeGuard

import msgspec
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import ModelError
from ..plan import HEAD_LAYERS
from .attribute_values import META
from .compiled_layers import without_wrapper

# The parts of multi-modal models that make hidden states of images and sound.
_TOWERS = ("vision_config", "audio_config")
# Layers of these libraries alone run no code of the user's own.
_LIBRARIES = frozenset(
    {"torch", "transformers", "peft", "bitsandbytes", __name__.partition(".")[0]}
)
# Lists of modules that an error names.
_MOST_NEAR = 3

LayerChoice = str | list[str] | Callable[[nn.Module], Iterable[nn.Module]] | None


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer, or half of one, and the layer's dotted name inside the LightningModule.

    Args:
        name: The dotted name.
        module: The layer.
        list_index: The number of its list, if the module has several.
    """

    name: str
    module: nn.Module
    list_index: int = 0


def find_decoder_layers(root: nn.Module, choice: LayerChoice = None) -> list[DecoderLayer]:
    """The decoder layers in their order; the list may be empty if ``choice`` is None.

    Raises:
        ModelError: If the user's choice does not exist or is not a layer.
    """
    if choice is None:
        name = _find_layer_list(root)
        layers = [] if name is None else _layers_of_list(root, name)
    else:
        layers = _layers_chosen(root, choice)
    layers = [_without_wrapper(layer) for layer in layers]
    _check_are_layers(layers)
    return layers


def without_layers(root: nn.Module) -> str:
    """A sentence on a module without recognised layers, with the list perhaps meant."""
    said = f"{type(root).__name__} has no decoder layers that could be found"
    lists = {name: module for name, module in root.named_modules() if _is_list_of_equals(module)}
    if not lists:
        return said
    name = max(lists, key=lambda each: sum(p.numel() for p in lists[each].parameters()))
    count, kind = len(lists[name]), type(lists[name][0]).__name__
    return f"{said} (perhaps `layers={name!r}` is meant, which has {count} {kind})"


def _is_list_of_equals(module: nn.Module) -> TypeGuard[nn.ModuleList]:
    """Whether a module is a list of several layers of one class."""
    if not isinstance(module, nn.ModuleList) or len(module) < 2:
        return False
    return len({type(each) for each in module}) == 1 and type(module[0]) is not nn.ModuleList


def _without_wrapper(layer: DecoderLayer) -> DecoderLayer:
    name, module = without_wrapper(layer.name, layer.module)
    return replace(layer, name=name, module=module)


def _layers_chosen(root: nn.Module, choice: LayerChoice) -> list[DecoderLayer]:
    if isinstance(choice, str):
        return _layers_named(root, choice, (nn.ModuleList, nn.Sequential))
    # A ModuleList is callable and a sequence, but `layers` takes neither form of it.
    if callable(choice) and not isinstance(choice, nn.Module):
        chosen = choice(root)
        if not isinstance(chosen, Iterable):
            raise ModelError(
                f"The function `layers` returned a {type(chosen).__name__}; return the layers in a "
                "list or a ModuleList, or several ModuleLists in a list."
            )
        return _several([_layers_of(root, module) for module in chosen])
    if isinstance(choice, (list, tuple)) and all(isinstance(name, str) for name in choice):
        return _several([_layers_named(root, name, nn.ModuleList) for name in choice])
    raise ModelError(
        f"`layers` is a {type(choice).__name__}; give the dotted path of a ModuleList, a list of "
        "paths, or a function from the LightningModule to its layers."
    )


def _several(parts: Sequence[Sequence[DecoderLayer]]) -> list[DecoderLayer]:
    """The layers of lists and the single layers between them; each list but the first begins
    another part of the model."""
    found: list[DecoderLayer] = []
    list_index, has_list = 0, False
    for layers in parts:
        list_index += has_list and len(layers) > 1
        has_list = has_list or len(layers) > 1
        found += [replace(layer, list_index=list_index) for layer in layers]
    return found


def _layers_of(root: nn.Module, module: nn.Module) -> Sequence[DecoderLayer]:
    """The layers in a ModuleList; any other module is a layer itself."""
    name = name_of(root, module)
    if type(module) is nn.ModuleList and name:
        return _layers_of_list(root, name)
    return [DecoderLayer(name, module)]


def _layers_named(
    root: nn.Module, name: str, lists: type[nn.Module] | tuple[type[nn.Module], ...]
) -> list[DecoderLayer]:
    """The module of this name, or the layers in it if it is one of the given kinds of lists."""
    try:
        found = root.get_submodule(name)
    except AttributeError as error:
        _check_not_hidden(root, name)
        raise ModelError(
            f"There is no module {name!r} to take layers from: {error}. {_near(root, name)}"
        ) from error
    has_own_forward = type(found).forward not in (nn.Module.forward, nn.Sequential.forward)
    if not isinstance(found, lists) or has_own_forward:
        return [DecoderLayer(name, found)]
    if not len(list(found.children())):
        raise ModelError(f"{name!r} is an empty {type(found).__name__} and has no layers.")
    return _layers_of_list(root, name)


def _check_not_hidden(root: nn.Module, name: str) -> None:
    """Refuse the name of a module if Python does not find the module by it.

    Raises:
        ModelError: If a method of torch has it.
    """
    owner = root
    for leaf in name.split("."):
        found = owner._modules.get(leaf)
        if found is not None and getattr(owner, leaf) is not found:
            raise ModelError(
                f"The module {leaf!r} of {type(owner).__name__} is hidden by the method "
                f"`nn.Module.{leaf}` of torch. Rename the module."
            )
        owner = found if found is not None else nn.Module()


def _near(root: nn.Module, wanted: str) -> str:
    """A sentence with the lists of modules, the most similar names first."""
    lists = (nn.ModuleList, nn.Sequential)
    names = [name for name, module in root.named_modules() if name and isinstance(module, lists)]
    if not names:
        return f"{type(root).__name__} has no ModuleList; name the modules themselves."
    by_last = {name: name.rpartition(".")[2] for name in names}
    last = wanted.rpartition(".")[2]
    likeness = {name: SequenceMatcher(None, last, by_last[name]).ratio() for name in names}
    best = sorted(names, key=lambda name: (-likeness[name], name.count(".")))[:_MOST_NEAR]
    return f"Its lists of modules are, the most similar first: {', '.join(best)}."


def _check_are_layers(layers: Sequence[DecoderLayer]) -> None:
    """Refuse modules that cannot be called, and modules in two places."""
    names = [layer.name for layer in layers]
    for layer in layers:
        name = layer.name
        if not name or type(layer.module).forward is nn.Module.forward:
            raise ModelError(
                f"{name or 'The LightningModule itself'!r} ({type(layer.module).__name__}) is no "
                "layer that is called with hidden states; name the ModuleList of the layers."
            )
        inside = [other for other in names if other.startswith(f"{name}.")]
        if names.count(name) > 1 or inside:
            raise ModelError(
                f"`layers` names {name!r} twice"
                + (f", the second time as a part of it, {inside[0]!r}" if inside else "")
                + "; every layer belongs to one place of the pipeline."
            )


def _layers_of_list(root: nn.Module, name: str) -> list[DecoderLayer]:
    children = root.get_submodule(name).named_children()
    return [DecoderLayer(f"{name}.{key}", module) for key, module in children]


def name_of(root: nn.Module, wanted: nn.Module) -> str:
    """The dotted name of a module inside the LightningModule.

    Raises:
        ModelError: If it is not part of the LightningModule.
    """
    for name, module in root.named_modules():
        if module is wanted:
            return str(name)
    raise ModelError(
        f"The callable given as `layers` returned a {type(wanted).__name__} that is not part of "
        "the LightningModule."
    )


def _find_layer_list(root: nn.Module) -> str | None:
    """The first of the layer lists that train, or else of all. Language comes before images and
    sound, several layers before one, and shallow lists before deep ones."""

    def precedence(name: str) -> tuple[bool, bool, bool, int]:
        layers: Any = root.get_submodule(name)
        is_frozen = not any(parameter.requires_grad for parameter in layers.parameters())
        config = getattr(models_around(root, [f"{name}.0"])[-1], "config", None)
        is_tower = getattr(config, "base_config_key", "") in _TOWERS
        return is_frozen, is_tower, len(layers) == 1, name.count(".")

    return min(_layer_lists(root), key=precedence, default=None)


def _layer_lists(root: nn.Module) -> list[str]:
    """The lists of ``num_hidden_layers`` layers of a class in ``_no_split_modules`` of a Hugging
    Face model."""
    found = (
        f"{model_name}.{name}".strip(".")
        for model_name, model in root.named_modules()
        if getattr(model, "_no_split_modules", None)
        for name, module in model.named_modules()
        if _is_layer_list(model, module)
    )
    return list(dict.fromkeys(found))


def other_layer_lists(root: nn.Module, layers: Sequence[DecoderLayer]) -> list[str]:
    """The names of the lists with other decoder layers of Hugging Face models."""
    taken = {id(root.get_submodule(layer.name)) for layer in layers}
    return [
        name
        for name in _layer_lists(root)
        if not any(id(layer) in taken for layer in root.get_submodule(name).children())
    ]


def _is_layer_list(model: nn.Module, module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList):
        return False
    count = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    unsplit: Any = model._no_split_modules
    return len(module) == count and all(
        type(without_wrapper("", layer)[1]).__name__ in unsplit for layer in module
    )


def models_around(root: nn.Module, layer_names: Sequence[str]) -> list[PreTrainedModel]:
    """The Hugging Face models around all the layers, from the outermost to the innermost."""
    return _holding(_models_in(root), layer_names)


def models_around_each(root: nn.Module, layer_names: Sequence[str]) -> list[list[PreTrainedModel]]:
    """The Hugging Face models around some of the layers, one list for each innermost one.

    A module may have several models, such as a student and its teacher, or an encoder and a decoder
    in one model. Each list goes from the outermost model to the innermost.
    """
    models = _models_in(root)
    lists = (_holding(models, [name]) for name in layer_names)
    return [*{id(found[-1]): found for found in lists if found}.values()]


def chances_of_leaving_out(root: nn.Module, layer_names: Sequence[str]) -> dict[str, float]:
    """The options above 0, in the configs around layers, for leaving layers out at random in
    training, such as ``encoder_layerdrop``.

    An option of an encoder does not count for the layers of a decoder.
    """
    found: dict[str, float] = {}
    for models in models_around_each(root, layer_names):
        for name, chance in vars(models[-1].config).items():
            side = name.removesuffix("layerdrop").rstrip("_")
            is_option = name.endswith("layerdrop") and isinstance(chance, (int, float))
            if is_option and chance > 0 and any(side in layer for layer in layer_names):
                found[name] = chance
    return found


def _models_in(root: nn.Module) -> list[tuple[str, PreTrainedModel]]:
    return [(n, each) for n, each in root.named_modules() if isinstance(each, PreTrainedModel)]


def _holding(
    models: Sequence[tuple[str, PreTrainedModel]], layer_names: Sequence[str]
) -> list[PreTrainedModel]:
    starts = ((f"{name}." if name else "", model) for name, model in models)
    return [model for start, model in starts if all(n.startswith(start) for n in layer_names)]


def check_layers_stand_alone(root: nn.Module, stages: Sequence[Sequence[DecoderLayer]]) -> None:
    """Refuse tensors shared by a remote stage with another stage or with the coordinator, and
    tensors that no worker can have as they are here: sparse ones, and the memory of a trained
    parameter under another name.

    Raises:
        ModelError: With the names of a shared tensor.
    """
    owners: dict[Hashable, set[str]] = {}
    for kind, name, tensor in _tensors(root):
        owners.setdefault((kind, identity_of(tensor)), set()).add(name)
    for stage in stages:
        own = {
            f"{layer.name}.{name}": (kind, tensor)
            for layer in stage
            for kind, name, tensor in _tensors(layer.module)
        }
        for name, (kind, tensor) in own.items():
            shared = owners[kind, identity_of(tensor)]
            if not shared <= own.keys():
                raise ModelError(
                    f"The {kind} {name} is shared as {sorted(shared)}, and these would live on "
                    f"different workers; {_REMEDY_FOR_SHARED[kind]}, or keep them with the "
                    "coordinator."
                )
        _check_layouts(own)
        for one, other in overlapping({name: tensor for name, (_, tensor) in own.items()}):
            if own[one][1].requires_grad or own[other][1].requires_grad:
                raise ModelError(
                    f"{one} and {other} are two tensors in the same memory, so training changes "
                    "both here. A worker gives each a memory of its own. `clone()` one of them, "
                    "use the same parameter for both, or keep the layer with the coordinator."
                )


def _check_layouts(tensors: Mapping[str, tuple[str, Tensor]]) -> None:
    for name, (kind, tensor) in tensors.items():
        if tensor.layout is not torch.strided:
            layout = str(tensor.layout).removeprefix("torch.")
            raise ModelError(
                f"The {kind} {name} has the layout {layout}, which cannot be sent to a worker; "
                "convert it by `to_dense()`, or keep the layer with the coordinator."
            )


def overlapping(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """The names of each two tensors that have memory in common and are not the same."""
    # In the order of their memory: one storage may have all tensors of a checkpoint's file.
    there = [
        _Reach.of(name, tensor)
        for name, tensor in tensors.items()
        if not tensor.is_meta and tensor.layout is torch.strided and tensor.numel()
    ]
    before: list[_Reach] = []
    for each in sorted(there, key=lambda reach: (reach.storage, reach.start)):
        before = [one for one in before if one.storage == each.storage and one.end > each.start]
        yield from ((one.name, each.name) for one in before if one.overlaps(each))
        before.append(each)


class _Reach(NamedTuple):
    """A tensor, and its first byte in its storage and the byte after its last one."""

    name: str
    tensor: Tensor
    storage: tuple[str, int]
    start: int
    end: int

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> _Reach:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in steps)
        storage = str(tensor.device), tensor.untyped_storage().data_ptr()
        start = int(tensor.storage_offset()) * tensor.itemsize
        return cls(name, tensor, storage, start, start + (last + 1) * tensor.itemsize)

    def overlaps(self, later: _Reach) -> bool:
        """Whether another tensor that starts within this one has numbers of it, and is not the
        same."""
        if self.tensor is later.tensor:
            return False
        itemsize = self.tensor.itemsize
        if itemsize != later.tensor.itemsize:
            return True
        # Columns of one table lie between each other.
        used = torch.zeros((max(self.end, later.end) - self.start) // itemsize, dtype=torch.bool)
        used.as_strided(self.tensor.shape, self.tensor.stride()).fill_(True)
        offset = (later.start - self.start) // itemsize
        return bool(used.as_strided(later.tensor.shape, later.tensor.stride(), offset).any())


_REMEDY_FOR_SHARED = {
    "parameter": "put the layers that share it into one stage",
    "buffer": "give each layer a copy of its own (`clone`, or `copy.deepcopy` of its module)",
}


def _tensors(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, name and content of parameters and buffers; a shared tensor comes several times."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield "parameter", name, parameter
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield "buffer", name, buffer


def identity_of(tensor: Tensor) -> Hashable:
    """Equal for two tensors with the same memory: tensors tied by `.data` are two objects."""
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr() or id(tensor)


EMBEDDING_LAYER = -1
"""The embedding's number among the layers."""

NORM_LAYER, LOGITS_LAYER, LOSS_LAYER = HEAD_LAYERS
"""The numbers of the head's parts."""

_REMEDY = "take `embedding: true` out of the plan, so that it stays with the coordinator"


def has_own_code(layer: nn.Module) -> bool:
    """Whether a layer has modules of the user's own."""
    return any(map(is_own, layer.modules()))


def is_own(module: nn.Module) -> bool:
    """Whether a module's class is the user's own."""
    return type(module).__module__.partition(".")[0] not in _LIBRARIES


def is_end(number: int) -> bool:
    """Whether a number is of the input embedding or of the head."""
    return number == EMBEDDING_LAYER or number in HEAD_LAYERS


_ENDS = {
    EMBEDDING_LAYER: "the input embedding",
    NORM_LAYER: "the head's norm",
    LOGITS_LAYER: "the head",
    LOSS_LAYER: "the loss",
}


def describe_layer(number: int) -> str:
    """``layer 3``, or ``the input embedding`` for layer -1."""
    return _ENDS.get(number, f"layer {number}")


def describe_layers(numbers: Collection[int]) -> str:
    """``layers 2 to 4``, or ``the input embedding and layer 0``."""
    decoder_layers = [number for number in numbers if not is_end(number)]
    parts = [_ENDS[number] for number in (EMBEDDING_LAYER, LOGITS_LAYER) if number in numbers]
    if decoder_layers:
        first, last = min(decoder_layers), max(decoder_layers)
        named = f"layer {first}" if first == last else f"layers {first} to {last}"
        parts.insert(EMBEDDING_LAYER in numbers, named)
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def last_decoder_layer(numbers: Iterable[int]) -> int:
    """The last one of the layers before the head."""
    return max(number for number in numbers if number not in HEAD_LAYERS)


def find_embedding(root: nn.Module, layers: Sequence[DecoderLayer]) -> DecoderLayer:
    """The input embedding of the Hugging Face model with these layers.

    Raises:
        ModelError: If it is missing or cannot live on a worker.
    """
    models = models_around(root, [layer.name for layer in layers])
    if not models:
        raise ModelError(
            "The decoder layers are not inside one Hugging Face model, so its input embedding "
            f"cannot be found; {_REMEDY}."
        )
    try:
        module = models[-1].get_input_embeddings()
    except NotImplementedError:  # transformers cannot find it
        module = None
    if not isinstance(module, nn.Embedding):
        raise ModelError(
            f"The input embedding of {type(models[-1]).__name__} is a {type(module).__name__} and "
            f"no torch.nn.Embedding; {_REMEDY}."
        )
    return DecoderLayer(name_of(root, module), module)


def check_token_ids(embedding: nn.Module, token_ids: Tensor) -> None:
    """Refuse token ids outside the vocabulary. On a GPU one would end the CUDA context.

    Raises:
        ModelError: With the token id.
    """
    if token_ids.dtype not in (torch.int64, torch.int32):
        raise ModelError(f"The input embedding was given {token_ids.dtype} instead of token ids.")
    most = embedding.get_parameter("weight").shape[0]
    for token_id in token_ids.aminmax() if token_ids.numel() else ():
        if not 0 <= int(token_id) < most:
            raise ModelError(
                f"The token id {int(token_id)} is outside of the input embedding, which has {most} "
                "rows; check that the tokenizer belongs to the model."
            )


def embedded_on_meta(embedding: nn.Module, token_ids: Tensor) -> Tensor:
    """A tensor on ``meta`` with the shape and dtype of the embedded token ids."""
    weight = embedding.get_parameter("weight")
    return torch.empty(*token_ids.shape, weight.shape[-1], dtype=weight.dtype, device="meta")


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model.

    Args:
        configs: Each adapter's PEFT config as plain data, by the adapter's name.
        active: Names of the active adapters.
        is_enabled: Whether adapters are enabled.
        scaling: The present scaling factors, by the path of a layer in the model and the adapter's
            name. A config has the initial ones.
    """

    configs: dict[str, dict[str, Any]]
    active: list[str]
    is_enabled: bool = True
    scaling: dict[str, dict[str, float]] = field(default_factory=dict)


def without_wrappers(path: str) -> str:
    """The path of a module in layers without adapters."""
    return ".".join(part for part in path.split(".") if part != "base_layer")


class EmbeddingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of `torch.nn.Embedding` besides its sizes.

    They travel on their own since a config may differ, such as after ``config.pad_token_id = …``.
    """

    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool

    @classmethod
    def of(cls, embedding: nn.Module) -> EmbeddingOptions:
        """Read the options of an embedding."""
        return cls(*(getattr(embedding, name) for name in cls.__struct_fields__))

    def apply(self, embedding: nn.Module) -> None:
        """Set the options on an embedding built from the model's config.

        Raises:
            ModelError: If the module is not an embedding.
        """
        if not isinstance(embedding, nn.Embedding):
            raise ModelError(
                f"The model's input embedding is a {type(embedding).__name__} on this worker; "
                "install the coordinator's version of transformers."
            )
        for name in self.__struct_fields__:
            setattr(embedding, name, getattr(self, name))


@cache
def look_past_meta() -> None:
    """Give Hugging Face models the ``device`` of their first tensor with content.

    Without this, it is the device of the first parameter: ``meta`` if the embedding is away, and a
    tensor moved there loses its content. A model whose tensors are all away answers ``cpu``. Other
    models answer as before, so this is never undone.
    """
    as_before: Any = PreTrainedModel.device

    def device(model: PreTrainedModel) -> torch.device:
        tensors = chain(model.parameters(), model.buffers())
        here = (tensor.device for tensor in tensors if not tensor.is_meta)
        found: torch.device = next(here, None) or as_before.fget(model)
        are_away = (type(each) is not nn.Parameter for each in model.parameters())
        is_away = found == META and any(are_away)
        return torch.device("cpu") if is_away else found

    PreTrainedModel.device = property(device)  # type: ignore[assignment, method-assign]
