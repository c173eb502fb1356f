"""A session: one end of a conversation. It enforces the rules that messages declare in `bases`.

    coordinator ─ worker              upstream worker ─ downstream worker

    OPENING ── Hello ──▶ GREETING     OPENING ── Hello ──▶ GREETING
    GREETING ─ Welcome ▶ IDLE         GREETING ─ Welcome ▶ LINKED
    IDLE: measuring                   LINKED: activations down, gradients up; probes of the link;
    IDLE ───── Deploy ─▶ LOADING              moving tensors, from the dialling worker
    LOADING ── Launch ─▶ SERVING
    SERVING: steps, state, optimizer
    SERVING ── Deploy ─▶ LOADING: layers have moved

    watcher ─ worker: OPENING ─ Hello ▶ GREETING ─ Welcome ▶ TELLING ─ Status ▶ CLOSED

    joiner ─ door: OPENING ─ Hello ▶ GREETING ─ Welcome ▶ WAITING: Welcome again, with news
    A joiner is a worker that has dialled a coordinator. The coordinator takes it in by a Hello over
    the same connection: the conversation of the first drawing begins.

Every class of messages, or its base, says who may send it in its states (`by`). `python -m
tests.protocol.tables` prints the resulting tables: for each speaker and state, the messages.
"""

from __future__ import annotations

from typing import Literal

from ..errors import LocalProtocolError, RemoteProtocolError
from .bases import Message, Speaker, State

RUN_LETTERS = 8
"""Letters of a run's name; the names of the run's sessions begin with them."""


def are_of_one_run(name: str, other: str) -> bool:
    """Whether two sessions belong to one run, by their names."""
    return name[:RUN_LETTERS] == other[:RUN_LETTERS]


class Session:
    """One end of a conversation. Both ends check the messages of both directions."""

    def __init__(self, ours: Speaker, theirs: Speaker) -> None:
        self.ours = ours
        self._theirs = theirs
        self._step = 0
        self.state = State.OPENING

    def may_send(self, message: Message) -> bool:
        """Whether the rules allow a message from another process of the run.

        It may be late: the coordinator may have ended its step since.
        """
        is_late = message.step not in (None, self._step)
        return not is_late and (self.ours, self.state) in message.said

    def sent(self, message: Message) -> None:
        """Note a message just before it is sent.

        Raises:
            LocalProtocolError: If the rules forbid it.
        """
        following = message.said.get((self.ours, self.state))
        if following is None:
            raise LocalProtocolError(f"{message} must not be sent while {self.state.value}.")
        if (message.begins_step or message.resumes_step) and message.step is not None:
            self._step = message.step
        self.state = following

    def received(self, message: Message) -> None:
        """Note a message from the peer.

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
        if message.resumes_step and self._step == 0:
            self._step = message.step
            return
        expected = self._step + 1 if message.begins_step else self._step
        if message.step != expected or message.step == 0:
            raise RemoteProtocolError(
                f"{type(message).__name__} is for step {message.step}, out of order: "
                f"step {expected} was expected."
            )
        self._step = message.step


Role = Literal["coordinator", "neighbor", "watcher", "joiner"]

# Who opens a conversation and who answers, by the Hello's role.
_ENDS: dict[str, tuple[Speaker, Speaker]] = {
    "coordinator": (Speaker.COORDINATOR, Speaker.WORKER),
    "neighbor": (Speaker.UPSTREAM, Speaker.DOWNSTREAM),
    "watcher": (Speaker.WATCHER, Speaker.WATCHED),
    "joiner": (Speaker.JOINER, Speaker.DOOR),
}


def opening_session(role: str) -> Session:
    """The opening end of a conversation in this role."""
    opener, answerer = _ENDS[role]
    return Session(opener, answerer)


def answering_session(role: str) -> Session:
    """The worker's end of a conversation opened by a peer in this role."""
    opener, answerer = _ENDS[role]
    return Session(answerer, opener)
