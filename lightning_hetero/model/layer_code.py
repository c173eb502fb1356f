"""Digests of the code of layers: two machines can compare theirs.

Workers build layers from the code installed there. Another version of transformers, an older copy
of a project, or a patch in one process (``LlamaMLP.forward = mine``) would change numbers silently.

    forward of the layers' classes ─▶ functions and methods named there ─▶ functions named in these

Each function has a place, where it was found
(``transformers.models.llama.modeling_llama.rotate_half``), and a digest of its code without
comments, docstring and annotations. Two releases of a library with the same functions have the same
digests. The code of torch, and a module's imports from another library, do not count: versions may
differ there, and machines have kernels of their own. An import counts if somebody has put it in the
place of a function of the module itself.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import re
import textwrap
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dis import get_instructions
from functools import cache, cached_property, partial, partialmethod
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import ModelError
from .attribute_values import NAMES_OF_TORCH
from .installed import is_installed, package_of
from .outer_values import (
    OuterValue,
    OuterValues,
    Reading,
    class_value,
    digest_of,
    global_value,
    readings_in,
    resolved,
    text_of_module,
    told,
)
from .plain_objects import is_computed, is_object, values_in

# Their code is not compared. A replacement of one of their methods is.
_PLATFORM = frozenset({"torch", "bitsandbytes", "kernels"})
# Its functions differ with a machine's libraries of kernels.
_VARIED = "transformers"
# Methods that torch calls.
_ENTRIES = ("__init__", "__call__", "forward", "backward", "setup_context")
# Neither functions nor wrappers of functions: most attributes of a layer.
_PLAIN = frozenset({type(None), bool, int, float, str, dict, list, tuple})
# Types that hold functions.
_HOLDING = (property, cached_property, partial, partialmethod, staticmethod, classmethod)
_MOST_NAMED = 3
# Names by which code reads environment variables.
_ENVIRONMENT = frozenset({"environ", "getenv"})
# In front of a value, in place of a digest of code.
_IS = "="
# When this process, or the one that it was forked from, began to load code.
_BEGAN_SECONDS = time.time()
# Fields that cannot change numbers.
_SILENT_FIELDS = ("annotation", "kind", "returns", "type_comment", "type_params")


class _Code(NamedTuple):
    """The digest of a function, its readings, the names of attributes in it, and the names that it
    sets: globals, and attributes with a dot in front of them."""

    digest: str
    readings: frozenset[Reading] = frozenset()
    attributes: frozenset[str] = frozenset()
    stored: frozenset[str] = frozenset()


class _Found(NamedTuple):
    """A function at a place; the holder names the object around it there, if there is one."""

    place: str
    function: FunctionType
    holder: str = ""


def code_of(layers: Iterable[nn.Module], attention: str | None = None) -> dict[str, str]:
    """The digest of each function that the layers may run, by the place where it was found.

    Args:
        layers: With their children.
        attention: The name of their attention function in transformers.

    Raises:
        ModelError: If a file has changed since its code was loaded.
    """
    survey = _Survey(layers)
    if attention is not None and attention in ALL_ATTENTION_FUNCTIONS:
        survey.add(f"the attention {attention!r}", ALL_ATTENTION_FUNCTIONS[attention])
    return survey.finish()


def outer_values_of(layers: Iterable[nn.Module]) -> OuterValues:
    """The present values outside of the layers, as far as their code reads them."""
    survey = _Survey(layers)
    survey.finish()
    return OuterValues(survey.values())


def check_code(here: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Refuse layers with other code than the coordinator's.

    Raises:
        ModelError: With the places of differing code, or else with the places on one side only.
    """
    unlike = sorted(p for p in {**wanted, **here} if here.get(p) != wanted.get(p))
    # A function that is no longer called is missing on one side; its caller differs then.
    differ = [place for place in unlike if place in wanted and place in here] or [
        place for place in unlike if package_of(place) != _VARIED
    ]
    if not differ:
        return
    first, more = differ[0], len(differ) - _MOST_NAMED
    values = [side.get(place, "") for place in differ for side in (here, wanted)]
    if all(value.startswith(_IS) for value in values):
        raise ModelError(
            f"{first} {here[first]} on this worker, and {wanted[first]} on the coordinator, so "
            "this worker would compute other numbers: it has what the text of the module says. "
            "Install the same version of that code on both. What a program sets after the import "
            "belongs into an attribute of the layers."
        )
    raise ModelError(
        f"The code of {', '.join(differ[:_MOST_NAMED])}{f' and {more} more' * (more > 0)} is "
        "not the same on this worker and on the coordinator, so this worker would compute "
        "other numbers. Install the same version of that code on both. If one of the processes "
        "has replaced a function of a library, put the new one into a class of your own, in a "
        "module that workers import."
    )


