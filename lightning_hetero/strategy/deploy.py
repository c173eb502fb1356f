"""How layers get to the workers: by a plan that is given, or by one that is measured for."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from ..coordinator.deployment import Deployment, imports_of
from ..coordinator.progress import progress_of_bytes
from ..coordinator.session import Coordinator
from ..coordinator.whole_batches import BatchOptions
from ..coordinator.workers import Fleet
from ..model.layers import DecoderLayer, other_layer_lists
from ..model.lazy_weights import bring_here, weights_in_checkpoint
from ..plan import Plan, StagePlan
from ..profiler.measure import ProfilingOptions
from ..profiler.run import ProfilingRun
from ..transport.deadlines import Deadlines
from .arguments import check_callbacks, check_not_compiled
from .optimizers import scaler_of
from .plan_choice import PlanChoice
from .training_step import dropout_seed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Deployer:
    """Puts the decoder layers of a module on workers.

    Args:
        module: Attached to its Trainer.
        fleet: The workers.
        plan_choice: Who is to hold which layers.
        plugin: The precision of this process.
        device: What this process computes on.
        cuts_step: Whether ``training_step`` runs once per micro-batch.
        may_move: Whether any layer may come to any worker later on.
        batches: What the user said of batches.
        deadlines: How long anything may take.
    """

    module: pl.LightningModule
    fleet: Fleet
    plan_choice: PlanChoice
    plugin: Precision
    device: torch.device
    cuts_step: bool
    may_move: bool
    batches: BatchOptions
    deadlines: Deadlines

    def deploy(self, layers: Sequence[DecoderLayer]) -> Deployment | None:
        """Measure if need be, connect, and send layers; None where none is to go to a worker.

        Raises:
            HeteroError: If the plan does not fit, a worker fails, or a callback has no place here.
        """
        options = self.plan_choice.profiling_options(self.module.trainer)
        if options is not None:
            return self._measure_and_deploy(layers, options)
        names = self.fleet.find(self.device, self.deadlines)
        plan = self.plan_choice.without_measuring(self.module.trainer, len(layers), names)
        if not plan.remote_stages:
            rank_zero_warn("The plan has no stage on a worker, so the model runs here alone.")
            if not self._cuts_batches(plan):
                return None
        self._check(layers)
        imported_for = _all_on_one(names, layers) if self.may_move else plan
        coordinator = self._connect(workers_of(plan), layers, imported_for)
        with _closing_on_error(coordinator):
            return self.carry_out(plan, layers, coordinator)

    def carry_out(
        self, plan: Plan, layers: Sequence[DecoderLayer], coordinator: Coordinator
    ) -> Deployment:
        """Send layers as this plan has them, over connections that are there."""
        coordinator.serve(workers_of(plan), plan.coordinator_narrowing)
        coordinator.layers.progress = partial(progress_of_bytes, self.module.trainer)
        converts_weights = not isinstance(self.plugin, MixedPrecision)
        deployment = Deployment(
            self.module,
            layers,
            plan,
            coordinator,
            dropout_seed(),
            converts_weights,
            self.batches,
        )
        self._announce_choice(layers)
        self._announce(plan)
        return deployment

    def bring_weights_here(self, deployment: Deployment | None) -> None:
        """Read what this process needs of a model whose weights are still in their checkpoint."""
        weights = weights_in_checkpoint(self.module)
        hollow = {} if deployment is None else deployment.tensors.names_of
        if weights is not None:
            for name in bring_here(self.module, weights, hollow, self.device):
                logger.debug("reading %s", name)
            weights.is_deployed = True

    def _measure_and_deploy(
        self, layers: Sequence[DecoderLayer], options: ProfilingOptions
    ) -> Deployment | None:
        names = self.fleet.find(self.device, self.deadlines)
        given = self.plan_choice.given(len(layers), names)
        self._check(layers)
        coordinator = self._connect(names, layers, _all_on_one(names, layers))
        with _closing_on_error(coordinator):
            run = ProfilingRun(
                self.module, list(layers), coordinator, names, options, not self.cuts_step
            )
            plan = self.plan_choice.measured(run, given)
            if plan.remote_stages:
                return self.carry_out(plan, layers, coordinator)
            rank_zero_info("no worker would make it faster, so the model runs here alone")
            coordinator.connections.keep([])
            self.fleet.end(self.deadlines)
            return self.carry_out(plan, layers, coordinator) if self._cuts_batches(plan) else None

    def _cuts_batches(self, plan: Plan) -> bool:
        """Whether a plan without workers is more than what Lightning does: a whole batch may not
        fit into the memory here."""
        return self.cuts_step and plan.micro_batches > 1

    def _check(self, layers: Sequence[DecoderLayer]) -> None:
        check_callbacks(self.module.trainer)
        check_not_compiled(self.module, list(layers))

    def _connect(
        self, names: list[str], layers: Sequence[DecoderLayer], imported_for: Plan
    ) -> Coordinator:
        imports = imports_of(self.module, layers, imported_for)
        return self.fleet.connect(names, imports, self.device, self.deadlines)

    def _announce_choice(self, layers: Sequence[DecoderLayer]) -> None:
        """Say which layers are meant, where a module has several models."""
        others = other_layer_lists(self.module, layers)
        if others:
            taken = dict.fromkeys(layer.name.rpartition(".")[0] for layer in layers)
            rank_zero_info(
                f"decoder layers: {', '.join(taken)} (the module also has {', '.join(others)}, "
                "which stay here; `layers=` names others)"
            )

    def _announce(self, plan: Plan) -> None:
        for number, stage in enumerate(plan.remote_stages, start=1):
            first, end = stage.layers
            also = "the input embedding and " if stage.embedding else ""
            rank_zero_info(f"stage {number}: {also}layers {first} to {end - 1} on {stage.worker}")
            if stage.dtype == "float16" and scaler_of(self.plugin) is None:
                rank_zero_info(
                    f"stage {number} computes in float16 without loss scaling, so that gradients "
                    "below 6e-8 become zero there; precision '16-mixed' scales the loss"
                )
        what = "training_step runs on each" if self.cuts_step else "boundary only"
        rank_zero_info(
            f"each batch is cut into {plan.micro_batches} micro-batches ({what}), "
            f"at most {plan.max_in_flight} in flight"
        )


def workers_of(plan: Plan) -> list[str]:
    """The workers of a plan's stages, in their order."""
    return [stage.worker for stage in plan.remote_stages]


def _all_on_one(names: Sequence[str], layers: Sequence[DecoderLayer]) -> Plan:
    """For what any worker may have to import."""
    return Plan([StagePlan(list(names[:1]), (0, len(layers)))])


@contextmanager
def _closing_on_error(coordinator: Coordinator) -> Iterator[None]:
    try:
        yield
    except BaseException:
        coordinator.close()
        raise
