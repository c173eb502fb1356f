"""Runs of a LightningModule that leave no trace: no log, gradient, statistic or random draw."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn

from ..model.snapshot import unchanged


@contextmanager
def no_trace(module: pl.LightningModule, without: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, a module's own code may run; afterwards it and its Trainer are as before.

    Attributes are as they were, a metric's among them, as far as `unchanged` looks.

    Args:
        module: Attached to its Trainer.
        without: Modules in it that do not run, with all that is in them.
    """
    skipped = {inner for outer in without for inner in outer.modules()}
    modules = [inner for inner in module.modules() if inner not in skipped]
    with ExitStack() as undo:
        undo.enter_context(_random_numbers())
        undo.enter_context(_no_loggers(module.trainer))
        undo.enter_context(unchanged(modules))
        gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        undo.callback(_restore_gradients, gradients)
        for parameter, _ in gradients:
            parameter.grad = None
        module.log = _drop  # type: ignore[method-assign]
        yield


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
