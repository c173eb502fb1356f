"""The rules of a conversation: what a message declares of itself, and a session that enforces it.

    coordinator ─ worker              upstream worker ─ downstream worker

    OPENING ── Hello ──▶ GREETING     OPENING ── Hello ──▶ GREETING
    GREETING ─ Welcome ▶ IDLE         GREETING ─ Welcome ▶ LINKED
    IDLE: measuring                   LINKED: activations down, gradients up; probes of the link;
    IDLE ───── Deploy ─▶ LOADING              tensors that move, from the one that has dialled
    LOADING ── Launch ─▶ SERVING
    SERVING: steps, state, optimizer
    SERVING ── Deploy ─▶ LOADING: layers have moved

    watcher ─ worker: OPENING ─ Hello ▶ GREETING ─ Welcome ▶ TELLING ─ Status ▶ CLOSED

    joiner ─ door: OPENING ─ Hello ▶ GREETING ─ Welcome ▶ WAITING: Welcome again, with news
    A joiner is a worker that has dialled a coordinator. The coordinator takes it in by a Hello over
    the same connection, which begins the conversation of the first drawing.

Every class of messages, or its base, says who may send it in which states (`by`). `python -m
tests.protocol.tables` prints the tables that follow: for each speaker and state, the messages.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import msgspec

from ..errors import LocalProtocolError, RemoteProtocolError
from .fields import Key, SpanKind, printable


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


# The state that follows a message, by who sends it in which state.
Rules = dict[tuple[Speaker, State], State]


def by(speaker: Speaker, *states: State, then: State | None = None) -> Rules:
    """Allow a message to one speaker in these states; the state stays unless ``then`` follows."""
    return {(speaker, state): then or state for state in states}


def by_anyone(*states: State, then: State | None = None) -> Rules:
    """Allow a message to every speaker in these states, or in every state if none is given."""
    return {
        (speaker, state): then or state for speaker in Speaker for state in states or tuple(State)
    }


# The name of fields that get into no log and no error.
_NOT_SHOWN = "secret"


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag on the wire is the class's name.

    Each class declares here what the rest of the package has to know of it.

    Attributes:
        said: Who may send the message in which state, and the state that follows. Every class has
            to declare it, unless its base does.
        begins_step: The message begins the step after the present one.
        is_kept: The receiver keeps the tensors for long, so each frame gets memory of its own
            instead of a buffer that is used again.
        is_probe: The tensors are large and unlike later ones, so their buffers are not kept.
        requests: What the receiver does when it carries out the message, in words for people. Like
            ``reports``, it may name fields: ``"step {message.step}"``.
        reports: What the sender has just done, in words for people.
        recorded_as: How the receiver records the time that it takes to carry out the message.
    """

    said: ClassVar[Rules] = {}
    begins_step: ClassVar[bool] = False
    is_kept: ClassVar[bool] = False
    is_probe: ClassVar[bool] = False
    requests: ClassVar[str] = ""
    reports: ClassVar[str] = ""
    recorded_as: ClassVar[SpanKind | None] = None

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__(**config)
        if not cls.said:
            raise TypeError(f"{cls.__name__} does not declare in `said` who may send it, and when.")

    @property
    def step(self) -> int | None:
        """The step that the message is about; None if it is about none."""
        return None

    @property
    def key(self) -> Key | None:
        """The micro-batch and visit that the message is about; None if it is about none."""
        return None

    @property
    def stage_number(self) -> int:
        """The stage that takes the message; 0 if it is the coordinator's, or there is none."""
        return 0

    @property
    def requested_activity(self) -> str:
        """What the receiver does when it carries out the message; empty if that takes no time."""
        return self.requests.format(message=self)

    @property
    def reported_activity(self) -> str:
        """What the sender has just done or is doing; empty if the message does not tell."""
        return self.reports.format(message=self)

    def __str__(self) -> str:
        names = (name for name in self.__struct_fields__ if name != _NOT_SHOWN)
        shown = {name: getattr(self, name) for name in names}
        fields = " ".join(f"{name}={str(value)[:60]}" for name, value in shown.items())
        return printable(f"{type(self).__name__} {fields}".rstrip())


def kinds_below(base: type[Message]) -> Iterator[type[Message]]:
    """The classes of messages that derive from a base and have no subclasses themselves."""
    for kind in base.__subclasses__():
        yield from kinds_below(kind) if kind.__subclasses__() else [kind]


class Session:
    """One end of a conversation. Both ends check the messages of both directions."""

    def __init__(self, ours: Speaker, theirs: Speaker) -> None:
        self.ours = ours
        self._theirs = theirs
        self._step = 0
        self.state = State.OPENING

    def may_send(self, message: Message) -> bool:
        """Whether the rules allow a message that another process of the run has said.

        It may be late: of a step that the coordinator has ended since.
        """
        is_late = message.step not in (None, self._step)
        return not is_late and (self.ours, self.state) in message.said

    def sent(self, message: Message) -> None:
        """Note a message that is about to be sent.

        Raises:
            LocalProtocolError: If the rules forbid it.
        """
        following = message.said.get((self.ours, self.state))
        if following is None:
            raise LocalProtocolError(f"{message} must not be sent while {self.state.value}.")
        if message.begins_step and message.step is not None:
            self._step = message.step
        self.state = following

    def received(self, message: Message) -> None:
        """Note a message that the peer sent.

        Raises:
            RemoteProtocolError: If the rules forbid it.
        """
        following = message.said.get((self._theirs, self.state))
        if following is None:
            raise RemoteProtocolError(f"{message} must not come while {self.state.value}.")
        if self._theirs is Speaker.COORDINATOR:
            self._check_step(message)
        self.state = following

    def _check_step(self, message: Message) -> None:
        """Check that the coordinator begins the steps in order and speaks of the present one."""
        if message.step is None:
            return
        expected = self._step + 1 if message.begins_step else self._step
        if message.step != expected or message.step == 0:
            raise RemoteProtocolError(
                f"{type(message).__name__} is for step {message.step}, out of order: "
                f"step {expected} was expected."
            )
        self._step = message.step


Role = Literal["coordinator", "neighbor", "watcher", "joiner"]

# Who opens a conversation and who answers, by the role that the Hello names.
_ENDS: dict[str, tuple[Speaker, Speaker]] = {
    "coordinator": (Speaker.COORDINATOR, Speaker.WORKER),
    "neighbor": (Speaker.UPSTREAM, Speaker.DOWNSTREAM),
    "watcher": (Speaker.WATCHER, Speaker.WATCHED),
    "joiner": (Speaker.JOINER, Speaker.DOOR),
}


def opening_session(role: str) -> Session:
    """The end that opens a conversation in this role."""
    opener, answerer = _ENDS[role]
    return Session(opener, answerer)


def answering_session(role: str) -> Session:
    """The worker's end of a conversation that a peer has opened in this role."""
    opener, answerer = _ENDS[role]
    return Session(answerer, opener)
