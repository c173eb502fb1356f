"""Parts that a session may have: what a worker can do besides the steps of its stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import ModelError
from ..pipeline.recorder import Recorder
from ..protocol import messages as m
from ..transport.channel import Channel, Handler
from .layers import SessionLayers
from .neighbors import SessionNeighbors
from .optimizers import SessionOptimizers
from .owner import Budget, Host

Answer = Callable[[Channel, Any, tuple[Tensor, ...]], None]
"""Answers a message over the channel on which it has come."""


class SessionPart:
    """A part of a session; a method that a part does not need does nothing.

    Attributes:
        handlers: The function that carries out each kind of the coordinator's messages.
        answers: The same for messages that any peer may send.
        is_measuring: Whether a measurement has begun that nothing has ended yet.
    """

    handlers: Mapping[type, Handler] = {}
    answers: Mapping[type, Answer] = {}
    is_measuring = False

    def before_deploy(self) -> None:
        """The session is about to build its layers, or to build them anew."""

    def on_launch(self) -> None:
        """All layers have their content, which the coordinator has too."""

    def close(self) -> None:
        """The session is over."""


def no_part(what: str) -> ModelError:
    """The error of a session without the part for a message or a stage."""
    return ModelError(
        f"The installation of lightning-hetero on this worker has no part for {what}; install the "
        "whole package there."
    )


class SoleHolder:
    """The other holders of a session's stages; here there are none.

    Attributes:
        handlers: The function that carries out each kind of the replicas' messages.
        is_waiting: Whether an exchange is on its way; requests wait for its end.
        is_adding_up: Whether an exchange is on its way that changes gradients, and nothing else.
        is_repeating: Whether this worker repeats what a lost one has done, so that parts of many
            exchanges come at once.
    """

    handlers: Mapping[type, Handler] = {}
    is_repeating = False

    @property
    def is_waiting(self) -> bool:
        return False

    @property
    def is_adding_up(self) -> bool:
        return False

    def expect(self, message: m.Deploy) -> None:
        """Note which stages other workers hold too, and who owns their parameters.

        Raises:
            ModelError: If there are such stages, and nothing here can add up gradients.
        """
        if any(len(stage.holders) > 1 for stage in message.stages):
            raise no_part("a stage with replicas")

    def is_owned(self, name: str) -> bool:
        """Whether this worker answers for a parameter."""
        return True

    def is_stepped(self, name: str) -> bool:
        """Whether this worker steps a parameter."""
        return True

    def is_total(self, name: str) -> bool:
        """Whether a gradient here is the sum of all replicas, and another one owns it."""
        return False

    def note_totals(self) -> None:
        """The gradients here that other workers own are totals."""

    def note_backward(self) -> None:
        """New gradients are about to come."""

    def sending_early(self, number: int) -> AbstractContextManager[None]:
        """Inside, the last backward before an exchange runs."""
        return nullcontext()

    def reduce(self, number: int) -> None:
        """Add up gradients with the other replicas, which is the exchange of that number."""

    def follow_step(self, number: int) -> None:
        """Send the weights that this worker has stepped to the others, and wait for theirs."""

    def begin_repetition(self) -> None:
        """This worker begins to repeat what a lost one has done."""
        self.is_repeating = True

    def end_repetition(self) -> None:
        """This worker has repeated all."""
        self.is_repeating = False

    def expect_repeats(self) -> None:
        """Drop from now on what a replica sends that has come before."""

    def end(self, number: int) -> None:
        """Forget the exchanges up to one of this number."""


@dataclass(frozen=True)
class SessionSite:
    """A session, as its parts see it.

    Args:
        coordinator: The channel to the coordinator.
        host: The worker that serves the session.
        budget: Counts what the session takes; None if the owner sets no limit.
        recorder: Sums up actions, and takes spans while it is switched on.
        layers: The layers of the session.
        optimizers: Steps them, and has what belongs to their tensors.
        replicas: Knows which gradients are sums of all replicas.
        neighbors: The channels to the other workers.
        dial_neighbor: Opens a channel, not started yet, to the worker at an address that serves the
            session of that name; this worker has the number that is given.
    """

    coordinator: Channel
    host: Host
    budget: Budget | None
    recorder: Recorder
    layers: SessionLayers
    optimizers: SessionOptimizers
    replicas: SoleHolder
    neighbors: SessionNeighbors
    dial_neighbor: Callable[[str, str, int], Channel]
