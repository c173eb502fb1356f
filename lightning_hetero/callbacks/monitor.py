"""StageMonitor: logs every process's use of its time to the run's own loggers.

Its metrics are computed from the totals of all processes, and from the floating-point operations of
the model's matrices per token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from typing_extensions import override

from .._lightning import MisconfigurationException, pl
from ..coordinator.deployment import Deployment
from ..coordinator.lost_workers import lost_between, seconds_of
from ..coordinator.telemetry import Telemetry
from ..model.stored import format_of
from ..pipeline.optimizer import gradient_norms, gradients_here, total_norm
from ..pipeline.placement import Placement
from ..plan import COORDINATOR
from ..planner.feasibility import as_measured
from ..planner.profile import Profile
from ..protocol.fields import ACTIONS, SpanKind, Totals
from ..telemetry.recorded_step import bound_seconds


def deployment_of(trainer: pl.Trainer) -> Deployment | None:
    """The layers on workers; None if the model runs on this process alone."""
    return cast("Deployment | None", getattr(trainer.strategy, "deployment", None))


def profile_of(trainer: pl.Trainer) -> Profile | None:
    """The profile measured before the run, if there is one."""
    choice = getattr(trainer.strategy, "plan_choice", None)
    return cast("Profile | None", getattr(choice, "profile", None))


def process_names(deployment: Deployment) -> dict[int, str]:
    """The names of the processes with layers, by their numbers, and the coordinator's."""
    workers = deployment.coordinator.connections.workers
    return {0: COORDINATOR, **{worker.number: worker.name for worker in workers}}


