"""The plain attributes of modules: find changes, send them to a worker, or undo them.

    ModuleState, differences       changes in the modules of layers
    write_change, set_attributes   changed attributes as text, and how a worker sets them
    unchanged, Attributes          the attributes of modules before their code ran, to be restored

The coordinator watches changes of the user; a worker watches changes of a layer's own forward.
Globals and attributes of classes are in `outer_values`.
"""

from __future__ import annotations

import inspect
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import partial
from itertools import islice
from operator import attrgetter, is_, itemgetter
from types import ModuleType
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..errors import ModelError
from .allowed_imports import Allowed, ImportPath
from .attribute_values import (
    BOOKKEEPING,
    CHECKPOINTING,
    META,
    MOST_CHARACTERS,
    MOST_DEPTH,
    NAMES_OF_TORCH,
    Found,
    Value,
    Written,
    is_loose,
    read_value,
    write_value,
)
from .plain_objects import is_computed, is_object, values_in
from .state import MISSING, Held, Same, Stamp, version_of

# Under manual optimization the strategy overrides a layer's `zero_grad`; no forward calls it.
_NOT_WATCHED = BOOKKEEPING | CHECKPOINTING | {"zero_grad"}
# Adapters and tensors in 4 bits have switches of their own, watched by `AdapterSwitches`.
_NOT_FOLLOWED = frozenset({"bitsandbytes", "peft"})
ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
"""The types whose values cannot change inside."""

_FIXED = (type, Enum, nn.Module)
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)

# Models, `generate` and users set these entries of a config at any time; no layer computes with
# them. The implementation of a mixture's experts is the worker's own choice.
_NOT_OF_LAYERS = frozenset(
    {
        *("_commit_hash", "_experts_implementation_internal", "_name_or_path", "architectures"),
        *("bos_token_id", "decoder_start_token_id", "eos_token_id", "id2label", "label2id"),
        *("output_hidden_states", "pad_token_id", "problem_type", "return_dict", "sep_token_id"),
        *("tie_word_embeddings", "transformers_version", "use_cache"),
    }
)

_IS_META = attrgetter("is_meta")
_Reader = Callable[[Any], tuple[Any, ...]]


def frozen(value: Any, around: tuple[int, ...] = (), looked_into: list[Any] | None = None) -> Any:
    """A snapshot of a value, equal to a later snapshot of the same content.

    A tensor's snapshot holds its identity and its number of in-place changes.

    Args:
        value: Anything.
        around: The ids of the containers around it.
        looked_into: Takes every tensor, container and object whose content counts.
    """
    looked_into = [] if looked_into is None else looked_into
    kind = type(value)
    if kind is float:
        return kind, value.hex()  # so that NaN equals itself, and -0.0 differs from 0.0
    if kind in ATOMS:
        return kind, value
    if isinstance(value, Tensor):
        looked_into.append(value)
        return kind, Stamp.of(value)
    if is_loose(value):
        looked_into.append(value)
        own = sorted(vars(value).items(), key=itemgetter(0))
        # Its results do not depend on its mode.
        return (
            Same(value),
            kind,
            tuple((n, frozen(v)) for n, v in own if type(v) in ATOMS and n != "training"),
        )
    if isinstance(value, _FIXED) or inspect.isroutine(value):
        return Same(value)
    is_record = is_dataclass(value) or isinstance(value, PretrainedConfig)
    # Of objects that cannot travel only the outermost is entered: the next may refer to the whole
    # program.
    is_known = is_record or isinstance(value, _CONTAINERS) or not around or _is_plain_object(value)
    if not is_known or _is_ours(kind) or id(value) in around or len(around) > MOST_DEPTH:
        return Same(value)
    around = (*around, id(value))
    looked_into.append(value)
    content: Any = ()
    if kind not in _CONTAINERS:  # a class of the user's, which may be one of containers
        parts = sorted(_parts(value), key=itemgetter(0))
        content = tuple((name, frozen(item, around, looked_into)) for name, item in parts)
    if isinstance(value, dict):
        keys = _frozen_items([*value.keys()], around, looked_into)
        return kind, keys, _frozen_items([*value.values()], around, looked_into), content
    if isinstance(value, (list, tuple, deque)):
        return kind, _frozen_items(value, around, looked_into), content
    if isinstance(value, (set, frozenset)):
        return kind, frozenset(frozen(item, around, looked_into) for item in value), content
    return (kind, content) if is_record else (Same(value), kind, content)


