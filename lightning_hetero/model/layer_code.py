"""What code layers run, as digests: two machines can tell whether theirs is the same.

Workers build layers from what is installed there. Another version of transformers, an older copy of
a project, or a patch in one process (``LlamaMLP.forward = mine``) would change numbers, and nobody
would be told.

    forward of the layers' classes ─▶ functions and methods that it names ─▶ those that these name

Each has a place, where it was found (``transformers.models.llama.modeling_llama.rotate_half``), and
a digest of its code without comments, docstring and annotations. The code of torch, and what a
module imports from another library, has none: versions may differ there, and machines have kernels
of their own. If somebody has put it in the place of a function that the module itself defines, it
counts.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import os
import site
import sys
import sysconfig
import textwrap
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dis import get_instructions
from functools import cache, cached_property, partial, partialmethod
from importlib import metadata
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import ModelError
from .allowed_imports import MAIN, SCRIPT
from .attribute_values import NAMES_OF_TORCH
from .outer_values import (
    OuterValue,
    OuterValues,
    Reading,
    class_value,
    global_value,
    readings_in,
    top_level_of,
)
from .plain_objects import is_object, values_in

# Their code is not compared. What stands in the place of a method of theirs is.
_PLATFORM = frozenset({"torch", "bitsandbytes", "kernels"})
# What it has differs with the libraries of kernels that a machine has.
_VARIED = "transformers"
# Methods that torch calls.
_ENTRIES = ("__init__", "__call__", "forward", "backward", "setup_context")
# What needs no object around it to be called.
_ORDINARY = (
    *(type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, WrapperDescriptorType),
    *(MethodWrapperType, MethodDescriptorType, ClassMethodDescriptorType),
    *(property, staticmethod, classmethod, cached_property),
)
# What neither is a function nor wraps one: most of what a layer has as attributes.
_PLAIN = frozenset(
    {type(None), bool, int, float, str, dict, OrderedDict, list, tuple, set, ModuleType}
)
_EMPTY_CLASSES = {object, nn.Module, torch.autograd.Function}
_MOST_NAMED = 3
# Names by which code reads environment variables.
_ENVIRONMENT = frozenset({"environ", "getenv"})
# In front of what is a value, and no digest of code.
_IS = "="
_DIGEST_BYTES = 8
# When this process, or the one that it was forked from, began to load code.
_BEGAN_SECONDS = time.time()
# What says nothing about numbers.
_SILENT_FIELDS = frozenset({"annotation", "ctx", "kind", "returns", "type_comment", "type_params"})


class _Code(NamedTuple):
    """The digest of a function, the dotted names in it, the names of attributes, of those that it
    sets, and of globals that it sets, and what it reads."""

    digest: str
    chains: frozenset[tuple[str, ...]] = frozenset()
    attributes: frozenset[str] = frozenset()
    stored: frozenset[str] = frozenset()
    rebound: frozenset[str] = frozenset()
    readings: frozenset[Reading] = frozenset()


class _Found(NamedTuple):
    """A function at a place; the holder is the object that it is in there, if it is in one."""

    place: str
    function: FunctionType
    holder: tuple[str, ...] = ()


def code_of(layers: Iterable[nn.Module], attention: str | None = None) -> dict[str, str]:
    """The digest of each function that the layers may run, by the place where it was found.

    Args:
        layers: With their children.
        attention: The name of the function of attention that they look up in transformers.

    Raises:
        ModelError: If a file has changed since its code was loaded.
    """
    survey = _Survey(layers)
    if attention is not None and attention in ALL_ATTENTION_FUNCTIONS:
        survey.add(f"the attention {attention!r}", ALL_ATTENTION_FUNCTIONS[attention])
    return survey.finish()


def outer_values_of(layers: Iterable[nn.Module]) -> OuterValues:
    """The values outside of the layers that their code reads, as they are now."""
    survey = _Survey(layers)
    survey.finish()
    return OuterValues(survey.outer_values())


def check_code(here: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Refuse layers whose code is not that of the coordinator.

    Raises:
        ModelError: With the places that differ, or else with those that are on one side only.
    """
    places = sorted({**wanted, **here})
    differ = [p for p in places if p in wanted and p in here and here[p] != wanted[p]]
    # What a function no longer calls is missing on one side, and is no news.
    differ = differ or [
        place
        for place in places
        if (place in wanted) != (place in here) and _package(place) != _VARIED
    ]
    pairs = [(here.get(place, ""), wanted.get(place, "")) for place in differ]
    if differ and all(mine.startswith(_IS) and other.startswith(_IS) for mine, other in pairs):
        mine, other = pairs[0]
        raise ModelError(
            f"{differ[0]} {mine} on this worker, and {other} on the coordinator, so this worker "
            "would compute other numbers: it has what the text of the module says. Install the "
            "same version of that code on both. What a program sets after the import belongs into "
            "an attribute of the layers."
        )
    if differ:
        more = len(differ) - _MOST_NAMED
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
        """What a layer has that its worker lacks, as far as it is known, as a sentence."""
        layer = self._layers[number]
        survey = _Survey([layer])
        now, before = survey.finish(), self._before
        if changed := [place for place in now if now[place] != before.get(place, now[place])]:
            return f"{changed[0]} has changed since the layers went to their workers."
        if survey.environment:
            return f"Its code reads environment variables ({sorted(survey.environment)[0]})."
        if cached := [name for module in layer.modules() for name in _cached_in(module)]:
            return f"Its attribute {cached[0]!r} was computed when something else was different."
        if called := [type(m).__name__ for m in layer.modules() if _has_own_call(m)]:
            return f"{called[0]} has a `__call__` of its own, which runs here and on the worker."
        return (
            "It seems that it depends on something that the worker does not have: a value that was "
            "cached earlier or belongs to a thread, or a function of a library that was replaced."
        )


