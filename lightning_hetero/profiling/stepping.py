"""The optimizer that the run will have, before it has one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers, _MockOptimizer
from torch import nn
from torch.optim import Optimizer

from ..devices.memory import synchronize
from ..pipeline.bench import Clock, OptimizerMeasurement, median_of_blocks, state_bytes
from ..pipeline.optimizer import (
    Group,
    StageOptimizer,
    group_options,
    optimizer_class_name,
    optimizer_defaults,
)

# Of a large embedding only so many elements are stepped, and the rest is reckoned in proportion.
_MOST_ELEMENTS = 2**22


@dataclass(frozen=True)
class OptimizerSettings:
    """What `StageOptimizer` is built from.

    Args:
        class_name: As `optimizer_class_name` has it.
        defaults: The optimizer's own.
        options: Those of its first parameter group.
    """

    class_name: str
    defaults: Mapping[str, Any]
    options: Mapping[str, Any]


@contextmanager
def with_optimizers(module: pl.LightningModule) -> Iterator[OptimizerSettings | None]:
    """Inside, the Trainer has the optimizers that ``configure_optimizers`` makes, since a
    ``training_step`` may ask for them."""
    strategy = module.trainer.strategy
    before = strategy.optimizers, strategy.lr_scheduler_configs
    strategy.optimizers, strategy.lr_scheduler_configs = _init_optimizers_and_lr_schedulers(module)
    try:
        yield _settings(strategy.optimizers)
    finally:
        strategy.optimizers, strategy.lr_scheduler_configs = before


def _settings(optimizers: list[Optimizer]) -> OptimizerSettings | None:
    if not optimizers or isinstance(optimizers[0], _MockOptimizer):
        return None
    optimizer = optimizers[0]
    return OptimizerSettings(
        optimizer_class_name(optimizer),
        optimizer_defaults(optimizer),
        group_options(optimizer.param_groups[0]),
    )


def step_like(
    parameters: Iterable[nn.Parameter],
    settings: OptimizerSettings,
    device: torch.device,
    clock: Clock,
) -> OptimizerMeasurement:
    """What a step over parameters like these takes. They themselves stay as they are."""
    found = [_step_like_one(p, settings, device, clock) for p in parameters if p.requires_grad]
    return OptimizerMeasurement(
        sum(one.step_seconds for one in found), sum(one.state_bytes for one in found)
    )


def _step_like_one(
    parameter: nn.Parameter, settings: OptimizerSettings, device: torch.device, clock: Clock
) -> OptimizerMeasurement:
    rows = max(1, _MOST_ELEMENTS * len(parameter) // parameter.numel()) if parameter.ndim else 1
    shape = (min(rows, len(parameter)), *parameter.shape[1:]) if parameter.ndim else ()
    twin = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=device))
    twin.grad = torch.zeros_like(twin)
    group = Group(["twin"], settings.options)
    optimizer = StageOptimizer(settings.class_name, settings.defaults, [group], {"twin": twin})

    def step() -> list[float]:
        synchronize(device)
        start = clock()
        optimizer.step([settings.options])
        synchronize(device)
        return [clock() - start]

    step()
    [seconds] = median_of_blocks(step, 0.0)
    scale = parameter.numel() / max(twin.numel(), 1)
    num_bytes = round(state_bytes(optimizer.state().values()) * scale)
    return OptimizerMeasurement(seconds * scale, num_bytes)
