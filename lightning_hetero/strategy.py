"""HeteroPipelineStrategy: Lightning's hooks, each a few lines."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from typing_extensions import override

from .callbacks.averaging import StageWeightAveraging
from .errors import HeteroError, ModelError
from .manual import FollowedZeroGrad
from .model.four_bit import accepting_states, keep_layout
from .model.imports import Allowed, refuse_training_in_worker
from .model.layers import DecoderLayer, LayerChoice, find_decoder_layers
from .model.pretrained import bring_here, weights_in_checkpoint
from .pipeline.averaging import AveragingAction
from .pipeline.microbatch import LossWeighting
from .pipeline.optimizer import (
    Clipping,
    clip_gradients,
    clipping_factor,
    gradient_norms,
    total_norm,
)
from .plan import Plan
from .planning.even import even_plan
from .precision import RemoteSteps, scaler_of
from .runtime.address import Address
from .runtime.coordinator import Coordinator
from .runtime.deadlines import Deadlines
from .runtime.deployment import Deployment, imports_of
from .runtime.equipment import equipment_here
from .runtime.handshake import Identity
from .runtime.local import (
    START_SECONDS,
    LocalWorker,
    local_worker_names,
    start_local_workers,
    stop_local_workers,
    threads_per_process,
)
from .runtime.remote_optimizer import RemoteOptimizer, optimized_parameters
from .runtime.tls import credentials_of
from .runtime.token import find_token_file
from .stepping import MicrobatchedStep

logger = logging.getLogger(__name__)


class HeteroPipelineStrategy(SingleDeviceStrategy):
    """Trains one model on this process and on workers, each holding some of its decoder layers.

    Args:
        workers: That many local worker processes, started and stopped by the strategy; or a list
            of ``"host:port"`` of workers that are already listening.
        plan: Who holds which layers: ``"auto"`` (as ``"even"`` until devices are measured),
            ``"even"``, the path of a YAML file, or a Plan. Local workers are called ``local-1``,
            ``local-2``, …; others are called by their ``"host:port"``.
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
        token_file: The file of the secret that this process shares with the workers of a list. None
            takes that of the environment variable ``LIGHTNING_HETERO_TOKEN_FILE`` (empty for
            none), or ``~/.config/lightning-hetero/token`` if it is there. Workers on other machines
            need one; local workers, which ``workers`` counts, neither need nor use it.
        accelerator: As for every Lightning strategy.
        checkpoint_io: As for every Lightning strategy.
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
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        token_file: str | Path | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin
        )
        self._workers = workers
        self._plan = plan
        self._layers: LayerChoice = layers
        self._micro_batches = micro_batches
        self._micro_batching = micro_batching
        self._loss_weighting = loss_weighting
        # The token itself is read for each run and not kept, so no copy of the strategy has it.
        self._token_file = token_file
        # Lightning's connector fills this in; the coordinator computes on the first of them.
        self.parallel_devices: list[torch.device] | None = None
        self._local_workers: list[LocalWorker] = []
        self._threads_before: int | None = None
        self._deployment: Deployment | None = None
        self._microbatched: MicrobatchedStep | None = None
        self._remote_steps: RemoteSteps | None = None
        self._followed: FollowedZeroGrad | None = None

    @property
    @override
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else self._root_device

    @override
    def setup_environment(self) -> None:
        refuse_training_in_worker()
        super().setup_environment()

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # A parameter on `meta` takes no content, and before the setup there are no others.
        return weights_in_checkpoint(self._module()) is not None

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with accepting_states(self._module()):
            super().load_model_state_dict(checkpoint, strict)

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
        _check_supported(self._module(), self._micro_batching)
        super().setup(trainer)

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
        deployment = self._deployment
        if deployment is None:
            return
        remote = [
            RemoteOptimizer(optimizer, number, deployment.coordinator, deployment.names_of)
            for number, optimizer in enumerate(self.optimizers)
            if _has_parameters_in(optimizer, deployment.names_of)
        ]
        for each in remote:
            _check_precision(self.precision_plugin, each.optimizer)
        self._remote_steps = RemoteSteps(self.precision_plugin, remote, deployment.names_of)
        module = self._module()
        if not module.automatic_optimization:
            self._followed = FollowedZeroGrad(
                module, deployment.coordinator, deployment.names_of, remote
            )
        elif self._micro_batching == "step":
            self._microbatched = MicrobatchedStep(module, deployment, self._loss_weighting, _seed())

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
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
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        if self._remote_steps is not None:
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
        gradients = [p.grad for p in self._module().parameters() if p.grad is not None]
        norm = total_norm([*self.grad_norms().values()])
        clipping = Clipping(factor=clipping_factor(max_norm, norm))
        clip_gradients(gradients, clipping)
        if self._deployment is not None:
            self._deployment.coordinator.clip_gradients(None, clipping)
        if self._remote_steps is not None:
            self._remote_steps.note_clipping()
        return norm

    def grad_norms(self) -> dict[str, float]:
        """The 2-norm of every gradient, here and on the workers, by its parameter's name in the
        LightningModule; parameters without a gradient are left out."""
        here = {name: p.grad for name, p in self._module().named_parameters() if p.grad is not None}
        norms = dict(zip(here, gradient_norms([*here.values()]), strict=True))
        if self._deployment is not None:
            norms.update(self._deployment.grad_norms())
        names = [name for name, _ in self._module().named_parameters() if name in norms]
        return {name: norms[name] for name in names}

    def average_weights(
        self, action: AveragingAction, num_averaged: int = 0, decay: float | None = None
    ) -> None:
        """What `StageWeightAveraging` asks the stages to do with the averages of their weights."""
        if self._deployment is not None:
            self._deployment.coordinator.average_weights(action, num_averaged, decay)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        missing = [k for k, v in checkpoint.get("state_dict", {}).items() if _is_meta(v)]
        if missing:
            raise ModelError(f"The checkpoint {str(filepath)!r} would lack the weights {missing}.")
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
        self._microbatched = None
        if followed is not None:
            followed.detach()
        try:
            if deployment is not None:
                _bring_back(deployment, remote_steps)
            self._leave_weights()
            super().teardown()
        finally:
            local_workers, self._local_workers = self._local_workers, []
            stop_local_workers(local_workers, self.deadlines)
            if self._threads_before is not None:
                torch.set_num_threads(self._threads_before)
                self._threads_before = None

    def _deploy(self, module: pl.LightningModule, layers: list[DecoderLayer]) -> None:
        names = self._worker_names()
        plan = self._make_plan(len(layers), names)
        plan.check(len(layers), names)
        if not plan.remote_stages:
            rank_zero_warn("The plan has no stage on a worker, so the model runs here alone.")
            return
        _check_callbacks(module.trainer)
        if isinstance(self._workers, int):
            self._start_local_workers(self._workers, imports_of(module, layers, plan))
        addresses = self._addresses()
        used = [(stage.worker, addresses[stage.worker]) for stage in plan.remote_stages]
        coordinator = Coordinator(used, self._patient_deadlines(), self._identity())
        try:
            is_mixed = isinstance(self.precision_plugin, MixedPrecision)
            self._deployment = Deployment(module, layers, plan, coordinator, _seed(), not is_mixed)
        except BaseException:
            coordinator.close()
            raise
        self._announce(plan)

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

    def _start_local_workers(self, count: int, imports: set[str]) -> None:
        threads = threads_per_process(count + 1)
        self._local_workers = start_local_workers(count, threads, Allowed.just(imports))
        if "OMP_NUM_THREADS" not in os.environ:
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(threads)

    def _patient_deadlines(self) -> Deadlines:
        """Local workers have only just been started."""
        seconds = self.deadlines.connect_seconds
        if self._local_workers:
            seconds = max(seconds, START_SECONDS)
        return dataclasses.replace(self.deadlines, connect_seconds=seconds)

    def _worker_names(self) -> list[str]:
        """What plans call the workers."""
        if isinstance(self._workers, int):
            return local_worker_names(self._workers)
        return list(self._workers)

    def _addresses(self) -> Mapping[str, Address]:
        """The workers by the names that plans use."""
        if isinstance(self._workers, int):
            return {worker.name: worker.address for worker in self._local_workers}
        return {text: Address.parse(text) for text in self._workers}

    def _identity(self) -> Identity:
        """What the workers are shown; local ones are ours anyway."""
        equipment = equipment_here(self.root_device)
        if isinstance(self._workers, int):
            return Identity(equipment)
        return Identity(equipment, credentials_of(find_token_file(self._token_file)))

    def _make_plan(self, num_layers: int, workers: list[str]) -> Plan:
        plan = self._plan
        if plan == "auto":
            rank_zero_info("plan='auto' means 'even' until measured planning exists.")
        if plan in ("auto", "even"):
            plan = even_plan(num_layers, workers)
        elif not isinstance(plan, Plan):
            plan = Plan.from_yaml(plan)
        if self._micro_batches is not None:
            plan = dataclasses.replace(plan, micro_batches=self._micro_batches)
        return plan

    def _announce(self, plan: Plan) -> None:
        for number, stage in enumerate(plan.remote_stages, start=1):
            first, end = stage.layers
            rank_zero_info(f"stage {number}: layers {first} to {end - 1} on {stage.worker}")
            if stage.dtype == "float16" and scaler_of(self.precision_plugin) is None:
                rank_zero_info(
                    f"stage {number} computes in float16 without loss scaling, so that gradients "
                    "below 6e-8 become zero there; precision '16-mixed' scales the loss"
                )
        cuts_step = self._micro_batching == "step" and self._module().automatic_optimization
        what = "training_step runs on each" if cuts_step else "boundary only"
        rank_zero_info(
            f"each batch is cut into {plan.micro_batches} micro-batches ({what}), "
            f"at most {plan.max_in_flight} in flight"
        )

    def _is_first_of_window(self) -> bool:
        """Lightning's own rule for calling `zero_grad` in this batch."""
        trainer = self._module().trainer
        return trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0

    def _module(self) -> pl.LightningModule:
        if self.lightning_module is None:
            raise MisconfigurationException("The strategy has no LightningModule yet.")
        return self.lightning_module


