"""What the plain attributes of layers were, so that what has changed since is found quickly.

Nothing here knows which side it is on: the coordinator looks for what its user has changed, and a
worker for what a layer's own forward has. State in globals and in attributes of classes is not
seen.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from itertools import repeat
from operator import is_, itemgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from .attributes import MOST_DEPTH
from .blocks import BOOKKEEPING, CHECKPOINTING

# Under manual optimization the strategy puts a `zero_grad` over a layer's; no forward calls it.
_NOT_WATCHED = BOOKKEEPING | CHECKPOINTING | {"zero_grad"}
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_FIXED = (type, Enum, nn.Module)
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)

# What models, `generate` and users set at any time, and no layer computes with. How the experts of
# a mixture are multiplied is the worker's own choice.
_NOT_OF_LAYERS = frozenset(
    {
        *("_commit_hash", "_experts_implementation_internal", "_name_or_path", "architectures"),
        *("bos_token_id", "decoder_start_token_id", "eos_token_id", "id2label", "label2id"),
        *("output_hidden_states", "pad_token_id", "problem_type", "return_dict", "sep_token_id"),
        *("tie_word_embeddings", "transformers_version", "use_cache"),
    }
)

_MISSING = object()


class _Same:
    """Equal to what refers to the very same thing."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


def frozen(value: Any, around: tuple[int, ...] = ()) -> Any:
    """Something that stays as it is and is equal to what is made of the same content later.

    Tensors are told by their identity and by how often they were changed in place.
    """
    kind = type(value)
    if kind is float:
        return kind, value.hex()  # one that is not a number is equal to itself, and -0.0 to no 0.0
    if kind in _ATOMS:
        return kind, value
    if isinstance(value, Tensor):
        return _Same(value), 0 if value.is_inference() else value._version
    if isinstance(value, _FIXED) or inspect.isroutine(value):
        return _Same(value)
    is_record = is_dataclass(value) or isinstance(value, PretrainedConfig)
    # Of other objects the first one is looked into: behind the next may be all there is.
    is_known = is_record or isinstance(value, _CONTAINERS) or not around
    if not is_known or _is_ours(kind) or id(value) in around or len(around) > MOST_DEPTH:
        return _Same(value)
    around = (*around, id(value))
    if isinstance(value, dict):
        return (
            kind,
            _frozen_items([*value.keys()], around),
            _frozen_items([*value.values()], around),
        )
    if isinstance(value, (list, tuple, deque)):
        return kind, _frozen_items(value, around)
    if isinstance(value, (set, frozenset)):
        return kind, frozenset(frozen(item, around) for item in value)
    parts = sorted(_parts(value), key=itemgetter(0))
    content = tuple((name, frozen(item, around)) for name, item in parts)
    return (kind, content) if is_record else (_Same(value), content)


