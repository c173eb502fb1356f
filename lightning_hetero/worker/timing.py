"""Times a session's actions, and makes spans of them while they are recorded."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal

import torch

from ..pipeline.boundary import Activation, Gradients
from ..pipeline.recorder import Recorder
from ..pipeline.rule import Action
from ..pipeline.runner import Runner
from ..protocol import messages as m
from ..transport.channel import Arrival, observe
from .neighbors import SessionNeighbors


class SessionTiming:
    """Times a session's actions.

    Args:
        device: Computes the stages.
        neighbors: The session's channels.

    Attributes:
        recorder: Sums up actions, and takes spans while it is switched on.
    """

    def __init__(self, device: torch.device, neighbors: SessionNeighbors) -> None:
        self.recorder = Recorder(device)
        self._neighbors = neighbors
        self._num_microbatches = 0

    def taking(self, arrival: Arrival, message: m.Message) -> AbstractContextManager[None]:
        """Inside, the session carries out a message that has arrived."""
        kind = message.recorded_as
        if kind is None or not self.recorder.is_on:
            return self.recorder.nothing
        neighbors = self._neighbors.numbers
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
        """The time that training has taken since the last call."""
        num_microbatches, self._num_microbatches = self._num_microbatches, 0
        laps = self.recorder.take_laps()
        return m.Timings(step, laps.seconds["forward"], laps.seconds["backward"], num_microbatches)
