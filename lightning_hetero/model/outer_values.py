"""The values that the code of layers reads from outside of them: globals, attributes of classes.

A worker imports the user's modules by itself and has what their text says. What the training
script has set since (``blocks.SCALE = 2.0``, ``blocks.config.rope = False``) it does not have.

    readings_in    what a function reads, such as ``config.rope`` and ``TABLE["scale"]``
    OuterValue   one such value of the user's own modules, as text that both sides can compare

Numbers and tensors always count. Of the rest counts only what the text of the module or of the
class sets: what it computes may differ with the machine, such as whether there is a GPU.
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

_MISSING = object()
_NUMBERS = frozenset({int, float, complex})
_WORDS = frozenset({type(None), bool, str, torch.dtype})
_LISTS = frozenset({list, tuple, set, frozenset})
# Calls of these compute nothing of the machine.
_CONTAINERS = frozenset({"dict", "list", "tuple", "set", "frozenset", "SimpleNamespace"})
# Modules with attributes that differ between machines.
_OF_MACHINE = frozenset({"os", "platform", "sys"})
_DEVICES = ("cpu", "cuda", "mps", "xpu")
_MOST_CHARACTERS = 60
_MOST_ELEMENTS = 2**20


class Item(NamedTuple):
    """A step of a path that is no attribute: ``["scale"]``."""

    key: str | int

    def __str__(self) -> str:
        return f"[{self.key!r}]"


# Such as ``("config", "rope")``.
Reading: TypeAlias = tuple[str | Item, ...]


def readings_in(nodes: Iterable[ast.AST]) -> frozenset[Reading]:
    """What these nodes of a function read, each as far as its text says where."""
    nodes = list(nodes)
    inside = {id(node.value) for node in nodes if _step(node) is not None}  # type: ignore[attr-defined]
    return frozenset(path for node in nodes if id(node) not in inside and (path := _path(node)))


def _step(node: ast.AST) -> str | Item | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return Item(node.slice.value) if isinstance(node.slice.value, (str, int)) else None
    return None


def _path(node: Any) -> Reading:
    steps: list[str | Item] = []
    while (step := _step(node)) is not None:
        steps.append(step)
        node = node.value
    return (node.id, *reversed(steps)) if isinstance(node, ast.Name) else ()


class OuterValue(NamedTuple):
    """A value outside of the layers.

    Args:
        place: Where it is, by names that are the same on both sides.
        read: Gives its text; None if it does not count.
    """

    place: str
    read: Callable[[], str | None]


class OuterValues:
    """Values as they were when the layers went to their workers.

    Args:
        values: Those that the code of the layers reads.
    """

    def __init__(self, values: Iterable[OuterValue]) -> None:
        self._before = [(value, value.read()) for value in values]

    def changed(self) -> str | None:
        """The place of a value that is another one now."""
        return next((v.place for v, before in self._before if v.read() != before), None)


def global_value(
    function: FunctionType, path: Reading, is_own: Callable[[str], bool], told: Callable[[str], str]
) -> OuterValue | None:
    """The value at a path that a function of the user's own reads; None if it is not the user's.

    Args:
        function: Reads it.
        path: Begins with a name of the function's module.
        is_own: Whether a module of this name is the user's own.
        told: The name of a module that is the same on both sides.
    """
    module, content = str(function.__globals__.get("__name__", "")), function.__globals__
    while len(path) > 1 and isinstance(found := content.get(str(path[0])), ModuleType):
        module, content, path = found.__name__, vars(found), path[1:]
    name = str(path[0])
    if name not in content or not is_own(module):
        return None

    def read() -> str | None:
        home, name_there = _imported_by(module).get(name, (module, name))
        value, is_set = content.get(name, _MISSING), name_there in _set_in_module(home)
        for step in path[1:]:
            if isinstance(value, (str, torch.Tensor, FunctionType)):
                break  # What follows is a method of it.
            if isinstance(value, type) and not is_own(value.__module__):
                return None
            if isinstance(step, str):
                is_set &= _may_be_set(value, step, is_own)
            value = _inside(value, step)
        return text_of(value, is_set)

    steps = "".join(str(each) if isinstance(each, Item) else f".{each}" for each in path)
    return OuterValue(f"{told(module)}{steps}", read)


def class_value(owner: type, name: str, place: str) -> OuterValue:
    """An attribute of a class of the user's own."""

    def read() -> str | None:
        return text_of(vars(owner).get(name, _MISSING), name in _set_in_class(owner))

    return OuterValue(place, read)


