"""Plain attributes of modules as data, and back.

    Value                      the possible values of an attribute, as data
    write_value, read_value    an attribute as data, and back
    Written, Found             the values written or read before: one object stays one

Functions and classes travel by name. A function made inside another one travels as the way to its
code from an importable function, with the variables in use: a worker takes the code from its own
files. An object travels as the name of its class, with its attributes; see `plain_objects`. A
module inside the one with the attribute travels as its path there.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Literal, TypeAlias, TypeGuard, Union

import msgspec
import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PretrainedConfig

from ..errors import ModelError
from .allowed_imports import (
    LOCALS,
    Allowed,
    ImportPath,
    find_class,
    find_function,
    path_of,
)
from .hf_config import plain_config, read_config
from .plain_objects import (
    content_of,
    hidden_by,
    is_object,
    is_value,
    made_of,
    reason_to_refuse,
    values_in,
)

# Deeper than any real setting, and far below Python's recursion limit.
MOST_DEPTH = 32
# So many parts of the path of a value that refers to what it is in.
_MOST_SHOWN = 8
# The most text that a message may carry.
MOST_CHARACTERS = 2**20

# The attributes of each module that are torch's own. `nn.Module.compile` sets the last one.
BOOKKEEPING = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
# An attribute of one of these names would hide a method or attribute of torch.
NAMES_OF_TORCH = frozenset(dir(nn.Module)) | BOOKKEEPING
# Set by gradient checkpointing of transformers; a stage recomputes on its own instead.
CHECKPOINTING = frozenset({"gradient_checkpointing", "_gradient_checkpointing_func"})

_CONTAINERS: dict[Any, Any] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, torch.Size)
}
META = torch.device("meta")
_CPU = torch.device("cpu")
_SCALARS = (type(None), bool, int, str)


class Items(msgspec.Struct, frozen=True, tag="items"):
    """A list, a tuple or a set."""

    container: Literal["list", "tuple", "set", "frozenset", "Size"]
    items: list[Value]


class DictionaryTable(msgspec.Struct, frozen=True, tag="table"):
    """A dictionary, in its order."""

    items: list[tuple[Value, Value]]


class Text(msgspec.Struct, frozen=True, tag="text"):
    """A dtype, a float that JSON lacks, or a complex number, as text."""

    kind: Literal["dtype", "float", "complex"]
    text: str


class DeviceKind(msgspec.Struct, frozen=True, tag="device"):
    """A device: the one of the layer, or else main memory or ``meta``."""

    kind: Literal["layer", "cpu", "meta"]


class Function(msgspec.Struct, frozen=True, tag="function"):
    """A function by its name."""

    path: ImportPath


class EnumMember(msgspec.Struct, frozen=True, tag="member"):
    """A member of an enumeration."""

    path: ImportPath
    name: str


class ObjectRecord(msgspec.Struct, frozen=True, tag="record"):
    """An object by its attributes: the fields, if its class is a dataclass, and the others."""

    path: ImportPath
    fields: dict[str, Value] = {}
    others: dict[str, Value] = {}


class Class(msgspec.Struct, frozen=True, tag="class"):
    """A class by its name."""

    path: ImportPath


class ModulePart(msgspec.Struct, frozen=True, tag="part"):
    """The module with the attribute, or a module inside it, by its path there."""

    path: str


class Loose(msgspec.Struct, frozen=True, tag="loose"):
    """A module of torch without parent, parameters, buffers and children, such as a dropout in a
    plain list."""

    path: ImportPath
    attributes: dict[str, Value]
    training: bool


class Method(msgspec.Struct, frozen=True, tag="method"):
    """A method of a `ModulePart`."""

    part: ModulePart
    name: str


class Partial(msgspec.Struct, frozen=True, tag="partial"):
    """A `functools.partial`."""

    function: Value
    args: list[Value]
    kwargs: dict[str, Value]


class Closure(msgspec.Struct, frozen=True, tag="closure"):
    """A function made inside another one, with the variables around it.

    Args:
        path: The outermost function: it can be imported.
        inner: The way to the code from there: names of functions, each with its number among the
            functions of this name.
        variables: Its variables from functions around it, by name.
        defaults: The defaults of its positional arguments.
        named_defaults: The defaults of its other arguments.
    """

    path: ImportPath
    inner: list[tuple[str, int]]
    variables: dict[str, Value] = {}
    defaults: list[Value] = []
    named_defaults: dict[str, Value] = {}


class Config(msgspec.Struct, frozen=True, tag="config"):
    """A Hugging Face config."""

    path: ImportPath
    content: dict[str, Any]
    attention: str


class Again(msgspec.Struct, frozen=True, tag="again"):
    """The very object read before, by its number among the objects for later reference."""

    number: int


# The attributes that torch keeps in every module.
_OF_MODULES = frozenset(vars(nn.Module()))

Value = Union[  # noqa: UP007 - the names are known only later
    None,
    bool,
    int,
    float,
    str,
    Items,
    DictionaryTable,
    Text,
    DeviceKind,
    Function,
    EnumMember,
    ObjectRecord,
    Class,
    ModulePart,
    Loose,
    Method,
    Partial,
    Closure,
    Config,
    Again,
]

# Of these a second one would be another object: a change of one would not be a change of the other.
_MEANT_AGAIN = (Items, DictionaryTable, ObjectRecord, Loose, Config)

# Writes a part of a value; the second argument names it, unless it is named as the value.
_Write: TypeAlias = Callable[..., Value]
Written: TypeAlias = dict[int, tuple[int, Any]]
"""The numbers of values that were written, by their ids, with the values, which keep their ids."""


@dataclass
class Found:
    """The values read so far.

    Attributes:
        again: The objects for later reference, with the number of values in each.
        num_values: How many values were read, each as often as something refers to it.
    """

    again: list[tuple[Any, int]] = field(default_factory=list)
    num_values: int = 0

    def count(self, number: int = 1) -> None:
        """Count values.

        Raises:
            ModelError: If they are too many. A few values with references to each other could
                unfold into more than memory holds.
        """
        self.num_values += number
        if self.num_values > MOST_CHARACTERS:
            raise ModelError(f"The recipe has more than {MOST_CHARACTERS} values.")

    def take(self, again: Again) -> Any:
        """The object read before.

        Raises:
            ModelError: If it was not read before.
        """
        if not 0 <= again.number < len(self.again):
            raise ModelError(
                f"The recipe refers to value {again.number}, and has {len(self.again)} before it."
            )
        value, number = self.again[again.number]
        self.count(number)
        return value


def write_value(
    value: Any,
    where: str,
    paths: set[ImportPath],
    owner: nn.Module | None = None,
    depth: int = 0,
    written: Written | None = None,
) -> Value:
    """Encode an attribute's value.

    Args:
        value: The value.
        where: The attribute in words, for errors.
        paths: Receives the import paths of the functions and classes in the value.
        owner: The module with the attribute. The value may refer to it and to its content.
        depth: How deep the value is nested.
        written: The values written before, to be read before; it grows.

    Raises:
        ModelError: If a worker could not rebuild the value.
    """
    written = {} if written is None else written
    if id(value) in written:
        return Again(written[id(value)][0])
    if depth > MOST_DEPTH:
        start = ".".join(where.split(".")[:_MOST_SHOWN])
        cause = f"is nested deeper than {MOST_DEPTH}, or refers to what it is in"
        raise _refusal(f"{start}…", cause, "keep plain values in it")

    def write(item: Any, where: str = where) -> Value:
        return write_value(item, where, paths, owner, depth + 1, written)

    found = _write_new(value, where, paths, owner, write)
    if isinstance(found, _MEANT_AGAIN):
        written[id(value)] = len(written), value
    return found


def _write_new(
    value: Any, where: str, paths: set[ImportPath], owner: nn.Module | None, write: _Write
) -> Value:
    kind: Any = type(value)
    if kind in _SCALARS and not _is_too_large(value):
        plain: Value = value
        return plain
    if kind is float:
        return value if math.isfinite(value) else Text("float", str(value))
    if kind is complex:
        return Text("complex", str(value))
    if kind is torch.dtype:
        return Text("dtype", dtype_name(value))
    if kind is torch.device:
        return _write_device(value, where, owner)
    if kind in (set, frozenset, dict):
        _check_keys(value, where)
    if kind in _CONTAINERS.values():
        return Items(kind.__name__, [write(item) for item in value])
    if kind is dict:
        return DictionaryTable([(write(key), write(item)) for key, item in value.items()])
    if inspect.isfunction(value) and LOCALS in value.__qualname__:
        return _write_closure(value, where, paths, write)
    if inspect.isfunction(value) or inspect.isbuiltin(value):
        return Function(noted_path(value, "function", where, paths))
    if isinstance(value, type):
        return Class(noted_path(value, "class", where, paths))
    if kind is functools.partial:
        named = {name: write(item) for name, item in value.keywords.items()}
        return Partial(write(value.func), [write(item) for item in value.args], named)
    if isinstance(value, nn.Module) or inspect.ismethod(value):
        is_child = owner is not None and value in set(owner.modules())
        if is_loose(value) and not is_child:
            return _write_loose(value, noted_path(kind, "layer class", where, paths), write)
        return _write_part(value, where, owner)
    if isinstance(value, Enum):
        return EnumMember(noted_path(kind, "enumeration", where, paths), value.name)
    if isinstance(value, PretrainedConfig):
        path = noted_path(kind, "config class", where, paths)
        return Config(path, plain_config(value), value._attn_implementation or "eager")
    if is_object(value):
        return _write_object(value, where, paths, write)
    raise _refusal(where, *_cause_and_remedy(value))


def _write_object(value: Any, where: str, paths: set[ImportPath], write: _Write) -> ObjectRecord:
    """Encode an object by its attributes."""
    kind = type(value)
    content = content_of(value)
    for name in content[1]:
        if reason := hidden_by(kind, name):
            raise _refusal(f"{where}.{name}", f"{reason} {kind.__name__}", "rename it")
    fields, others = (
        {n: write(item, f"{where}.{n}") for n, item in part.items()} for part in content
    )
    return ObjectRecord(noted_path(kind, "class", where, paths), fields, others)


def _write_device(device: torch.device, where: str, owner: nn.Module | None) -> DeviceKind:
    """Encode a device: the device of the module's tensors means the layer's device on a worker.

    A module without tensors in memory does not say where it was; a worker's device is as good.
    """
    tensors = () if owner is None else (*owner.parameters(), *owner.buffers())
    places = {_without_number(tensor.device) for tensor in tensors} - {META}
    place = _without_number(device)
    if place == META:
        return DeviceKind("meta")
    if not places or place in places:
        return DeviceKind("layer")
    if place == _CPU:
        return DeviceKind("cpu")
    raise _refusal(
        where,
        f"is the device {str(device)!r}, and the module's tensors are on {min(map(str, places))!r}",
        "use the device of the hidden states",
    )


def _without_number(device: torch.device) -> torch.device:
    return torch.device(device.type)


def _check_keys(container: Iterable[Any], where: str) -> None:
    """Refuse objects as keys: rebuilt, each would be another key."""
    for key in container:
        for each in values_in(key):
            if is_object(each) and not is_value(type(each)):
                raise _refusal(
                    where,
                    f"has a {type(each).__name__} as a key or in a set",
                    "use plain values as keys",
                )


def noted_path(thing: Any, what: str, where: str, paths: set[ImportPath]) -> ImportPath:
    """The import path of a function or class, also added to ``paths``."""
    try:
        path = path_of(thing, what)
    except ModelError as error:
        raise ModelError(f"{where} cannot be rebuilt on a worker. {error}") from error
    paths.add(path)
    return path


def is_loose(value: Any) -> TypeGuard[nn.Module]:
    """Whether a value is a module of torch, and a worker can make it without its parent.

    Modules with random draws (an active dropout, RReLU) do not count: without a parent, they would
    not follow training and evaluation.
    """
    if not isinstance(value, nn.Module) or not type(value).__module__.startswith("torch.nn."):
        return False
    draws = isinstance(value, nn.RReLU) or (isinstance(value, _DropoutNd) and value.p != 0)
    content = (*value._parameters.values(), *value._buffers.values(), *value._modules.values())
    hooks = value._forward_hooks or value._forward_pre_hooks or value._backward_hooks
    return not draws and not hooks and all(each is None for each in content)


def _write_loose(module: nn.Module, path: ImportPath, write: _Write) -> Loose:
    """Encode a module of torch without parent."""
    own = {name: write(item) for name, item in vars(module).items() if name not in _OF_MODULES}
    return Loose(path, own, module.training)


def _write_part(value: Any, where: str, owner: nn.Module | None) -> Value:
    """Encode a module inside the one with the attribute, or a method of such a module."""
    module = getattr(value, "__self__", None) if inspect.ismethod(value) else value
    inside = {} if owner is None else {part: path for path, part in owner.named_modules()}
    if not isinstance(module, nn.Module):
        raise _refusal(
            where,
            f"is a method of a {type(module).__name__}",
            "use a method of the module itself, or a function at the top level of a module",
        )
    if module not in inside:
        raise _refusal(where, *_cause_and_remedy(module))
    if not inspect.ismethod(value):
        return ModulePart(inside[module])
    if getattr(type(module), value.__name__, None) is not value.__func__:
        raise _refusal(
            where,
            f"is a method that the class {type(module).__name__} does not have",
            "use a method of the class",
        )
    return Method(ModulePart(inside[module]), value.__name__)


def _write_closure(
    value: FunctionType, where: str, paths: set[ImportPath], write: _Write
) -> Closure:
    """Encode a function made inside another one."""
    outer_name, *_ = value.__qualname__.split(LOCALS)
    found: Any = inspect.getmodule(value)
    for name in outer_name.split("."):
        found = inspect.getattr_static(found, name, None)
    outer = getattr(found, "__func__", found)
    outer = inspect.unwrap(outer) if callable(outer) else None
    inner = list(_way_to(value.__code__, outer.__code__)) if inspect.isfunction(outer) else []
    if not inner:
        raise _refusal(
            where,
            f"is the function {value.__qualname__}, whose code cannot be found from the top level "
            "of its module",
            "move it to the top level of a module, or make it a method of the layer",
        )
    path = noted_path(outer, "function", where, paths)
    try:
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
    except ValueError as error:
        raise _refusal(
            where,
            f"is the function {value.__qualname__}, which uses a variable without a value",
            "give the variable a value",
        ) from error
    variables = dict(zip(value.__code__.co_freevars, map(write, cells), strict=True))
    defaults = [*map(write, value.__defaults__ or ())]
    named = {name: write(item) for name, item in (value.__kwdefaults__ or {}).items()}
    return Closure(path, inner, variables, defaults, named)


def _way_to(wanted: CodeType, code: CodeType) -> Iterator[tuple[str, int]]:
    """The way from the code of a function to code inside it; empty if it is not inside."""
    counts: dict[str, int] = {}
    for each in code.co_consts:
        if isinstance(each, CodeType):
            step = each.co_name, counts.setdefault(each.co_name, 0)
            counts[each.co_name] += 1
            if each is wanted:
                yield step
                return
            if rest := list(_way_to(wanted, each)):
                yield step
                yield from rest
                return


def _is_too_large(value: Any) -> bool:
    return type(value) is int and not -(2**63) <= value < 2**64


def _cause_and_remedy(value: Any) -> tuple[str, str]:
    if isinstance(value, Tensor):
        remedy = "register it as a buffer (`register_buffer`) of a module"
        return f"is a {type(value).__name__}", remedy
    if isinstance(value, nn.Module):
        return (
            f"refers to a {type(value).__name__} outside of the module that has it",
            "make that a child (assign it, or use nn.ModuleList or nn.ModuleDict)",
        )
    if _is_too_large(value):
        return "is an int of more than 64 bits", "use a smaller number, or a float"
    kind: Any = type(value)
    home = "" if kind.__module__ == "builtins" else f" of {kind.__module__}"
    return (
        f"is a {kind.__name__}{home} ({reason_to_refuse(kind)})",
        "keep numbers, strings, lists, named functions and objects of plain attributes in it",
    )


def _refusal(where: str, cause: str, remedy: str) -> ModelError:
    return ModelError(
        f"{where} {cause}, which cannot be rebuilt on a worker; {remedy}, or keep the layer with "
        "the coordinator."
    )


def read_value(
    value: Value,
    allowed: Allowed,
    owner: nn.Module | None = None,
    depth: int = 0,
    device: torch.device = META,
    found: Found | None = None,
) -> Any:
    """Decode a value for an attribute of the module ``owner``.

    Args:
        value: Of `write_value`.
        allowed: The allowed imports.
        owner: The module to get the attribute.
        depth: How deep the value is nested.
        device: Where the layer will compute.
        found: The values read before, in the order of writing; it grows.

    Raises:
        ModelError: If the data is not from `write_value`, or names code not allowed here.
    """
    found = Found() if found is None else found
    if isinstance(value, Again):
        return found.take(value)
    if depth > MOST_DEPTH:
        raise ModelError(f"The recipe has a value that is nested deeper than {MOST_DEPTH}.")
    before = found.num_values
    found.count()

    def read(item: Value) -> Any:
        return read_value(item, allowed, owner, depth + 1, device, found)

    made = _read_new(value, allowed, owner, device, read)
    if isinstance(value, _MEANT_AGAIN):
        found.again.append((made, found.num_values - before))
    return made


def _read_new(
    value: Value,
    allowed: Allowed,
    owner: nn.Module | None,
    device: torch.device,
    read: Callable[[Value], Any],
) -> Any:
    match value:
        case Items(container, items):
            return _hashed(_CONTAINERS[container], [read(item) for item in items])
        case DictionaryTable(items):
            return _hashed(dict, [(read(key), read(item)) for key, item in items])
        case Text(kind, text):
            return _TEXTS[kind](text)
        case DeviceKind(kind):
            return device if kind == "layer" else torch.device(kind)
        case Function(path):
            return find_function(allowed, path)
        case EnumMember(path, name):
            return _member(find_class(allowed, path, Enum, "enumeration"), name)
        case ObjectRecord(path, fields, others):
            parts = ({n: read(item) for n, item in items.items()} for items in (fields, others))
            return made_of(_object_class(path, allowed), *parts)
        case Class(path):
            return find_class(allowed, path, object, "class")
        case ModulePart(path):
            return _part(owner, path)
        case Loose():
            return _loose(value, find_class(allowed, value.path, nn.Module), read)
        case Method(part, name):
            return _method(_part(owner, part.path), name)
        case Partial(function, args, kwargs):
            named = {name: read(item) for name, item in kwargs.items()}
            return _partial(read(function), [read(item) for item in args], named)
        case Closure(path):
            return _closure(value, find_function(allowed, path), read)
        case Config(path, content, attention):
            return read_config(_config_class(path, allowed), content, attention)
        case _:
            return value


def _loose(value: Loose, found: type[nn.Module], read: Callable[[Value], Any]) -> nn.Module:
    """Make a module of torch without parent."""
    wrong = [name for name in value.attributes if name in _OF_MODULES or hasattr(found, name)]
    if wrong or not value.path.is_of_torch:
        raise ModelError(
            f"The recipe gives a {value.path} outside of a layer the attributes {wrong}; only "
            "torch's own modules are made there, with attributes that hide nothing."
        )
    made = found.__new__(found)
    nn.Module.__init__(made)
    vars(made).update({name: read(item) for name, item in value.attributes.items()})
    made.training = value.training
    return made


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of this name.

    Raises:
        ModelError: If torch lacks the dtype.
    """
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"torch {torch.__version__} on this worker has no dtype {name!r}.")
    return found


