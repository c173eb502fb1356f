"""StageMonitor: what every process does with its time, in the run's own loggers."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from ..coordinator.deployment import Deployment
from ..coordinator.losses import Loss, lost_between, seconds_of
from ..pipeline.optimizer import gradient_norms, gradients_here, total_norm
from ..pipeline.placement import Placement
from ..plan import COORDINATOR
from ..planner.profile import Profile
from ..protocol.fields import Totals
from ..telemetry.metrics import (
    Window,
    difference,
    flops_per_token,
    pipeline_metrics,
    process_metrics,
)
from ..telemetry.step import bound_seconds


def deployment_of(trainer: pl.Trainer) -> Deployment | None:
    """The layers on workers; None where the model runs on this process alone."""
    return cast("Deployment | None", getattr(trainer.strategy, "deployment", None))


def profile_of(trainer: pl.Trainer) -> Profile | None:
    """The profile that was measured before the run, if there is one."""
    choice = getattr(trainer.strategy, "plan_choice", None)
    return cast("Profile | None", getattr(choice, "profile", None))


def process_names(deployment: Deployment) -> dict[int, str]:
    """The names of the processes that have layers, by their numbers, and the coordinator's."""
    workers = deployment.coordinator.connections.workers
    return {0: COORDINATOR, **{worker.number: worker.name for worker in workers}}


def warn_of_no_stages(trainer: pl.Trainer, callback: pl.Callback) -> None:
    """Warn if no stage is on a worker."""
    if deployment_of(trainer) is None:
        rank_zero_warn(
            f"{type(callback).__name__} has nothing to look at: the model runs on one process, "
            "without stages on workers."
        )


def run_folder(trainer: pl.Trainer, dirpath: Path | None) -> Path:
    """The folder for a run's files; by default, the folder of its logs."""
    return dirpath or Path(trainer.log_dir or trainer.default_root_dir)


_WHO = "monitor"


@dataclass(frozen=True)
class _Asked:
    """A question to all processes, and the values to log with their answers.

    Args:
        number: The number of the question.
        names: The names of the processes that were asked, by their numbers.
        began_seconds: When the time begins that the question is about.
        asked_seconds: When the question was asked.
    """

    number: int
    names: Mapping[int, str]
    step: int
    began_seconds: float
    asked_seconds: float
    norms: Mapping[str, float]

    @property
    def wall_seconds(self) -> float:
        """The time that the question is about."""
        return self.asked_seconds - self.began_seconds


