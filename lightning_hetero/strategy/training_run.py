"""One run of a Trainer over stages: it exists while layers of the module are on workers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Protocol

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from .._lightning import (
    LightningOptimizer,
    MisconfigurationException,
    ProgressBar,
    pl,
)
from ..coordinator.deployment import Deployment
from ..coordinator.optimizers import RemoteOptimizer, remote_optimizers
from ..coordinator.progress import TrainingFigures
from ..errors import HeteroError, ModelError, PlanError, WeightsLost
from ..model.override import stand_in
from ..pipeline.optimizer import state_beside
from ..pipeline.recorder import Recorder
from ..pipeline.turns import TurnThreads
from ..plan import Plan
from .arguments import StepOptions, check_precision
from .optimizers import FollowedZeroGrad, RemoteSteps, StepWatch, record_own_steps
from .training_step import BatchReader, BatchStep, MicrobatchedStep, RefusesGradients, StepGuard
from .window_step import WindowStep


class Run:
    """A run over stages: an evaluation, or a training before it has optimizers.

    Args:
        module: The LightningModule, attached to its Trainer.
        deployment: Where its layers are.
        options: How batches are cut.

    Attributes:
        deployment: Where the layers are now.
    """

    def __init__(
        self, module: pl.LightningModule, deployment: Deployment, options: StepOptions
    ) -> None:
        self.deployment = deployment
        self._module = module
        self._options = options
        self._reader = BatchReader(module.trainer, options.batches.dim)

    def evaluation_step(self, step: Callable[[], Any], args: Sequence[Any]) -> Any:
        """Run a validation, test or prediction step of a batch.

        Args:
            step: Lightning's call of the user's method with these arguments.
            args: The arguments, the batch first.

        Raises:
            ModelError: If the batch has not gone through all layers.
        """
        batch, *rest = args
        with self.deployment.hand_overs.batch_of(self._reader.count(batch, rest)):
            result = step()
        self.deployment.check_forward_finished()
        return result

    def end(self, remedy: str) -> WeightsLost | None:
        """Bring everything home and disconnect; returns the `WeightsLost`, if something is lost.

        Args:
            remedy: How to continue if something is lost.
        """
        try:
            self._bring_back(remedy)
        except WeightsLost as loss:
            return loss
        finally:
            self.deployment.close()
        return None

    def _bring_back(self, remedy: str) -> None:
        self.deployment.bring_back(remedy)


class PlanFollower(Protocol):
    """Looks after the plan of one training, from step to step.

    Attributes:
        profile: The measurements of the devices, if there are any.
        bottleneck: The slowest stage, in words; empty while it is not known.
    """

    @property
    def profile(self) -> Any: ...

    @property
    def bottleneck(self) -> str: ...

    def note_batch(self, count: Callable[[], int | None]) -> None:
        """Look at a batch before its step; ``count`` returns its number of samples, if it is
        known."""

    def note_step(self) -> None:
        """Note that an optimizer has stepped."""

    def after_move(self) -> None:
        """Note a move of layers, or other shares of replicas."""

    def between_steps(self) -> None:
        """Move layers, and let workers join and leave, if it is worth it."""


class Guard(Protocol):
    """Looks for silent errors in a training, over all its deployments."""

    def begin_batch(self, optimizers: Sequence[RemoteOptimizer]) -> None:
        """Count a batch before its step."""

    def watch(self, deployment: Deployment) -> StepWatch | None:
        """The watch over the steps of a deployment's optimizers from now on, if there is one."""

    def of_steps(self, deployment: Deployment) -> StepGuard:
        """The watch over the training steps of a deployment."""


