"""What changes hands follows from two placements alone."""

from __future__ import annotations

import pytest

from lightning_hetero.pipeline.placement import PlacedStage, Placement
from lightning_hetero.pipeline.transfers import Transfer, coming_home, leaving_home, transfers


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
