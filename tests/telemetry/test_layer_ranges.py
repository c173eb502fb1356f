"""Who holds which layers, in words: stages, replicas with their shares, warm spares."""

from __future__ import annotations

from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.telemetry.layer_ranges import Range, ranges_of, stages_as_text


def test_each_replica_has_the_layers_with_its_share() -> None:
    stages = [
        StagePlan(["coordinator"], (0, 1)),
        StagePlan(["a", "b", "c"], (1, 3), shares=[2, 1, 0]),
        StagePlan(["b", "coordinator"], (3, 4)),
    ]
    assert ranges_of(Plan(stages)) == {
        "coordinator": (Range(0, (0, 1)), Range(2, (3, 4), (1, 2))),
        "a": (Range(1, (1, 3), (2, 3)),),
        "b": (Range(1, (1, 3), (1, 3)), Range(2, (3, 4), (1, 2))),
        "c": (Range(1, (1, 3), (0, 3)),),
    }


def test_the_layers_of_a_process_are_told_with_its_shares() -> None:
    alone = Range(1, (0, 2))
    shared, spare = Range(2, (2, 4), (2, 3)), Range(3, (4, 5), (0, 3))
    own = [Range(0, (0, 1)), Range(0, (5, 6))]
    assert stages_as_text([alone]) == "stage 1: layers 0–1"
    assert stages_as_text([alone, shared]) == "stage 1: layers 0–1, stage 2: layers 2–3 (2 of 3)"
    assert stages_as_text([spare]) == "stage 3: layer 4 (warm spare)"
    assert stages_as_text(own) == "layers 0 and 5"
    assert stages_as_text([*own, shared]) == "layers 0 and 5, stage 2: layers 2–3 (2 of 3)"
    assert stages_as_text([]) == "no layers"
    assert [held.is_spare for held in (alone, shared, spare)] == [False, False, True]