def _bring_back(deployment: Deployment, remote_steps: RemoteSteps | None) -> None:
    """Weights and optimizer state come home; if they cannot, the log has said so."""
    try:
        if deployment.bring_back() and remote_steps is not None:
            for optimizer in remote_steps.optimizers:
                optimizer.bring_back()
    except HeteroError as error:
        logger.error("The optimizer state on the workers could not be brought back: %s", error)
    finally:
        if remote_steps is not None:
            remote_steps.detach()
        deployment.close()


def _check_callbacks(trainer: pl.Trainer) -> None:
    """Refuse callbacks that look into parameters which are not here."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (BaseFinetuning, ModelPruning)):
            raise MisconfigurationException(
                f"{type(callback).__name__} compares or changes the values of parameters, and "
                "those of layers on workers are not here; to fine-tune in phases, give the "
                "optimizer all parameters and set `requires_grad` in `on_train_epoch_start`."
            )
        averages = isinstance(callback, (StochasticWeightAveraging, WeightAveraging))
        if averages and not isinstance(callback, StageWeightAveraging):
            raise MisconfigurationException(
                f"{type(callback).__name__} averages copies of the weights, and those of layers on "
                "workers are not here to be copied; use "
                "`lightning_hetero.callbacks.StageWeightAveraging`, which averages them where they "
                "are."
            )


def _check_supported(module: pl.LightningModule, micro_batching: str) -> None:
    cuts_step = micro_batching == "step" and module.automatic_optimization
    if cuts_step and any(isinstance(m, _BatchNorm) for m in module.modules()):
        rank_zero_warn(
            f"{type(module).__name__} has BatchNorm, whose statistics will be those of one "
            "micro-batch; use micro_batching='boundary' for those of the batch."
        )


def _has_parameters_in(optimizer: Optimizer, names_of: Mapping[Tensor, str]) -> bool:
    """Whether the optimizer has to do with layers on workers."""
    is_real = not isinstance(optimizer, _MockOptimizer)
    return is_real and any(p in names_of for p in optimized_parameters(optimizer))


def _check_precision(plugin: Precision, optimizer: Optimizer) -> None:
    """Refuse an optimizer that checks for overflows within its step: the stages would miss it."""
    if scaler_of(plugin) is not None and _optimizer_handles_unscaling(optimizer):
        raise MisconfigurationException(
            f"A fused {type(optimizer).__name__} takes the loss scale of precision '16-mixed' off "
            "by itself, without the stages; build it with `fused=False`."
        )


def _seed() -> int:
    """Where dropout masks start: the seed of `seed_everything`, or torch's own."""
    return int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed())) % 2**63


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta
