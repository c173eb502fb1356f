"""The messages of snapshots, and of a worker that takes the place of a lost one.

A worker tells its state now and then, and workers keep what they send each other. When one is lost,
another one gets its layers, the latest snapshot, and all that was sent to the lost one behind it.
If no other machine is left, one that has layers already starts a second process for them.
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
    """Keep what goes to other workers in a step; `ForgetSent` drops it.

    Beyond ``most_bytes`` of memory the worker keeps them in a temporary file.
    """

    repeated = Repeated.NEVER
    most_bytes: Count


class ForgetSent(ServingRequest, frozen=True):
    """Drop what was kept of the steps up to this one, and of the exchanges of replicas up to
    ``round``: every worker's state behind them is safe."""

    repeated = Repeated.NEVER
    behind: Count
    round: Count = 0


class SentKept(StageReport, frozen=True):
    """So many bytes of what went to other workers are kept."""

    num_bytes: Bytes


class TakeSnapshot(StampedRequest, frozen=True):
    """Tell the present state of what may have changed since `Launch`.

    The worker answers `SnapshotBegun` at once, and sends the state in `SnapshotPart` beside its
    other work. ``with_gradients`` adds the gradients that the next step adds to. The tensors in
    ``also`` are told though they have not changed.
    """

    repeated = Repeated.NEVER
    is_exact = False
    answers = ("SnapshotBegun",)
    requests = "taking a snapshot"
    number: Count
    with_gradients: bool
    also: list[Name] = []


class SnapshotBegun(StageReport, frozen=True):
    """The snapshot holds the state behind all that the worker has said so far, of these tensors."""

    number: Count
    names: list[Name] = []


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
        is_total: Whether the gradient is the sum of all replicas, and another one owns it.
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
    """The worker has the state behind a step of a lost one. After `Launch` follows what the lost
    one has done since, and what others sent it.

    Without ``has_more`` only the next step follows: the worker has joined the run behind that step.
    """

    repeated = Repeated.NEVER
    resumes_step = True
    step: Count
    has_more: bool = True


class Wait(StampedRequest, frozen=True):
    """What the coordinator says later waits for the forwards and backwards before this.

    With ``is_end`` it ends what is repeated, and the worker answers `CaughtUp`.
    """

    repeated = Repeated.NEVER
    is_exact = False
    answers = ("CaughtUp",)
    is_end: bool = False


class CaughtUp(StageReport, frozen=True):
    """The worker has repeated all that the lost one had done."""


class ReplaceNeighbor(LoadingRequest, frozen=True):
    """Another process has the place of a lost worker, under its number. Send it what was kept.

    A worker that sends activations to the lost one dials the new one first; the new one has dialled
    the others. The answer is `NeighborReplaced`.
    """

    repeated = Repeated.NEVER
    waits = Waits.FOR_NOTHING
    answers = ("NeighborReplaced",)
    member: Count
    address: Name
    session: Name


class NeighborReplaced(StageReport, Words, frozen=True):
    """What was kept for a lost worker is on its way to the one in its place; ``reason`` tells why
    that worker cannot be reached, and is empty if it can."""

    reason: Text = ""


class AskRoom(Message, frozen=True):
    """Asks how much memory a second session of this run could take on the worker's machine, for the
    layers of a lost worker; the worker answers `RoomTold`."""

    repeated = Repeated.NEVER
    waits = Waits.FOR_NOTHING
    answers = ("RoomTold",)
    said = by(Speaker.COORDINATOR, State.IDLE, State.LOADING, State.SERVING)


class RoomTold(Message, Words, frozen=True):
    """A second session of the run could take so many ``free_bytes`` of the device's memory beside
    this one; ``reason`` tells why there is no room at all, and is empty if there is."""

    said = by(Speaker.WORKER, State.IDLE, State.LOADING, State.SERVING)
    free_bytes: Bytes
    reason: Text = ""


class OpenSession(Message, frozen=True):
    """Start a second process that takes the session of this name, and no other one.

    It may take ``most_bytes`` of what the owner allows, and the session that runs takes no more
    than it has had. The answer is `SessionOpened`.
    """

    repeated = Repeated.NEVER
    waits = Waits.FOR_NOTHING
    answers = ("SessionOpened",)
    said = by(Speaker.COORDINATOR, State.IDLE, State.LOADING, State.SERVING)
    name: Name
    most_bytes: Bytes


class SessionOpened(Message, Words, frozen=True):
    """Another process waits for the session at the worker's address; ``reason`` tells
    why none could be started, and is empty if one could."""

    said = by(Speaker.WORKER, State.IDLE, State.LOADING, State.SERVING)
    reason: Text = ""
