"""The worker's side of recording: its actions, their times, the device's health."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor

from ..pipeline.boundary import Activation, Gradients
from ..pipeline.recorder import Recorder
from ..pipeline.rule import Action
from ..pipeline.runner import Runner
from ..protocol import messages as m
from ..transport.channel import Arrival, Channel, Handler, observe


class SessionTelemetry:
    """Times a session's actions, and records spans while the coordinator wants them.

    Args:
        coordinator: The channel to the coordinator.
        device: Computes the stages.
        neighbors: Returns the session's present channels with the numbers of the processes there.

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
        self._num_microbatches = 0
        self.handlers: dict[type, Handler] = {
            m.Record: self._on_record,
            m.FetchRecord: self._on_fetch_record,
        }

    def taking(self, arrival: Arrival, message: m.Message) -> AbstractContextManager[None]:
        """Inside, the session carries out an arrived message."""
        kind = message.recorded_as
        if kind is None or not self.recorder.is_on:
            return self.recorder.nothing
        neighbors = self._neighbors()
        for channel, peer in neighbors.items():
            # A move of layers opens channels while records are taken.
            if channel.on_sent is None:
                observe(channel, peer, self.recorder)
        num_bytes = sum(tensor.nbytes for tensor in arrival.tensors)
        return self.recorder.span(
            kind,
            message.key,
            type(message).__name__,
            num_bytes,
            neighbors.get(arrival.channel),
            arrival.moment_seconds,
            message.stage_number,
        )

    def run_training(self, runner: Runner, action: Action) -> Activation | Gradients:
        """Carry out a training action of the runner, and add up its time until `take_timings`."""
        kind: Literal["forward", "backward"] = "forward" if action.kind == "F" else "backward"
        runner.land(action)
        with self.recorder.action(kind, action.key, runner.num_ready, action.stage_index):
            content = runner.run(action)
        is_first = action.stage_index == runner.stages[0].stage_index
        if action.kind == "F" and action.key.visit == 0 and is_first:
            self._num_microbatches += 1
            self.recorder.note_training()
        return content

    def take_timings(self, step: int) -> m.Timings:
        """The time of training since the last call."""
        num_microbatches, self._num_microbatches = self._num_microbatches, 0
        laps = self.recorder.take_laps()
        return m.Timings(step, laps.seconds["forward"], laps.seconds["backward"], num_microbatches)

    def _on_record(self, message: m.Record, _tensors: tuple[Tensor, ...]) -> None:
        self.recorder.switch(message.is_on, message.keeps_spans)
        for channel, peer in self._neighbors().items():
            observe(channel, peer, self.recorder if message.is_on else None)

    def _on_fetch_record(self, message: m.FetchRecord, _tensors: tuple[Tensor, ...]) -> None:
        totals, spans, num_dropped = self.recorder.record(message.with_spans)
        health = self.recorder.device.health()
        record = m.StageRecord(totals, spans, num_dropped, health, request=message.request)
        self._coordinator.send(record)
