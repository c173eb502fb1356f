"""A module's plain attributes as data: written down here, made anew on a worker."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, Union

import msgspec
import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..errors import ModelError
from .configs import plain_config, read_config
from .imports import Allowed, ImportPath, find_class, path_of

# Deeper than any setting, and far from Python's own limit.
MOST_DEPTH = 32

_CONTAINERS: dict[type, Any] = {
    kind: kind.__name__ for kind in (list, tuple, set, frozenset, torch.Size)
}
_MAKERS: dict[str, Callable[[Any], Any]] = {name: kind for kind, name in _CONTAINERS.items()}
_SCALARS = (type(None), bool, int, str)


class Items(msgspec.Struct, frozen=True, tag="items"):
    """A list, a tuple or a set."""

    container: Literal["list", "tuple", "set", "frozenset", "Size"]
    items: list[Value]


class Table(msgspec.Struct, frozen=True, tag="table"):
    """A dictionary, in its order."""

    items: list[tuple[Value, Value]]


class Text(msgspec.Struct, frozen=True, tag="text"):
    """A value by its text: a dtype, or a float that JSON does not have."""

    kind: Literal["dtype", "float"]
    text: str


class Function(msgspec.Struct, frozen=True, tag="function"):
    """A function by its name."""

    path: ImportPath


class Member(msgspec.Struct, frozen=True, tag="member"):
    """A member of an enumeration."""

    path: ImportPath
    name: str


class Record(msgspec.Struct, frozen=True, tag="record"):
    """An instance of a dataclass."""

    path: ImportPath
    fields: dict[str, Value]


class Config(msgspec.Struct, frozen=True, tag="config"):
    """A Hugging Face config."""

    path: ImportPath
    content: dict[str, Any]
    attention: str


Value = Union[  # noqa: UP007 - the names are known only later
    None, bool, int, float, str, Items, Table, Text, Function, Member, Record, Config
]


def write_value(value: Any, where: str, paths: set[ImportPath], depth: int = 0) -> Value:
    """The value as data; what it needs to have imported is added to ``paths``.

    Raises:
        ModelError: If a worker could not make it anew, with the place given by ``where``.
    """

    def write(item: Any) -> Value:
        return write_value(item, where, paths, depth + 1)

    if depth > MOST_DEPTH:
        raise _refusal(where, "is nested without an end", "keep plain values in it")
    if type(value) in _SCALARS and not _is_too_large(value):
        plain: Value = value
        return plain
    if type(value) is float:
        return value if abs(value) < float("inf") else Text("float", str(value))
    if type(value) is torch.dtype:
        return Text("dtype", dtype_name(value))
    if type(value) in _CONTAINERS:
        return Items(_CONTAINERS[type(value)], [write(item) for item in value])
    if type(value) is dict:
        return Table([(write(key), write(item)) for key, item in value.items()])
    return _write_named(value, where, paths, write)


def _write_named(
    value: Any, where: str, paths: set[ImportPath], write: Callable[[Any], Value]
) -> Value:
    """What is known by the name of its function or of its class."""

    def path_to(thing: Any, what: str) -> ImportPath:
        try:
            path = path_of(thing, what)
        except ModelError as error:
            raise ModelError(f"{where} cannot be rebuilt on a worker. {error}") from error
        paths.add(path)
        return path

    if inspect.isfunction(value) or inspect.isbuiltin(value):
        return Function(path_to(value, "function"))
    if isinstance(value, Enum):
        return Member(path_to(type(value), "enumeration"), value.name)
    if isinstance(value, PretrainedConfig):
        attention = value._attn_implementation or "eager"
        return Config(path_to(type(value), "config class"), plain_config(value), attention)
    if _is_record(value):
        names = [field.name for field in dataclasses.fields(value)]
        content = {name: write(getattr(value, name)) for name in names}
        return Record(path_to(type(value), "dataclass"), content)
    raise _refusal(where, *_cause_and_remedy(value))


def _is_record(value: Any) -> bool:
    """Whether a value is an instance of a dataclass and has nothing but its fields."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return False
    return getattr(value, "__dict__", {}).keys() <= {f.name for f in dataclasses.fields(value)}


def _is_too_large(value: Any) -> bool:
    return type(value) is int and not -(2**63) <= value < 2**64


def _cause_and_remedy(value: Any) -> tuple[str, str]:
    if isinstance(value, Tensor):
        return f"is a {type(value).__name__}", "register it as a buffer (`register_buffer`)"
    if isinstance(value, nn.Module):
        return (
            f"refers to a {type(value).__name__}",
            "make the module a child (assign it, or use nn.ModuleList or nn.ModuleDict)",
        )
    if isinstance(value, torch.device):
        return "is a device, and a worker has its own", "use that of the hidden states"
    return (
        f"is a {type(value).__name__}",
        "keep plain numbers, strings, lists, dataclasses and named functions in it",
    )


def _refusal(where: str, cause: str, remedy: str) -> ModelError:
    return ModelError(
        f"{where} {cause}, which cannot be rebuilt on a worker; {remedy}, or keep the layer with "
        "the coordinator."
    )


def read_value(value: Value, allowed: Allowed, depth: int = 0) -> Any:
    """The value that was written down.

    Raises:
        ModelError: If it is not one that `write_value` writes, or may not be made here.
    """

    def read(item: Value) -> Any:
        return read_value(item, allowed, depth + 1)

    if depth > MOST_DEPTH:
        raise ModelError(f"The recipe has a value that is nested deeper than {MOST_DEPTH}.")
    match value:
        case Items(container, items):
            return _hashed(_MAKERS[container], [read(item) for item in items])
        case Table(items):
            return _hashed(dict, [(read(key), read(item)) for key, item in items])
        case Text(kind, text):
            return dtype_named(text) if kind == "dtype" else _special_float(text)
        case Function(path):
            return _function(path, allowed)
        case Member(path, name):
            return _member(find_class(allowed, path, Enum, "enumeration"), name)
        case Record(path, fields):
            made = {name: read(item) for name, item in fields.items()}
            return _record(find_class(allowed, path, object, "dataclass"), made)
        case Config(path, content, attention):
            return read_config(_config_class(path, allowed), content, attention)
        case _:
            return value


def dtype_name(dtype: torch.dtype) -> str:
    """The name by which `dtype_named` finds it."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name.

    Raises:
        ModelError: If torch has none.
    """
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"torch {torch.__version__} on this worker has no dtype {name!r}.")
    return found


def _hashed(make: Callable[[Any], Any], items: list[Any]) -> Any:
    try:
        return make(items)
    except TypeError as error:
        raise ModelError(f"The recipe has a value that cannot be made: {error}.") from error


def _special_float(text: str) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise ModelError(f"The recipe has a number {text!r}.")
    return float(text)


def _function(path: ImportPath, allowed: Allowed) -> Any:
    found = allowed.find(path, "function")
    if not isinstance(found, (types.FunctionType, types.BuiltinFunctionType)):
        raise ModelError(f"{path} is not a function.")
    return found


def _member(enumeration: Any, name: str) -> Any:
    members = enumeration.__members__
    if name not in members:
        raise ModelError(f"{enumeration.__name__} on this worker has no member {name!r}.")
    return members[name]


def _record(dataclass: Any, content: dict[str, Any]) -> Any:
    names = {field.name for field in _fields(dataclass)}
    if names != content.keys():
        raise ModelError(
            f"{dataclass.__name__} on this worker has the fields {sorted(names)} and the "
            f"coordinator's has {sorted(content)}; install the coordinator's version here."
        )
    made = object.__new__(dataclass)
    for name, item in content.items():
        object.__setattr__(made, name, item)
    return made


def _config_class(path: ImportPath, allowed: Allowed) -> Any:
    """One of transformers, or one that is allowed."""
    known = getattr(transformers, path.qualname, None)
    if (
        isinstance(known, type)
        and issubclass(known, PretrainedConfig)
        and known.__module__ == path.module
    ):
        return known
    return find_class(allowed, path, PretrainedConfig, "config class")


def _fields(found: Any) -> tuple[dataclasses.Field[Any], ...]:
    if not dataclasses.is_dataclass(found):
        raise ModelError(f"{found.__name__} is not a dataclass.")
    return dataclasses.fields(found)