def _is_ours(kind: type) -> bool:
    """Whether a class is of this package, such as an override of a layer's forward."""
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def _is_plain_object(value: Any) -> bool:
    """Whether a value is an object, and a worker can have all its content too."""
    if not is_object(value):
        return False
    inside = islice(values_in(value), _MOST_ENTRIES)
    leaves = (each for each in inside if not is_object(each) and not inspect.isroutine(each))
    return all(type(each) in ATOMS or isinstance(each, (*_FIXED, *_CONTAINERS)) for each in leaves)


def _frozen_items(items: Any, around: tuple[int, ...], looked_into: list[Any]) -> Any:
    kinds = tuple(map(type, items))
    if ATOMS.issuperset(kinds):
        return kinds, tuple(items)
    return tuple(frozen(item, around, looked_into) for item in items)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object."""
    for name, item in getattr(value, "__dict__", {}).items():
        is_left_out = isinstance(value, PretrainedConfig) and name in _NOT_OF_LAYERS
        if not (is_left_out or is_computed(type(value), name)):
            yield name, item
    yield from _slots(value).items()


def _slots(value: Any) -> dict[str, Any]:
    """The attributes of an object outside of its ``__dict__``."""
    names = _slot_names(type(value))
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _slot_names(kind: type) -> tuple[str, ...]:
    found = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            # Python keeps a private attribute under a name that begins with its class's.
            is_private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


@dataclass(frozen=True)
class Change:
    """A change in a module of a layer.

    Args:
        layer_index: The number of the layer.
        path: The module's path in the layer.
        module: The module.
        names: The changed names.
        kind: Attributes, the class among them; names, if tensors were added or removed; tensors, if
            they were replaced; or children.
    """

    layer_index: int
    path: str
    module: nn.Module
    names: tuple[str, ...]
    kind: Literal["attributes", "names", "tensors", "children"] = "attributes"

    def name(self, layer: str = "") -> str:
        """The full name of the first of them, in a layer of this name."""
        return ".".join(part for part in (layer, self.path, self.names[0]) if part)


class Snapshot:
    """A value as it was at one time, for a later comparison.

    If every container in it has the very same items, the value is unchanged: this is found much
    sooner than by a comparison of contents.

    Attributes:
        content: A snapshot of the value.
        held: Each container, object and tensor in the value with a reader of its items, and the
            items; empty for a value that cannot change inside.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        looked_into: list[Any] = []
        self.content = frozen(value, (), looked_into)
        self.held = _items_in(looked_into)

    def is_same(self) -> bool:
        """Whether the content is as it was; asked again, the answer is the same."""
        if all([_are_same(read(thing), items) for thing, read, items in self.held]):  # noqa: C419
            return True
        looked_into: list[Any] = []
        if frozen(self._value, (), looked_into) != self.content:
            return False
        # Equal items have taken the places of others. The next comparison is quick again.
        self.held = _items_in(looked_into)
        return True


def _items_in(things: Sequence[Any]) -> list[tuple[Any, _Reader, tuple[Any, ...]]]:
    readers = ((thing, _reader_for(thing)) for thing in things)
    return [(thing, read, read(thing)) for thing, read in readers]


def _reader_for(thing: Any) -> _Reader:
    """A reader of the items of a container, an object or a tensor; other things in them are looked
    at apart.

    It is chosen once: the kind of a config of transformers takes long to find.
    """
    kind = type(thing)
    if isinstance(thing, Tensor):
        return lambda tensor: (type(tensor), version_of(tensor))
    if kind in _CONTAINERS:
        return _items_of_container
    of_object = partial(_items_of_object, _slot_names(kind))
    if isinstance(thing, _CONTAINERS):
        return lambda container: (*of_object(container), *_items_of_container(container))
    return of_object


def _items_of_container(container: Any) -> tuple[Any, ...]:
    if isinstance(container, dict):
        return (*container, *container.values())
    return tuple(container)


def _items_of_object(slots: Sequence[str], thing: Any) -> tuple[Any, ...]:
    named = getattr(thing, "__dict__", {})
    in_slots = (getattr(thing, name, MISSING) for name in slots)
    return (type(thing), *named, *named.values(), *in_slots)


