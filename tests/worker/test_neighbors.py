"""The channels to other workers: who they are, and what goes over which of them."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from lightning_hetero.devices.copies import PlainCopies
from lightning_hetero.errors import LocalProtocolError, RemoteProtocolError, WorkerUnreachable
from lightning_hetero.pipeline.boundary import Activation, Gradients, Surroundings
from lightning_hetero.pipeline.codec import (
    Leg,
    encode_activation,
    encode_arguments,
    encode_gradients,
)
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Content, Frame
from lightning_hetero.protocol.values import Packer
from lightning_hetero.transport.channel import Channel
from lightning_hetero.worker.neighbors import SessionNeighbors
from lightning_hetero.worker.parts import SessionSite, SoleHolder
from lightning_hetero.worker.sent_messages import SessionSentMessages

from ..transport.pairs import End, channel_pair

TRAINING = Surroundings(True, None, [])
COPIES = PlainCopies(torch.device("cpu"))


ACTIVATION = encode_activation(1, Key(0), Activation(torch.ones(2)))
GRADIENT = encode_gradients(1, Key(0), Gradients((torch.ones(2),)))


def arrived(end: End) -> m.Message:
    content = end.next().content
    assert isinstance(content, Frame), content
    return content.message


def nobody(address: str, _session: str, _member: int) -> Channel:
    raise AssertionError(f"{address!r} is dialled.")


def saying(content: Content, stage: int) -> Any:
    """The message for another stage."""
    return msgspec.structs.replace(content[0], stage=stage)


def deploy(*peers: int) -> m.Deploy:
    """Worker 1 sends to these workers; worker n listens at ``n:1``."""
    specs = [m.PeerSpec(each, f"{each}:1", f"session {each}") for each in peers]
    return m.Deploy(1, [], specs, seed=0)


def way(stage: int, upstream: int, downstream: int, step: int = 1) -> m.Arguments:
    leg = Leg(stage, upstream, downstream)
    return encode_arguments(step, Key(0), TRAINING, (), Packer(), leg)[0]


def test_without_other_workers_there_is_the_coordinator() -> None:
    with channel_pair() as (_, coordinator):
        neighbors = SessionNeighbors(coordinator.channel, nobody)
        neighbors.expect(deploy())
        assert neighbors.connect(neighbors.peers, lambda _channel: None) == {}
        neighbors.note_way(way(1, 0, 0))
        assert neighbors.way_down(1, 1, Key(0)) is coordinator.channel
        assert neighbors.is_first(1, 1, Key(0))
        assert neighbors.is_last(1, 1, Key(0))
        assert neighbors.numbers == {coordinator.channel: 0}
        assert list(neighbors.traffic) == ["coordinator"]


def test_a_worker_that_has_dialled_twice_is_not_lost_with_one_of_its_channels() -> None:
    with (
        channel_pair() as (_, coordinator),
        channel_pair() as (first, _),
        channel_pair() as (second, _),
        channel_pair() as (other, _),
    ):
        neighbors = SessionNeighbors(coordinator.channel, nobody)
        for end, number in ((first, 2), (second, 2), (other, 3)):
            neighbors.attach(end.channel, number)
        assert neighbors.has_another(second.channel)
        assert neighbors.has_another(first.channel)
        assert not neighbors.has_another(other.channel)
        second.channel.close()
        assert not neighbors.has_another(first.channel)
        assert neighbors.has_another(second.channel)


def test_each_worker_downstream_is_dialled_once_and_stays() -> None:
    with channel_pair() as (_, coordinator), channel_pair() as (two, _), channel_pair() as (six, _):
        dialled: list[tuple[str, str, int]] = []
        started: list[Channel] = []

        def dial(address: str, session: str, member: int) -> Channel:
            dialled.append((address, session, member))
            return {"2:1": two, "6:1": six}[address].channel

        neighbors = SessionNeighbors(coordinator.channel, dial)
        for message in (deploy(2), deploy(2, 6), deploy(6)):
            neighbors.expect(message)
            assert neighbors.connect(neighbors.peers, started.append) == {}
        assert dialled == [("2:1", "session 2", 1), ("6:1", "session 6", 1)]
        assert started == [two.channel, six.channel]
        neighbors.note_way(way(1, 0, 6))
        neighbors.note_way(way(2, 6, 0))
        assert neighbors.way_down(1, 1, Key(0)) is six.channel
        assert neighbors.way_down(1, 2, Key(0)) is coordinator.channel
        assert neighbors.numbers == {two.channel: 2, six.channel: 6, coordinator.channel: 0}
        assert list(neighbors.traffic) == ["coordinator", "worker 2", "worker 6"]


def test_a_worker_is_dialled_again_where_another_process_is_in_its_place() -> None:
    """It was lost while this one sent nothing to it, so nobody has told this one."""
    with channel_pair() as (_, coordinator), channel_pair() as (two, _), channel_pair() as (new, _):
        channels = {"session 2": two.channel, "another": new.channel}
        neighbors = SessionNeighbors(
            coordinator.channel, lambda _where, name, _number: channels[name]
        )
        for session in channels:
            neighbors.expect(m.Deploy(1, [], [m.PeerSpec(2, "2:1", session)], seed=0))
            assert neighbors.connect(neighbors.peers, lambda _channel: None) == {}
        neighbors.note_way(way(1, 0, 2))
        assert neighbors.way_down(1, 1, Key(0)) is new.channel
        assert neighbors.is_former(two.channel)
        assert two.channel.is_over


def test_a_worker_is_dialled_again_where_the_link_broke_while_no_plan_had_it() -> None:
    """Both live, and the coordinator ends no run for a link over which nothing passes."""
    with channel_pair() as (_, coordinator), channel_pair() as (two, _), channel_pair() as (new, _):
        channels = iter([two.channel, new.channel])
        neighbors = SessionNeighbors(coordinator.channel, lambda *_: next(channels))
        for is_over in (False, True):
            if is_over:
                two.channel.close()
            neighbors.expect(deploy(2))
            assert neighbors.connect(neighbors.peers, lambda _channel: None) == {}
        neighbors.note_way(way(1, 0, 2))
        assert neighbors.way_down(1, 1, Key(0)) is new.channel
        assert neighbors.is_former(two.channel)


def test_what_stays_in_a_process_goes_over_no_channel() -> None:
    with channel_pair() as (_, coordinator):
        neighbors = SessionNeighbors(coordinator.channel, nobody)
        neighbors.expect(deploy())
        neighbors.note_way(way(1, 0, 1))
        neighbors.note_way(way(2, 1, 0))
        neighbors.check_way(saying(ACTIVATION, 1), coordinator.channel)
        assert neighbors.way_down(1, 1, Key(0)) is None
        assert neighbors.way_up(1, 2, Key(0)) is None
        assert not neighbors.is_last(1, 1, Key(0))
        assert not neighbors.is_first(1, 2, Key(0))


def test_a_worker_out_of_reach_is_dialled_once_and_the_coordinator_stands_for_it() -> None:
    with channel_pair() as (_, coordinator):
        dialled: list[str] = []

        def dial(address: str, _session: str, _member: int) -> Channel:
            dialled.append(address)
            raise WorkerUnreachable("no route")

        neighbors = SessionNeighbors(coordinator.channel, dial)
        neighbors.expect(deploy(2))
        errors = neighbors.connect(neighbors.peers, lambda _channel: None)
        assert {number: str(error) for number, error in errors.items()} == {2: "no route"}
        neighbors.expect(deploy(2))  # as after layers have moved
        assert neighbors.connect(neighbors.peers, lambda _channel: None) == {}
        assert dialled == ["2:1"]
        neighbors.note_way(way(1, 0, 2))
        assert neighbors.way_down(1, 1, Key(0)) is coordinator.channel
        assert not neighbors.is_last(1, 1, Key(0))


def test_gradients_go_back_where_activations_have_come_from() -> None:
    with channel_pair() as (_, coordinator), channel_pair() as (above, upstream):
        neighbors = SessionNeighbors(coordinator.channel, nobody)
        neighbors.attach(upstream.channel, 2)
        neighbors.check_way(saying(ACTIVATION, 2), upstream.channel)
        neighbors.check_way(saying(ACTIVATION, 1), coordinator.channel)
        channel = neighbors.way_up(1, 2, Key(0))
        assert channel is not None
        neighbors.pass_on(channel, GRADIENT, COPIES)
        assert isinstance(arrived(above), m.Gradient)
        assert neighbors.way_up(1, 1, Key(0)) is coordinator.channel


def test_ways_of_earlier_steps_are_forgotten_and_those_of_later_ones_stay() -> None:
    with channel_pair() as (_, coordinator):
        neighbors = SessionNeighbors(coordinator.channel, nobody)
        neighbors.check_way(saying(ACTIVATION, 1), coordinator.channel)
        neighbors.check_way(msgspec.structs.replace(ACTIVATION[0], step=2), coordinator.channel)
        neighbors.begin_step(2)
        assert neighbors.way_up(1, 1, Key(0)) is None
        assert neighbors.way_up(2, 0, Key(0)) is coordinator.channel


@pytest.mark.parametrize("is_activation_first", [False, True])
@pytest.mark.parametrize("kind", ["Activation", "Gradient"])
def test_what_comes_from_another_process_than_the_arguments_say_is_refused(
    kind: str, is_activation_first: bool
) -> None:
    """Stage 3 is here; worker 2 and the coordinator may run what is beside it."""
    with ExitStack() as stack:
        ends = [stack.enter_context(channel_pair())[1].channel for _ in range(4)]
        coordinator, two, upstream, stranger = ends
        senders = {coordinator: 0, two: 2, upstream: 2, stranger: 3}
        # Worker 4 cannot reach this one, so the coordinator passes on what it sends.
        for expected, (channel, sender) in product((0, 1, 2, 4), senders.items()):
            neighbors = SessionNeighbors(coordinator, lambda *_: two)
            neighbors.expect(deploy(2))
            neighbors.connect([2], lambda _channel: None)
            neighbors.attach(upstream, 2)
            neighbors.attach(stranger, 3)
            sender = 4 if (expected, sender) == (4, 0) else sender
            calls = [
                partial(neighbors.note_way, way(3, expected, expected)),
                partial(
                    neighbors.check_way,
                    saying(ACTIVATION if kind == "Activation" else GRADIENT, 3),
                    channel,
                ),
            ]
            if kind == "Activation" and is_activation_first:
                calls.reverse()
            # Gradients come over the channel that this worker has dialled.
            is_right = sender == expected and channel is not (
                two if kind == "Activation" else upstream
            )
            with (
                nullcontext()
                if is_right
                else pytest.raises(RemoteProtocolError, match=f"{kind} for stage 3 came from")
            ):
                for call in calls:
                    call()


def test_the_late_word_of_a_worker_whose_place_another_one_has_is_dropped() -> None:
    """It was read before its channel was closed, and is taken from the queue behind that."""
    with (
        channel_pair() as (_, coordinator),
        channel_pair() as (_, frozen),
        channel_pair() as (_, replacing),
    ):
        neighbors = SessionNeighbors(coordinator.channel, nobody)
        site = SimpleNamespace(neighbors=neighbors, replicas=SoleHolder())
        kept = SessionSentMessages(cast(SessionSite, site))
        kept.handlers[m.KeepSent](m.KeepSent(2**20), ())
        neighbors.attach(frozen.channel, 2)
        neighbors.attach(replacing.channel, 2)
        neighbors.replace(m.ReplaceNeighbor(2, "2:1", "session 3"), lambda _channel: None)
        assert not neighbors.is_new(saying(ACTIVATION, 1), frozen.channel)
        assert neighbors.is_new(saying(ACTIVATION, 1), replacing.channel)
        assert neighbors.is_new(saying(ACTIVATION, 1), coordinator.channel)
        neighbors.close(m.Goodbye())
        kept.close()


def test_a_break_is_told_also_behind_a_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[m.Message] = []
    monkeypatch.setattr(SessionNeighbors, "report", lambda _, message: told.append(message))
    with (
        channel_pair() as (_, coordinator),
        channel_pair() as (before, _),
        channel_pair() as (behind, _),
    ):
        dialled = iter([before.channel, behind.channel])
        neighbors = SessionNeighbors(coordinator.channel, lambda *_: next(dialled))
        neighbors.expect(deploy(2))
        assert neighbors.connect([2], lambda _channel: None) == {}
        neighbors.replace(m.ReplaceNeighbor(2, "2:1", "session 3"), lambda _channel: None)
        behind.channel._on_break("It broke.")
        behind.channel._on_break("")
    assert told == [m.NeighborAway(2, "It broke."), m.NeighborBack(2)]


def test_a_neighbor_that_said_goodbye_is_told_nothing_more() -> None:
    with channel_pair() as (downstream, below):
        neighbors = SessionNeighbors(downstream.channel, nobody)
        below.channel.close(m.Goodbye())
        assert isinstance(arrived(downstream), m.Goodbye)
        neighbors.pass_on(downstream.channel, ACTIVATION, COPIES)


def test_what_the_rules_forbid_is_an_error_while_the_neighbor_is_there() -> None:
    with channel_pair() as (downstream, _):
        neighbors = SessionNeighbors(downstream.channel, nobody)
        with pytest.raises(LocalProtocolError):
            neighbors.pass_on(downstream.channel, GRADIENT, COPIES)  # upstream is who listens below


def test_an_upstream_neighbor_that_only_measured_is_let_go() -> None:
    with channel_pair() as (_, coordinator), channel_pair() as (above, upstream):
        neighbors = SessionNeighbors(coordinator.channel, nobody)
        neighbors.attach(upstream.channel, 2)
        assert list(neighbors.traffic) == ["coordinator", "worker 2"]
        neighbors.let_go(upstream.channel)
        assert neighbors.numbers == {coordinator.channel: 0}
        assert not isinstance(above.next().content, Frame)
