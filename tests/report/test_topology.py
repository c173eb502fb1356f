from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import json
from msgspec.structs import replace as replace_in

from lightning_hetero.errors import PlanError
from lightning_hetero.events import Deployed, PlacedProcess
from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.planner import profile as p
from lightning_hetero.protocol.fields import Equipment
from lightning_hetero.report.topology import (
    DrawnLink,
    Topology,
    topology_of,
    topology_of_run,
)
from lightning_hetero.telemetry.layer_ranges import Range

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


def route_of(topology: Topology) -> list[int]:
    """The places of a line of stages, in the order of the activations."""
    assert [hop.stage for hop in topology.hops] == [*range(len(topology.hops))]
    return [*(hop.source for hop in topology.hops), topology.hops[-1].target]


def test_a_plan_alone_says_who_holds_what() -> None:
    found = topology_of(PLAN)
    assert [place.ranges for place in found.places] == [
        *((), (Range(1, (0, 5)),), (Range(2, (5, 8)),))
    ]
    assert route_of(found) == [0, 1, 2, 0]
    assert [place.machine for place in found.places] == ["this machine", "fast", "this machine"]
    assert [place.marks for place in found.workers] == [("recomputed",), ("float16",)]
    assert [hop.link.activation_dtype for hop in found.hops] == ["int8", "int8", None]
    assert found.facts == ["4 micro-batches, at most 2 in flight"]
    assert all(place.memory is None and not place.device for place in found.places)


def turns(*names: str, **options: Any) -> Plan:
    """A plan with a layer for each name."""
    return Plan([StagePlan([name], (n, n + 1), **options) for n, name in enumerate(names)])


def test_a_coordinator_at_both_ends_has_parts_before_and_behind() -> None:
    found = topology_of(turns("coordinator", "a:1", "coordinator"))
    assert found.own_parts == (["data", "embedding", "layer 0"], ["layer 2", "head", "loss"])
    assert found.coordinator.num_layers == 2
    assert route_of(found) == [0, 1, 0]
    assert found.is_line


def test_a_worker_with_several_stages_is_one_place() -> None:
    found = topology_of(turns("b:1", "a:1", "b:1", "b:1", "coordinator"))
    assert [place.name for place in found.workers] == ["b:1", "a:1"]
    assert [held.stage for held in found.workers[0].ranges] == [1, 3, 4]
    assert route_of(found) == [0, 1, 2, 1, 1, 0]
    assert [hop.is_inside for hop in found.hops] == [False, False, False, True, False]
    assert not found.is_line


def test_a_mark_of_some_stages_says_of_which() -> None:
    first, *others = turns("a:1", "b:1", "a:1", "b:1", recompute=True).stages
    found = topology_of(Plan([replace(first, recompute=False, dtype="float16"), *others]))
    assert found.workers[0].marks == ("float16: layer 0", "recomputed: layer 2")
    assert found.workers[1].marks == ("recomputed",)
    by_layers = topology_of(Plan([replace(first, recompute="layers"), *others]))
    assert by_layers.workers[0].marks == ("recomputed by layers: layer 0", "recomputed: layer 2")


def test_a_profile_adds_facts_of_all_ranges_of_a_process() -> None:
    names = ["coordinator", "fast:1", "fast:1", "local-1", "fast:1", "local-1", "fast:1"]
    found = topology_of(replace(turns(*names, "coordinator"), micro_batches=8), measured())
    weights = [0 if p.memory is None else p.memory.used_bytes["weights"] for p in found.places]
    # Two layers and the embedding; four layers; two layers.
    assert weights == [3 * GIB, 4 * GIB, 2 * GIB]
    assert found.workers[0].marks == ("frozen",)
    known = [hop.link.forward is not None for hop in found.hops]
    assert known == [True, False, False, False, False, False, False]
    assert found.hops[-1].link.backward == measured().links[0]


def test_a_worker_with_the_head_sends_losses_to_the_coordinator() -> None:
    stages = [
        StagePlan(["fast:1"], (0, 5), embedding=True),
        StagePlan(["local-1"], (5, 8), head=True, activation_dtype="int8"),
    ]
    found = topology_of(Plan(stages))
    assert found.own_parts == (["data"], ["loss"])
    assert [place.marks for place in found.workers] == [("embedding",), ("head",)]
    # Losses are not rounded.
    links = [hop.link for hop in found.hops]
    assert links == [DrawnLink(is_one_way=True), DrawnLink(activation_dtype="int8"), DrawnLink()]


def test_a_coordinator_with_the_last_layers_has_them_before_the_head() -> None:
    stages = [
        StagePlan(["fast:1"], (0, 5), embedding=True, activation_dtype="int8"),
        StagePlan(["local-1"], (5, 7)),
        StagePlan(["coordinator"], (7, 8)),
    ]
    found = topology_of(Plan(stages))
    assert found.own_parts == (["data"], ["layer 7", "head", "loss"])
    assert found.workers[0].marks == ("embedding",)
    # Token ids are not rounded.
    links = [hop.link for hop in found.hops]
    assert links == [DrawnLink(is_one_way=True), DrawnLink(activation_dtype="int8"), DrawnLink()]


