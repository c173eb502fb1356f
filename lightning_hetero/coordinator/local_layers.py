"""The layers kept by the coordinator: compiled, run again and seeded as a stage's are.

So are the layers of which it is a replica, for its own micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ModelError
from ..model.layer_call import caches_among, without_cache
from ..model.layers import EMBEDDING_LAYER, DecoderLayer, find_embedding, has_own_code
from ..model.override import ForwardOverride
from ..model.tensors import has_four_bit
from ..pipeline.layer_runs import compiled, run_with_arguments_kept
from ..pipeline.random_numbers import Draws, PythonStreams
from ..plan import COORDINATOR, Plan, StagePlan
from ..protocol.messages import Equipment
from .worker_stages import obstacles_to_compiling

if TYPE_CHECKING:
    from .token_slices import TokenSlices


def check_can_be_compiled(layers: Sequence[DecoderLayer], plan: Plan, equipment: Equipment) -> None:
    """Refuse a plan with layers to compile here, if this process cannot compile them.

    Raises:
        ModelError: With the remedy.
    """
    for stage in plan.stages:
        if COORDINATOR in stage.workers and stage.compile:
            own = {number: layers[number].module for number in stage.layer_indices}
            if found := obstacles_to_compiling(equipment, has_four_bit(own)):
                raise ModelError(f"The coordinator cannot compile its layers: {' '.join(found)}")


def adjust_own(
    layers: Sequence[DecoderLayer], stages: Sequence[StagePlan]
) -> list[Callable[[], None]]:
    """Compile the layers of stages here, and let them run again in the backward, if the plan wants
    it. Returns functions that make the layers ordinary again."""
    adjusted: list[Callable[[], None]] = []
    for stage in stages:
        wanted = [(stage.compile, _Compiled), (stage.recompute, _Recomputed)]
        for number in stage.layer_indices:
            overrides = [kind(layers[number].module) for is_wanted, kind in wanted if is_wanted]
            adjusted += [override.put_on().take_off for override in overrides]
    return adjusted


def seed_own(
    layers: Mapping[int, nn.Module], draws: Draws, slices: TokenSlices | None = None
) -> list[Callable[[], None]]:
    """Let the coordinator's layers draw the random numbers of a worker in their place.

    Call it after `adjust_own`: a layer that runs again below restores its generators by itself.

    Args:
        layers: The layers by their numbers.
        draws: Knows the place in the step.
        slices: Cuts their forwards along the tokens; None without cuts.

    Returns:
        Functions that make the layers ordinary again.
    """
    return [
        _Seeded(layer, number, draws, None if number == EMBEDDING_LAYER else slices)
        .put_on()
        .take_off
        for number, layer in layers.items()
    ]


def is_seeded(layer: nn.Module) -> bool:
    """Whether the calls of a layer, and the code after them, draw from streams of their own.

    torch's own embedding does not draw: the code around it draws from one stream, wherever the
    embedding is.
    """
    return type(layer) is not nn.Embedding


class _Seeded(ForwardOverride):
    """A layer's ``forward``, with the random numbers of its place in the step."""

    def __init__(
        self, layer: nn.Module, number: int, draws: Draws, slices: TokenSlices | None = None
    ) -> None:
        super().__init__(layer)
        self._number = number
        self._draws = draws
        self._slices = slices

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._draws.of_layer(self._number, (args, kwargs)):
            if self._slices is None or not torch.is_grad_enabled():
                return self.below(*args, **kwargs)
            seed = partial(self._draws.seed_slice, self._number)
            return self._slices.run_here(self._number, self.below, args, kwargs, seed)


class _Compiled(ForwardOverride):
    """A layer's ``forward``, compiled except where a cache grows from call to call."""

    @cached_property
    def _compiled(self) -> Callable[..., Any]:
        return compiled(self.below)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the layer must not run the code compiled by torch for the original.
        return {name: value for name, value in vars(self).items() if name != "_compiled"}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            args, kwargs = without_cache(
                self.module, args, kwargs
            )  # the cache is not read in a training step
        elif caches_among(args, kwargs):
            return self.below(*args, **kwargs)
        return self._compiled(*args, **kwargs)


class _Recomputed(ForwardOverride):
    """A layer's ``forward`` that only keeps its inputs."""

    @cached_property
    def _has_own_code(self) -> bool:
        return has_own_code(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.below(*args, **kwargs)
        # A second forward must not find the first one's entries in a cache.
        args, kwargs = without_cache(self.module, args, kwargs)
        return run_again_here(self.below, args, kwargs, self._has_own_code)


def run_again_here(
    run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], has_own_code: bool
) -> Any:
    """Call a layer and keep only its arguments; it runs again in the backward, and draws the same
    random numbers. See `run_with_arguments_kept`."""
    return run_with_arguments_kept(
        run, args, kwargs, has_own_code, context_fn=lambda: (nullcontext(), PythonStreams())
    )


def prepare_own(
    root: nn.Module,
    layers: Sequence[DecoderLayer],
    plan: Plan,
    draws: Draws,
    slices: TokenSlices | None = None,
) -> list[Callable[[], None]]:
    """Adjust and seed the coordinator's layers; returns functions that make them ordinary again.

    Args:
        root: The LightningModule.
        layers: All decoder layers of the module.
        plan: The plan.
        draws: Knows the place in the step.
        slices: Cuts the layers' forwards along the tokens; None without cuts.
    """
    local = [stage for stage in plan.stages if stage.is_local]
    if slices is not None:
        # They run again slice by slice.
        local = [replace(stage, recompute=False) for stage in local]
    return [*adjust_own(layers, local), *seed_own(_own_layers(root, layers, plan), draws, slices)]


def prepare_hosted(
    layers: Sequence[DecoderLayer], plan: Plan, draws: Draws
) -> list[Callable[[], None]]:
    """Adjust and seed the layers of which this process is a replica, as `prepare_own` does it with
    its own. Call it before they become hollow: the overrides hold where they run here."""
    hosted = [stage for stage in plan.stages if stage.is_hosted]
    numbers = [number for stage in hosted for number in stage.layer_indices]
    modules = {number: layers[number].module for number in numbers}
    return [*adjust_own(layers, hosted), *seed_own(modules, draws)]


def _own_layers(
    root: nn.Module, layers: Sequence[DecoderLayer], plan: Plan
) -> dict[int, nn.Module]:
    """The coordinator's layers by their numbers, with an embedding that could be on a worker."""
    local = [stage for stage in plan.stages if stage.is_local]
    found = {number: layers[number].module for stage in local for number in stage.layer_indices}
    if not any(stage.embedding for stage in plan.stages):
        with suppress(ModelError):
            embedding = find_embedding(root, layers).module
            if is_seeded(embedding):
                found[EMBEDDING_LAYER] = embedding
    return found
