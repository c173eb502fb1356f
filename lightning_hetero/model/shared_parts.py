"""Copies of shared parts of layers on workers, such as a rotary table.

A rotary table or a frozen module is often one object in many layers. Until `restore`, each layer on
a worker has a copy of its own:

    layers.3.rotary ─┐                        layers.3.rotary   a copy, on worker 1
    layers.7.rotary ─┼─ one module   ─▶       layers.7.rotary   a copy, on worker 2
    rotary          ─┘                        rotary            the module itself, here

The copies are right as long as they and the originals do not change: `check` refuses a change here,
and a worker refuses a forward that changes one of `names`. Shared parts that train are not copied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError
from .attributes import ModuleState
from .layers import DecoderLayer, identity_of, name_of, overlapping
from .partial_layers import in_tree
from .state import Stamp
from .stored import format_of


@dataclass
class _Original:
    """A copied tensor: its place, and its content until `check` first looks at it."""

    owner: nn.Module
    leaf: str
    content: Tensor | None
    seen: Stamp | None = None

    @property
    def tensor(self) -> Tensor | None:
        found = self.owner._buffers.get(self.leaf)
        return self.owner._parameters.get(self.leaf) if found is None else found

    def is_as_copied(self) -> bool:
        """Whether it still has the content of the copies, and does not train."""
        tensor = self.tensor
        if tensor is None or tensor.requires_grad:
            return False
        if self.content is not None:
            # The first time: it may have moved to its device since.
            if not torch.equal(tensor.detach().to(self.content), self.content):
                return False
            self.seen, self.content = Stamp.of(tensor), None
        return self.seen is not None and not self.seen.differs(tensor)


class SharedParts:
    """Copies of parts shared by stages, in the places of the originals.

    Args:
        root: The LightningModule.
        stages: The layers of each stage on workers, by their numbers.

    Attributes:
        names: The names of the copied tensors on the workers. A buffer in the memory of another one
            counts too: a worker has it apart.
    """

    def __init__(self, root: nn.Module, stages: Sequence[Mapping[int, DecoderLayer]]) -> None:
        self.names: set[str] = set()
        self._root = root
        self._undo = ExitStack()
        self._originals: dict[tuple[int, str], _Original] = {}
        modules: dict[int, nn.Module] = {}
        places = _Places(root, stages)
        before = [*root.parameters()]
        for stage in stages:
            for number, layer in stage.items():
                own = _OwnCopies(places)
                for put in own.replacements(layer.module):
                    self._undo.callback(put())
                self.names |= {f"{number}.{name}" for name in own.names(layer.module)}
                tensors = dict(layer.module.named_buffers(remove_duplicate=False))
                self.names |= {f"{number}.{n}" for pair in overlapping(tensors) for n in pair}
                for original in own.originals:
                    self._originals.setdefault((id(original.owner), original.leaf), original)
                    modules[id(original.owner)] = original.owner
        self._attributes = ModuleState(dict(enumerate(modules.values())), lambda _: True)
        self._check_order(before)

    def _check_order(self, before: Sequence[nn.Parameter]) -> None:
        """Refuse copies if they change the order of parameters: optimizers number them by it."""
        now = [*self._root.parameters()]
        if len(now) == len(before) and all(map(is_, now, before)):
            return
        missing = next((p for p in before if not any(p is other for other in now)), before[0])
        self.restore()
        name = next(name for name, p in self._root.named_parameters() if p is missing)
        raise ModelError(
            f"The frozen parameter {name} is shared by layers on workers. Assign its module to the "
            "LightningModule too, before the layers, so that the order of parameters stays."
        )

    def check(self) -> None:
        """Refuse a change of copied parts: the layers on workers would not get it.

        Raises:
            ModelError: With the name of the changed part.
        """
        for original in self._originals.values():
            if not original.is_as_copied():
                raise self._changed(original.owner, original.leaf)
        for change in self._attributes.changes() if self._originals else ():
            raise self._changed(change.module, change.names[0])

    def _changed(self, owner: nn.Module, name: str) -> ModelError:
        where = f"{name_of(self._root, owner)}.{name}".strip(".")
        return ModelError(
            f"{where} was changed, or trains now, while layers on workers have copies of it. "
            "Change it before `fit`, or keep the layers that share it with the coordinator."
        )

    def restore(self) -> None:
        """Put the originals back."""
        self._undo.close()
        self._originals.clear()


class _Places:
    """Where the modules and tensors of a LightningModule are: in stages, by their numbers, or here
    (None).

    Args:
        root: The LightningModule.
        stages: The layers of each stage on workers, by their numbers.
    """

    def __init__(self, root: nn.Module, stages: Sequence[Mapping[int, DecoderLayer]]) -> None:
        self._of_modules: dict[nn.Module, set[int | None]] = defaultdict(set)
        self._of_tensors: dict[Hashable, set[int | None]] = defaultdict(set)
        self._held_here: dict[Hashable, tuple[nn.Module, str]] = {}
        layers = [layer.module for stage in stages for layer in stage.values()]
        # A half has children of the user's layer, which stands in the tree.
        self._away = {module for layer in layers for module in in_tree(layer)}
        self._note(root, None)
        for number, stage in enumerate(stages):
            for layer in stage.values():
                for module in in_tree(layer.module):
                    self._note(module, number)

    def _note(self, module: nn.Module, place: int | None) -> None:
        self._of_modules[module].add(place)
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                self._of_tensors[identity_of(tensor)].add(place)
                if place is None:
                    self._held_here[identity_of(tensor)] = module, leaf
        for child in module._modules.values():
            if child is not None and child not in self._away:
                self._note(child, place)

    def is_shared(self, module: nn.Module) -> bool:
        """Whether a module is in several places."""
        return len(self._of_modules[module]) > 1

    def is_shared_buffer(self, buffer: Tensor | None) -> bool:
        """Whether a buffer of this process is in several places."""
        if buffer is None or buffer.is_meta:
            return False
        return len(self._of_tensors[identity_of(buffer)]) > 1

    def holder_here(self, tensor: Tensor) -> tuple[nn.Module, str] | None:
        """A module here with a tensor, and the tensor's name in it."""
        return self._held_here.get(identity_of(tensor))


