"""One run of a Trainer over stages: it exists while layers of the module are on workers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer
from typing_extensions import override

from ..coordinator.deployment import Deployment
from ..coordinator.optimizer import remote_optimizers
from ..coordinator.progress import TrainingFigures
from ..errors import WeightsLost
from ..model.override import stand_in
from ..plan import Plan
from ..planner.profile import Profile
from .arguments import check_precision
from .optimizers import RemoteSteps
from .replan import Watch, bring_home, give_back
from .training_step import BatchReader, BatchStep, StepOptions, batch_step


class Run:
    """A run over stages: an evaluation, or a training that has no optimizers yet.

    Args:
        module: The LightningModule, attached to its Trainer.
        deployment: Where its layers are.
        options: How batches are cut.

    Attributes:
        deployment: Where the layers are now.
        is_inside_window: Whether there are gradients that the next optimizer step will use.
    """

    is_inside_window = False

    def __init__(
        self, module: pl.LightningModule, deployment: Deployment, options: StepOptions
    ) -> None:
        self.deployment = deployment
        self._module = module
        self._options = options
        self._reader = BatchReader(module.trainer, options.batches.dim)

    @property
    def profile(self) -> Profile | None:
        """The measured times of the deployment; None if they are not known."""
        return None

    def evaluation_step(
        self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a validation, test or prediction step of a batch.

        Raises:
            ModelError: If the batch has not gone through all layers.
        """
        batch, *rest = (*args, *kwargs.values())
        with self.deployment.hand_overs.batch_of(self._reader.count(batch, rest)):
            result = step(*args, **kwargs)
        self.deployment.check_forward_finished()
        return result

    def training_step(
        self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the training step of a batch."""
        return step(*args, **kwargs)

    def recording_backward(self) -> AbstractContextManager[None]:
        """Record the backward of a whole batch; a cut step records those of its micro-batches."""
        if self._options.cuts_step(self._module):
            return nullcontext()
        return self.deployment.coordinator.telemetry.recorder.span("backward")

    def follow_wrappers(self, wrappers: Iterable[LightningOptimizer]) -> None:
        """Follow what user code calls on Lightning's wrappers of the optimizers."""

    def note_backward(self) -> None:
        """Note that a backward has ended."""

    def note_clipping(self) -> None:
        """Note that all gradients, here and on the workers, were clipped."""

    def note_optimizer_step(self) -> None:
        """Note that an optimizer has stepped."""

    def next_plan(self) -> Plan | None:
        """The plan under which the next step is to run; None for the present one."""
        return None

    def end(self, remedy: str) -> WeightsLost | None:
        """Bring everything home and disconnect; returns what was lost.

        Args:
            remedy: How to continue if something is lost.
        """
        return give_back(self.deployment, None, remedy)


class TrainingRun(Run):
    """A training over stages, with its optimizers.

    Args:
        module: The LightningModule, attached to its Trainer.
        deployment: Where its layers are.
        options: How batches are cut.
        optimizers: All of them.
        profile: What was measured before the run.
        moves: Whether layers move when a stage's speed changes.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        deployment: Deployment,
        options: StepOptions,
        optimizers: Sequence[Optimizer],
        profile: Profile | None,
        moves: bool,
    ) -> None:
        super().__init__(module, deployment, options)
        self._remote_steps, self._step = _attached(module, deployment, options, optimizers)
        self._watch = Watch(deployment, profile, self._step.recorder, moves)
        self._put_back = let_callbacks_be_copied(module.trainer)
        stages = deployment.coordinator.stages
        self._figures = TrainingFigures(
            module.trainer, lambda: stages.num_tokens, lambda: self._watch.bottleneck
        )

    @property
    @override
    def profile(self) -> Profile | None:
        return self._watch.profile

    @override
    def training_step(
        self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        self.is_inside_window = True
        return self._step.run(step, args, kwargs)

    @override
    def follow_wrappers(self, wrappers: Iterable[LightningOptimizer]) -> None:
        self._step.follow_wrappers(wrappers)

    @override
    def note_backward(self) -> None:
        self._step.note_backward()

    @override
    def note_clipping(self) -> None:
        self._remote_steps.note_clipping()

    @override
    def note_optimizer_step(self) -> None:
        self.is_inside_window = False
        self._watch.note_own()

    @override
    def next_plan(self) -> Plan | None:
        return None if self.is_inside_window else self._watch.next_plan()

    @override
    def end(self, remedy: str) -> WeightsLost | None:
        self.release_trainer()
        self._step.detach()
        return give_back(self.deployment, self._remote_steps, remedy)

    def release_trainer(self) -> None:
        """Restore the Trainer's callbacks and its progress bar."""
        for put_back in reversed(self._put_back):
            put_back()
        self._put_back.clear()
        self._figures.detach()

    def bring_home(self) -> None:
        """Bring weights and optimizer state into this process; changes nothing if it raises.

        Raises:
            WorkerError: If a worker does not return what it has.
            ModelError: If only some of the layers have made the latest step.
        """
        bring_home(self.deployment, self._remote_steps)

    def redeploy(self, deployment: Deployment, optimizers: Sequence[Optimizer]) -> RemoteSteps:
        """Train on over another deployment; returns the optimizers' parts on its stages."""
        # The check of the first batch belongs to the run, not to each deployment.
        batches = replace(self._options.batches, check="off")
        options = replace(self._options, batches=batches)
        attached = _attached(self._module, deployment, options, optimizers)
        self.deployment = deployment
        self._remote_steps, self._step = attached
        self._watch = self._watch.after_move(deployment, self._step.recorder)
        return self._remote_steps


def _attached(
    module: pl.LightningModule,
    deployment: Deployment,
    options: StepOptions,
    optimizers: Sequence[Optimizer],
) -> tuple[RemoteSteps, BatchStep]:
    """The optimizers' parts on the stages, and the training step that uses them."""
    plugin, names_of = module.trainer.strategy.precision_plugin, deployment.tensors.names_of
    remote = remote_optimizers(optimizers, deployment.coordinator.optimizer, names_of)
    for each in remote:
        check_precision(plugin, each.optimizer)
    remote_steps = RemoteSteps(plugin, remote, names_of)
    return remote_steps, batch_step(module, deployment, options, remote_steps)


def let_callbacks_be_copied(trainer: pl.Trainer) -> list[Callable[[], None]]:
    """Allow ``copy.deepcopy(trainer.callbacks)`` until the returned functions are called.

    A callback holds what Lightning gave it: the module's ``log``, a progress bar its Trainer.
    Neither can be copied while layers are on workers, so copies of callbacks share them.
    """
    put_back = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for name in ("log", "log_dict"):
            given = vars(callback).get(name)
            if getattr(given, "__self__", None) is trainer.lightning_module:
                put_back.append(stand_in(callback, name, _Shared(given)))
        if isinstance(callback, ProgressBar):
            put_back.append(stand_in(callback, "__deepcopy__", _BarCopy(trainer, callback)))
    return put_back


class _Shared:
    """A method that the copies of its holder share."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)

    def __deepcopy__(self, _memo: dict[int, Any]) -> _Shared:
        return self


class _BarCopy:
    """Copies a progress bar; the copy belongs to the same Trainer."""

    def __init__(self, trainer: pl.Trainer, bar: ProgressBar) -> None:
        self._trainer, self._bar = trainer, bar

    def __call__(self, memo: dict[int, Any]) -> ProgressBar:
        made: ProgressBar = type(self._bar).__new__(type(self._bar))
        memo[id(self._bar)] = made
        memo.setdefault(id(self._trainer), self._trainer)
        # Bars leave out of copies what cannot be copied, such as their consoles.
        state: Any = self._bar.__reduce_ex__(4)[2]
        kept = {name: value for name, value in state.items() if value is not self}
        vars(made).update(copy.deepcopy(kept, memo))
        return made
