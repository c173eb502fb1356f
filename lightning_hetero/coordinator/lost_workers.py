"""The workers that a run has lost: who, why, in which step, and how another process came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .member import Member


@dataclass(eq=False)
class Loss:
    """A worker that was lost, and how far another process has taken its place.

    All moments are on the clock of recorded spans.

    Args:
        worker: The worker; its name and number are those of the process in its place too.
        step: The step in which it was lost, as the log counts steps.
        reason: What ended its conversation.
        began_seconds: When the loss was noted.
        place: The name of the worker and, where it is another one, its address.

    Attributes:
        served_by: The same of the process in its place; empty until that process served.
        served_seconds: When another process served; None until then.
        restored_seconds: When that process had the layers and their latest snapshot; None until
            then.
        end_seconds: When it had caught up, or was lost in its turn; None until then.
        has_caught_up: Whether the process has repeated all that the lost one had done.
        first_step: The first step that the process repeats.
        num_bytes: What was sent to the process before it began to repeat.
    """

    worker: Member
    step: int
    reason: str
    began_seconds: float
    place: str
    served_by: str = ""
    served_seconds: float | None = None
    restored_seconds: float | None = None
    end_seconds: float | None = None
    has_caught_up: bool = False
    first_step: int = 0
    num_bytes: int = 0

    def note_restored(self, served_seconds: float, now: float, behind: int, num_bytes: int) -> None:
        """A process has the layers and the snapshot behind a step, and begins to repeat."""
        self.served_seconds, self.restored_seconds = served_seconds, now
        self.served_by = self.worker.where
        self.first_step, self.num_bytes = behind + 1, num_bytes

    def note_end(self, now: float, has_caught_up: bool) -> None:
        """The process has caught up, or was lost too."""
        self.end_seconds, self.has_caught_up = now, has_caught_up

    @property
    def repeated(self) -> str:
        """What the process repeats, in words."""
        if self.first_step > self.step:
            return "nothing"
        if self.first_step == self.step:
            return f"step {self.step}"
        return f"steps {self.first_step} to {self.step}"


def seconds_of(losses: Sequence[Loss], start_seconds: float, end_seconds: float) -> float:
    """The time between two moments in which a process was lost or repeated a lost one."""
    total, free = 0.0, start_seconds
    for loss in sorted(losses, key=lambda each: each.began_seconds):
        end = end_seconds if loss.end_seconds is None else min(loss.end_seconds, end_seconds)
        total += max(0.0, end - max(loss.began_seconds, free))
        free = max(free, end)
    return total


def lost_between(losses: Sequence[Loss], start_seconds: float, end_seconds: float) -> list[Loss]:
    """The losses that were noted between two moments."""
    return [loss for loss in losses if start_seconds <= loss.began_seconds < end_seconds]