def _hashed(make: Callable[[Any], Any], items: list[Any]) -> Any:
    if make in (set, frozenset, dict):
        _check_keys((item[0] if make is dict else item for item in items), "The recipe")
    try:
        return make(items)
    except TypeError as error:
        raise ModelError(f"The recipe has a value that cannot be built: {error}.") from error


def _special_float(text: str) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise ModelError(f"The recipe has {text!r} instead of inf, -inf or nan.")
    return float(text)


def _complex(text: str) -> complex:
    try:
        return complex(text)
    except ValueError as error:
        raise ModelError(f"The recipe has {text!r} instead of a complex number.") from error


_TEXTS: dict[str, Callable[[str], Any]] = {
    "dtype": dtype_named,
    "float": _special_float,
    "complex": _complex,
}


def _member(enumeration: Any, name: str) -> Any:
    members = enumeration.__members__
    if name not in members:
        raise ModelError(f"{enumeration.__name__} on this worker has no member {name!r}.")
    return members[name]


def _part(owner: nn.Module | None, path: str) -> nn.Module:
    try:
        return owner.get_submodule(path)  # type: ignore[union-attr]
    except AttributeError as error:
        raise ModelError(f"The recipe refers to a module {path!r} that is missing.") from error


def _method(module: nn.Module, name: str) -> Any:
    found = getattr(type(module), name, None)
    if name.startswith("__") or name in NAMES_OF_TORCH or not inspect.isfunction(found):
        raise ModelError(f"{type(module).__name__} on this worker has no method {name!r} to give.")
    return MethodType(found, module)


