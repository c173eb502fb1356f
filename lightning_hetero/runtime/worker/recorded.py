"""The worker's side of recording: what its stage does when, and how its device is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ...devices.description import health_of
from ...pipeline.recorder import Recorder
from ...protocol import messages as m
from ...protocol.messages import SpanKind
from ...transport.channel import Arrival, Channel, Handler, key_of, observe

_KINDS: dict[type, SpanKind] = {
    m.Arguments: "take",
    m.Activation: "take",
    m.Gradient: "take",
    m.MeasureNorms: "optimizer",
    m.ClipGradients: "optimizer",
    m.ApplyOptimizer: "optimizer",
}


class RecordedSide:
    """Records a session's stage while its coordinator wants it.

    Args:
        coordinator: The channel to the coordinator.
        device: Where the stage computes.
        neighbors: The session's present channels by the numbers of the stages behind them.

    Attributes:
        recorder: Takes the spans.
    """

    def __init__(
        self,
        coordinator: Channel,
        device: torch.device,
        neighbors: Callable[[], dict[Channel, int]],
    ) -> None:
        self.recorder = Recorder(device)
        self._coordinator = coordinator
        self._device = device
        self._neighbors = neighbors
        self.handlers: dict[type, Handler] = {
            m.Record: self._on_record,
            m.FetchRecord: self._on_fetch_record,
        }

    def taking(self, arrival: Arrival, message: m.Message) -> AbstractContextManager[None]:
        """Inside, something that has arrived is carried out."""
        kind = _KINDS.get(type(message))
        if kind is None or not self.recorder.is_on:
            return self.recorder.nothing
        num_bytes = sum(tensor.nbytes for tensor in arrival.tensors)
        return self.recorder.span(
            kind,
            key_of(message),
            type(message).__name__,
            num_bytes,
            self._neighbors().get(arrival.channel),
            arrival.moment_seconds,
        )

    def _on_record(self, message: m.Record, _tensors: tuple[Tensor, ...]) -> None:
        self.recorder.switch(message.is_on, message.keeps_spans)
        for channel, peer in self._neighbors().items():
            observe(channel, peer, self.recorder if message.is_on else None)

    def _on_fetch_record(self, message: m.FetchRecord, _tensors: tuple[Tensor, ...]) -> None:
        totals, spans, num_dropped = self.recorder.record(message.with_spans)
        health = health_of(self._device)
        self._coordinator.send(m.StageRecord(message.number, totals, spans, num_dropped, health))