def _cached_in(module: nn.Module) -> list[str]:
    kinds = type(module).__mro__
    return [
        name
        for name in vars(module)
        if any(isinstance(vars(kind).get(name), cached_property) for kind in kinds)
    ]


def _has_own_call(module: nn.Module) -> bool:
    own = next(vars(kind)["__call__"] for kind in type(module).__mro__ if "__call__" in vars(kind))
    return isinstance(own, FunctionType) and not is_installed(_defined_in(own))


class _Survey:
    """Follows names from function to function."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._found: dict[str, str] = {}
        self._left: list[_Found] = []
        self._classes: set[type] = set()
        # Methods that nothing has named so far, by their names.
        self._unnamed: defaultdict[str, list[_Found]] = defaultdict(list)
        self._named = {*_ENTRIES}
        # Settings at places. Some that code sets count what happens in a process.
        self._settings: dict[str, int | float] = {}
        self._stored: set[str] = set()
        # Values of the user's own classes and modules by their places, with their names.
        self._of_classes: dict[str, tuple[str, OuterValue]] = {}
        self._of_modules: dict[str, tuple[str, OuterValue]] = {}
        self._rebound: set[str] = set()
        # The functions of the user's own that read environment variables.
        self.environment: set[str] = set()
        for module in (module for layer in layers for module in layer.modules()):
            self.add_module(module)

    def finish(self) -> dict[str, str]:
        """All digests, when every function was followed."""
        while self._left:
            place, outermost, holder = self._left.pop()
            *wrappers, own = _links(outermost)
            _check_current(own.__code__, own.__code__.co_filename)
            words = [_code_of(own.__code__).digest, *holder, *_numbers_in(own)]
            self._follow_all(own)
            for wrapper in wrappers:
                home = _defined_in(wrapper)
                if not is_installed(home):
                    words.append(_code_of(wrapper.__code__).digest)
                    self._follow_all(wrapper)
                elif _package(home) not in {*_PLATFORM, _VARIED, _package(_defined_in(own))}:
                    words.append(_package(home))
            self._found[place] = words[0] if len(words) == 1 else _digest(words)
        for place, setting in self._settings.items():
            if place.rpartition(".")[2] not in self._stored:
                self._found[place] = repr(setting)
        texts = ((value.place, value.read()) for value in self.outer_values())
        self._found |= {place: f"{_IS} {text}" for place, text in texts if text is not None}
        return dict(sorted(self._found.items()))

    def outer_values(self) -> list[OuterValue]:
        """What is read outside of the layers, but for what the code itself sets."""
        of_classes = [each for name, each in self._of_classes.values() if name not in self._stored]
        of_modules = [each for name, each in self._of_modules.values() if name not in self._rebound]
        return [*of_classes, *of_modules]

    def add_module(self, module: nn.Module) -> None:
        """The methods of a module's class, and the functions among its attributes."""
        self.add_class(type(module))
        for name, value in vars(module).items():
            for each in [value] if name in NAMES_OF_TORCH else values_in(value):
                self._add_functions(each)
                if is_object(each):
                    self._add_object(type(each))

    def _add_functions(self, value: Any) -> None:
        for function in _functions_in(getattr(value, "__func__", value)):
            home = _defined_in(function)
            if not _is_of_platform(home):
                self.add(f"{_told(home)}.{function.__qualname__}", function)

    def _add_object(self, kind: type) -> None:
        """The methods of an object's class; operators call those with underscores unnamed.

        Those of other classes stay unnamed: a worker may lack the object, where it builds the layer
        by a config. What this package puts into layers, such as weights in 4 bits, does not count.
        """
        if _package(kind.__module__) == _package(__name__):
            return
        self.add_class(kind)
        for base in kind.__mro__:
            start = f"{_told(base.__module__)}.{base.__qualname__}"
            for name in filter(lambda each: each.startswith("__"), vars(base)):
                found = self._unnamed[name]
                self._unnamed[name] = [each for each in found if each.place != f"{start}.{name}"]
                for each in found:
                    if each.place == f"{start}.{name}":
                        self.add(*each)

    def add_class(self, kind: type) -> None:
        """The methods of a class that torch calls, and those that what is followed names."""
        for base in set(kind.__mro__) - self._classes - _EMPTY_CLASSES:
            self._classes.add(base)
            for name, value in vars(base).items():
                place = f"{_told(base.__module__)}.{base.__qualname__}.{name}"
                holder = _holder_of(value)
                for function in _functions_in(value):
                    homes = map(_defined_in, _links(function))
                    if holder or not all(map(_is_of_platform, homes)):
                        self._unnamed[name].append(_Found(place, function, holder))
                    elif name == "forward":
                        self._follow_all(function)
                if not name.startswith("__") or name in _ENTRIES:
                    self._note_other(place, value)
                    if not is_installed(base.__module__):
                        self._of_classes[place] = name, class_value(base, name, place)
        self._name(self._named)

    def _name(self, names: Iterable[str]) -> None:
        """Take the methods of these names: somebody may call them."""
        self._named.update(names)
        for name in self._unnamed.keys() & names:
            for found in self._unnamed.pop(name):
                self.add(*found)

    def add(self, place: str, function: FunctionType, holder: tuple[str, ...] = ()) -> None:
        """A function at a place; the holder says what object it is in there."""
        if place not in self._found:
            self._found[place] = ""
            self._left.append(_Found(place, function, holder))

    def _note_other(self, place: str, value: Any) -> None:
        """A number at a place, or an object that is called like a function."""
        if type(value) in (int, float):
            if not _is_of_platform(place):
                self._settings[place] = value
        elif (holder := _holder_of(value)) and not list(_functions_in(value)):
            (self._found[place],) = holder
            if not is_installed(type(value).__module__):
                self.add_class(type(value))

    def _follow_all(self, function: FunctionType) -> None:
        code = _code_of(function.__code__)
        self._name(code.attributes)
        self._stored |= code.stored
        self._rebound |= code.rebound
        if not is_installed(_defined_in(function)):
            self._note_readings(function, code.readings)
            if code.attributes & _ENVIRONMENT or any(c[0] in _ENVIRONMENT for c in code.chains):
                self.environment.add(f"{_told(_defined_in(function))}.{function.__qualname__}")
        for names in code.chains:
            self._follow(function, names)

    def _note_readings(self, function: FunctionType, readings: Iterable[Reading]) -> None:
        own = function.__code__
        local = {*own.co_varnames, *own.co_cellvars, *own.co_freevars}
        for reading in readings:
            if reading[0] not in local:
                value = global_value(function, reading, _is_own, _told)
                if value is not None:
                    self._of_modules[value.place] = str(reading[0]), value

    def _follow(self, function: FunctionType, names: tuple[str, ...]) -> None:
        """What a function means by a dotted name, such as ``nn.functional.silu``."""
        caller, name = _defined_in(function), names[0]
        module, found = caller, function.__globals__.get(name)
        for name_inside in names[1:]:
            if not isinstance(found, ModuleType):
                break
            module, name, found = found.__name__, name_inside, vars(found).get(name_inside)
        place = f"{_told(module)}.{name}"
        holder = _holder_of(found)
        for inner in _functions_in(found):
            is_held = holder and _is_of_platform(module)
            if is_held or _counts(_defined_in(inner), module, name, caller):
                self.add(place, inner, holder)
        if isinstance(found, type):
            is_near = _package(found.__module__) == _package(caller)
            is_function = is_near and issubclass(found, torch.autograd.Function)
            if is_function or not is_installed(found.__module__):
                self.add_class(found)
        elif callable(found) or (name.isupper() and _package(module) == _package(caller)):
            self._note_other(place, found)