class LoadedCode:
    """The code of layers as it was when they went to their workers; says why a worker's layer may
    compute something else.

    Args:
        layers: The layers by their numbers.
    """

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        self._layers = layers
        self._before = code_of(layers.values())

    def why_not_elsewhere(self, number: int) -> str:
        """The likely difference between a layer here and on its worker, as a sentence."""
        layer = self._layers[number]
        survey = _Survey([layer])
        now, before = survey.finish(), self._before
        if changed := [place for place in now if now[place] != before.get(place, now[place])]:
            return f"{changed[0]} has changed since the layers went to their workers."
        if survey.environment:
            return f"Its code reads environment variables ({min(survey.environment)})."
        if cached := [n for m in layer.modules() for n in vars(m) if is_computed(type(m), n)]:
            return f"Its attribute {cached[0]!r} was computed when something else was different."
        if called := [type(m).__name__ for m in layer.modules() if _has_own_call(m)]:
            return f"{called[0]} has a `__call__` of its own, which runs here and on the worker."
        return (
            "It seems that it depends on something that the worker does not have: a value that was "
            "cached earlier or belongs to a thread, or a function of a library that was replaced."
        )


def _has_own_call(module: nn.Module) -> bool:
    own = type(module).__call__
    return isinstance(own, FunctionType) and not is_installed(_home_of(own))


