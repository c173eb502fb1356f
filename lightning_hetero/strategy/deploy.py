"""From a plan to layers on workers: connect to them, and send the layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from .._lightning import TrainerFn, pl
from ..coordinator.deployment import Deployment, imports_for
from ..coordinator.parts import DeploymentParts
from ..coordinator.precision import autocast_dtype, scaler_of
from ..errors import PlanError
from ..events import Observers
from ..model.layers import DecoderLayer, other_layer_lists
from ..model.tensors import bring_here, weights_in_checkpoint
from ..pipeline.optimizer import own_optimizer_modules
from ..plan import Plan, StagePlan
from ..transport.deadlines import Deadlines
from ..units import in_micro_batches, in_share
from .arguments import (
    StepOptions,
    check_all_layers_run,
    check_callbacks,
    check_not_compiled,
    dropout_seed,
)
from .training_run import PlanFollower, TrainingRun, moves_layers

if TYPE_CHECKING:
    from ..coordinator.connections import Connections
    from ..coordinator.listed_workers import ListedWorkers
    from ..coordinator.session import Coordinator

logger = logging.getLogger(__name__)


Move = Callable[[Plan], None]
"""Moves layers to where a plan has them."""


class PlanSource(Protocol):
    """Where the plans of a strategy's runs come from.

    Attributes:
        profile: The measurements of the devices, if there are any.
    """

    @property
    def profile(self) -> Any: ...

    def named_workers(self) -> Sequence[str]:
        """The workers in the user's own plan."""

    def given(self, num_layers: int, workers: Sequence[str]) -> Plan | None:
        """The user's own plan; None without one.

        Raises:
            PlanError: If the plan does not fit.
        """

    def measures(self, trainer: pl.Trainer) -> bool:
        """Whether it measures the devices of the present run, over connections to all workers."""

    def plan_for(
        self,
        site: Site,
        layers: Sequence[DecoderLayer],
        workers: Sequence[str],
        connections: Connections | None,
    ) -> Plan:
        """The plan of the present run.

        Args:
            site: The module and its workers.
            layers: All its decoder layers.
            workers: The names of all workers.
            connections: To all workers, if it measures.

        Raises:
            HeteroError: If a fitting plan is not found, or a worker fails.
        """

    def follow(self, run: TrainingRun, site: Site, recovery: Any, move: Move) -> PlanFollower:
        """Look after the plan of a training, with the settings of its recovery."""


@dataclass(frozen=True)
class Site:
    """A module, the workers it can use, and how this process computes.

    Args:
        module: Attached to its Trainer.
        fleet: The workers.
        device: The device of this process.
        options: How the user wants batches to be cut.
        may_move: Whether any layer may move to any worker during the run.
        deadlines: How long anything may take.
        recover: Prepares a run for lost workers, before layers are sent; None if a lost worker ends
            the run.
        observers: Read the events of the run.
        parts: Makes a deployment's parts besides its steps.
    """

    module: pl.LightningModule
    fleet: ListedWorkers
    device: torch.device
    options: StepOptions
    may_move: bool
    deadlines: Deadlines
    recover: Callable[[Coordinator, Plan], None] | None = None
    observers: Observers = field(default_factory=Observers)
    parts: DeploymentParts = field(default_factory=DeploymentParts)

    def deploy(self, layers: Sequence[DecoderLayer], source: PlanSource) -> Deployment | None:
        """Choose a plan and send the layers; None if all layers stay here.

        Raises:
            HeteroError: If the plan does not fit, or a worker fails.
            MisconfigurationException: If a callback or a compiled module does not work with layers
                on workers.
        """
        workers = self.find_workers(source.named_workers())
        source.given(len(layers), workers)  # report its mistakes before a worker is asked
        if source.measures(self.module.trainer):
            return self._measure_and_deploy(layers, workers, source)
        plan = source.plan_for(self, layers, workers, None)
        if not plan.remote_stages:
            rank_zero_warn("The plan has no stage on a worker, so the model runs here alone.")
            if not self._differs_from_plain(plan):
                return None
        self._check(layers)
        imported_for = _all_on_one(workers, layers) if self.may_move else plan
        coordinator = self.connect(plan.workers, layers, imported_for)
        with _closing_on_error(coordinator):
            return self.carry_out(plan, layers, coordinator)

    def _measure_and_deploy(
        self, layers: Sequence[DecoderLayer], workers: Sequence[str], source: PlanSource
    ) -> Deployment | None:
        coordinator = self.connect_all(workers, layers)
        with _closing_on_error(coordinator):
            plan = source.plan_for(self, layers, workers, coordinator.connections)
            if plan.remote_stages:
                return self.carry_out(plan, layers, coordinator)
            rank_zero_info("no worker would make it faster, so the model runs here alone")
            coordinator.connections.keep([])
            self.fleet.end(self.deadlines)
            is_plain = not self._differs_from_plain(plan)
            return None if is_plain else self.carry_out(plan, layers, coordinator)

    def connect_all(self, workers: Sequence[str], layers: Sequence[DecoderLayer]) -> Coordinator:
        """Connect to all workers; each may get any layers.

        Raises:
            WorkerError: If a worker cannot be used.
            HeteroError: If the layers cannot be on workers.
        """
        self._check(layers)
        return self.connect(workers, layers, _all_on_one(workers, layers))

    def find_workers(self, named: Sequence[str] = ()) -> list[str]:
        """The names of all workers.

        Args:
            named: The workers in the user's own plan, if there is one.

        Raises:
            DiscoveryError: If the network is without workers.
            JoinError: If too few join in time.
            TokenError: If the token cannot be used.
        """
        return self.fleet.find(self.device, self.deadlines, named)

    def connect(
        self, workers: Sequence[str], layers: Sequence[DecoderLayer], imported_for: Plan
    ) -> Coordinator:
        """Connect to workers. They may then import the packages of a plan's layers.

        Raises:
            WorkerError: If a worker cannot be used.
        """
        # The optimizers are made later, when local workers run already.
        imports = imports_for(self.module, layers, imported_for) | own_optimizer_modules()
        coordinator = self.fleet.connect(
            workers, imports, self.device, self.deadlines, self.observers
        )
        trainer = self.module.trainer
        # The Trainer forgets the signal of an earlier run only after the layers are sent.
        is_old = trainer.received_sigterm
        coordinator.connections.end_when(
            lambda: trainer.received_sigterm and not is_old, lambda: trainer.interrupted
        )
        return coordinator

    def carry_out(
        self,
        plan: Plan,
        layers: Sequence[DecoderLayer],
        coordinator: Coordinator,
        before: Deployment | None = None,
    ) -> Deployment:
        """Bring layers to a plan's places, over open connections.

        Args:
            plan: A plan that fits the layers.
            layers: All decoder layers of the module.
            coordinator: Connected to the workers.
            before: Where the layers are now, if they move.
        """
        self._check_hosted(plan)
        if before is None:
            coordinator.serve(plan.workers, plan.narrowings)
        if before is None and self.recover is not None:
            self.recover(coordinator, plan)
        # Under autocast, weights keep their dtype.
        converts_weights = autocast_dtype(self.module.trainer.precision_plugin) is None
        seed = dropout_seed() if before is None else before.draws.seed
        deployment = Deployment(
            self.module,
            layers,
            plan,
            coordinator,
            seed,
            converts_weights,
            replace(self.options.batches, along_tokens=self.slices_tokens),
            before,
            self.parts,
        )
        if before is not None:  # a refused plan must not change it
            coordinator.serve(plan.workers, plan.narrowings)
        else:
            coordinator.replacements.begin({}, ())
        self._announce_layers(layers)
        self._announce_plan(plan)
        return deployment

    def _check_hosted(self, plan: Plan) -> None:
        """Refuse a training if this process must be a replica and cannot be one.

        Raises:
            PlanError: With the remedy.
        """
        hosted = [stage for stage in plan.stages if stage.is_hosted]
        is_training = self.module.trainer.state.fn is TrainerFn.FITTING
        if not hosted or not is_training or self.cuts_step:
            return
        kind = "manual optimization" if not self.module.automatic_optimization else "'boundary'"
        raise PlanError(
            f"The plan has layers {list(hosted[0].layers)} on {' and '.join(hosted[0].workers)}, "
            f"and under {kind} this process runs none of them: training_step runs once for the "
            "whole batch, whose hidden states all go to workers. Take the coordinator from the "
            "stage, or use automatic optimization with `micro_batching='step'`."
        )

    def bring_weights_here(self, deployment: Deployment | None) -> None:
        """Read this process's weights, if they are still in their checkpoint."""
        weights = weights_in_checkpoint(self.module)
        hollow = {} if deployment is None else deployment.tensors.names_of
        if weights is not None:
            for name in bring_here(self.module, weights, hollow, self.device):
                logger.debug("reading %s", name)
            weights.is_deployed = True

    @property
    def cuts_step(self) -> bool:
        """Whether ``training_step`` runs once per micro-batch."""
        return self.options.cuts_step(self.module)

    @property
    def slices_tokens(self) -> bool:
        """Whether this is a training with batches in slices along the tokens."""
        is_training = self.module.trainer.state.fn is TrainerFn.FITTING
        return is_training and self.options.micro_batching == "tokens"

    def moves_layers(self) -> bool:
        """Whether the user wants layers to move, and they can; warns if they cannot."""
        return self.may_move and moves_layers(self.module)

    def _differs_from_plain(self, plan: Plan) -> bool:
        """Whether a plan without workers differs from plain Lightning: it cuts batches because they
        may be too large for the memory here, recomputes layers for the same reason, or compiles
        them."""
        cuts = (self.cuts_step or self.slices_tokens) and plan.micro_batches > 1
        return cuts or any(stage.recompute or stage.compile for stage in plan.stages)

    def _check(self, layers: Sequence[DecoderLayer]) -> None:
        check_callbacks(self.module.trainer)
        check_not_compiled(self.module, layers)
        if self.module.trainer.state.fn is TrainerFn.FITTING:
            check_all_layers_run(self.module, layers)

    def _announce_layers(self, layers: Sequence[DecoderLayer]) -> None:
        """Name the chosen layers, if the module has several models."""
        others = other_layer_lists(self.module, layers)
        if others:
            taken = dict.fromkeys(layer.name.rpartition(".")[0] for layer in layers)
            rank_zero_info(
                f"decoder layers: {', '.join(taken)} (the module also has {', '.join(others)}, "
                "which stay here; `layers=` names others)"
            )

    def _announce_plan(self, plan: Plan) -> None:
        scaler = scaler_of(self.module.trainer.precision_plugin)
        for number, stage in enumerate(plan.remote_stages, start=1):
            first, end = stage.layers
            also = "the input embedding and " if stage.embedding else ""
            head = " and the head" if stage.head else ""
            who = _holders_as_text(stage)
            rank_zero_info(f"stage {number}: {also}layers {first} to {end - 1}{head} on {who}")
            if stage.dtype == "float16" and scaler is None:
                rank_zero_info(
                    f"stage {number} computes in float16 without loss scaling, so that gradients "
                    "below 6e-8 become zero there; precision '16-mixed' scales the loss"
                )
        what = "training_step runs on each" if self.cuts_step else "boundary only"
        if self.slices_tokens:
            rank_zero_info(
                f"each sequence is cut into {plan.micro_batches} slices along its tokens (boundary "
                "only), all in flight until the backward"
            )
            return
        rank_zero_info(
            f"each batch is cut into {in_micro_batches(plan.micro_batches)}, or into single "
            f"samples if it has fewer ({what}), at most {plan.max_in_flight} in flight"
        )
        num_whole = sum(plan.own_counts)
        is_fitting = self.module.trainer.state.fn is TrainerFn.FITTING
        if is_fitting and not self.cuts_step and num_whole and plan.micro_batches > 1:
            rank_zero_info(
                f"{num_whole} layers stay with the coordinator and run on whole batches while no "
                "worker computes; if they need not see whole batches, start a worker on this "
                "machine too and give them to it, which cuts them"
            )


def _holders_as_text(stage: StagePlan) -> str:
    """The processes of a stage, replicas with their shares: ``a (2 of 3), b (1 of 3)``."""
    if len(stage.workers) == 1:
        return stage.worker
    shares = stage.present_shares
    pairs = zip(stage.workers, shares, strict=True)
    return ", ".join(f"{name} ({in_share(share, sum(shares))})" for name, share in pairs)


def _all_on_one(workers: Sequence[str], layers: Sequence[DecoderLayer]) -> Plan:
    """A plan with all layers on one worker: it imports everything that any worker may need."""
    return Plan([StagePlan(list(workers[:1]), (0, len(layers)))])


@contextmanager
def _closing_on_error(coordinator: Coordinator) -> Iterator[None]:
    try:
        yield
    except BaseException:
        coordinator.close()
        raise
