"""What the plan asks of the coordinator's own layers: compiled, or run again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ...errors import ModelError
from ...model.layer_call import caches_among, without_cache
from ...model.layers import DecoderLayer
from ...model.override import stand_in
from ...model.tensors import has_four_bit
from ...pipeline.stage import compiled
from ...plan import Plan
from ...protocol.messages import Equipment
from ...transport.handshake import obstacles_to_compiling


def check_can_be_compiled(layers: Sequence[DecoderLayer], plan: Plan, equipment: Equipment) -> None:
    """Refuse a plan by which this process should compile layers and cannot.

    Raises:
        ModelError: With the remedy.
    """
    for stage in plan.stages:
        if stage.is_local and stage.compile:
            own = {number: layers[number].module for number in stage.layer_indices}
            if found := obstacles_to_compiling(equipment, has_four_bit(own)):
                raise ModelError(f"The coordinator cannot compile its layers: {' '.join(found)}")


def adjust_own(layers: Sequence[DecoderLayer], plan: Plan) -> list[Callable[[], None]]:
    """Compile the coordinator's layers, and let them run again in the backward, if the plan wants
    it; what makes them ordinary again."""
    adjusted = []
    for stage in plan.stages:
        if stage.is_local and (stage.compile or stage.recompute):
            for number in stage.layer_indices:
                layer = layers[number].module
                forward: Callable[..., Any] = layer.forward
                forward = _Compiled(forward) if stage.compile else forward
                forward = _Recomputed(forward) if stage.recompute else forward
                adjusted.append(stand_in(layer, "forward", forward))
    return adjusted


class _Compiled:
    """A layer's ``forward``, compiled where no cache grows from call to call."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._compiled = compiled(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            args, kwargs = without_cache(args, kwargs)  # which nobody reads in a training step
        elif caches_among(args, kwargs):
            return self._forward(*args, **kwargs)
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # What torch has compiled would stay with the first layer in a copy of it.
        return _Compiled, (self._forward,)


class _Recomputed:
    """A layer's ``forward`` that keeps its inputs only."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        # A second forward must not find what the first one left in a cache.
        args, kwargs = without_cache(args, kwargs)
        return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