class _Survey:
    """Follows names from function to function."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._found: dict[str, str] = {}
        self._left: list[_Found] = []
        self._classes: set[type] = {object, nn.Module, torch.autograd.Function}
        # Methods not named so far, by their names.
        self._unnamed: defaultdict[str, list[_Found]] = defaultdict(list)
        self._named = {*_ENTRIES}
        # Values by place and name: one of a class may also be read by way of a module. Some that
        # code sets count what happens in a process.
        self._values: dict[tuple[str, str], OuterValue] = {}
        self._stored: set[str] = set()
        # The functions of the user's own that read environment variables.
        self.environment: set[str] = set()
        for module in (module for layer in layers for module in layer.modules()):
            self._add_module(module)

    def finish(self) -> dict[str, str]:
        """All digests, when every function was followed."""
        while self._left:
            place, outermost, holder = self._left.pop()
            *wrappers, own = links_of(outermost)
            _check_current(own.__code__, own.__code__.co_filename)
            words = [self._follow(own), holder, *_numbers_in(own)]
            for wrapper in wrappers:
                package = package_of(_home_of(wrapper))
                if not is_installed(_home_of(wrapper)):
                    words.append(self._follow(wrapper))
                elif package not in {*_PLATFORM, _VARIED, package_of(_home_of(own))}:
                    words.append(package)
            self._found[place] = digest_of(filter(None, words))
        texts = ((value.place, value.read()) for value in self.values())
        self._found |= {place: f"{_IS} {text}" for place, text in texts if text is not None}
        return dict(sorted(self._found.items()))

    def values(self) -> list[OuterValue]:
        """The values read outside of the layers, without the values set by the code itself."""
        return [each for each in self._values.values() if each.name not in self._stored]

    def _add_module(self, module: nn.Module) -> None:
        """The methods of a module's class, and the functions among its attributes."""
        self.add_class(type(module))
        for name, value in vars(module).items():
            for each in [value] if name in NAMES_OF_TORCH else values_in(value):
                for function in functions_in(each):
                    if not _is_of_platform(home := _home_of(function)):
                        self.add(f"{told(home)}.{function.__qualname__}", function)
                if is_object(each):
                    self._add_object(type(each))

    def _add_object(self, kind: type) -> None:
        """Add the methods of an object's class; operators call underscore methods without a name.

        Underscore methods of other classes stay unnamed: a worker may lack the object, where it
        builds the layer by a config. Objects of this package in layers, such as weights in 4 bits,
        do not count.
        """
        if package_of(kind.__module__) == package_of(__name__):
            return
        self.add_class(kind)
        places = {f"{_place_of(base)}.{n}" for base in kind.__mro__ for n in vars(base)}
        operators = [found for name, found in self._unnamed.items() if name.startswith("__")]
        for each in [each for found in operators for each in found if each.place in places]:
            self.add(*each)

    def add_class(self, kind: type) -> None:
        """Add the methods of a class, as far as torch calls them or followed code names them."""
        for base in set(kind.__mro__) - self._classes:
            self._classes.add(base)
            for name, value in vars(base).items():
                place, holder = f"{_place_of(base)}.{name}", _holder_of(value)
                for function in functions_in(value):
                    if holder or not all(_is_of_platform(_home_of(f)) for f in links_of(function)):
                        self._unnamed[name].append(_Found(place, function, holder))
                    elif name == "forward":
                        self._follow(function)
                if not name.startswith("__") or name in _ENTRIES:
                    self._note_object(place, value)
                    if not is_installed(base.__module__) or (
                        type(value) in (int, float) and not _is_of_platform(base.__module__)
                    ):
                        self._note_value(class_value(base, name, place))
        self._name(self._named)

    def _name(self, names: Iterable[str]) -> None:
        """Take the methods of these names: somebody may call them."""
        self._named.update(names)
        for name in self._unnamed.keys() & names:
            for found in self._unnamed.pop(name):
                self.add(*found)

    def add(self, place: str, function: FunctionType, holder: str = "") -> None:
        """Add a function at a place; the holder names the object around it there."""
        if place not in self._found:
            self._found[place] = ""
            self._left.append(_Found(place, function, holder))

    def _note_value(self, value: OuterValue) -> None:
        self._values[value.place, value.name] = value

    def _note_object(self, place: str, value: Any) -> None:
        """Note a callable object without a function inside."""
        if (holder := _holder_of(value)) and not functions_in(value):
            self._found[place] = holder
            if not is_installed(type(value).__module__):
                self.add_class(type(value))

    def _follow(self, function: FunctionType) -> str:
        """Take everything named in a function; returns the digest of its code."""
        code = _code_of(function.__code__)
        self._name(code.attributes)
        self._stored |= code.stored
        caller, own = _home_of(function), function.__code__
        local = {*own.co_varnames, *own.co_cellvars, *own.co_freevars}
        named = {*code.attributes, *(reading[0] for reading in code.readings)}
        if not (is_installed(caller) or _ENVIRONMENT.isdisjoint(named)):
            self.environment.add(f"{told(caller)}.{function.__qualname__}")
        for reading in code.readings:
            module, content, path = resolved(function, reading)
            self._take(caller, module, path[0], content.get(path[0]))
            if reading[0] in local or _is_of_platform(caller):
                continue
            if (value := global_value(caller, module, content, path)) is not None:
                self._note_value(value)
        return code.digest

    def _take(self, caller: str, module: str, name: str, found: Any) -> None:
        """Take the object that a caller finds in a module under a name."""
        place, holder = f"{told(module)}.{name}", _holder_of(found)
        for inner in functions_in(found):
            is_held = holder and _is_of_platform(module)
            if is_held or _counts(_home_of(inner), module, name, caller):
                self.add(place, inner, holder)
        if isinstance(found, type):
            is_near = package_of(found.__module__) == package_of(caller)
            is_function = is_near and issubclass(found, torch.autograd.Function)
            if is_function or not is_installed(found.__module__):
                self.add_class(found)
        else:
            self._note_object(place, found)


def links_of(function: FunctionType) -> Iterator[FunctionType]:
    """A function, and the chain of functions wrapped by it: the last one was decorated."""
    link: Any = function
    while isinstance(link, FunctionType):
        yield link
        link = vars(link).get("__wrapped__")


def _home_of(function: FunctionType) -> str:
    """The module of a function's code: `functools.wraps` changes its `__module__`."""
    return str(function.__globals__.get("__name__", ""))


def _place_of(kind: type) -> str:
    return f"{told(kind.__module__)}.{kind.__qualname__}"


def _counts(home: str, module: str, name: str, caller: str) -> bool:
    """Whether to compare the code of a function of ``home``, found by a caller in ``module``.

    The user's own code counts, and the code of the caller's library. Code of another library counts
    only in the place of a function of the caller's library.
    """
    if not is_installed(home):
        return True
    if _is_of_platform(caller) or _is_of_platform(home):
        return False
    if package_of(home) == package_of(caller):
        return True
    defined = rf"^(def {name}\(|{name} *=)"
    is_near = package_of(module) == package_of(caller)
    return is_near and re.search(defined, text_of_module(module), re.MULTILINE) is not None


