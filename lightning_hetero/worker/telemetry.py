"""The worker's side of recording: what its stage does when, and how its device is.

What a worker does, in a few numbers that any thread may read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ..devices.device import device_for
from ..pipeline.recorder import Recorder
from ..protocol import messages as m
from ..protocol.messages import SpanKind
from ..transport.channel import Arrival, Channel, Handler, key_of, observe
from ..transport.connection import Traffic

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
        health = device_for(self._device).health()
        self._coordinator.send(m.StageRecord(message.number, totals, spans, num_dropped, health))


_MOST_OF_NAME = 8


class Tally:
    """How long a stage has trained, and how much of that it computed.

    Attributes:
        training_seconds: From the first training action to the latest optimizer step.
        busy_seconds: What was computed in that time.
    """

    def __init__(self) -> None:
        self._began_seconds: float | None = None
        self.training_seconds = 0.0
        self.busy_seconds = 0.0

    def begin(self) -> None:
        """A training action begins."""
        if self._began_seconds is None:
            self._began_seconds = time.monotonic()

    def note(self, busy_seconds: float) -> None:
        """An optimizer step has ended, and so much was computed for it."""
        if self._began_seconds is not None:
            self.training_seconds = time.monotonic() - self._began_seconds
            self.busy_seconds += busy_seconds

    def status(
        self,
        session: str,
        coordinator: str,
        layers: Collection[int],
        stage_index: int,
        step: int,
        links: Mapping[str, Traffic],
    ) -> m.StageStatus:
        """The answer to whoever watches a stage with these layers."""
        return m.StageStatus(
            # Who knows the whole name could join the session.
            run=session[:_MOST_OF_NAME],
            coordinator=coordinator,
            stage_index=stage_index,
            first_layer=max(0, min(layers, default=0)),  # the embedding is no decoder layer
            end_layer=max(layers, default=-1) + 1,
            step=step,
            training_seconds=self.training_seconds,
            busy_seconds=self.busy_seconds,
            links=[m.LinkStatus(name, t.sent_bytes, t.received_bytes) for name, t in links.items()],
        )
