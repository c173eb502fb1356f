"""A worker that dials: when it dials again, whom it serves, and when it gives up."""

from __future__ import annotations

import itertools
import threading
from contextlib import ExitStack
from dataclasses import replace
from queue import SimpleQueue

import pytest

from lightning_hetero.launch.join import Door
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame
from lightning_hetero.transport.channel import Inbox
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.handshake import run_at
from lightning_hetero.transport.tls import Credentials
from lightning_hetero.worker.join import Joiner, pauses
from lightning_hetero.worker.worker import Worker

from ..launch.guests import CALM, TOKEN, WITH_TOKEN, door
from ..transport.pairs import PATIENCE_SECONDS, closed_address, serving_worker


def test_pauses_grow_up_to_five_seconds_and_differ_by_chance() -> None:
    assert list(itertools.islice(pauses(lambda: 1.0), 7)) == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert list(itertools.islice(pauses(lambda: 0.0), 2)) == [0.1, 0.2]


def joining(worker: Worker, at: Door) -> threading.Thread:
    joiner = Joiner(at.address, "a", PATIENCE_SECONDS)
    thread = threading.Thread(target=joiner.run, args=(worker, pytest.fail), daemon=True)
    thread.start()
    return thread


def test_it_serves_over_the_connection_that_it_has_dialled_and_joins_again() -> None:
    with serving_worker(Credentials(TOKEN)) as (worker, address), door() as opened:
        thread = joining(worker, opened)
        for session in ("first", "second"):
            opened.wait(PATIENCE_SECONDS)
            assert opened.begin(None) == {"a": address}
            channel, welcome, _ = opened.admit("a", session)
            assert welcome.equipment.device == "cpu"
            channel.start(SimpleQueue())
            channel.close(m.Goodbye())
            opened._members.clear()  # as another run's door begins
        worker.stop()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def test_a_session_goes_on_after_its_connection_broke() -> None:
    """The coordinator dials the address that the worker has offered."""
    lingering = replace(CALM, linger_seconds=PATIENCE_SECONDS)
    with (
        serving_worker(Credentials(TOKEN), CALM) as (worker, _),
        door(deadlines=lingering) as opened,
    ):
        thread = joining(worker, opened)
        opened.wait(PATIENCE_SECONDS)
        opened.begin(None)
        channel, *_ = opened.admit("a", "session")
        inbox: Inbox = SimpleQueue()
        channel.start(inbox)
        for is_cut in (True, False):
            channel.send(m.DescribeDevice())
            arrival = inbox.get(timeout=PATIENCE_SECONDS)
            assert isinstance(arrival.content, Frame), arrival.content
            assert isinstance(arrival.content.message, m.DeviceDescribed)
            if is_cut:
                channel.line.connection.shut_down()
        channel.close(m.Goodbye())
        worker.stop()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize("is_other_run", [True, False])
def test_the_door_tells_whether_a_coordinator_that_is_away_comes_back(is_other_run: bool) -> None:
    """The session of a killed run ends when another run is at its door, and lingers before."""
    lingering = replace(CALM, linger_seconds=20 * PATIENCE_SECONDS)
    with serving_worker(Credentials(TOKEN), CALM) as (worker, _), ExitStack() as doors:
        first = doors.enter_context(door(deadlines=lingering))
        thread = joining(worker, first)
        first.wait(PATIENCE_SECONDS)
        first.begin(None)
        channel, *_ = first.admit("a", "session")
        channel.start(SimpleQueue())
        channel.line.make_final()  # as a killed process, which dials no more
        channel.line.connection.shut_down()
        if is_other_run:
            first.close()
            second = Door(first.address, WITH_TOKEN, CALM, least=1)
            doors.callback(second.close)
            second.wait(PATIENCE_SECONDS)
        else:
            asked = [run_at(first.address, first._run, CALM, WITH_TOKEN) for _ in range(2)]
            assert asked == [first._run] * 2
            assert first.names() == []
        assert worker.has_run is not is_other_run
        worker.give_up_coordinator("The test is over.")
        worker.stop()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def test_it_gives_up_with_a_sentence() -> None:
    said: list[str] = []
    with serving_worker() as (worker, _):
        where = closed_address()

        def on_alone(reason: str) -> None:
            said.append(reason)
            worker.drain()

        Joiner(where, "a", rejoin_seconds=0).run(worker, on_alone)
    assert said[0].startswith(f"No coordinator has let this worker in at {where} for 0 s")
    assert "`--rejoin-seconds`" in said[0]


def test_without_the_token_it_says_why_it_is_not_let_in(caplog: pytest.LogCaptureFixture) -> None:
    with serving_worker() as (worker, _), door(identity=WITH_TOKEN) as opened:
        Joiner(opened.address, "a", rejoin_seconds=0.3).run(worker, lambda _: worker.drain())
    assert caplog.text.count("cannot join yet") == 1
    assert "did not answer as a coordinator that waits for workers" in caplog.text


def test_equipment_goes_both_ways() -> None:
    with serving_worker() as (worker, _), door(identity=Identity()) as opened:
        thread = joining(worker, opened)
        opened.wait(PATIENCE_SECONDS)
        assert opened._guests["a"].equipment == worker.host.identity.equipment
        worker.stop()
        thread.join(PATIENCE_SECONDS)