def _is_of_platform(module: str) -> bool:
    return package_of(module) in _PLATFORM


def _numbers_in(function: FunctionType) -> list[str]:
    """The numbers in a user's function as defaults, or from the function around it; its code does
    not show them."""
    if is_installed(_home_of(function)):
        return []
    changed = {each.argval for each in get_instructions(function) if each.opname == "STORE_DEREF"}
    held = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    given: list[tuple[Any, Any]] = [
        *enumerate(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).items(),
        *((n, cell.cell_contents) for n, cell in held if n not in changed and cell != CellType()),
    ]
    return [f"{name}={number!r}" for name, number in given if type(number) in (int, float)]


def functions_in(value: Any) -> list[FunctionType]:
    """The functions of an attribute of a class."""
    if type(value) in _PLAIN:
        return []
    found: list[Any] = [value]
    if isinstance(value, (*_HOLDING, MethodType)):
        found = [getattr(value, name, None) for name in ("fget", "fset", "func", "__func__")]
    elif not isinstance(value, FunctionType):
        # As `functools.lru_cache` keeps it.
        found = [inspect.getattr_static(value, "__wrapped__", None)]
    return [each for each in found if isinstance(each, FunctionType)]


def _holder_of(value: Any) -> str:
    """The description of a callable object in the place of a function; empty for a function."""
    kind = type(value)
    is_ordinary = isinstance(value, type) or kind.__module__ == "builtins"
    if is_ordinary or not callable(value) or _is_of_platform(kind.__module__):
        return ""
    given = (*value.args, *value.keywords.items()) if isinstance(value, partial) else ()
    # The text of an object may have its address.
    numbers = [each for each in given if isinstance(each, (int, float, str, tuple))]
    said = [repr(each) for each in numbers if " at 0x" not in repr(each)]
    return " ".join([f"an object of {kind.__module__}.{kind.__qualname__}", *said])


@cache
def _code_of(code: CodeType) -> _Code:
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    if not lines:
        # Made by `exec`, as methods of dataclasses are; the class determines it.
        return _Code("without source")
    source = textwrap.dedent("".join(inspect.getblock(lines)))
    try:
        (tree,) = ast.parse(source).body
    except (SyntaxError, ValueError):
        # A lambda, or the last lines of an expression are missing.
        return _Code(digest_of([source.strip()]))
    for node in ast.walk(tree):
        for field in _SILENT_FIELDS:
            vars(node).pop(field, None)
    digest = digest_of([repr(_words(tree))])
    vars(tree).pop("decorator_list", None)  # they have run already
    nodes = [*ast.walk(tree)]
    named = frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute))
    return _Code(digest, readings_in(nodes), named, frozenset(_set_by(nodes)))


@cache
def _check_current(code: CodeType, file: str) -> None:
    """Refuse code if its file has been written meanwhile, and has other code in its place.

    The check runs once, so a program may be edited while it trains.

    Raises:
        ModelError: With the file and the remedy.
    """
    try:
        is_written = os.stat(file).st_mtime >= _BEGAN_SECONDS
        is_current = not is_written or code in _codes_in(file)
    except (OSError, SyntaxError, ValueError):
        return  # It was not loaded from a file of code, or this cannot be known.
    if not is_current:
        raise ModelError(
            f"{file} has changed since this process has loaded it, so the process would compute "
            f"with an older {code.co_name!r}. Start it anew (a worker by its command)."
        )


@cache
def _codes_in(file: str) -> list[CodeType]:
    """All code in a file now."""
    found = [compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)]
    for code in found:
        found += [each for each in code.co_consts if isinstance(each, CodeType)]
    return found


def _set_by(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The attributes set by a function, with a dot, the globals set by it, and the variables in
    which it sets something."""
    for node in nodes:
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
            if isinstance(node, ast.Attribute):
                yield f".{node.attr}"
            holder: ast.expr = node
            while isinstance(holder, (ast.Attribute, ast.Subscript)):
                holder = holder.value
            if isinstance(holder, ast.Name):
                yield holder.id


def _words(node: Any) -> Any:
    """A tree as plain data, the same for all versions of Python: `ast.dump` changes with them."""
    if isinstance(node, list):
        return [_words(each) for each in node if not _is_text(each)]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
    return type(node).__name__, [(name, _words(value)) for name, value in fields]


def _is_text(statement: object) -> bool:
    """Whether a statement is a docstring."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
