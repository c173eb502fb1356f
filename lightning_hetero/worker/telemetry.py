"""The worker's side of recording: its actions, and the device's health."""

from __future__ import annotations

from torch import Tensor

from ..protocol import messages as m
from ..transport.channel import Handler, observe
from .parts import SessionPart, SessionSite


class SessionTelemetry(SessionPart):
    """Records spans while the coordinator wants them.

    Args:
        site: The session.
    """

    def __init__(self, site: SessionSite) -> None:
        self._coordinator = site.coordinator
        self._recorder = site.recorder
        self._neighbors = site.neighbors
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
