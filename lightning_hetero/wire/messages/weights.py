"""A stage's weights, gradients and optimizers between its forwards and backwards."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..values import Value
from .base import BaseMessage, Count, Name, Seconds


class SetTrained(BaseMessage, frozen=True, tag=True):
    """From the next forward on, parameters are frozen, or are so no longer."""

    parameters: list[Name]
    requires_grad: bool


class ZeroGradients(BaseMessage, frozen=True, tag=True):
    """Drop the gradients of parameters or, without ``set_to_none``, make them zero; then say
    `Done`."""

    parameters: list[Name]
    set_to_none: bool


class MeasureNorms(BaseMessage, frozen=True, tag=True):
    """Asks for the norms of gradients: those that an optimizer would use, or all."""

    step: Count
    optimizer: Count | None


class Norms(BaseMessage, frozen=True, tag=True):
    """The gradient norm of every parameter that has a gradient."""

    step: Count
    norms: dict[Name, float]


class ClipGradients(BaseMessage, frozen=True, tag=True):
    """Multiply gradients by a factor or cut them at a value: those that an optimizer would use,
    or all."""

    step: Count
    optimizer: Count | None
    factor: float | None
    value: float | None


class GroupSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One parameter group of an optimizer; ``options`` is everything but the parameters."""

    parameters: list[Name]
    options: Value


class BuildOptimizer(BaseMessage, frozen=True, tag=True):
    """Build the stage's part of an optimizer; ``class_name`` is one of torch.optim or, with
    ``bitsandbytes.`` before it, of that library's. Optimizers are known by their numbers."""

    optimizer: Count
    class_name: Name
    defaults: Value
    groups: list[GroupSpec]


class LoadOptimizerState(BaseMessage, frozen=True, tag=True):
    """An optimizer's state of one parameter."""

    is_kept = True

    optimizer: Count
    parameter: Name
    state: Value


class ApplyOptimizer(BaseMessage, frozen=True, tag=True):
    """Step an optimizer with these group options."""

    step: Count
    optimizer: Count
    options: list[Value]


class Timings(BaseMessage, frozen=True, tag=True):
    """What the stage has computed for training since it last said so, told with each optimizer
    step: the seconds of all forwards, of all backwards, and the number of micro-batches."""

    step: Count
    forward_seconds: Seconds
    backward_seconds: Seconds
    num_microbatches: Count


class FetchOptimizerState(BaseMessage, frozen=True, tag=True):
    """Asks for an optimizer's state of every parameter of the stage."""

    optimizer: Count


class OptimizerState(BaseMessage, frozen=True, tag=True):
    """The optimizer's state of one parameter."""

    is_kept = True

    parameter: Name
    state: Value


class AverageWeights(BaseMessage, frozen=True, tag=True):
    """What to do with the running average of the stage's weights: make one, bring it up to date
    with the present weights, exchange the two, or go on with it as the weights.

    Without ``decay`` every update counts the same; ``num_averaged`` is their number so far.
    """

    action: Literal["begin", "update", "swap", "adopt"]
    num_averaged: Count
    decay: float | None


class FetchTensors(BaseMessage, frozen=True, tag=True):
    """Asks for the content of parameters and buffers."""

    names: list[Name]


class TensorContent(BaseMessage, frozen=True, tag=True):
    """One tensor that was asked for, and its state as in `LoadTensor`."""

    is_kept = True

    name: Name
    state: list[Name] = []


class FetchGradients(BaseMessage, frozen=True, tag=True):
    """Asks for the gradients of parameters, each as a `TensorContent`; one that has none is left
    out."""

    names: list[Name]
