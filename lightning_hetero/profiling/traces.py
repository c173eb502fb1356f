"""Runs of a LightningModule that leave no trace: no log, gradient, statistic or random draw."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn

# What a module may keep count in, and change in place.
_CONTAINERS = (dict, list, set, deque)


@contextmanager
def no_trace(module: pl.LightningModule, without: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, a module's own code may run; afterwards it and its Trainer are as before.

    Attributes are as they were: rebound ones, and lists, dicts, sets and tensors that were changed
    in place, a metric's among them. What is further inside of other objects is not looked at.

    Args:
        module: Attached to its Trainer.
        without: Modules in it that do not run, with all that is in them.
    """
    skipped = {inner for outer in without for inner in outer.modules()}
    modules = [inner for inner in module.modules() if inner not in skipped]
    with ExitStack() as undo:
        undo.enter_context(_random_numbers())
        undo.enter_context(_no_loggers(module.trainer))
        undo.callback(_restore, [_Before(inner) for inner in modules])
        gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        undo.callback(_restore_gradients, gradients)
        for parameter, _ in gradients:
            parameter.grad = None
        module.log = _drop  # type: ignore[method-assign]
        yield


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
                tensor.copy_(values)


def _restore(modules: list[_Before]) -> None:
    for module in modules:
        module.restore()


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(content)
    else:
        container.update(content)


def _restore_gradients(gradients: list[tuple[nn.Parameter, Tensor | None]]) -> None:
    for parameter, gradient in gradients:
        parameter.grad = gradient


@contextmanager
def _random_numbers() -> Iterator[None]:
    """The generators of torch, numpy and Python, restored whatever happens."""
    states = _collect_rng_states()
    try:
        yield
    finally:
        _set_rng_states(states)


@contextmanager
def _no_loggers(trainer: pl.Trainer) -> Iterator[None]:
    before = trainer.loggers
    trainer.loggers = [DummyLogger()] if before else []
    try:
        yield
    finally:
        trainer.loggers = before


def _drop(*_args: Any, **_kwargs: Any) -> None:
    """Stands in for ``LightningModule.log``."""
