"""The names and texts in the user's code, found without running it.

The code is that of classes outside of libraries, and of the functions and classes in the same
packages with a name in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

_LIBRARIES = frozenset(
    {
        *("abc", "builtins", "lightning", "lightning_fabric", "peft", "pytorch_lightning"),
        *("torch", "torchmetrics", "transformers", "typing", __name__.partition(".")[0]),
    }
)


def own_methods(classes: Iterable[type]) -> Iterator[tuple[str, frozenset[Any]]]:
    """The name of each method of the user's own among these classes and their bases, and the names
    and constants in its code."""
    own = {base for each in classes for base in each.__mro__ if _package(base) not in _LIBRARIES}
    packages = set(map(_package, own))
    for each in own:
        for name, member in vars(each).items():
            yield name, frozenset(_said_by_member(member, packages, set()))


def said_in(member: Any) -> list[Any]:
    """The names, the constants and the instructions of a function, in a lasting order."""
    code = getattr(_function_of(member), "__code__", None)
    return [] if code is None else [*_said_in(code), code.co_code]


def _package(found: Any) -> str:
    return str(getattr(found, "__module__", "")).partition(".")[0]


def _said_by_member(member: Any, packages: set[str], seen: set[Any]) -> Iterator[Any]:
    if isinstance(member, type):
        for inner in vars(member).values():
            yield from _said_by_member(inner, packages, seen)
        return
    function = _function_of(member)
    code = getattr(function, "__code__", None)
    if code is None or code in seen:
        return
    seen.add(code)
    names = [*_said_in(code)]
    yield from names
    around = function.__globals__
    for name in (each for each in names if isinstance(each, str)):
        found = around.get(name)
        if isinstance(found, (FunctionType, type)) and _package(found) in packages:
            yield from _said_by_member(found, packages, seen)


def _function_of(member: Any) -> Any:
    """The function of a method or a property, without decorators."""
    inside = (getattr(member, name, None) for name in ("fget", "func", "__func__"))
    function = next(filter(None, inside), member)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _said_in(code: CodeType) -> Iterator[Any]:
    yield from (*code.co_names, *code.co_varnames, *code.co_freevars)
    for constant in code.co_consts:
        yield from _said_by(constant)


def _said_by(constant: Any) -> Iterator[Any]:
    if isinstance(constant, CodeType):
        yield from _said_in(constant)
    elif isinstance(constant, tuple):
        for each in constant:
            yield from _said_by(each)
    elif isinstance(constant, frozenset):
        yield from sorted(constant, key=repr)  # its own order differs between processes
    else:
        yield constant
