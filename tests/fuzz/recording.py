"""What a coordinator really says to its worker, frame by frame."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.devices.description import equipment_here
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import _PREFIX, Frame, encode_frame
from lightning_hetero.transport.connection import SocketConnection

from ..models import TinyModule, loader, trainer


@dataclass(frozen=True)
class RecordedFrame:
    """The header, which says a message and what tensors follow, and the body."""

    header: bytes
    body: bytes

    @property
    def kind(self) -> str:
        return str(msgspec.msgpack.decode(self.header)["message"]["type"])


class _Fetching(Callback):
    """Asks for weights and for the optimizer's state too, as a checkpoint does."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        module.state_dict()
        trainer.strategy.optimizer_state(trainer.optimizers[0])


def record(worker: str) -> list[RecordedFrame]:
    """A run of one step: everything that the coordinator says in it, from Hello to Goodbye."""
    said: defaultdict[int, bytearray] = defaultdict(bytearray)
    send = SocketConnection.send

    def sending(connection: SocketConnection, buffers: Sequence[memoryview]) -> int:
        num_bytes = send(connection, buffers)
        said[id(connection)] += b"".join(buffers)[:num_bytes]
        return num_bytes

    strategy = HeteroPipelineStrategy([worker], "even", micro_batches=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SocketConnection, "send", sending)
        run = trainer(strategy, max_steps=1, callbacks=[_Fetching()], gradient_clip_val=1.0)
        run.fit(TinyModule(num_layers=2), loader(4, 4))
    [conversation] = said.values()
    return list(_frames_of(bytes(conversation)))


def joiner_hello() -> RecordedFrame:
    """What a worker says at the coordinator's door."""
    hello = m.Hello(
        m.PROTOCOL_VERSION,
        "joiner",
        equipment=equipment_here(torch.device("cpu")),
        name="fast",
        address="127.0.0.1:4321",
    )
    [frame] = _frames_of(b"".join(encode_frame(Frame(hello))))
    return frame


def _frames_of(data: bytes) -> list[RecordedFrame]:
    found = []
    while data:
        _, _, header_bytes, body_bytes = _PREFIX.unpack_from(data)
        begin = _PREFIX.size + header_bytes
        found.append(RecordedFrame(data[_PREFIX.size : begin], data[begin : begin + body_bytes]))
        data = data[begin + body_bytes :]
    return found
