"""Values outside of layers, read by their code: globals, attributes of classes.

A worker imports the user's modules by itself and has the values of their text. It lacks values set
since by the training script (``blocks.SCALE = 2.0``, ``blocks.config.rope = False``).

    readings_in    the readings of a function, such as ``config.rope`` and ``TABLE["scale"]``
    OuterValue     one such value of the user's own modules, as text for comparison

Numbers and tensors always count. Other values count only if the text of the module or of the class
sets them: computed values may differ with the machine, such as whether there is a GPU.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from functools import cache
from importlib.util import resolve_name
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .allowed_imports import MAIN, SCRIPT
from .installed import is_installed, package_of
from .state import MISSING

_NUMBERS = frozenset({int, float, complex})
_WORDS = frozenset({type(None), bool, str, torch.dtype})
_LISTS = (list, tuple, set, frozenset)
# Calls of these do not depend on the machine.
_CONTAINERS = frozenset({"dict", "list", "tuple", "set", "frozenset", "SimpleNamespace"})
# Modules with attributes that differ between machines.
_OF_MACHINE = frozenset({"os", "platform", "sys"})
_DEVICES = ("cpu", "cuda", "mps", "xpu")
_MOST_CHARACTERS = 60
_MOST_ELEMENTS = 2**20
_DIGEST_BYTES = 8

Reading: TypeAlias = tuple[str | int, ...]
"""A name, and the attributes, keys or numbers that lead from there: ``("config", "rope")``."""


def told(module: str) -> str:
    """The name of a module, the same on both sides, also for the user's script."""
    main = sys.modules[MAIN]
    if module == MAIN and main.__spec__ is not None:
        return main.__spec__.name
    return MAIN if module == SCRIPT else module


def readings_in(nodes: Iterable[ast.AST]) -> frozenset[Reading]:
    """The readings of these nodes of a function, each as far as its text says where."""
    nodes = list(nodes)
    inside = {id(node.value) for node in nodes if _step(node) is not None}  # type: ignore[attr-defined]
    return frozenset(path for node in nodes if id(node) not in inside and (path := _path(node)))


def _step(node: ast.AST) -> str | int | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    key = getattr(getattr(node, "slice", None), "value", None)
    return key if isinstance(key, (str, int)) else None


def _path(node: Any) -> Reading:
    steps: list[str | int] = []
    while (step := _step(node)) is not None:
        steps.append(step)
        node = node.value
    return (node.id, *reversed(steps)) if isinstance(node, ast.Name) else ()


class OuterValue(NamedTuple):
    """A value outside of the layers.

    Args:
        place: Where it is, by names equal on both sides.
        name: Its name in a statement that sets it: a global, or an attribute with a dot.
        read: Gives its text; None if it does not count.
    """

    place: str
    name: str
    read: Callable[[], str | None]


class OuterValues:
    """Values as they were when the layers went to their workers.

    Args:
        values: The values read by the code of the layers.
    """

    def __init__(self, values: Iterable[OuterValue]) -> None:
        self._before = [(value, value.read()) for value in values]

    def changed(self) -> str | None:
        """The place of a changed value."""
        return next((v.place for v, before in self._before if v.read() != before), None)


def resolved(function: FunctionType, path: Any) -> tuple[str, dict[str, Any], Any]:
    """The module at the end of a function's path, its content, and the path in it."""
    module, content = str(function.__globals__.get("__name__", "")), function.__globals__
    while len(path) > 1 and isinstance(found := content.get(path[0]), ModuleType):
        module, content, path = found.__name__, vars(found), path[1:]
    return module, content, path


def global_value(
    caller: str, module: str, content: Mapping[str, Any], path: Any
) -> OuterValue | None:
    """The value at a path in a module; None if it does not count.

    The user's values count, and a library's constants if its own functions read them.

    Args:
        caller: The module of the reading function.
        module: The name of the module.
        content: The content of the module.
        path: The path there.
    """
    name, *inside = path
    is_constant = not inside and name.isupper() and package_of(module) == package_of(caller)
    if name not in content or not (is_constant if is_installed(caller) else _is_own(module)):
        return None

    def read() -> str | None:
        file, name_there = _imported_by(module).get(name, (module, name))
        value, is_set = content.get(name, MISSING), name_there in _set_in_module(file)
        for step in inside:
            if isinstance(value, (str, Tensor, FunctionType)):
                break  # The next step is a method of it.
            if isinstance(value, type) and not _is_own(value.__module__):
                return None
            is_set &= isinstance(step, int) or _may_be_set(value, step)
            value = _inside(value, step)
        return text_of(value, is_set and _is_own(module))

    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return OuterValue(f"{told(module)}{''.join(steps)}", name, read)


def class_value(owner: type, name: str, place: str) -> OuterValue:
    """An attribute of a class."""

    def read() -> str | None:
        return text_of(vars(owner).get(name, MISSING), name in _set_in_class(owner))

    return OuterValue(place, f".{name}", read)


def _is_own(module: str) -> bool:
    return not is_installed(module)


