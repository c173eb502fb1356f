"""HeteroPipelineStrategy: Lightning's hooks, each a few lines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ..coordinator.deployment import Deployment, check_is_whole
from ..coordinator.progress import TrainingFigures
from ..coordinator.whole_batches import BatchOptions, CheckFirstBatch
from ..coordinator.workers import Fleet
from ..devices.arenas import share_one_arena
from ..errors import ModelError
from ..model.allowed_imports import refuse_training_in_worker
from ..model.four_bit import keep_layout
from ..model.half_layers import cut_layers, join_layers
from ..model.layers import DecoderLayer, LayerChoice, find_decoder_layers
from ..model.lazy_weights import weights_in_checkpoint
from ..pipeline.microbatch import LossWeighting
from ..pipeline.optimizer import AveragingAction
from ..plan import Plan
from ..transport.deadlines import Deadlines
from .arguments import check_arguments, warn_of_batch_statistics, warn_of_idle_devices
from .callback_copies import let_callbacks_be_copied
from .checkpoints import CheckpointingStrategy
from .deploy import Deployer
from .optimizers import clip_by_global_norm, norms_by_name
from .plan_choice import PlanChoice
from .replan import AtHome, Watch, bring_home, check_move, give_back, moves_layers, moving_averages
from .run_folder import leave_pictures
from .training_step import BatchReader, StagedTraining

Rehearsal = Callable[[pl.LightningModule, list[DecoderLayer], Fleet], None]


class HeteroPipelineStrategy(CheckpointingStrategy):
    """Trains one model on this process and on workers, each holding some of its decoder layers.

    Args:
        workers: That many local worker processes, started and stopped by the strategy; or a list
            of ``"host:port"`` of workers that are already listening; or ``"auto"`` for those that
            are announced on the local network and have the same token.
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
            are not -100), ``"auto"`` (labels where the batch has one entry ``labels``), ``"sum"``
            for a loss that is a sum or is divided by a number that comes with the batch, or a
            function from a micro-batch to its weight.
        batch_dim: The dimension that counts samples, in the hidden states that go to the layers
            and in batches. None finds it: it is 0, or 1 where layers say ``batch_first=False`` or
            the data loader's batch size says so. A batch in which it cannot be found stays whole.
        check_first_batch: What happens when the loss of the first batch is not that of its
            micro-batches, or layers compute something else for a batch than for its pieces:
            ``"stop"`` ends the run if the difference is above 1 %, and says what repairs it;
            ``"warn"`` only says so; ``"off"`` does not look. The check runs the first batch twice
            without gradients, whole and cut, and changes nothing. Use ``"off"`` where
            ``training_step`` acts on something outside of the module, such as an environment.
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
        cut_layers: Whether each decoder layer is cut in two behind its attention, so that few or
            large layers can be spread more evenly. Plans then count the halves: 0 is the first
            layer's attention and 1 what follows it. For layers of Hugging Face that add to the
            hidden states twice, first by the attention, as most do; others are refused.
        accelerator: As for every Lightning strategy.
        checkpoint_io: As for every Lightning strategy; None writes files without a copy in memory.
        precision_plugin: As for every Lightning strategy.
    """

    strategy_name = "hetero_pipeline"
    deadlines = Deadlines()

    def __init__(
        self,
        workers: int | list[str] | Literal["auto"] = 2,
        plan: str | Path | Plan = "auto",
        layers: str | list[str] | Callable[[nn.Module], Any] | None = None,
        micro_batches: int | None = None,
        micro_batching: Literal["step", "boundary"] = "step",
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
    ) -> None:
        super().__init__(
            trainable_only=checkpoint_weights == "trainable",
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        check_arguments(
            workers=workers,
            plan=plan,
            layers=layers,
            micro_batches=micro_batches,
            micro_batching=micro_batching,
            loss_weighting=loss_weighting,
            batch_dim=batch_dim,
            check_first_batch=check_first_batch,
            checkpoint_weights=checkpoint_weights,
            replan=replan,
            cut_layers=cut_layers,
        )
        self._fleet = Fleet(workers, token_file)
        self.plan_choice = PlanChoice(plan, micro_batches)
        self._layers: LayerChoice = layers
        self._cuts_layers = cut_layers
        self._micro_batching = micro_batching
        self._loss_weighting = loss_weighting
        self._batches = BatchOptions(batch_dim, check_first_batch)
        self._reader: BatchReader | None = None
        # Lightning's connector fills this in; the coordinator computes on the first of them.
        self.parallel_devices: list[torch.device] | None = None
        self._training: StagedTraining | None = None
        self._replan = replan
        self._watch: Watch | None = None
        # Is given the model and the workers in place of a run, as `lightning-hetero verify` wants.
        self.rehearsal: Rehearsal | None = None
        self._figures: TrainingFigures | None = None
        self._put_back: list[Callable[[], None]] = []
        # Whether there are gradients that the next optimizer step will use.
        self._is_inside_window = False

    @property
    @override
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else self._root_device

    @property
    def deployment(self) -> Deployment | None:
        """The layers on workers while a run has some; for callbacks that look at them."""
        return self._deployment

    @override
    def setup_environment(self) -> None:
        refuse_training_in_worker()
        share_one_arena()
        warn_of_idle_devices(self.parallel_devices)
        self._begin_run()
        super().setup_environment()

    @override
    def model_to_device(self) -> None:
        module = self._module()
        keep_layout(module)
        layers = find_decoder_layers(module, self._layers)
        layers = cut_layers(layers) if self._cuts_layers else layers
        if layers:
            if self.rehearsal is not None:
                self.rehearsal(module, layers, self._fleet)
            self._deployment = self._deployer().deploy(layers)
            self._reader = BatchReader(module.trainer, self._batches.dim)
        else:
            rank_zero_warn(
                f"{type(module).__name__} has no decoder layers that could be found, so it runs on "
                "this process alone; name them with `layers=`."
            )
        self._deployer().bring_weights_here(self._deployment)
        super().model_to_device()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        deployment = self._deployment
        if deployment is not None and self._cuts_step and deployment.plan.micro_batches > 1:
            warn_of_batch_statistics(self._module())
        leave_pictures(trainer, self._deployment, self.plan_choice.profile)

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        SingleDeviceStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        if self._training is not None and self._training.followed is not None:
            self._training.followed.follow_wrappers(self._lightning_optimizers)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        self._is_inside_window, self._watch = False, None
        if self._deployment is not None:
            self._put_back = let_callbacks_be_copied(trainer)
            self._tie_optimizers(self._deployment)

    def _tie_optimizers(self, deployment: Deployment) -> None:
        """Give the stages their parts of the optimizers, and training steps their way to them."""
        module = self._module()
        # The first batch of a run is checked, and not that behind each move of layers.
        has_begun = self._watch is not None
        self._training = StagedTraining(
            module,
            deployment,
            self.optimizers,
            self.precision_plugin,
            self._cuts_step,
            self._loss_weighting,
            replace(self._batches, check="off") if has_begun else self._batches,
        )
        stopwatch = self._training.stopwatch
        if self._watch is not None:
            self._watch = self._watch.after_move(deployment, stopwatch)
        else:
            moves = self._replan and moves_layers(module)
            self._watch = Watch(deployment, self.plan_choice.profile, stopwatch, moves)
        if self._figures is None:
            tokens, slowest = deployment.coordinator.stages, self._slowest_stage
            self._figures = TrainingFigures(module.trainer, lambda: tokens.num_tokens, slowest)

    def _slowest_stage(self) -> str:
        return "" if self._watch is None else self._watch.bottleneck

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._gathering.note_trained(self._module())
        self._is_inside_window = True
        if self._training is None:
            return super().training_step(*args, **kwargs)
        return self._training.step(super().training_step, args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(super().predict_step, args, kwargs)

    def _evaluated(
        self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A step's result, if it has gone through all layers that are away."""
        if self._deployment is None or self._reader is None:
            return step(*args, **kwargs)
        batch, *rest = (*args, *kwargs.values())
        with self._deployment.hand_overs.batch_of(self._reader.count(batch, rest)):
            result = step(*args, **kwargs)
        self._deployment.check_forward_finished()
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
        with self._recording_backward():
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        if self._training is not None:
            self._training.note_backward()
        return loss

    def _recording_backward(self) -> AbstractContextManager[None]:
        """Of a whole batch; the micro-batches of a cut step have had theirs."""
        if self._deployment is None or self._cuts_step:
            return nullcontext()
        return self._deployment.coordinator.telemetry.recorder.span("backward")

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients, here and on the workers, so that their 2-norm together is at most
        ``max_norm``; as `torch.nn.utils.clip_grad_norm_` on one device.

        For `configure_gradient_clipping`, `on_before_optimizer_step`, or manual optimization; with
        several optimizers, `self.clip_gradients` clips the gradients of one.

        Returns:
            The norm before.
        """
        norm = clip_by_global_norm(self._module(), self._deployment, max_norm)
        if self._training is not None:
            self._training.remote_steps.note_clipping()
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
        if deployment is None or self._training is None:
            return
        with moving_averages(self._module().trainer) as averages:
            bring_home(deployment, self._training.remote_steps)
            averages.are_home = True
            self._deployment = self._training = None
            self._deploy_from_home(deployment, plan)

    def _deploy_from_home(self, before: Deployment, plan: Plan) -> None:
        deployer, coordinator = self._deployer(), before.coordinator
        self._leave_weights()
        home = AtHome.of(before.modules_under(plan), self.optimizers)
        try:
            self._deployment = deployer.carry_out(plan, before.layers, coordinator)
            deployer.bring_weights_here(self._deployment)
            super().model_to_device()
            self._tie_optimizers(self._deployment)
            home.settle()
        except BaseException:
            failed, self._deployment = self._deployment, None
            training, self._training = self._training, None
            home.restore(failed, None if training is None else training.remote_steps)
            coordinator.close()
            raise
        profile = None if self._watch is None else self._watch.profile
        leave_pictures(self._module().trainer, self._deployment, profile)

    def average_weights(
        self, action: AveragingAction, num_averaged: int = 0, decay: float | None = None
    ) -> None:
        """What `StageWeightAveraging` asks the stages to do with the averages of their weights."""
        if self._deployment is not None:
            self._deployment.coordinator.optimizer.average_weights(action, num_averaged, decay)

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._deployment is not None:
            self._deployment.abort()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        deployment, self._deployment = self._deployment, None
        training, self._training = self._training, None
        figures, self._figures = self._figures, None
        self._watch = None
        while self._put_back:
            self._put_back.pop()()
        if figures is not None:
            figures.detach()
        if training is not None:
            training.detach()
        try:
            if deployment is not None:
                steps = None if training is None else training.remote_steps
                self._gathering.note_loss(give_back(deployment, steps, self._remedy()))
            if deployment is None or deployment.tensors.loss is None:
                self._leave_weights()
            super().teardown()
        finally:
            if self.lightning_module is not None:
                join_layers(self.lightning_module)
            self._fleet.end(self.deadlines)
        self._gathering.end_run(self.lightning_module)

    def _begin_run(self) -> None:
        self._gathering.begin_run()
        check_is_whole(self._module())
        if self._module().trainer.state.fn is TrainerFn.FITTING:
            self._saved.forget()

    def _remedy(self) -> str:
        trainer = self._module().trainer
        is_fitting = trainer.state.fn is TrainerFn.FITTING
        return self._saved.remedy(trainer.ckpt_path if is_fitting else None)

    def _deployer(self) -> Deployer:
        return Deployer(
            self._module(),
            self._fleet,
            self.plan_choice,
            self.precision_plugin,
            self.root_device,
            cuts_step=self._cuts_step,
            may_move=self._replan,
            batches=self._batches,
            deadlines=self.deadlines,
        )

    def _leave_weights(self) -> None:
        weights = None if self.lightning_module is None else weights_in_checkpoint(self._module())
        if weights is not None:
            weights.end_run()

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
