"""The channels to the stages beside: who they are, and what goes over which of them."""

from __future__ import annotations

import pytest
import torch

from lightning_hetero.devices.copies import PlainCopies
from lightning_hetero.errors import LocalProtocolError, ModelError, WorkerUnreachable
from lightning_hetero.pipeline.boundary import Activation, Gradients
from lightning_hetero.pipeline.codec import encode_activation, encode_gradients
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame
from lightning_hetero.transport.channel import Channel
from lightning_hetero.worker.session import Neighbors

from ..transport.pairs import End, channel_pair

COPIES = PlainCopies(torch.device("cpu"))


ACTIVATION = encode_activation(1, Key(0), Activation(torch.ones(2)))
GRADIENT = encode_gradients(1, Key(0), Gradients((torch.ones(2),)))


def arrived(end: End) -> m.Message:
    content = end.next().content
    assert isinstance(content, Frame), content
    return content.message


def nobody(address: str, _session: str) -> Channel:
    raise AssertionError(f"{address!r} is dialled.")


def test_without_stages_beside_there_is_the_coordinator() -> None:
    with channel_pair() as (_, coordinator):
        neighbors = Neighbors(coordinator.channel, nobody)
        assert neighbors.connect() is None
        assert neighbors.stages(1) == {coordinator.channel: 0}
        assert list(neighbors.traffic) == ["coordinator"]
        neighbors.check_same("another:1", 1)  # nobody is linked yet


def test_the_neighbor_is_dialled_once_and_stays() -> None:
    with channel_pair() as (_, coordinator), channel_pair() as (downstream, _):
        dialled: list[tuple[str, str]] = []

        def dial(address: str, session: str) -> Channel:
            dialled.append((address, session))
            return downstream.channel

        neighbors = Neighbors(coordinator.channel, dial)
        neighbors.expect("two:1", "its session")
        assert neighbors.connect() is downstream.channel
        assert neighbors.connect() is None
        assert dialled == [("two:1", "its session")]
        assert neighbors.stages(1) == {downstream.channel: 2, coordinator.channel: 0}
        neighbors.check_same("two:1", 1)
        with pytest.raises(ModelError, match=r"Stage 1 is linked with two:1, and .* three:1;"):
            neighbors.check_same("three:1", 1)
        with pytest.raises(ModelError, match="links it with nobody"):
            neighbors.check_same("", 1)


def test_a_neighbor_out_of_reach_is_dialled_once_and_the_coordinator_stands_for_it() -> None:
    with channel_pair() as (_, coordinator):
        dialled: list[str] = []

        def dial(address: str, _session: str) -> Channel:
            dialled.append(address)
            raise WorkerUnreachable("no route")

        neighbors = Neighbors(coordinator.channel, dial)
        neighbors.expect("two:1", "its session")
        with pytest.raises(WorkerUnreachable, match="no route"):
            neighbors.connect()
        assert neighbors.connect() is None  # as after layers have moved
        assert dialled == ["two:1"]
        assert neighbors.downstream is coordinator.channel
        with pytest.raises(ModelError, match=r"Stage 1 is linked with two:1, and .* three:1;"):
            neighbors.check_same("three:1", 1)


def test_activations_go_down_and_gradients_up() -> None:
    with channel_pair() as (above, upstream), channel_pair() as (downstream, below):
        neighbors = Neighbors(upstream.channel, nobody)
        neighbors.upstream, neighbors.downstream = upstream.channel, downstream.channel
        neighbors.pass_on(neighbors.downstream, ACTIVATION, COPIES)
        neighbors.pass_on(neighbors.upstream, GRADIENT, COPIES)
        assert isinstance(arrived(below), m.Activation)
        assert isinstance(arrived(above), m.Gradient)


def test_a_neighbor_that_said_goodbye_is_told_nothing_more() -> None:
    with channel_pair() as (downstream, below):
        neighbors = Neighbors(downstream.channel, nobody)
        below.channel.close(m.Goodbye())
        assert isinstance(arrived(downstream), m.Goodbye)
        neighbors.pass_on(neighbors.downstream, ACTIVATION, COPIES)


def test_what_the_rules_forbid_is_an_error_while_the_neighbor_is_there() -> None:
    with channel_pair() as (downstream, _):
        neighbors = Neighbors(downstream.channel, nobody)
        with pytest.raises(LocalProtocolError):
            neighbors.pass_on(neighbors.upstream, GRADIENT, COPIES)  # upstream is who listens below


def test_an_upstream_neighbor_that_only_measured_is_let_go() -> None:
    with channel_pair() as (_, coordinator), channel_pair() as (above, upstream):
        neighbors = Neighbors(coordinator.channel, nobody)
        neighbors.upstream = upstream.channel
        assert list(neighbors.traffic) == ["coordinator", "upstream"]
        neighbors.let_go_upstream()
        assert neighbors.upstream is coordinator.channel
        assert not isinstance(above.next().content, Frame)