class TrainingRun(Run):
    """A training over stages, with its optimizers.

    Args:
        module: The LightningModule, attached to its Trainer.
        deployment: Where its layers are.
        options: How batches are cut.
        optimizers: All of them.
        guard: Looks at all batches of the run, over all its deployments.
        follow: Makes the plan's follower.

    Attributes:
        plans: The plan's follower.
        is_inside_window: Whether there are gradients for the next optimizer step.
    """

    is_inside_window = False

    def __init__(
        self,
        module: pl.LightningModule,
        deployment: Deployment,
        options: StepOptions,
        optimizers: Sequence[Optimizer],
        guard: Guard,
        follow: Callable[[TrainingRun], PlanFollower],
    ) -> None:
        super().__init__(module, deployment, options)
        self._guard = guard
        self._threads = TurnThreads()
        self._remote_steps, self._step = self._attached(deployment, optimizers)
        self.plans = follow(self)
        self._put_back = let_callbacks_be_copied(module.trainer)
        self._hosted_hooks = ExitStack()
        self._follow_hosted(optimizers)
        recorder = deployment.coordinator.recorder
        self._put_back.callback(
            record_own_steps(
                optimizers, lambda each: self._remote_steps.remote_of(each) is None, recorder
            ).close
        )
        stages = deployment.coordinator.stages
        figures = TrainingFigures(
            module.trainer, lambda: stages.num_tokens, lambda: self.plans.bottleneck
        )
        self._put_back.callback(figures.detach)
        # Under automatic optimization, Lightning's rule says when gradients become zero.
        self._followed: FollowedZeroGrad | None = None
        plugin: Any = module.trainer.precision_plugin
        if module.automatic_optimization:
            begin = partial(self._begin_backward, plugin.backward)
            self._put_back.callback(stand_in(plugin, "backward", begin))
        else:
            self._followed = FollowedZeroGrad(module, deployment, self._remote_steps)
            self._put_back.callback(self._followed.detach)
            # The user may call `loss.backward()` without Lightning.
            by_hand = stages.calling_before_backwards(self._begin_backward_by_hand)
            self._put_back.enter_context(by_hand)

    @property
    def recorder(self) -> Recorder | None:
        """Sums up this process's own work; None if work and waiting look the same."""
        return self._step.recorder

    def training_step(self, step: Callable[[], Any], args: Sequence[Any]) -> Any:
        """Run the training step of a batch.

        Args:
            step: Lightning's call of the user's method with these arguments.
            args: The arguments, the batch first.
        """
        self.deployment.check_placed()
        self.is_inside_window = True
        self._guard.begin_batch(self._remote_steps.optimizers)
        self.plans.note_batch(partial(self._reader.count, args[0], args[1:]))
        if self._step.accumulates:
            self._remote_steps.follow_dropped()
        result = self._step.run(step, args)
        if result is None:
            # A backward does not follow, and gradients of the batches before were added up for the
            # step.
            self._remote_steps.note_gradients()
        return result

    def _begin_backward_by_hand(self) -> None:
        self._step.check_backward()
        self._remote_steps.begin_backward(None)

    def _begin_backward(self, backward: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Run the backward of a precision plugin: until then hooks may drop gradients of before."""
        self._step.check_backward()
        self._remote_steps.begin_backward(self._step.accumulates)
        backward(*args, **kwargs)
        if not self._step.has_left:
            self._remote_steps.note_gradients()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Inside, Lightning runs a backward."""
        recorder = self.deployment.coordinator.recorder
        # The backwards of a cut step have run in its micro-batches.
        if self._options.cuts_step(self._module):
            with RefusesGradients():
                yield
        else:
            with recorder.span("backward"), self.deployment.draws.of_latest():
                yield

    def follow_wrappers(self, wrappers: Iterable[LightningOptimizer]) -> None:
        """Follow the user code's calls on Lightning's wrappers of the optimizers."""
        if self._followed is not None:
            self._followed.follow_wrappers(wrappers)

    def follow_dropped(self) -> None:
        """Drop gradients on the workers if they were dropped here."""
        self._remote_steps.follow_dropped()

    def note_clipping(self) -> None:
        """Note a clipping of all gradients, here and on the workers."""
        self._remote_steps.note_gradients()

    def note_optimizer_step(self) -> None:
        """Note that an optimizer has stepped."""
        self.is_inside_window = False
        self.plans.note_step()

    @override
    def end(self, remedy: str) -> WeightsLost | None:
        with suppress(HeteroError):  # a loss is reported as the weights come home
            self._step.finish()
        self._threads.close()
        self._hosted_hooks.close()
        self._put_back.close()
        try:
            return super().end(remedy)
        finally:
            self._remote_steps.detach()

    @override
    def _bring_back(self, remedy: str) -> None:
        super()._bring_back(remedy)
        try:
            for optimizer in self._remote_steps.optimizers:
                optimizer.bring_back()
        except HeteroError as error:
            raise WeightsLost(
                "The weights have come home from the workers, and the optimizer state has not, so "
                f"no whole checkpoint can be made. {error} To train on, {remedy}.",
                are_weights_whole=True,
            ) from error

    def move(
        self, plan: Plan, optimizers: Sequence[Optimizer], carry_out: Callable[[], Deployment]
    ) -> None:
        """Train on with the layers in another plan's places.

        Args:
            plan: The plan.
            optimizers: All of them.
            carry_out: Moves the layers. If it raises, the present deployment is still there.

        Raises:
            WorkerError: If a worker fails.
            ModelError: If only some of the layers have made the latest step.
        """
        remote_optimizers = self._remote_steps.optimizers
        home = self.deployment.coming_home(plan) | self.deployment.given
        states = [remote.remote_state(home) for remote in remote_optimizers]
        self.deployment = carry_out()
        self._remote_steps.detach()
        for remote, state in zip(remote_optimizers, states, strict=True):
            remote.take_back(state)
        # A leaving layer's state is here until its worker has it.
        here = [(optimizer, dict(optimizer.state)) for optimizer in optimizers]
        try:
            attached = self._attached(self.deployment, optimizers)
        except BaseException:
            for optimizer, present in here:
                optimizer.state.update(present)
            raise
        self._remote_steps, self._step = attached
        self.plans.after_move()
        for optimizer in optimizers:
            settle(optimizer)
        self._follow_hosted(optimizers)

    def _follow_hosted(self, optimizers: Sequence[Optimizer]) -> None:
        """Note the steps of the layers with a replica here now, and stop for former ones."""
        self._hosted_hooks.close()
        if self.deployment.hosted is not None:
            self._hosted_hooks = self.deployment.hosted.attach(optimizers)

    def share(self, plan: Plan) -> None:
        """Let replicas take other shares; the plan differs only in them."""
        self.deployment.share(plan)
        self.plans.after_move()

    def _attached(
        self, deployment: Deployment, optimizers: Sequence[Optimizer]
    ) -> tuple[RemoteSteps, BatchStep]:
        """The optimizers' parts on the stages, and the training step that uses them."""
        plugin, names_of = self._module.trainer.precision_plugin, deployment.tensors.names_of
        training = deployment.coordinator.optimizers
        remote = remote_optimizers(optimizers, training, deployment.stepped_away)
        for each in remote:
            check_precision(plugin, each.optimizer)
        zero, restore, kept = (
            training.zero_gradients,
            training.restore_zeros,
            deployment.kept_here,
        )
        watch = self._guard.watch(deployment)
        remote_steps = RemoteSteps(plugin, remote, names_of, zero, restore, kept, optimizers, watch)
        module, options = self._module, self._options
        if not options.cuts_step(module):
            return remote_steps, WindowStep(module, deployment, options)
        guard = self._guard.of_steps(deployment)
        return remote_steps, MicrobatchedStep(module, deployment, options, guard, self._threads)


_training = threading.RLock()
"""Held by the training thread. A callback may train another module on the same thread."""


@contextmanager
def the_only_training() -> Iterator[None]:
    """Inside, only this thread of the process trains over workers.

    A step replaces methods of torch's classes for a moment, and seeds torch's random generator.

    Raises:
        ModelError: If another thread trains.
    """
    if not _training.acquire(blocking=False):
        raise ModelError(
            "Another thread of this process trains over workers. Two trainings would change the "
            "same methods and random numbers of torch. Train one after the other, or start a "
            "process for each training."
        )
    try:
        yield
    finally:
        _training.release()


def let_callbacks_be_copied(trainer: pl.Trainer) -> ExitStack:
    """Allow ``copy.deepcopy(trainer.callbacks)`` until the returned stack is closed.

    A callback holds parts of Lightning: the module's ``log``, a progress bar its Trainer. Neither
    can be copied while layers are on workers, so copies of callbacks share them.
    """
    put_back = ExitStack()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for name in ("log", "log_dict"):
            given = vars(callback).get(name)
            if getattr(given, "__self__", None) is trainer.lightning_module:
                put_back.callback(stand_in(callback, name, _SharedMethod(given)))
        if isinstance(callback, ProgressBar):
            put_back.callback(
                stand_in(callback, "__deepcopy__", partial(_copied_bar, trainer, callback))
            )
    return put_back


class _SharedMethod(partial[Any]):
    """A method shared by the copies of its holder."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> _SharedMethod:
        return self


def _copied_bar(trainer: pl.Trainer, bar: ProgressBar, memo: dict[int, Any]) -> ProgressBar:
    """A copy of a progress bar; it belongs to the same Trainer."""
    made: ProgressBar = type(bar).__new__(type(bar))
    memo[id(bar)] = made
    memo.setdefault(id(trainer), trainer)
    # Bars leave out of copies their parts that cannot be copied, such as consoles.
    state: Any = bar.__reduce_ex__(4)[2]
    kept = {name: value for name, value in state.items() if name != "__deepcopy__"}
    vars(made).update(copy.deepcopy(kept, memo))
    return made


_BY_HAND = (
    "Layers do not move under manual optimization (`replan`, `move_layers`), where only your code "
    "knows whether gradients are still needed; set `automatic_optimization = True`."
)


def check_move(
    module: pl.LightningModule, deployment: Deployment | None, plan: Plan, is_inside_window: bool
) -> None:
    """Refuse an impossible move, before anything changes.

    Raises:
        MisconfigurationException: Under manual optimization.
        PlanError: If the plan does not fit, or has workers outside of the run.
        ModelError: If layers cannot move now, or not at all.
    """
    if not module.automatic_optimization:
        raise MisconfigurationException(_BY_HAND)
    if deployment is None:
        raise ModelError("No layers are on workers, so there are none to move.")
    deployment.check_placed()
    connections = deployment.coordinator.connections
    names = [member.name for member in connections.members]
    freed = "was freed as the run began, since its first plan has no layer there"
    gone = {row.name: row.why for row in connections.roster.state.rows.values() if row.why}
    departed = {**dict.fromkeys(connections.spares, freed), **gone}
    for name in plan.workers:
        if name in departed and name not in names:
            raise PlanError(
                f"{name} {departed[name]}, so no layers move to it; make a plan over "
                f"the workers that the run has, {names}, or begin the next run with a plan that "
                "has a layer on it."
            )
    plan.check(len(deployment.layers), names)
    if not plan.workers:
        raise PlanError(
            "The plan has no worker; leave a layer with one, or end the run and start it again "
            "with this plan and `ckpt_path`."
        )
    if is_inside_window or not module.trainer.training:
        wait = "there are gradients that the next step needs"
        now = wait if is_inside_window else "the Trainer does not train"
        raise ModelError(
            f"Layers move between an optimizer step and the next training_step, and now {now}; do "
            "it in `on_train_batch_start` of a batch that begins an accumulation window."
        )
    deployment.check_can_move(plan)


def moves_layers(module: pl.LightningModule) -> bool:
    """Whether ``replan=True`` can move this module's layers; warns if it cannot."""
    if not module.automatic_optimization:
        rank_zero_warn(_BY_HAND)
    return bool(module.automatic_optimization)


def settle(optimizer: Optimizer) -> None:
    """Move the optimizer state in this process to the device of its parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                state = optimizer.state[parameter]
                optimizer.state[parameter] = state_beside(optimizer, parameter, state, group)
