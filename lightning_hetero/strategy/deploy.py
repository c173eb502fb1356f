"""From a plan to layers on workers: choose the plan, measure for it, connect, send the layers.

given, "even", read from a file ──────────────────────────────▶ plan ─▶ deploy
"auto":  connect ─▶ profile = measure(…) ─▶ solve(profile) ───▶ plan ─▶ deploy
"replicated":  likewise, and solve_replicated(profile)
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from msgspec import structs
from rich.console import Console
from typing_extensions import override

from ..callbacks.lost_worker import RecoveryCallback
from ..callbacks.profiler import PipelineProfiler
from ..coordinator.deployment import Deployment, imports_for
from ..coordinator.fleet import Fleet
from ..coordinator.progress import progress_of_bytes
from ..coordinator.session import Coordinator
from ..errors import PlanError
from ..model.layers import DecoderLayer, other_layer_lists
from ..model.lazy_weights import bring_here, weights_in_checkpoint
from ..pipeline.optimizer import own_optimizer_modules
from ..plan import Plan, StagePlan
from ..planner.feasibility import as_measured, check_plan, with_shares
from ..planner.profile import Profile
from ..planner.solver import Solution, Wishes, even_plan, replicated_plan, solve, solve_replicated
from ..planner.verdict import judge, render, show
from ..profiler.cache import Measured
from ..profiler.dry_run import NoSample
from ..profiler.measure import ProfilingOptions
from ..profiler.profiling_run import NewcomerTrials, ProfilingRun
from ..recovery import Recovery, too_few
from ..telemetry.layer_ranges import share_as_text
from ..transport.deadlines import Deadlines
from ..units import in_micro_batches
from .arguments import (
    NAMED_PLANS,
    StepOptions,
    autocast_dtype,
    check_all_layers_run,
    check_callbacks,
    check_not_compiled,
    dropout_seed,
    most_accumulated,
    scaler_of,
)

logger = logging.getLogger(__name__)


class PlanChoice:
    """Chooses the plan of each run of a strategy.

    Args:
        plan: ``"auto"``, ``"even"``, ``"replicated"``, a path or a Plan.
        micro_batches: Pieces of a batch; None takes the plan's number.

    Raises:
        PlanError: If the plan's file is there already and cannot be read.

    Attributes:
        plan: As the user gave it.
        measured: The latest profile that was measured or read; None before there is one.
        trials: What measures a worker that joins the present run; None if nothing can.
    """

    def __init__(self, plan: str | Path | Plan, micro_batches: int | None) -> None:
        self.plan = plan
        self.measured: Measured | None = None
        self.trials: NewcomerTrials | None = None
        self._micro_batches = micro_batches
        self._solved: dict[tuple[int, tuple[str, ...]], Plan] = {}
        if not isinstance(plan, Plan) and plan not in NAMED_PLANS and Path(plan).exists():
            Plan.from_yaml(plan)  # its mistakes are told before a worker is waited for

    @property
    def profile(self) -> Profile | None:
        """The latest profile that was measured or read; None before there is one."""
        return None if self.measured is None else self.measured.profile

    @property
    def is_of_strategy(self) -> bool:
        """Whether the strategy makes the plan by what it measures."""
        return self.plan in ("auto", "replicated")

    def profiling_options(self, trainer: pl.Trainer) -> ProfilingOptions | None:
        """How this run measures its devices before it deploys; None if it does not measure."""
        if trainer.state.fn != TrainerFn.FITTING:
            return None
        chosen = chosen_profiling(trainer)
        return ProfilingOptions() if chosen is None and self.is_of_strategy else chosen

    def given(self, num_layers: int, workers: Sequence[str]) -> Plan | None:
        """The user's own plan; None under ``"auto"``.

        Raises:
            PlanError: If the plan does not fit.
        """
        plan, path = self.plan, None
        if plan == "auto":
            return None
        if plan in ("even", "replicated"):
            make = even_plan if plan == "even" else replicated_plan
            plan = make(num_layers, workers)
        elif not isinstance(plan, Plan):
            plan, path = Plan.from_yaml(plan), plan
        plan = self._with_micro_batches(plan)
        try:
            plan.check(num_layers, workers)
        except PlanError as error:
            if path is None:
                raise
            raise PlanError(f"The plan of the file {str(path)!r} does not fit. {error}") from error
        return plan

    def named_workers(self) -> Sequence[str]:
        """The workers that the user's own plan names; none if the strategy makes the plan.

        Raises:
            PlanError: If the plan's file cannot be read.
        """
        if isinstance(self.plan, Plan):
            return self.plan.workers
        return () if self.plan in NAMED_PLANS else Plan.from_yaml(self.plan).workers

    def unmeasured(self, trainer: pl.Trainer, num_layers: int, workers: Sequence[str]) -> Plan:
        """The plan of a run that does not measure; under ``"auto"``, that of the last training.

        Raises:
            PlanError: If the plan does not fit.
        """
        plan = self.given(num_layers, workers) or self._solved.get((num_layers, tuple(workers)))
        function = trainer.state.fn.value if trainer.state.fn else ""
        return plan or self.even(
            num_layers, workers, f"There is no training in `trainer.{function}`."
        )

    def even(self, num_layers: int, workers: Sequence[str], reason: str) -> Plan:
        """The same number of layers for everyone, because nothing can be measured."""
        rank_zero_info(f"plan='auto' is 'even' here, since nothing can be measured. {reason}")
        return self._with_micro_batches(even_plan(num_layers, workers))

    def solve(self, profile: Profile, workers: Sequence[str], replicas: bool) -> Plan:
        """The fastest plan by a profile; under ``"replicated"`` the fastest of such plans.

        Args:
            profile: The measurements.
            workers: The names of all workers.
            replicas: Whether ``"auto"`` may give a stage to several processes.

        Raises:
            PlanError: If the model fits on no devices, or not on each.
        """
        find = solve_replicated if self.plan == "replicated" else solve
        wishes = Wishes(micro_batches=self._micro_batches, replicas=replicas)
        solution = find(profile, wishes)
        _print_verdict(solution)
        self._solved[len(profile.model.layers), tuple(workers)] = solution.plan
        return solution.plan

    def _with_micro_batches(self, plan: Plan) -> Plan:
        if self._micro_batches is None:
            return plan
        return dataclasses.replace(plan, micro_batches=self._micro_batches)


def in_window(measured: Measured, trainer: pl.Trainer, cuts_step: bool) -> Measured:
    """The measurements with the batches of an accumulation window, if these are one pipeline:
    whole batches run one after the other."""
    count = most_accumulated(trainer) if cuts_step else 1
    return measured._replace(
        profile=structs.replace(measured.profile, accumulate_grad_batches=count)
    )


def chosen_profiling(trainer: pl.Trainer) -> ProfilingOptions | None:
    """The options of the Trainer's `PipelineProfiler`; None without one."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    found = (one.options for one in callbacks if isinstance(one, PipelineProfiler))
    return next(found, None)


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
        recovery: How the run gets over lost workers; None if it does not.
    """

    module: pl.LightningModule
    fleet: Fleet
    device: torch.device
    options: StepOptions
    may_move: bool
    deadlines: Deadlines
    recovery: Recovery | None = None

    def deploy(self, layers: Sequence[DecoderLayer], choice: PlanChoice) -> Deployment | None:
        """Choose a plan and send the layers; None if no layer goes to a worker.

        Raises:
            HeteroError: If the plan does not fit, or a worker fails.
            MisconfigurationException: If a callback or a compiled module does not work with layers
                on workers.
        """
        options = choice.profiling_options(self.module.trainer)
        workers = self.find_workers(choice.named_workers())
        if options is not None:
            return self._measure_and_deploy(layers, workers, choice, options)
        plan = choice.unmeasured(self.module.trainer, len(layers), workers)
        if not plan.remote_stages:
            rank_zero_warn("The plan has no stage on a worker, so the model runs here alone.")
            if not self._differs_from_plain(plan):
                return None
        self._check(layers)
        imported_for = _all_on_one(workers, layers) if self.may_move else plan
        coordinator = self.connect(plan.workers, layers, imported_for)
        with _closing_on_error(coordinator):
            return self.carry_out(plan, layers, coordinator)

    def measure(self, layers: Sequence[DecoderLayer], options: ProfilingOptions) -> Profile:
        """Connect to all workers, measure, and disconnect.

        Raises:
            NoSample: If there is no training batch to measure with.
            HeteroError: If a worker fails, or a process cannot run a layer.
        """
        coordinator, run = self._connected(layers, self.find_workers(), options)
        with closing(coordinator):
            return run.measured().profile

    def find_workers(self, named: Sequence[str] = ()) -> list[str]:
        """The names of all workers.

        Args:
            named: The workers that the user's own plan names, if there is one.

        Raises:
            DiscoveryError: If the network has none.
            JoinError: If too few join in time.
            TokenError: If the token cannot be used.
        """
        return self.fleet.find(self.device, self.deadlines, named)

    def connect(
        self, workers: Sequence[str], layers: Sequence[DecoderLayer], imported_for: Plan
    ) -> Coordinator:
        """Connect to workers, which may then import what the layers of a plan need.

        Raises:
            WorkerError: If a worker cannot be used.
        """
        # The optimizers are made later, when local workers run already.
        imports = imports_for(self.module, layers, imported_for) | own_optimizer_modules()
        coordinator = self.fleet.connect(workers, imports, self.device, self.deadlines)
        trainer = self.module.trainer
        # The Trainer forgets the signal of an earlier run only after the layers are sent.
        if not trainer.received_sigterm:
            coordinator.connections.is_ending = lambda: trainer.received_sigterm
        coordinator.connections.is_interrupted = lambda: trainer.interrupted
        return coordinator

    def carry_out(
        self,
        plan: Plan,
        layers: Sequence[DecoderLayer],
        coordinator: Coordinator,
        before: Deployment | None = None,
    ) -> Deployment:
        """Bring layers to where a plan has them, over connections that are open.

        Args:
            plan: A plan that fits the layers.
            layers: All decoder layers of the module.
            coordinator: Connected to the workers.
            before: Where the layers are now, if they move.
        """
        self._check_hosted(plan)
        if before is None:
            coordinator.serve(plan.workers, plan.narrowings)
        coordinator.layers.progress = partial(progress_of_bytes, self.module.trainer)
        if before is None and self.recovery is not None:
            if missing := too_few(plan.workers, self.recovery.least_workers):
                raise PlanError(f"The run cannot begin. {missing}")
            self._recover_with(coordinator, self.recovery)
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
            self.options.batches,
            before,
        )
        if before is not None:  # a plan that is refused changes nothing
            coordinator.serve(plan.workers, plan.narrowings)
            coordinator.telemetry.say_again()
        elif coordinator.replacements is not None:
            coordinator.replacements.begin()
        self._announce_layers(layers)
        self._announce_plan(plan)
        return deployment

    def _recover_with(self, coordinator: Coordinator, recovery: Recovery) -> None:
        """Let the run get over lost workers, and tell the callbacks of them."""
        trainer = self.module.trainer
        folder = recovery.folder or Path(trainer.default_root_dir, "recovery")
        replacements = coordinator.replace_lost(recovery, Path(folder))
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        told = [each for each in callbacks if isinstance(each, RecoveryCallback)]

        def on_lost(name: str, step: int) -> None:
            for each in told:
                each.on_worker_lost(trainer, name, step)

        def on_restored(name: str, step: int, seconds: float) -> None:
            for each in told:
                each.on_worker_restored(trainer, name, step, seconds)

        replacements.on_lost, replacements.on_restored = on_lost, on_restored

    def _check_hosted(self, plan: Plan) -> None:
        """Refuse a training in which this process could not be a replica.

        Raises:
            PlanError: With the remedy.
        """
        hosted = [stage for stage in plan.stages if stage.is_hosted]
        is_training = self.module.trainer.state.fn is TrainerFn.FITTING
        if not hosted or not is_training or self._cuts_step:
            return
        kind = "manual optimization" if not self.module.automatic_optimization else "'boundary'"
        raise PlanError(
            f"The plan has layers {list(hosted[0].layers)} on {' and '.join(hosted[0].workers)}, "
            f"and under {kind} this process runs none of them: training_step runs once for the "
            "whole batch, whose hidden states all go to workers. Take the coordinator from the "
            "stage, or use automatic optimization with `micro_batching='step'`."
        )

    def bring_weights_here(self, deployment: Deployment | None) -> None:
        """Read the weights that this process needs, if they are still in their checkpoint."""
        weights = weights_in_checkpoint(self.module)
        hollow = {} if deployment is None else deployment.tensors.names_of
        if weights is not None:
            for name in bring_here(self.module, weights, hollow, self.device):
                logger.debug("reading %s", name)
            weights.is_deployed = True

    def _measure_and_deploy(
        self,
        layers: Sequence[DecoderLayer],
        workers: Sequence[str],
        choice: PlanChoice,
        options: ProfilingOptions,
    ) -> Deployment | None:
        given = choice.given(len(layers), workers)
        coordinator, run = self._connected(layers, workers, options)
        with _closing_on_error(coordinator):
            try:
                measured = in_window(run.measured(), self.module.trainer, self._cuts_step)
            except NoSample as reason:
                plan = given or choice.even(len(layers), workers, str(reason))
            else:
                choice.measured, profile = measured, measured.profile
                if given is None or choice.plan == "replicated":
                    # The coordinator is no replica where a batch's step runs whole.
                    plan = choice.solve(profile, workers, replicas=self._cuts_step)
                else:
                    _warn_of_faults(given, profile)
                    plan = _shared_by_speed(given, profile)
                choice.trials = _trials_for(plan, profile, run.later)
            if plan.remote_stages:
                return self.carry_out(plan, layers, coordinator)
            rank_zero_info("no worker would make it faster, so the model runs here alone")
            coordinator.connections.keep([])
            self.fleet.end(self.deadlines)
            is_plain = not self._differs_from_plain(plan)
            return None if is_plain else self.carry_out(plan, layers, coordinator)

    def _connected(
        self, layers: Sequence[DecoderLayer], workers: Sequence[str], options: ProfilingOptions
    ) -> tuple[Coordinator, ProfilingRun]:
        """Connect to all workers; the caller must close the coordinator."""
        self._check(layers)
        coordinator = self.connect(workers, layers, _all_on_one(workers, layers))
        connections, whole_batches = coordinator.connections, not self._cuts_step
        batches = self.options.batches
        run = ProfilingRun(
            self.module, layers, connections, workers, options, whole_batches, batches
        )
        return coordinator, run

    @property
    def _cuts_step(self) -> bool:
        return self.options.cuts_step(self.module)

    def _differs_from_plain(self, plan: Plan) -> bool:
        """Whether a plan without workers differs from plain Lightning: it cuts batches that may be
        too large for the memory here, recomputes layers for the same reason, or compiles them."""
        cuts = self._cuts_step and plan.micro_batches > 1
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
            who = _holders_as_text(stage)
            rank_zero_info(f"stage {number}: {also}layers {first} to {end - 1} on {who}")
            if stage.dtype == "float16" and scaler is None:
                rank_zero_info(
                    f"stage {number} computes in float16 without loss scaling, so that gradients "
                    "below 6e-8 become zero there; precision '16-mixed' scales the loss"
                )
        what = "training_step runs on each" if self._cuts_step else "boundary only"
        rank_zero_info(
            f"each batch is cut into {in_micro_batches(plan.micro_batches)}, or into single "
            f"samples if it has fewer ({what}), at most {plan.max_in_flight} in flight"
        )
        num_whole = sum(plan.own_counts)
        is_fitting = self.module.trainer.state.fn is TrainerFn.FITTING
        if is_fitting and not self._cuts_step and num_whole and plan.micro_batches > 1:
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
    return ", ".join(f"{name} ({share_as_text(share, sum(shares))})" for name, share in pairs)


def _all_on_one(workers: Sequence[str], layers: Sequence[DecoderLayer]) -> Plan:
    """A plan whose worker holds all layers, and so imports everything that any worker may need."""
    return Plan([StagePlan(list(workers[:1]), (0, len(layers)))])


def _shared_by_speed(plan: Plan, profile: Profile) -> Plan:
    """The plan with shares by measured speed for replicas without any; equal ones if the profile
    does not fit."""
    try:
        found = with_shares(as_measured(plan, profile), profile)
    except PlanError:
        return plan  # `_warn_of_faults` has said why
    return dataclasses.replace(found, micro_batches=plan.micro_batches)


def _trials_for(
    plan: Plan, profile: Profile, later: NewcomerTrials | None
) -> NewcomerTrials | None:
    """What measures a worker that joins later, with the micro-batches of a plan."""
    size = math.ceil((profile.batch_size or 1) / plan.micro_batches)
    return None if later is None else later.at_size(size)


def _warn_of_faults(plan: Plan, profile: Profile) -> None:
    for fault in check_plan(as_measured(plan, profile), profile):
        rank_zero_warn(f"By what was measured, the plan cannot run. {fault}")


class _RunsConsole(Console):
    """Prints during a run, which a closed pipe must not end as it ends a command."""

    @override
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@rank_zero_only
def _print_verdict(solution: Solution) -> None:
    verdict = render(judge(solution))
    try:
        show(verdict, _RunsConsole)
    except (OSError, ValueError) as error:  # standard output is full or closed
        logger.warning("The plan cannot be printed: %s", error)


@contextmanager
def _closing_on_error(coordinator: Coordinator) -> Iterator[None]:
    try:
        yield
    except BaseException:
        coordinator.close()
        raise
