"""A plan that a person edited: every fault in words. What does not fit is named, with a remedy."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from lightning_hetero.errors import PlanError
from lightning_hetero.plan import COORDINATOR, Plan, StagePlan
from lightning_hetero.planner.candidates import Candidate, Costs, Seat
from lightning_hetero.planner.feasibility import candidate_of, check_plan, shortages
from lightning_hetero.planner.profile import EMBEDDING, HEAD, DeviceProfile, Part, Profile
from lightning_hetero.planner.solver import Wishes, solve
from lightning_hetero.planner.step_model import Hop

from .profiles import GIB, coordinator, device, ends, profile, timing


def cluster(batch_size: int | None = 8) -> Profile:
    parts = [Part(EMBEDDING, 0), Part(HEAD, 0), Part("layer", GIB)]
    own = coordinator([*ends(), timing("layer", 1, 1)], memory_bytes=8 * GIB)
    workers = [
        device("laptop", 1, 1, memory_bytes=int(2.5 * GIB)),
        device("tower", 1, 1, memory_bytes=8 * GIB),
    ]
    return profile(6, workers, own, (), {"parts": parts}, batch_size=batch_size)


def plan(*stages: tuple[str, int, int], **others: int) -> Plan:
    return Plan([StagePlan([name], (first, end)) for name, first, end in stages], **others)


def test_a_plan_of_the_solver_has_no_fault() -> None:
    assert check_plan(solve(cluster()).plan, cluster()) == []


def test_a_plan_without_the_coordinator_is_checked_with_its_ends() -> None:
    edited = plan(("tower", 0, 5), ("laptop", 5, 6))
    assert check_plan(edited, cluster()) == []
    assert candidate_of(edited, cluster()).processes == ("coordinator", "tower", "laptop")


SHAPES = [
    plan(("coordinator", 0, 6)),
    plan(("coordinator", 0, 2), ("tower", 2, 6)),
    plan(("tower", 0, 5), ("coordinator", 5, 6)),
    plan(("coordinator", 0, 1), ("tower", 1, 5), ("coordinator", 5, 6)),
    plan(("tower", 0, 2), ("laptop", 2, 3), ("tower", 3, 6)),
    plan(("tower", 0, 2), ("tower", 2, 3), ("laptop", 3, 4), ("coordinator", 4, 6)),
    plan(("coordinator", 0, 1), ("tower", 1, 2), ("laptop", 2, 3), ("tower", 3, 6)),
    Plan([StagePlan(["tower"], (0, 4), embedding=True), StagePlan(["coordinator"], (4, 6))]),
    Plan([StagePlan(["tower"], (0, 6), embedding=True)]),
    Plan(
        [
            StagePlan(["tower"], (0, 2), embedding=True),
            StagePlan(["laptop"], (2, 3)),
            StagePlan(["tower"], (3, 6)),
        ]
    ),
]


@pytest.mark.parametrize("given", SHAPES, ids=lambda given: str(SHAPES.index(given)))
def test_a_plan_of_any_shape_is_predicted_as_it_is(given: Plan) -> None:
    given.check(6, ["tower", "laptop"])
    assert check_plan(given, cluster()) == []
    candidate = candidate_of(given, cluster())
    assert candidate.plan().stages == given.stages
    assert candidate.left.embedding == any(stage.embedding for stage in given.stages)
    # A layer takes 2 seconds everywhere, and the ends take none.
    held = {name: sum(s.num_layers for s in candidate.seats_of(name)) for name in given.workers}
    assert {n: s for n, s in candidate.process_seconds.items() if n != "coordinator"} == {
        name: 2 * layers for name, layers in held.items()
    }
    assert candidate.step_seconds >= 8 * candidate.bottleneck_seconds


def test_empty_stages_of_the_coordinator_change_nothing() -> None:
    with_empty = plan(("coordinator", 0, 0), ("tower", 0, 5), ("coordinator", 5, 6))
    without = plan(("tower", 0, 5), ("coordinator", 5, 6))
    assert candidate_of(with_empty, cluster()).ranges == candidate_of(without, cluster()).ranges
    assert candidate_of(with_empty, cluster()).plan().stages == without.stages


def test_the_stages_of_a_worker_have_to_fit_together() -> None:
    split = plan(("laptop", 0, 1), ("tower", 1, 4), ("laptop", 4, 6))
    (fault,) = check_plan(split, cluster())
    assert fault == "does not fit: `laptop` is 640.0 MiB short; move 1 layer."
    at_both_ends = plan(("coordinator", 0, 4), ("laptop", 4, 5), ("coordinator", 5, 6))
    small = cluster()
    own = replace(small.devices[0], memory_bytes=5 * GIB)
    tight = replace(small, devices=[own, *small.devices[1:]])
    (fault,) = check_plan(at_both_ends, tight)
    assert fault == "does not fit: `coordinator` is 256.0 MiB short; move 1 layer."


@pytest.mark.parametrize(
    ("edited", "expected"),
    [
        (plan(("tower", 0, 5)), "The plan covers 5 layers and the model has 6"),
        (plan(("towr", 0, 6)), "'towr', which is none of the workers ['laptop', 'tower']"),
        (plan(("Coordinator", 0, 6)), "name one of them or 'coordinator', or add it"),
        (plan(("tower", 0, 6), micro_batches=9), "cannot be cut into 9 micro-batches"),
        (
            plan(("laptop", 0, 4), ("tower", 4, 6)),
            "does not fit: `laptop` is 1.6 GiB short; move 2 layers.",
        ),
        (
            Plan([StagePlan(["tower"], (0, 6), dtype="float16")]),
            "`tower` was not measured with these layers, this dtype and this micro-batch size "
            "(float16, micro-batches of 1; it was in float32); move its layers, or measure",
        ),
    ],
)
def test_each_fault_has_its_sentence(edited: Plan, expected: str) -> None:
    (fault,) = check_plan(edited, cluster())
    assert expected in fault


def test_a_last_coordinator_moves_its_first_layers() -> None:
    kinds, small = ["layer"] * 5 + ["large"], cluster()
    parts = [*small.model.parts, Part("large", 2 * GIB)]
    own = coordinator([*ends(), timing("layer", 1, 1), timing("large", 1, 1)], memory_bytes=4 * GIB)
    given = profile(kinds, small.devices[1:], own, (), {"parts": parts}, batch_size=8)
    (fault,) = check_plan(plan(("tower", 0, 2), ("coordinator", 2, 6)), given)
    # Of 5 GiB 3.8 fit; of the last layers one would have been enough.
    assert fault == "does not fit: `coordinator` is 1.2 GiB short; move 2 layers."


def test_every_stage_that_does_not_fit_is_named() -> None:
    small = cluster()
    faults = check_plan(plan(("laptop", 0, 3), ("tower", 3, 6)), small)
    assert len(faults) == 1
    tight = profile(
        6,
        [device(name, 1, 1, memory_bytes=GIB) for name in ("laptop", "tower")],
        model_options={"parts": small.model.parts},
        batch_size=8,
    )
    assert len(check_plan(plan(("laptop", 0, 3), ("tower", 3, 6)), tight)) == 2


def test_a_profile_without_a_batch_size_is_refused() -> None:
    (fault,) = check_plan(plan(("tower", 0, 6)), cluster(batch_size=None))
    assert "names no batch size" in fault


def test_the_plan_is_simulated_as_it_is_written() -> None:
    edited = plan(("coordinator", 0, 3), ("tower", 3, 6), micro_batches=4, in_flight=9)
    candidate = candidate_of(edited, cluster())
    assert candidate.plan().stages == edited.stages
    assert (candidate.size, candidate.in_flight) == (2, 4)
    assert candidate.step_seconds >= 4 * 3 * 4


def test_rounded_boundaries_occupy_links_for_less_time() -> None:
    model = {"activation_bytes_per_sample": 6400, "gradient_bytes_per_sample": 3200}
    slow = profile(
        6, [device("tower", 1, 1), device("laptop", 1, 1)], None, (), model, batch_size=8
    )
    edited = Plan(
        [
            StagePlan(["coordinator"], (0, 2), activation_dtype="float16"),
            StagePlan(["tower"], (2, 4)),
            StagePlan(["laptop"], (4, 6), gradient_dtype="int8"),
        ],
    )
    whole = dataclasses.replace(candidate_of(edited, slow), narrowings=())

    def shares(hops: Callable[[Candidate], list[Hop]]) -> list[float]:
        pairs = zip(hops(candidate_of(edited, slow)), hops(whole), strict=True)
        return [narrow.busy_seconds / wide.busy_seconds for narrow, wide in pairs]

    # Leaving the coordinator, the tower, the laptop.
    assert shares(lambda found: found.pipeline.forward_hops) == pytest.approx([0.5, 1, 0.5])
    int8 = 17 / 64
    assert shares(lambda found: found.pipeline.backward_hops) == pytest.approx([int8, 1, int8])


def small_cluster(
    memory_gib: float, saved_gib: float = 0, own: DeviceProfile | None = None, layers: int = 4
) -> Profile:
    """One worker; a layer weighs a GiB."""
    timings = [timing("layer", 1, 1, saved_bytes=int(saved_gib * GIB))]
    memory = int(memory_gib * GIB / 0.95)
    worker = device("old-tower", 0, 0, timings=timings, memory_bytes=memory)
    parts = [Part(EMBEDDING, GIB), Part(HEAD, 0), Part("layer", GIB)]
    return profile(
        layers,
        [worker],
        own or coordinator(memory_bytes=2 * GIB),
        (),
        {"parts": parts},
        batch_size=8,
    )


def candidate(of: Profile, layers: int, in_flight: int = 2) -> Candidate:
    costs = Costs(of, {})
    own = costs.both_ends(1)
    option = costs.holder("old-tower", 1).option("float32", False)
    seats = [
        Seat(COORDINATOR, (0, 0), own.front.options[0], (EMBEDDING,)),
        Seat("old-tower", (0, layers), option),
        Seat(COORDINATOR, (layers, layers), own.behind.options[0], (HEAD,)),
    ]
    return Candidate(costs, seats, 8, in_flight)


def test_a_candidate_that_fits_has_no_shortage() -> None:
    assert shortages(candidate(small_cluster(4.01), 4)) == []


def test_weights_that_do_not_fit_have_to_move() -> None:
    (short,) = shortages(candidate(small_cluster(2.8), 4))
    assert short.text == "does not fit: `old-tower` is 1.2 GiB short; move 2 layers."


def test_activations_that_do_not_fit_may_be_recomputed() -> None:
    (short,) = shortages(candidate(small_cluster(6.1, saved_gib=0.5), 4))
    assert short.text == (
        "does not fit: `old-tower` is 1.9 GiB short; recompute there or move 1 layer."
    )


def test_where_neither_recomputation_nor_moving_helps_fewer_in_flight_do() -> None:
    # What is sent and received alone is more than there is.
    large = small_cluster(8)
    boundary = {"parts": large.model.parts, "activation_bytes_per_sample": 9 * GIB}
    large = profile(4, large.devices[1:], large.devices[0], (), boundary, batch_size=8)
    texts = {short.name: short.text for short in shortages(candidate(large, 1))}
    assert texts["coordinator"].endswith("short; use more micro-batches or fewer in flight.")


def test_unmeasured_layers_are_reported() -> None:
    unmeasured = profile(4, [device("old-tower", 0, 0, timings=[])], batch_size=8)
    (short,) = shortages(candidate(unmeasured, 4))
    assert "was not measured with these layers" in short.text


def refused(of: Profile, wishes: Wishes | None = None) -> str:
    with pytest.raises(PlanError) as error:
        solve(of, wishes)
    return str(error.value)


def test_too_many_layers() -> None:
    assert "hold 2 of 4 layers (`coordinator` 0, `old-tower` 2)" in refused(small_cluster(2.5))


def test_an_embedding_too_large_for_the_coordinator() -> None:
    text = refused(small_cluster(8, own=coordinator(memory_bytes=GIB // 2)))
    assert re.search(
        r"The embedding and the head do not fit: the coordinator is 53\d.\d MiB short", text
    )


def test_micro_batches_too_large_for_the_coordinator() -> None:
    own = coordinator(ends(), memory_bytes=4 * GIB, largest_micro_batch=3)
    text = refused(small_cluster(8, own=own), Wishes(micro_batches=2))
    assert "cannot run its embedding and its head on 4 samples at once: at most 3 fit" in text


def test_a_pin_too_large() -> None:
    text = refused(small_cluster(2.5), Wishes(pins={"old-tower": (0, 4)}))
    assert text == (
        "The pin old-tower=0:4 cannot be honoured: `old-tower` is 1.5 GiB short. "
        "At most 2 layers fit there."
    )


def test_a_pin_that_leaves_layers_without_a_device() -> None:
    assert refused(small_cluster(8), Wishes(pins={"old-tower": (1, 4)})) == (
        "No order of the devices takes all 4 layers: at most they hold `coordinator` 0, "
        "`old-tower` 4, and layers go to consecutive stages beside the pins old-tower=1:4. Take "
        "back a pin or an exclusion, or add a worker."
    )