class StageMonitor(pl.Callback):
    """Logs the time, the device and the traffic of every process, and the speed of the pipeline.

    The values are means over the steps since they were last logged. N in ``stage/N`` is the number
    of a process: 0 is the coordinator, and the workers have the numbers from 1 on in the order in
    which the layers come to them in the first plan. A worker keeps its number when layers move;
    without layers it logs nothing. The values of a worker with several stages, and those of a
    coordinator with the first and the last layers, are of all its layers together. If each worker
    has one stage, N is the number of the stage.

    Where a stage is on several processes, each of them is logged by itself. Its times and tokens
    are those of the micro-batches that it runs, and its gradient norm is that of the whole sums.
    Its ``optimizer_ms`` includes the exchange of gradients with the others.

    Unknown values are left out:

    - ``stage/N/busy_share``, ``transferring_share``, ``waiting_share``: the shares of the step in
      which the process computes, packs and unpacks messages, and has nothing to do. They add up to
      1, on the coordinator together with ``other_share``: data, Lightning, other callbacks.
    - ``stage/N/bubble_share``: 1 less ``busy_share``. ``stage/N/sending_share``: the share of the
      step in which the links of the process were sending, also while it computed.
    - ``stage/N/forward_ms``, ``backward_ms``, ``loss_ms`` of a micro-batch, ``optimizer_ms`` of a
      step; ``stage/N/tokens_per_second``: the speed of the process if it never had to wait.
    - ``stage/N/queue_depth``: the mean number of actions that were ready when one was chosen.
    - ``stage/N/sent_bytes``, ``received_bytes`` of a step; ``from_replicas_bytes``: gradients and
      weights of a step that other replicas of the stage have sent to the process. Where the
      coordinator is a replica, the weights that it sends to workers are not counted.
    - ``stage/N/memory_bytes``, ``memory_peak_bytes``; ``temperature_celsius``, ``power_watts``;
      ``gradient_norm``.
    - ``pipeline/step_seconds``, ``tokens_per_second`` (of all the time that passed, also between
      steps), ``bubble_share``; ``bottleneck_stage``: the N of the process that computes longest.
    - ``pipeline/bound_share``: the seconds of a step at the sum of the devices' measured speeds,
      divided by the seconds that the step took.
    - ``recovery/losses``: how many workers were lost since the last values; ``recovery/seconds``:
      how long a worker was away or repeated the work of a lost one. Both only with
      ``HeteroPipelineStrategy(recovery=...)``; they are sums and no means. A worker that was lost
      has no other values then, as the process in its place knows a part of the time only.
    - ``pipeline/model_flops_utilization``: model FLOPs per second over the sum of the peaks, as
      Chowdhery et al. (2022), "PaLM", appendix B, define it, with the FLOPs of
      `flops_per_token`: 6 N per token if all N values train.

    Args:
        every_n_steps: The number of optimizer steps from one log to the next; None for the
            Trainer's ``log_every_n_steps``.
        gradient_norms: Whether to log the gradient norm of each process, which takes a round trip.
        peak_flops: The peak of each device in FLOPs per second: one number for all devices, or a
            number for each device, the coordinator's too, by the names that plans use.
        flops_per_token: The FLOPs of the model for one token; None to derive them from its
            matrices.

    Raises:
        MisconfigurationException: If the Trainer has no logger, or a number is out of range.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        gradient_norms: bool = False,
        peak_flops: float | Mapping[str, float] | None = None,
        flops_per_token: float | None = None,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise MisconfigurationException(
                f"every_n_steps is {every_n_steps}; it must be 1 or more."
            )
        peaks = peak_flops.values() if isinstance(peak_flops, Mapping) else [peak_flops]
        if any(peak is not None and not 0 < peak < math.inf for peak in peaks):
            raise MisconfigurationException(
                f"peak_flops is {peak_flops}; give FLOPs a second, such as 989e12."
            )
        self._every_n_steps = every_n_steps
        self._gradient_norms = gradient_norms
        self._peak_flops = peak_flops
        self._flops_per_token = flops_per_token
        self._before: dict[int, Totals] = {}
        self._since_seconds = 0.0
        self._last_step = 0
        self._asked: _Asked | None = None
        self._norms: dict[str, float] = {}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that the Trainer has a logger."""
        if stage == "fit" and not trainer.loggers:
            raise MisconfigurationException(
                "StageMonitor has nowhere to log to: the Trainer has no logger; give it one, such "
                "as `CSVLogger('logs')`, or take the callback away."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have every process add up the seconds and bytes of its work."""
        self._before, self._asked, self._norms = {}, None, {}
        self._last_step = trainer.global_step
        warn_of_no_stages(trainer, self)
        deployment = deployment_of(trainer)
        if deployment is not None:
            deployment.coordinator.telemetry.start_recording(_WHO, keeps_spans=False)
        self._since_seconds = time.perf_counter()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        """Read the gradient norms, if they are wanted, while the gradients exist."""
        deployment = deployment_of(trainer)
        if self._gradient_norms and deployment is not None and self._is_due(trainer, 1):
            self._norms = _gradient_norms(pl_module, deployment)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_args: Any, **_kwargs: Any) -> None:
        """Log the last answers, and ask all processes for their sums if it is time."""
        deployment = deployment_of(trainer)
        if deployment is None:
            return
        self._log_answers(trainer, deployment)
        if self._is_due(trainer, 0):
            now = time.perf_counter()
            number = deployment.coordinator.telemetry.ask_records(with_spans=False)
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
            names = process_names(deployment)
            self._asked = _Asked(number, names, step, self._since_seconds, now, self._norms)
            self._since_seconds, self._last_step = now, trainer.global_step

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the last answers."""
        deployment = deployment_of(trainer)
        if deployment is not None:
            self._log_answers(trainer, deployment)
            deployment.coordinator.telemetry.stop_recording(_WHO)

    def _is_due(self, trainer: pl.Trainer, steps_to_come: int) -> bool:
        every: int = self._every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        step = trainer.global_step + steps_to_come
        return step > self._last_step and every > 0 and step // every > self._last_step // every

    def _log_answers(self, trainer: pl.Trainer, deployment: Deployment) -> None:
        asked, self._asked = self._asked, None
        if asked is None:
            return
        records = deployment.coordinator.telemetry.records(asked.number)
        totals = {number: record.totals for number, record in records.items()}
        losses = _losses_of(deployment)
        # Also one that was lost before it had answered.
        lost = lost_between(losses or (), asked.began_seconds, math.inf)
        replaced = {loss.worker.number for loss in lost}
        window = Window(
            {
                n: difference(t, self._before.get(n, Totals()))
                for n, t in totals.items()
                if n not in replaced
            },
            asked.wall_seconds,
        )
        # A worker that has no layers at present may get some again.
        self._before |= totals
        if window.is_empty:
            return
        found = {**asked.norms}
        for number in window.totals:
            metrics = process_metrics(window, number) | records[number].health
            found |= _named(f"stage/{number}", metrics)
        if losses is not None:
            found |= _named("recovery", _recovered(losses, asked))
        found |= _named("pipeline", pipeline_metrics(window))
        found |= _named("pipeline", self._compared(trainer, deployment, window, asked.names))
        for logger in trainer.loggers:
            logger.log_metrics(found, step=asked.step)
            logger.save()

    def _compared(
        self,
        trainer: pl.Trainer,
        deployment: Deployment,
        window: Window,
        names: Mapping[int, str],
    ) -> dict[str, float]:
        """The metrics that compare the run with the speeds of its devices, if these are known."""
        found = {}
        profile, plan = profile_of(trainer), deployment.plan
        if profile is not None and profile.batch_size is not None:
            num_batches = window.totals[0].num_microbatches / plan.micro_batches
            found["bound_share"] = num_batches * bound_seconds(plan, profile) / window.step_seconds
        peak = self._peak([*names.values()])
        if peak is not None:
            each = self._flops_per_token or flops_per_token(trainer.lightning_module)
            speed = each * window.num_tokens / window.wall_seconds
            found["model_flops_utilization"] = speed / peak
        return found

    def _peak(self, names: list[str]) -> float | None:
        """The sum of the devices' peaks; None if one is not known."""
        peaks = self._peak_flops
        if isinstance(peaks, Mapping):
            return sum(peaks[name] for name in names) if set(names) <= set(peaks) else None
        return None if peaks is None else peaks * len(names)


def _losses_of(deployment: Deployment) -> list[Loss] | None:
    """The workers that the run has lost; None without recovery."""
    replacements = deployment.coordinator.replacements
    return None if replacements is None else replacements.losses


def _recovered(losses: Sequence[Loss], asked: _Asked) -> dict[str, float]:
    between = asked.began_seconds, asked.asked_seconds
    return {
        "losses": float(len(lost_between(losses, *between))),
        "seconds": seconds_of(losses, *between),
    }


def _named(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def _gradient_norms(module: pl.LightningModule, deployment: Deployment) -> dict[str, float]:
    """The norm of the gradients on each process, by the metric's name."""
    number_of = {name: number for number, name in process_names(deployment).items()}
    placement = Placement.of(deployment.plan)
    norms: dict[int, list[float]] = {0: gradient_norms(gradients_here(module.parameters()))}
    for name, norm in deployment.coordinator.training.gradient_norms().items():
        for holder in placement.holders(int(name.partition(".")[0])):
            norms.setdefault(number_of[holder], []).append(norm)
    if placement.hosted is not None:
        # The sums of all replicas are in the gradients here.
        held = [deployment.layers[number].module for number in placement.hosted.layers]
        sums = [p.grad for layer in held for p in layer.parameters() if p.grad is not None]
        for name in placement.hosted.workers:
            norms.setdefault(number_of[name], []).extend(gradient_norms(sums))
    return {f"stage/{number}/gradient_norm": total_norm(found) for number, found in norms.items()}
