"""What a channel sends, told to the recorder of a stage."""

from __future__ import annotations

from functools import partial

from ..pipeline.recorder import Recorder
from ..pipeline.rule import Key
from ..protocol import messages as m
from .channels.channel import Channel


def observe(channel: Channel, peer: int, recorder: Recorder | None) -> None:
    """Have a recorder told of what the channel sends, or nobody."""
    channel.on_sent = None if recorder is None else partial(_note_sent, recorder, peer)


def key_of(message: m.Message) -> Key | None:
    """Which micro-batch a message is about, if about one."""
    if isinstance(message, (m.Arguments, m.Activation, m.Gradient)):
        return Key(message.microbatch, message.visit)
    return None


def _note_sent(
    recorder: Recorder, peer: int, message: m.Message, num_bytes: int, start_seconds: float
) -> None:
    key = key_of(message)
    if key is not None:
        recorder.note_sent(peer, key, type(message).__name__, num_bytes, start_seconds)
