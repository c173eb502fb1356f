"""Wishes: read as a person writes them, and refused each with its own sentence."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lightning_hetero.errors import PlanError
from lightning_hetero.planner.profile import Link, Profile
from lightning_hetero.planner.solver import Wishes, apply, parse_memory, parse_pin, solve

from .profiles import GIB, coordinator, device, ends, profile


def cluster(**others: Any) -> Profile:
    workers = [device("fast:1", 1, 2), device("slow:1", 2, 4)]
    links = [Link("fast:1", "slow:1", 0, 1), Link("coordinator", "fast:1", 0, 1)]
    own = coordinator([*device("", 1, 2).timings, *ends()])
    return profile(10, workers, own, links, **({"batch_size": 8} | others))


def test_a_pin_names_a_worker_that_may_hold_colons() -> None:
    assert parse_pin("fast:9999=0:12") == ("fast:9999", (0, 12))


@pytest.mark.parametrize("text", ["fast", "fast=1", "fast=1-2", "=1:2", "fast=a:b", "fast=-1:2"])
def test_what_is_no_pin_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="is not WORKER=START:END") as refused:
        parse_pin(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("10GiB", 10 * GIB),
        ("1.5GiB", GIB + GIB // 2),
        ("512MiB", GIB // 2),
        ("10GB", 10**10),
        ("10 GB", 10**10),
    ],
)
def test_memory_has_a_unit(size: str, expected: int) -> None:
    assert parse_memory(f"fast:1={size}") == ("fast:1", expected)


@pytest.mark.parametrize(
    "size", ["10  GB", "10e9", "10", "10gib", "-1GiB", "0GiB", "GiB", "1,5GiB"]
)
def test_memory_without_a_clear_unit_is_refused_with_those_that_there_are(size: str) -> None:
    with pytest.raises(PlanError, match="one of MB, GB, MiB, GiB") as refused:
        parse_memory(f"fast:1={size}")
    assert repr(size) in str(refused.value)


def test_memory_needs_a_worker() -> None:
    with pytest.raises(PlanError, match="is not WORKER=SIZE"):
        parse_memory("10GiB")


def test_wishes_change_the_profile() -> None:
    wishes = Wishes(exclude=["slow:1"], memory_bytes={"fast:1": 5}, batch_size=4)
    wished = apply(wishes, cluster())
    assert wished.workers == ["fast:1"]
    assert wished.device("fast:1").memory_bytes == 5
    assert wished.batch_size == 4
    assert [link.target for link in wished.links] == ["fast:1"]


REFUSED: dict[str, tuple[Wishes, str]] = {
    "an unknown pin": (
        Wishes(pins={"fst:1": (0, 1)}),
        "The pin of 'fst:1' names no device of the profile; its devices are coordinator, fast:1",
    ),
    "an unknown exclusion": (Wishes(exclude=["x"]), "The exclusion of 'x' names no device"),
    "unknown memory": (Wishes(memory_bytes={"x": 1}), "The memory of 'x' names no device"),
    "overlapping pins": (
        Wishes(pins={"fast:1": (2, 6), "slow:1": (5, 8)}),
        "The pins of 'fast:1' and 'slow:1' overlap: one ends at layer 6, the other starts at 5.",
    ),
    "one pin inside another": (Wishes(pins={"fast:1": (2, 9), "slow:1": (3, 4)}), "overlap"),
    "a pin past the end": (
        Wishes(pins={"fast:1": (2, 11)}),
        "not a range of the model's 10 layers",
    ),
    "an empty pin": (Wishes(pins={"fast:1": (2, 2)}), "0 <= START < END <= 10"),
    "a pin backwards": (Wishes(pins={"fast:1": (5, 2)}), "0 <= START < END <= 10"),
    "a coordinator in the middle": (
        Wishes(pins={"coordinator": (2, 4)}),
        "can only hold the first layers or the last ones, so its pin starts at 0 or ends at 10.",
    ),
    "no coordinator": (Wishes(exclude=["coordinator"]), "The coordinator cannot be left out"),
    "pinned and excluded": (
        Wishes(pins={"fast:1": (0, 1)}, exclude=["fast:1"]),
        "'fast:1' is pinned and excluded",
    ),
    "an empty batch": (Wishes(batch_size=-2), "The batch size is -2; it must be 1 or more."),
    "no batch": (Wishes(batch_size=0), "The batch size is 0; it must be 1 or more."),
    "too many pieces": (
        Wishes(micro_batches=9),
        "A batch of 8 samples cannot be cut into 9 micro-batches; ask for 1 to 8.",
    ),
    "no pieces": (Wishes(micro_batches=0), "cannot be cut into 0 micro-batches"),
}


@pytest.mark.parametrize(("wishes", "expected"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_wished_is_said(wishes: Wishes, expected: str) -> None:
    with pytest.raises(PlanError, match=re.escape(expected)):
        apply(wishes, cluster())


@pytest.mark.parametrize("pin", [(0, 4), (0, 0), (6, 10), (10, 10)])
def test_the_coordinator_is_pinned_to_the_first_or_to_the_last_layers(pin: tuple[int, int]) -> None:
    solution = solve(cluster(), Wishes(pins={"coordinator": pin}))
    stages = {stage.worker: stage.layers for stage in solution.plan.stages}
    assert stages.get("coordinator") == (pin if pin[0] < pin[1] else None)


def test_a_profile_without_a_batch_size_asks_for_one() -> None:
    with pytest.raises(PlanError, match="give one with --batch-size"):
        apply(Wishes(), cluster(batch_size=None))
    assert apply(Wishes(batch_size=3), cluster(batch_size=None)).batch_size == 3
