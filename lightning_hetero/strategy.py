"""HeteroPipelineStrategy: Lightning's hooks, each a few lines."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from .callbacks.profiler import ProfilingOptions
from .checks import (
    check_arguments,
    check_callbacks,
    check_not_compiled,
    check_precision,
    warn_of_batch_statistics,
    warn_of_idle_devices,
)
from .errors import HeteroError, ModelError
from .gradients import clip_by_global_norm, norms_by_name
from .manual import FollowedZeroGrad
from .model.four_bit import accepting_states, keep_layout
from .model.imports import refuse_training_in_worker
from .model.layers import DecoderLayer, LayerChoice, find_decoder_layers
from .model.pretrained import bring_here, weights_in_checkpoint
from .model.state_dicts import keys_of, leave_out
from .moving import AtHome, bring_home, check_move, give_back, moves_layers, moving_averages
from .picturing import leave_pictures
from .pipeline.averaging import AveragingAction
from .pipeline.microbatch import LossWeighting
from .plan import Plan, StagePlan
from .precision import RemoteSteps, scaler_of
from .profiling.choosing import PlanChoice
from .profiling.run import ProfilingRun
from .runtime.coordinator import Coordinator
from .runtime.deadlines import Deadlines
from .runtime.deployment import Deployment, imports_of
from .runtime.fleet import Fleet
from .runtime.remote_optimizer import remote_optimizers
from .saving import check_complete, checkpoint_io_or_ours, keeping_frozen
from .stepping import MicrobatchedStep
from .watching import Watch

logger = logging.getLogger(__name__)


class HeteroPipelineStrategy(SingleDeviceStrategy):
    """Trains one model on this process and on workers, each holding some of its decoder layers.

    Args:
        workers: That many local worker processes, started and stopped by the strategy; or a list
            of ``"host:port"`` of workers that are already listening.
        plan: Who holds which layers. ``"auto"`` measures the devices, or reads what was measured
            before, and takes the plan with the shortest predicted step; ``"even"`` gives everyone
            the same number; else the path of a YAML file, or a Plan. Local workers are called
            ``local-1``, ``local-2``, …; others are called by their ``"host:port"``.
        layers: Where the decoder layers are in the LightningModule: the dotted path of a
            ModuleList or of one layer, a list of paths, or a callable from the module to the
            layers. None finds them in a Hugging Face model. A model with none runs here alone.
            Layers of your own classes need workers that were started with ``--allow PACKAGE``;
            local workers allow what the layers need by themselves.
        micro_batches: Pieces of each training batch; None takes the plan's number.
        micro_batching: ``"step"`` runs ``training_step`` once per micro-batch, so that the head
            and the loss overlap with the workers. ``"boundary"`` runs it once for the whole batch
            and cuts only the hidden states, for losses that couple the samples of a batch.
        loss_weighting: How micro-batch losses combine: ``"samples"``, ``"labels"`` (those that
            are not -100), ``"auto"`` (labels where the batch has them), or a function from a
            micro-batch to its weight.
        checkpoint_weights: ``"all"``, or ``"trainable"`` to leave out of checkpoints what does not
            train, as the weights under adapters: they hold the parameters that require gradients
            and every persistent buffer. The module that loads one keeps its own frozen weights;
            without this strategy, by Lightning's ``strict_loading = False``. A model made by
            `from_pretrained` leaves out what is in its source either way.
        token_file: The file of the secret that this process shares with the workers of a list. None
            takes that of the environment variable ``LIGHTNING_HETERO_TOKEN_FILE`` (empty for
            none), or ``~/.config/lightning-hetero/token`` if it is there. Workers on other machines
            need one; local workers, which ``workers`` counts, neither need nor use it.
        replan: Whether layers move between neighbouring stages when a stage has become slower, or
            faster, for good. It is noticed and said either way. They move between two steps, when
            that is to save 5 % of the step, and 20 steps after the last move at the earliest. Where
            nothing was measured, the memory of the workers is not known. Under manual optimization
            layers stay.
        accelerator: As for every Lightning strategy.
        checkpoint_io: As for every Lightning strategy; None writes files without a copy in memory.
        precision_plugin: As for every Lightning strategy.
    """

    strategy_name = "hetero_pipeline"
    deadlines = Deadlines()

    def __init__(
        self,
        workers: int | list[str] = 2,
        plan: str | Path | Plan = "auto",
        layers: str | list[str] | Callable[[nn.Module], Any] | None = None,
        micro_batches: int | None = None,
        micro_batching: Literal["step", "boundary"] = "step",
        loss_weighting: LossWeighting = "auto",
        checkpoint_weights: Literal["all", "trainable"] = "all",
        replan: bool = False,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        token_file: str | Path | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin
        )
        check_arguments(
            workers=workers,
            plan=plan,
            layers=layers,
            micro_batches=micro_batches,
            micro_batching=micro_batching,
            loss_weighting=loss_weighting,
            checkpoint_weights=checkpoint_weights,
            replan=replan,
        )
        self._fleet = Fleet(workers, token_file)
        self.plan_choice = PlanChoice(plan, micro_batches)
        self._layers: LayerChoice = layers
        self._micro_batching = micro_batching
        self._loss_weighting = loss_weighting
        self._ever_trained: set[Tensor] = set()
        self._trainable_only = checkpoint_weights == "trainable"
        # Lightning's connector fills this in; the coordinator computes on the first of them.
        self.parallel_devices: list[torch.device] | None = None
        self._deployment: Deployment | None = None
        self._microbatched: MicrobatchedStep | None = None
        self._remote_steps: RemoteSteps | None = None
        self._followed: FollowedZeroGrad | None = None
        self._replan = replan
        self._watch: Watch | None = None
        # Whether there are gradients that the next optimizer step will use.
        self._is_inside_window = False
        # Why the checkpoint that is being made after an exception cannot be written.
        self._unsaved: HeteroError | None = None

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        self._checkpoint_io = checkpoint_io_or_ours(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    @override
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else self._root_device

    @override
    def setup_environment(self) -> None:
        refuse_training_in_worker()
        warn_of_idle_devices(self.parallel_devices)
        super().setup_environment()

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # A parameter on `meta` takes no content, and before the setup there are no others.
        return weights_in_checkpoint(self._module()) is not None

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if strict:
            checkpoint = keeping_frozen(checkpoint, self._module())
        with accepting_states(self._module()):
            super().load_model_state_dict(checkpoint, strict)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._unsaved = None
        return self._unless_interrupted(self._gather)

    @override
    def model_to_device(self) -> None:
        module = self._module()
        keep_layout(module)
        layers = find_decoder_layers(module, self._layers)
        if layers:
            self._deploy(module, layers)
        else:
            rank_zero_warn(
                f"{type(module).__name__} has no decoder layers that could be found, so it runs on "
                "this process alone; name them with `layers=`."
            )
        self._bring_weights_here(module)
        super().model_to_device()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        warn_of_batch_statistics(self._module(), cuts_step=self._cuts_step)
        super().setup(trainer)
        leave_pictures(trainer, self._deployment, self.plan_choice.profile)

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        SingleDeviceStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        if self._followed is not None:
            self._followed.follow_wrappers(self._lightning_optimizers)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        self._is_inside_window, self._watch = False, None
        if self._deployment is not None:
            self._tie_optimizers(self._deployment)

    def _tie_optimizers(self, deployment: Deployment) -> None:
        """Give the stages their parts of the optimizers, and training steps their way to them."""
        remote = remote_optimizers(self.optimizers, deployment.coordinator, deployment.names_of)
        for each in remote:
            check_precision(self.precision_plugin, each.optimizer)
        self._remote_steps = RemoteSteps(self.precision_plugin, remote, deployment.names_of)
        module = self._module()
        if self._cuts_step:
            self._microbatched = MicrobatchedStep(module, deployment, self._loss_weighting, _seed())
        elif not module.automatic_optimization:
            self._followed = FollowedZeroGrad(
                module, deployment.coordinator, deployment.names_of, remote
            )
        stopwatch = None if self._microbatched is None else self._microbatched.stopwatch
        if self._watch is not None:
            self._watch = self._watch.after_move(deployment, stopwatch)
        else:
            moves = self._replan and moves_layers(module)
            self._watch = Watch(deployment, self.plan_choice.profile, stopwatch, moves)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._note_trained()
        self._is_inside_window = True
        deployment = self._deployment
        if deployment is None:
            return super().training_step(*args, **kwargs)
        accumulate = self._followed is not None or not self._is_first_of_window()
        if self._microbatched is not None:
            deployment.follow_trained_ones()
            batch, *rest = (*args, *kwargs.values())
            return self._microbatched.run(batch, rest, accumulate)
        with deployment.whole_batch_step(deployment.plan.micro_batches, accumulate):
            result = super().training_step(*args, **kwargs)
        deployment.check_forward_finished()
        return result

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        self._is_inside_window = False
        if self._watch is not None:
            self._watch.note_own()
        return result

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._watch is not None and not self._is_inside_window:
            plan = self._watch.next_plan()
            if plan is not None:
                self.move_layers(plan)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        # Under automatic optimization gradients are looked at just before the step.
        if self._remote_steps is not None and self._followed is not None:
            self._remote_steps.note_backward()
        return loss

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients, here and on the workers, so that their 2-norm together is at most
        ``max_norm``; as `torch.nn.utils.clip_grad_norm_` on one device.

        For `configure_gradient_clipping`, `on_before_optimizer_step`, or manual optimization; with
        several optimizers, `self.clip_gradients` clips the gradients of one.

        Returns:
            The norm before.
        """
        norm = clip_by_global_norm(self._module(), self._deployment, max_norm)
        if self._remote_steps is not None:
            self._remote_steps.note_clipping()
        return norm

    def grad_norms(self) -> dict[str, float]:
        """The 2-norm of every gradient, here and on the workers, by its parameter's name in the
        LightningModule; parameters without a gradient are left out."""
        return norms_by_name(self._module(), self._deployment)

    def move_layers(self, plan: Plan) -> None:
        """Put layers where this plan has them, with their weights, optimizer state and averages.

        For the time between an optimizer step and the next ``training_step``, in a callback's
        `on_train_batch_start` for one. The workers and their order stay. Key-value caches end.

        Raises:
            PlanError: If the plan does not fit, or has other workers.
            ModelError: If layers cannot move now.
            WorkerError: If a worker fails; the weights are here then, unless it failed while it
                still had some.
        """
        deployment = self._deployment
        check_move(self._module(), deployment, plan, self._is_inside_window)
        if deployment is None or self._remote_steps is None:
            return
        with moving_averages(self._module().trainer) as averages:
            bring_home(deployment, self._remote_steps)
            averages.are_home = True
            self._deployment = self._remote_steps = self._microbatched = None
            self._deploy_from_home(deployment, plan)

    def _deploy_from_home(self, before: Deployment, plan: Plan) -> None:
        module, coordinator = self._module(), before.coordinator
        self._leave_weights()
        home = AtHome.of(before.layers, self.optimizers)
        try:
            deployment = self._deploy_plan(module, list(before.layers), plan, coordinator)
            self._bring_weights_here(module)
            super().model_to_device()
            self._tie_optimizers(deployment)
            home.settle()
        except BaseException:
            failed, self._deployment = self._deployment, None
            remote_steps, self._remote_steps = self._remote_steps, None
            self._microbatched = None
            home.restore(failed, remote_steps)
            coordinator.close()
            raise

    def average_weights(
        self, action: AveragingAction, num_averaged: int = 0, decay: float | None = None
    ) -> None:
        """What `StageWeightAveraging` asks the stages to do with the averages of their weights."""
        if self._deployment is not None:
            self._deployment.coordinator.average_weights(action, num_averaged, decay)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._unless_interrupted(partial(super().optimizer_state, optimizer))

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if self._unsaved is not None:
            logger.error("No checkpoint was written to %s. %s", filepath, self._unsaved)
            return
        check_complete(checkpoint, filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._deployment is not None:
            self._deployment.abort()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        deployment, self._deployment = self._deployment, None
        remote_steps, self._remote_steps = self._remote_steps, None
        followed, self._followed = self._followed, None
        self._microbatched = self._watch = None
        if followed is not None:
            followed.detach()
        try:
            if deployment is not None:
                give_back(deployment, remote_steps)
            self._leave_weights()
            super().teardown()
        finally:
            self._fleet.end(self.deadlines)

    def _deploy(self, module: pl.LightningModule, layers: list[DecoderLayer]) -> None:
        options = self.plan_choice.profiling_options(module.trainer)
        if options is not None:
            self._measure_and_deploy(module, layers, options)
            return
        names = self._fleet.names
        plan = self.plan_choice.without_measuring(module.trainer, len(layers), names)
        if not plan.remote_stages:
            rank_zero_warn("The plan has no stage on a worker, so the model runs here alone.")
            return
        check_callbacks(module.trainer)
        check_not_compiled(module, layers)
        everything = Plan([StagePlan(names[:1], (0, len(layers)))])
        imports = imports_of(module, layers, everything if self._replan else plan)
        coordinator = self._connect(_workers_of(plan), imports)
        with _closing_on_error(coordinator):
            self._deploy_plan(module, layers, plan, coordinator)

    def _measure_and_deploy(
        self, module: pl.LightningModule, layers: list[DecoderLayer], options: ProfilingOptions
    ) -> None:
        names = self._fleet.names
        given = self.plan_choice.given(len(layers), names)
        check_callbacks(module.trainer)
        check_not_compiled(module, layers)
        everything = Plan([StagePlan(names[:1], (0, len(layers)))])
        coordinator = self._connect(names, imports_of(module, layers, everything))
        with _closing_on_error(coordinator):
            run = ProfilingRun(module, layers, coordinator, names, options, not self._cuts_step)
            plan = self.plan_choice.measured(run, given)
            if plan.remote_stages:
                self._deploy_plan(module, layers, plan, coordinator)
        if not plan.remote_stages:
            rank_zero_info("no worker would make it faster, so the model runs here alone")
            coordinator.close()
            self._fleet.end(self.deadlines)

    def _deploy_plan(
        self,
        module: pl.LightningModule,
        layers: list[DecoderLayer],
        plan: Plan,
        coordinator: Coordinator,
    ) -> Deployment:
        coordinator.serve(_workers_of(plan), plan.coordinator_narrowing)
        is_mixed = isinstance(self.precision_plugin, MixedPrecision)
        self._deployment = Deployment(module, layers, plan, coordinator, _seed(), not is_mixed)
        self._announce(plan)
        return self._deployment

    def _connect(self, names: list[str], imports: set[str]) -> Coordinator:
        return self._fleet.connect(names, imports, self.root_device, self.deadlines)

    def _bring_weights_here(self, module: pl.LightningModule) -> None:
        """Read what this process needs of a model whose weights are still in their checkpoint."""
        weights = weights_in_checkpoint(module)
        hollow = {} if self._deployment is None else self._deployment.names_of
        if weights is not None:
            for name in bring_here(module, weights, hollow, self.root_device):
                logger.debug("reading %s", name)
            weights.is_deployed = True

    def _leave_weights(self) -> None:
        weights = None if self.lightning_module is None else weights_in_checkpoint(self._module())
        if weights is not None:
            weights.end_run()

    def _announce(self, plan: Plan) -> None:
        for number, stage in enumerate(plan.remote_stages, start=1):
            first, end = stage.layers
            rank_zero_info(f"stage {number}: layers {first} to {end - 1} on {stage.worker}")
            if stage.dtype == "float16" and scaler_of(self.precision_plugin) is None:
                rank_zero_info(
                    f"stage {number} computes in float16 without loss scaling, so that gradients "
                    "below 6e-8 become zero there; precision '16-mixed' scales the loss"
                )
        what = "training_step runs on each" if self._cuts_step else "boundary only"
        rank_zero_info(
            f"each batch is cut into {plan.micro_batches} micro-batches ({what}), "
            f"at most {plan.max_in_flight} in flight"
        )

    def _is_first_of_window(self) -> bool:
        """Lightning's own rule for calling `zero_grad` in this batch."""
        trainer = self._module().trainer
        return trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0

    def _gather(self) -> dict[str, Any]:
        """The weights that go into a checkpoint."""
        self._note_trained()
        left_out: set[Tensor] = set()
        if self._trainable_only:
            left_out.update(set(self._module().parameters()) - self._ever_trained)
        with contextlib.ExitStack() as stack:
            if self._deployment is not None:
                stack.enter_context(self._deployment.gathering(left_out))
            state = super().lightning_module_state_dict()
        if left_out:
            leave_out(state, keys_of(left_out, self._module()))
        return state

    def _note_trained(self) -> None:
        """What trains in some phase of a run belongs into checkpoints of its later ones."""
        if self._trainable_only:
            self._ever_trained |= {p for p in self._module().parameters() if p.requires_grad}

    def _unless_interrupted(self, fetch: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What a checkpoint needs.

        An exception that ends the run makes callbacks write checkpoints. What hinders them is
        logged, since Lightning would let it take the exception's place and leave the workers busy.
        """
        try:
            if self._deployment is not None:
                self._deployment.check_between_steps()
            return fetch()
        except HeteroError as error:
            status = self._module().trainer.state.status
            if self._deployment is None or status is not TrainerStatus.INTERRUPTED:
                raise
            self._unsaved = error
            return {}

    def __getstate__(self) -> dict[str, Any]:
        if self._deployment is not None:
            raise ModelError(
                "The strategy holds connections to workers while training runs, so it cannot be "
                "copied or pickled; do it before `fit` or after it."
            )
        return super().__getstate__()

    @property
    def _cuts_step(self) -> bool:
        """Whether `training_step` runs once per micro-batch."""
        return self._micro_batching == "step" and self._module().automatic_optimization

    def _module(self) -> pl.LightningModule:
        if self.lightning_module is None:
            raise MisconfigurationException("The strategy has no LightningModule yet.")
        return self.lightning_module


@contextmanager
def _closing_on_error(coordinator: Coordinator) -> Iterator[None]:
    try:
        yield
    except BaseException:
        coordinator.close()
        raise


def _workers_of(plan: Plan) -> list[str]:
    return [stage.worker for stage in plan.remote_stages]


def _seed() -> int:
    """Where dropout masks start: the seed of `seed_everything`, or torch's own."""
    return int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed())) % 2**63
