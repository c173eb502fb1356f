"""The messages between processes with the same layers.

Each runs some of the micro-batches. Their gradients are added up in numbered exchanges; weights
changed by one process go to the others.
"""

from __future__ import annotations

from typing import Literal

from .bases import (
    Message,
    Repeated,
    ServingRequest,
    Speaker,
    StampedRequest,
    State,
    Waits,
    by,
)
from .fields import Count, Name

# The tensors that replicas send each other in an exchange.
ReplicaContent = Literal["sums", "totals", "weights"]


class ReduceGradients(StampedRequest, frozen=True):
    """Add up gradients with the workers of the same stages; exchanges are numbered."""

    repeated = Repeated.UNTIL_SNAPSHOT
    recorded_as = "optimizer"
    round: Count


class ReplicaTensors(Message, frozen=True):
    """Gradients or weights from a worker with the same stage.

    Args:
        member: The number of the receiving worker.
        source: The number of the sending worker.
        round: The number of the exchange.
        content: ``sums`` for the owner of these parameters; ``totals`` or ``weights`` from it.
        names: The parameters, one for each tensor.
        is_last: Whether the sender has sent its whole part of the exchange.
    """

    repeated = Repeated.UNTIL_SNAPSHOT
    waits = Waits.FOR_NOTHING
    is_between_workers = True
    said = (
        by(Speaker.UPSTREAM, State.LINKED)
        | by(Speaker.WORKER, State.SERVING)
        | by(Speaker.COORDINATOR, State.SERVING)
    )
    is_kept = True
    recorded_as = "optimizer"
    member: Count
    source: Count
    round: Count
    content: ReplicaContent
    names: list[Name]
    is_last: bool


class UpdateTensors(ServingRequest, frozen=True):
    """New content of parameters and buffers that the coordinator also holds, a tensor for each
    name.

    The worker does not answer. A tensor in 4 bits comes as a `LoadTensor`, with its state.
    """

    repeated = Repeated.UNTIL_SNAPSHOT
    waits = Waits.BESIDE_SUMS
    is_kept = True
    requests = "loading its weights"
    names: list[Name]
