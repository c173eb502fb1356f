"""Runs over workers that are killed at random moments, in one process: what is drawn in each.

when things happen      each delivery, action and piece of a snapshot, by chance
where a worker is lost  behind any event after the layers were sent; one to three of them
how old the snapshot is none yet, whole, or under way
who takes the place     the next process, a spare, another machine beside its own layers
what else breaks        connections, which come back
what follows            the machines that are left share the layers
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_hetero import (
    HeteroPipelineStrategy,
    Plan,
    Recovery,
    RecoveryCallback,
    StagePlan,
)
from lightning_hetero.callbacks import StageWeightAveraging
from lightning_hetero.errors import HeteroError, MoveUndone
from lightning_hetero.planner.membership import in_place, left_by_bytes
from lightning_hetero.planner.replan import PlanChange
from lightning_hetero.replan.membership import Membership

from ..models import TinyModule, fit, loader
from .session_net import Net

WORKERS = ["127.0.0.1:1001", "127.0.0.1:1002", "127.0.0.1:1003"]
A, B, C = WORKERS
SPARE = "127.0.0.1:1009"
PLANS = {
    "a line": [(["coordinator"], 1), ([A], 1), ([B], 1), ([C], 1)],
    "turn by turn": [([A], 1), ([B], 1), ([A], 1), ([B], 1)],
    "with the coordinator between": [([A], 2), ([B], 1), (["coordinator"], 1)],
    "replicas": [([A, B], 4)],
    "split replicas": [([A, B, C], 4)],
    "replicas in a line": [([A], 1), ([B, C], 2), (["coordinator"], 1)],
    "with the coordinator as a replica": [([A], 1), ([B, "coordinator"], 3)],
}
# Where the layers are from the second batch on, and from the third one on.
MOVES = {
    1: [([B], 3), ([A], 1)],
    2: [(["coordinator"], 1), ([A], 1), ([B], 2)],
}
# The stages whose replicas each step a part of the parameters.
SPLIT = {"split replicas"}
# Where the coordinator is a replica, the strategy refuses these.
REFUSED = {
    ("with the coordinator as a replica", each)
    for each in ("by hand", "by hand, twice", "whole batches")
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.05},
    "accumulated": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    # Backwards of its batches are on their way while the next one begins.
    "one window": {"accumulate_grad_batches": 4},
    "evaluated": {"val_check_interval": 1, "limit_val_batches": 1},
    "averaged": {"val_check_interval": 2, "limit_val_batches": 1},
    "by hand": {},
    "by hand, twice": {},
    "whole batches": {"gradient_clip_val": 0.05},
    "frozen": {},
    "generating": {},
    "loaded": {},
}


class Moving(TinyModule):
    """Moves layers before some batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx in MOVES:
            strategy: Any = self.trainer.strategy
            strategy.move_layers(plan_of(MOVES[batch_idx]))


class Staying(Moving):
    """Trains on where the layers are if they do not move."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with suppress(MoveUndone):
            super().on_train_batch_start(batch, batch_idx)


class MovingFrozen(Moving):
    """Trains only the vectors, so that the matrices are in no snapshot."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for parameter in self.model.model.layers.parameters():
            parameter.requires_grad_(parameter.ndim == 1)


class MovingLoaded(MovingFrozen):
    """Replaces all weights before they move, also those that do not train."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.load_state_dict({name: 1.5 * t for name, t in self.state_dict().items()})
        super().on_train_batch_start(batch, batch_idx)


class ByHand(TinyModule):
    """Looks at norms, and adds up the gradients of two batches."""

    automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss: Tensor = self.model(**batch).loss
        self.manual_backward(loss)
        strategy: Any = self.trainer.strategy
        self.norms = strategy.grad_norms()
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss


class Twice(TinyModule):
    """Takes two steps in each batch, and drops the gradients between forward and backward."""

    automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            loss: Tensor = self.model(**batch).loss
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


class Freezing(TinyModule):
    """Freezes other parameters in each batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for number, parameter in enumerate(self.model.model.layers.parameters()):
            parameter.requires_grad_(number % 3 != batch_idx % 3)


