"""The plan: which process holds which decoder layers. Plain data, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import yaml

from .errors import PlanError, did_you_mean
from .yaml_file import check_kind, convert, read_yaml

COORDINATOR = "coordinator"

HEAD_LAYERS = range(2**20, 2**20 + 3)
"""The numbers of the head's norm, output embedding and loss among the layers of a worker: above
those of all decoder layers, and equal in every model."""

NAMED_PLANS = ("auto", "even", "replicated")
"""Plans that are made for the user."""

Dtype = Literal["float32", "bfloat16", "float16"]
WireDtype = Literal["float32", "bfloat16", "float16", "int8"]
ReplicaOptimizer = Literal["each", "split"]
Recompute = bool | Literal["layers"]
Weights = Literal["disk", "host"]

INT8_BLOCK = 64
"""The number of int8 values that share a float32 scale, which adds 6 % to their bytes."""

BYTES_PER_NUMBER: dict[WireDtype, float] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1 + 4 / INT8_BLOCK,
}
"""Bytes of a value on the wire, with its part of a scale."""


@dataclass(frozen=True)
class StagePlan:
    """One stage: consecutive decoder layers and the processes that hold them.

    Args:
        workers: The name of the worker that serves the stage, or ``["coordinator"]``. Several
            processes are replicas: each holds all layers of the stage and takes its share of the
            micro-batches. The coordinator may be one of the replicas of the first stage or of the
            last one.
        layers: Half-open range of decoder layers, ``(first, end)``.
        recompute: Keep only the stage's inputs, and run its forward again in the backward. With
            ``layers`` keep the input of each layer, and run one layer again at a time. The
            coordinator does so in both cases.
        dtype: The dtype in which the stage computes, if it differs from Lightning's ``precision``,
            such as on a device without bfloat16. Frozen weights are stored in it and come back
            rounded. Weights that train are never narrowed, since rounding would lose their steps.
        activation_dtype: The dtype to which activations are rounded on both boundaries of the
            stage, for a slow link; None to send them as they are. ``int8`` has a scale for each 64
            values. Between two stages of one process nothing is rounded.
        gradient_dtype: The dtype to which gradients are rounded on both boundaries of the stage.
        weights: Where a worker keeps the frozen weights of the layers, to read them layer by layer:
            ``disk`` in a file of the worker, ``host`` in main memory beside an accelerator. None
            keeps them on the device. Needs ``recompute: layers``.
        compile: Compile each layer by `torch.compile`; sums may then be added in another order.
        embedding: Hold the model's input embedding too: the stage receives token ids instead of
            activations and sends no gradients. Only a worker with layer 0 can hold it; else the
            coordinator does.
        head: Hold the model's final norm, output embedding and loss too: in training the stage
            returns losses instead of activations. Only a worker with the last layer can hold them;
            else the coordinator does.
        shares: For each replica, how many micro-batches of a round it takes; the sum of the shares
            is the round. A replica with share 0 is a warm spare. None for equal shares.
        optimizer: ``each`` lets every replica step with the sum of all gradients, so each has the
            optimizer's whole state. ``split`` gives each replica a part of the parameters: it
            steps these, keeps their state, and the others get the new weights. None for ``each``
            where all replicas are workers. Where the coordinator is one, None lets it step all
            parameters, and the workers get the new weights.
    """

    workers: list[str]
    layers: tuple[int, int]
    recompute: Recompute = False
    dtype: Dtype | None = None
    activation_dtype: WireDtype | None = None
    gradient_dtype: WireDtype | None = None
    compile: bool = False
    embedding: bool = False
    head: bool = False
    shares: list[int] | None = None
    optimizer: ReplicaOptimizer | None = None
    weights: Weights | None = None

    @property
    def worker(self) -> str:
        """The first process that holds this stage."""
        return self.workers[0]

    @property
    def is_local(self) -> bool:
        """Whether the stage stays with the coordinator alone."""
        return self.workers == [COORDINATOR]

    @property
    def is_hosted(self) -> bool:
        """Whether the coordinator is a replica beside workers."""
        return COORDINATOR in self.workers and not self.is_local

    @property
    def remote_workers(self) -> list[str]:
        """The processes of this stage without the coordinator."""
        return [name for name in self.workers if name != COORDINATOR]

    @property
    def present_shares(self) -> list[int]:
        """The share of each replica, with the default filled in."""
        return [1] * len(self.workers) if self.shares is None else self.shares

    @property
    def layer_indices(self) -> range:
        """The decoder layers of this stage."""
        return range(*self.layers)


@dataclass(frozen=True)
class Narrowing:
    """The dtypes for rounding activations and gradients; None to keep theirs."""

    activation_dtype: WireDtype | None = None
    gradient_dtype: WireDtype | None = None


MOST_SHARES = 4096
"""The most micro-batches of a round, after which the order in which replicas take them repeats."""

# Some steps of a run look at each of them, and no batch has so many samples.
_MOST_MICRO_BATCHES = 2**16


def most_started(max_in_flight: int, sends_token_ids: bool) -> int:
    """The most micro-batches that may have started on the coordinator.

    Where the coordinator sends only token ids, the bound is half as high again. Token ids that wait
    for the first worker take little memory, and the coordinator hears late that a micro-batch has
    ended: the message waits behind activations for the same link.
    """
    return max_in_flight + (math.ceil(max_in_flight / 2) if sends_token_ids else 0)


@dataclass(frozen=True)
class Plan:
    """The stages of a model, and the number of micro-batches.

    Args:
        stages: The stages in the order of the layers. A worker may hold any number of them; the
            coordinator may hold the first one, the last one, or both, and may be a replica of the
            first stage or of the last one that workers hold.
        micro_batches: The number of pieces into which a training batch is cut.
        in_flight: The most micro-batches between the start of their forward and the end of their
            backward on each process; None for two per process, enough to hide a round trip, and
            for one where the coordinator has all layers. The bound of the coordinator is
            `most_started`.
    """

    stages: list[StagePlan]
    micro_batches: int = 8
    in_flight: int | None = None

    @property
    def remote_stages(self) -> list[StagePlan]:
        """The stages on workers."""
        return [stage for stage in self.stages if not stage.is_local]

    @property
    def workers(self) -> list[str]:
        """The workers of the stages, each once, in the order in which the layers come to them."""
        names = (name for stage in self.remote_stages for name in stage.remote_workers)
        return list(dict.fromkeys(names))

    @property
    def has_replicas(self) -> bool:
        """Whether several processes hold the same stage."""
        return any(len(stage.workers) > 1 for stage in self.stages)

    @property
    def own_counts(self) -> tuple[int, int]:
        """How many layers the coordinator alone has before those of the workers and behind them."""
        counts, is_behind = [0, 0], False
        for stage in self.stages:
            is_behind |= not stage.is_local
            counts[is_behind] += len(stage.layer_indices) if stage.is_local else 0
        return counts[0], counts[1]

    @property
    def narrowings(self) -> list[Narrowing]:
        """The rounding at each boundary, from coordinator to first worker to last worker and back.

        If the two stages of a boundary differ, the narrower dtype holds. If the coordinator has one
        stage, its dtypes hold at both ends. Losses and their gradients are never rounded.
        """
        local = [stage for stage in self.stages if stage.is_local]
        first, last = (local[0], local[-1]) if local else (None, None)
        around = [first, *self.remote_stages, last]
        return [
            Narrowing()
            if before is not None and before.head
            else Narrowing(
                _narrower(before, after, "activation_dtype"),
                _narrower(before, after, "gradient_dtype"),
            )
            for before, after in pairwise(around)
        ]

    @property
    def stage_narrowings(self) -> list[Narrowing]:
        """The rounding of what each remote stage sends: activations downstream, gradients
        upstream."""
        return [
            Narrowing(after.activation_dtype, before.gradient_dtype)
            for before, after in pairwise(self.narrowings)
        ]

    def differs_in_shares_only(self, other: Plan) -> bool:
        """Whether another plan changes the shares of replicas alone."""
        stages = [replace(stage, shares=None) for stage in self.stages]
        others = [replace(stage, shares=None) for stage in other.stages]
        return self != other and replace(self, stages=stages) == replace(other, stages=others)

    @property
    def max_in_flight(self) -> int:
        """The most micro-batches in flight, with the default filled in.

        The default is two per process, and half as many again as pass a stage while its slowest
        replica runs one: the others would wait for it, since losses come in order. Where the
        coordinator is alone nothing waits, and a second micro-batch would only take memory.
        """
        if self.in_flight is not None:
            return self.in_flight
        if not self.workers:
            return 1
        rounds = [
            math.ceil(1.5 * sum(stage.present_shares) / min(filter(None, stage.present_shares)))
            for stage in self.stages
        ]
        return max(2 * (len(self.workers) + 1), *rounds)

    @property
    def max_started(self) -> int:
        """The most micro-batches that may have started on the coordinator."""
        sends_token_ids = any(stage.embedding for stage in self.stages)
        return most_started(self.max_in_flight, sends_token_ids)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Plan:
        """Read a plan file.

        Raises:
            PlanError: If the file cannot be read or is not a plan.
        """
        content = read_yaml(path, PlanError)
        try:
            return cls.from_dict(content)
        except PlanError as error:
            raise PlanError(f"The file {str(path)!r} is not a plan. {error}") from error

    @classmethod
    def from_dict(cls, content: Any) -> Plan:
        """Build a plan from the content of a YAML or JSON file.

        Raises:
            PlanError: If the content is not a plan.
        """
        check_kind(content, "a plan", PlanError)
        _refuse_unknown_keys(content, cls, "the plan")
        stages = content.get("stages")
        for index, stage in enumerate(stages if isinstance(stages, list) else []):
            _refuse_unknown_keys(stage, StagePlan, f"stages[{index}]")
            _check_choices(stage, f"stages[{index}]")
        return convert(content, cls, PlanError)

    def to_yaml(self, path: str | Path) -> None:
        """Write the plan as a file that a person can read and edit."""
        Path(path).write_text(self.as_yaml(), encoding="utf-8")

    def as_yaml(self) -> str:
        """The plan as the text of a plan file."""
        content = msgspec.to_builtins(self)
        for stage in content["stages"]:
            for key in [key for key, value in stage.items() if value is None]:
                del stage[key]
        return str(yaml.safe_dump(content, sort_keys=False))

    def check(self, num_layers: int, workers: Sequence[str]) -> None:
        """Refuse a plan that does not fit a model of ``num_layers`` on these workers.

        Raises:
            PlanError: With the stage, the numbers and the remedy.
        """
        self._check_counts()
        self._check_layers(num_layers)
        self._check_workers(workers)

    def _check_counts(self) -> None:
        if not 1 <= self.micro_batches <= _MOST_MICRO_BATCHES:
            raise PlanError(
                f"The number micro_batches is {self.micro_batches}; it must be 1 to "
                f"{_MOST_MICRO_BATCHES}."
            )
        if self.in_flight is not None and self.in_flight < 1:
            raise PlanError(
                f"The number in_flight is {self.in_flight}; it must be 1 or more, or left out."
            )

    def _check_layers(self, num_layers: int) -> None:
        covered = 0
        for index, stage in enumerate(self.stages):
            first, end = stage.layers
            if first >= end and not (stage.is_local and first == end):
                raise PlanError(
                    f"stages[{index}] has layers [{first}, {end}], which is empty; "
                    "the end must be above the first layer."
                )
            if first != covered:
                fault = "overlap the stage before" if first < covered else "leave a gap"
                raise PlanError(
                    f"The layers [{first}, {end}] of stages[{index}] {fault}: "
                    f"it must start at layer {covered}."
                )
            covered = end
        if covered != num_layers:
            raise PlanError(
                f"The plan covers {covered} layers and the model has {num_layers}; "
                f"let the last stage end at {num_layers}."
            )

    def _check_workers(self, workers: Sequence[str]) -> None:
        for index, stage in enumerate(self.stages):
            _check_replicas(stage, index)
            if stage.is_local and 0 < index < len(self.stages) - 1:
                raise PlanError(
                    f"stages[{index}] is on the coordinator, which can only hold the first layers, "
                    "the last ones, or both."
                )
            if stage.is_local and index > 0 and not self.remote_stages:
                raise PlanError(
                    "The coordinator holds all layers in two stages; write them as one stage, "
                    f"[{self.stages[0].layers[0]}, {stage.layers[1]}]."
                )
            _check_choices(vars(stage), f"stages[{index}]")
            _check_embedding(stage, index)
            _check_weights(stage, index)
            _check_head(stage, index, is_last=index == len(self.stages) - 1)
            if stage.is_local and stage.dtype is not None:
                raise PlanError(
                    f"The coordinator's stage has dtype {stage.dtype!r}; what the coordinator "
                    "computes in is Lightning's `precision`."
                )
            for name in stage.remote_workers:
                if name not in workers:
                    raise PlanError(
                        f"stages[{index}] is on {name!r}, which is none of the workers "
                        f"{list(workers)}; name one of them or {COORDINATOR!r}, or add it to "
                        "`workers`."
                    )
        self._check_hosted()

    def _check_hosted(self) -> None:
        remote = self.remote_stages
        hosted = [number for number, stage in enumerate(remote) if stage.is_hosted]
        if len(hosted) > 1 or any(0 < number < len(remote) - 1 for number in hosted):
            raise PlanError(
                f"The coordinator is a replica of the stages {hosted} of {len(remote)} that "
                "workers hold, and it can be one of the first or of the last of them only."
            )


class GivenPlan:
    """A plan as a user gives it.

    Args:
        plan: A Plan, or the path of its file.
        micro_batches: Pieces of a batch; None takes the plan's number.

    Raises:
        PlanError: If the file is there already and cannot be read.
    """

    def __init__(self, plan: str | Path | Plan, micro_batches: int | None = None) -> None:
        self._plan = plan
        self._micro_batches = micro_batches
        if not isinstance(plan, Plan) and Path(plan).exists():
            Plan.from_yaml(plan)  # its mistakes are told before a worker is waited for

    def read(self) -> Plan:
        """The plan.

        Raises:
            PlanError: If its file cannot be read.
        """
        plan = self._plan if isinstance(self._plan, Plan) else Plan.from_yaml(self._plan)
        return with_micro_batches(plan, self._micro_batches)

    def fitting(self, num_layers: int, workers: Sequence[str]) -> Plan:
        """The plan, for a model of so many layers and these workers.

        Raises:
            PlanError: If it does not fit, or its file cannot be read.
        """
        plan = self.read()
        try:
            plan.check(num_layers, workers)
        except PlanError as error:
            if isinstance(self._plan, Plan):
                raise
            path = str(self._plan)
            raise PlanError(f"The plan of the file {path!r} does not fit. {error}") from error
        return plan


def with_micro_batches(plan: Plan, count: int | None) -> Plan:
    """The plan with another number of micro-batches; None keeps its own."""
    return plan if count is None else replace(plan, micro_batches=count)


def _narrower(before: StagePlan | None, after: StagePlan | None, field: str) -> WireDtype | None:
    wishes = [getattr(stage, field) for stage in (before, after) if stage is not None]
    return min(wishes, key=lambda wish: math.inf if wish is None else BYTES_PER_NUMBER[wish])


def _check_choices(stage: Any, where: str) -> None:
    """Check the choices of a word in the fields of a `StagePlan`, given as a mapping."""
    again = stage.get("recompute", False)
    if not isinstance(again, bool) and again != "layers":  # 1 is not True
        raise PlanError(f"{where}.recompute is {again!r}; it must be one of true, false, layers.")
    wire = {"activation_dtype": WireDtype, "gradient_dtype": WireDtype}
    kinds = {"dtype": Dtype, "weights": Weights, **wire}
    for field, kind in kinds.items():
        dtype, known = stage.get(field), get_args(kind)
        if dtype is not None and dtype not in known:
            raise PlanError(
                f"Unknown {field} {dtype!r} in {where}; it is one of {', '.join(known)}."
            )


def _check_replicas(stage: StagePlan, index: int) -> None:
    names, shares = stage.workers, stage.shares
    if not names or len({*names}) < len(names):
        raise PlanError(
            f"stages[{index}] names the workers {names}; name at least one, and each only once."
        )
    if shares is not None and (
        len(shares) != len(names) or min(shares) < 0 or not 0 < sum(shares) <= MOST_SHARES
    ):
        raise PlanError(
            f"stages[{index}] has the shares {shares} for the workers {names}; write one number "
            f"for each, 0 or more, with a sum from 1 to {MOST_SHARES}, or leave `shares` out."
        )
    ends = [f"{end}: true" for end in ("embedding", "head") if getattr(stage, end)]
    if stage.is_hosted and (stage.optimizer == "each" or ends or stage.dtype):
        key = "optimizer: each" if stage.optimizer == "each" else "".join(ends[:1])
        key = f"dtype: {stage.dtype}" if stage.dtype else key
        raise PlanError(
            f"stages[{index}] has `{key}`, and the coordinator is one of its replicas, which keeps "
            "the embedding and the head, steps all parameters or with `optimizer: split` a part of "
            "them, and computes in Lightning's `precision`. Leave the key out, or take the "
            "coordinator from the stage."
        )


def _check_embedding(stage: StagePlan, index: int) -> None:
    if not stage.embedding:
        return
    if stage.is_local or stage.layers[0] != 0:
        raise PlanError(
            f"stages[{index}] has `embedding: true`; only a worker that holds layer 0 can have the "
            "input embedding. Elsewhere it stays with the coordinator: leave the key out."
        )
    if stage.dtype is not None:
        raise PlanError(
            f"stages[{index}] has `embedding: true` and dtype {stage.dtype!r}; the embedding is "
            "kept in the model's own dtype. Leave one of them out."
        )


def _check_weights(stage: StagePlan, index: int) -> None:
    if stage.weights is None:
        return
    given = f"stages[{index}] has `weights: {stage.weights}`"
    if COORDINATOR in stage.workers:
        raise PlanError(
            f"{given}, and the coordinator has its layers; only a worker reads weights layer by "
            "layer. Start a worker on the coordinator's machine and give it the layers, or leave "
            "the key out."
        )
    if stage.recompute != "layers":
        raise PlanError(
            f"{given}, and a graph would need the weights of all layers at once; write "
            "`recompute: layers` into the same stage."
        )
    if stage.compile:
        raise PlanError(
            f"{given} and `compile: true`; compiled layers cannot change their memory. Leave one "
            "of them out."
        )


def _check_head(stage: StagePlan, index: int, *, is_last: bool) -> None:
    if not stage.head:
        return
    if stage.is_local or not is_last:
        raise PlanError(
            f"stages[{index}] has `head: true`; only a worker that holds the last layer can have "
            "the head. Elsewhere it stays with the coordinator: leave the key out."
        )
    if stage.dtype is not None:
        raise PlanError(
            f"stages[{index}] has `head: true` and dtype {stage.dtype!r}; the head is kept in the "
            "model's own dtype. Leave one of them out."
        )


def _refuse_unknown_keys(content: Any, kind: type, where: str) -> None:
    if not isinstance(content, Mapping):
        raise PlanError(f"Expected a mapping for {where}, found {content!r}.")
    known = [field.name for field in fields(kind)]
    for key in content:
        if key not in known:
            meant = did_you_mean(str(key), *known)
            raise PlanError(
                f"Unknown key {key!r} in {where}; the keys are {', '.join(known)}.{meant}"
            )
