"""A worker's second processes: sessions of one run beside each other, and their shares of memory.

If every idle worker is taken, a machine of the run takes a lost worker's place beside its own:

    coordinator ─ OpenSession ─▶ first session ─ "beside" ─▶ warm process ─ starts ─▶ second process

All of these processes accept connections at the worker's one address, and the system gives each
connection to any of them. A second process answers only calls for its session, and the first
process answers all others. The wrong process asks the caller to dial again, and leaves the next
connections to the others for a moment. If the worker has joined its run, a second process dials the
coordinator too, because the coordinator may not reach the worker's address.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ..protocol import messages as m

MOST_BESIDE = 8
"""So many second processes a worker starts at most."""

_NOBODY = "This worker cannot start another process; use another worker."
_NOT_BEGUN = "The process of the session ended before it could serve."
# So long a process leaves connections to the others; the others look for new ones all the time.
_LEAVING_SECONDS = 0.1


@dataclass(frozen=True)
class Second:
    """The purpose of a second process.

    Args:
        session: The name of its only session.
        most_bytes: Its largest share of the device's memory, if the owner sets a limit.
    """

    session: str
    most_bytes: int

    def limit(self, owner_bytes: int | None) -> int | None:
        """The largest memory of the process, if its owner sets a limit."""
        return None if owner_bytes is None else min(owner_bytes, self.most_bytes)


class Beside:
    """The sessions in other processes of the same worker. Any thread may call it.

    Attributes:
        only: The name of this process's only session; empty in a first process.
        ask: Asks the warm process to start a second one; None without a warm process.
    """

    def __init__(self) -> None:
        self.only = ""
        self.ask: Callable[[Second], None] | None = None
        self._changing = threading.Lock()
        # By session: the requested processes, the serving or waiting ones, and the receivers of the
        # answers.
        self._seconds: dict[str, Second] = {}
        self._statuses: dict[str, m.Status] = {}
        self._asking: dict[str, Callable[[str], None]] = {}
        self._leaves_until_seconds = 0.0

    def begin(self, second: Second | None, ask: Callable[[Second], None]) -> None:
        """This is a second process, or a first one that asks for second ones."""
        if second is None:
            self.ask = ask
        else:
            self.only = second.session

    def is_elsewhere(self, session: str) -> bool:
        """Whether another process answers callers for this session. An empty name means any
        session.
        """
        if self.only:
            return session != self.only
        with self._changing:
            return session in self._statuses

    def leave_next(self) -> None:
        """Leave the next connections to the other processes for a moment."""
        self._leaves_until_seconds = time.monotonic() + _LEAVING_SECONDS

    @property
    def leaving_seconds(self) -> float:
        """How long this process must leave connections to the others."""
        return max(0.0, self._leaves_until_seconds - time.monotonic())

    @property
    def obstacle(self) -> str:
        """Why this worker cannot start another process, as a sentence; empty if it can."""
        if self.ask is None:
            return _NOBODY
        with self._changing:
            num_beside = len(self._seconds)
        if num_beside >= MOST_BESIDE:
            return (
                f"This worker serves {num_beside} second sessions already, and this is the limit."
            )
        return ""

    @property
    def granted_bytes(self) -> int:
        """The other processes' share of the owner's allowed memory."""
        with self._changing:
            return sum(second.most_bytes for second in self._seconds.values())

    @property
    def actions(self) -> dict[str, Callable[..., None]]:
        """The function that carries out each word of the warm process about other processes."""
        return {
            "first": self.answer_all,
            "begun": self.note_begun,
            "refused": self.note_refused,
            "gone": self.note_end,
            "does": self.note_status,
        }

    def added_to(self, own: m.Status) -> m.Status:
        """The status of this process, with the latest stages and memory of the others."""
        with self._changing:
            reports = [own, *self._statuses.values()]
        used_bytes = sum(each.used_bytes for each in reports)
        if (stage := own.stage) is not None:
            stages = [s for each in reports if each.stage for s in each.stage.stages]
            stages.sort(key=lambda each: each.number)
            stage = msgspec.structs.replace(stage, stages=stages)
        return msgspec.structs.replace(own, used_bytes=used_bytes, stage=stage)

    def open(self, second: Second, on_answer: Callable[[str], None]) -> None:
        """Start another process.

        Args:
            second: Its purpose.
            on_answer: Called, in any thread, with the reason for a failed start; the reason is
                empty after a successful start.
        """
        obstacle, name = self.obstacle, second.session
        # The name comes from another machine.
        if not (name.isascii() and name.isalnum()):
            obstacle = f"{name!r:.80} is not a name of a session: take letters and digits."
        if obstacle or self.ask is None:
            on_answer(obstacle)
            return
        with self._changing:
            self._seconds[name], self._asking[name] = second, on_answer
        self.ask(second)

    def note_begun(self, session: str) -> None:
        """A process waits for this session."""
        with self._changing:
            self._statuses[session] = m.Status(0.0, 0, None)
        self._answer(session, "")

    def note_refused(self, session: str, reason: str) -> None:
        """The process for this session could not be started."""
        with self._changing:
            self._seconds.pop(session, None)
        self._answer(session, reason)

    def note_end(self, session: str) -> None:
        """The process of this session has ended."""
        with self._changing:
            self._statuses.pop(session, None)
        self.note_refused(session, _NOT_BEGUN)

    def note_status(self, session: str, status: m.Status) -> None:
        """The process of this session has reported its status."""
        with self._changing:
            if session in self._statuses:
                self._statuses[session] = status

    def answer_all(self) -> None:
        """The first process is gone: this one answers all callers from now on."""
        self.only = ""

    def _answer(self, session: str, reason: str) -> None:
        with self._changing:
            on_answer = self._asking.pop(session, None)
        if on_answer is not None:
            on_answer(reason)
