"""Replicas of a stage: their shares by speed, their memory, and their exchange.

stage 1   a ██ ██ ██ ██ ██ ██        9 of 16 micro-batches
          b ████ ████ ████           4
coordinator █████ █████              3, its other work beside them
          then gradients to their owners, the optimizer, and weights back
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..plan import COORDINATOR, ReplicaOptimizer
from .costs import Need
from .costs import Numbers as Amount
from .profile import Link

Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

_INSTANT = 1e-12


def fair_counts(seconds: Numbers, count: int, fixed_seconds: Numbers | float = 0.0) -> Counts:
    """How many micro-batches each replica takes so that the slowest one ends as early as possible.

    The counts are exact: the slowest replica ends at the least time t at which all together have
    run ``count`` micro-batches, so the counts are floor((t - fixed) / seconds), less the surplus. A
    replica with infinite seconds takes 0.

    Args:
        seconds: One micro-batch on each replica, with the shape (replicas, ...).
        count: Micro-batches of the step.
        fixed_seconds: Other work of each replica in the step, of the same shape.

    Returns:
        Whole numbers of the shape of ``seconds``, whose sum over the replicas is ``count``.
    """
    each = np.maximum(seconds, _INSTANT)
    fixed = np.broadcast_to(fixed_seconds, each.shape)
    # If micro-batches may be divided, all replicas end at once; a replica with longer other work
    # takes 0 of them.
    takes = np.ones(each.shape, bool)
    for _ in range(len(each)):
        speeds = np.where(takes, 1 / each, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            end = (count + (fixed * speeds).sum(axis=0)) / speeds.sum(axis=0)
        takes &= fixed <= end
    with np.errstate(invalid="ignore"):
        found = np.floor(np.where(takes, (end - fixed) / each, 0.0) * (1 - 1e-12))
    found = np.nan_to_num(found, posinf=0.0)
    # Each remaining micro-batch, fewer than replicas, goes where it ends first.
    for _ in range(len(each)):
        next_end = fixed + (found + 1) * each
        first = np.argmin(next_end, axis=0)[None]
        is_left = found.sum(axis=0) < count
        more = np.take_along_axis(found, first, axis=0) + is_left
        np.put_along_axis(found, first, more, axis=0)
    return found.astype(np.int64)


@dataclass(frozen=True)
class ReplicaPart:
    """A replica's part in its stage.

    Args:
        share: How many micro-batches of a round it runs.
        total: The micro-batches of a round, its own included, that take turns in flight.
        num: The number of replicas.
        optimizer: Who steps the parameters; None if the coordinator is a replica and steps all of
            them.
        kept_bytes: Bytes for each of its micro-batches in flight besides the layers' own.
    """

    share: int
    total: int
    num: int
    optimizer: ReplicaOptimizer | None = None
    kept_bytes: float = 0.0


def optimizer_part(name: str, optimizer: ReplicaOptimizer | None, num: int) -> float:
    """The part of a stage's parameters stepped by one of its ``num`` replicas."""
    if optimizer is None:
        return float(name == COORDINATOR)
    return 1.0 if optimizer == "each" else 1 / num


def most_in_flight(share: Any, total: Any, started: int, limit: int) -> Any:
    """The most micro-batches in flight on a replica.

    Of any micro-batches in a row, the turns give it its share, rounded up, and at most one more.

    Args:
        share: How many micro-batches of a round it runs; a number or an array.
        total: The micro-batches of a round.
        started: The bound of the plan for micro-batches started on the coordinator.
        limit: The bound of the plan for each process.
    """
    mine = np.ceil(started * share / np.maximum(total, 1)) + 1
    return np.minimum(np.minimum(mine, started), limit) * (share > 0)


def of_replica(need: Need, optimizer_part: float, kept_bytes: Amount = 0.0) -> Need:
    """The need of a replica: its part of the optimizer's state, and room for one more set of
    gradients or weights in the exchange, outside of all actions.

    Args:
        need: Its need with the whole stage alone.
        optimizer_part: Its part of the parameters in the optimizer step.
        kept_bytes: The bytes of its micro-batches in flight besides the layers.
    """
    return replace(
        need,
        optimizer=need.optimizer * optimizer_part,
        in_flight=need.in_flight + kept_bytes,
        working=np.maximum(need.working, need.gradients),
    )


LinkOf = Callable[[str, str], Link]


@dataclass(frozen=True)
class Team:
    """The replicas of one stage, as they exchange gradients and weights.

    Args:
        names: The processes.
        num_bytes: The gradients of the stage's parameters; the weights are as large.
        is_split: Whether each replica owns a part even if the coordinator is one.
    """

    names: Sequence[str]
    num_bytes: float
    is_split: bool = False

    def transfers(self) -> Iterable[tuple[str, str, float]]:
        """The sender, the receiver and the bytes of each transfer to sum all gradients on their
        owners.

        Each replica owns equally many bytes, or the coordinator owns everything.
        """
        if COORDINATOR in self.names and not self.is_split:
            for name in self.names:
                if name != COORDINATOR:
                    yield name, COORDINATOR, self.num_bytes
            return
        for source in self.names:
            for target in self.names:
                if source != target:
                    yield source, target, self.num_bytes / len(self.names)


def exchange_seconds(teams: Sequence[Team], link_of: LinkOf) -> float:
    """The seconds in which replicas exchange gradients, and then sums or new weights.

    Every process sends one transfer and receives one transfer at a time, and a shared medium
    carries one.
    """
    there = [transfer for team in teams for transfer in team.transfers()]
    back = [(target, source, num_bytes) for source, target, num_bytes in there]
    return _phase_seconds(there, link_of) + _phase_seconds(back, link_of)


def _phase_seconds(transfers: Iterable[tuple[str, str, float]], link_of: LinkOf) -> float:
    busy: defaultdict[tuple[str, str], float] = defaultdict(float)
    latency = 0.0
    for source, target, num_bytes in transfers:
        if num_bytes == 0:
            continue
        link = link_of(source, target)
        seconds = num_bytes / link.bytes_per_second
        latency = max(latency, link.latency_seconds)
        busy["from", source] += seconds
        busy["to", target] += seconds
        if link.shared:
            busy["over", link.shared] += seconds
    return max(busy.values(), default=0.0) + latency


def whole_counts(seconds: Numbers, count: int, fixed_seconds: Numbers) -> Counts:
    """The `fair_counts` with at least one micro-batch for each replica; there must be enough
    micro-batches."""
    return 1 + fair_counts(seconds, count - len(seconds), fixed_seconds + seconds)


def shares_of(seconds: Sequence[float], count: int, fixed_seconds: Sequence[float]) -> list[int]:
    """Shares of ``count`` micro-batches by `whole_counts`; as equal as possible if the seconds of a
    replica are unknown, or micro-batches are too few."""
    num = len(seconds)
    if count < num or not all(map(math.isfinite, seconds)):
        return [math.ceil((count - index) / num) for index in range(num)]
    found: list[int] = whole_counts(np.array(seconds), count, np.array(fixed_seconds)).tolist()
    return found