def _links(function: FunctionType) -> Iterator[FunctionType]:
    """A function, and those that it wraps: the last one is what was decorated."""
    link: Any = function
    while isinstance(link, FunctionType):
        yield link
        link = vars(link).get("__wrapped__")


def _defined_in(function: FunctionType) -> str:
    """The module that has a function's code: `functools.wraps` tells another one."""
    return str(function.__globals__.get("__name__", ""))


def _counts(home: str, module: str, name: str, caller: str) -> bool:
    """Whether the code of a function of ``home`` is compared that a caller finds in ``module``.

    The user's own code is, and that of the caller's library. What another library has is not,
    unless it is in the place of a function of the caller's library.
    """
    if not is_installed(home):
        return True
    if _is_of_platform(caller) or _is_of_platform(home):
        return False
    if _package(home) == _package(caller):
        return True
    return _package(module) == _package(caller) and name in _names_defined_in(module)


def _is_of_platform(module: str) -> bool:
    return _package(module) in _PLATFORM


def _is_own(module: str) -> bool:
    return not is_installed(module)


def _package(module: str) -> str:
    return module.partition(".")[0]


def _told(module: str) -> str:
    """The name of a module that is the same on both sides, also for the user's script."""
    main = sys.modules[MAIN]
    if module == MAIN and main.__spec__ is not None:
        return main.__spec__.name
    return MAIN if module == SCRIPT else module