def _partial(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if not callable(function):
        raise ModelError(f"The recipe has a partial of a {type(function).__name__}.")
    return functools.partial(function, *args, **kwargs)


def _closure(closure: Closure, outer: Any, read: Callable[[Value], Any]) -> FunctionType:
    """Make a function of the code inside an imported one.

    Raises:
        ModelError: If the code is missing, or uses other variables.
    """
    function = inspect.unwrap(outer)
    code = getattr(function, "__code__", None)
    for name, number in closure.inner:
        consts = code.co_consts if isinstance(code, CodeType) else ()
        named = [each for each in consts if isinstance(each, CodeType) and each.co_name == name]
        code = named[number] if 0 <= number < len(named) else None
    names = set(closure.variables)
    if not isinstance(code, CodeType) or not closure.inner or {*code.co_freevars} != names:
        way = ".".join(name for name, _ in closure.inner)
        raise ModelError(
            f"{closure.path} on this worker makes no function {way} of the variables "
            f"{sorted(names)}; install the coordinator's version here."
        )
    values = {name: read(item) for name, item in closure.variables.items()}
    cells = tuple(CellType(values[name]) for name in code.co_freevars)
    defaults = tuple(read(item) for item in closure.defaults)
    made = FunctionType(code, function.__globals__, code.co_name, defaults, cells)
    made.__kwdefaults__ = {name: read(item) for name, item in closure.named_defaults.items()}
    made.__qualname__ = LOCALS.join([closure.path.qualname, *(name for name, _ in closure.inner)])
    made.__module__ = function.__module__
    return made


def _object_class(path: ImportPath, allowed: Allowed) -> Any:
    """A class of an allowed package: torch's own classes, open to all, have no plain objects."""
    if path.is_of_torch:
        raise ModelError(f"The recipe has an object of {path}, and workers make none of torch's.")
    return find_class(allowed, path, object, "class")


def _config_class(path: ImportPath, allowed: Allowed) -> Any:
    """A config class of transformers, or one allowed by the worker's owner."""
    known: Any = getattr(transformers, path.qualname, None)
    is_config = isinstance(known, type) and issubclass(known, PretrainedConfig)
    if is_config and known.__module__ == path.module:
        return known
    return find_class(allowed, path, PretrainedConfig, "config class")