def _are_same(items: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(items) == len(others) and all(map(is_, items, others))


_TABLES = ("_modules", "_parameters", "_buffers")


class _Seen:
    """A layer at one time.

    Args:
        modules: The modules in it by their paths.
        is_followed: Whether the attributes of a module count.
        are_held: Whether its tensors count; None if parts of modules do not.
        memory: Snapshots of values of attributes, by the values' ids; takes the values of this
            layer.

    Attributes:
        content: The exactly compared content, by path, kind and name.
        inside: The values with changeable content, each once.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        is_followed: Callable[[nn.Module], bool],
        are_held: bool | None,
        memory: dict[int, Snapshot],
    ) -> None:
        self.content: dict[tuple[str, Any, str], Any] = {}
        self.inside: dict[int, Snapshot] = {}
        self._modules = [*modules.values()]
        self._kinds = [*map(type, self._modules)]
        # Dictionaries that cannot grow, and the place of each object in them.
        whole: list[dict[str, Any]] = []
        places: list[tuple[dict[str, Any], str, Any]] = []
        tables: list[dict[str, Any]] = []
        parts: list[tuple[dict[str, Any], str, Any]] = []
        self._tensors: list[Tensor] = []
        for path, module in modules.items():
            self.content[path, "attributes", "__class__"] = type(module)
            if is_followed(module):
                whole.append(vars(module))
                for name, value in own_attributes(module).items():
                    found = memory.get(id(value)) or memory.setdefault(id(value), Snapshot(value))
                    self.content[path, "attributes", name] = found.content
                    places.append((vars(module), name, value))
                    if found.held:
                        self.inside[id(value)] = found
            for kind in _TABLES if are_held is not None else ():
                table = vars(module)[kind]
                tables.append(table)
                parts += [(vars(module), kind, table), *((table, *each) for each in table.items())]
                for name, part in table.items():
                    if kind == "_modules":
                        self.content[path, "children", name] = Same(part)
                        continue
                    self.content[path, "names", name] = None
                    if are_held and part is not None:
                        self.content[path, "tensors", name] = Same(part), part.is_meta
                        self._tensors.append(part)
        self._attributes, self._parts = Held(places, whole), Held(parts, tables)

    def has_same_attributes(self) -> bool:
        """Whether classes and attributes are the same objects; their content may have changed."""
        return all(map(is_, map(type, self._modules), self._kinds)) and self._attributes.is_same()

    def is_same(self) -> bool:
        """Whether all are the same objects; their content may have changed."""
        if not self._tensors:
            return self.has_same_attributes() and self._parts.is_same()
        with torch._C.DisableTorchFunctionSubclass():  # otherwise `is_meta` is slow
            are_away = all(map(_IS_META, self._tensors))
        return are_away and self.has_same_attributes() and self._parts.is_same()


class ModuleState:
    """The modules of layers at one time: their classes, attributes and parts.

    One look at a layer serves all readers of its changes, to refuse or to send them.

    Args:
        layers: The layers by their numbers.
        is_followed: Whether the attributes of a module inside a layer count.
        emptied: The numbers of the layers with tensors on ``meta``: these must stay; of the other
            layers only the names of tensors count, and children. None if parts do not count.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        is_followed: Callable[[nn.Module], bool],
        emptied: Collection[int] | None = None,
    ) -> None:
        self._modules = {number: dict(layer.named_modules()) for number, layer in layers.items()}
        self._is_followed = is_followed
        self._emptied = emptied
        self.note()

    def note(self) -> None:
        """Note the present state; `changes` compares with it."""
        self._seen = self._look()
        inside = {key: part for seen in self._seen.values() for key, part in seen.inside.items()}
        self._parts: list[_Seen | Snapshot] = [*self._seen.values(), *inside.values()]

    def _look(self) -> dict[int, _Seen]:
        memory: dict[int, Snapshot] = {}
        emptied = self._emptied
        return {
            n: _Seen(each, self._is_followed, None if emptied is None else n in emptied, memory)
            for n, each in self._modules.items()
        }

    def is_same(self) -> bool:
        """Whether all layers are as they were."""
        return all([each.is_same() for each in self._parts])  # noqa: C419 - a list is faster

    def has_same_attributes(self, layer_index: int) -> bool:
        """Whether the attributes of one layer, and the classes in it, are as they were."""
        seen = self._seen[layer_index]
        inside = [each.is_same() for each in seen.inside.values()]
        return seen.has_same_attributes() and all(inside)

    def changes(self) -> list[Change]:
        """The changes since `note`."""
        names: dict[tuple[int, str, Any], list[str]] = {}
        for number, present in {} if self.is_same() else self._look().items():
            now, before = present.content, self._seen[number].content
            for key in {**before, **now}:
                if now.get(key, MISSING) != before.get(key, MISSING):
                    path, kind, name = key
                    names.setdefault((number, path, kind), []).append(name)
        return [
            Change(number, path, self._modules[number][path], tuple(found), kind)
            for (number, path, kind), found in names.items()
        ]

    def take_changes(self) -> list[Change]:
        """The changes. If all are changes of attributes, they count as seen from now on."""
        if self.is_same():
            return []
        found = self.changes()
        if all(each.kind == "attributes" for each in found):
            self.note()
        return found


