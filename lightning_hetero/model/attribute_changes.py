"""Attributes of layers that are away and that were changed here: written down, and set there."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from torch import nn
from transformers import PretrainedConfig

from ..errors import ModelError
from .attribute_state import Change
from .attributes import Value, read_value, write_value
from .blocks import MOST_CHARACTERS, NAMES_OF_TORCH
from .imports import Allowed, ImportPath


def write_change(change: Change, layer_name: str) -> tuple[str, list[str]]:
    """The attributes that have another value now, as text, and the names of those that are gone.

    Raises:
        ModelError: If a worker cannot or must not set one of them, with its name.
    """
    where = f"{layer_name}.{change.path}".rstrip(".")
    here, paths = vars(change.module), set[ImportPath]()
    for name in change.names:
        if reason := _reason_to_refuse(change.module, name):
            raise ModelError(
                f"The attribute {where}.{name} was changed while its layer is on a worker, which "
                f"must not set it: {reason}. Change it before `fit`, or keep the layer with the "
                "coordinator."
            )
    values = {name: here[name] for name in change.names if name in here}
    try:
        written = {
            n: write_value(v, f"The attribute {where}.{n}", paths) for n, v in values.items()
        }
    except (TypeError, ValueError) as error:  # a config with something that JSON does not have
        raise ModelError(
            f"The attributes {sorted(values)} of {where} were changed while its layer is on a "
            f"worker, and cannot be sent: {error}. Keep the layer with the coordinator."
        ) from error
    text = msgspec.json.encode(written).decode()
    if len(text) > MOST_CHARACTERS:
        raise ModelError(
            f"The attributes {sorted(values)} of {where} take {len(text)} characters, and a worker "
            f"takes {MOST_CHARACTERS}; register what is large as a buffer."
        )
    return text, [name for name in change.names if name not in here]


def set_attributes(module: nn.Module, text: str, gone: Collection[str], allowed: Allowed) -> None:
    """Put attributes that were written down into a module, and take away those that are gone.

    Raises:
        ModelError: If the text is none of `write_change`, or one must not be set here.
    """
    try:
        written = msgspec.json.decode(text, type=dict[str, Value])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(f"Changed attributes cannot be read: {error}.") from error
    for name in (*written, *gone):
        if reason := _reason_to_refuse(module, name):
            raise ModelError(
                f"The attribute {name!r} of a {type(module).__name__} is not set here: {reason}."
            )
    values = {name: read_value(value, allowed) for name, value in written.items()}
    own = vars(module)
    for name, value in values.items():
        if isinstance(value, PretrainedConfig) and isinstance(own.get(name), PretrainedConfig):
            # It is not written down, since it is the worker's own choice.
            value._experts_implementation = own[name]._experts_implementation
        own[name] = value
    for name in gone:
        own.pop(name, None)


def _reason_to_refuse(module: nn.Module, name: str) -> str:
    """Why an attribute must not be set from elsewhere; empty if it may."""
    if not name or "." in name or (name.startswith("__") and name.endswith("__")):
        return "it is no ordinary name"
    if name in NAMES_OF_TORCH:
        return f"nn.Module.{name} is torch's own"
    if any(name in kept for kept in (module._parameters, module._buffers, module._modules)):
        return "it is the name of a tensor or of a child"
    hidden = getattr(type(module), name, None)
    if callable(hidden) or hasattr(hidden, "__get__"):
        return f"it would hide a method or a property of {type(module).__name__}"
    return ""
