"""Layers that sleep by the present speed of their process."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from benchmarks.sleeping_stages.main import Sleep, SleepingBlock

SPEEDS = "SLEEPING_SPEED_FILE"
"""The environment variable with the file that has the present speed of a process."""


class Block(SleepingBlock):
    """A layer that sleeps by the present speed of the process in which it runs."""

    def __init__(self, forward_seconds: float, noise: float) -> None:
        super().__init__(forward_seconds, 2 * forward_seconds)
        self.noise = noise

    def forward(self, hidden: Tensor) -> Tensor:
        speed = float(Path(os.environ[SPEEDS]).read_text())
        # Not by torch's generator, which every process seeds alike.
        times = max(0.0, 1 + self.noise * (2 * int.from_bytes(os.urandom(2), "big") / 65535 - 1))
        seconds = (self.forward_seconds * times / speed, self.backward_seconds * times / speed)
        slept: Tensor = Sleep.apply(hidden, *seconds)
        return slept * self.scale
