"""Builds on a worker the layers that a coordinator describes.

What a worker still holds of its last run: tensors that need not be sent again.

A worker forgets nothing when a session ends. The next one's `Deploy` makes it drop every tensor
that it could not use, of each other one the coordinator tells the fingerprint, and what does not
have it is dropped too. So a second run of the same model gets no frozen weight again, a validation
after a training none at all, and layers that move leave those alone that stay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..model.allowed_imports import Allowed
from ..model.four_bit import State, is_four_bit
from ..model.recipe import Recipe, build_layers
from ..model.tensors import locate, named_contents, named_tensors, set_tensor
from ..protocol import messages as m
from ..protocol.tensors import TensorSpec, dtype_name, tensor_bytes


def build_described(
    recipe: str, parameters: Sequence[m.ParameterSpec], allowed: Allowed
) -> nn.ModuleDict:
    """The layers of a recipe on ``meta``, with what trains of them as described.

    Raises:
        ModelError: If they cannot be built, or differ from what is described.
    """
    layers = build_layers(Recipe.from_json(recipe), allowed)
    specs = {spec.name: spec for spec in parameters}
    numbered = numbered_layers(layers)
    _check_parameters(numbered, specs)
    for name, tensor in named_tensors(numbered):
        if isinstance(tensor, nn.Parameter):
            tensor.requires_grad_(specs[name].requires_grad)
    return layers


def build_for_values(
    recipe: str, parameters: Sequence[m.ParameterSpec], allowed: Allowed
) -> nn.ModuleDict:
    """The same with all tensors in the dtypes that are described, for values to be made up."""
    layers = build_described(recipe, parameters, allowed)
    numbered = numbered_layers(layers)
    dtypes = {spec.name: spec.tensor.torch_dtype for spec in parameters}
    for name, tensor in list(named_tensors(numbered)):
        owner, leaf, _ = locate(numbered, name)
        if tensor.dtype != dtypes[name] and not is_four_bit(owner, leaf):
            set_tensor(numbered, name, tensor.to(dtypes[name]))
    return layers


def describe_parameters(
    layers: Mapping[int, nn.Module], dtypes: Mapping[str, torch.dtype] | None = None
) -> list[m.ParameterSpec]:
    """The tensors of layers for `build_described`, in ``dtypes`` where these differ from here."""
    return [
        m.ParameterSpec(
            name,
            TensorSpec(dtype_name((dtypes or {}).get(name, tensor.dtype)), list(tensor.shape)),
            tensor.requires_grad,
        )
        for name, tensor in named_tensors(layers)
    ]


def numbered_layers(layers: nn.ModuleDict) -> dict[int, nn.Module]:
    """Layers by their numbers."""
    return {int(number): layer for number, layer in layers.items()}


def _check_parameters(
    layers: Mapping[int, nn.Module], specs: Mapping[str, m.ParameterSpec]
) -> None:
    """Refuse layers that are not those of the coordinator, before any weight comes."""
    built = {name: TensorSpec.of(tensor).shape for name, tensor in named_tensors(layers)}
    wanted = {name: spec.tensor.shape for name, spec in specs.items()}
    names = built.keys() | wanted.keys()
    differing = sorted(name for name in names if built.get(name) != wanted.get(name))
    if differing:
        raise ModelError(
            f"The layers built here differ from the coordinator's in {differing[:5]}; install the "
            "same transformers version on both, and see whether the model was changed after it "
            "was built."
        )


# A worker that nobody uses gives its memory back.
KEPT_SECONDS = 600.0


class Content(NamedTuple):
    """A tensor, and its state if it is stored in 4 bits."""

    tensor: Tensor
    state: State

    @property
    def num_bytes(self) -> int:
        """The bytes of all of it."""
        return self.tensor.nbytes + sum(part.nbytes for part in self.state.values())


class KeptTensors:
    """Tensors of the layers that a worker had, by their names; none is ever in use elsewhere."""

    def __init__(self) -> None:
        self._contents: dict[str, Content] = {}

    @property
    def num_bytes(self) -> int:
        """The memory that is held."""
        return sum(content.num_bytes for content in list(self._contents.values()))

    def keep(self, layers: Mapping[int, nn.Module]) -> None:
        """Hold the tensors of layers that nobody will use any more."""
        self.forget()
        seen: set[int] = set()
        for name, tensor, state in named_contents(layers):
            # Of one that occurs twice, one: the layers to come may have two that happen to agree.
            if not tensor.is_meta and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                self._contents[name] = Content(tensor.detach().as_subclass(Tensor), state)

    def restrict_to(self, specs: Sequence[m.ParameterSpec]) -> list[str]:
        """Drop what could not be one of these tensors; the names of those that are left."""
        wanted = {spec.name: spec.tensor for spec in specs}
        self._contents = {
            name: content
            for name, content in self._contents.items()
            if name in wanted and TensorSpec.of(content.tensor) == wanted[name]
        }
        return list(self._contents)

    def take(self, name: str, fingerprint: bytes) -> Content | None:
        """What is held under that name, if it has that fingerprint; it is not held any more."""
        content = self._contents.pop(name, None)
        if content is None or fingerprint_of(content) != fingerprint:
            return None
        return content

    def drop(self, name: str) -> None:
        """Free the memory of one tensor."""
        self._contents.pop(name, None)

    def forget(self) -> None:
        """Free the memory of all."""
        self._contents.clear()


def fingerprint_of(content: Content) -> bytes:
    """What tells this content, its dtype and its shape from any other.

    SHA-256, which processors have instructions for, takes about an eighth of the time in which
    1 Gbit/s carries the bytes.
    """
    found = hashlib.sha256()
    for name, tensor in {"": content.tensor, **content.state}.items():
        found.update(f"{name} {TensorSpec.of(tensor)}\n".encode())
        found.update(tensor_bytes(tensor))
    return found.digest()
