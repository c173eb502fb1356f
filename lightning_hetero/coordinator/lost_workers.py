"""The lost workers of a run: the cause and step of each loss, and the replacement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .member import Member

# So many losses of a stage's processes in one step come from the step itself.
MOST_LOSSES_IN_A_STEP = 5


@dataclass(eq=False)
class Loss:
    """A lost worker, and the progress of its replacement by another process.

    All moments are on the clock of recorded spans.

    Args:
        worker: The worker; the process in its place has the same name and number.
        step: The step in which it was lost, as the log counts steps.
        reason: The error at the end of its conversation, in words.
        began_seconds: When the loss was noted.
        place: The name of the worker and, if it differs, its address.

    Attributes:
        served_by: The name and address of its replacement, as in ``place``; empty until it served.
        served_seconds: When another process served, if it did.
        restored_seconds: When that process had the layers and their latest snapshot, if it had
            them.
        end_seconds: When it had caught up, or was lost in its turn, if it has.
        has_caught_up: Whether the process has repeated all work of the lost worker.
        first_step: The first step repeated by the process.
        num_bytes: The bytes sent to the process before it began to repeat.
        num_failed: The processes lost while they got the layers.
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
    num_failed: int = 0

    def note_failed(self) -> None:
        """Another process was lost while it got the layers."""
        self.num_failed += 1

    def note_restored(self, served_seconds: float, now: float, behind: int, num_bytes: int) -> None:
        """A process has the layers and the snapshot after a step, and begins to repeat."""
        self.served_seconds, self.restored_seconds = served_seconds, now
        self.served_by = self.worker.where
        self.first_step, self.num_bytes = behind + 1, num_bytes

    def note_end(self, now: float, has_caught_up: bool) -> None:
        """The process has caught up, or was lost too."""
        self.end_seconds, self.has_caught_up = now, has_caught_up

    @property
    def repeated(self) -> str:
        """The repeated steps, in words."""
        if self.first_step > self.step:
            return "nothing"
        if self.first_step == self.step:
            return f"step {self.step}"
        return f"steps {self.first_step} to {self.step}"


def why_not_again(losses: Sequence[Loss], worker: Member, step: int) -> str:
    """Why a worker is not replaced once more, as sentences; empty if it may be.

    A layer that ends its process ends the next process at the same place, for ever.

    Args:
        losses: All losses of the run.
        worker: The worker lost now; the losses may have this loss already.
        step: The present step.
    """
    own = [loss for loss in losses if loss.worker is worker and loss.step == step]
    num_losses = sum(1 + loss.num_failed for loss in own)
    if num_losses < MOST_LOSSES_IN_A_STEP:
        return ""
    num_failed = sum(loss.num_failed for loss in own)
    loading = f", {num_failed} times while it got its layers" if num_failed else ""
    return (
        f"It was lost {num_losses} times in step {step}{loading}, and the step was not done, so "
        "the next process would be lost too. The worker's log says by which signal each process "
        "ended: SIGSEGV, SIGABRT or SIGILL is a fault in native code that a layer calls, which the "
        "traceback there names; SIGKILL is most often the system, which had no memory left: give "
        "this worker fewer layers in the plan, or use smaller micro-batches."
    )


def seconds_of(losses: Sequence[Loss], start_seconds: float, end_seconds: float) -> float:
    """The time between two moments while a process was lost or repeated a lost one's work."""
    total, free = 0.0, start_seconds
    for loss in sorted(losses, key=lambda each: each.began_seconds):
        end = end_seconds if loss.end_seconds is None else min(loss.end_seconds, end_seconds)
        total += max(0.0, end - max(loss.began_seconds, free))
        free = max(free, end)
    return total


def lost_between(losses: Sequence[Loss], start_seconds: float, end_seconds: float) -> list[Loss]:
    """The losses noted between two moments."""
    return [loss for loss in losses if start_seconds <= loss.began_seconds < end_seconds]
