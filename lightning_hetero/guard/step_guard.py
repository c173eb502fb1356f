"""The checks of a run: of its first batch, of later ones, of the steps on the workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info

from .._lightning import pl
from ..coordinator.deployment import Deployment
from ..coordinator.optimizers import RemoteOptimizer
from ..errors import WorkerError
from ..pipeline.microbatch import CutBatch, CutWindow
from ..pipeline.results import StepLog
from .audit import Audit
from .check_schedule import BatchKindReader, BatchKinds, KeptBatch, RunChecks
from .first_batch import FirstBatchCheck, tensors_of
from .interleaving import InterleavingCheck
from .step_changes import OwnAttributes, StepChanges, warn_of_backwards, warn_of_changes
from .trial import Trial

# The interleaving check counts its own runs in the same step.
_RUN_NUMBER = 4

if TYPE_CHECKING:
    from ..strategy.arguments import StepOptions


class RunGuard:
    """The checks of a run, over all its deployments; see `training_run.Guard`."""

    def __init__(self, module: pl.LightningModule, options: StepOptions) -> None:
        self._module = module
        self._options = options
        is_on = options.batches.check != "off"
        self._checks = RunChecks() if is_on else None
        self._audit = Audit(options.batches.check) if is_on else None

    def begin_batch(self, optimizers: Sequence[RemoteOptimizer]) -> None:
        """Count a batch, and begin an audit if it is its turn."""
        if self._audit is not None:
            self._audit.begin_batch(optimizers)

    def watch(self, deployment: Deployment) -> Audit | None:
        """The watch over the steps of a deployment's optimizers from now on, if there is one."""
        if self._audit is not None:
            self._audit.follow(deployment)
        return self._audit

    def of_steps(self, deployment: Deployment) -> CheckedSteps:
        """The checks of the steps of a deployment."""
        return CheckedSteps(self._module, deployment, self._options, self._checks)