def warn_of_no_stages(trainer: pl.Trainer, callback: pl.Callback) -> None:
    """Warn if all layers run in this process."""
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
        names: The names of the asked processes, by their numbers.
        began_seconds: The begin of the time asked for.
        asked_seconds: When the question was asked.
    """

    number: int
    names: Mapping[int, str]
    step: int
    began_seconds: float
    asked_seconds: float
    norms: Mapping[str, float]


class StageMonitor(pl.Callback):
    """Logs the time, the device and the traffic of every process, and the speed of the pipeline.

    The values are means over the steps since they were last logged. N in ``stage/N`` is the number
    of a process: 0 is the coordinator, and the workers have the numbers from 1 on in the order of
    their layers in the first plan. A worker keeps its number when layers move; without layers it is
    not logged. The values of a worker with several stages, and of a coordinator with the first and
    the last layers, are for all its layers together. If each worker has one stage, N is the number
    of the stage.

    If a stage is on several processes, each of them is logged by itself. Its times and tokens are
    for its own micro-batches, and its gradient norm is for the whole sums. Its ``optimizer_ms``
    includes the exchange of gradients with the others.

    Unknown values are left out:

    - ``stage/N/busy_share``, ``transferring_share``, ``waiting_share``: the shares of the step for
      computing, for packing and unpacking messages, and for idle waiting. They add up to 1, on the
      coordinator together with ``other_share``: data, Lightning, other callbacks.
    - ``stage/N/bubble_share``: 1 less ``busy_share``. ``stage/N/sending_share``: the share of the
      step with sending links, also while the process computed.
    - ``stage/N/forward_ms``, ``backward_ms``, ``loss_ms`` of a micro-batch, ``optimizer_ms`` of a
      step; ``stage/N/tokens_per_second``: the speed of the process if it never had to wait.
    - ``stage/N/queue_depth``: the mean number of ready actions at each choice of an action.
    - ``stage/N/sent_bytes``, ``received_bytes`` of a step; ``from_replicas_bytes``: gradients and
      weights of a step from other replicas of the stage to the process. If the coordinator is a
      replica, its weights for workers do not count.
    - ``stage/N/memory_bytes``, ``memory_peak_bytes``; ``temperature_celsius``, ``power_watts``;
      ``gradient_norm``.
    - ``pipeline/step_seconds``, ``tokens_per_second`` (over all the time, also between steps),
      ``bubble_share``; ``bottleneck_stage``: the N of the process that computes longest.
    - ``pipeline/bound_share``: the seconds of a step at the sum of the devices' measured speeds,
      divided by the measured seconds of the step.
    - ``recovery/losses``: how many workers were lost since the last values; ``recovery/seconds``:
      how long a worker was away or repeated the work of a lost one. Both only with
      ``HeteroPipelineStrategy(recovery=...)``; they are sums and not means. A lost worker does not
      have other values then, because the process in its place knows only a part of the time.
    - ``pipeline/model_flops_utilization``: model FLOPs per second over the sum of the peaks, as
      Chowdhery et al. (2022), "PaLM", appendix B, define it, with the FLOPs of
      `flops_per_token`: 6 N per token if all N values train.

    Args:
        every_n_steps: The number of optimizer steps from one log to the next; by default the
            Trainer's ``log_every_n_steps``.
        gradient_norms: Whether to log the gradient norm of each process. This takes a round trip.
        peak_flops: The peak of each device in FLOPs per second: one number for all devices, or a
            number for each device, the coordinator's too, by the names in plans.
        flops_per_token: The FLOPs of the model for one token; by default derived from its matrices.

    Raises:
        MisconfigurationException: If the Trainer does not have a logger, or a number is out of
            range.
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
                f"The argument every_n_steps is {every_n_steps}; it must be 1 or more."
            )
        peaks = peak_flops.values() if isinstance(peak_flops, Mapping) else [peak_flops]
        if any(peak is not None and not 0 < peak < math.inf for peak in peaks):
            raise MisconfigurationException(
                f"The argument peak_flops is {peak_flops}; give FLOPs a second, such as 989e12."
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
            Telemetry.of(deployment.coordinator).start_recording(_WHO, keeps_spans=False)
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
            number = Telemetry.of(deployment.coordinator).ask_records(with_spans=False)
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
            Telemetry.of(deployment.coordinator).stop_recording(_WHO)

    def _is_due(self, trainer: pl.Trainer, steps_to_come: int) -> bool:
        every: int = self._every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        step = trainer.global_step + steps_to_come
        return step > self._last_step and every > 0 and step // every > self._last_step // every

    def _log_answers(self, trainer: pl.Trainer, deployment: Deployment) -> None:
        asked, self._asked = self._asked, None
        if asked is None:
            return
        records = Telemetry.of(deployment.coordinator).records(asked.number)
        totals = {number: record.totals for number, record in records.items()}
        losses = deployment.coordinator.replacements.losses
        # Also a worker lost before its answer.
        lost = lost_between(losses or (), asked.began_seconds, math.inf)
        replaced = {loss.worker.number for loss in lost}
        window = MonitoredSteps(
            {
                n: difference(t, self._before.get(n, Totals()))
                for n, t in totals.items()
                if n not in replaced
            },
            asked.asked_seconds - asked.began_seconds,
        )
        # A worker without layers may get some again.
        self._before |= totals
        if window.is_empty:
            return
        found = {**asked.norms}
        for number in window.totals:
            metrics = process_metrics(window, number) | records[number].health
            found |= _named(f"stage/{number}", metrics)
        if losses is not None:
            between = asked.began_seconds, asked.asked_seconds
            found["recovery/losses"] = float(len(lost_between(losses, *between)))
            found["recovery/seconds"] = seconds_of(losses, *between)
        found |= _named("pipeline", pipeline_metrics(window))
        found |= _named("pipeline", self._compared(trainer, deployment, window, asked.names))
        for logger in trainer.loggers:
            logger.log_metrics(found, step=asked.step)
            logger.save()

    def _compared(
        self,
        trainer: pl.Trainer,
        deployment: Deployment,
        window: MonitoredSteps,
        names: Mapping[int, str],
    ) -> dict[str, float]:
        """The comparison of the run with the speeds of its devices, if these are known."""
        found = {}
        profile, plan = profile_of(trainer), deployment.plan
        if profile is not None and profile.batch_size is not None:
            plan = as_measured(plan, profile)
            num_batches = window.totals[0].num_microbatches / plan.micro_batches
            found["bound_share"] = num_batches * bound_seconds(plan, profile) / window.step_seconds
        peak = self._peak([*names.values()])
        if peak is not None:
            each = self._flops_per_token or flops_per_token(trainer.lightning_module)
            speed = each * window.num_tokens / window.wall_seconds
            found["model_flops_utilization"] = speed / peak
        return found

    def _peak(self, names: list[str]) -> float | None:
        """The sum of the devices' peaks, if all are known."""
        peaks = self._peak_flops
        if isinstance(peaks, Mapping):
            return sum(peaks[name] for name in names) if set(names) <= set(peaks) else None
        return None if peaks is None else peaks * len(names)


def _named(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def _gradient_norms(module: pl.LightningModule, deployment: Deployment) -> dict[str, float]:
    """The norm of the gradients on each process, by the metric's name."""
    number_of = {name: number for number, name in process_names(deployment).items()}
    placement = Placement.of(deployment.plan)
    norms: dict[int, list[float]] = {0: gradient_norms(gradients_here(module.parameters()))}
    for name, norm in deployment.coordinator.optimizers.gradient_norms().items():
        for holder in placement.holders(int(name.partition(".")[0])):
            norms.setdefault(number_of[holder], []).append(norm)
    if placement.hosted is not None:
        # The sums of all replicas are in the gradients here.
        held = [deployment.layers[number].module for number in placement.hosted.layers]
        sums = [p.grad for layer in held for p in layer.parameters() if p.grad is not None]
        for name in placement.hosted.workers:
            norms.setdefault(number_of[name], []).extend(gradient_norms(sums))
    return {f"stage/{number}/gradient_norm": total_norm(found) for number, found in norms.items()}


@dataclass(frozen=True)
class MonitoredSteps:
    """The work of all processes between two moments.

    Args:
        totals: The totals by the number of the process; 0 is the coordinator.
        wall_seconds: The time from one moment to the other, including the time between steps.
    """

    totals: Mapping[int, Totals]
    wall_seconds: float

    @property
    def num_steps(self) -> int:
        """Optimizer steps, summed over all optimizers."""
        return max(totals.num_steps for totals in self.totals.values())

    @property
    def num_tokens(self) -> int:
        """Tokens: positions of the hidden states on their way through the stages."""
        return self.totals[0].num_tokens

    @property
    def step_seconds(self) -> float:
        """The time of all steps together; each step ends when its last process ends."""
        return max(totals.step_seconds for totals in self.totals.values())

    @property
    def is_empty(self) -> bool:
        """Whether there was no training."""
        return self.num_tokens == 0 or self.step_seconds <= 0

    def tokens_of(self, process: int) -> float:
        """The tokens of a process. With replicas: of its own micro-batches, with the mean number of
        tokens each.
        """
        handed_over = self.totals[0].num_microbatches
        if process == 0 or not handed_over:
            return self.num_tokens
        return self.num_tokens * self.totals[process].num_microbatches / handed_over

    def computing_seconds(self, process: int) -> float:
        """A process's time for its actions."""
        return sum(self.totals[process].seconds.get(kind, 0.0) for kind in ACTIONS)


def difference(after: Totals, before: Totals) -> Totals:
    """The growth of the totals between two moments."""
    names = Totals.__struct_fields__
    return Totals(**{name: _added(getattr(after, name), getattr(before, name)) for name in names})


def _added(after: Any, before: Any) -> Any:
    """The growth of a number, or of each number of a mapping."""
    if isinstance(after, Mapping):
        return {key: _added(value, before.get(key, 0)) for key, value in after.items()}
    return max(type(after)(0), after - before)


def process_metrics(window: MonitoredSteps, process: int) -> dict[str, float]:
    """The metrics of one process; their names do not contain its number.

    Computing, transferring and waiting add up to the step. The process with the first optimizer
    step waits for the others. The time between two messages counts as transferring on a worker, and
    as ``other_share`` on the coordinator, where Lightning uses it around the micro-batches.
    """
    totals, whole = window.totals[process], window.step_seconds
    busy = window.computing_seconds(process)
    packing = sum(totals.seconds.get(kind, 0.0) for kind in ("take", "pack"))
    waiting = totals.seconds.get("wait", 0.0)
    between = max(0.0, totals.step_seconds - busy - packing - waiting)
    waiting += whole - totals.step_seconds
    found = {
        "busy_share": busy / whole,
        "transferring_share": (packing if process == 0 else packing + between) / whole,
        "waiting_share": waiting / whole,
        "bubble_share": 1 - busy / whole,
        "sending_share": totals.sending_seconds / whole,
    }
    if process == 0:
        found["other_share"] = between / whole
    if busy > 0:
        found["tokens_per_second"] = window.tokens_of(process) / busy
    if totals.num_choices > 0:
        found["queue_depth"] = totals.num_ready / totals.num_choices
    return found | _of_one(totals, window.num_steps)


def _of_one(totals: Totals, num_steps: int) -> dict[str, float]:
    """The metrics per micro-batch and per step."""
    found = {}
    kinds: tuple[SpanKind, ...] = ("forward", "backward", "loss")
    for kind in kinds:
        if totals.counts.get(kind, 0) > 0 and totals.num_microbatches > 0:
            found[f"{kind}_ms"] = 1e3 * totals.seconds[kind] / totals.num_microbatches
    if num_steps > 0:
        found["optimizer_ms"] = 1e3 * totals.seconds.get("optimizer", 0.0) / num_steps
        found["sent_bytes"] = totals.sent_bytes / num_steps
        for name in ("received_bytes", "from_replicas_bytes"):
            if getattr(totals, name) > 0:
                found[name] = getattr(totals, name) / num_steps
    return found


def pipeline_metrics(window: MonitoredSteps) -> dict[str, float]:
    """The metrics of all processes together."""
    busy_seconds = sum(map(window.computing_seconds, window.totals))
    found = {
        "tokens_per_second": window.num_tokens / window.wall_seconds,
        "bubble_share": 1 - busy_seconds / (len(window.totals) * window.step_seconds),
        "bottleneck_stage": float(max(window.totals, key=window.computing_seconds)),
    }
    if window.num_steps > 0:
        found["step_seconds"] = window.step_seconds / window.num_steps
    return found


def flops_per_token(root: nn.Module) -> float:
    """Operations of the forward and backward of one token.

    The forward takes 2 N, the gradients of the activations take 2 N, and the gradients of the N'
    training values take 2 N'. If all values train, the sum is the 6 N of Kaplan et al. (2020),
    "Scaling Laws for Neural Language Models", section 2.1.

    N counts the values of all multiplying matrices. Embeddings do not count, and the experts of a
    mixture count by a token's share of them. As in the paper, the part of attention with growth in
    the context does not count.
    """
    share = _share_of_experts(root)
    total = trained = 0.0
    for name, count, is_trained in _matrices(root):
        used = count * (share if ".experts." in f".{name}." else 1.0)
        total += used
        trained += used * is_trained
    return 4 * total + 2 * trained


def _matrices(root: nn.Module) -> Iterator[tuple[str, int, bool]]:
    """For each matrix: its name, its number of values, and whether it trains. A common matrix of
    the head and the embedding counts once, in the head.
    """
    for prefix, module in root.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            count = parameter.numel()
            if (stored := format_of(module, leaf)) is not None:
                count = math.prod(stored.describe(module, leaf).shape)
            elif parameter.ndim < 2:
                continue
            yield f"{prefix}.{leaf}", count, parameter.requires_grad


def _share_of_experts(root: nn.Module) -> float:
    """One token's share of the experts, read from the model's config."""
    for module in root.modules():
        config = getattr(module, "config", None)
        chosen = getattr(config, "num_experts_per_tok", None)
        count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
        if chosen and count:
            return float(chosen) / float(count)
    return 1.0
