"""One run of a Trainer over stages: it exists while layers of the module are on workers.

A run leaves its plan, a drawing of its topology, and notes on how it ran beside the logs.
"""

from __future__ import annotations

import copy
import logging
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from itertools import chain
from pathlib import PurePath
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from msgspec import json, structs
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from .._lightning import (
    CSVLogger,
    LightningOptimizer,
    ProgressBar,
    TensorBoardLogger,
    TrainerFn,
    get_filesystem,
    pl,
)
from ..coordinator.deployment import Deployment
from ..coordinator.lost_workers import Loss
from ..coordinator.optimizers import remote_optimizers
from ..coordinator.progress import TrainingFigures
from ..devices.description import equipment_here
from ..errors import HeteroError, PictureError, PlanError, WeightsLost
from ..model.layers import DecoderLayer
from ..model.override import stand_in
from ..model.tensors import ends_of, named_tensors, stored_bytes, stored_in_four_bits
from ..pipeline.microbatch import CutBatch
from ..pipeline.turns import TurnThreads
from ..plan import COORDINATOR, Plan
from ..planner.drift import StageSeconds
from ..planner.feasibility import as_measured
from ..planner.profile import EMBEDDING, HEAD, Profile
from ..profiler.cache import Measured
from ..protocol.messages import Equipment
from ..report.diagram import picture_for
from ..report.run_record import FACTS, PICTURE_NAME, PLAN_NAME, LostWorker, Process, RunFacts
from ..report.topology import DrawnPlace, Memory, Topology, marks_of, topology_of, with_profile
from .arguments import StepOptions, check_precision, most_accumulated
from .audit import Audit, DeploymentAudit
from .check_schedule import RunChecks
from .first_batch import FirstBatchCheck
from .optimizers import FollowedZeroGrad, RemoteSteps, record_own_steps
from .replan import Horizon, Watch, settle, steps_left
from .training_step import BatchReader, BatchStep, MicrobatchedStep, RefusesGradients
from .window_step import WindowStep
from .window_warning import WindowWarning


class Run:
    """A run over stages: an evaluation, or a training that has no optimizers yet.

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
        """Bring everything home and disconnect; returns what was lost.

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