class CheckedSteps:
    """The checks of the steps of a deployment; see `StepGuard`.

    Args:
        module: Attached to its Trainer.
        deployment: Where its layers are.
        options: How batches are cut.
        checks: The checks of the run; None if the user does not want any.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        deployment: Deployment,
        options: StepOptions,
        checks: RunChecks | None,
    ) -> None:
        self._module = module
        self._deployment = deployment
        self._options = options
        self._checks = checks
        self._interleaving = InterleavingCheck(deployment, options.batches.check)
        self._kind_reader = BatchKindReader(deployment.coordinator.stages.copies)
        self._own_attributes = OwnAttributes(module, deployment.modules_away)
        # While a checked batch runs, the changes by its micro-batches.
        self._changes: StepChanges | None = None
        # The present batch in a check's form, and its kinds.
        self._kept: tuple[CutBatch, Sequence[Any]] | None = None
        self._kinds: BatchKinds | None = None

    def begin_batch(
        self, cut: CutBatch | CutWindow, rest: Sequence[Any], accumulates: bool, step: int
    ) -> bool:
        """Check the batch if it is its turn.

        A batch that adds to gradients of others is not checked, except the first batch of a run:
        where a check fails, workers drop all gradients. If such a batch had something new, it is
        checked in place of the first possible one.

        Returns:
            Whether its step has begun for that. Only the first check belongs to a step; later ones
            are steps by themselves, so the measured steps of a run do not take longer.
        """
        checks = self._checks
        if checks is None:
            return False
        self._kinds = None
        if not checks.are_over:
            self._kinds = self._kind_reader.read(tensors_of(cut.to_check.whole))
        # A batch that accumulates cannot be checked itself.
        may_keep = accumulates and len(cut.to_check.microbatches) > 1
        self._kept = (cut.to_check.kept(), rest) if may_keep else None
        schedule, kept = checks.schedule, checks.kept
        is_free = not accumulates or schedule.number == 0
        if is_free:
            checks.kept = None
        may_check = is_free and (kept is not None or len(cut.microbatches) > 1)
        is_due = schedule.begin_batch(may_check, kept is not None) and not checks.are_over
        stages, plan = self._deployment.coordinator.stages, self._deployment.plan
        begin = partial(stages.begin_step, plan.max_in_flight, accumulates, step)
        begin_again = partial(begin, is_trial=True)
        trial = Trial(self._module, self._deployment, rest, step, begin_again)
        twins = TwinCheck(trial)
        wanted = twins.wanted(len(cut.microbatches)) if is_free else []
        if not is_due and not wanted:
            return False
        is_first = schedule.number == 1 or (is_due and checks.is_first)
        begin(is_trial=not is_first)
        twins.run(wanted, cut, is_first=is_first)
        if not is_due:
            return is_first
        batch = checked = cut.to_check
        if kept is not None:
            schedule.check_instead(kept.number, kept.found)
            checked, rest = kept.batch
        if len(checked.microbatches) > 1:  # the pieces of a window need not be cut
            self._check_first(checks, checked, replace(trial, rest=rest))
        if len(cut.microbatches) > 1:
            if not checks.is_first:
                begin_again()
            self._interleaving.run_alone(checks, cut, trial)
        if len(batch.microbatches) > 1:
            away = self._deployment.modules_away
            self._changes = StepChanges(self._module, away, batch.num_samples)
        return checks.is_first

    def _check_first(self, checks: RunChecks, batch: CutBatch, trial: Trial) -> None:
        if not checks.is_first:
            rank_zero_info(
                f"the {checks.which} batch is checked before its step: it runs whole and in "
                "micro-batches, one after the other, so this step takes longer than others"
            )
        check = FirstBatchCheck(trial, self._options.loss_weighting, checks)
        check.run(batch, self._options.batches.check)

    def begin_microbatches(self) -> bool:
        """Note that the micro-batches of the batch run next.

        Returns:
            Whether their losses are compared with the losses alone.
        """
        self._own_attributes.begin_step()
        return self._interleaving.alone is not None

    def part(self, microbatch: int) -> AbstractContextManager[None]:
        """Inside, a part of a micro-batch runs, up to its next hand-over."""
        own = self._own_attributes.part(microbatch)
        return own if self._changes is None else _both(self._changes.part(), own)

    def note_changes(self) -> None:
        """Look at the changes by the code between two hand-overs."""
        if self._changes is not None:
            self._changes.note()

    def end_batch(
        self, log: StepLog, results: Sequence[Any], gradients: Callable[[], Collection[Hashable]]
    ) -> None:
        """Warn of the micro-batches' changes, note their kinds, and keep an unchecked batch with
        something new."""
        self._own_attributes.end_step()
        (kept, self._kept), (kinds, self._kinds) = (self._kept, None), (self._kinds, None)
        checks = self._checks
        if checks is None:
            return
        if self._interleaving.alone is not None:
            self._interleaving.compare(checks, results)
        if self._changes is not None:
            new = [name for name in self._changes.repeated if checks.is_new("changed", name)]
            warn_of_changes(new)
            by_backwards = self._changes.of_backwards
            warn_of_backwards([n for n in sorted(by_backwards) if checks.is_new("backward", n)])
            self._changes = None
        if checks.are_over:
            return
        keys = {key for result in results if isinstance(result, Mapping) for key in result}
        found = {
            *(() if kinds is None else kinds.names()),
            *(("log", name) for name in log.names),
            *(("result", key) for key in keys),
            *(("gradient", n) for n in gradients()),
        }
        has_new = checks.schedule.end_batch(found)
        if has_new and kept is not None and checks.kept is None:
            checks.kept = KeptBatch(checks.schedule.number, found, kept)


@dataclass(frozen=True)
class TwinCheck:
    """Compares layers on workers with the layers here before the first step of a run, and before
    the first step of replacement workers: it runs micro-batches, and `Twins` compares.

    Args:
        trial: Runs them in a step begun before.
    """

    trial: Trial

    def wanted(self, num_microbatches: int) -> list[int]:
        """The micro-batches for the comparison of workers not yet compared."""
        deployment, every = self.trial.deployment, range(num_microbatches)
        hosted = deployment.hosted
        stays = [index for index in every if hosted is not None and hosted.stays(index)]
        return deployment.hand_overs.twins.wanted(num_microbatches, stays)

    def run(self, wanted: Sequence[int], batch: CutBatch | CutWindow, *, is_first: bool) -> None:
        """Run micro-batches; everything is as before then.

        Args:
            wanted: Their numbers.
            batch: The batch as it is cut, or the window.
            is_first: Whether this is the first batch or the first check of the run.

        Raises:
            ModelError: If a layer computes something else on its worker; see `Twins.settle`.
            WorkerError: If a worker fails.
        """
        if not wanted:
            return
        try:
            with self.trial.no_trace() as runs:
                for index in wanted:
                    with runs.one():
                        self.trial.run_alone(index, batch.microbatches[index], _RUN_NUMBER)
        except WorkerError:
            raise  # a layer that changes itself in its first forward alone is refused only now
        except Exception as error:
            # The step itself fails in the same way, unless a trial needs more than it.
            self.trial.recover()
            rank_zero_info(
                "whether layers on workers compute what they compute here was not checked. "
                f"{type(error).__name__}: {error}"
            )
        self.trial.deployment.hand_overs.twins.settle(is_first)


@contextmanager
def _both(
    first: AbstractContextManager[None], second: AbstractContextManager[None]
) -> Iterator[None]:
    with first, second:
        yield