def is_followed(module: nn.Module) -> bool:
    """Whether workers follow changes of a module's attributes."""
    return type(module).__module__.partition(".")[0] not in _NOT_FOLLOWED


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module without torch's bookkeeping and cached properties."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _NOT_WATCHED and not is_computed(type(module), name)
    }


def differences(
    layers: Mapping[int, nn.Module],
    made: Mapping[int, nn.Module],
    is_watched: Callable[[nn.Module], bool],
) -> list[Change]:
    """The attributes of layers whose values differ from those of rebuilt layers.

    An attribute of only one of the two layers is skipped. Values other than plain data and
    functions are compared by their classes only.
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
        # A built-in method differs from object to object.
        return isinstance(value.__self__, (ModuleType, type, type(None)))
    return type(value) in ATOMS or isinstance(value, Enum) or inspect.isfunction(value)


def write_change(change: Change, layer_name: str) -> tuple[str, list[str]]:
    """Encode a change for a worker.

    Returns:
        The new values as text, and the names of deleted attributes.

    Raises:
        ModelError: If a worker cannot or must not set an attribute; the text names it.
    """
    where = f"{layer_name}.{change.path}".rstrip(".")
    here, paths, before = vars(change.module), set[ImportPath](), Written()
    for name in change.names:
        if reason := _reason_to_refuse(change.module, name):
            raise ModelError(
                f"The attribute {where}.{name} was changed while its layer is on a worker, which "
                f"must not set it: {reason}. Change it before `fit`, or keep the layer with the "
                "coordinator."
            )
    values = {name: here[name] for name in change.names if name in here}
    try:
        written = {
            n: write_value(v, f"The attribute {where}.{n}", paths, change.module, written=before)
            for n, v in values.items()
        }
    except (TypeError, ValueError) as error:  # a config with a value that JSON lacks
        raise ModelError(
            f"The attributes {sorted(values)} of {where} were changed while its layer is on a "
            f"worker, and cannot be sent: {error}. Keep the layer with the coordinator."
        ) from error
    text = msgspec.json.encode(written).decode()
    if len(text) > MOST_CHARACTERS:
        raise ModelError(
            f"The attributes {sorted(values)} of {where} take {len(text)} characters, and a worker "
            f"takes at most {MOST_CHARACTERS}. Register large values as buffers."
        )
    return text, [name for name in change.names if name not in here]


def set_attributes(
    module: nn.Module,
    text: str,
    gone: Collection[str],
    allowed: Allowed,
    device: torch.device = META,
) -> None:
    """Decode the text of `write_change` and apply it to a module of a layer on ``device``.

    Raises:
        ModelError: If the text cannot be decoded, or an attribute must not be set here.
    """
    try:
        written = msgspec.json.decode(text, type=dict[str, Value])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(f"Changed attributes cannot be read: {error}.") from error
    for name in (*written, *gone):
        if reason := _reason_to_refuse(module, name):
            raise ModelError(
                f"The attribute {name!r} of a {type(module).__name__} is not set here: {reason}."
            )
    found = Found()
    values = {n: read_value(v, allowed, module, 0, device, found) for n, v in written.items()}
    own = vars(module)
    for name, value in values.items():
        if isinstance(value, PretrainedConfig) and isinstance(own.get(name), PretrainedConfig):
            # The text lacks this entry, since it is the worker's own choice.
            value._experts_implementation = own[name]._experts_implementation
        own[name] = value
    for name in gone:
        own.pop(name, None)


def _reason_to_refuse(module: nn.Module, name: str) -> str:
    """Why an attribute must not be set on request of a peer; empty if it may."""
    if not name or "." in name or (name.startswith("__") and name.endswith("__")):
        return "it is not an ordinary name"
    if name in NAMES_OF_TORCH:
        return f"nn.Module.{name} is torch's own"
    if any(name in kept for kept in (module._parameters, module._buffers, module._modules)):
        return "it is the name of a tensor or of a child"
    hidden = getattr(type(module), name, None)
    if callable(hidden) or hasattr(hidden, "__get__"):
        return f"it would hide a method or a property of {type(module).__name__}"
    return ""


# Containers that a module may change in place.
_KEPT_CONTAINERS = (dict, list, set, deque)
# Longer containers hold data: they get their entries back, but the entries are not entered.
_MOST_ENTRIES = 10_000
_MOST_DEPTH = 8


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the attributes of modules at the end of the block, after their code ran."""
    before = Attributes(list(modules))
    try:
        with contents_kept(before.tensors):
            yield
    finally:
        before.restore()


