"""The hand-over: where the coordinator's part of the model is left and entered again.

In a driver's micro-batch the whole hand-over is the driver's business (`driver.py`). Everywhere
else - evaluation, a whole batch at once, a user's call in a hook - it is one function of the
hidden states: cut them into pieces, stream these through the stages, join what comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import ModelError
from ..model.calls import LayerCall
from .rule import Key
from .stage import Surroundings


@dataclass(frozen=True)
class Returned:
    """Something that came back from the stages: an activation, or a gradient."""

    key: Key
    is_gradient: bool
    tensor: Tensor | None
    requires_grad: bool = False


class Stages(Protocol):
    """The remote stages as the coordinator's part of the pipeline sees them."""

    def begin_step(self, max_in_flight: int, accumulate: bool) -> None:
        """Start a step on every stage."""

    def abort_step(self) -> None:
        """Make every stage forget the present step; must not raise."""

    def send_forward(self, key: Key, hidden: Tensor, surroundings: Surroundings) -> None:
        """Send hidden states to the first stage, and each stage its layers' arguments."""

    def send_backward(self, key: Key, gradient: Tensor | None) -> None:
        """Send the gradient of a returned activation to the last stage."""

    def receive(self) -> Returned:
        """Wait for the next thing that comes back."""


@dataclass(frozen=True)
class Request:
    """Hidden states that want to go through the stages."""

    hidden: Tensor
    surroundings: Surroundings


def surroundings_here(hidden: Tensor, calls: list[LayerCall]) -> Surroundings:
    """What this thread's forward runs under.

    Raises:
        ModelError: If an argument besides the hidden states wants a gradient.
    """
    device = hidden.device.type
    grad_enabled = torch.is_grad_enabled()
    if grad_enabled:
        _check_arguments_need_no_gradient(calls)
    autocast_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return Surroundings(grad_enabled, autocast_dtype, calls)


def _check_arguments_need_no_gradient(calls: list[LayerCall]) -> None:
    for call in calls:
        for name, tensor in call.named_tensors():
            if tensor.requires_grad:
                raise ModelError(
                    f"The argument {name} of layer {call.layer_index} requires a gradient; only "
                    "the hidden states carry gradients between stages in this version. Keep the "
                    "layers that use it with the coordinator, or detach it."
                )


def exchange_pieces(stages: Stages, requests: Sequence[Request], visit: int) -> list[Tensor]:
    """Send all pieces, and wait until all have come back; the results in the pieces' order."""
    for index, request in enumerate(requests):
        stages.send_forward(Key(index, visit), request.hidden, request.surroundings)
    return _collect(stages, len(requests), is_gradient=False)


def exchange_gradients(stages: Stages, gradients: Sequence[Tensor], visit: int) -> list[Any]:
    """The same for the gradients of what came back."""
    for index, gradient in enumerate(gradients):
        stages.send_backward(Key(index, visit), gradient)
    return _collect(stages, len(gradients), is_gradient=True)


def _collect(stages: Stages, count: int, is_gradient: bool) -> list[Any]:
    found: dict[int, Tensor | None] = {}
    while len(found) < count:
        returned = stages.receive()
        if returned.is_gradient == is_gradient:
            found[returned.key.microbatch] = returned.tensor
    return [found[index] for index in range(count)]


class Boundary(torch.autograd.Function):
    """A whole batch's hand-over as one differentiable function.

    ``anchor`` is a scalar that requires a gradient: without it a backward would never reach the
    stages when everything before them is frozen.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, anchor: Tensor, stages: Stages, pieces: list[Request], visit: int
    ) -> Tensor:
        ctx.stages, ctx.visit = stages, visit
        ctx.sizes = [piece.hidden.shape[0] for piece in pieces]
        return torch.cat(exchange_pieces(stages, pieces, visit)).to(hidden.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pieces = gradient.split(ctx.sizes)
        returned = exchange_gradients(ctx.stages, pieces, ctx.visit)
        wanted = ctx.needs_input_grad[0]
        joined = torch.cat(returned).to(gradient.device) if wanted else None
        return joined, None, None, None, None
