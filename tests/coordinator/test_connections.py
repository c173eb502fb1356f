"""Deadlines of the coordinator stand still while a connection is away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_hetero.coordinator.connections import Connections
from lightning_hetero.coordinator.member import Member
from lightning_hetero.coordinator.neighbors import RemoteNeighbors
from lightning_hetero.coordinator.roster import Phase
from lightning_hetero.coordinator.session import Listening
from lightning_hetero.coordinator.worker_stages import Holdings
from lightning_hetero.errors import ChannelError, WorkerLost, WorkerUnreachable
from lightning_hetero.events import Event
from lightning_hetero.pipeline.placement import Placement
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.tensor_bytes import BufferPool
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.channel import Arrival
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.worker.owner import Owner

from ..faults.relay import Relay, relay_to
from ..transport.pairs import serving_worker

PATIENCE_SECONDS = 0.05
AWAY_SECONDS = 0.5
DEADLINES = Deadlines(linger_seconds=60.0, leave_seconds=0.1)


@pytest.fixture(autouse=True)
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process speaks to people; Lightning says so when it is imported."""
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)


@contextmanager
def connected(
    allowed_seconds: float = 120.0, deadlines: Deadlines = DEADLINES
) -> Iterator[tuple[Connections, Relay]]:
    """The connections to two workers, and the relay to the second one."""
    owner = Owner(linger_seconds=allowed_seconds)
    with (
        serving_worker(owner=owner) as (_, first),
        serving_worker(owner=owner) as (_, second),
        relay_to(str(second)) as relay,
    ):
        addresses = {str(each): each for each in (first, Address.parse(relay.address))}
        source = Listening(addresses, deadlines, Identity())
        connections = Connections([*addresses], source, deadlines, m.Equipment(), BufferPool)
        layers = SimpleNamespace(holdings=Holdings(), connections=connections)
        stages: Any = SimpleNamespace(layers=layers, ways={}, in_flight=1)
        RemoteNeighbors(stages)
        try:
            yield connections, relay
        finally:
            connections.close()


def later(relay: Relay) -> threading.Timer:
    timer = threading.Timer(AWAY_SECONDS, relay.plug)
    timer.daemon = True
    return timer


def cut(relay: Relay, worker: Member) -> None:
    """Cut the connection to a worker, and wait until both threads of its channel know."""
    noticed = threading.Event()
    worker.channel.report_breaks(lambda _reason: noticed.set())
    relay.pull()
    assert noticed.wait(60)


def test_the_time_of_a_broken_connection_does_not_count() -> None:
    with connected() as (connections, relay):
        worker = connections.workers[1]
        cut(relay, worker)
        later(relay).start()
        with pytest.raises(WorkerLost, match="No stage returned a result"):
            connections.receive(PATIENCE_SECONDS)
        assert not worker.is_cut_off


def test_the_time_of_a_broken_connection_between_two_workers_does_not_count() -> None:
    with connected() as (connections, _):
        first, second = connections.workers
        connections.asides[m.NeighborAway](first, m.NeighborAway(second.number, "It was cut."))
        assert first.is_cut_off

        def come_back() -> None:
            connections.asides[m.NeighborBack](first, m.NeighborBack(second.number))

        timer = threading.Timer(AWAY_SECONDS, come_back)
        timer.daemon = True
        timer.start()
        with pytest.raises(WorkerLost, match="No stage returned a result"):
            connections.receive(PATIENCE_SECONDS)
        assert not first.is_cut_off


@pytest.mark.parametrize("number", [0, 1, 7])
def test_a_worker_that_tells_of_a_worker_that_is_none_of_its_neighbors_is_lost(number: int) -> None:
    with connected() as (connections, _):
        reporter = connections.workers[0]
        with pytest.raises(WorkerLost, match=f"told of worker {number}, which is none"):
            connections.asides[m.NeighborAway](reporter, m.NeighborAway(number, "It was cut."))


def test_a_worker_that_has_ended_is_lost_and_nothing_is_forwarded_to_it() -> None:
    """Another one that dials it may tell that earlier than its own connection."""
    with connected(deadlines=Deadlines()) as (connections, relay):
        first, second = connections.workers
        relay.pull()
        with pytest.raises(WorkerLost, match=f"the worker on {second.name} was lost") as caught:
            connections.asides[m.NeighborUnreachable](
                first, m.NeighborUnreachable(second.number, "No way leads there.")
            )
        # The sentence has the error of the connection, so its traceback is not shown above.
        assert caught.value.__cause__ is None
        assert not first.row.cannot_reach


@pytest.mark.parametrize("idle", [0, 1])
def test_a_link_over_which_nothing_passes_may_break(idle: int) -> None:
    with connected() as (connections, _):
        first, second = connections.members
        connections.assign(Placement.line([(first, second)[1 - idle].name], [[0]]))
        report = m.NeighborLost(second.number, "Its process was killed.")
        connections.asides[m.NeighborLost](first, report)
        connections.check_linked()