class Generating(TinyModule):
    """Generates with key-value caches behind each batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.eval()
        with torch.no_grad():
            found = self.model.generate(
                batch["input_ids"][:1, :4], max_new_tokens=3, do_sample=False, pad_token_id=0
            )
        self.train()
        self.losses += map(float, found[0])


class Loading(TinyModule):
    """Replaces weights and the optimizer's state in the middle of the run."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        if batch_idx == 1:
            self.kept = self.state_dict(), optimizer.state_dict()
        if batch_idx == 3:
            self.load_state_dict(self.kept[0])
            optimizer.load_state_dict(self.kept[1])


MODULES: dict[str, type[TinyModule]] = {
    "by hand": ByHand,
    "by hand, twice": Twice,
    "moving": Moving,
    "staying": Staying,
    "moving frozen": MovingFrozen,
    "moving loaded": MovingLoaded,
    "moving averaged": Moving,
    "frozen": Freezing,
    "generating": Generating,
    "loaded": Loading,
}


# A run with recovery has so many more events before its first batch, and some to spare.
_MORE_EVENTS = 40
# The cases of the product above that are tried.
CASES = [case for case in product(PLANS, OPTIONS) if case not in REFUSED]
MOVING = ("moving", "moving frozen", "moving loaded", "moving averaged")
MOVING_PLANS = (
    "a line",
    "turn by turn",
    "replicas in a line",
    "with the coordinator as a replica",
)
MOVING_CASES = [*product(MOVING_PLANS, MOVING)]


