"""The worker's side of recording: its actions, and the device's health."""

from __future__ import annotations

from torch import Tensor

from ..pipeline.recorder import Recorder
from ..protocol import messages as m
from ..transport.channel import Channel, Handler, observe
from .neighbors import SessionNeighbors
from .parts import SessionPart


class SessionTelemetry(SessionPart):
    """Records spans while the coordinator wants them.

    Args:
        coordinator: The channel to the coordinator.
        recorder: Takes the spans.
        neighbors: The session's channels.
    """

    def __init__(
        self, coordinator: Channel, recorder: Recorder, neighbors: SessionNeighbors
    ) -> None:
        self._coordinator = coordinator
        self._recorder = recorder
        self._neighbors = neighbors
        self.handlers: dict[type, Handler] = {
            m.Record: self._on_record,
            m.FetchRecord: self._on_fetch_record,
        }

    def _on_record(self, message: m.Record, _tensors: tuple[Tensor, ...]) -> None:
        self._recorder.switch(message.is_on, message.keeps_spans)
        for channel, peer in self._neighbors.numbers.items():
            observe(channel, peer, self._recorder if message.is_on else None)

    def _on_fetch_record(self, message: m.FetchRecord, _tensors: tuple[Tensor, ...]) -> None:
        totals, spans, num_dropped = self._recorder.record(message.with_spans)
        health = self._recorder.device.health()
        record = m.StageRecord(totals, spans, num_dropped, health, request=message.request)
        self._coordinator.send(record)
