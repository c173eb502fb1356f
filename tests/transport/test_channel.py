"""Channels: frames in order, signs of life, the end of a conversation, and late copies."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetero.coordinator.member import Member
from lightning_hetero.coordinator.steps import OutgoingArguments
from lightning_hetero.devices.copies import Copies, PlainCopies, StreamedCopies
from lightning_hetero.errors import (
    ChannelError,
    CheckpointError,
    HeteroError,
    LocalProtocolError,
    RemoteProtocolError,
)
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.boundary import Activation, Surroundings
from lightning_hetero.pipeline.codec import (
    Leg,
    decode_activation,
    decode_arguments,
    encode_activation,
)
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame, FrameReader, encode_frame
from lightning_hetero.protocol.session import opening_session
from lightning_hetero.protocol.values import KeptConstants
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.channel import Channel, Inbox, send_copied
from lightning_hetero.transport.connection import MOST_BYTES_AT_ONCE, SocketConnection
from lightning_hetero.transport.deadlines import Deadlines

from ..devices.made_up_streams import MadeUpStreams, on_device
from .pairs import (
    PATIENCE_SECONDS,
    QUICK,
    End,
    MemoryConnection,
    channel_pair,
    linked_sessions,
    memory_pair,
    one_end,
)


def activation(microbatch: int) -> m.Activation:
    return m.Activation(1, microbatch, 0, requires_grad=[True], collected=[])


def test_tensors_arrive_as_they_were_sent_and_in_order() -> None:
    tensors = [torch.randn(size, 7) for size in (0, 1, 1000, 300_000)]
    with channel_pair() as (up, down):
        for index, tensor in enumerate(tensors):
            up.channel.send(activation(index), tensor)
        for index, tensor in enumerate(tensors):
            frame = down.next().content
            assert isinstance(frame, Frame)
            assert frame.message == activation(index)
            assert torch.equal(frame.tensors[0], tensor)


def senders_of(end: End) -> dict[int, list[int]]:
    """By thread, the micro-batches whose activations it has sent; fills while frames leave."""
    senders: dict[int, list[int]] = {}

    def note(message: m.Message, _num_bytes: int, _start_seconds: float) -> None:
        if isinstance(message, m.Activation):
            senders.setdefault(threading.get_ident(), []).append(message.microbatch)

    end.channel.report_sent(note)
    return senders


def test_a_small_frame_is_sent_by_the_thread_that_says_it() -> None:
    with channel_pair() as (up, down):
        senders = senders_of(up)
        up.channel.send(activation(0), torch.ones(100))
        assert senders == {threading.get_ident(): [0]}
        assert isinstance(down.next().content, Frame)


def test_a_large_frame_leaves_the_thread_that_says_it_free() -> None:
    with channel_pair() as (up, down):
        senders = senders_of(up)
        up.channel.send(activation(0), torch.ones(MOST_BYTES_AT_ONCE))
        assert isinstance(down.next().content, Frame)
        up.channel.wait_until_sent(0)
        assert list(senders.values()) == [[0]]
        assert threading.get_ident() not in senders


def test_a_small_frame_waits_behind_those_that_are_queued() -> None:
    device = SlowDevice()
    with channel_pair() as (up, down):
        senders = senders_of(up)
        up.channel.send_later(activation(0), device.encode)
        up.channel.send(activation(1), torch.ones(100))
        assert not senders
        device.let_go()
        microbatches = [down.next().content.message.microbatch for _ in range(2)]  # type: ignore[union-attr]
        assert microbatches == [0, 1]


def test_a_small_frame_does_not_wait_for_a_peer_that_does_not_read() -> None:
    with one_end(replace(QUICK, silence_seconds=PATIENCE_SECONDS)) as (end, _):
        gradient = m.Gradient(1, 0, 0, is_present=[])
        for _ in range(1000):  # 20 MB, more than a socket takes
            end.channel.send(gradient, torch.ones(5_000))
        assert not end.channel.line.try_to_send("a frame", [memoryview(b"x")])
        end.channel.line.connection.shut_down()


def test_a_small_frame_over_a_broken_connection_ends_the_channel() -> None:
    one, other = memory_pair()
    up, _ = linked_sessions()
    channel = Channel(one, up, "the other", QUICK)
    channel.start(inbox := SimpleQueue())
    other.shut_down()
    channel.send(activation(0), torch.ones(1))
    channel.wait_until_sent(0)
    assert isinstance(inbox.get(timeout=PATIENCE_SECONDS).content, ChannelError)
    assert channel.is_over
    channel.close()


def test_a_kept_frame_that_cannot_be_read_ends_the_channel_by_its_own_words() -> None:
    def damaged() -> list[memoryview]:
        raise CheckpointError("The file 'x' has other bytes.")

    with channel_pair() as (up, down):
        up.channel.send_later(activation(0), damaged)
        assert isinstance(up.next().content, CheckpointError)
        assert isinstance(down.next().content, ChannelError)


def test_both_directions_at_once() -> None:
    big = torch.randn(2_000_000)
    with channel_pair() as (up, down):
        for index in range(4):
            up.channel.send(activation(index), big)
            down.channel.send(m.Gradient(1, index, 0, [True]), big)
        for end in (up, down):
            for _ in range(4):
                frame = end.next().content
                assert isinstance(frame, Frame)
                assert torch.equal(frame.tensors[0], big)


def test_a_message_against_the_rules_is_refused_before_it_is_sent() -> None:
    with channel_pair() as (up, _), pytest.raises(LocalProtocolError, match="must not be sent"):
        up.channel.send(m.Gradient(1, 0, 0, [True]))


def test_a_message_that_cannot_be_encoded_is_refused_where_it_is_sent() -> None:
    with channel_pair() as (up, down):
        with pytest.raises(LocalProtocolError, match="complex32"):
            up.channel.send(activation(0), torch.zeros(2, dtype=torch.complex32))
        up.channel.send(activation(1), torch.ones(2))
        frame = down.next().content
        assert isinstance(frame, Frame)
        assert frame.message == activation(1)


def test_a_peer_that_breaks_a_rule_is_told_which() -> None:
    with one_end() as (end, upstream):
        for buffer in encode_frame(Frame(m.Gradient(1, 0, 0, [True]))):
            upstream.sendall(buffer)
        error = end.next().content
        assert isinstance(error, RemoteProtocolError)
        reader, frame = FrameReader(), None
        while frame is None or isinstance(frame.message, (m.Ping, m.Pong)):
            frame = reader.advance(upstream.recv_into(reader.buffer()))
        assert isinstance(frame.message, m.Failure)
        assert "must not come while linked" in frame.message.reason


def test_garbage_ends_the_channel() -> None:
    with one_end() as (end, upstream):
        upstream.sendall(b"x" * 64)
        assert isinstance(end.next().content, RemoteProtocolError)


# A sign of life to an end that has gone would cut the connection.
SELDOM = Deadlines(heartbeat_seconds=PATIENCE_SECONDS, silence_seconds=10 * PATIENCE_SECONDS)


def test_an_end_inside_a_frame_differs_from_an_end_between_frames() -> None:
    [frame] = encode_frame(Frame(activation(0)))
    with one_end(SELDOM) as (end, upstream):
        upstream.sendall(frame[:-1])
        upstream.close()
        error = end.next().content
        assert isinstance(error, ChannelError)
        assert "upstream ended the connection in the middle of a message" in str(error)
    with one_end(SELDOM) as (end, upstream):
        upstream.sendall(frame)
        upstream.close()
        assert isinstance(end.next().content, Frame)
        assert str(end.next().content) == "upstream ended the connection without a Goodbye."


def test_a_silent_peer_is_given_up() -> None:
    with one_end() as (end, _upstream):
        error = end.next().content
        assert isinstance(error, ChannelError)
        assert "No sign of life" in str(error)


@pytest.mark.parametrize(
    ("answer_seconds", "frozen_seconds", "expected"),
    [
        (None, None, "for 0.3 s."),
        (0.0, None, "its machine answers, so its process is frozen"),
        (99.0, None, "nor from its machine: it is off"),
        (99.0, 3600.0, "nor from its machine: it is off"),
        (0.0, 0.5, "for 0.5 s: its machine answers"),
        (None, 0.5, "for 0.5 s."),
    ],
)
def test_a_frozen_process_is_distinguished_from_a_lost_machine(
    answer_seconds: float | None, frozen_seconds: float | None, expected: str
) -> None:
    """A process that is only frozen may be given more time."""
    mine, _theirs = memory_pair()
    mine.answer_seconds = answer_seconds
    channel = Channel(mine, linked_sessions()[1], "upstream", QUICK, frozen_seconds)
    inbox: Inbox = SimpleQueue()
    channel.start(inbox)
    error = inbox.get(timeout=PATIENCE_SECONDS).content
    channel.close()
    assert isinstance(error, ChannelError)
    assert expected in str(error)


@pytest.mark.follows("run less on this machine, or start workers with fewer `--threads`")
@pytest.mark.parametrize("answer_seconds", [0.0, 99.0])
def test_a_process_here_that_computes_is_slow_and_not_frozen(
    answer_seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    """It is given up when it has computed nothing for the silence that ends a channel."""
    num_waits = round(3 * QUICK.silence_seconds / QUICK.heartbeat_seconds)
    mine, _theirs = memory_pair()
    mine.answer_seconds = answer_seconds
    mine.cpu_seconds.extend(float(number) for number in range(num_waits))
    channel = Channel(mine, linked_sessions()[1], "upstream", QUICK)
    inbox: Inbox = SimpleQueue()
    channel.start(inbox)
    error = inbox.get(timeout=PATIENCE_SECONDS).content
    channel.close()
    assert list(mine.cpu_seconds) == [num_waits - 1]
    assert "for 0.3 s: its process is frozen, since it has used almost no CPU time" in str(error)
    assert caplog.text.count("upstream has said nothing for 0.3 s, but its process on this") == 1
    caplog.clear()
    mine, _theirs = memory_pair()  # with less to do it computes for less than that silence
    mine.cpu_seconds.extend([0.0, 1.0])
    channel = Channel(mine, linked_sessions()[1], "upstream", QUICK)
    channel.start(inbox)
    inbox.get(timeout=PATIENCE_SECONDS)
    channel.close()
    assert "has said nothing" not in caplog.text


def test_a_process_that_was_suspended_does_not_give_up_its_peer() -> None:
    """The process read nothing for longer than the silence that ends a channel."""
    mine, theirs = memory_pair()
    waits = []

    def wait_long(buffer: memoryview, sure_bytes: int = 1) -> int:
        if not waits:
            waits.append(time.sleep(3 * QUICK.silence_seconds))
            raise TimeoutError
        return MemoryConnection.receive_into(mine, buffer)

    mine.receive_into = wait_long  # type: ignore[method-assign]
    up, down = linked_sessions()
    ends = Channel(mine, down, "upstream", QUICK), Channel(theirs, up, "downstream", QUICK)
    inboxes: list[Inbox] = [SimpleQueue(), SimpleQueue()]
    for end, inbox in zip(ends, inboxes, strict=True):
        end.start(inbox)
    ends[1].send(activation(0))
    assert isinstance(inboxes[0].get(timeout=PATIENCE_SECONDS).content, Frame)
    for end in ends:
        end.close()


def test_signs_of_life_are_sent_unasked_and_name_the_activity() -> None:
    with one_end() as (end, upstream):
        end.channel.note_activity("the forward of micro-batch 3 in step 7")
        reader, frame = FrameReader(), None
        while frame is None or frame.message != m.Pong(end.channel.activity):
            frame = reader.advance(upstream.recv_into(reader.buffer()))


def test_messages_tell_what_the_peer_did_last() -> None:
    with channel_pair() as (up, down):
        assert up.channel.peer_activity == ""
        down.channel.send(m.Pong("\x1b[2Jloading its weights"))
        assert up.channel.peer_answers()
        assert up.channel.peer_activity == r"\x1b[2Jloading its weights"
        down.channel.send(m.Gradient(3, 1, 0, []))
        up.next()
        assert up.channel.peer_activity == "the backward of micro-batch 1 in step 3"


class SlowDevice:
    """Encodes a frame after it is let go."""

    def __init__(self) -> None:
        self._is_let_go = threading.Event()

    def let_go(self) -> None:
        self._is_let_go.set()

    def encode(self) -> list[memoryview]:
        assert self._is_let_go.wait(PATIENCE_SECONDS)
        return encode_frame(Frame(activation(0)))


def test_a_peer_whose_device_is_slow_answers_and_is_not_given_up() -> None:
    device = SlowDevice()
    with channel_pair() as (up, down):
        up.channel.send_later(activation(0), device.encode)
        with pytest.raises(Empty):  # three times the silence that ends a channel
            down.inbox.get(timeout=0.9)
        assert down.channel.peer_answers()
        device.let_go()
        frame = down.next().content
        assert isinstance(frame, Frame)
        assert frame.message == activation(0)


def test_two_peers_whose_devices_are_slow_hear_each_other() -> None:
    device = SlowDevice()
    with channel_pair() as (up, down):
        up.channel.send_later(activation(0), device.encode)
        down.channel.send_later(m.Gradient(1, 0, 0, is_present=[]), device.encode)
        for end in (up, down):
            with pytest.raises(Empty):  # three times the silence that ends a channel
                end.inbox.get(timeout=0.9)
        device.let_go()
        frame = down.next().content
        assert isinstance(frame, Frame)
        assert frame.message == activation(0)


def test_waits_end_with_the_channel_while_its_device_is_slow() -> None:
    device = SlowDevice()
    with one_end() as (end, upstream):
        end.channel.send_later(m.Gradient(1, 0, 0, is_present=[]), device.encode)
        upstream.close()
        assert isinstance(end.next().content, HeteroError)
        end.channel.wait_until_sent(0)
        assert not end.channel.peer_answers()
        device.let_go()


def test_a_device_that_hangs_does_not_keep_a_channel_from_closing() -> None:
    device = SlowDevice()
    with channel_pair(replace(QUICK, stop_seconds=0.05)) as (up, down):
        up.channel.send_later(activation(0), device.encode)
        up.channel.close(m.Goodbye())
        assert isinstance(down.next().content, HeteroError)
        device.let_go()


def test_a_peer_that_is_gone_does_not_answer() -> None:
    with one_end() as (end, upstream):
        upstream.close()
        assert not end.channel.peer_answers()


def test_an_idle_peer_is_not_given_up() -> None:
    with channel_pair() as (up, down):
        with pytest.raises(Empty):  # three times the silence that ends a channel
            up.inbox.get(timeout=0.9)
        assert down.inbox.empty()


def test_close_sends_what_is_queued_and_ends_all_threads() -> None:
    before = threading.active_count()
    with channel_pair() as (up, down):
        for index in range(20):
            up.channel.send(activation(index), torch.ones(100_000))
        up.channel.close(m.Goodbye())
        kinds = [type(down.next().content) for _ in range(21)]
        assert kinds == [Frame] * 21
    assert threading.active_count() == before


def test_waiting_for_the_queue_ends_when_the_peer_has_taken_it() -> None:
    with channel_pair() as (upstream, downstream):
        for _ in range(3):
            upstream.channel.send(activation(0), torch.ones(2**20))
        upstream.channel.wait_until_sent(most_queued=0)
        for _ in range(3):
            assert isinstance(downstream.next().content, Frame)


@contextmanager
def serving_stage() -> Iterator[tuple[Channel, socket.socket]]:
    """The coordinator's channel to a stage that serves, in step 1, and the stage's bare socket."""
    mine, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE_SECONDS)
    session = opening_session("coordinator")
    session.sent(m.Hello(m.PROTOCOL_VERSION, "coordinator", "session"))
    session.received(m.Welcome(m.PROTOCOL_VERSION))
    for message in (m.Deploy(1, [], [], 0), m.Launch(), m.BeginStep(1, 1, False)):
        session.sent(message)
    channel = Channel(SocketConnection(mine), session, "stage 2", Deadlines(stop_seconds=0.1))
    channel.start(SimpleQueue())
    with theirs:
        yield channel, theirs
        channel.close()


def test_a_frame_that_is_passed_on_too_late_is_dropped() -> None:
    frame = Frame(activation(0), (torch.ones(3),))
    with serving_stage() as (channel, stage):
        channel.pass_on(frame, most_queued=1)
        reader, passed = FrameReader(), None
        while passed is None:
            passed = reader.advance(stage.recv_into(reader.buffer()))
        assert passed.message == frame.message
        assert torch.equal(passed.tensors[0], frame.tensors[0])
        for later in (m.BeginStep(2, 1, False), m.Deploy(1, [], [], 0)):
            channel.send(later)
            channel.wait_until_sent(0)
            channel.pass_on(frame, most_queued=1)  # would break a rule of the conversation
            channel.wait_until_sent(0)


def test_a_worker_that_floods_another_one_is_stopped() -> None:
    large = Frame(activation(0), (torch.ones(2**24),))
    with serving_stage() as (channel, stage):
        channel.pass_on(large, most_queued=2)
        assert stage.recv(1)  # the first one is being sent, and the stage takes no more
        channel.pass_on(large, most_queued=2)
        channel.pass_on(large, most_queued=2)
        with pytest.raises(RemoteProtocolError, match="while 2 such messages waited"):
            channel.pass_on(large, most_queued=2)
        stage.close()  # so that the channel need not send them


def test_waiting_for_the_queue_ends_with_the_channel() -> None:
    """The peer is silent and takes nothing."""
    with one_end() as (end, _):
        end.channel.send(m.Gradient(1, 0, 0, [True]), torch.ones(2**24))
        end.channel.wait_until_sent(most_queued=0)
        assert isinstance(end.next().content, HeteroError)


def received(end: End) -> Frame:
    content = end.next().content
    assert isinstance(content, Frame), content
    return content


def worker_behind(end: End) -> Member:
    return Member(1, "one", Address("127.0.0.1", 1), end.channel, m.Equipment(), "session")


def surroundings(*tensors: Tensor) -> Surroundings:
    return Surroundings(True, None, [LayerCall(3, True, tensors, {"again": tensors[0]})])


def test_frames_arrive_in_the_order_in_which_they_were_begun() -> None:
    streams = MadeUpStreams()
    copies = StreamedCopies(streams)
    with channel_pair() as (up, down):
        for number in range(4):
            memory = torch.full((5,), -1.0)
            hidden = memory if number == 2 else on_device(memory)
            if number != 2:
                streams.compute(lambda m=memory, n=number: m.fill_(n))  # type: ignore[misc]
            content = encode_activation(1, Key(number), Activation(hidden))
            send_copied(up.channel, content, copies)
        for number in range(4):
            frame = received(down)
            assert isinstance(frame.message, m.Activation)
            assert frame.message.microbatch == number
            [hidden] = decode_activation(frame.message, frame.tensors).tensors
            assert hidden.eq(-1 if number == 2 else number).all()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_constant_is_sent_twice_and_then_no_more(is_streamed: bool) -> None:
    copies: Copies = PlainCopies(torch.device("cpu"))
    place: Any = on_device if is_streamed else lambda tensor: tensor
    if is_streamed:
        copies = StreamedCopies(MadeUpStreams())
    table, kept = torch.arange(100.0), KeptConstants()
    with channel_pair() as (up, down):
        # A neighbor's channel has no word for arguments, so the rules are a coordinator's.
        up.channel._session.sent = lambda message: None  # type: ignore[method-assign]
        down.channel._session.received = lambda message: None  # type: ignore[method-assign]
        worker, num_tensors = worker_behind(up), []
        for number in range(4):
            mask = torch.full((2,), number)
            around = surroundings(place(table.clone()), place(mask.clone()))
            OutgoingArguments(1, Key(number), around, copies).send(worker, Leg(1), {3})
            frame = received(down)
            assert isinstance(frame.message, m.Arguments)
            num_tensors.append(len(frame.tensors))
            [call] = decode_arguments(frame.message, frame.tensors, kept).calls
            assert torch.equal(call.args[0], table)
            assert torch.equal(call.args[1], mask)
            assert call.kwargs["again"] is call.args[0]
        assert num_tensors == [2, 2, 1, 1]


def test_an_argument_that_cannot_be_sent_is_refused_before_it_is_queued() -> None:
    copies = StreamedCopies(MadeUpStreams())
    call = LayerCall(3, True, (on_device(torch.ones(2)), object()), {})
    arguments = OutgoingArguments(1, Key(0), Surroundings(True, None, [call]), copies)
    with channel_pair() as (up, _), pytest.raises(LocalProtocolError, match="object"):
        arguments.send(worker_behind(up), Leg(1), {3})
