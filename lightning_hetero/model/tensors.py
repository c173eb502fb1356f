"""Parameters and buffers of layers: naming them, emptying them to ``meta`` and filling them again.

A layer's tensors are named ``<layer number>.<name inside the layer>`` on every machine. What
belongs to a tensor stored in 4 bits has its name and one more part,
``3.mlp.up_proj.weight.absmax``.

Bytes of layers and of the rest of a model, whether their content is there or not.

Layers with values made up: as fast and as large as those with real weights.

State dicts: the keys of a module's own tensors in them, and what may be left out of them.

What does not train may be left out: the parameters without ``requires_grad``, with the states of
those in 4 bits. Buffers stay, those of frozen modules too: statistics change without a gradient.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils import swap_tensors

from ..errors import ModelError
from .four_bit import State, describe_parameter, is_four_bit, quantize, state_of, with_state
from .layers import DecoderLayer


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


def stored_bytes(layers: Mapping[int, nn.Module], dtype: torch.dtype | None = None) -> int:
    """Bytes of all parameters and buffers, on a stage that computes in ``dtype``."""
    dtypes = dtypes_on_stage(layers, dtype)
    found: dict[int, int] = {}
    for name, tensor in named_tensors(layers):
        owner, leaf, _ = locate(layers, name)
        if is_four_bit(owner, leaf):
            found[id(tensor)] = describe_parameter(owner, leaf).stored_bytes
        else:
            found[id(tensor)] = tensor.numel() * dtypes[name].itemsize
    return sum(found.values())


def num_trained(parameters: Iterable[nn.Parameter]) -> int:
    """How many numbers train."""
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of the gradients of what trains."""
    return sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)


def ends_of(root: nn.Module, layers: Sequence[DecoderLayer]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of the model before its layers, and those behind them; each once."""
    inside = {module for layer in layers for module in layer.module.modules()}
    before: dict[int, Tensor] = {}
    behind: dict[int, Tensor] = {}
    found = before
    for module in root.modules():
        if module in inside:
            found = behind
            continue
        own = [*module._parameters.values(), *module._buffers.values()]
        found.update({id(t): t for t in own if t is not None and id(t) not in before})
    return list(before.values()), list(behind.values())


def tied_parameters(root: nn.Module, layers: Sequence[DecoderLayer]) -> list[nn.Parameter]:
    """Parameters outside of the layers that several modules share."""
    inside = {id(p) for layer in layers for p in layer.module.parameters()}
    uses: dict[int, int] = {}
    found: dict[int, nn.Parameter] = {}
    for _, parameter in root.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
        found[id(parameter)] = parameter
    return [p for key, p in found.items() if uses[key] > 1 and key not in inside]


# As transformers starts its weights.
_SPREAD = 0.02


def fill_with_made_up_values(
    layers: Mapping[int, nn.Module],
    dtypes: Mapping[str, torch.dtype],
    given: Mapping[str, Tensor],
    device: torch.device,
) -> None:
    """Give layers on ``meta`` values on a device.

    Args:
        layers: The layers by their numbers.
        dtypes: The dtype of each tensor there, by its name.
        given: Tensors whose values matter, such as masks and tables in buffers.
        device: Where they are to be.
    """
    for name, tensor in list(named_tensors(layers)):
        owner, leaf, place = locate(layers, name)
        if not place.is_meta:
            continue  # a tensor that the layer has twice
        if name in given:
            fill(owner, leaf, given[name].to(device), {})
        elif is_four_bit(owner, leaf):
            shape = torch.Size(describe_parameter(owner, leaf).shape)
            plain = _made_up(leaf, shape, _unpacked_dtype(layers), device)
            fill(owner, leaf, *quantize(owner, leaf, plain))
        else:
            fill(owner, leaf, _made_up(leaf, tensor.shape, dtypes[name], device), {})


def _unpacked_dtype(layers: Mapping[int, nn.Module]) -> torch.dtype:
    """What 4-bit weights were before: the norms beside them still are."""
    for layer in layers.values():
        for parameter in layer.parameters():
            if not parameter.requires_grad and parameter.is_floating_point():
                return parameter.dtype
    return torch.float32


def _made_up(leaf: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Matrices like those of a new model; vectors are factors of a norm, or else biases."""
    content = torch.empty(shape, dtype=dtype, device=device)
    if not dtype.is_floating_point:
        return content.zero_()
    if content.ndim > 1:
        return content.normal_(0.0, _SPREAD)
    return content.zero_() if "bias" in leaf else content.fill_(1.0)


def places(module: nn.Module) -> dict[str, str]:
    """A module's own parameters and buffers, each with the key that it has in a state dict.

    Only those of 4-bit experts have another: the parametrization in between is left out there.
    """
    if _is_left_out_between(module):
        return {}
    own = {**module._parameters, **module._buffers}
    found = {leaf: leaf for leaf, tensor in own.items() if tensor is not None}
    for name, between in getattr(module, "parametrizations", {}).items():
        if _is_left_out_between(between):
            found[f"parametrizations.{name}.original"] = name
    return found


def tensor_at(module: nn.Module, path: str) -> Tensor:
    """The parameter or buffer at a path below a module."""
    owner, _, leaf = path.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(owner), leaf)
    return tensor


def tensors_by_key(root: nn.Module, prefix: str = "") -> dict[str, tuple[str, Tensor]]:
    """All tensors below a module by their keys, each with its path; a shared one comes often."""
    found = {}
    for path, module in root.named_modules(remove_duplicate=False):
        start = f"{path}." if path else ""
        for leaf, key in places(module).items():
            found[f"{prefix}{start}{key}"] = (start + leaf, tensor_at(module, leaf))
    return found


def is_frozen(tensor: Tensor | None) -> bool:
    """Whether a tensor is a parameter that does not train."""
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def keys_of(tensors: set[Tensor], root: nn.Module, prefix: str = "") -> set[str]:
    """The keys under which a root's state dict has some of its tensors."""
    return {key for key, (_, tensor) in tensors_by_key(root, prefix).items() if tensor in tensors}


def leave_out(state: MutableMapping[str, Any], keys: Container[str], prefix: str = "") -> None:
    """Take tensors out of a state dict, and what belongs to them; all begin with ``prefix``."""
    candidates = [key for key in state if key.startswith(prefix)]
    for key in candidates:
        if any(start in keys for start in _starts(key)):
            del state[key]


def left_out_of(state: Mapping[str, Any], root: nn.Module) -> dict[str, Tensor]:
    """What a root's state dict lacks of that which may be left out of it, by key."""
    found = tensors_by_key(root).items()
    return {key: t for key, (_, t) in found if key not in state and is_frozen(t)}


def _starts(key: str) -> Iterator[str]:
    """A key, and everything that it may be a part of: ``a.b.c``, ``a.b``, ``a``."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def _is_left_out_between(module: nn.Module) -> bool:
    return isinstance(module, ParametrizationList) and is_four_bit(module, "original")
