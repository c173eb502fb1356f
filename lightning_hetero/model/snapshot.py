"""What modules' attributes are at one time, to be put back when their code has run."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# What a module may keep count in, and change in place.
_CONTAINERS = (dict, list, set, deque)
# Longer containers hold data. Their entries are put back, and not looked at.
_MOST_ENTRIES = 10_000
_MOST_DEPTH = 8


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the modules' code may run; afterwards their attributes are as before."""
    before = Attributes(list(modules))
    try:
        with contents_kept(before.tensors):
            yield
    finally:
        before.restore()


@contextmanager
def contents_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, tensors may be changed in place; afterwards they have their content again."""
    copies = [(tensor, tensor.detach().clone(), _version(tensor)) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, content, version in copies:
                # A graph may have saved those that did not change. Torch does not count what it
                # changes of the statistics of a norm.
                if _version(tensor) != version or not torch.equal(tensor, content):
                    tensor.copy_(content)


def _version(tensor: Tensor) -> int:
    """Counts in-place changes; inference mode does not count them."""
    return 0 if tensor.is_inference() else tensor._version


class Attributes:
    """What the attributes of modules were, and the content of what they refer to.

    Args:
        modules: All of them; what is inside of others is not looked at.
        with_generators: Whether random generators are put back too.

    Attributes:
        tensors: What they refer to, parameters left out. Their content is not kept here.
    """

    def __init__(self, modules: Sequence[nn.Module], with_generators: bool = True) -> None:
        self._with_generators = with_generators
        self.tensors: list[Tensor] = []
        self._undo: list[Callable[[], None]] = []
        # The objects are kept, so that no other gets the identity of one of them.
        self._seen: dict[int, Any] = {}
        classes = {each for module in modules for each in type(module).__mro__}
        self._packages = {_package_of(each) for each in classes} - _NOT_ENTERED
        for each in classes:
            if _package_of(each) in self._packages:
                self._note_class(each)
        for module in modules:
            self._note_attributes(module, 0)

    def restore(self) -> None:
        """Put everything back but the content of tensors."""
        for undo in reversed(self._undo):
            undo()

    def _note_attributes(self, owner: Any, depth: int) -> None:
        self._seen[id(owner)] = owner
        attributes = vars(owner)
        content = dict(attributes)
        self._undo.append(lambda: _refill(attributes, content))
        for value in content.values():
            self._note(value, depth)

    def _note_class(self, owner: type) -> None:
        """What all its instances share. An attribute that is new stays: it may be a cache."""
        content = {name: item for name, item in vars(owner).items() if not name.startswith("__")}
        self._undo.append(lambda: _reassign(owner, content))
        for value in content.values():
            self._note(value, 0)

    def _note(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or depth > _MOST_DEPTH or isinstance(value, nn.Module):
            return
        if isinstance(value, Tensor):
            self._note_tensor(value)
        elif isinstance(value, (*_CONTAINERS, tuple)):
            self._note_container(value, depth)
        elif (undo := restoring_generator(value)) is not None:
            self._undo += [undo] if self._with_generators else []
        elif not isinstance(value, type) and self._is_of_the_user(value):
            self._note_attributes(value, depth + 1)

    def _is_of_the_user(self, value: Any) -> bool:
        return _package_of(type(value)) in self._packages and hasattr(value, "__dict__")

    def _note_tensor(self, tensor: Tensor) -> None:
        self._seen[id(tensor)] = tensor
        if not tensor.is_meta and not isinstance(tensor, nn.Parameter):
            self.tensors.append(tensor)

    def _note_container(self, container: Any, depth: int) -> None:
        self._seen[id(container)] = container
        content: Any = dict(container) if isinstance(container, dict) else list(container)
        if not isinstance(container, tuple):
            self._undo.append(lambda: _refill(container, content))
        if len(content) <= _MOST_ENTRIES:
            for item in content.values() if isinstance(content, dict) else content:
                self._note(item, depth + 1)


# Of these no object is looked into: it may be a part of the run.
_NOT_ENTERED = frozenset(
    {"builtins", "lightning", "lightning_fabric", "lightning_hetero", "pytorch_lightning", "torch"}
)


def _package_of(thing: type) -> str:
    return thing.__module__.partition(".")[0]


def _reassign(owner: type, content: Mapping[str, Any]) -> None:
    for name, value in content.items():
        if vars(owner).get(name) is not value:
            setattr(owner, name, value)


def _refill(container: Any, content: Any) -> None:
    if _holds(container, content):
        return
    container.clear()
    if isinstance(container, dict):
        for key, value in content.items():  # outputs of transformers refuse `update`
            container[key] = value
    elif isinstance(container, set):
        container.update(content)
    else:
        container.extend(content)


def _holds(container: Any, content: Any) -> bool:
    """Whether a container has the very same entries in the same order."""
    found = [container, content]
    if isinstance(container, dict):
        found = [[each for pair in held.items() for each in pair] for held in found]
    return len(container) == len(content) and all(map(is_, *found))


def restoring_generator(value: Any) -> Callable[[], Any] | None:
    """What puts a random generator back to its present state; None if the value is none."""
    generator: Any = value
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        state = generator.get_state()
        return lambda: generator.set_state(state)
    if isinstance(value, random.Random):
        python_state = generator.getstate()
        return lambda: generator.setstate(python_state)
    if isinstance(value, np.random.Generator):
        bits = generator.bit_generator
        bits_state = bits.state
        return lambda: setattr(bits, "state", bits_state)
    return None
