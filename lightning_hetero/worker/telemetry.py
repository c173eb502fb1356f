"""The worker's side of recording: what its stage does and when, and the health of its device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ..pipeline.recorder import Recorder
from ..protocol import messages as m
from ..transport.channel import Arrival, Channel, Handler, observe


class RecordedSide:
    """Records a session's stage while the coordinator wants a record.

    Args:
        coordinator: The channel to the coordinator.
        device: Computes the stage.
        neighbors: Returns the session's present channels with the numbers of the stages there.

    Attributes:
        recorder: Sums up actions, and takes spans while it is switched on.
    """

    def __init__(
        self,
        coordinator: Channel,
        device: torch.device,
        neighbors: Callable[[], dict[Channel, int]],
    ) -> None:
        self.recorder = Recorder(device)
        self._coordinator = coordinator
        self._neighbors = neighbors
        self.handlers: dict[type, Handler] = {
            m.Record: self._on_record,
            m.FetchRecord: self._on_fetch_record,
        }

    def taking(self, arrival: Arrival, message: m.Message) -> AbstractContextManager[None]:
        """Inside, the session carries out a message that has arrived."""
        kind = message.recorded_as
        if kind is None or not self.recorder.is_on:
            return self.recorder.nothing
        num_bytes = sum(tensor.nbytes for tensor in arrival.tensors)
        return self.recorder.span(
            kind,
            message.key,
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
        health = self.recorder.device.health()
        self._coordinator.send(m.StageRecord(message.number, totals, spans, num_dropped, health))
