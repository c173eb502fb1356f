"""The bases of messages. A message declares its own rules: first of all who may send it, and when.

`State` and `Speaker` are the words for these rules; `session` draws all states.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterator
from typing import Any, ClassVar

import msgspec

from .fields import Count, Key, SpanKind, printable


class State(enum.Enum):
    """Where a conversation stands."""

    OPENING = "opening"
    GREETING = "greeting"
    IDLE = "idle"
    LOADING = "loading"
    SERVING = "serving"
    LINKED = "linked"
    TELLING = "telling"
    WAITING = "waiting"
    CLOSED = "closed"

    # Each message is looked up by it, and an enumeration hashes the text of its name.
    __hash__ = object.__hash__


class Speaker(enum.Enum):
    """One of the two ends of a conversation."""

    COORDINATOR = "coordinator"
    WORKER = "worker"
    UPSTREAM = "upstream"
    DOWNSTREAM = "downstream"
    WATCHER = "watcher"
    WATCHED = "watched"
    JOINER = "joiner"
    DOOR = "door"

    __hash__ = object.__hash__


class Repeated(enum.Enum):
    """How long the coordinator repeats a message to a replacement of a lost worker.

    NEVER: It concerns the old conversation.
    UNTIL_ANSWERED: It does not change the worker, so it is not needed after its answer.
    UNTIL_SNAPSHOT: A snapshot of the worker holds its effect.
    ALWAYS: Snapshots do not hold its effect.
    """

    NEVER = "never"
    UNTIL_ANSWERED = "until answered"
    UNTIL_SNAPSHOT = "until snapshot"
    ALWAYS = "always"


class Waits(enum.Enum):
    """The work that a message waits for when it comes while the worker's stages run.

    FOR_NOTHING: It does not wait. Requests wait for forwards and backwards, and these wait for such
        messages.
    BESIDE_SUMS: It does not wait until replicas have added up their gradients: it neither needs nor
        changes them. A replica waits for the coordinator's gradients, and the coordinator may save
        a checkpoint before it sends them.
    IN_TURN: It waits for everything before it.
    """

    FOR_NOTHING = "for nothing"
    BESIDE_SUMS = "beside sums"
    IN_TURN = "in turn"


# The state that follows a message, by who sends it in which state.
Rules = dict[tuple[Speaker, State], State]


def by(speaker: Speaker, *states: State, then: State | None = None) -> Rules:
    """Allow a message to one speaker in these states; the state stays unless ``then`` follows."""
    return {(speaker, state): then or state for state in states}


def by_anyone(*states: State, then: State | None = None) -> Rules:
    """Allow a message to every speaker in these states; without states, in every state."""
    return {
        (speaker, state): then or state for speaker in Speaker for state in states or tuple(State)
    }


_TO_A_STAGE = by(Speaker.COORDINATOR, State.LOADING, State.SERVING).keys()

# The name of fields that must stay out of logs and errors.
_NOT_SHOWN = "secret"


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag on the wire is the class's name.

    Each request of the coordinator has a number, and its answers repeat it in ``request``; for
    other messages the number is 0. By this number alone the coordinator finds an answer's request:

    - An open request: it takes the answer, if the worker and the class are right.
    - An interrupted request: it drops the answer.
    - A request already answered by a lost worker: the journal drops the answer.
    - Any other number: the worker has broken the rules, and its conversation ends.

    A `Failure` ends the request of its number, and is an error of the run, unless the run has given
    up the request or its step.

    Each class declares here its rules for the rest of the package.

    Attributes:
        said: Who may send the message in which state, and the next state. Every class has to
            declare it, unless its base does.
        begins_step: The message begins the step after the present one.
        resumes_step: The message names the step after which a worker replaces a lost one.
        repeated: How long the coordinator repeats it to a replacement of a lost worker. Every class
            of messages from the coordinator to a stage has to declare it.
        waits: The work that it waits for.
        is_held: A paused worker takes the message when its owner resumes it.
        answers: The names of the classes that answer it; empty without an answer.
        is_piece: It is a part of an answer; another class ends the answer.
        is_between_workers: Workers send it to each other in a step, and keep it for a replacement
            of a lost one.
        is_kept: The receiver keeps the tensors for long, so each frame gets memory of its own
            instead of a reused buffer.
        is_probe: The tensors are large and unlike later ones, so their buffers are not kept.
        requests: The receiver's work on the message, in words for people. Like ``reports``, it may
            name fields: ``"step {message.step}"``.
        reports: The sender's latest work, in words for people.
        recorded_as: The kind under which the receiver records the time of its work on the message.
    """

    said: ClassVar[Rules] = {}
    begins_step: ClassVar[bool] = False
    resumes_step: ClassVar[bool] = False
    repeated: ClassVar[Repeated | None] = None
    waits: ClassVar[Waits] = Waits.IN_TURN
    is_held: ClassVar[bool] = True
    answers: ClassVar[tuple[str, ...]] = ()
    is_piece: ClassVar[bool] = False
    is_between_workers: ClassVar[bool] = False
    is_kept: ClassVar[bool] = False
    is_probe: ClassVar[bool] = False
    requests: ClassVar[str] = ""
    reports: ClassVar[str] = ""
    recorded_as: ClassVar[SpanKind | None] = None
    request: Count = 0

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__(**config)
        if not cls.said:
            raise TypeError(f"{cls.__name__} does not declare in `said` who may send it, and when.")
        # The bases in this file leave it to their classes.
        if cls.repeated is None and cls.said.keys() & _TO_A_STAGE and cls.__module__ != __name__:
            raise TypeError(
                f"{cls.__name__} does not declare in `repeated` until when it is said again to a "
                "worker that takes a lost one's place."
            )

    @property
    def step(self) -> int | None:
        """The message's step; None for a message without a step."""
        return None

    @property
    def key(self) -> Key | None:
        """The message's micro-batch and visit; None for a message without them."""
        return None

    @property
    def stage_number(self) -> int:
        """The stage that takes the message; 0 for the coordinator's stage and without a stage."""
        return 0

    @property
    def sets(self) -> Hashable:
        """The subject of a standing message; a later message with an equal subject replaces it.
        None if later messages do not replace it."""
        return None

    @property
    def requested_activity(self) -> str:
        """The receiver's work on the message; empty if it takes no time."""
        return self.requests.format(message=self)

    @property
    def reported_activity(self) -> str:
        """The sender's latest or present work; empty if the message does not report it."""
        return self.reports.format(message=self)

    def __str__(self) -> str:
        names = (name for name in self.__struct_fields__ if name != _NOT_SHOWN)
        shown = {name: getattr(self, name) for name in names if name != "request" or self.request}
        fields = " ".join(f"{name}={str(value)[:60]}" for name, value in shown.items())
        return printable(f"{type(self).__name__} {fields}".rstrip())


def kinds_below(base: type[Message]) -> Iterator[type[Message]]:
    """The classes of messages under a base, if they have no subclasses."""
    for kind in base.__subclasses__():
        yield from kinds_below(kind) if kind.__subclasses__() else [kind]


class IdleRequest(Message, frozen=True):
    """Base of the coordinator's requests before a stage is deployed."""

    said = by(Speaker.COORDINATOR, State.IDLE)


class IdleAnswer(Message, frozen=True):
    """Base of a worker's answers before a stage is deployed."""

    said = by(Speaker.WORKER, State.IDLE)


class ServingRequest(Message, frozen=True):
    """Base of the coordinator's messages to a serving stage."""

    said = by(Speaker.COORDINATOR, State.SERVING)


class LoadingRequest(Message, frozen=True):
    """Base of the coordinator's requests while a stage is loaded and while it serves."""

    said = by(Speaker.COORDINATOR, State.LOADING, State.SERVING)


class StampedRequest(ServingRequest, frozen=True, kw_only=True):
    """Base of requests with a place between forwards and backwards.

    A worker carries one out when its stages have run so many ``forwards`` and ``backwards`` of the
    present step together, however late or early it comes. More of them are an error if
    ``is_exact``.
    """

    is_exact: ClassVar[bool] = True
    forwards: Count = 0
    backwards: Count = 0


class StageReport(Message, frozen=True):
    """Base of a stage's messages while it is loaded and while it serves."""

    said = by(Speaker.WORKER, State.LOADING, State.SERVING)


class InstantMessage(Message, frozen=True):
    """Base of the messages between the channels themselves; they do not reach the inbox."""

    said = by_anyone()
    repeated = Repeated.NEVER


class ForStage(Message, frozen=True, kw_only=True):
    """Base of the messages for a stage; stage 0 is the coordinator's."""

    said = by(Speaker.COORDINATOR, State.SERVING)
    stage: Count = 0

    @property
    def stage_number(self) -> int:
        """The stage that takes the message."""
        return self.stage


class MicrobatchMessage(ForStage, frozen=True):
    """Base of the messages about one micro-batch and visit in a step."""

    recorded_as = "take"
    step: Count
    microbatch: Count
    visit: Count

    @property
    def key(self) -> Key:
        """The message's micro-batch and visit."""
        return Key(self.microbatch, self.visit)
