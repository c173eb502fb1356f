"""The channels to other workers: who they are, and what goes over which of them."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import product
from typing import Any

import msgspec
import pytest
import torch

from lightning_hetero.devices.copies import PlainCopies
from lightning_hetero.errors import LocalProtocolError, RemoteProtocolError, WorkerUnreachable
from lightning_hetero.pipeline.boundary import Activation, Gradients
from lightning_hetero.pipeline.codec import encode_activation, encode_gradients
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Content, Frame
from lightning_hetero.transport.channel import Channel
from lightning_hetero.worker.neighbors import Neighbors

from ..transport.pairs import End, channel_pair

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


def deploy(*downstream: int) -> m.Deploy:
    """Stages of worker 1 with the next stages on these workers; worker n listens at ``n:1``."""
    stages = [
        m.StageSpec(number, "", [], recompute=False, downstream=behind)
        for number, behind in enumerate(downstream, start=1)
    ]
    others = [each for each in dict.fromkeys(downstream) if each > 1]
    peers = [m.PeerSpec(each, f"{each}:1", f"session {each}") for each in others]
    return m.Deploy(1, stages, len(stages), peers, seed=0)


def test_without_other_workers_there_is_the_coordinator() -> None:
    with channel_pair() as (_, coordinator):
        neighbors = Neighbors(coordinator.channel, nobody)
        neighbors.expect(deploy(0))
        assert neighbors.connect(neighbors.downstream, lambda _channel: None) == {}
        assert neighbors.downstream_of(1) is coordinator.channel
        assert neighbors.numbers == {coordinator.channel: 0}
        assert list(neighbors.traffic) == ["coordinator"]


def test_each_worker_downstream_is_dialled_once_and_stays() -> None:
    with channel_pair() as (_, coordinator), channel_pair() as (two, _), channel_pair() as (six, _):
        dialled: list[tuple[str, str, int]] = []
        started: list[Channel] = []

        def dial(address: str, session: str, member: int) -> Channel:
            dialled.append((address, session, member))
            return {"2:1": two, "6:1": six}[address].channel

        neighbors = Neighbors(coordinator.channel, dial)
        for message in (deploy(2, 1, 2), deploy(2, 6), deploy(6, 0)):
            neighbors.expect(message)
            assert neighbors.connect(neighbors.downstream, started.append) == {}
        assert dialled == [("2:1", "session 2", 1), ("6:1", "session 6", 1)]
        assert started == [two.channel, six.channel]
        assert neighbors.downstream_of(1) is six.channel
        assert neighbors.downstream_of(2) is coordinator.channel
        assert neighbors.numbers == {two.channel: 2, six.channel: 6, coordinator.channel: 0}
        assert list(neighbors.traffic) == ["coordinator", "worker 2", "worker 6"]


def test_what_stays_in_a_process_goes_over_no_channel() -> None:
    with channel_pair() as (_, coordinator):
        neighbors = Neighbors(coordinator.channel, nobody)
        neighbors.expect(deploy(1, 0))
        neighbors.check_way(saying(ACTIVATION, 1), coordinator.channel)
        assert [neighbors.leads_here(stage) for stage in (1, 2)] == [True, False]
        assert [neighbors.comes_from_here(stage) for stage in (1, 2)] == [False, True]


def test_a_worker_out_of_reach_is_dialled_once_and_the_coordinator_stands_for_it() -> None:
    with channel_pair() as (_, coordinator):
        dialled: list[str] = []

        def dial(address: str, _session: str, _member: int) -> Channel:
            dialled.append(address)
            raise WorkerUnreachable("no route")

        neighbors = Neighbors(coordinator.channel, dial)
        neighbors.expect(deploy(2))
        errors = neighbors.connect(neighbors.downstream, lambda _channel: None)
        assert {number: str(error) for number, error in errors.items()} == {2: "no route"}
        neighbors.expect(deploy(2))  # as after layers have moved
        assert neighbors.connect(neighbors.downstream, lambda _channel: None) == {}
        assert dialled == ["2:1"]
        assert neighbors.downstream_of(1) is coordinator.channel


def test_gradients_go_back_where_activations_have_come_from() -> None:
    with channel_pair() as (_, coordinator), channel_pair() as (above, upstream):
        neighbors = Neighbors(coordinator.channel, nobody)
        neighbors.expect(deploy(0, 0))
        neighbors.attach(upstream.channel, 2)
        neighbors.check_way(saying(ACTIVATION, 2), upstream.channel)
        neighbors.check_way(saying(ACTIVATION, 1), coordinator.channel)
        neighbors.pass_on(neighbors.upstream_of(2), GRADIENT, COPIES)
        assert isinstance(arrived(above), m.Gradient)
        assert neighbors.upstream_of(1) is coordinator.channel


def test_what_comes_another_way_than_its_stage_is_refused() -> None:
    """Stages 1, 2 and 4 are here; others run stages 3 and 5."""
    deployed = m.Deploy(
        1,
        [
            m.StageSpec(number, "", [], recompute=False, downstream=behind)
            for number, behind in ((1, 1), (2, 2), (4, 3))
        ],
        5,
        [m.PeerSpec(2, "2:1", ""), m.PeerSpec(3, "3:1", "")],
        seed=0,
    )
    with ExitStack() as stack:
        ends = [stack.enter_context(channel_pair())[1].channel for _ in range(5)]
        coordinator, two, three, upstream, stranger = ends
        dialled = {"2:1": two, "3:1": three}
        neighbors = Neighbors(coordinator, lambda address, *_: dialled[address])
        neighbors.expect(deployed)
        neighbors.connect([2, 3], lambda _channel: None)
        neighbors.attach(upstream, 2)
        neighbors.attach(stranger, 3)
        right = [
            (ACTIVATION, 1, coordinator),
            (ACTIVATION, 4, upstream),
            (GRADIENT, 2, two),
            (GRADIENT, 4, three),
        ]
        for content, stage, channel in right:
            neighbors.check_way(saying(content, stage), channel)
        allowed = {(type(content[0]), stage, channel) for content, stage, channel in right}
        for content, stage, channel in product((ACTIVATION, GRADIENT), (1, 2, 4), ends):
            if (type(content[0]), stage, channel) not in allowed:
                with pytest.raises(RemoteProtocolError, match=f"for stage {stage} came from"):
                    neighbors.check_way(saying(content, stage), channel)


def test_a_neighbor_that_said_goodbye_is_told_nothing_more() -> None:
    with channel_pair() as (downstream, below):
        neighbors = Neighbors(downstream.channel, nobody)
        below.channel.close(m.Goodbye())
        assert isinstance(arrived(downstream), m.Goodbye)
        neighbors.pass_on(downstream.channel, ACTIVATION, COPIES)


def test_what_the_rules_forbid_is_an_error_while_the_neighbor_is_there() -> None:
    with channel_pair() as (downstream, _):
        neighbors = Neighbors(downstream.channel, nobody)
        with pytest.raises(LocalProtocolError):
            neighbors.pass_on(downstream.channel, GRADIENT, COPIES)  # upstream is who listens below


def test_an_upstream_neighbor_that_only_measured_is_let_go() -> None:
    with channel_pair() as (_, coordinator), channel_pair() as (above, upstream):
        neighbors = Neighbors(coordinator.channel, nobody)
        neighbors.attach(upstream.channel, 2)
        assert list(neighbors.traffic) == ["coordinator", "worker 2"]
        neighbors.let_go(upstream.channel)
        assert neighbors.numbers == {coordinator.channel: 0}
        assert not isinstance(above.next().content, Frame)
