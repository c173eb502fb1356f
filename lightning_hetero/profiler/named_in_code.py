"""The names and texts in the user's code, found without running it.

The code is that of classes outside of libraries, and of the user's functions and classes with a
name in it, also through a module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_LIBRARIES = frozenset(
    {
        *("abc", "builtins", "lightning", "lightning_fabric", "peft", "pytorch_lightning"),
        *("torch", "torchmetrics", "transformers", "typing", __name__.partition(".")[0]),
    }
)


def own_methods(
    objects: Iterable[Any], held: Iterable[Any] = ()
) -> Iterator[tuple[str, frozenset[Any]]]:
    """The name of each method in the classes of these objects and in their bases, outside of
    libraries, and the names and constants in its code.

    Args:
        objects: Of the user, such as callbacks.
        held: Further objects, also functions; those of installed packages are left out.
    """
    own, held = _own_classes(map(type, objects)), [*held]
    packages = set(map(_package, own))
    bases = (base for each in held for base in type(each).__mro__)
    own.update(dict.fromkeys(base for base in bases if _is_own(_package(base), packages)))
    for each in own:
        for name, member in vars(each).items():
            yield name, frozenset(_said_by_member(member, packages, set(), {}))
    for each in held:
        if isinstance(each, (FunctionType, MethodType)) and _is_own(_package(each), packages):
            yield each.__name__, frozenset(_said_by_member(each, packages, set(), {}))


def said_in(kind: type, names: Iterable[str]) -> list[Any]:
    """The names, the constants and the instructions of some methods of a class, and of the methods
    and functions with a name in them, in a lasting order."""
    own = _own_classes([kind])
    packages = set(map(_package, own))
    methods = {k: v for each in kind.__mro__[::-1] if each in own for k, v in vars(each).items()}
    seen: set[Any] = set()
    said = [
        each
        for name in names
        for each in _said_by_member(getattr(kind, name), packages, seen, methods)
    ]
    return [*said, *sorted(code.co_code for code in seen)]


def _own_classes(classes: Iterable[type]) -> dict[type, None]:
    """The user's classes among these and their bases, in a lasting order."""
    bases = (base for each in classes for base in each.__mro__)
    return dict.fromkeys(base for base in bases if _package(base) not in _LIBRARIES)


def _package(found: Any) -> str:
    return str(getattr(found, "__module__", None) or "").partition(".")[0]


def _is_own(package: str, packages: set[str]) -> bool:
    """Whether a package is of the user's classes, or is not installed."""
    if package in packages:
        return True
    if not package or package in _LIBRARIES or package in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return not {"site-packages", "dist-packages"} & {*PurePath(file).parts}


def _said_by_member(
    member: Any, packages: set[str], seen: set[Any], methods: Mapping[str, Any]
) -> Iterator[Any]:
    if isinstance(member, type):
        for inner in vars(member).values():
            yield from _said_by_member(inner, packages, seen, methods)
        return
    function = _function_of(member)
    code = getattr(function, "__code__", None)
    if code is None or code in seen:
        return
    seen.add(code)
    names = [*_said_in(code)]
    yield from names
    texts = [each for each in names if isinstance(each, str)]
    for found in _named(texts, function.__globals__, packages):
        yield from _said_by_member(found, packages, seen, methods)
    for name in texts:
        if name in methods:
            yield from _said_by_member(methods[name], packages, seen, methods)


def _named(names: list[str], around: dict[str, Any], packages: set[str]) -> Iterator[Any]:
    """The user's functions and classes with these names, also in modules with such a name."""
    scopes: list[Mapping[str, Any]] = [around, sys.modules]
    looked_in = set()
    for scope in scopes:
        for name in names:
            found = scope.get(name)
            if isinstance(found, ModuleType):
                package = found.__name__.partition(".")[0]
                if found.__name__ not in looked_in and _is_own(package, packages):
                    looked_in.add(found.__name__)
                    scopes.append(vars(found))
            elif isinstance(found, (FunctionType, type)) and _is_own(_package(found), packages):
                yield found


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
