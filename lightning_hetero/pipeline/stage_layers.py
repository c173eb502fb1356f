"""The layers of a stage: described by the coordinator, and built on ``meta`` by a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..model.allowed_imports import Allowed
from ..model.custom_layers import BlocksRecipe
from ..model.recipe import Recipe, build_layers
from ..model.tensors import first_names, named_tensors, set_tensor, stored_in_four_bits
from ..protocol import messages as m
from ..protocol.tensor_bytes import DTYPES, TensorSpec, dtype_name

if TYPE_CHECKING:
    from ..protocol.frames import Content


def build_described(
    recipe: str, parameters: Sequence[m.ParameterSpec], allowed: Allowed, device: torch.device
) -> nn.ModuleDict:
    """Build the layers of a recipe on ``meta``, with ``requires_grad`` as described.

    Args:
        recipe: As text.
        parameters: Describe the layers' tensors.
        allowed: The allowed imports.
        device: Where the layers will compute.

    Raises:
        ModelError: If the layers cannot be built, or differ from the description.
    """
    layers = build_layers(Recipe.from_json(recipe), allowed, device)
    specs = {spec.name: spec for spec in parameters}
    numbered = numbered_layers(layers)
    _check_parameters(numbered, specs)
    for name, tensor in named_tensors(numbered):
        if isinstance(tensor, nn.Parameter):
            tensor.requires_grad_(specs[name].requires_grad)
    return layers


def build_for_values(
    recipe: str, parameters: Sequence[m.ParameterSpec], allowed: Allowed, device: torch.device
) -> nn.ModuleDict:
    """Build the layers of a recipe on ``meta``, in the described dtypes, for made-up values."""
    layers = build_described(recipe, parameters, allowed, device)
    numbered = numbered_layers(layers)
    dtypes = {spec.name: spec.tensor.torch_dtype for spec in parameters}
    for name, tensor in list(named_tensors(numbered)):
        if tensor.dtype != dtypes[name] and not stored_in_four_bits(numbered, name):
            set_tensor(numbered, name, tensor.to(dtypes[name]))
    return layers


def buffers_of(layers: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    """The buffers of layers with a value here, by name."""
    return {
        f"{number}.{name}": buffer
        for number, layer in layers.items()
        for name, buffer in layer.named_buffers(remove_duplicate=False)
        if not buffer.is_meta
    }


def preparation(
    recipe: Recipe | BlocksRecipe, layers: Mapping[int, nn.Module], buffers: Mapping[str, Tensor]
) -> Content:
    """The message for a worker to build layers with made-up weights, and these buffers."""
    message = m.PrepareLayers(recipe.to_json(), describe_parameters(layers), [*buffers])
    return message, [*buffers.values()]


def describe_parameters(
    layers: Mapping[int, nn.Module], dtypes: Mapping[str, torch.dtype] | None = None
) -> list[m.ParameterSpec]:
    """Describe the tensors of layers for `build_described`; ``dtypes`` replace their own.

    Raises:
        ModelError: If a worker cannot get one of them, because of its dtype.
    """
    for name, tensor in named_tensors(layers):
        if dtype_name(tensor.dtype) not in DTYPES:
            raise ModelError(
                f"The tensor {name} (the layer's number and the path in it) has the dtype "
                f"{dtype_name(tensor.dtype)}, which cannot be sent to a worker; convert it to one "
                f"of {', '.join(DTYPES)}, or keep the layer with the coordinator."
            )
    ties = _ties(layers)
    return [
        m.ParameterSpec(
            name,
            TensorSpec(dtype_name((dtypes or {}).get(name, tensor.dtype)), list(tensor.shape)),
            tensor.requires_grad,
            ties.get(name),
        )
        for name, tensor in named_tensors(layers)
    ]


def numbered_layers(layers: nn.ModuleDict) -> dict[int, nn.Module]:
    """The layers by number."""
    return {int(number): layer for number, layer in layers.items()}


def _check_parameters(
    layers: Mapping[int, nn.Module], specs: Mapping[str, m.ParameterSpec]
) -> None:
    """Refuse layers different from the coordinator's, before weights are sent."""
    built = {name: TensorSpec.of(tensor).shape for name, tensor in named_tensors(layers)}
    wanted = {name: spec.tensor.shape for name, spec in specs.items()}
    names = built.keys() | wanted.keys()
    differing = sorted(name for name in names if built.get(name) != wanted.get(name))
    if differing:
        raise ModelError(
            f"The layers built here differ from the coordinator's in {differing[:5]}. Install the "
            "same transformers version on both, and check whether the model was changed after it "
            "was built."
        )
    ties, wanted_ties = _ties(layers), {n: spec.same_as for n, spec in specs.items()}
    for name in specs:
        if ties.get(name) != wanted_ties[name]:
            raise ModelError(
                f"The parameters {name} and {ties.get(name) or wanted_ties[name]} are "
                f"{'two' if name in ties else 'one'} in the model, and would be "
                f"{'one' if name in ties else 'two'} on a worker, which builds the layers anew. "
                "Tie parameters in the code that builds them, or keep these layers with the "
                "coordinator."
            )


def _ties(layers: Mapping[int, nn.Module]) -> dict[str, str]:
    """The first name of each parameter with several names in these layers, by its other names."""
    first = first_names(layers)
    return {
        name: first[name]
        for name, tensor in named_tensors(layers)
        if first[name] != name and isinstance(tensor, nn.Parameter)
    }