def _is_ours(kind: type) -> bool:
    """Whether it is what layers on workers have in the place of their forward, say."""
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def _frozen_items(items: Any, around: tuple[int, ...]) -> Any:
    kinds = tuple(map(type, items))
    if _ATOMS.issuperset(kinds):
        return kinds, tuple(items)
    return tuple(frozen(item, around) for item in items)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object."""
    for name, item in getattr(value, "__dict__", {}).items():
        if not (isinstance(value, PretrainedConfig) and name in _NOT_OF_LAYERS):
            yield name, item
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


@dataclass(frozen=True)
class Change:
    """Attributes of a module of a layer that are others than they were."""

    layer_index: int
    path: str
    module: nn.Module
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Watched:
    """A module, and its own attributes as they were: to compare quickly, and to compare rightly."""

    layer_index: int
    path: str
    module: nn.Module
    size: int
    names: tuple[str, ...]
    values: tuple[Any, ...]
    content: dict[str, Any]

    @property
    def is_same(self) -> bool:
        """Whether it has the very same attributes, whatever these may hold by now."""
        found = vars(self.module)
        return len(found) == self.size and all(
            map(is_, map(found.get, self.names, repeat(_MISSING)), self.values)
        )


class AttributeState:
    """The plain attributes of layers, and what has changed of them.

    Args:
        layers: By their numbers.
        is_watched: Whether a module among them is looked at.
    """

    def __init__(
        self, layers: Mapping[int, nn.Module], is_watched: Callable[[nn.Module], bool]
    ) -> None:
        self._modules = [
            (number, path, module)
            for number, layer in layers.items()
            for path, module in layer.named_modules()
            if is_watched(module)
        ]
        self.note()

    def note(self) -> None:
        """From now on changes are those of what is there at present."""
        memory: dict[int, tuple[Any, Any]] = {}
        self._watched = [_watched(*each, memory) for each in self._modules]
        # Each of the things that many modules share, such as a config, is looked into once.
        self._inside = [pair for pair in memory.values() if _may_change_inside(pair[0])]

    def take_changes(self) -> list[Change]:
        """What has changed, told once."""
        if all([each.is_same for each in self._watched]) and all(  # noqa: C419 - it is quicker
            [frozen(value) == before for value, before in self._inside]  # noqa: C419
        ):
            return []
        old = self._watched
        self.note()
        pairs = zip(old, self._watched, strict=True)
        changes = (_difference(before, now) for before, now in pairs)
        return [change for change in changes if change.names]


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module has besides torch's bookkeeping."""
    return {name: value for name, value in vars(module).items() if name not in _NOT_WATCHED}


def _watched(
    number: int, path: str, module: nn.Module, memory: dict[int, tuple[Any, Any]]
) -> _Watched:
    own = own_attributes(module)
    content = {}
    for name, value in own.items():
        if id(value) not in memory:
            memory[id(value)] = value, frozen(value)
        content[name] = memory[id(value)][1]
    size = len(vars(module))
    return _Watched(number, path, module, size, tuple(own), tuple(own.values()), content)


def _may_change_inside(value: Any) -> bool:
    is_fixed = type(value) in _ATOMS or isinstance(value, _FIXED) or inspect.isroutine(value)
    return not is_fixed


def _difference(before: _Watched, now: _Watched) -> Change:
    names = tuple(
        name
        for name in {**before.content, **now.content}
        if before.content.get(name, _MISSING) != now.content.get(name, _MISSING)
    )
    return Change(now.layer_index, now.path, now.module, names)


def differences(
    layers: Mapping[int, nn.Module],
    made: Mapping[int, nn.Module],
    is_watched: Callable[[nn.Module], bool],
) -> list[Change]:
    """What layers have of another value than layers that were made like them.

    Attributes that only one of both has are passed over, and so is the content of what is neither
    plain nor a function.
    """
    changes = []
    for number, layer in layers.items():
        twins = dict(made[number].named_modules(remove_duplicate=False))
        for path, module in layer.named_modules():
            if path in twins and is_watched(module):
                here, there = own_attributes(module), own_attributes(twins[path])
                common = (name for name in there if name in here)
                names = tuple(n for n in common if not _is_alike(here[n], there[n]))
                changes.append(Change(number, path, module, names))
    return [change for change in changes if change.names]


def _is_alike(here: Any, there: Any) -> bool:
    if type(here) is not type(there):
        return False
    return not _is_plain(here) or frozen(here) == frozen(there)


def _is_plain(value: Any, depth: int = 0) -> bool:
    def are_plain(items: Any) -> bool:
        return depth < MOST_DEPTH and all(_is_plain(item, depth + 1) for item in items)

    if isinstance(value, dict):
        return are_plain([*value.keys(), *value.values()])
    if isinstance(value, (list, tuple, set, frozenset)):
        return are_plain(value)
    if is_dataclass(value) and not isinstance(value, (type, PretrainedConfig)):
        return are_plain(vars(value).values() if hasattr(value, "__dict__") else ())
    if inspect.isbuiltin(value):
        # A method of an object is another one for each object.
        return isinstance(value.__self__, (ModuleType, type, type(None)))
    return type(value) in _ATOMS or isinstance(value, Enum) or inspect.isfunction(value)
