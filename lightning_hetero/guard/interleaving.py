"""Do the micro-batches of a step disturb each other while several are on their way?

    micro-batch 0, 1, 2, … one after the other ──▶ losses alone ──────┐
    the step: several on their way, in threads ──▶ losses of the step ┴▶ difference

Both have the same weights, modes and random numbers, and leave out rounding the same losses, unless
`training_step` keeps something where other micro-batches or another thread see something else: in a
list, a dictionary, a global, the mode of a module, or in what Python and torch keep per thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from .._lightning import pl
from ..coordinator.deployment import Deployment
from ..coordinator.dry_run import no_trace
from ..coordinator.precision import computing_dtypes
from ..errors import BatchError
from ..pipeline.handover import LoneMicrobatch
from ..pipeline.microbatch import GO_ON, CheckFirstBatch, CutBatch, CutWindow
from ..pipeline.results import loss_of
from ..pipeline.tolerance import coarsest, rounding_of_loss
from .check_schedule import RunChecks

# Losses below this have no relative error of their own.
_LEAST_SCALE = 1e-3
# Both losses are results of the same operations, so a run ends at a small difference already.
_STOPPING_ROUNDINGS = 10
_STOPPING_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class Difference:
    """A micro-batch that has another loss in its step than alone."""

    microbatch: int
    in_step: float | None
    alone: float | None
    relative: float

    def __str__(self) -> str:
        here, alone = (
            "none" if each is None else f"{each:.6g}" for each in (self.in_step, self.alone)
        )
        return f"{here} for micro-batch {self.microbatch}, and {alone} alone"


@dataclass(frozen=True)
class LossesAlone:
    """The losses that micro-batches have when they run one after the other.

    Args:
        found: The losses; None where ``training_step`` skips a micro-batch.
        rounding: The relative difference that rounding explains.
    """

    found: Sequence[float | None]
    rounding: float

    def largest_difference(self, others: Sequence[float | None]) -> Difference | None:
        """The micro-batch whose loss differs most from another one; None if rounding explains it.

        Args:
            others: Losses of the same micro-batches, and perhaps of more.
        """
        pairs = zip(others, self.found, strict=False)
        all_found = (
            Difference(number, mine, alone, _relative(mine, alone))
            for number, (mine, alone) in enumerate(pairs)
        )
        worst = max(all_found, key=lambda each: each.relative, default=None)
        return None if worst is None or worst.relative <= self.rounding else worst

    def is_large(self, difference: Difference) -> bool:
        """Whether a run ends at a difference unless the user says otherwise."""
        return difference.relative > max(_STOPPING_DIFFERENCE, _STOPPING_ROUNDINGS * self.rounding)


def _relative(mine: float | None, alone: float | None) -> float:
    if mine is None or alone is None:
        return 0.0 if mine is alone else math.inf
    if mine == alone or (math.isnan(mine) and math.isnan(alone)):
        return 0.0
    found = abs(mine - alone) / max(abs(mine), abs(alone), _LEAST_SCALE)
    return found if math.isfinite(found) else math.inf


class InterleavingCheck:
    """Compares the losses of a step's micro-batches with those that they have alone.

    Args:
        module: Attached to its Trainer.
        deployment: Where its layers are.
        mode: The answer to a difference.

    Attributes:
        alone: The losses that the step is to be compared with; None if it is not to be.
    """

    def __init__(
        self, module: pl.LightningModule, deployment: Deployment, mode: CheckFirstBatch
    ) -> None:
        self._module = module
        self._deployment = deployment
        self._mode = mode
        self.alone: LossesAlone | None = None

    def run_alone(
        self,
        checks: RunChecks,
        batch: CutBatch | CutWindow,
        rest: Sequence[Any],
        step: int,
        begin_again: Callable[[], None],
    ) -> None:
        """Run the first micro-batches of a batch one after the other; everything is as before then.

        You must begin a step before. `compare` uses the losses.

        Args:
            checks: Those of the run.
            batch: The batch as it is cut, or the window.
            rest: The other arguments of ``training_step``.
            step: The number of the step for dropout masks.
            begin_again: Begins a trial step, after something in it has failed.
        """
        self.alone = None
        reason = self._why_not()
        if reason is not None or checks.was_said("interleaving"):
            if reason and checks.is_new("interleaving", reason):
                rank_zero_info(
                    "whether the micro-batches of a step disturb each other was not checked: "
                    f"{reason}"
                )
            return
        # More are never on their way at once.
        most = 1 + (self._deployment.plan.max_started or self._deployment.plan.max_in_flight)
        microbatches = batch.microbatches[:most]
        try:
            self.alone = self._losses(microbatches, rest, step, checks.needs_gradients)
        except Exception as error:
            # The step itself fails in the same way, unless this check needs more than it.
            self._deployment.abort()
            begin_again()
            checks.said.add(("interleaving",))
            rank_zero_info(
                "Whether the micro-batches of a step disturb each other could not be checked. "
                f"{type(error).__name__}: {error}"
            )

    def _why_not(self) -> str | None:
        """Why the micro-batches cannot run alone; empty if nothing can differ."""
        if not self._deployment.modules_away:
            return ""
        if any(stage.compile for stage in self._deployment.plan.stages):
            return "a stage compiles its layers, which draw other random numbers then"
        return None

    def _losses(
        self, microbatches: Sequence[Any], rest: Sequence[Any], step: int, needs_gradients: bool
    ) -> LossesAlone | None:
        away = self._deployment.modules_away
        with no_trace(self._module, away, is_timed=False) as runs:
            with runs.one(puts_draws_back=False):
                found = self._run(microbatches, rest, step, needs_gradients)
                is_random = runs.may_have_drawn_elsewhere
            losses = LossesAlone(found, self._rounding())
            if is_random:
                with runs.one():
                    again = self._run(microbatches, rest, step, needs_gradients, run=2)
                if losses.largest_difference(again) is not None:
                    rank_zero_info(
                        "whether the micro-batches of a step disturb each other was not checked: "
                        "their losses depend on random numbers that are not torch's own"
                    )
                    return None
        return losses

    def _run(
        self,
        microbatches: Sequence[Any],
        rest: Sequence[Any],
        step: int,
        needs_gradients: bool,
        run: int = 1,
    ) -> list[float | None]:
        runs = MicrobatchesAlone(self._module, self._deployment, rest, step, needs_gradients, run)
        return [_number(loss_of(runs.run(*each))) for each in enumerate(microbatches)]

    def compare(self, checks: RunChecks, results: Sequence[Any]) -> None:
        """Compare the losses of a step with those alone, if these were computed for it.

        Args:
            checks: Those of the run.
            results: The results of ``training_step`` for the micro-batches.

        Raises:
            BatchError: If a loss differs by more than a little, the mode is ``"stop"``, and it is
                the first check.
        """
        alone, self.alone = self.alone, None
        if alone is None:
            return
        found = [_number(loss_of(result)) for result in results]
        compared = self._comparable(found, alone)
        difference = alone.largest_difference(compared)
        if difference is None:
            return
        checks.said.add(("interleaving",))
        text = _said(checks.which, difference)
        if checks.is_first and self._mode == "stop" and alone.is_large(difference):
            raise BatchError(f"{text} {GO_ON}")
        rank_zero_warn(text)

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

    def _rounding(self) -> float:
        """The relative difference of losses that rounding explains."""
        dtypes = computing_dtypes(self._module)
        widest = max((max(each.shape, default=1) for each in self._module.parameters()), default=1)
        return rounding_of_loss(coarsest([*dtypes, *self._deployment.stage_dtypes]), widest)


@dataclass(frozen=True)
class MicrobatchesAlone:
    """Runs micro-batches of a step that has begun one after the other, without a trace on workers.

    Args:
        module: Attached to its Trainer.
        deployment: Where its layers are.
        rest: The other arguments of ``training_step``.
        step: The number of the step for dropout masks.
        has_gradients: Whether torch records gradients in this process.
        run_number: How often the micro-batches of the step have run so, this time included.
    """

    module: pl.LightningModule
    deployment: Deployment
    rest: Sequence[Any]
    step: int
    has_gradients: bool
    run_number: int = 1

    def run(self, index: int, microbatch: Any) -> Any:
        """Run one of them; returns what ``training_step`` returns."""
        draws, hosted = self.deployment.draws, self.deployment.hosted
        own = draws.microbatch(self.step, index)
        stays = hosted is not None and hosted.stays(index)
        lone = LoneMicrobatch(index, own, self.run_number, stays)
        with (
            self.deployment.hand_overs.alone(lone),
            draws.of(own),
            torch.set_grad_enabled(self.has_gradients),
            self.module.trainer.precision_plugin.train_step_context(),
        ):
            own.go_on()
            result = self.module.training_step(microbatch, *self.rest)
        self.deployment.check_forward_finished()
        return result


def _number(loss: Tensor | None) -> float | None:
    return None if loss is None else float(loss.detach())


def _said(which: str, difference: Difference) -> str:
    return (
        f"The micro-batches of the {which} batch have other losses in their step than one after "
        f"the other: {difference}, a difference of {100 * difference.relative:.3g} %. Several are "
        "on their way at once, each in a thread of its own. It seems that `training_step` keeps "
        "something until the layers have run where others change it (a list, a dictionary, an "
        "object, a global, `self.eval()`), or needs what was set in another thread "
        "(`threading.local`). Keep it in a local variable, or use the safe mode, "
        "`micro_batching='boundary'`, where `training_step` runs once for each batch."
    )
