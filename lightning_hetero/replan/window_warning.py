"""One sentence where batches are too small for the pipeline, although the Trainer accumulates them.

A plan counts on a number of micro-batches. A batch of fewer samples gives fewer, so stages wait for
each other. Inside an accumulation window the backwards of a batch go on while the next batch
begins; forwards of two batches never run beside each other. With `micro_batching='boundary'`
batches run one after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from msgspec import structs

from .._lightning import pl
from ..errors import PlanError
from ..plan import Plan
from ..planner.feasibility import candidate_of
from ..planner.profile import Profile
from ..units import in_micro_batches, in_samples
from .watch import most_accumulated

LEAST_LOSS = 1.02
"""Times as long as necessary that a step takes before it is worth a warning."""


@dataclasses.dataclass(frozen=True)
class SmallBatch:
    """A batch with fewer samples than the plan has micro-batches.

    Args:
        plan: The plan.
        num_samples: The samples of the batch.
        num_batches: Batches for each optimizer step.
        cuts_step: Whether ``training_step`` runs on each micro-batch.
    """

    plan: Plan
    num_samples: int
    num_batches: int
    cuts_step: bool

    def __str__(self) -> str:
        given = in_micro_batches(self.num_samples)
        batch = in_samples(self.num_samples)
        return f"A batch of {batch} gives {given}, and the plan counts on {self.plan.micro_batches}"

    def warning(self, times_as_long: float | None) -> str:
        """The cost of small batches, and settings for the same work in a pipeline.

        Args:
            times_as_long: The predicted step over the predicted step with all batches at once.
        """
        accumulated, samples = f"accumulate_grad_batches={self.num_batches}", self._samples_at_once
        settings = f"batches of {in_samples(samples)} with accumulate_grad_batches=1"
        wait = "a batch begins when the batch before it has passed all stages"
        if self.cuts_step:
            wait = "only the backwards of a batch run beside the next batch"
            settings = (
                f"`lightning_hetero.windows(loader, {self.num_batches})` with "
                f"accumulate_grad_batches=1, or batches of {in_samples(samples)}"
            )
        cost = "stages wait for each other"
        if times_as_long is not None:
            cost = f"a step is predicted to take {times_as_long:.2f} times as long as with all "
            cost += f"{self.num_batches} batches at once"
        return f"{self}. With {accumulated} {wait}, so {cost}. Use {settings}."

    @property
    def _samples_at_once(self) -> int:
        return self.num_samples * self.num_batches

    def times_as_long(self, profile: Profile) -> float | None:
        """The predicted step over the step with all batches at once, if it can be predicted."""
        present = structs.replace(
            profile,
            batch_size=self.num_samples,
            accumulate_grad_batches=self.num_batches if self.cuts_step else 1,
        )
        at_once = structs.replace(
            profile, batch_size=self._samples_at_once, accumulate_grad_batches=1
        )
        try:
            now = candidate_of(self._with(self.num_samples), present)
            best = candidate_of(self._with(self._samples_at_once), at_once)
        except PlanError:
            return None
        # Batches that run one after the other take as often as long.
        num_steps = 1 if self.cuts_step else self.num_batches
        if not best.step_seconds:
            return None
        return num_steps * now.step_seconds / best.step_seconds

    def _with(self, micro_batches: int) -> Plan:
        return dataclasses.replace(self.plan, micro_batches=micro_batches)


class WindowWarning:
    """Looks at the first batch of a training, and warns once.

    Args:
        trainer: Gives the batches.
        plan: The plan at the start of the training.
        cuts_step: Whether ``training_step`` runs on each micro-batch.
        profile: The measurements, if there are any.
    """

    def __init__(
        self, trainer: pl.Trainer, plan: Plan, cuts_step: bool, profile: Profile | None
    ) -> None:
        self._trainer = trainer
        self._plan = plan
        self._cuts_step = cuts_step
        self._profile = profile
        self._is_over = False

    def note_batch(self, count: Callable[[], int | None]) -> None:
        """Look at a batch before its step, if it is the first one.

        Args:
            count: Returns how many samples it has; None if they cannot be found.
        """
        if self._is_over:
            return
        self._is_over = True
        several = isinstance(self._trainer.train_dataloader, list)
        found = None if several else count()
        if found is None or not 0 < found < self._plan.micro_batches:
            return
        num_batches = most_accumulated(self._trainer)
        _say(SmallBatch(self._plan, found, num_batches, self._cuts_step), self._profile)


def _say(small: SmallBatch, profile: Profile | None) -> None:
    times = None
    if small.num_batches > 1 and small.plan.workers:
        times = None if profile is None else small.times_as_long(profile)
        if times is None or times >= LEAST_LOSS:
            rank_zero_warn(small.warning(times))
            return
    rank_zero_info(f"{small}.")
