"""What leaves while it is being copied: the frames, their order, and what workers keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetero.devices.copies import Copies, PlainCopies, StreamedCopies
from lightning_hetero.errors import LocalProtocolError
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.boundary import Activation
from lightning_hetero.pipeline.codec import read_activation, read_arguments, say_activation
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.pipeline.stage import Surroundings
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame
from lightning_hetero.protocol.values import KeptConstants
from lightning_hetero.runtime.channels.address import Address
from lightning_hetero.runtime.coordinator.arguments import OutgoingArguments
from lightning_hetero.runtime.coordinator.conversations import ConnectedWorker
from lightning_hetero.runtime.outgoing import send_copied

from ..devices.made_up_streams import MadeUpStreams, on_device
from .pairs import End, channel_pair


def received(end: End) -> Frame:
    content = end.next().content
    assert isinstance(content, Frame), content
    return content


def worker_behind(end: End) -> ConnectedWorker:
    return ConnectedWorker(1, "one", Address("127.0.0.1", 1), end.channel, m.Equipment())


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
            content = say_activation(1, Key(number), Activation(hidden))
            send_copied(up.channel, content, copies)
        for number in range(4):
            frame = received(down)
            assert isinstance(frame.message, m.Activation)
            assert frame.message.microbatch == number
            [hidden] = read_activation(frame.message, frame.tensors).tensors
            assert hidden.eq(-1 if number == 2 else number).all()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_a_worker_keeps_is_sent_twice_and_then_no_more(is_streamed: bool) -> None:
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
            OutgoingArguments(1, Key(number), around, copies).send(worker, {3})
            frame = received(down)
            assert isinstance(frame.message, m.Arguments)
            num_tensors.append(len(frame.tensors))
            [call] = read_arguments(frame.message, frame.tensors, kept).calls
            assert torch.equal(call.args[0], table)
            assert torch.equal(call.args[1], mask)
            assert call.kwargs["again"] is call.args[0]
        assert num_tensors == [2, 2, 1, 1]


def test_what_cannot_be_sent_is_refused_before_it_is_queued() -> None:
    copies = StreamedCopies(MadeUpStreams())
    call = LayerCall(3, True, (on_device(torch.ones(2)), object()), {})
    arguments = OutgoingArguments(1, Key(0), Surroundings(True, None, [call]), copies)
    with channel_pair() as (up, _), pytest.raises(LocalProtocolError, match="object"):
        arguments.send(worker_behind(up), {3})