@cache
def _installed_folders() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [*map(sysconfig.get_path, names), *site.getsitepackages(), site.getusersitepackages()]
    return tuple(f"{Path(folder).resolve()}{os.sep}" for folder in folders)


@cache
def is_installed(module: str) -> bool:
    """Whether a module belongs to Python or to an installed library, and is no user's own file."""
    if module in (MAIN, SCRIPT) or module not in sys.modules:
        return False
    file = getattr(sys.modules[module], "__file__", None)
    if file is None:
        return True
    path = Path(file).resolve()
    depth = module.count(".") + (path.stem == "__init__")
    above = [*path.parents][depth : depth + 1]  # of another name than its place, it has none
    return str(path).startswith(_installed_folders()) or any(
        _package(module) in _libraries_in(folder) for folder in above
    )


@cache
def _libraries_in(folder: Path) -> frozenset[str]:
    """The libraries that were installed into a folder which is on the path for another reason, such
    as `PYTHONPATH`. The user's own code may lie beside them."""
    found = metadata.distributions(path=[str(folder)])
    files = (file for each in found for file in each.files or ())
    return frozenset(file.parts[0].removesuffix(".py") for file in files)


@cache
def _names_defined_in(module: str) -> frozenset[str]:
    """The names that the top level of a module's own code defines."""
    body = top_level_of(module)
    defined = (node.name for node in body if isinstance(node, ast.FunctionDef))
    targets = (t for node in body if isinstance(node, ast.Assign) for t in node.targets)
    return frozenset([*defined, *(t.id for t in targets if isinstance(t, ast.Name))])


def _numbers_in(function: FunctionType) -> list[str]:
    """The numbers that a function of the user's own has as defaults, or from the function that has
    made it; its code does not tell them."""
    if is_installed(_defined_in(function)):
        return []
    changed = {each.argval for each in get_instructions(function) if each.opname == "STORE_DEREF"}
    held = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    given: list[tuple[str, Any]] = [
        *((str(place), item) for place, item in enumerate(function.__defaults__ or ())),
        *(function.__kwdefaults__ or {}).items(),
        *((name, _content(cell)) for name, cell in held.items() if name not in changed),
    ]
    return [f"{name}={number!r}" for name, number in given if type(number) in (int, float)]