def _inside(holder: Any, step: str | Item) -> Any:
    """What an object has, without calling the user's code."""
    try:
        if isinstance(step, Item):
            content: Any = holder if isinstance(holder, (Mapping, list, tuple)) else {}
            return content[step.key]
        if isinstance(holder, Mapping) and step in holder:
            return holder[step]
    except (LookupError, TypeError):
        return _MISSING
    found = inspect.getattr_static(holder, step, _MISSING)
    is_slot = inspect.ismemberdescriptor(found) and not isinstance(holder, type)
    return getattr(holder, step, _MISSING) if is_slot else found


def _may_be_set(holder: Any, name: str, is_own: Callable[[str], bool]) -> bool:
    """Whether a text may say what an object has under a name: a constructor may compute it."""
    kind = holder if isinstance(holder, type) else type(holder)
    own = [base for base in kind.__mro__ if is_own(base.__module__)]
    return not own or any(name in _set_in_class(base) for base in own)


def text_of(value: Any, is_set: bool) -> str | None:
    """A value as text; None if it does not count.

    Args:
        value: The value.
        is_set: Whether a text says it, and no computation.
    """
    if isinstance(value, (np.number, np.bool_)):
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
    return (
        f"{text[:_MOST_CHARACTERS]}… ({hashlib.blake2b(text.encode(), digest_size=4).hexdigest()})"
    )


def _text_of_word(value: Any) -> str | None:
    if type(value) in _WORDS:
        return None if isinstance(value, str) and value.startswith(_DEVICES) else repr(value)
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return f"the function {value.__name__}"
    items: list[Any] = []
    if type(value) is dict:
        items = [each for pair in value.items() for each in pair]
    elif type(value) in _LISTS:
        items = [*value]
    texts = [text_of(each, is_set=True) for each in items]
    # What is empty is filled while the program runs.
    if not texts or None in texts:
        return None
    if isinstance(value, (set, frozenset)):
        texts.sort(key=str)
    return f"{type(value).__name__} of {', '.join(map(str, texts))}"


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


def top_level_of(module: str) -> list[ast.stmt]:
    """The statements of a module's own code; none if its text is not there."""
    try:
        return ast.parse(inspect.getsource(sys.modules[module])).body
    except (KeyError, OSError, TypeError, SyntaxError):
        return []


@cache
def _set_in_module(module: str) -> frozenset[str]:
    """The names that the top level of a module sets once, to what its text says."""
    body = top_level_of(module)
    classes = {node.name for node in body if isinstance(node, ast.ClassDef)}
    outside = [node for node in body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    others = (part for node in outside for part in ast.walk(node))
    all_set = [name for node in others for name in _targets(node)]
    found = _set_to_texts(body, classes | _CONTAINERS)
    return frozenset(name for name in found if all_set.count(name) == 1)


@cache
def _imported_by(module: str) -> dict[str, tuple[str, str]]:
    """The names that a module takes from others: each with the other's name, and its name there."""
    package = getattr(sys.modules.get(module), "__package__", None) or ""
    found: dict[str, tuple[str, str]] = {}
    for node in top_level_of(module):
        if isinstance(node, ast.ImportFrom):
            try:
                home = resolve_name(f"{'.' * node.level}{node.module or ''}", package)
            except ImportError:
                continue
            found |= {each.asname or each.name: (home, each.name) for each in node.names}
    return found


@cache
def _set_in_class(kind: type) -> frozenset[str]:
    """The names that the body of a class sets to what its text says."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return frozenset()
    return frozenset(_set_to_texts(getattr(tree, "body", []), _CONTAINERS))


def _set_to_texts(body: list[ast.stmt], makers: Collection[str]) -> set[str]:
    statements = [node for node in body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    return {
        name
        for node in statements
        if node.value is not None and _says_itself(node.value, makers)
        for name in _targets(node)
    }


def _targets(node: ast.AST) -> Iterator[str]:
    """The names that a statement sets."""
    found: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        found = node.targets
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        found = [node.target]
    names = (each for target in found for each in ast.walk(target))
    yield from (each.id for each in names if isinstance(each, ast.Name))


def _says_itself(value: ast.expr, makers: Collection[str]) -> bool:
    """Whether an expression has the same value on every machine.

    Args:
        value: The expression.
        makers: The names of what it may call.
    """
    nodes = [*ast.walk(value)]
    named = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id not in makers:
            if id(node) not in named or node.id in _OF_MACHINE:
                return False
        elif isinstance(node, ast.Call):
            steps = _path(node.func)
            if not steps or steps[-1] not in makers:
                return False
    return True
