from __future__ import annotations

import pytest

from lightning_hetero.errors import PlanError
from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.planner import profile as p
from lightning_hetero.report.topology import Link, Speed, topology_of

from ..planner.profiles import GIB, device, profile

PLAN = Plan(
    [
        StagePlan(["coordinator"], (0, 0)),
        StagePlan(["fast:1"], (0, 5), recompute=True, activation_dtype="int8"),
        StagePlan(["local-1"], (5, 8), dtype="float16"),
    ],
    micro_batches=4,
    in_flight=2,
)


def measured() -> p.Profile:
    timings = [
        p.Timing("layer", size, 1.0, 2.0, dtype=dtype, saved_bytes=1, recompute=recompute)
        for size in (1, 64)
        for dtype, recompute in (("float32", False), ("float32", True), ("float16", False))
    ]
    workers = [
        device("fast:1", 1, 2, device="RTX 5090", memory_bytes=8 * GIB, timings=timings),
        device("local-1", 1, 2, device="EPYC", timings=timings),
    ]
    parts = [
        p.Part("layer", GIB, trainable_parameters=0),
        p.Part(p.EMBEDDING, GIB, trainable_parameters=1),
        p.Part(p.HEAD, 0),
    ]
    link = p.Link("coordinator", "fast:1", 0.001, 1e8)
    return profile(8, workers, links=[link], model_options={"parts": parts}, batch_size=8)


def test_a_plan_alone_says_who_holds_what() -> None:
    found = topology_of(PLAN)
    assert [place.layers for place in found.places] == [(0, 0), (0, 5), (5, 8)]
    assert [place.machine for place in found.places] == ["this machine", "fast", "this machine"]
    assert [place.marks for place in found.stages] == [("recomputed",), ("float16",)]
    assert [link.activation_dtype for link in found.links] == ["int8", "int8", None]
    assert found.facts == ["4 micro-batches, at most 2 in flight"]
    assert all(place.memory is None and not place.device for place in found.places)


def test_a_coordinator_with_the_last_layers_has_them_before_the_head() -> None:
    stages = [
        StagePlan(["fast:1"], (0, 5), embedding=True, activation_dtype="int8"),
        StagePlan(["local-1"], (5, 7)),
        StagePlan(["coordinator"], (7, 8)),
    ]
    found = topology_of(Plan(stages))
    assert found.own_parts == (["data"], ["layers", "head", "loss"])
    assert found.stages[0].marks == ("embedding",)
    # Token ids are not rounded.
    assert found.links == [Link(is_one_way=True), Link(activation_dtype="int8"), Link()]


def test_a_profile_adds_devices_memory_links_and_the_prediction() -> None:
    found = topology_of(PLAN, measured(), "tiny")
    fast, local = found.stages
    assert (fast.device, local.device) == ("RTX 5090", "EPYC")
    assert fast.memory is not None
    assert fast.memory.total_bytes == 8 * GIB
    assert fast.memory.used_bytes["weights"] == 5 * GIB
    assert fast.marks == ("recomputed", "frozen")
    assert found.links[0] == Link(Speed(1e8, 0.001), None, "int8", None)
    assert found.links[1].forward is None
    assert found.facts[-1].startswith("predicted: ")
    assert found.frozen_ends == frozenset()


def test_a_profile_of_other_workers_is_refused() -> None:
    with pytest.raises(PlanError, match="none of the workers"):
        topology_of(PLAN, profile(8, [device("other:1", 1, 2)], batch_size=8))


@pytest.mark.parametrize("stages", [[], [StagePlan(["a:1"], (2, 4))]], ids=["none", "a gap"])
def test_a_plan_without_all_layers_is_refused(stages: list[StagePlan]) -> None:
    with pytest.raises(PlanError):
        topology_of(Plan(stages))