def _content(cell: CellType) -> Any:
    """What a variable of an outer function holds; None if it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """The functions of an attribute of a class."""
    if type(value) in _PLAIN:
        return iter(())
    if isinstance(value, property):
        found = [value.fget, value.fset]
    elif isinstance(value, (cached_property, partial, partialmethod)):
        found = [value.func]
    elif isinstance(value, (staticmethod, classmethod)):
        found = [value.__func__]
    elif isinstance(value, FunctionType):
        found = [value]
    else:
        # As `functools.lru_cache` keeps it.
        found = [inspect.getattr_static(value, "__wrapped__", None)]
    return (each for each in found if isinstance(each, FunctionType))


def _holder_of(value: Any) -> tuple[str, ...]:
    """What an object is that is called in the place of a function; nothing for a function."""
    kind = type(value)
    if isinstance(value, _ORDINARY) or not callable(value) or _is_of_platform(kind.__module__):
        return ()
    given = (*value.args, *value.keywords.items()) if isinstance(value, partial) else ()
    # What an object says of itself may have its address.
    numbers = [each for each in given if isinstance(each, (int, float, str, tuple))]
    said = [repr(each) for each in numbers if " at 0x" not in repr(each)]
    return (" ".join([f"an object of {kind.__module__}.{kind.__qualname__}", *said]),)


@cache
def _code_of(code: CodeType) -> _Code:
    lines = linecache.getlines(code.co_filename)
    source = textwrap.dedent("".join(lines[code.co_firstlineno - 1 : _last_line(code)]))
    if not source:
        # Made by `exec`, as dataclasses make theirs; that follows from what they are made of.
        return _Code("without source")
    try:
        (tree,) = ast.parse(source).body
    except (SyntaxError, ValueError):
        # A lambda, or the last lines of an expression are missing.
        return _Code(_digest([source.strip()]))
    unread = {id(each) for part in _not_run(tree) for each in ast.walk(part)}
    nodes = [node for node in ast.walk(tree) if id(node) not in unread]
    chains = frozenset(map(_chain, nodes)) - {()}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    stored = frozenset(node.attr for node in attributes if isinstance(node.ctx, ast.Store))
    named = frozenset(node.attr for node in attributes)
    rebound = frozenset(_set_outside(nodes))
    return _Code(_digest(_words(tree)), chains, named, stored, rebound, readings_in(nodes))


@cache
def _check_current(code: CodeType, file: str) -> None:
    """Refuse code whose file has been written meanwhile, and has other code in its place.

    It is looked at once, so that a program may be edited while it trains.

    Raises:
        ModelError: With the file and the remedy.
    """
    try:
        is_written = os.stat(file).st_mtime >= _BEGAN_SECONDS
        is_current = not is_written or _identity(code) in _codes_in(file)
    except (OSError, SyntaxError, ValueError):
        return  # It was not loaded from a file of code, or nobody can tell.
    if not is_current:
        raise ModelError(
            f"{file} has changed since this process has loaded it, so the process would compute "
            f"with an older {code.co_name!r}. Start it anew (a worker by its command)."
        )


@cache
def _codes_in(file: str) -> frozenset[tuple[Any, ...]]:
    """All code that a file has now."""
    left, found = [compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)], set()
    while left:
        code = left.pop()
        found.add(_identity(code))
        left += [each for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(found)


def _identity(code: CodeType) -> tuple[Any, ...]:
    """What tells a piece of code from others; the constants without code inside of it."""
    constants = [repr(each) for each in code.co_consts if not isinstance(each, CodeType)]
    return code.co_name, code.co_firstlineno, code.co_code, code.co_names, *constants


def _not_run(function: ast.stmt) -> Iterator[ast.AST]:
    """The decorators of a function, which have run already, and its annotations."""
    yield from getattr(function, "decorator_list", ())
    for node in ast.walk(function):
        found = (getattr(node, "annotation", None), getattr(node, "returns", None))
        yield from (each for each in found if each is not None)


def _last_line(code: CodeType) -> int:
    """The last line that has an instruction, in functions inside this one too."""
    inside = (_last_line(each) for each in code.co_consts if isinstance(each, CodeType))
    return max([*(line or 0 for _, _, line in code.co_lines()), *inside])


def _set_outside(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The names of globals that a function sets, and of those in which it sets something."""
    for node in nodes:
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
            holder: ast.expr = node
            while isinstance(holder, (ast.Attribute, ast.Subscript)):
                holder = holder.value
            if isinstance(holder, ast.Name):
                yield holder.id


def _digest(words: Iterable[str]) -> str:
    whole = hashlib.blake2b("\0".join(words).encode(), digest_size=_DIGEST_BYTES)
    return whole.hexdigest()


def _words(node: ast.AST) -> Iterator[str]:
    """A tree as words, the same for all versions of Python: `ast.dump` changes with them."""
    yield type(node).__name__
    for field, value in ast.iter_fields(node):
        if field in _SILENT_FIELDS or value is None or value == []:
            continue
        yield field
        values = value if isinstance(value, list) else [value]
        if field == "body" and _is_text(values[0]):
            values = values[1:]
        for each in values:
            if isinstance(each, ast.AST):
                yield from _words(each)
            else:
                yield repr(each)
    yield "end"


def _is_text(statement: object) -> bool:
    """Whether a statement is a docstring."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return False
    return isinstance(statement.value.value, str)


def _chain(node: ast.AST) -> tuple[str, ...]:
    """The words of a dotted name; none if the node is something else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else ()
