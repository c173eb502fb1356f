"""The layers of a stage: a worker builds them, and keeps tensors of its last run for the next one.

A worker keeps all tensors when a session ends. On the next `Deploy` it drops the tensors that the
new stage cannot use. For each remaining one the coordinator sends a fingerprint; the worker drops a
tensor whose fingerprint differs. So frozen weights are not sent again for a second run of a model,
and no weight is sent for a validation after a training.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..model.allowed_imports import Allowed
from ..model.four_bit import State
from ..model.recipe import Recipe, build_layers
from ..model.tensors import named_contents, named_tensors, set_tensor, stored_in_four_bits
from ..protocol import messages as m
from ..protocol.tensors import TensorSpec, dtype_name, tensor_bytes


def build_described(
    recipe: str, parameters: Sequence[m.ParameterSpec], allowed: Allowed
) -> nn.ModuleDict:
    """Build the layers of a recipe on ``meta``, with ``requires_grad`` as described.

    Raises:
        ModelError: If the layers cannot be built, or differ from the description.
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
    """Build the layers of a recipe on ``meta``, in the described dtypes, for made-up values."""
    layers = build_described(recipe, parameters, allowed)
    numbered = numbered_layers(layers)
    dtypes = {spec.name: spec.tensor.torch_dtype for spec in parameters}
    for name, tensor in list(named_tensors(numbered)):
        if tensor.dtype != dtypes[name] and not stored_in_four_bits(numbered, name):
            set_tensor(numbered, name, tensor.to(dtypes[name]))
    return layers


def describe_parameters(
    layers: Mapping[int, nn.Module], dtypes: Mapping[str, torch.dtype] | None = None
) -> list[m.ParameterSpec]:
    """Describe the tensors of layers for `build_described`; ``dtypes`` replace their own."""
    return [
        m.ParameterSpec(
            name,
            TensorSpec(dtype_name((dtypes or {}).get(name, tensor.dtype)), list(tensor.shape)),
            tensor.requires_grad,
        )
        for name, tensor in named_tensors(layers)
    ]


def numbered_layers(layers: nn.ModuleDict) -> dict[int, nn.Module]:
    """The layers by number."""
    return {int(number): layer for number, layer in layers.items()}


def _check_parameters(
    layers: Mapping[int, nn.Module], specs: Mapping[str, m.ParameterSpec]
) -> None:
    """Refuse layers that differ from the coordinator's, before any weight is sent."""
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


KEPT_SECONDS = 600.0
"""After so long without a session, a worker frees the tensors that it keeps."""


class Content(NamedTuple):
    """A tensor, with its state if it is stored in 4 bits."""

    tensor: Tensor
    state: State

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor and its state."""
        return self.tensor.nbytes + sum(part.nbytes for part in self.state.values())


class Shelf(Protocol):
    """Holds the tensors that one process leaves to the next one."""

    def take_all(self) -> dict[str, Content]:
        """Remove the tensors and return them, in memory of this process.

        It waits until the process that leaves them has ended.
        """

    def put(self, contents: dict[str, Content]) -> None:
        """Replace the tensors; the dictionary is empty afterwards."""

    def release(self) -> None:
        """Let the next process take the tensors."""


class KeptTensors:
    """Tensors of a worker's former layers, by name; no layer uses them any more.

    Args:
        shelf: Where a former process has left tensors, and this one leaves its own.
    """

    def __init__(self, shelf: Shelf | None = None) -> None:
        self._unread = self._shelf = shelf
        self._reading = threading.Lock()
        self._mine: dict[str, Content] = {}

    @property
    def _contents(self) -> dict[str, Content]:
        with self._reading:
            shelf, self._unread = self._unread, None
            if shelf is not None:
                self._mine = shelf.take_all()
            return self._mine

    def num_bytes_on(self, device_type: str) -> int:
        """Bytes that the tensors take in the memory of such devices."""
        contents = list(self._contents.values())
        return sum(c.num_bytes for c in contents if c.tensor.device.type == device_type)

    def leave_to_next(self) -> None:
        """Leave the tensors to the next process; this one has none afterwards."""
        if self._shelf is not None and self._unread is None:
            self._shelf.put(self._mine)
            self._shelf.release()

    def keep(self, layers: Mapping[int, nn.Module]) -> None:
        """Keep the tensors of layers that are no more in use, and drop those kept before."""
        self.forget()
        seen: set[int] = set()
        for name, tensor, state in named_contents(layers):
            # A shared tensor is kept once: the next layers may have two tensors of equal content.
            if not tensor.is_meta and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                self._contents[name] = Content(tensor.detach().as_subclass(Tensor), state)

    def restrict_to(self, specs: Sequence[m.ParameterSpec]) -> list[str]:
        """Drop tensors that cannot be one of these, and return the names of the others."""
        wanted = {spec.name: spec.tensor for spec in specs}
        contents = self._contents
        for name, content in list(contents.items()):
            if name not in wanted or TensorSpec.of(content.tensor) != wanted[name]:
                del contents[name]
        return list(contents)

    def take(self, name: str, fingerprint: bytes) -> Content | None:
        """Remove a tensor, and return it if it has this fingerprint."""
        content = self._contents.pop(name, None)
        if content is None or fingerprint_of(content) != fingerprint:
            return None
        return content

    def drop(self, name: str) -> None:
        """Drop one tensor."""
        self._contents.pop(name, None)

    def forget(self) -> None:
        """Drop all tensors, also those of a former process."""
        with self._reading:
            shelf, self._unread = self._unread, None
            if shelf is not None:
                shelf.put({})
            self._mine.clear()


def fingerprint_of(content: Content) -> bytes:
    """SHA-256 of the content, the dtype and the shape.

    Processors have instructions for SHA-256: it takes about an eighth of the time that a link of
    1 Gbit/s takes for the bytes.
    """
    found = hashlib.sha256()
    for name, tensor in {"": content.tensor, **content.state}.items():
        found.update(f"{name} {TensorSpec.of(tensor)}\n".encode())
        found.update(tensor_bytes(tensor))
    return found.digest()
