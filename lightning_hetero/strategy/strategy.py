"""HeteroPipelineStrategy: Lightning's hooks, each a few lines."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from .._lightning import (
    FOR_OTHER_PROJECTS,
    Accelerator,
    CheckpointIO,
    MisconfigurationException,
    Precision,
    SingleDeviceStrategy,
    TrainerFn,
    pl,
)
from ..coordinator.deployment import Deployment, check_is_whole
from ..devices.main_memory import share_one_arena
from ..errors import ModelError, ProfileError, WeightsLost, WorkerLost
from ..events import Observers, RunEnded
from ..model.allowed_imports import refuse_training_in_worker
from ..model.layers import DecoderLayer, LayerChoice, find_decoder_layers, without_layers
from ..model.partial_layers import join_layers
from ..model.stored import accepting_states, keep_layout
from ..model.tensors import weights_in_checkpoint
from ..pipeline.microbatch import BatchOptions, CheckFirstBatch, LossWeighting
from ..pipeline.optimizer import AveragingAction
from ..plan import Plan
from ..recovery import Recovery, recovery_of
from ..transport.deadlines import Deadlines
from ..window import Window, Windows
from ..worker_sources import ClusterFile, Launcher
from .arguments import (
    MicroBatching,
    StepOptions,
    check_arguments,
    check_num_nodes,
    warn_of_batch_statistics,
    warn_of_frequencies,
    warn_of_idle_devices,
    without_example,
)
from .checkpoints import Checkpoints, checkpoint_io_or_ours, keeping_frozen
from .deploy import PlanSource, Site
from .interruption import guard_hooks
from .loaders import check_is_training, check_no_window_inside, note_size, prepared, transferring
from .optimizers import clip_by_global_norm, norms_by_name
from .run_events import failure, now, publish_begin, publish_deployed
from .training_run import Run, TrainingRun, check_move, the_only_training
from .window_step import WindowsAlone
from .wings import (
    deployment_parts,
    halves_of_layers,
    moving_averages,
    observers_of,
    plan_source,
    replace_lost,
    run_guard,
    worker_source,
)

logger = logging.getLogger(__name__)

_ANEW = "build the module anew (a new start of the script does)"
_NEXT_TIME = " With `recovery=True` the next run goes on by itself."


class HeteroPipelineStrategy(SingleDeviceStrategy):
    """Trains one model on this process and on workers; each worker holds some decoder layers.

    Args:
        workers: The number of local worker processes, started and stopped by the strategy; or a
            list of ``"host:port"`` of workers that listen already; or ``"auto"`` for the workers
            announced on the local network with the same token; or a `ClusterFile`; or a launcher,
            such as `Joining`, for workers that dial this process.
        plan: Who holds which layers. ``"auto"`` measures the devices, or reads an earlier
            measurement, and takes the plan with the shortest predicted step. ``"even"`` gives every
            worker the same number of layers. ``"replicated"`` gives every process all layers, the
            coordinator included, and micro-batches by measured speed. A path reads a YAML file; a
            `Plan` is taken as it is. Plans call local workers ``local-1``, ``local-2``, …, workers
            of launchers by their names, and others by their ``"host:port"``.
        layers: Where the LightningModule has its decoder layers: the dotted path of a ModuleList or
            of one layer, a list of paths, or a callable from the module to the layers. None finds
            them in a Hugging Face model. A model without decoder layers runs on this process alone.
            For layers of your own classes start workers with ``--allow PACKAGE``; local workers
            allow what the layers need.
        micro_batches: The number of micro-batches of a training batch; None takes the plan's.
        micro_batching: ``"step"`` runs ``training_step`` once per micro-batch, so the head and the
            loss overlap with the workers. ``"boundary"`` is the safe mode: your code sees the whole
            batch, once, as on one device, and only the hidden states for workers are cut. Take it
            for losses that couple the samples of a batch, and for a step that keeps something
            shared by its micro-batches. The coordinator's layers, the head and the loss run while
            all workers wait; the verdict on a plan names the cost. ``"tokens"`` is for long
            sequences in small batches: it is the safe mode, with the hidden states cut along the
            tokens. Each slice attends to the slices before it, so layers must be causal.
        loss_weighting: How micro-batch losses combine: by ``"samples"``, by ``"labels"`` (except
            -100), by ``"auto"`` (labels if exactly one entry of the batch is ``labels``, else
            samples), or by a function from a micro-batch to its weight. ``"sum"`` adds them, for a
            loss that is a sum or is divided by a number from the batch.
        batch_dim: The dimension of samples, in batches and in hidden states. None finds it: 0, or 1
            if layers have ``batch_first=False`` or the data loader's batch size says so. A batch
            without such a dimension stays whole.
        check_first_batch: The strategy compares the loss of the first batch with the loss of its
            micro-batches, or the layers' results for a batch with the results for its pieces, and
            the results of layers on workers for a micro-batch with the same layers' results here.
            ``"stop"`` ends the run above a difference of 1 % and names the remedy; ``"warn"`` only
            warns; ``"off"`` does not compare. The check runs the first batch twice without
            gradients, whole and cut, and its first two micro-batches with gradients, and leaves the
            module unchanged. It does so again with the 10th, the 100th batch and so on, and with
            the batch after one with something new, such as a log; a difference there is only a
            warning. Choose ``"off"`` if ``training_step`` acts on something outside of the module,
            such as an environment.
        checkpoint_weights: ``"all"``, or ``"trainable"`` for checkpoints of only the parameters
            that require gradients and every persistent buffer. A module keeps its own frozen
            weights when it loads such a checkpoint; without this strategy set Lightning's
            ``strict_loading = False``. A model from `from_pretrained` always leaves out the frozen
            weights of its source.
        token_file: The file of the token that this process shares with the listed workers. None
            takes the file named by the environment variable ``LIGHTNING_HETERO_TOKEN_FILE`` (empty:
            without a token), or ``~/.config/lightning-hetero/token`` if it exists. Workers on other
            machines need a token; local workers do not.
        replan: Whether layers move away from the slower stages, and micro-batches from the slower
            replicas, whatever the plan. They move between two steps, if the move saves at least 5 %
            of the step and pays within the remaining steps. Without a measurement the memory of the
            workers is estimated from the sizes of the layers. Under manual optimization layers do
            not move.
        cut_layers: Whether to cut each decoder layer in two after its attention, so few or large
            layers spread more evenly. Plans then count halves: 0 is the attention of the first
            layer, 1 the rest of it. It works for Hugging Face layers that add to the hidden states
            twice, first the attention; the strategy refuses others.
        recovery: Whether the run gets over broken connections, and how; see `Recovery`. True takes
            its defaults. Without recovery a broken connection ends the run.
        accelerator: As for every Lightning strategy.
        checkpoint_io: As for every Lightning strategy; None writes files without a copy in memory.
        precision_plugin: As for every Lightning strategy.
    """

    strategy_name = "hetero_pipeline"
    num_nodes = 1  # Lightning sets what the Trainer was given.
    deadlines = Deadlines()

    def __init__(
        self,
        workers: int | list[str] | Literal["auto"] | Launcher | ClusterFile = 2,
        plan: str | Path | Plan = "auto",
        layers: str | list[str] | Callable[[nn.Module], Any] | None = None,
        micro_batches: int | None = None,
        micro_batching: MicroBatching = "step",
        loss_weighting: LossWeighting = "auto",
        batch_dim: Literal[0, 1] | None = None,
        check_first_batch: CheckFirstBatch = "stop",
        checkpoint_weights: Literal["all", "trainable"] = "all",
        replan: bool = False,
        cut_layers: bool = False,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        token_file: str | Path | None = None,
        recovery: bool | Recovery = False,
    ) -> None:
        super().__init__(
            accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin
        )
        check_arguments(locals())
        self.plan_choice: PlanSource = plan_source(plan, micro_batches)
        # Lightning sets the devices; this process computes on the first one.
        self.parallel_devices: list[torch.device] | None = None
        self._fleet = worker_source(workers, token_file)
        self._layers: LayerChoice = layers
        self._cuts_layers = cut_layers
        batches = BatchOptions(batch_dim, check_first_batch)
        self._options = StepOptions(micro_batching, loss_weighting, batches)
        self._checkpoints = Checkpoints(trainable_only=checkpoint_weights == "trainable")
        self._replan = replan
        self._recovery = recovery_of(recovery)
        self._run: Run | None = None
        self._observers = Observers()
        self._guards = ExitStack()
        # Why the weights of the latest run have not come home; None if they have come.
        self._lost: WeightsLost | None = None
        self._instead: Callable[[Site, list[DecoderLayer]], None] | None = None

    def __repr__(self) -> str:
        # Fabric and the Trainer of the other package show this when they refuse the strategy.
        return (
            f"<{type(self).__name__}, which only {pl.__name__}.Trainer can use: not Fabric; "
            f"{FOR_OTHER_PROJECTS}>"
        )

    @classmethod
    def of(cls, trainer: pl.Trainer) -> HeteroPipelineStrategy:
        """The strategy of a Trainer.

        Raises:
            ProfileError: If the Trainer has another strategy.
        """
        if not isinstance(trainer.strategy, cls):
            raise ProfileError(
                f"The config's strategy is {type(trainer.strategy).__name__}, and only "
                f"{cls.__name__} has workers; name it under trainer.strategy."
            )
        return trainer.strategy

    @property
    @override
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else self._root_device

    @property
    def deployment(self) -> Deployment | None:
        """The layers on workers during a run with such layers; callbacks may look at them."""
        return None if self._run is None else self._run.deployment

    @contextmanager
    def instead_of_training(
        self, action: Callable[[Site, list[DecoderLayer]], None]
    ) -> Iterator[None]:
        """Inside, `fit` calls ``action`` where a run would send its layers to the workers.

        The module is attached to its Trainer then, with its data. The action must keep the Trainer
        from training, by ``trainer.limit_train_batches = 0``.
        """
        self._instead = action
        try:
            yield
        finally:
            self._instead = None

    @override
    def setup_environment(self) -> None:
        refuse_training_in_worker()
        share_one_arena()
        check_num_nodes(self.num_nodes)
        warn_of_idle_devices(self.parallel_devices)
        self._checkpoints.begin_run()
        self._observers = observers_of(self._module().trainer)
        self._guards = guard_hooks(self._module().trainer, self.on_exception)
        self._lost = None
        check_is_whole(self._module())
        if self._is_fitting:
            self._checkpoints.forget_files()
        super().setup_environment()

    @override
    def model_to_device(self) -> None:
        module, site = self._module(), self._site()
        keep_layout(module)
        layers = find_decoder_layers(module, self._layers)
        layers = halves_of_layers(layers) if self._cuts_layers else layers
        if self._instead is not None:
            self._instead(site, layers)
            return
        if layers:
            if self._is_fitting:
                self._guards.enter_context(the_only_training())
            deployment = site.deploy(layers, self.plan_choice)
            self._run = None if deployment is None else Run(module, deployment, self._options)
        else:
            rank_zero_warn(
                f"{without_layers(module)}, so it runs on this process alone; name them with "
                "`layers=`."
            )
        site.bring_weights_here(self.deployment)
        self._put_on_device(self.deployment)

    def _put_on_device(self, deployment: Deployment | None) -> None:
        super().model_to_device()
        if deployment is not None and deployment.hosted is not None:
            deployment.hosted.note_present()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        deployment, module = self.deployment, self._module()
        if deployment is None:
            return
        self._guards.callback(without_example(module))
        if self._options.cuts_step(module) and deployment.plan.micro_batches > 1:
            warn_of_batch_statistics(module)
            warn_of_frequencies(module)
        publish_begin(self._observers, trainer, deployment)
        publish_deployed(self._observers, module, deployment, self.plan_choice.profile)

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        SingleDeviceStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        if isinstance(self._run, TrainingRun):
            self._run.follow_wrappers(self._lightning_optimizers)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if self._run is not None:
            self._run = TrainingRun(
                self._module(),
                self._run.deployment,
                self._options,
                self.optimizers,
                run_guard(self._module(), self._options),
                partial(
                    self.plan_choice.follow,
                    site=self._site(),
                    recovery=self._recovery,
                    move=self.move_layers,
                ),
            )

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if not isinstance(dataloader, Windows):
            return dataloader
        self._guards.callback(transferring(self._module()))
        return prepared(self._module().trainer, dataloader)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        bring = partial(super().batch_to_device, device=device, dataloader_idx=dataloader_idx)
        if isinstance(batch, Window):
            return batch.map(bring)
        check_no_window_inside(batch)
        return bring(batch)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._checkpoints.note_trained(self._module())
        step = partial(super().training_step, *args, **kwargs)
        batch, *rest = (*args, *kwargs.values())
        if isinstance(self._run, TrainingRun):
            return self._run.training_step(step, (batch, *rest))
        if isinstance(batch, Window):
            return WindowsAlone(self._module()).run(batch, rest)
        return step()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(super().predict_step, *args, **kwargs)

    def _evaluated(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step, given = partial(method, *args, **kwargs), (*args, *kwargs.values())
        check_is_training(*given)
        return step() if self._run is None else self._run.evaluation_step(step, given)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        if isinstance(self._run, TrainingRun):
            self._run.note_optimizer_step()
        return result

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if isinstance(batch, Window):
            note_size(self._module().trainer, batch)
        if isinstance(self._run, TrainingRun) and not self._run.is_inside_window:
            self._run.plans.between_steps()

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        run = self._run
        with run.backward() if isinstance(run, TrainingRun) else nullcontext():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients, here and on the workers, to a common 2-norm of at most ``max_norm``;
        on one device, `torch.nn.utils.clip_grad_norm_` does this.

        Call it in `configure_gradient_clipping`, in `on_before_optimizer_step`, or under manual
        optimization. With several optimizers, `self.clip_gradients` clips the gradients of one.

        Returns:
            The norm before.
        """
        self._follow_dropped_gradients()
        norm = clip_by_global_norm(self._module(), self.deployment, max_norm)
        if isinstance(self._run, TrainingRun):
            self._run.note_clipping()
        return norm

    def grad_norms(self) -> dict[str, float]:
        """The 2-norm of every gradient, here and on the workers, by its parameter's name in the
        LightningModule; parameters without a gradient are left out."""
        self._follow_dropped_gradients()
        return norms_by_name(self._module(), self.deployment)

    def _follow_dropped_gradients(self) -> None:
        if isinstance(self._run, TrainingRun):
            self._run.follow_dropped()

    def move_layers(self, plan: Plan) -> None:
        """Move layers to a plan's places, with their weights, optimizer state and averages.

        Call it between an optimizer step and the next ``training_step``, for example in a
        callback's `on_train_batch_start`. The plan may have any of the first plan's workers, in any
        order; one without layers stays connected. A layer goes straight from its worker to the next
        one, and staying layers are not sent. Key-value caches end. If only shares of replicas
        change, nothing is sent.

        Raises:
            MisconfigurationException: Under manual optimization.
            PlanError: If the plan does not fit, is without workers, or has workers outside of the
                run.
            ModelError: If layers cannot move now.
            MoveUndone: With `recovery`, if a worker fails, or is lost and cannot be replaced. The
                layers are where they were, and training may go on.
            WorkerError: If a worker fails. Steps cannot run any more then. The end of the run
                brings the weights home, except a lost worker's weights.
        """
        run = self._run
        is_inside_window = isinstance(run, TrainingRun) and run.is_inside_window
        check_move(self._module(), self.deployment, plan, is_inside_window)
        if isinstance(run, TrainingRun) and run.deployment.plan.differs_in_shares_only(plan):
            run.share(plan)
            publish_deployed(self._observers, self._module(), run.deployment, run.plans.profile)
        elif isinstance(run, TrainingRun):
            trainer = self._module().trainer
            try:
                with moving_averages(trainer, plan, lambda: run.deployment):
                    run.move(plan, self.optimizers, partial(self._redeploy, plan, run.deployment))
            finally:
                run.deployment.coordinator.layers.interrupts.release()
            publish_deployed(self._observers, self._module(), run.deployment, run.plans.profile)

    def _redeploy(self, plan: Plan, before: Deployment) -> Deployment:
        """Move the layers of a deployment to a plan's places."""
        site = self._site()
        deployment = site.carry_out(plan, before.layers, before.coordinator, before)
        site.bring_weights_here(deployment)
        self._put_on_device(deployment)
        return deployment

    def average_weights(
        self, action: AveragingAction, num_averaged: int = 0, decay: float | None = None
    ) -> None:
        """Have the stages update or swap the averages of their weights, for
        `StageWeightAveraging`."""
        if self.deployment is not None:
            self.deployment.check_placed()
            self.deployment.trained.follow()  # stages average what trains
            self.deployment.coordinator.optimizers.average_weights(action, num_averaged, decay)
            if self.deployment.hosted is not None:
                self.deployment.hosted.note_averages()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self.deployment is not None:
            self.deployment.abort()
        if isinstance(exception, WorkerLost) and not isinstance(exception, WeightsLost):
            steps = [*self._fleet.restart, _ANEW, "and " + self._remedy()]
            next_time = "" if self._recovery is not None else _NEXT_TIME
            exception.args = (f"{exception} To go on: {', '.join(steps)}.{next_time}",)
        self._observers.publish(failure(exception))
        super().on_exception(exception)
        # Lightning ends the loggers next. If a logger cannot be written, it raises, and `teardown`
        # is not called.
        is_whole = False
        try:
            self._end_run()
            is_whole = not self._checkpoints.is_incomplete
        except Exception:  # the run's own error is raised; it says more
            logger.exception("The run did not end in good order after its error.")
        finally:
            # After SIGTERM, Lightning would end the process as if all were well.
            if isinstance(exception, SystemExit) and not is_whole:
                exception.code = exception.code or 1
            self._fleet.end(self.deadlines)

    def _end_run(self) -> None:
        """Bring everything home and disconnect. May be called twice."""
        self._guards.close()
        run, self._run = self._run, None
        if run is None:
            return
        loss = run.end(self._remedy())
        if loss is not None:
            self._observers.publish(failure(loss))
        self._checkpoints.note_loss(loss)
        self._lost = run.deployment.tensors.loss

    @override
    def teardown(self) -> None:
        try:
            self._end_run()
            lost, self._lost = self._lost, None
            if lost is None:
                self._leave_weights()
            super().teardown()
        finally:
            if self.lightning_module is not None:
                join_layers(self.lightning_module)
            self._fleet.end(self.deadlines)
            self._observers.publish(RunEnded(now()))
            self._observers = Observers()
        self._checkpoints.end_run(self.lightning_module)

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
    def restore_checkpoint_after_setup(self) -> bool:
        # A parameter on `meta` does not take content, and before the setup all parameters are on
        # `meta`.
        return weights_in_checkpoint(self._module()) is not None

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if strict:
            checkpoint = keeping_frozen(checkpoint, self._module())
        with accepting_states(self._module()):
            super().load_model_state_dict(checkpoint, strict)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state_dict = super().lightning_module_state_dict
        return self._checkpoints.weights(self._module(), self.deployment, state_dict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state_dict = partial(super().optimizer_state, optimizer)
        return self._checkpoints.optimizer_state(self._module(), self.deployment, state_dict)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        save = partial(super().save_checkpoint, checkpoint, filepath, storage_options)
        self._checkpoints.save(self._module(), checkpoint, filepath, save)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)
        self._checkpoints.note_removed(filepath)

    def _module(self) -> pl.LightningModule:
        if self.lightning_module is None:
            raise MisconfigurationException("The strategy has no LightningModule yet.")
        return self.lightning_module

    @property
    def _is_fitting(self) -> bool:
        return self._module().trainer.state.fn is TrainerFn.FITTING

    def _remedy(self) -> str:
        began_with = self._module().trainer.ckpt_path if self._is_fitting else None
        return self._checkpoints.remedy(began_with)

    def _site(self) -> Site:
        trainer = self._module().trainer
        linger_seconds = 0.0 if self._recovery is None else self._recovery.linger_seconds
        given = self._recovery
        recover = None if given is None else partial(replace_lost, given, trainer)
        return Site(
            self._module(),
            self._fleet,
            self.root_device,
            self._options,
            may_move=self._replan,
            deadlines=dataclasses.replace(self.deadlines, linger_seconds=linger_seconds),
            recover=recover,
            observers=self._observers,
            parts=deployment_parts(self._options),
        )

    def _leave_weights(self) -> None:
        """End the run for weights still to be read from their checkpoint."""
        weights = None if self.lightning_module is None else weights_in_checkpoint(self._module())
        if weights is not None:
            weights.end_run()

    def __getstate__(self) -> dict[str, Any]:
        if self._run is not None:
            raise ModelError(
                "The strategy holds connections to workers while training runs, so it cannot be "
                "copied or pickled; do it before `fit` or after it."
            )
        return super().__getstate__()
