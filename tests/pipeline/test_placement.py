"""The placement of plans: who runs what, who talks to whom, who holds what, what changes hands."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.pipeline.placement import (
    PlacedStage,
    Placement,
    Transfer,
    coming_home,
    deal,
    leaving_home,
    transfers,
    turns,
)
from lightning_hetero.plan import COORDINATOR, Plan, StagePlan


def plan(*stages: tuple[str, int, int]) -> Plan:
    return Plan([StagePlan([name], (first, end)) for name, first, end in stages])


LINE = plan(("coordinator", 0, 2), ("a", 2, 4), ("b", 4, 6))
BOTH_ENDS = plan(("coordinator", 0, 2), ("a", 2, 4), ("coordinator", 4, 6))
ALTERNATING = plan(("a", 0, 1), ("b", 1, 2), ("a", 2, 3), ("b", 3, 4))
TWICE = plan(("coordinator", 0, 1), ("a", 1, 2), ("a", 2, 3), ("b", 3, 4), ("a", 4, 5))


def replicas(*shares: int) -> Placement:
    names = tuple("abcdef"[: len(shares)])
    return Placement((PlacedStage(1, (0, 1), names, shares),))


@pytest.mark.parametrize(
    ("given_plan", "processes", "stages_of_a"),
    [
        (LINE, ("coordinator", "a", "b"), (1,)),
        (BOTH_ENDS, ("coordinator", "a"), (1,)),
        (ALTERNATING, ("coordinator", "a", "b"), (1, 3)),
        (TWICE, ("coordinator", "a", "b"), (1, 2, 4)),
    ],
)
def test_processes_are_counted_as_the_layers_come_to_them(
    given_plan: Plan, processes: tuple[str, ...], stages_of_a: tuple[int, ...]
) -> None:
    placement = Placement.of(given_plan)
    assert placement.processes == processes
    assert list(placement.workers) == given_plan.workers
    assert placement.stages_of("a") == stages_of_a
    assert placement.stages_of(COORDINATOR) == ()


@pytest.mark.parametrize(
    ("given_plan", "links", "peers_of_a"),
    [
        (LINE, [("coordinator", "a"), ("a", "b"), ("b", "coordinator")], ("coordinator", "b")),
        (BOTH_ENDS, [("coordinator", "a"), ("a", "coordinator")], ("coordinator",)),
        (
            ALTERNATING,
            [("coordinator", "a"), ("a", "b"), ("b", "a"), ("b", "coordinator")],
            ("coordinator", "b"),
        ),
        # From one stage to the next one of the same worker nothing travels.
        (
            TWICE,
            [("coordinator", "a"), ("a", "b"), ("b", "a"), ("a", "coordinator")],
            ("coordinator", "b"),
        ),
        (plan(("coordinator", 0, 4)), [], ()),
    ],
)
def test_links_lead_along_the_layers(
    given_plan: Plan, links: list[tuple[str, str]], peers_of_a: tuple[str, ...]
) -> None:
    placement = Placement.of(given_plan)
    assert list(placement.links) == links
    assert placement.peers("a") == peers_of_a


def test_each_stage_has_its_process() -> None:
    placement = Placement.of(ALTERNATING)
    numbers = range(len(placement.stages) + 1)
    assert [placement.process(number, 0) for number in numbers] == [COORDINATOR, *"abab"]


def test_layers_know_their_holder() -> None:
    embedded = Plan([StagePlan(["a"], (0, 2), embedding=True), StagePlan(["b"], (2, 3))])
    assert [Placement.of(embedded).owner(layer) for layer in (-1, 0, 1, 2)] == ["a", "a", "a", "b"]
    layers = range(-1, 6)
    assert [Placement.of(BOTH_ENDS).holders(n)[0] for n in layers] == [
        *[COORDINATOR] * 3,
        *"aa",
        *[COORDINATOR] * 2,
    ]


@pytest.mark.parametrize(
    ("shares", "expected"),
    [((1,), "aaa"), ((1, 1), "abab"), ((2, 1), "abaaba"), ((5, 3, 1), "abacababa")],
)
def test_turns_are_spread_evenly(shares: tuple[int, ...], expected: str) -> None:
    assert "".join("abc"[turn] for turn in turns(shares, len(expected))) == expected
    placement = replicas(*shares)
    assert "".join(placement.process(1, k) for k in range(len(expected))) == expected


@given(
    shares=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    rounds=st.integers(1, 3),
    last=st.none() | st.integers(0, 4),
)
def test_everyone_gets_their_share_of_each_round(
    shares: list[int], rounds: int, last: int | None
) -> None:
    total = sum(shares)
    if total == 0:
        return
    found = turns(shares, rounds * total, last)
    for begin in range(0, len(found), total):
        counts = Counter(found[begin : begin + total])
        assert [counts[index] for index in range(len(shares))] == shares


HOSTED = Plan(
    [
        StagePlan(["a"], (0, 2)),
        StagePlan(["b", "c", COORDINATOR], (2, 6), shares=[2, 0, 1]),
    ]
)


def test_replicas_take_their_shares_and_pieces_of_whole_batches_stay_with_workers() -> None:
    placement = Placement.of(HOSTED)
    assert placement.processes == (COORDINATOR, "a", "b", "c")
    assert [placement.process(2, k) for k in range(4)] == ["b", "b", COORDINATOR, "b"]
    assert [placement.process(2, k, is_whole=True) for k in range(3)] == ["b", "b", "b"]
    assert placement.route(0) == ((1, "a"), (2, "b"))
    assert placement.route(2) == ((1, "a"),)
    assert placement.route(2, is_whole=True) == ((1, "a"), (2, "b"))
    assert placement.hosted is not None
    assert placement.hosted.number == 2
    assert placement.owner(3) == COORDINATOR
    assert placement.holders(3) == ("b", "c", COORDINATOR)
    assert Placement.of(LINE).hosted is None


def test_workers_exchange_among_each_other_unless_the_coordinator_owns_everything() -> None:
    assert Placement.of(HOSTED).exchanges == ()
    stages = [replace(s, optimizer="split") if s.is_hosted else s for s in HOSTED.stages]
    split = Placement.of(replace(HOSTED, stages=stages))
    assert split.exchanges == (("b", "c"), ("c", "b"))


def test_spares_share_whole_batches_if_they_are_all_there_is() -> None:
    stage = PlacedStage(1, (0,), ("a", "b", COORDINATOR), (0, 0, 5))
    placement = Placement((stage,))
    assert [placement.process(1, k) for k in range(2)] == [COORDINATOR] * 2
    assert [placement.process(1, k, is_whole=True) for k in range(3)] == ["a", "b", "a"]


def test_the_coordinator_ends_a_round() -> None:
    assert turns([9, 7], 16, last=1) == [0, 0, 1, 0, 1, 0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1]
    assert turns([1, 1], 2, last=0) == [1, 0]


@given(sizes=st.lists(st.integers(0, 10**6), min_size=1, max_size=30), count=st.integers(1, 5))
def test_owners_are_dealt_by_bytes(sizes: list[int], count: int) -> None:
    names = {f"{n}": size for n, size in enumerate(sizes)}
    processes = [*"abcde"[:count]]
    owners = deal(names, processes)
    assert [*owners] == [*names]
    owned = [sum(names[n] for n, owner in owners.items() if owner == p) for p in processes]
    assert max(owned) <= sum(sizes) / count + max(sizes)
    # Neighbors go to the same process.
    assert sorted(owners.values()) == [*owners.values()]


def placed(layout: str) -> Placement:
    """The placement of layers 0, 1, … with these processes; C is the coordinator."""
    owners: dict[str, list[int]] = {}
    for layer, name in enumerate(layout):
        owners.setdefault(name, []).append(layer)
    owners.pop("C", None)
    stages = [
        PlacedStage(number, tuple(own), (name,), (1,))
        for number, (name, own) in enumerate(owners.items(), start=1)
    ]
    return Placement(tuple(stages))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param("aabb", "aabb", "", id="nothing"),
        pytest.param("aabb", "aaab", "2:b>a", id="from worker to worker"),
        pytest.param("aabb", "bbaa", "0:a>b 1:a>b 2:b>a 3:b>a", id="exchanged"),
        pytest.param("Cabb", "abbC", "0:C>a 1:a>b 3:b>coordinator", id="home and away"),
        pytest.param("aaaa", "abab", "1:a>b 3:a>b", id="turn by turn"),
        pytest.param("CaCb", "aCbC", "0:C>a 1:a>coordinator 2:C>b 3:b>coordinator", id="all"),
    ],
)
def test_what_stays_is_left_out(before: str, after: str, expected: str) -> None:
    found = transfers(placed(before), placed(after))
    said = [f"{t.layer}:{t.source}>{t.target}" for t in found]
    assert " ".join(said).replace("coordinator>", "C>") == expected


def test_an_embedding_is_a_layer_like_the_others() -> None:
    before = Placement((PlacedStage(1, (-1, 0), ("a",), (1,)),))
    after = Placement((PlacedStage(1, (0, 1), ("a",), (1,)),))
    assert transfers(before, after) == (
        Transfer(-1, "a", "coordinator"),
        Transfer(1, "coordinator", "a"),
    )
    assert coming_home(before, after) == {-1}
    assert coming_home(after, before) == {1}
    assert leaving_home(before, after) == {1}
    assert leaving_home(after, before) == {-1}


def test_what_the_coordinator_keeps_as_a_replica_does_not_leave_home() -> None:
    here = Placement(())
    shared = Placement((PlacedStage(1, (0, 1), ("a", "coordinator"), (1, 1)),))
    away = Placement((PlacedStage(1, (0, 1), ("a",), (1,)),))
    assert leaving_home(here, shared) == set()
    assert leaving_home(shared, away) == {0, 1}
    assert coming_home(away, shared) == {0, 1}


def test_a_holder_more_gets_a_layer_from_its_owner() -> None:
    before = Placement((PlacedStage(1, (0,), ("a", "b"), (1, 1)),))
    after = Placement((PlacedStage(1, (0,), ("b", "c"), (1, 1)),))
    assert transfers(before, after) == (Transfer(0, "a", "c"),)
