"""Parameters and buffers of layers: naming them, emptying them to ``meta`` and filling them again.

A layer's tensors are named ``<layer number>.<name inside the layer>`` on every machine. What
belongs to a tensor stored in 4 bits has its name and one more part,
``3.mlp.up_proj.weight.absmax``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from ..errors import ModelError
from .four_bit import is_four_bit, state_of, with_state
from .packed import State


def named_tensors(layers: Mapping[int, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers, of numbered layers; a tensor that occurs twice comes twice."""
    for number, layer in layers.items():
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            yield f"{number}.{name}", parameter
        for name, buffer in layer.named_buffers(remove_duplicate=False):
            yield f"{number}.{name}", buffer


def named_contents(layers: Mapping[int, nn.Module]) -> Iterator[tuple[str, Tensor, State]]:
    """The same tensors, each with its state if it is stored in 4 bits."""
    for name, tensor in named_tensors(layers):
        owner, leaf, _ = locate(layers, name)
        yield name, tensor, state_of(owner, leaf)


def stored_in_four_bits(layers: Mapping[int, nn.Module], name: str) -> bool:
    """Whether a tensor is one of packed bytes, which need their state."""
    owner, leaf, _ = locate(layers, name)
    return is_four_bit(owner, leaf)


def has_four_bit(layers: Mapping[int, nn.Module]) -> bool:
    """Whether a tensor of the layers is one of packed bytes."""
    return any(stored_in_four_bits(layers, name) for name, _ in named_tensors(layers))


def dtypes_on_stage(
    layers: Mapping[int, nn.Module], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """The dtype of each tensor on a stage that computes in ``dtype``.

    Frozen parameters take it. Those that train are only ever widened, and buffers and what is
    stored in 4 bits stay as they are.
    """
    dtypes = {name: tensor.dtype for name, tensor in named_tensors(layers)}
    if dtype is None:
        return dtypes
    for name, tensor in named_tensors(layers):
        is_plain = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        is_taken = not tensor.requires_grad or dtype == torch.float32
        if is_plain and is_taken and not stored_in_four_bits(layers, name):
            dtypes[name] = dtype
    return dtypes


def narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another dtype; what is beyond its range becomes its largest number.

    A mask's least number of float32 would become minus infinity in float16, and a row of nothing
    else not a number.
    """
    if tensor.dtype == dtype or not tensor.is_floating_point():
        return tensor
    limits = torch.finfo(dtype)
    if limits.max < torch.finfo(tensor.dtype).max:
        tensor = tensor.clamp(limits.min, limits.max)
    return tensor.to(dtype)


def flatten(name: str, tensor: Tensor, state: State) -> dict[str, Tensor]:
    """A tensor and its state by their names."""
    return {name: tensor, **{f"{name}.{part}": content for part, content in state.items()}}


def state_in(tensors: Mapping[str, Tensor], name: str) -> State:
    """The state of a tensor among flattened ones."""
    prefix = f"{name}."
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def set_tensor(
    layers: Mapping[int, nn.Module], name: str, content: Tensor, state: State | None = None
) -> None:
    """Give a named parameter or buffer this content, with its identity and its flags kept.

    An optimizer, a tied module or a user's list that holds the parameter sees the new content.
    ``state`` belongs to a tensor stored in 4 bits.

    Raises:
        ModelError: If there is no such tensor, or its shape differs.
    """
    owner, leaf, old = locate(layers, name)
    if old.shape != content.shape:
        raise ModelError(
            f"The tensor {name!r} should have the shape {tuple(old.shape)} and has "
            f"{tuple(content.shape)}."
        )
    fill(owner, leaf, content, state or {})


def fill(owner: nn.Module, leaf: str, content: Tensor, state: State) -> None:
    """The same for a module's own parameter or buffer."""
    old = owner._parameters.get(leaf)
    if old is None:
        owner._buffers[leaf] = content
    elif is_four_bit(owner, leaf):
        swap_tensors(old, with_state(owner, leaf, content, state))
    else:
        swap_tensors(old, nn.Parameter(content, requires_grad=old.requires_grad))


def locate(layers: Mapping[int, nn.Module], name: str) -> tuple[nn.Module, str, Tensor]:
    """The module that owns a named tensor, the tensor's own name there, and the tensor."""
    number, _, inner = name.partition(".")
    path, _, leaf = inner.rpartition(".")
    try:
        owner = layers[int(number)].get_submodule(path)
    except (KeyError, ValueError, AttributeError):
        raise ModelError(f"The stage has no tensor {name!r}.") from None
    found = owner._parameters.get(leaf, owner._buffers.get(leaf))
    if found is None:
        raise ModelError(f"The stage has no tensor {name!r}.")
    return owner, leaf, found


def empty_tensors(layers: Mapping[int, nn.Module]) -> None:
    """Free the memory of all parameters and buffers: they become ``meta`` tensors.

    Raises:
        ModelError: If that is not possible; nothing is lost then.
    """
    check_can_be_emptied(layers)
    tensors = list(named_tensors(layers))
    for name, tensor in tensors:
        if not tensor.is_meta:
            set_tensor(layers, name, torch.empty_like(tensor, device="meta"))


def check_can_be_emptied(layers: Mapping[int, nn.Module]) -> None:
    """Refuse parameters that something else holds.

    Raises:
        ModelError: With the name of one.
    """
    for name, tensor in list(named_tensors(layers)):
        _check_can_be_swapped(layers, name, tensor)


def _check_can_be_swapped(layers: Mapping[int, nn.Module], name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, nn.Parameter) or tensor.is_meta:
        return
    owner, leaf, _ = locate(layers, name)
    try:
        set_tensor(layers, name, tensor.detach(), state_of(owner, leaf))
    except RuntimeError as error:
        raise ModelError(
            f"The parameter {name} is still held by an autograd graph or a weak reference, so it "
            "cannot move to a worker; delete old losses and outputs of the model first."
        ) from error
