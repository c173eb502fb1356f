"""Sessions beside each other on one machine: who answers whom, and how much memory each has."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Pipe
from queue import SimpleQueue

import pytest

from lightning_hetero.discovery.find import ask_status
from lightning_hetero.errors import WorkerUnreachable
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.fields import StageRange, StageStatus
from lightning_hetero.protocol.frames import Frame
from lightning_hetero.transport.channel import Inbox
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.handshake import dial
from lightning_hetero.worker import worker as worker_module
from lightning_hetero.worker.second_processes import MOST_BESIDE, Beside, Second
from lightning_hetero.worker.takeover import room_bytes

from ..transport.pairs import PATIENCE_SECONDS, QUICK, serving_worker


class Asked:
    """A first process whose warm process notes what it is asked for."""

    def __init__(self) -> None:
        self.beside = Beside()
        self.wanted: list[Second] = []
        self.answers: list[str] = []
        self.beside.ask = self.wanted.append

    def open(self, name: str, most_bytes: int = 10) -> None:
        self.beside.open(Second(name, most_bytes), self.answers.append)


def status_of(number: int, used_bytes: int) -> m.Status:
    """The status of a process with one stage."""
    stages = [StageRange(number, 4, 6)]
    return m.Status(9.0, used_bytes, StageStatus("run", "here", stages, 2, 1.0, 0.5, []))


def test_a_second_process_answers_only_its_session_and_the_first_one_all_others() -> None:
    first, second = Asked(), Beside()
    second.only = "b"
    first.open("b")
    assert not first.beside.is_elsewhere("b")  # nobody waits for it yet
    first.beside.note_begun("b")
    assert first.answers == [""]
    for name, is_second in (("a", False), ("b", True), ("", False)):
        assert first.beside.is_elsewhere(name) == is_second
        assert second.is_elsewhere(name) != is_second
    first.beside.note_end("b")
    assert not first.beside.is_elsewhere("b")
    second.answer_all()
    assert not second.is_elsewhere("a")


def test_why_no_second_process_can_be_started_is_told() -> None:
    asked = Asked()
    asked.open("a name")
    asked.open("refused")
    asked.beside.note_refused("refused", "The worker ends.")
    asked.open("died")
    asked.beside.note_end("died")
    alone = Beside()
    alone.open(Second("b", 1), asked.answers.append)
    expected = ["'a name' is not a name", "The worker ends.", "ended before it could serve"]
    expected.append("This worker cannot start another process")
    for found, part in zip(asked.answers, expected, strict=True):
        assert part in found
    assert [second.session for second in asked.wanted] == ["refused", "died"]
    assert asked.beside.granted_bytes == 0


def test_a_worker_starts_some_second_processes_and_no_more() -> None:
    asked = Asked()
    for number in range(MOST_BESIDE):
        asked.open(str(number))
    assert not asked.answers
    assert asked.beside.granted_bytes == 10 * MOST_BESIDE
    asked.open("another")
    assert "and this is the limit" in asked.answers[0]


def test_what_second_processes_do_is_known_while_they_live() -> None:
    asked, own, status = Asked(), status_of(5, 3), status_of(1, 7)
    asked.beside.note_status("b", status)
    assert asked.beside.added_to(own) == own
    asked.open("b")
    asked.beside.note_begun("b")
    assert asked.beside.added_to(own) == own
    # As it comes from another process.
    ours, theirs = Pipe()
    with ours, theirs:
        theirs.send(status)
        asked.beside.note_status("b", ours.recv())
    both = asked.beside.added_to(own)
    assert both.used_bytes == 10
    assert both.stage is not None
    assert [stage.number for stage in both.stage.stages] == [1, 5]
    free = asked.beside.added_to(m.Status(9.0, 3, None))
    assert free == m.Status(9.0, 10, None)
    asked.beside.note_end("b")
    assert asked.beside.added_to(own) == own


def test_a_second_process_takes_its_share_of_the_memory_that_its_owner_allows() -> None:
    second = Second("0123abc", 2**33)
    assert second.limit(None) is None
    assert second.limit(2**32) == 2**32
    assert second.limit(2**34) == 2**33


@pytest.mark.parametrize(
    ("allowed_bytes", "granted_bytes", "expected"),
    [(None, 0, 50), (None, 30, 50), (60, 0, 40), (60, 15, 25), (60, 45, 0), (200, 0, 50)],
)
def test_a_second_session_gets_what_the_owner_allows_beside_the_first(
    allowed_bytes: int | None, granted_bytes: int, expected: int
) -> None:
    """50 bytes are free, and the first session has taken 20 at once."""
    assert room_bytes(50, 20, allowed_bytes, granted_bytes) == expected


@pytest.mark.follows(
    "another process of this worker serves this session; dial again",
)
def test_a_peer_at_the_wrong_process_is_told_to_dial_again() -> None:
    with serving_worker() as (worker, address), ExitStack() as stack:
        channel, _ = dial(address, "coordinator", "a", QUICK, Identity())
        channel.start(Inbox())
        stack.callback(channel.close, m.Goodbye())
        beside = worker.host.beside
        assert beside is not None
        beside.ask = lambda _second: None
        beside.open(Second("b", 1), lambda _reason: None)
        beside.note_begun("b")
        quick = replace(QUICK, connect_seconds=0.3)
        with pytest.raises(WorkerUnreachable, match="another process of this worker serves"):
            dial(address, "neighbor", "b", quick, Identity())
        beside.note_end("b")
        with pytest.raises(WorkerUnreachable, match="does not serve the session"):
            dial(address, "neighbor", "b", quick, Identity())


@pytest.mark.follows("install the whole package there.")
@pytest.mark.parametrize(
    ("is_installed", "reason"),
    [(True, "This worker cannot start another process"), (False, "has no part for AskRoom")],
)
def test_a_worker_without_the_part_for_second_processes_refuses_by_name(
    is_installed: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox: Inbox = SimpleQueue()
    with monkeypatch.context() as patch, ExitStack() as stack:
        if not is_installed:
            patch.setattr(worker_module, "other_processes", lambda: None)
        _, address = stack.enter_context(serving_worker())
        assert ask_status(address, QUICK, Identity()).status.stage is None
        channel, _ = dial(address, "coordinator", "a", QUICK, Identity())
        stack.callback(channel.close, m.Goodbye())
        channel.start(inbox)
        channel.send(m.AskRoom(request=1))
        told = inbox.get(timeout=PATIENCE_SECONDS).content
        assert isinstance(told, Frame)
        assert isinstance(told.message, m.RoomTold if is_installed else m.Failure)
        assert reason in told.message.reason