def _inside(holder: Any, step: Any) -> Any:
    """The value in an object at a step, without calls of the user's code."""
    try:
        if isinstance(step, int) or (isinstance(holder, Mapping) and step in holder):
            return holder[step] if isinstance(holder, (Mapping, list, tuple)) else MISSING
    except (LookupError, TypeError):
        return MISSING
    found = inspect.getattr_static(holder, step, MISSING)
    is_slot = inspect.ismemberdescriptor(found) and not isinstance(holder, type)
    return getattr(holder, step, MISSING) if is_slot else found


def _may_be_set(holder: Any, name: str) -> bool:
    """Whether a text may set an attribute of an object: a constructor may compute it."""
    kind = holder if isinstance(holder, type) else type(holder)
    own = [base for base in kind.__mro__ if _is_own(base.__module__)]
    return not own or any(name in _set_in_class(base) for base in own)


def text_of(value: Any, is_set: bool) -> str | None:
    """A value as text; None if it does not count.

    Args:
        value: The value.
        is_set: Whether the value is in a text, rather than computed.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if type(value) in _NUMBERS:
        return repr(value)
    if isinstance(value, Tensor):
        return _text_of_tensor(value)
    text = _text_of_word(value) if is_set else None
    if text is None or len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]}… ({digest_of([text])})"


def _text_of_word(value: Any) -> str | None:
    if type(value) in _WORDS:
        return None if isinstance(value, str) and value.startswith(_DEVICES) else repr(value)
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return f"the function {value.__name__}"
    items = [each for pair in value.items() for each in pair] if type(value) is dict else value
    # An empty container is filled while the program runs.
    if type(value) not in (dict, *_LISTS) or not value:
        return None
    texts = [text_of(each, is_set=True) for each in items]
    if isinstance(value, (set, frozenset)):
        texts.sort(key=str)
    listed = f"{type(value).__name__} of {', '.join(map(str, texts))}"
    return None if None in texts else listed


def _text_of_tensor(tensor: Tensor) -> str | None:
    """A few digits of it: functions of other machines differ in the last ones."""
    shape = f"a tensor of {list(tensor.shape)}"
    if tensor.is_meta or tensor.layout != torch.strided or tensor.numel() > _MOST_ELEMENTS:
        return shape
    with torch.no_grad():
        flat = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
        content = flat.cpu().double().flatten()
        weights = torch.arange(1.0, len(content) + 1, dtype=torch.float64).sin()
        return f"{shape} with {float(content.norm()):.3g} and {float(content @ weights):.3g}"


def digest_of(words: Iterable[str]) -> str:
    """A short text, different for other words."""
    return hashlib.blake2b("\0".join(words).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def text_of_module(module: str) -> str:
    """The text of a module; empty if it is not there."""
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return ""


@cache
def _imported_by(module: str) -> dict[str, tuple[str, str]]:
    """The names imported by a module: each with the other module's name, and its name there."""
    package = getattr(sys.modules.get(module), "__package__", None) or ""
    return {
        each.asname or each.name: (
            resolve_name(f"{'.' * node.level}{node.module or ''}", package),
            each.name,
        )
        for node in _statements_in(text_of_module(module))
        if isinstance(node, ast.ImportFrom) and (package or not node.level)
        for each in node.names
    }


@cache
def _set_in_module(module: str) -> frozenset[str]:
    """The names set once at the top level of a module, to values in its text."""
    return frozenset(_set_to_texts(_statements_in(text_of_module(module))))


@cache
def _set_in_class(kind: type) -> frozenset[str]:
    """The names set once in the body of a class, to values in its text."""
    try:
        (tree,) = _statements_in(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, ValueError):
        return frozenset()
    return frozenset(_set_to_texts(getattr(tree, "body", [])))


def _statements_in(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except SyntaxError:
        return []


def _set_to_texts(body: list[ast.stmt]) -> Iterator[str]:
    makers = _CONTAINERS | {node.name for node in body if isinstance(node, ast.ClassDef)}
    outside = [node for node in body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    all_set = [name for node in outside for part in ast.walk(node) for name in _targets(part)]
    for node in outside:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and _says_itself(node.value, makers):
            yield from (name for name in _targets(node) if all_set.count(name) == 1)


def _targets(node: ast.AST) -> list[str]:
    """The names set by a statement."""
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    names = (each for target in targets if target is not None for each in ast.walk(target))
    return [each.id for each in names if isinstance(each, ast.Name)]


def _says_itself(value: ast.expr | None, makers: Collection[str]) -> bool:
    """Whether an expression has the same value on every machine.

    Args:
        value: The expression.
        makers: The names of allowed calls.
    """
    nodes = [] if value is None else [*ast.walk(value)]
    known = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    names = [node for node in nodes if isinstance(node, ast.Name) and node.id not in makers]
    calls = [_path(node.func)[-1:] for node in nodes if isinstance(node, ast.Call)]
    return (
        value is not None
        and all(id(node) in known and node.id not in _OF_MACHINE for node in names)
        and all(each and each[0] in makers for each in calls)
    )