@pytest.mark.filterwarnings("ignore:.*It had no layers, so the run goes on without it")
def test_a_report_may_be_of_a_worker_without_layers_that_does_not_come_back() -> None:
    with connected(deadlines=Deadlines(busy_seconds=0.1)) as (connections, relay):
        first, second = connections.workers
        connections.assign(Placement.line([first.name], [[0]]))
        relay.pull()
        with pytest.raises(WorkerUnreachable) as caught:
            connections.dial_again(second, second.name)
        connections.lose(second, caught.value)
        connections.asides[m.NeighborLost](first, m.NeighborLost(second.number, "It has ended."))
        assert connections.members == [first]


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.filterwarnings("ignore:.*It had no layers, so the run goes on without it")
def test_the_late_end_of_a_former_conversation_is_no_end_of_the_next_one(is_lost: bool) -> None:
    with connected(deadlines=Deadlines()) as (connections, _):
        first, second = connections.workers
        connections.assign(Placement.line([first.name], [[0]]))
        late = Arrival(second.channel, ChannelError("It has ended."))
        if is_lost:
            connections.lose(second, ChannelError("It has ended."))
        connections.release(second)
        again = connections.admit(second.name)
        connections._inbox.put(late)
        connections.hear()
        assert again.row.phase is Phase.IDLE
        assert connections.lost is None


def test_a_worker_that_has_ended_the_run_may_be_released() -> None:
    """Who has let it in cleans up, and must not hide the error."""
    with connected() as (connections, _):
        first, second = connections.workers
        connections.assign(Placement.line([first.name], [[0]]), [first, second])
        error = connections.lose(second, ChannelError("It has ended."))
        connections.release(second)
        assert str(connections.lost) == str(error)


def test_a_callback_that_raises_leaves_who_is_a_member_right() -> None:
    def raises(_event: Event) -> None:
        raise RuntimeError("not today")

    with connected() as (connections, _):
        first, second = connections.workers
        with pytest.raises(RuntimeError, match="not today"):
            connections.roster.publish_to(raises)
        with pytest.raises(RuntimeError, match="not today"):
            connections.assign(Placement.line([first.name], [[0]]))
        assert connections.workers == [first]
        with pytest.raises(RuntimeError, match="not today"):
            connections.close()
        assert all(each.channel.is_over for each in (first, second))
        connections.roster.publish_to(lambda _event: None)


def test_a_run_that_was_interrupted_does_not_wait_for_a_connection() -> None:
    with connected() as (connections, relay):
        cut(relay, connections.workers[1])
        connections.end_when(lambda: False, lambda: True)
        with pytest.raises(WorkerLost, match="The run was interrupted, and no stage .*was cut off"):
            connections.receive(600)
        with pytest.raises(WorkerLost, match="The run was interrupted"):
            connections.check_usable()


def test_sigterm_ends_a_wait_for_a_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_hetero.transport.channel.LOOK_SECONDS", 0.01)
    with connected() as (connections, relay):
        worker = connections.workers[1]
        cut(relay, worker)
        connections.end_when(lambda: True, lambda: False)
        worker.channel.send(m.DescribeDevice())
        with pytest.raises(WorkerLost, match="SIGTERM asks this process to end"):
            worker.channel.wait_until_sent(0, connections.leaving())


@pytest.mark.follows(
    "and the run asks for … s; start the worker with `--linger-seconds …`",
)
def test_a_worker_that_allows_less_time_is_named() -> None:
    with (
        pytest.warns(UserWarning, match="allows 5 s for a broken connection to come back, and"),
        connected(allowed_seconds=5.0) as (connections, _),
    ):
        assert len(connections.workers) == 2
    with connected(allowed_seconds=3600.0) as (connections, _):
        assert len(connections.workers) == 2


def test_a_worker_that_cannot_begin_with_other_libraries_is_said_to_have_them() -> None:
    """Only before the first step: what has run once is not ended by a version."""
    with connected() as (connections, _):
        worker = connections.members[0]
        worker.equipment = m.Equipment(versions={"transformers": "5.21.0", "torch": "2.13.0"})
        connections.equipment = m.Equipment(versions={"transformers": "5.24.0", "torch": "2.13.0"})
        failure = m.Failure("ImportError: no such layer", traceback="in build")
        error = connections._stage_failed(worker, failure)
        assert str(error).endswith(
            f"failed before the first step: ImportError: no such layer {worker.name} has other "
            "versions than this process: transformers 5.21.0 (5.24.0 here). If that is why it "
            "cannot build or run a layer, install the same versions on both."
        )
        assert "in build" in str(error.__cause__)
        connections.begin_step()
        assert "versions" not in str(connections._stage_failed(worker, failure))
