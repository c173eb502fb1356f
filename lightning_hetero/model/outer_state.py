"""State of the user's own code outside of modules: their attributes do not show its changes.

    globals · attributes of classes · enclosed variables · default arguments · the environment ·
    thread-local values

`outer_values` has the values read there by the text of layers; this file finds changes while code
runs, whoever makes them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

from torch import Tensor, nn

from .attributes import refill
from .installed import is_installed
from .placeholders import is_away
from .state import Same, Stamp

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_MOST_COMPARED = 100
_MOST_DEPTH = 3


def form_of(value: Any, depth: int = 0) -> Any:
    """The form of a value: it differs after a change, in place too; long containers give their
    length.

    A tensor counts by its identity and by how often it was changed.
    """
    if isinstance(value, _NUMBERS):
        return repr(value)
    if isinstance(value, Tensor):
        return Same(value) if is_away(value) else Stamp.of(value)
    if depth == _MOST_DEPTH:
        return Same(value)
    items: Iterable[Any]
    if isinstance(value, (list, tuple, deque)):
        items = value
    elif isinstance(value, Mapping):
        items = [part for pair in [*value.items()][: _MOST_COMPARED + 1] for part in pair]
    elif isinstance(value, (set, frozenset)):
        items = sorted(map(repr, value)) if len(value) <= _MOST_COMPARED else ()
    elif isinstance(value, FunctionType):
        items = [
            *(cell.cell_contents for cell in _full_cells(value)),
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
        ]
    elif is_dataclass(value) or isinstance(value, (SimpleNamespace, threading.local)):
        items = [part for pair in vars(value).items() for part in pair]
    else:
        return Same(value)
    # A class may have it for its objects alone.
    length = len(value) if hasattr(type(value), "__len__") else 0
    if length > _MOST_COMPARED:
        return length
    return type(value).__name__, length, [form_of(item, depth + 1) for item in items]


def _full_cells(function: FunctionType) -> list[CellType]:
    """The enclosed variables of a function, as far as they have a value."""
    return [cell for cell in function.__closure__ or () if cell != CellType()]


class OuterState:
    """The places outside of modules within reach of the user's own code.

    Args:
        modules: Their classes, and the files of these, are looked at.

    Attributes:
        kinds: The classes outside of libraries.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        kinds = {base for module in modules for base in type(module).__mro__}
        self.kinds = [kind for kind in kinds if not is_installed(kind.__module__)]
        names = sorted({kind.__module__ for kind in self.kinds})
        self._files = {name: vars(sys.modules[name]) for name in names if name in sys.modules}

    @property
    def files(self) -> Iterable[dict[str, Any]]:
        """The globals of each file."""
        return self._files.values()

    def look(self) -> Iterator[tuple[str, Any]]:
        """Each value there, with the place's name."""
        if not self._files:
            return
        for name, value in os.environ.items():
            yield f"os.environ[{name!r}]", value
        for file, content in self._files.items():
            for name, value in [*content.items()]:
                if not (name.startswith("__") or isinstance(value, type)):
                    yield f"{file}.{name}", value
        for kind in self.kinds:
            for name, value in [*vars(kind).items()]:
                if not name.startswith("__"):
                    yield f"{kind.__module__}.{kind.__qualname__}.{name}", value


class OuterContent:
    """The values outside of modules at one time, to be put back.

    Changes of other threads in these places are put back too: the author of a change is unknown.

    Args:
        state: The places.
    """

    def __init__(self, state: OuterState) -> None:
        self._state = state
        found = dict(state.look())
        self._forms = {name: form_of(value) for name, value in found.items()}
        self._contents = {name: _content_of(value) for name, value in found.items()}
        holders = [os.environ, *state.files] if found else []
        self._names = [(holder, {**holder}) for holder in holders]
        self._attributes = [(kind, {**vars(kind)}) for kind in state.kinds]

    def restore(self) -> list[str]:
        """Put back the changed values, and return the names of their places."""
        forms = {name: form_of(value) for name, value in self._state.look()}
        names = forms.keys() | self._forms.keys()
        changed = sorted(n for n in names if forms.get(n) != self._forms.get(n))
        if changed:
            for holder, content in self._names:
                _put_back(holder, content, holder.__setitem__, holder.__delitem__)
            for kind, content in self._attributes:
                _put_back(vars(kind), content, partial(setattr, kind), partial(delattr, kind))
            # Another thread may use the others just now.
            for put_back in filter(None, map(self._contents.get, changed)):
                put_back()
        return changed


def _content_of(value: Any) -> Callable[[], None] | None:
    """A function that puts back the content of a value; None if it cannot change in place."""
    if isinstance(value, (list, deque, dict, set)):
        return partial(refill, value, value.copy())
    if isinstance(value, FunctionType):
        return _content_of_function(value)
    if is_dataclass(value) or isinstance(value, (SimpleNamespace, threading.local)):
        return _content_of(vars(value))
    return None


def _content_of_function(function: FunctionType) -> Callable[[], None]:
    cells = [(cell, cell.cell_contents) for cell in _full_cells(function)]
    defaults = [*map(_content_of, function.__defaults__ or ())]

    def put_back() -> None:
        for cell, content in cells:
            cell.cell_contents = content
        for each in filter(None, defaults):
            each()

    return put_back


def _put_back(
    holder: Mapping[str, Any],
    content: Mapping[str, Any],
    put: Callable[[str, Any], None],
    drop: Callable[[str], None],
) -> None:
    for name, value in [*holder.items()]:
        if name not in content:
            drop(name)
        elif value is not content[name]:
            put(name, content[name])
