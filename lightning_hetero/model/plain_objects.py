"""Objects with plain state: they are taken apart here and put together again on a worker.

    reason_to_refuse     why objects of a class stay where they are
    content_of, made_of  an object's attributes, and an object of them
    values_in            the values inside a value

An object is put together without its class's own code: the attributes enter its ``__dict__`` or its
slots directly. So a class must not run code of its own at this moment, when Python looks at the
object, or when it drops it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache, cached_property
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

from ..errors import ModelError

# Methods that Python calls by itself when an attribute of an object is read, set or dropped.
_BY_ITSELF = ("__del__", "__getattribute__", "__setattr__", "__delattr__", "__class__")
_OF_FROZEN_DATACLASSES = frozenset({"__setattr__", "__delattr__"})
# Python's pointers to an object's attributes and to its weak references.
_POINTER_BYTES = 8


@cache
def reason_to_refuse(kind: type) -> str:
    """Why an object of a class cannot be put together from its attributes; empty if it can."""
    if issubclass(kind, Enum):
        return "its class is an enumeration"
    is_dataclass = dataclasses.is_dataclass(kind)
    if kind.__itemsize__ or kind.__basicsize__ > _bytes_of_attributes(kind):
        return "its class keeps state outside of its attributes"
    for base in kind.__mro__[:-1]:
        own = vars(base)
        allowed = _OF_FROZEN_DATACLASSES if _is_frozen_dataclass(base) else frozenset()
        for name in _BY_ITSELF:
            if name in own and name not in allowed:
                return f"its class {base.__name__} defines {name}"
        if not isinstance(own.get("__dict__"), (GetSetDescriptorType, type(None))):
            return f"its class {base.__name__} defines __dict__"
        if own.get("__slots__") and not is_dataclass:
            return f"its class {base.__name__} has __slots__"
    if not is_dataclass and not kind.__dictoffset__:
        return "its class takes no attributes"
    return ""


def _is_frozen_dataclass(base: type) -> bool:
    parameters = vars(base).get("__dataclass_params__")
    return parameters is not None and bool(parameters.frozen)


def _bytes_of_attributes(kind: type) -> int:
    """The bytes of an object with attributes only; a base in C has more."""
    num_pointers = (kind.__dictoffset__ != 0) + (kind.__weakrefoffset__ != 0)
    num_slots = sum(
        isinstance(each, MemberDescriptorType)
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for each in vars(base).values()
    )
    return object.__basicsize__ + _POINTER_BYTES * (num_pointers + num_slots)


def content_of(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a dataclass's instance, and an object's other attributes.

    Cached properties are left out: a worker computes them by itself.
    """
    kind = type(value)
    names = [field.name for field in _fields_of(kind)]
    fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
    others = {
        name: item
        for name, item in getattr(value, "__dict__", {}).items()
        if name not in names and not is_computed(kind, name)
    }
    return fields, others


def _fields_of(kind: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()


def is_computed(kind: type, name: str) -> bool:
    """Whether an attribute is a cached property: a worker computes it by itself."""
    return isinstance(getattr(kind, name, None), cached_property)


def hidden_by(kind: type, name: str) -> str:
    """The effect of an attribute of this name on its object, in words; empty for an ordinary
    one."""
    if not name.isidentifier() or (name.startswith("__") and name.endswith("__")):
        return "is no ordinary name for an attribute of a"
    found = _of_class(kind, name)
    if callable(found) or hasattr(type(found), "__get__"):
        return "would hide a method or a property of a"
    return ""


def _of_class(kind: type, name: str) -> Any:
    """An attribute of a class, found without running code."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def made_of(kind: type, fields: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
    """Put an object together from its attributes.

    Raises:
        ModelError: If its class runs code meanwhile, or has other fields or methods of these names.
    """
    if reason := reason_to_refuse(kind):
        raise ModelError(
            f"An object of {kind.__module__}.{kind.__qualname__} is not put together on this "
            f"worker: {reason}."
        )
    known = {field.name: field.init for field in _fields_of(kind)}
    # A field that no constructor fills may be missing.
    if (
        not {name for name, is_filled in known.items() if is_filled}
        <= fields.keys()
        <= known.keys()
    ):
        raise ModelError(
            f"{kind.__name__} on this worker has the fields {sorted(known)} and the "
            f"coordinator's has {sorted(fields)}; install the coordinator's version here."
        )
    for name in others:
        if name in known or hidden_by(kind, name):
            raise ModelError(
                f"The recipe gives a {kind.__name__} the attribute {name!r}, which would hide "
                "one of its class; rename it."
            )
    try:
        made: Any = object.__new__(kind)
    except TypeError as error:  # an abstract class
        raise ModelError(f"The recipe has an object that cannot be made: {error}.") from error
    for name, item in (*fields.items(), *others.items()):
        _put(made, kind, name, item)
    return made


def _put(made: Any, kind: type, name: str, item: Any) -> None:
    found = _of_class(kind, name)
    if isinstance(found, MemberDescriptorType):
        found.__set__(made, item)
    elif hasattr(type(found), "__set__"):
        raise ModelError(
            f"The field {name!r} of a {kind.__name__} runs code of its class when it is set, which "
            "a worker refuses; rename the property."
        )
    else:
        vars(made)[name] = item


def is_object(value: Any) -> bool:
    """Whether a value is an object, and can be put together from its attributes."""
    kind: Any = type(value)
    return not reason_to_refuse(kind)


def is_value(kind: type) -> bool:
    """Whether two objects of a class with the same content are the same key."""
    parameters = getattr(kind, "__dataclass_params__", None)
    return (
        parameters is not None and parameters.eq and (parameters.frozen or parameters.unsafe_hash)
    )


def values_in(value: Any) -> Iterator[Any]:
    """A value, and the values in its containers and in the attributes of the objects in it."""
    seen: dict[int, Any] = {}
    left = [value]
    while left:
        found = left.pop()
        if id(found) in seen:
            continue
        seen[id(found)] = found
        yield found
        if isinstance(found, dict):
            left += [*found.keys(), *found.values()]
        elif isinstance(found, (list, tuple, set, frozenset)):
            left += found
        elif is_object(found):
            left += [item for part in content_of(found) for item in part.values()]