@dataclass(frozen=True)
class Result:
    """What a run has left, and how many events it had.

    Args:
        losses: Of each step.
        weights: Of the whole model.
        num_events: All of the run.
        num_events_before: Those before its first batch.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    num_events: int
    num_events_before: int


class Beginning(Callback):
    """Notes how much had happened when the first batch began."""

    def __init__(self, net: Net) -> None:
        self._net = net
        self.num_events = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.num_events = self._net.num_events


@dataclass(frozen=True)
class Faults:
    """What breaks in a run, and how the run gets over it.

    Args:
        every_seconds: The time between two snapshots.
        has_spare: Whether a worker is idle.
        log_gib: What may be kept until a snapshot is taken earlier.
        kills: By the number of the event before it, the address whose sessions are killed.
        cuts: The numbers of the events before which a connection is cut.
        gone: The addresses where nobody serves again.
        shares: Whether the machines that are left share the layers of lost ones.
    """

    every_seconds: float = 0.0
    has_spare: bool = True
    log_gib: float = 4.0
    kills: Mapping[int, str] = field(default_factory=dict)
    cuts: Set[int] = frozenset()
    gone: Set[str] = frozenset()
    shares: bool = False

    @classmethod
    def drawn(cls, plan: str, options: str, seed: int, expected: Result) -> Faults:
        """Those of a seed.

        Args:
            plan: The name of the plan.
            options: The name of the options.
            seed: Another one, other faults.
            expected: The run in which nothing happens.
        """
        # The same seed draws other things in another case.
        chance, workers = random.Random(f"{plan}, {options}, {seed}"), workers_of(plan)

        def moment() -> int:
            """The number of an event behind the first ones, in which the layers are sent."""
            return chance.randrange(expected.num_events_before + _MORE_EVENTS, expected.num_events)

        kills = {moment(): chance.choice(workers) for _ in range(chance.choice([1, 1, 1, 2, 3]))}
        every_seconds, has_spare = chance.choice([0.0, 3.0, 8.0, 3600.0]), chance.random() < 0.5
        cuts = {moment() for _ in range(chance.choice([0, 3]))}
        # Some do not start again: a spare takes the place of one, or others take it beside theirs.
        num_gone = chance.choice([0, 1]) if has_spare else chance.randrange(1, len(workers))
        gone = {*chance.sample(workers, num_gone)}
        shares = options not in MOVING and chance.random() < 0.5
        return cls(every_seconds, has_spare, 4.0, kills, cuts, gone, shares)


def workers_of(plan: str) -> list[str]:
    return [name for name in WORKERS if any(name in names for names, _ in PLANS[plan])]


def plan_of(counts: Sequence[tuple[Sequence[str], int]], optimizer: Any = None) -> Plan:
    start, stages = 0, []
    for names, count in counts:
        stages.append(StagePlan(list(names), (start, start + count), optimizer=optimizer))
        start += count
    return Plan(stages, 2)


def _shared(membership: Membership, hosts: Mapping[str, str]) -> PlanChange | None:
    """The plan over the machines that are left, as if it had been measured to be faster.

    The coordinator keeps the layers that it has: it gives them a key-value cache, with which the
    last bits of attention with dropout are others than on a worker.
    """
    deployment = membership.run.deployment
    plan = deployment.plan
    if plan.has_replicas:
        return None
    layer_bytes = [1] * len(deployment.layers)
    room = dict.fromkeys(plan.workers, math.inf)
    for name, host in hosts.items():
        found = left_by_bytes(plan, name, layer_bytes, room)
        if found is None or _own_layers(found) != _own_layers(plan):
            found = in_place(plan, name, host)
        plan = found
    return PlanChange(plan, 1.0, 0.5)


def _own_layers(plan: Plan) -> set[int]:
    """The layers of the coordinator."""
    return {n for stage in plan.stages if stage.is_local for n in stage.layer_indices}


class Told(RecoveryCallback):
    """Counts the machines without which a run goes on."""

    def __init__(self, net: Net) -> None:
        self._net = net

    def on_worker_left(self, trainer: Any, name: str, step: int) -> None:
        self._net.counts["fewer stages"] += 1


def run(
    net: Net, plan: str, options: str, folder: Path, faults: Faults, recovery: bool = True
) -> Result:
    """Train with these faults."""
    optimizer = "split" if plan in SPLIT else None
    workers = workers_of(plan)
    net.kills, net.cuts, net.gone = {**faults.kills}, {*faults.cuts}, {*faults.gone}
    settings = Recovery(
        0, folder=folder, every_seconds=faults.every_seconds, log_gib=faults.log_gib
    )
    with net.connected(), pytest.MonkeyPatch.context() as patch:
        if faults.shares:
            patch.setattr(Membership, "_gathered", _shared)
        strategy = HeteroPipelineStrategy(
            [*workers, *[SPARE] * faults.has_spare],
            plan_of(PLANS[plan], optimizer),
            check_first_batch="off",
            micro_batching="boundary" if options == "whole batches" else "step",
            recovery=recovery and settings,
        )
        module = MODULES.get(options, TinyModule)(4, attention_dropout=0.2)
        beginning = Beginning(net)
        averaging = [StageWeightAveraging(decay=0.5)] if "averaged" in options else []
        callbacks = [beginning, Told(net), *averaging]
        data = loader(24 if "moving" in options else 16, 4, padded=True)
        fit(module, strategy, data, loader(4, 4), callbacks=callbacks, **OPTIONS.get(options, {}))
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return Result(module.losses, weights, net.num_events, beginning.num_events)


@cache
def undisturbed(plan: str, options: str) -> Result:
    """The run without recovery, in which nothing happens."""
    return run(Net(0), plan, options, Path(), Faults(), recovery=False)


def assert_same(found: Result, expected: Result) -> None:
    assert found.losses == expected.losses
    for name, tensor in expected.weights.items():
        assert found.weights[name].equal(tensor), name


def tried(plan: str, options: str, seed: int, folder: Path) -> Counter[str]:
    """Train with the faults of a seed, and find every bit as it is without them.

    Returns:
        How often each thing has happened.

    Raises:
        AssertionError: If a bit is another one, or the run has ended.
    """
    expected = undisturbed(plan, options)
    faults, net = Faults.drawn(plan, options, seed, expected), Net(f"{plan}, {options}, {seed}")
    try:
        assert_same(run(net, plan, options, folder, faults), expected)
    except (AssertionError, HeteroError) as error:
        raise AssertionError(f"{plan}, {options}, seed {seed}: {error}") from error
    return net.counts
