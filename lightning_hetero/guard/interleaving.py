"""Do the micro-batches of a step disturb each other while several are on their way?

    micro-batch 0, 1, 2, … one after the other ──▶ losses alone ──────┐
    the step: several on their way, in threads ──▶ losses of the step ┴▶ difference

Both have the same weights, modes and random numbers, and up to rounding the same losses, unless
`training_step` keeps something where other micro-batches or another thread see something else: in a
list, a dictionary, a global, the mode of a module, or a state of Python or torch per thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from ..coordinator.deployment import Deployment
from ..pipeline.microbatch import CheckFirstBatch, CutBatch, CutWindow
from ..pipeline.results import loss_of
from ..pipeline.tolerance import LEAST_LOSS, LOSS_ALONE, Compared, end_or_warn, number_error
from .check_schedule import RunChecks
from .trial import Trial

_NOT_CHECKED = "whether the micro-batches of a step disturb each other was not checked: "


@dataclass(frozen=True)
class Difference:
    """A micro-batch with another loss in its step than alone."""

    microbatch: int
    in_step: float | None
    alone: float | None
    compared: Compared

    def __str__(self) -> str:
        here, alone = (
            "none" if each is None else f"{each:.6g}" for each in (self.in_step, self.alone)
        )
        return f"{here} for micro-batch {self.microbatch}, and {alone} alone"


@dataclass(frozen=True)
class LossesAlone:
    """The losses of micro-batches run one after the other.

    Args:
        found: The losses; None where ``training_step`` skips a micro-batch.
        rounding: The relative difference explained by rounding.
    """

    found: Sequence[float | None]
    rounding: float

    def largest_difference(self, others: Sequence[float | None]) -> Difference | None:
        """The micro-batch with the largest difference between losses; None if rounding explains it.

        Args:
            others: Losses of the same micro-batches, and perhaps of more.
        """
        all_found = (
            Difference(
                *each, LOSS_ALONE.compare(number_error(*each[1:], LEAST_LOSS), self.rounding)
            )
            for each in zip(range(len(others)), others, self.found, strict=False)
        )
        worst = max(all_found, key=lambda each: each.compared.found, default=None)
        return worst if worst is not None and worst.compared.is_other else None


class InterleavingCheck:
    """Compares the losses of a step's micro-batches with their losses alone.

    Args:
        deployment: Where the layers are.
        mode: The answer to a difference.

    Attributes:
        alone: The losses for the comparison with the step; None without a comparison.
    """

    def __init__(self, deployment: Deployment, mode: CheckFirstBatch) -> None:
        self._deployment = deployment
        self._mode = mode
        self.alone: LossesAlone | None = None

    def run_alone(self, checks: RunChecks, batch: CutBatch | CutWindow, trial: Trial) -> None:
        """Run the first micro-batches of a batch one after the other; everything is as before then.

        `compare` uses the losses.

        Args:
            checks: The checks of the run.
            batch: The batch as it is cut, or the window.
            trial: Runs them.
        """
        self.alone = None
        plan = self._deployment.plan
        if not self._deployment.modules_away or checks.was_said("interleaving"):
            return  # nothing can differ, or no more is to be said
        if any(stage.compile for stage in plan.stages):
            if checks.is_new("interleaving", "compile"):
                why = "a stage compiles its layers, which draw other random numbers then"
                rank_zero_info(f"{_NOT_CHECKED}{why}")
            return
        # More are never on their way at once.
        microbatches = batch.microbatches[: 1 + (plan.max_started or plan.max_in_flight)]
        try:
            self.alone = self._losses(microbatches, trial, checks.needs_gradients)
        except Exception as error:
            # The step itself fails in the same way, unless this check needs more than it.
            trial.recover()
            checks.said.add(("interleaving",))
            rank_zero_info(
                "Whether the micro-batches of a step disturb each other could not be checked. "
                f"{type(error).__name__}: {error}"
            )

    def _losses(
        self, microbatches: Sequence[Any], trial: Trial, needs_gradients: bool
    ) -> LossesAlone | None:
        def run(number: int) -> list[float | None]:
            results = (
                trial.run_alone(*each, number, has_gradients=needs_gradients)
                for each in enumerate(microbatches)
            )
            return [_number(loss_of(result)) for result in results]

        with trial.no_trace() as runs:
            with runs.one(puts_draws_back=False):
                losses = LossesAlone(run(1), trial.rounding.of_loss)
                is_random = runs.may_have_drawn_elsewhere
            if is_random:
                with runs.one():
                    again = run(2)
                if losses.largest_difference(again) is not None:
                    why = "their losses depend on random numbers that are not torch's own"
                    rank_zero_info(f"{_NOT_CHECKED}{why}")
                    return None
        return losses

    def compare(self, checks: RunChecks, results: Sequence[Any]) -> None:
        """Compare the losses of a step with the losses alone, if these were computed for it.

        Args:
            checks: The checks of the run.
            results: The results of ``training_step`` for the micro-batches.

        Raises:
            BatchError: If a loss differs by more than a little, the mode is ``"stop"``, and it is
                the first check.
        """
        alone, self.alone = self.alone, None
        if alone is None:
            return
        found = [_number(loss_of(result)) for result in results]
        difference = alone.largest_difference(self._comparable(found, alone))
        if difference is not None:
            checks.said.add(("interleaving",))
            ends = checks.is_first and difference.compared.is_large
            end_or_warn(_said(checks.which, difference), self._mode, ends=ends)

    def _comparable(self, found: list[float | None], alone: LossesAlone) -> list[float | None]:
        """The losses that can be compared.

        A layer on a worker that updates a buffer of its own changes it in the step from one
        micro-batch to the next, and a layer that this process runs rounds otherwise than a
        worker's.
        """
        hosted = self._deployment.hosted
        updates = self._deployment.has_updated_buffers
        return [
            alone.found[n] if (hosted is not None and hosted.stays(n)) or (n and updates) else each
            for n, each in enumerate(found[: len(alone.found)])
        ]


def _number(loss: Tensor | None) -> float | None:
    return None if loss is None else float(loss.detach())


def _said(which: str, difference: Difference) -> str:
    return (
        f"The micro-batches of the {which} batch have other losses in their step than one after "
        f"the other: {difference}, a difference of {difference.compared}. Several are "
        "on their way at once, each in a thread of its own. It seems that `training_step` keeps "
        "something until the layers have run where others change it (a list, a dictionary, an "
        "object, a global, `self.eval()`), or needs what was set in another thread "
        "(`threading.local`). Keep it in a local variable, or use the safe mode, "
        "`micro_batching='boundary'`, where `training_step` runs once for each batch."
    )
