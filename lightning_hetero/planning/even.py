"""The plan that knows nothing of the devices: the same number of layers for everyone."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import PlanError
from ..plan import COORDINATOR, Plan, StagePlan


def even_plan(num_layers: int, workers: Sequence[str]) -> Plan:
    """Layers in nearly equal shares over the coordinator and the workers.

    The coordinator comes first and has the embedding, the head and the loss besides, so it gets
    the smaller share where the layers do not divide.

    Raises:
        PlanError: If there are more workers than layers.
    """
    names = [COORDINATOR, *workers]
    if len(workers) > num_layers:
        raise PlanError(
            f"The model has {num_layers} layers, too few for {len(workers)} workers; "
            f"use {num_layers} workers or fewer."
        )
    quotient, remainder = divmod(num_layers, len(names))
    first_longer = len(names) - remainder
    stages, start = [], 0
    for index, name in enumerate(names):
        end = start + quotient + (index >= first_longer)
        stages.append(StagePlan([name], (start, end)))
        start = end
    return Plan(stages)
