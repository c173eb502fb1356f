"""The messages of snapshots, and of a worker that takes the place of a lost one.

A worker tells its state now and then, and workers keep what they send each other. When one is lost,
another one gets its layers, the latest snapshot, and all that was sent to the lost one behind it.
"""

from __future__ import annotations

from .bases import LoadingRequest, ServingRequest, StageReport, StampedRequest
from .fields import Count, Name, Text, Words
from .session import Message, Speaker, State, by
from .values import Value


class KeepSent(LoadingRequest, frozen=True):
    """Keep the activations and gradients that go to other workers; `ForgetSent` drops them.

    Beyond ``most_bytes`` of memory the worker keeps them in a temporary file.
    """

    most_bytes: Count


class ForgetSent(ServingRequest, frozen=True):
    """Drop what was kept of the steps up to this one: every worker's state behind it is safe."""

    behind: Count


class TakeSnapshot(StampedRequest, frozen=True):
    """Tell the present state of what may have changed since `Launch`.

    The worker answers `SnapshotBegun` at once, and sends the state in `SnapshotPart` beside its
    other work. ``with_gradients`` adds the gradients that the next step adds to. The tensors in
    ``also`` are told though they have not changed.
    """

    is_exact = False
    requests = "taking a snapshot"
    number: Count
    with_gradients: bool
    also: list[Name] = []


class SnapshotBegun(StageReport, frozen=True):
    """The snapshot holds the state behind all that the worker has said so far."""

    number: Count


class SnapshotPart(StageReport, frozen=True):
    """A piece of a snapshot, whose pieces together are frames of `SnapshotTensor`."""

    is_kept = True
    number: Count
    is_last: bool


class SnapshotTensor(Message, frozen=True):
    """A tensor as the lost worker had it, with all that belongs to it; see `MovedTensor`.

    Args:
        name: As in `LoadTensor`.
        content: The tensor.
        state: The parts of its state in 4 bits.
        optimizers: Its state in each optimizer, by the optimizer's number.
        average: Its running average; None if it has none.
        gradient: Its gradient; None if it has none, or the next step drops it.
    """

    said = by(Speaker.COORDINATOR, State.LOADING)
    is_kept = True
    requests = "loading a snapshot"
    name: Name
    content: Value
    state: dict[Name, Value] = {}
    optimizers: dict[Count, Value] = {}
    average: Value = None
    gradient: Value = None


class Replay(ServingRequest, frozen=True):
    """The worker has the state behind a step of a lost one; what the lost one did since follows."""

    resumes_step = True
    step: Count


class Wait(StampedRequest, frozen=True):
    """What the coordinator says later waits for the forwards and backwards before this.

    With ``is_end`` it ends what is repeated, and the worker answers `CaughtUp`.
    """

    is_exact = False
    is_end: bool = False


class CaughtUp(StageReport, frozen=True):
    """The worker has repeated all that the lost one had done."""


class ReplaceNeighbor(LoadingRequest, frozen=True):
    """Another process has the place of a lost worker, under its number. Send it what was kept.

    A worker that sends activations to the lost one dials the new one first; the new one has dialled
    the others. The answer is `NeighborReplaced`.
    """

    member: Count
    address: Name
    session: Name


class NeighborReplaced(StageReport, Words, frozen=True):
    """What was kept for a lost worker is on its way to the one in its place; ``reason`` tells why
    that worker cannot be reached, and is empty if it can."""

    member: Count
    reason: Text = ""