@contextmanager
def contents_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the content of tensors after changes in place by the block."""
    copies = [(Stamp.of(tensor), tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for stamp, content in copies:
                # A graph may have saved a tensor that did not change, so it must not be written.
                # Versions are not enough: torch does not count its updates of a norm's statistics.
                if stamp.has_changed or not torch.equal(stamp.tensor, content):
                    stamp.tensor.copy_(content)


class Attributes:
    """The attributes of modules at one time, with the content of containers and objects in them.

    Args:
        modules: The modules; children outside of this list are skipped.

    Attributes:
        tensors: The tensors in the attributes, without parameters. Their content is not copied.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.tensors: list[Tensor] = []
        self._undo: list[Callable[[], None]] = []
        self._undo_draws: list[Callable[[], None]] = []
        # References keep the objects alive, so that no new object gets one of these ids.
        self._seen: dict[int, Any] = {}
        classes = {each for module in modules for each in type(module).__mro__}
        self._packages = {_package_of(each) for each in classes} - _NOT_ENTERED
        for each in classes:
            if _package_of(each) in self._packages:
                self._note_class(each)
        for module in modules:
            self._note_items(vars(module), 0)

    @property
    def has_generators(self) -> bool:
        """Whether there are random generators in them."""
        return bool(self._undo_draws)

    def restore(self, *, with_generators: bool = True) -> None:
        """Restore everything but the content of tensors, any number of times.

        Args:
            with_generators: Whether to restore random generators too.
        """
        for undo in reversed(self._undo):
            undo()
        for undo in self._undo_draws if with_generators else ():
            undo()

    def _note_class(self, owner: type) -> None:
        """Note the attributes of a class. New ones are not removed later: they may be caches."""
        content = {name: item for name, item in vars(owner).items() if not name.startswith("__")}
        self._undo.append(partial(_reassign, owner, content))
        for value in content.values():
            self._note(value, 0)

    def _note(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or depth > _MOST_DEPTH or isinstance(value, nn.Module):
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            if not value.is_meta and not isinstance(value, nn.Parameter):
                self.tensors.append(value)
        elif isinstance(value, (*_KEPT_CONTAINERS, tuple)):
            self._note_items(value, depth + 1)
        elif (undo := restoring_generator(value)) is not None:
            self._undo_draws.append(undo)
        elif not isinstance(value, type) and self._is_of_the_user(value):
            self._note_items(vars(value), depth + 1)

    def _is_of_the_user(self, value: Any) -> bool:
        return _package_of(type(value)) in self._packages and hasattr(value, "__dict__")

    def _note_items(self, container: Any, depth: int) -> None:
        """Note the items of a container, or the attributes in an object's ``__dict__``."""
        content: Any = dict(container) if isinstance(container, dict) else list(container)
        if not isinstance(container, tuple):
            self._undo.append(partial(refill, container, content))
        if len(content) <= _MOST_ENTRIES:
            for item in content.values() if isinstance(content, dict) else content:
                self._note(item, depth)


# Objects of these packages are not entered: they may be a part of the run.
_NOT_ENTERED = frozenset(
    {"builtins", "lightning", "lightning_fabric", "lightning_hetero", "pytorch_lightning", "torch"}
)


def _package_of(thing: type) -> str:
    return thing.__module__.partition(".")[0]


def _reassign(owner: type, content: Mapping[str, Any]) -> None:
    for name, value in content.items():
        if vars(owner).get(name) is not value:
            setattr(owner, name, value)


def refill(container: Any, content: Any) -> None:
    """Give a list, a dictionary or a set its former content, if it has another one."""
    if _are_same(_items_of_container(container), _items_of_container(content)):
        return
    container.clear()
    if isinstance(container, dict):
        for key, value in content.items():  # outputs of transformers refuse `update`
            container[key] = value
    elif isinstance(container, set):
        container.update(content)
    else:
        container.extend(content)


def restoring_generator(value: Any) -> Callable[[], Any] | None:
    """A function that restores a random generator's present state; None for other values."""
    generator: Any = value
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        return partial(generator.set_state, generator.get_state())
    if isinstance(value, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(value, np.random.Generator):
        bits = generator.bit_generator
        return partial(setattr, bits, "state", bits.state)
    return None