class _OwnCopies:
    """The copies of one layer.

    Args:
        places: Where everything is.

    Attributes:
        originals: The copied tensors, as far as something here may change them.
    """

    def __init__(self, places: _Places) -> None:
        self._places = places
        self._copies: dict[nn.Module, nn.Module] = {}
        self._tensors: dict[Tensor, Tensor] = {}
        self.originals: list[_Original] = []

    def replacements(self, module: nn.Module) -> Iterator[Callable[[], Callable[[], Any]]]:
        """Functions that put copies in the places of a module's shared parts; each returns a
        function that undoes it."""
        for name, buffer in list(module._buffers.items()):
            is_shared = self._places.is_shared_buffer(buffer) and not _is_norm(module)
            if buffer is not None and is_shared:
                holder = self._places.holder_here(buffer)
                yield partial(_put, module._buffers, name, self._copied(buffer, holder))
        for name, child in list(module._modules.items()):
            if child is None:
                continue
            if not self._places.is_shared(child):
                yield from self.replacements(child)
            elif all(map(_may_be_copied, child.modules())):
                yield partial(_put, module._modules, name, self._copy(child))

    def names(self, layer: nn.Module) -> Iterator[str]:
        """The names of the copied tensors in the layer."""
        copies = set(self._tensors.values())
        for name, buffer in layer.named_buffers(remove_duplicate=False):
            if buffer in copies:
                yield name

    def _copied(self, tensor: Tensor, holder: tuple[nn.Module, str] | None) -> Tensor:
        """A copy of a tensor; the original is watched if a module here has it."""
        if holder is not None:
            self.originals.append(_Original(*holder, tensor.detach().clone()))
        return self._tensors.setdefault(tensor, tensor.detach().clone())

    def _copy(self, module: nn.Module) -> nn.Module:
        """A copy with frozen parameters as buffers: an optimizer must not see them twice."""
        if module not in self._copies:
            made: nn.Module = object.__new__(type(module))
            vars(made).update(vars(module))
            frozen = {name: p for name, p in module._parameters.items() if p is not None}
            buffers = {
                name: None if tensor is None else self._copied(tensor, (module, name))
                for name, tensor in (*frozen.items(), *module._buffers.items())
            }
            children = {
                name: None if child is None else self._copy(child)
                for name, child in module._modules.items()
            }
            vars(made).update(
                _parameters={name: None for name in module._parameters if name not in frozen},
                _buffers=buffers,
                _modules=children,
                _non_persistent_buffers_set=set(module._non_persistent_buffers_set),
            )
            self._copies[module] = made
        return self._copies[module]


def _put(held: dict[str, Any], name: str, copied: Any) -> Callable[[], Any]:
    original, held[name] = held[name], copied
    return partial(held.__setitem__, name, original)


def _may_be_copied(module: nn.Module) -> bool:
    """Whether a module is frozen, and its tensors are here and ordinary."""
    tensors = [*module._parameters.items(), *module._buffers.items()]
    return not _is_norm(module) and not any(
        tensor is not None and (tensor.requires_grad or tensor.is_meta or format_of(module, leaf))
        for leaf, tensor in tensors
    )


def _is_norm(module: nn.Module) -> bool:
    """Whether a module keeps statistics: a copy would keep its own."""
    return bool(getattr(module, "track_running_stats", False))
