"""What the pipeline passes on, as messages with tensors, and back."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from ..errors import RemoteProtocolError
from ..model.calls import CacheUse, LayerCall
from ..pipeline.activation import Activation, Collected, Gradients
from ..pipeline.rule import Key
from ..pipeline.stage import Surroundings
from ..wire import messages as m
from ..wire.tensors import DTYPES, dtype_name
from ..wire.values import Packer, unpack

Content = tuple[m.Message, Sequence[Tensor]]


def say_arguments(
    step: int, key: Key, surroundings: Surroundings, layers: Container[int]
) -> Content:
    """What a stage with these layers runs them with.

    Raises:
        LocalProtocolError: If an argument cannot be sent.
    """
    packer = Packer()
    calls = [
        m.LayerArguments(
            call.layer_index,
            call.training,
            packer.pack(call.args, f"An argument of layer {call.layer_index}: args"),
            packer.pack(call.kwargs, f"An argument of layer {call.layer_index}: kwargs"),
            call.tuple_length,
            None if call.cache is None else _say_cache(call.cache, packer),
        )
        for call in surroundings.calls
        if call.layer_index in layers
    ]
    autocast = surroundings.autocast_dtype
    autocast_name = None if autocast is None else dtype_name(autocast)
    grad_enabled, collect = surroundings.grad_enabled, list(surroundings.collect)
    message = m.Arguments(step, *key, grad_enabled, autocast_name, collect, calls)
    return message, packer.tensors


def read_arguments(message: m.Arguments, tensors: tuple[Tensor, ...]) -> Surroundings:
    """What a stage runs its layers with.

    Raises:
        RemoteProtocolError: If the message names a tensor, a dtype or a kind of output that there
            is not, or a cache where gradients are wanted.
    """
    calls = [
        LayerCall(
            call.layer_index,
            call.training,
            unpack(call.args, tensors),
            unpack(call.kwargs, tensors),
            call.tuple_length,
            None if call.cache is None else _read_cache(call.cache, tensors),
        )
        for call in message.calls
    ]
    autocast = message.autocast_dtype
    if autocast is not None and autocast not in DTYPES:
        raise RemoteProtocolError(f"There is no autocast to {autocast!r}.")
    if len(set(message.collect)) < len(message.collect) or any(
        kind.startswith("_") for kind in message.collect
    ):
        raise RemoteProtocolError(f"The outputs {message.collect} cannot be collected.")
    dtype = None if autocast is None else DTYPES[autocast]
    surroundings = Surroundings(message.grad_enabled, dtype, calls, message.collect)
    if surroundings.has_cache and message.grad_enabled:
        raise RemoteProtocolError("A key-value cache carries no gradients.")
    return surroundings


def _say_cache(use: CacheUse, packer: Packer) -> m.CacheArgument:
    rows = packer.pack(use.rows, "The samples wanted of a key-value cache")
    return m.CacheArgument(use.number, use.place, use.length, use.window, rows)


def _read_cache(argument: m.CacheArgument, tensors: tuple[Tensor, ...]) -> CacheUse:
    rows = unpack(argument.rows, tensors)
    if not isinstance(rows, Tensor | None):
        raise RemoteProtocolError(f"The samples wanted of a key-value cache are {rows!r:.60}.")
    return CacheUse(argument.number, argument.place, argument.length, argument.window, rows)


def say_activation(step: int, key: Key, activation: Activation) -> Content:
    """An activation on its way downstream."""
    tensors = activation.tensors
    requires_grad = [torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors]
    kinds = [kind for kind, _ in activation.collected]
    return m.Activation(step, *key, requires_grad, kinds), tensors


def read_activation(message: m.Activation, tensors: tuple[Tensor, ...]) -> Activation:
    """An activation that came.

    Raises:
        RemoteProtocolError: If the message describes other tensors than came with it.
    """
    if not len(tensors) == len(message.requires_grad) == len(message.collected) + 1:
        raise RemoteProtocolError(f"{message} does not describe its {len(tensors)} tensors.")
    for tensor, requires_grad in zip(tensors, message.requires_grad, strict=True):
        tensor.requires_grad_(requires_grad and tensor.is_floating_point())
    hidden, *others = tensors
    collected = map(Collected, message.collected, others)
    return Activation(hidden, tuple(collected))


def say_gradients(step: int, key: Key, gradients: Gradients) -> Content:
    """The gradients of an activation on their way upstream."""
    present = [gradient for gradient in gradients if gradient is not None]
    return m.Gradient(step, *key, [gradient is not None for gradient in gradients]), present


def read_gradients(message: m.Gradient, tensors: tuple[Tensor, ...]) -> Gradients:
    """Gradients that came.

    Raises:
        RemoteProtocolError: If the message describes other tensors than came with it.
    """
    if len(tensors) != sum(message.is_present) or not message.is_present:
        raise RemoteProtocolError(f"{message} does not describe its {len(tensors)} tensors.")
    left = iter(tensors)
    return tuple(next(left) if is_present else None for is_present in message.is_present)
