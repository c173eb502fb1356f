"""What modules' attributes are at one time, to be put back when their code has run."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# What a module may keep count in, and change in place.
_CONTAINERS = (dict, list, set, deque)


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the modules' code may run; afterwards their attributes are as before.

    Rebound ones, and lists, dicts, sets and tensors that were changed in place. What is further
    inside of other objects is not looked at.
    """
    before = [_Before(module) for module in modules]
    try:
        yield
    finally:
        for each in before:
            each.restore()


class _Before:
    """What a module's attributes were."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = dict(vars(module))
        self._containers = [
            (value, copy.copy(value))
            for value in self._attributes.values()
            if isinstance(value, _CONTAINERS)
        ]
        tensors = [*self._attributes.values(), *module._buffers.values()]
        self._tensors = [
            (value, value.detach().clone())
            for value in tensors
            if isinstance(value, Tensor) and not value.is_meta
        ]

    def restore(self) -> None:
        attributes = vars(self._module)
        attributes.clear()
        attributes.update(self._attributes)
        for container, content in self._containers:
            _refill(container, content)
        with torch.no_grad():
            for tensor, values in self._tensors:
                # A graph may have saved those that did not change. Torch does not count the changes
                # of running means.
                if not torch.equal(tensor, values):
                    tensor.copy_(values)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(content)
    else:
        container.update(content)
