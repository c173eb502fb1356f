"""The messages of snapshots, and of a replacement of a lost worker.

A worker sends its state now and then, and workers keep their messages to each other. When a worker
is lost, a replacement gets its layers, the latest snapshot, and all later messages to the lost
worker. If every machine has layers already, one of them starts a second process for the lost
worker's layers.
"""

from __future__ import annotations

from .bases import (
    LoadingRequest,
    Message,
    Repeated,
    ServingRequest,
    Speaker,
    StageReport,
    StampedRequest,
    State,
    Waits,
    by,
)
from .fields import Bytes, Count, Name, Text, Words
from .values import Value


class KeepSent(LoadingRequest, frozen=True):
    """Keep the messages to other workers in a step; `ForgetSent` drops them.

    Beyond ``most_bytes`` of memory the worker keeps them in a temporary file.
    """

    repeated = Repeated.NEVER
    most_bytes: Count


class ForgetSent(ServingRequest, frozen=True):
    """Drop the kept messages of the steps up to ``behind``, and of the exchanges of replicas up to
    ``round``: every worker's state after them is safe."""

    repeated = Repeated.NEVER
    behind: Count
    round: Count = 0


class SentKept(StageReport, frozen=True):
    """The kept bytes of messages to other workers."""

    num_bytes: Bytes


class TakeSnapshot(StampedRequest, frozen=True):
    """Send the present state of everything that may have changed since `Launch`.

    The worker answers `SnapshotBegun` at once, and sends the state in `SnapshotPart` beside its
    other work. ``with_gradients`` adds the gradients that the next step goes on with. The tensors
    in ``also`` are sent even if they have not changed.
    """

    repeated = Repeated.NEVER
    is_exact = False
    answers = ("SnapshotBegun",)
    requests = "taking a snapshot"
    number: Count
    with_gradients: bool
    also: list[Name] = []


class SnapshotBegun(StageReport, frozen=True):
    """The snapshot of the tensors ``names`` holds the state after all earlier messages of the
    worker."""

    number: Count
    names: list[Name] = []


class SnapshotPart(StageReport, frozen=True):
    """A piece of a snapshot. All pieces together are frames of `SnapshotTensor`."""

    is_kept = True
    number: Count
    is_last: bool


class SnapshotTensor(Message, frozen=True):
    """A tensor as the lost worker had it, with its state; see `MovedTensor`.

    Args:
        name: As in `LoadTensor`.
        content: The tensor.
        state: The parts of its state in 4 bits.
        optimizers: Its state in each optimizer, by the optimizer's number.
        average: Its running average; None without one.
        gradient: Its gradient; None without one, or if the next step drops it.
        is_total: Whether the gradient is the sum of all replicas, and another replica owns it.
    """

    repeated = Repeated.UNTIL_SNAPSHOT
    said = by(Speaker.COORDINATOR, State.LOADING)
    answers = ("Done",)
    is_kept = True
    requests = "loading a snapshot"
    name: Name
    content: Value
    state: dict[Name, Value] = {}
    optimizers: dict[Count, Value] = {}
    average: Value = None
    gradient: Value = None
    is_total: bool = False


class Replay(LoadingRequest, frozen=True):
    """The worker has the state of a lost one after a step. After `Launch` follow the requests that
    the lost one has carried out since, and the messages of others to it.

    Without ``has_more`` only the next step follows: the worker has joined the run after ``step``.
    """

    repeated = Repeated.NEVER
    resumes_step = True
    step: Count
    has_more: bool = True


class Wait(StampedRequest, frozen=True):
    """The coordinator's later messages wait for the forwards and backwards before this one.

    With ``is_end`` it ends the repetition, and the worker answers `CaughtUp`.
    """

    repeated = Repeated.NEVER
    is_exact = False
    answers = ("CaughtUp",)
    is_end: bool = False


class CaughtUp(StageReport, frozen=True):
    """The worker has repeated all work of the lost one."""


class ReplaceNeighbor(LoadingRequest, frozen=True):
    """Another process replaces a lost worker, under its number. Send it the kept messages.

    A worker upstream of the lost one dials the replacement first; the replacement has dialled the
    others. The answer is `NeighborReplaced`.
    """

    repeated = Repeated.NEVER
    waits = Waits.FOR_NOTHING
    answers = ("NeighborReplaced",)
    member: Count
    address: Name
    session: Name


class NeighborReplaced(StageReport, Words, frozen=True):
    """The messages kept for a lost worker are on their way to its replacement; ``reason`` says why
    the replacement cannot be reached, and is empty if it can."""

    reason: Text = ""


class AskRoom(Message, frozen=True):
    """Asks for the memory that a second session of this run could take on the worker's machine, for
    a lost worker's layers; the worker answers `RoomTold`."""

    repeated = Repeated.NEVER
    waits = Waits.FOR_NOTHING
    answers = ("RoomTold",)
    said = by(Speaker.COORDINATOR, State.IDLE, State.LOADING, State.SERVING)


class RoomTold(Message, Words, frozen=True):
    """A second session of the run could take so many ``free_bytes`` of the device's memory beside
    this one; ``reason`` says why room is missing, and is empty if there is some."""

    said = by(Speaker.WORKER, State.IDLE, State.LOADING, State.SERVING)
    free_bytes: Bytes
    reason: Text = ""


class OpenSession(Message, frozen=True):
    """Start a second process that takes only the session of this name.

    It may take ``most_bytes`` of the owner's limit, and the running session takes at most as much
    as it has had. The answer is `SessionOpened`.
    """

    repeated = Repeated.NEVER
    waits = Waits.FOR_NOTHING
    answers = ("SessionOpened",)
    said = by(Speaker.COORDINATOR, State.IDLE, State.LOADING, State.SERVING)
    name: Name
    most_bytes: Bytes


class SessionOpened(Message, Words, frozen=True):
    """Another process waits for the session at the worker's address; ``reason`` says why starting
    it failed, and is empty if it succeeded."""

    said = by(Speaker.WORKER, State.IDLE, State.LOADING, State.SERVING)
    reason: Text = ""
