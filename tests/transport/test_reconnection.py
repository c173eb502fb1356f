"""A channel outlives its connection: every frame arrives once, in order, whatever breaks when."""

from __future__ import annotations

import itertools
import logging
import random
import re
import threading
import time
from queue import Empty

import pytest
import torch

from lightning_hetero.errors import ChannelError, HeteroError, RemoteProtocolError, WorkerError
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame
from lightning_hetero.transport import reconnection
from lightning_hetero.transport.line import Line, PeerGone

from .lingering import Switch, Weather, lingering_pair
from .pairs import PATIENCE_SECONDS, End, channel_pair, memory_pair

NUM_FRAMES = 8
NUM_SCHEDULES = 300


def activation(number: int) -> m.Activation:
    return m.Activation(1, number, 0, requires_grad=[True], collected=[])


def gradient(number: int) -> m.Gradient:
    return m.Gradient(1, number, 0, [True])


def content(number: int, seed: int) -> torch.Tensor:
    size = random.Random(f"{number} {seed}").choice([0, 1, 60, 500])
    return torch.full((size,), float(number))


def received(end: End, count: int) -> list[tuple[int, torch.Tensor]]:
    """The micro-batches of the next frames, with their tensors."""
    found = []
    for _ in range(count):
        frame = end.next().content
        assert isinstance(frame, Frame), frame
        assert isinstance(frame.message, (m.Activation, m.Gradient))
        found.append((frame.message.microbatch, frame.tensors[0]))
    return found


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other at once."""
    monkeypatch.setattr(reconnection, "pauses", lambda: itertools.repeat(0.0))


@pytest.mark.usefixtures("without_pauses")
@pytest.mark.parametrize("seeds", [range(i, i + 50) for i in range(0, NUM_SCHEDULES, 50)], ids=str)
def test_every_frame_arrives_once_and_in_order_over_a_connection_that_breaks(seeds: range) -> None:
    num_connections = 0
    for seed in seeds:
        weather = Weather(seed, num_cuts=seed % 7)
        with lingering_pair(weather) as (up, down):
            for number in range(NUM_FRAMES):
                up.channel.send(activation(number), content(number, seed))
                down.channel.send(gradient(number), content(number, seed))
            for end in (up, down):
                found = received(end, NUM_FRAMES)
                assert [number for number, _ in found] == list(range(NUM_FRAMES))
                for number, tensor in found:
                    assert torch.equal(tensor, content(number, seed))
        with pytest.raises(Empty):
            up.inbox.get_nowait()
        num_connections += weather.num_connections
    assert num_connections > 2 * len(seeds)


def wait_until_away(end: End) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not end.channel.is_away:
        assert time.monotonic() < deadline
        time.sleep(0.001)  # the threads that find it broken need the processor


def error_of(end: End) -> HeteroError:
    error = end.next().content
    assert isinstance(error, HeteroError)
    return error


def test_what_is_sent_during_a_gap_arrives_after_it(caplog: pytest.LogCaptureFixture) -> None:
    network = Switch()
    with lingering_pair(network) as (up, down), caplog.at_level(logging.WARNING):
        network.turn_off()
        for end in (up, down):
            wait_until_away(end)
        up.channel.send(activation(0), content(0, 0))
        down.channel.send(gradient(0), content(0, 0))
        network.is_on = True
        assert received(down, 1)[0][0] == 0
        assert received(up, 1)[0][0] == 0
        assert not up.channel.is_away
    assert "the connection to downstream broke: downstream ended the connection" in caplog.text
    assert "without a Goodbye; waiting up to 20 s for it to come back" in caplog.text
    assert re.search(r"the connection to upstream is back after \d+\.\d s", caplog.text)
    assert caplog.text.count(" broke") == 2


def test_both_ends_give_up_when_the_time_is_over() -> None:
    network = Switch()
    with lingering_pair(network, seconds=0.1) as (up, down):
        network.turn_off()
        assert "It did not come back within 0.1 s. The last attempt: The network is away." in str(
            error_of(up)
        )
        assert str(error_of(down)).endswith("It did not come back within 0.1 s.")


def test_a_peer_that_is_gone_is_lost_at_once() -> None:
    network = Switch()
    network.refusal = PeerGone("Nobody knows this conversation.")
    with lingering_pair(network) as (up, _):
        network.turn_off()
        error = str(error_of(up))
    assert error.endswith("without a Goodbye. Nobody knows this conversation.")


def test_a_peer_that_comes_back_with_a_wrong_number_has_broken_a_rule() -> None:
    network = Switch()
    with lingering_pair(network) as (up, down):
        network.too_many = 99
        network.cut()
        error = error_of(down)
        assert isinstance(error, RemoteProtocolError)
        assert "frames have come, and" in str(error)
        network.refusal, network.is_on = PeerGone("The conversation is over."), False
        assert isinstance(error_of(up), ChannelError)


def test_an_attempt_that_a_later_one_has_overtaken_changes_nothing() -> None:
    """A frozen peer finds all attempts at once when it goes on, in any order."""
    with lingering_pair(Switch()) as (up, down):
        mine, theirs = memory_pair()
        with pytest.raises(ChannelError, match="has dialled again since"):
            down.channel.line.resume(theirs, 0, 0, lambda _: None)
        mine.shut_down()
        up.channel.send(activation(0), content(0, 0))
        assert received(down, 1)[0][0] == 0
        assert not down.channel.is_away


def test_nobody_comes_back_after_the_end() -> None:
    with lingering_pair(Switch()) as (up, down):
        up.channel.send(m.Goodbye())
        assert isinstance(down.next().content, Frame)
        with pytest.raises(WorkerError, match="This conversation is over"):
            down.channel.line.resume(memory_pair()[0], 1, 0, lambda _: None)


@pytest.mark.parametrize("index", [0, 1], ids=["the end that dials", "the end that waits"])
def test_an_end_that_closes_during_a_gap_does_not_wait(index: int) -> None:
    network = Switch()
    with lingering_pair(network) as ends:
        network.turn_off()
        wait_until_away(ends[index])
        closing = threading.Thread(target=ends[index].channel.close, args=(m.Goodbye(),))
        closing.start()
        closing.join(PATIENCE_SECONDS / 4)
        assert not closing.is_alive()
        assert ends[index].inbox.empty()


@pytest.mark.parametrize("index", [0, 1], ids=["the end that dials", "the end that waits"])
def test_a_goodbye_is_no_broken_connection(index: int, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(20):
        with lingering_pair(Switch()) as ends:
            other = ends[1 - index]
            # The other end still sends when the last word comes.
            for number in range(20):
                say = activation if index == 1 else gradient
                other.channel.send(say(number), torch.zeros(20_000))
            ends[index].channel.close(m.Goodbye())
            last_word = other.next().content
            assert isinstance(last_word, Frame)
            assert isinstance(last_word.message, m.Goodbye)
    assert "broke" not in caplog.text


def test_the_end_of_a_gap_wakes_who_waits_until_all_is_sent() -> None:
    network = Switch()
    with lingering_pair(network) as (up, _):
        network.turn_off()
        wait_until_away(up)
        up.channel.send(activation(0), content(0, 0))
        waiting = threading.Thread(target=up.channel.wait_until_sent, args=(0,))
        waiting.start()
        up.channel.line.make_final()
        waiting.join(PATIENCE_SECONDS)
        assert not waiting.is_alive()


def test_who_waits_may_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_hetero.transport.channel.LOOK_SECONDS", 0.01)
    looks = itertools.count()

    def look() -> None:
        if next(looks) == 3:
            raise KeyboardInterrupt

    network = Switch()
    with lingering_pair(network) as (up, _):
        network.turn_off()
        wait_until_away(up)
        up.channel.send(activation(0), content(0, 0))
        with pytest.raises(KeyboardInterrupt):
            up.channel.wait_until_sent(0, look)
        looks = itertools.count()
        with pytest.raises(KeyboardInterrupt):
            up.channel.peer_answers(look)


def test_what_may_change_after_it_is_sent_arrives_as_it_was() -> None:
    """The connection loses a tensor that changes as soon as it may."""
    network = Switch()
    with lingering_pair(network) as (up, down):
        tensor = torch.zeros(1000)
        network.swallow()
        up.channel.send(activation(0), tensor)
        up.channel.wait_until_sent(0)
        tensor.add_(1)
        network.cut()
        assert torch.equal(received(down, 1)[0][1], torch.zeros(1000))


def test_frames_that_have_arrived_are_not_kept() -> None:
    """Not more than is acknowledged at once, and what is on its way."""
    with lingering_pair(Switch()) as (up, down):
        most = 0
        for number in range(40):
            up.channel.send(activation(number), torch.zeros(2**18))
            received(down, 1)
            most = max(most, len(up.channel.line._ledger._sent))
        assert most < 20


def test_a_channel_that_breaks_for_good_keeps_nothing() -> None:
    with channel_pair() as (up, down):
        up.channel.send(activation(0), torch.zeros(10))
        received(down, 1)
        assert type(up.channel.line) is Line
        down.channel.line.connection.shut_down()
        assert "without a Goodbye" in str(error_of(up))
