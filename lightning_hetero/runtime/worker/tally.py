"""What a worker does, in a few numbers that any thread may read."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

import torch

from ...devices.description import resident_bytes
from ...protocol import messages as m
from ...transport.connection import Traffic

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


def used_bytes(device: torch.device) -> int:
    """Memory of the device that this process takes."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return resident_bytes()
