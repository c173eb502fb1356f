"""Finds the decoder layers of a LightningModule and checks that they can live apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from ..errors import ModelError

LayerChoice = str | list[str] | Callable[[nn.Module], Iterable[nn.Module]] | None


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer and its dotted name inside the LightningModule."""

    name: str
    module: nn.Module


def find_decoder_layers(root: nn.Module, choice: LayerChoice = None) -> list[DecoderLayer]:
    """The decoder layers in their order; none when ``choice`` is None and none are found.

    Raises:
        ModelError: If what the user named does not exist or is no layer.
    """
    if choice is None:
        return _layers_of_list(root, _find_layer_list(root))
    if callable(choice):
        return [DecoderLayer(_name_of(root, module), module) for module in choice(root)]
    names = [choice] if isinstance(choice, str) else choice
    return [layer for name in names for layer in _layers_named(root, name)]


def _layers_named(root: nn.Module, name: str) -> list[DecoderLayer]:
    try:
        found = root.get_submodule(name)
    except AttributeError as error:
        raise ModelError(f"There is no module {name!r} to take layers from: {error}.") from error
    if isinstance(found, nn.ModuleList):
        return _layers_of_list(root, name)
    return [DecoderLayer(name, found)]


def _layers_of_list(root: nn.Module, name: str | None) -> list[DecoderLayer]:
    if name is None:
        return []
    children = root.get_submodule(name).named_children()
    return [DecoderLayer(f"{name}.{key}", module) for key, module in children]


def _name_of(root: nn.Module, wanted: nn.Module) -> str:
    for name, module in root.named_modules():
        if module is wanted:
            return str(name)
    raise ModelError(
        f"The callable given as `layers` returned a {type(wanted).__name__} that is not part of "
        "the LightningModule."
    )


def _find_layer_list(root: nn.Module) -> str | None:
    """The shallowest list of ``num_hidden_layers`` layers of the class that a Hugging Face model
    declares as not to be split."""
    candidates = [
        f"{model_name}.{name}".strip(".")
        for model_name, model in root.named_modules()
        for name, module in model.named_modules()
        if _is_layer_list(model, module)
    ]
    return min(candidates, key=_depth, default=None)


def _depth(name: str) -> int:
    return name.count(".")


def _is_layer_list(model: nn.Module, module: nn.Module) -> bool:
    count = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    unsplit = getattr(model, "_no_split_modules", None) or ()
    return (
        isinstance(module, nn.ModuleList)
        and len(module) == count
        and all(type(layer).__name__ in unsplit for layer in module)
    )


def check_layers_stand_alone(root: nn.Module, stages: Sequence[Sequence[DecoderLayer]]) -> None:
    """Refuse parameters that a remote stage would share with another stage or with the rest.

    Raises:
        ModelError: With the names of the shared parameters.
    """
    owners: dict[int, set[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(name)
    for stage in stages:
        prefixes = tuple(f"{layer.name}." for layer in stage)
        for layer in stage:
            for name, parameter in layer.module.named_parameters(remove_duplicate=False):
                shared = owners[id(parameter)]
                if not all(owner.startswith(prefixes) for owner in shared):
                    raise ModelError(
                        f"The parameter {layer.name}.{name} is shared as {sorted(shared)}, and "
                        "these would live on different workers; put the layers that share it into "
                        "one stage, or keep them with the coordinator."
                    )