def test_a_profile_adds_devices_memory_links_and_the_prediction() -> None:
    found = topology_of(PLAN, measured(), "tiny")
    fast, local = found.workers
    assert (fast.device, local.device) == ("RTX 5090", "EPYC")
    assert fast.memory is not None
    assert fast.memory.total_bytes == 8 * GIB
    assert fast.memory.used_bytes["weights"] == 5 * GIB
    assert fast.marks == ("recomputed", "frozen")
    assert found.hops[0].link == DrawnLink(measured().links[0], None, "int8", None)
    assert found.hops[1].link.forward is None
    assert found.facts[-1].startswith("predicted: ")
    assert found.frozen_ends == frozenset()


def test_a_profile_of_other_workers_is_refused() -> None:
    with pytest.raises(PlanError, match="none of the workers"):
        topology_of(PLAN, profile(8, [device("other:1", 1, 2)], batch_size=8))


@pytest.mark.parametrize("stages", [[], [StagePlan(["a:1"], (2, 4))]], ids=["none", "a gap"])
def test_a_plan_without_all_layers_is_refused(stages: list[StagePlan]) -> None:
    with pytest.raises(PlanError):
        topology_of(Plan(stages))


SHARED = [
    StagePlan(["coordinator"], (0, 1)),
    StagePlan(["a:1", "b:1"], (1, 2), shares=[2, 1], activation_dtype="int8"),
    StagePlan(["b:1", "c:1", "d:1"], (2, 3), shares=[1, 1, 0]),
]


def test_replicas_are_linked_as_their_micro_batches_go() -> None:
    found = topology_of(Plan(SHARED, micro_batches=3))
    assert [place.name for place in found.workers] == ["a:1", "b:1", "c:1", "d:1"]
    assert found.ranges_of_stage(2) == {
        2: Range(2, (2, 3), (1, 2)),
        3: Range(2, (2, 3), (1, 2)),
        4: Range(2, (2, 3), (0, 2)),
    }
    # Micro-batches 0 and 2 go over a and b, 1 over b and c; the warm spare d gets none.
    assert [(hop.stage, hop.source, hop.target) for hop in found.hops] == [
        *((0, 0, 1), (0, 0, 2), (1, 1, 2), (1, 2, 3), (2, 2, 0), (2, 3, 0))
    ]
    assert [hop.link.activation_dtype for hop in found.hops] == [*["int8"] * 4, None, None]
    assert [(each.stage, each.source, each.target) for each in found.exchanges] == [
        *((1, 1, 2), (2, 2, 3), (2, 2, 4), (2, 3, 4))
    ]
    assert (found.num_stages, found.is_line) == (2, False)


def test_a_coordinator_that_is_a_replica_sends_nothing_for_its_own_micro_batches() -> None:
    stages = [StagePlan(["a:1", "coordinator"], (0, 2)), StagePlan(["b:1"], (2, 3))]
    found = topology_of(Plan(stages, micro_batches=2))
    assert found.coordinator.ranges == (Range(1, (0, 2), (1, 2)),)
    # Its own layers have no replicas.
    assert found.own_parts == (["data", "embedding"], ["head", "loss"])
    assert [(hop.stage, hop.source, hop.target, hop.is_inside) for hop in found.hops] == [
        *((0, 0, 0, True), (0, 0, 1, False), (1, 0, 2, False), (1, 1, 2, False), (2, 2, 0, False))
    ]
    assert [(each.source, each.target) for each in found.exchanges] == [(0, 1)]


def test_a_profile_adds_facts_of_each_replica() -> None:
    shared = StagePlan(["fast:1", "local-1", "coordinator"], (0, 8), shares=[2, 1, 1])
    found = topology_of(Plan([shared], micro_batches=8), measured())
    weights = [0 if p.memory is None else p.memory.used_bytes["weights"] for p in found.places]
    # Every replica has all layers, and the coordinator the embedding too.
    assert weights == [9 * GIB, 8 * GIB, 8 * GIB]
    assert [place.device for place in found.workers] == ["RTX 5090", "EPYC"]
    assert [each.link.forward for each in found.exchanges] == [measured().links[0], None]
    assert found.facts[-1].startswith("predicted: ")


def test_the_record_of_a_run_gives_the_topology_again() -> None:
    here, there = Equipment(host="desk"), Equipment(host="tower", device_name="RTX 5090")
    processes = [
        PlacedProcess("coordinator", 0, here, GIB, [[]]),
        PlacedProcess("fast:1", 2, there, 5 * GIB, [["4-bit"]]),
        PlacedProcess("local-1", 1, Equipment(), 3 * GIB, [["frozen"]]),
        PlacedProcess("idle:1", 3, there),
    ]
    event = Deployed("Llama", PLAN, processes, ["embedding"], measured())
    found = topology_of_run(event)
    assert [(place.name, place.number, place.host) for place in found.places] == [
        *(("coordinator", 0, "desk"), ("fast:1", 2, "tower"), ("local-1", 1, "desk")),
        ("idle:1", 3, "tower"),
    ]
    assert found.workers[0].marks[:2] == ("4-bit", "recomputed")
    assert found.facts[-1].startswith("predicted: ")
    assert topology_of_run(json.decode(json.encode(event), type=Deployed)) == found
    bare = topology_of_run(replace_in(event, profile=None))
    assert [place.memory and place.memory.used_bytes for place in bare.places] == [
        *({"weights": GIB}, {"weights": 5 * GIB}, {"weights": 3 * GIB}, {"weights": 0})
    ]