class TrainingRun(Run):
    """A training over stages, with its optimizers.

    Args:
        module: The LightningModule, attached to its Trainer.
        deployment: Where its layers are.
        options: How batches are cut.
        optimizers: All of them.
        measured: What was measured before the run.
        moves: Whether layers move when that shortens the step.

    Attributes:
        is_inside_window: Whether there are gradients that the next optimizer step will use.
    """

    is_inside_window = False

    def __init__(
        self,
        module: pl.LightningModule,
        deployment: Deployment,
        options: StepOptions,
        optimizers: Sequence[Optimizer],
        measured: Measured | None,
        moves: bool,
    ) -> None:
        super().__init__(module, deployment, options)
        # The checks belong to the run, not to each deployment.
        self._checks = RunChecks() if options.batches.check != "off" else None
        self._audit = None if options.batches.check == "off" else Audit(options.batches.check)
        self._threads = TurnThreads()
        self._remote_steps, self._step = self._attached(deployment, optimizers)
        accumulated = most_accumulated(module.trainer) if options.cuts_step(module) else 1
        horizon = Horizon(accumulated, partial(steps_left, module.trainer))
        self._watch = Watch(deployment, measured, self._step.recorder, moves, horizon)
        self._window_warning = WindowWarning(
            module.trainer, deployment.plan, options, self._watch.profile
        )
        self._put_back = let_callbacks_be_copied(module.trainer)
        self._hosted_hooks = ExitStack()
        self._follow_hosted(optimizers)
        recorder = deployment.coordinator.telemetry.recorder
        self._put_back.callback(
            record_own_steps(
                optimizers, lambda each: self._remote_steps.remote_of(each) is None, recorder
            ).close
        )
        stages = deployment.coordinator.stages
        figures = TrainingFigures(
            module.trainer, lambda: stages.num_tokens, lambda: self._watch.bottleneck
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
            self._put_back.callback(stand_in(stages, "on_backward", self._begin_backward_by_hand))

    @property
    def profile(self) -> Profile | None:
        """The measured times of the deployment; None if they are not known."""
        return self._watch.profile

    @property
    def present_seconds(self) -> dict[str, StageSeconds]:
        """The seconds of each process in the latest steps; empty while these are too few."""
        return self._watch.present_seconds

    @property
    def keeps_own_layers(self) -> bool:
        """Whether the time of this process's own layers is not known, so that they stay here."""
        return self._step.recorder is None

    @contextmanager
    def planning_with(self, profile: Profile | None) -> Iterator[None]:
        """Inside, layers move to a plan that was made with this profile, which stays then."""
        before, self._watch.profile = self._watch.profile, profile
        try:
            yield
        except BaseException:
            self._watch.profile = before
            raise

    def training_step(self, step: Callable[[], Any], args: Sequence[Any]) -> Any:
        """Run the training step of a batch.

        Args:
            step: Lightning's call of the user's method with these arguments.
            args: The arguments, the batch first.
        """
        self.deployment.check_placed()
        self.is_inside_window = True
        if self._audit is not None:
            self._audit.begin_batch(self.deployment, self._remote_steps.optimizers)
        self._window_warning.note_batch(*args)
        if self._step.accumulates:
            self._remote_steps.follow_dropped()
        result = self._step.run(step, args)
        if result is None:
            # No backward follows, and gradients of the batches before were added up for the step.
            self._remote_steps.note_gradients()
        return result

    def _begin_backward_by_hand(self) -> None:
        self._remote_steps.begin_backward(None)

    def _begin_backward(self, backward: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Run the backward of a precision plugin: until then hooks may drop gradients of before."""
        self._remote_steps.begin_backward(self._step.accumulates)
        backward(*args, **kwargs)
        if not self._step.has_left:
            self._remote_steps.note_gradients()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Inside, Lightning runs a backward."""
        recorder = self.deployment.coordinator.telemetry.recorder
        # The backwards of a cut step have run in its micro-batches.
        if self._options.cuts_step(self._module):
            with RefusesGradients():
                yield
        else:
            with recorder.span("backward"), self.deployment.draws.of_latest():
                yield

    def follow_wrappers(self, wrappers: Iterable[LightningOptimizer]) -> None:
        """Follow what user code calls on Lightning's wrappers of the optimizers."""
        if self._followed is not None:
            self._followed.follow_wrappers(wrappers)

    def follow_dropped(self) -> None:
        """Drop gradients on the workers that were dropped here."""
        self._remote_steps.follow_dropped()

    def note_clipping(self) -> None:
        """Note that all gradients, here and on the workers, were clipped."""
        self._remote_steps.note_gradients()

    def note_optimizer_step(self) -> None:
        """Note that an optimizer has stepped."""
        self.is_inside_window = False
        self._watch.note_own()

    def next_plan(self) -> Plan | None:
        """The plan under which the next step is to run; None for the present one."""
        return None if self.is_inside_window else self._watch.next_plan()

    @override
    def end(self, remedy: str) -> WeightsLost | None:
        with suppress(HeteroError):  # what is lost is told as the weights come home
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
        """Train on where another plan has the layers.

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
        # What leaves with a layer is here until its worker has it.
        here = [(optimizer, dict(optimizer.state)) for optimizer in optimizers]
        try:
            attached = self._attached(self.deployment, optimizers)
        except BaseException:
            for optimizer, present in here:
                optimizer.state.update(present)
            raise
        self._remote_steps, self._step = attached
        self._watch = self._watch.after_move(self.deployment, self._step.recorder)
        for optimizer in optimizers:
            settle(optimizer)
        self._follow_hosted(optimizers)

    def _follow_hosted(self, optimizers: Sequence[Optimizer]) -> None:
        """Note the steps of layers of which this process is a replica, and of no former ones."""
        self._hosted_hooks.close()
        if self.deployment.hosted is not None:
            self._hosted_hooks = self.deployment.hosted.attach(optimizers)

    def share(self, plan: Plan) -> None:
        """Let replicas take other shares; the plan differs in nothing else."""
        self.deployment.share(plan)
        self._watch = self._watch.after_move(self.deployment, self._step.recorder)

    def _attached(
        self, deployment: Deployment, optimizers: Sequence[Optimizer]
    ) -> tuple[RemoteSteps, BatchStep]:
        """The optimizers' parts on the stages, and the training step that uses them."""
        plugin, names_of = self._module.trainer.precision_plugin, deployment.tensors.names_of
        training = deployment.coordinator.training
        remote = remote_optimizers(optimizers, training, deployment.stepped_away)
        for each in remote:
            check_precision(plugin, each.optimizer)
        zero, restore, kept = (
            training.zero_gradients,
            training.restore_zeros,
            deployment.kept_here,
        )
        watch = None if self._audit is None else DeploymentAudit(self._audit, deployment)
        remote_steps = RemoteSteps(plugin, remote, names_of, zero, restore, kept, optimizers, watch)
        module, options = self._module, self._options
        if not options.cuts_step(module):
            return remote_steps, WindowStep(module, deployment, options)
        check = partial(self._check_batch, deployment)
        return remote_steps, MicrobatchedStep(
            module, deployment, options, self._checks, check, self._threads
        )

    def _check_batch(
        self,
        deployment: Deployment,
        checks: RunChecks,
        batch: CutBatch,
        rest: Sequence[Any],
        begin_again: Callable[[], None],
    ) -> None:
        if not checks.is_first:
            rank_zero_info(
                f"the {checks.which} batch is checked before its step: it runs whole and in "
                "micro-batches, one after the other, so this step takes longer than others"
            )
        weighting, mode = self._options.loss_weighting, self._options.batches.check
        check = FirstBatchCheck(self._module, deployment, weighting, rest, begin_again, checks)
        check.run(batch, mode)


def let_callbacks_be_copied(trainer: pl.Trainer) -> ExitStack:
    """Allow ``copy.deepcopy(trainer.callbacks)`` until the returned stack is closed.

    A callback holds what Lightning gave it: the module's ``log``, a progress bar its Trainer.
    Neither can be copied while layers are on workers, so copies of callbacks share them.
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
    """A method that the copies of its holder share."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> _SharedMethod:
        return self


def _copied_bar(trainer: pl.Trainer, bar: ProgressBar, memo: dict[int, Any]) -> ProgressBar:
    """A copy of a progress bar; it belongs to the same Trainer."""
    made: ProgressBar = type(bar).__new__(type(bar))
    memo[id(bar)] = made
    memo.setdefault(id(trainer), trainer)
    # Bars leave out of copies what cannot be copied, such as their consoles.
    state: Any = bar.__reduce_ex__(4)[2]
    kept = {name: value for name, value in state.items() if name != "__deepcopy__"}
    vars(made).update(copy.deepcopy(kept, memo))
    return made


logger = logging.getLogger(__name__)


@rank_zero_only
def leave_pictures(
    trainer: pl.Trainer, deployment: Deployment | None, profile: Profile | None
) -> None:
    """Write the topology and the plan of a training run beside its logs; errors are logged."""
    folder = run_folder(trainer)
    if folder is None or deployment is None or trainer.state.fn != TrainerFn.FITTING:
        return
    try:
        _write(folder, deployment, topology_here(trainer.lightning_module, deployment, profile))
    except (HeteroError, OSError, ValueError) as error:
        logger.warning("The topology of this run is not drawn: %s", error)


class RunNotes:
    """The file beside the logs that says when and where a training run ran, and how it ended.

    Args:
        folder: The folder of the run's logs.
        facts: What is known when the run begins.
    """

    def __init__(self, folder: str, facts: RunFacts) -> None:
        self._folder = folder
        self._facts = facts
        self._write()

    @classmethod
    def begin(cls, trainer: pl.Trainer, deployment: Deployment) -> RunNotes | None:
        """Note that a run begins; None if it is no training, or keeps no logs."""
        folder = run_folder(trainer)
        if folder is None or trainer.state.fn != TrainerFn.FITTING or not trainer.is_global_zero:
            return None
        module, connections = trainer.lightning_module, deployment.coordinator.connections
        here = {COORDINATOR: equipment_here(module.device)}

        def processes() -> dict[str, Process]:
            return {
                name: Process(name, each.host, each.device_name, each.versions)
                for name, each in (here | connections.worker_equipment).items()
            }

        notes = cls(folder, RunFacts(_title(module), _now(), [*processes().values()]))
        if (replacements := deployment.coordinator.replacements) is not None:
            replacements.on_change = lambda: notes.note_losses(replacements.losses, processes())
        return notes

    def note_losses(self, losses: Iterable[Loss], present: Mapping[str, Process]) -> None:
        """Note the workers that the run has lost so far, and the present process of each name."""
        lost = [_lost_worker(each) for each in losses]
        processes = [present.get(each.name, each) for each in self._facts.processes]
        self._facts = structs.replace(self._facts, losses=lost, processes=processes)
        self._write()

    def note_error(self, error: BaseException) -> None:
        """Note the error that ends the run; of several, the first one."""
        if not self._facts.error:
            said = str(error)
            kind = type(error).__name__
            self._facts = structs.replace(self._facts, error=f"{kind}: {said}" if said else kind)
            self._write()

    def end(self) -> None:
        """Note that the run has ended."""
        self._facts = structs.replace(self._facts, ended_at=_now())
        self._write()

    def _write(self) -> None:
        """Write the file; a full disk or a lost folder is no reason to end a run."""
        try:
            files = get_filesystem(self._folder)
            files.makedirs(self._folder, exist_ok=True)
            files.pipe_file(os.path.join(self._folder, FACTS), json.encode(self._facts))
        except (OSError, ValueError) as error:
            logger.warning("%s is not written: %s", os.path.join(self._folder, FACTS), error)


def _lost_worker(loss: Loss) -> LostWorker:
    came, restored = loss.served_seconds, loss.restored_seconds
    end = loss.end_seconds if loss.has_caught_up else None
    return LostWorker(
        loss.worker.name,
        loss.step,
        loss.reason,
        None if came is None else came - loss.began_seconds,
        None if came is None or restored is None else restored - came,
        None if restored is None or end is None else end - restored,
        "" if restored is None else loss.repeated,
        loss.place,
        loss.served_by,
    )


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def run_folder(trainer: pl.Trainer) -> str | None:
    """The folder that holds the logs of this run alone; None if it keeps none."""
    if trainer.fast_dev_run or not trainer.loggers:  # type: ignore[attr-defined]
        return None
    first = trainer.loggers[0]
    if isinstance(first, (CSVLogger, TensorBoardLogger)):
        return trainer.log_dir
    if first.save_dir is None or first.name is None:
        return None
    # Several runs share the logger's folder; this is where Lightning puts a run's checkpoints.
    version = first.version if isinstance(first.version, str) else f"version_{first.version}"
    return os.path.join(first.save_dir, str(first.name), version)


def topology_here(
    module: pl.LightningModule, deployment: Deployment, profile: Profile | None
) -> Topology:
    """The topology of a deployment; a profile adds its measured times."""
    plan = deployment.plan
    bare = topology_of(plan, title=_title(module))
    connections = deployment.coordinator.connections
    equipment = connections.worker_equipment
    placed = {place.name for place in bare.workers}
    numbers = {member.name: member.number for member in connections.members}
    idle = [DrawnPlace(name, numbers[name]) for name in equipment if name not in placed]
    found = replace(
        bare,
        coordinator=_coordinator(bare.coordinator, module, deployment.layers),
        workers=[
            _worker(replace(place, number=numbers[place.name]), equipment[place.name], deployment)
            for place in [*bare.workers, *idle]
        ],
        frozen_ends=_frozen_ends(module, deployment.layers),
    )
    if profile is None:
        return found
    try:
        return with_profile(found, as_measured(plan, profile), profile)
    except HeteroError:
        logger.debug("the profile is of another plan", exc_info=True)
        return found


def _write(folder: str, deployment: Deployment, topology: Topology) -> None:
    """Write every picture that can be drawn here, and the plan."""
    files = get_filesystem(folder)
    files.makedirs(folder, exist_ok=True)
    for name in (f"{PICTURE_NAME}{suffix}" for suffix in (".svg", ".mmd", ".png")):
        try:
            content = picture_for(name, topology)
        except PictureError as error:
            logger.info("%s is skipped: %s", name, error)
            continue
        files.pipe_file(os.path.join(folder, name), content)
    path = os.path.join(folder, PLAN_NAME)
    if not _is_there(path, deployment.plan):
        files.pipe_file(path, deployment.plan.as_yaml().encode())


def _is_there(path: str, plan: Plan) -> bool:
    """Whether a file has the plan already; it may have a person's comments."""
    try:
        return Plan.from_yaml(path) == plan
    except PlanError:
        return False


def _title(module: nn.Module) -> str:
    """The name of the Hugging Face model in it, or its own class."""
    for each in module.modules():
        config = getattr(each, "config", None)
        if config is not None and hasattr(config, "_name_or_path"):
            return PurePath(str(config._name_or_path)).name or type(each).__name__
    return type(module).__name__


def _coordinator(
    place: DrawnPlace, module: pl.LightningModule, layers: Sequence[DecoderLayer]
) -> DrawnPlace:
    tensors = chain(module.parameters(), module.buffers())
    own = {id(tensor): tensor for tensor in tensors if not tensor.is_meta}
    weights = sum(tensor.nbytes for tensor in own.values())
    held = [
        {number: layers[number].module for number in range(*each.layers)} for each in place.ranges
    ]
    here = replace(place, host=platform.node())
    return _equipped(here, equipment_here(module.device), weights, held)


def _worker(place: DrawnPlace, equipment: Equipment, deployment: Deployment) -> DrawnPlace:
    stages = [stage for stage in deployment.plan.remote_stages if place.name in stage.workers]
    layers = [deployment.modules_of(stage) for stage in stages]
    weights = sum(
        stored_bytes(held, deployment.weights_dtype_of(stage))
        for stage, held in zip(stages, layers, strict=True)
    )
    there = replace(place, host=equipment.host or (platform.node() if place.host else ""))
    return _equipped(there, equipment, weights, layers)


def _equipped(
    place: DrawnPlace,
    equipment: Equipment,
    weights_bytes: int,
    layers: Sequence[dict[int, nn.Module]],
) -> DrawnPlace:
    """The place on its device.

    Args:
        layers: The layers of each of the place's ranges.
    """
    return replace(
        place,
        device=equipment.device_name,
        identity=equipment.machine,
        memory=Memory(equipment.memory_bytes, {"weights": weights_bytes}),
        marks=(*marks_of(place.ranges, [_marks_of(held) for held in layers]), *place.marks),
    )


def _marks_of(layers: dict[int, nn.Module]) -> list[str]:
    tensors = list(named_tensors(layers))
    marks = ["4-bit"] if any(stored_in_four_bits(layers, name) for name, _ in tensors) else []
    if _are_frozen([tensor for _, tensor in tensors]):
        marks.append("frozen")
    return marks


def _frozen_ends(module: nn.Module, layers: Sequence[DecoderLayer]) -> frozenset[str]:
    before, behind = ends_of(module, layers)
    # A head tied to the embedding has no tensors of its own.
    ends = {EMBEDDING: before, HEAD: behind or before}
    return frozenset(name for name, tensors in ends.items() if _are_frozen(tensors))


def _are_frozen(tensors: Sequence[Tensor]) -> bool:
    return bool(tensors) and not any(tensor.requires_grad for tensor in tensors)
