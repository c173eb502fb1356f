"""The training actions of a stage, and what they took."""

from __future__ import annotations

from typing import Literal

import torch

from ...pipeline.recorder import Recorder, Stopwatch
from ...pipeline.rule import Action
from ...pipeline.runner import Result, StageRunner
from ...protocol import messages as m
from .tally import Tally


class TimedTraining:
    """Runs training actions on a device, and adds up what they take until `take`.

    Args:
        device: Where the actions compute.
        recorder: Takes their spans.

    Attributes:
        tally: What all of them took, for who looks at the worker.
    """

    def __init__(self, device: torch.device, recorder: Recorder) -> None:
        self.tally = Tally()
        self._recorder = recorder
        self._stopwatch = Stopwatch(device)
        self._num_microbatches = 0

    def run(self, runner: StageRunner, action: Action) -> Result:
        """Carry out an action of the runner."""
        kind: Literal["forward", "backward"] = "forward" if action.kind == "F" else "backward"
        self.tally.begin()
        self._recorder.note_choice(runner.num_ready)
        with self._stopwatch.measuring(kind), self._recorder.span(kind, action.key):
            result = runner.run(action)
        if action.kind == "F" and action.key.visit == 0:
            self._num_microbatches += 1
            self._recorder.note_training()
        return result

    def take(self, step: int) -> m.Timings:
        """What training has taken since the last time."""
        num_microbatches, self._num_microbatches = self._num_microbatches, 0
        laps = self._stopwatch.take()
        seconds = laps.seconds("forward"), laps.seconds("backward")
        self.tally.note(sum(seconds))
        return m.Timings(step, *seconds, num_microbatches)
