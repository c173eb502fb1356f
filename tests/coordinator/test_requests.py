"""The table of open requests: which answer is taken, which is dropped, and which breaks a rule."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_hetero.coordinator.requests import Answer, Requests
from lightning_hetero.coordinator.roster import Phase
from lightning_hetero.errors import RemoteProtocolError, StageFailed, WorkerLost
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame


class FakeWorker:
    """What the table looks at."""

    row = SimpleNamespace(phase=Phase.SERVING)
    channel = SimpleNamespace(send=lambda *_: None)

    def __str__(self) -> str:
        return "stage 1 on a"


class Talk:
    """Stands for the connections: what is heard is a list of things that happen."""

    def __init__(self) -> None:
        self.requests, self.worker = Requests(self), FakeWorker()  # type: ignore[arg-type]
        self.workers: Any = [self.worker]
        self.events = deque[Callable[[], None]]()
        self.on_send: Callable[[], None] = lambda: None

    def settle(self) -> None:
        pass

    def check_usable(self) -> None:
        pass

    def send(self, _worker: Any, _message: m.Message) -> None:
        self.on_send()

    def hear(self) -> None:
        self.events.popleft()()

    def ask(self, message: m.Message) -> Answer:
        return self.requests.send(self.worker, message)  # type: ignore[arg-type]

    def says(self, answer: m.Message) -> None:
        self.requests.take(self.worker, Frame(answer))  # type: ignore[arg-type]

    def is_lost(self, *but: int) -> None:
        self.requests.forget(self.worker, but)  # type: ignore[arg-type]

    def fails(self, number: int) -> None:
        error = StageFailed("It has no memory.")
        if not self.requests.fail(self.worker, number, error):  # type: ignore[arg-type]
            raise error


def test_pieces_and_the_last_answer_close_a_request_and_another_one_breaks_a_rule() -> None:
    talk = Talk()
    asked = talk.ask(m.FetchTensors(["a"]))
    number = asked.message.request
    said = [m.TensorContent("a", request=number), m.Done(request=number)]
    talk.events += [lambda each=each: talk.says(each) for each in said]
    assert [each for _, each, _ in talk.requests.parts([asked], m.Message)] == said
    with pytest.raises(RemoteProtocolError, match="It said Done request=1 without being asked"):
        talk.says(said[-1])


def test_what_comes_after_an_interruption_is_dropped_up_to_the_last_answer() -> None:
    talk = Talk()
    first, second = talk.ask(m.FetchTensors(["a"])), talk.ask(m.FetchTensors(["b"]))

    def interrupted() -> None:
        raise KeyboardInterrupt

    talk.events.append(interrupted)
    with pytest.raises(KeyboardInterrupt):
        talk.requests.finish([first])
    for name, number in (("a", 1), ("b", 2)):
        talk.says(m.TensorContent(name, request=number))
        talk.says(m.Done(request=number))
    assert not first.arrived
    [found] = [each for _, each, _ in talk.requests.parts([second], m.TensorContent)]
    assert found.name == "b"


def test_a_lost_process_answers_nothing_but_what_the_next_one_gets_too() -> None:
    talk = Talk()
    first, second = talk.ask(m.MeasureNorms(1, None)), talk.ask(m.MeasureNorms(1, None))
    talk.events += [lambda: talk.is_lost(2), lambda: talk.says(m.Norms({}, request=2))]
    with pytest.raises(WorkerLost, match="stage 1 on a was lost before it answered MeasureNorms"):
        first.result(m.Norms)
    assert second.result(m.Norms) == m.Norms({}, request=2)


def test_a_request_that_replaces_the_process_as_it_is_sent_is_asked_of_the_next_one() -> None:
    talk = Talk()
    talk.on_send = talk.is_lost
    asked = talk.ask(m.MeasureNorms(1, None))
    talk.says(m.Norms({"a": 1.0}, request=1))
    assert asked.result(m.Norms).norms == {"a": 1.0}


def test_a_failure_elsewhere_is_raised_at_once_and_one_of_several_when_all_are_over() -> None:
    talk = Talk()
    answers = [talk.ask(m.Launch()) for _ in range(2)]
    talk.events += [lambda: talk.fails(1), lambda: talk.says(m.Done(request=2))]
    with pytest.raises(StageFailed):
        talk.requests.finish(answers)
    assert not talk.events
    asked = talk.ask(m.Launch())
    talk.events += [lambda: talk.fails(0), lambda: talk.says(m.Done(request=3))]
    with pytest.raises(StageFailed):
        asked.result(m.Done)
    assert len(talk.events) == 1


def test_a_failure_in_what_was_given_up_is_no_error() -> None:
    talk = Talk()
    asked = talk.ask(m.Launch())
    talk.requests.give_up_step()
    end = asked.message.request + 1
    talk.fails(0)
    talk.says(m.Done(request=end))
    with pytest.raises(StageFailed):
        talk.fails(0)
    with pytest.raises(StageFailed):
        talk.fails(asked.message.request)
    asked = talk.ask(m.Launch())
    asked.is_dropped = True
    talk.fails(asked.message.request)
