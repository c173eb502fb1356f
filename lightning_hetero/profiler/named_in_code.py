"""The names and texts in the user's code, found without running it.

The code is that of classes outside of libraries, and of the user's functions and classes with a
name in it, also through a module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from ..model.installed import is_installed, package_of
from ..model.layer_code import functions_in, links_of

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
    bases = (base for kind in dict.fromkeys(map(type, held)) for base in kind.__mro__)
    own.update(dict.fromkeys(base for base in bases if _is_own(_module(base), packages)))
    for each in own:
        for name, member in vars(each).items():
            yield name, frozenset(_said_by_member(member, packages, set(), {}))
    for each in held:
        if isinstance(each, (FunctionType, MethodType)) and _is_own(_module(each), packages):
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
    return [*said, *sorted(each.co_code for each in seen if isinstance(each, CodeType))]


def _own_classes(classes: Iterable[type]) -> dict[type, None]:
    """The user's classes among these and their bases, in a lasting order."""
    bases = (base for each in classes for base in each.__mro__)
    return dict.fromkeys(base for base in bases if _package(base) not in _LIBRARIES)


def _package(found: Any) -> str:
    return package_of(_module(found))


def _module(found: Any) -> str:
    return str(getattr(found, "__module__", None) or "")


def _is_own(module: str, packages: set[str]) -> bool:
    """Whether a module is of a package of the user's classes, or of no library. Code may make a
    module too; it has no file then."""
    package = package_of(module)
    if package in packages:
        return True
    if not package or package in _LIBRARIES or package in sys.stdlib_module_names:
        return False
    has_file = getattr(sys.modules.get(module), "__file__", None) is not None
    return not (has_file and is_installed(module))


def _said_by_member(
    member: Any, packages: set[str], seen: set[Any], methods: Mapping[str, Any]
) -> Iterator[Any]:
    if isinstance(member, type):
        if member in seen:
            return
        seen.add(member)
        for inner in vars(member).values():
            yield from _said_by_member(inner, packages, seen, methods)
        return
    # Of a decorated function the innermost one is the user's.
    for *_, function in map(links_of, functions_in(member)):
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        names = [*_said_in(function.__code__)]
        yield from names
        texts = [each for each in names if isinstance(each, str)]
        named = [methods[name] for name in texts if name in methods]
        for found in (*_named(texts, function.__globals__, packages), *named):
            yield from _said_by_member(found, packages, seen, methods)


def _named(names: list[str], around: dict[str, Any], packages: set[str]) -> Iterator[Any]:
    """The user's functions and classes with these names, also in modules with such a name."""
    scopes: list[Mapping[str, Any]] = [around, sys.modules]
    looked_in = set()
    for scope in scopes:
        for name in names:
            found = scope.get(name)
            if isinstance(found, ModuleType):
                if found.__name__ not in looked_in and _is_own(found.__name__, packages):
                    looked_in.add(found.__name__)
                    scopes.append(vars(found))
            elif isinstance(found, (FunctionType, type)) and _is_own(_module(found), packages):
                yield found


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
