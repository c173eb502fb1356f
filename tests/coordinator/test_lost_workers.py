"""What is told of lost workers: which time they take, and what is repeated."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_hetero.coordinator.lost_workers import (
    MOST_LOSSES_IN_A_STEP,
    Loss,
    lost_between,
    seconds_of,
    why_not_again,
)
from lightning_hetero.coordinator.replacement import Replacements
from lightning_hetero.coordinator.worker_stages import Holdings
from lightning_hetero.errors import WorkerError
from lightning_hetero.pipeline.placement import Placement
from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.protocol import messages as m


@dataclass
class Place:
    """A worker, as far as a loss knows it."""

    where: str


def lost(began: float, end: float | None) -> Loss:
    worker: Any = Place("a (spare:9999)")
    return Loss(worker, 7, "It was cut.", began, "a", end_seconds=end)


@pytest.mark.parametrize(
    ("losses", "seconds"),
    [
        ([], 0.0),
        ([(1.0, 3.0)], 2.0),
        ([(1.0, 3.0), (2.0, 5.0)], 4.0),  # at the same time
        ([(4.0, 5.0), (1.0, 2.0)], 2.0),
        ([(-3.0, 2.0), (9.0, None)], 3.0),  # from before, and until after
        ([(-3.0, -1.0), (11.0, 12.0)], 0.0),
        ([(1.0, 8.0), (2.0, 3.0)], 7.0),  # one inside the other
    ],
)
def test_time_in_which_several_are_lost_counts_once(
    losses: list[tuple[float, float | None]], seconds: float
) -> None:
    assert seconds_of([lost(*each) for each in losses], 0.0, 10.0) == seconds


def test_a_loss_belongs_to_the_time_in_which_it_was_noted() -> None:
    early, late = lost(1.0, None), lost(2.0, 3.0)
    assert lost_between([early, late], 0.0, 2.0) == [early]
    assert lost_between([early, late], 2.0, 9.0) == [late]


@pytest.mark.parametrize(
    ("behind", "said"), [(4, "steps 5 to 7"), (6, "step 7"), (7, "nothing"), (8, "nothing")]
)
def test_what_is_repeated_lies_behind_the_snapshot(behind: int, said: str) -> None:
    loss = lost(1.0, None)
    loss.note_restored(1.5, 2.0, behind, 100)
    assert (loss.repeated, loss.served_seconds, loss.restored_seconds) == (said, 1.5, 2.0)
    loss.note_end(2.5, has_caught_up=True)
    assert (loss.end_seconds, loss.has_caught_up) == (2.5, True)
    assert (loss.place, loss.served_by) == ("a", "a (spare:9999)")


def test_a_worker_is_not_replaced_for_ever_in_one_step() -> None:
    place, other = Place("a"), Place("b")
    worker: Any = place
    losses = [Loss(worker, 7, "", 0.0, "a") for _ in range(MOST_LOSSES_IN_A_STEP)]
    assert why_not_again(losses[1:], worker, 7) == ""
    assert "lost 5 times in step 7, and" in why_not_again(losses, worker, 7)
    # A step was gained, and the loss of another worker is another matter.
    assert why_not_again(losses, worker, 8) == ""
    stranger: Any = other
    assert why_not_again(losses, stranger, 7) == ""


def test_processes_that_are_lost_while_they_get_layers_count_too() -> None:
    worker: Any = Place("a")
    loss = Loss(worker, 7, "", 0.0, "a")
    for _ in range(MOST_LOSSES_IN_A_STEP - 2):
        loss.note_failed()
    assert why_not_again([loss], worker, 7) == ""
    loss.note_failed()
    assert "5 times in step 7, 4 times while it got" in why_not_again([loss], worker, 7)


@pytest.mark.follows("would drift apart; let only owners step (`optimizer: split`).")
def test_another_kind_of_device_takes_a_replica_only_if_owners_step() -> None:
    worker: Any = SimpleNamespace(
        name="a", equipment=m.Equipment({"torch": "2.9"}, "cuda"), stages=[1]
    )
    for optimizer, is_refused in ((None, True), ("split", False)):
        plan = Plan([StagePlan(["a", "b"], (0, 2), optimizer=optimizer)], 2)  # type: ignore[arg-type]
        holdings: Any = SimpleNamespace(
            placement=Placement.of(plan),
            stages={1: SimpleNamespace(is_split=optimizer == "split")},
            stages_of=lambda _worker: [],
        )
        holdings.steps_alike = partial(Holdings.steps_alike, holdings)
        kinds = SimpleNamespace(get=lambda *_: "of the process that was lost")
        replacements: Any = SimpleNamespace(
            _layers=SimpleNamespace(holdings=holdings), _kinds=kinds
        )
        refused = pytest.raises(WorkerError, match="It is another device than a was")
        with refused if is_refused else nullcontext():
            Replacements._check_can_hold(replacements, worker)
