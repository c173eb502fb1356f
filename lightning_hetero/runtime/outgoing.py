"""Sends what the pipeline passes on while it is still being copied from the device.

Whoever computes begins the copies and goes on; the thread that writes to the socket waits for them.
"""

from __future__ import annotations

from functools import partial

from ..devices.copies import Copies, HostCopy
from ..pipeline.codec import Content
from ..protocol.frames import Frame, encode_body, encode_head
from .channels.channel import Channel


def send_copied(channel: Channel, content: Content, copies: Copies) -> None:
    """Queue a message with tensors of the device.

    Raises:
        LocalProtocolError: If the rules forbid the message, or it cannot be encoded.
    """
    message, tensors = content
    copy = copies.to_host(tensors)
    if copy.is_immediate:
        channel.send(message, *copy.tensors)
    else:
        head = encode_head(Frame(message, copy.tensors))
        channel.send_later(message, partial(_encode_copied, head, copy))


def _encode_copied(head: memoryview, copy: HostCopy) -> list[memoryview]:
    copy.wait()
    return [head, *encode_body(copy.tensors)]
