"""The solver, from a profile to a plan: the published clusters, wishes, memory and dtypes."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from lightning_hetero.errors import PlanError
from lightning_hetero.planner.profile import Part, Profile
from lightning_hetero.planner.solver import Wishes, micro_batch_counts, solve
from lightning_hetero.planner.verdict import judge

from .profiles import GIB, coordinator, device, ends, model, profile, timing
from .tables import TABLES, Row


def cluster_of(row: Row, batch_size: int) -> Profile:
    """A device per entry; a quarter forward, three quarters forward again and backward."""
    workers = [
        device(f"w{number}", time / 4000, 3 * time / 4000)
        for number, time in enumerate(row.layer_milliseconds)
    ]
    return profile(row.num_layers, workers, batch_size=batch_size)


def shares(profile_: Profile, wishes: Wishes) -> dict[str, int]:
    chosen = solve(profile_, dataclasses.replace(wishes, replicas=False)).chosen
    return {seat.name: seat.num_layers for seat in chosen.seats[1:-1]}


@pytest.mark.parametrize("row", TABLES, ids=lambda row: row.name)
def test_the_published_splits_are_chosen_where_there_is_time_to_fill(row: Row) -> None:
    expected = {f"w{number}": layers for number, layers in enumerate(row.best_layers)}
    assert shares(cluster_of(row, 256), Wishes(micro_batches=256)) == expected


def test_the_p40_is_left_out_at_16_microbatches() -> None:
    found = shares(cluster_of(TABLES[0], 16), Wishes(micro_batches=16))
    assert found == {"w0": 16, "w1": 8, "w2": 8}


def test_a_pin_keeps_the_p40() -> None:
    pinned = Wishes(micro_batches=16, pins={"w3": (31, 32)})
    assert shares(cluster_of(TABLES[0], 16), pinned)["w3"] == 1


def test_an_excluded_device_has_nothing() -> None:
    assert "w0" not in shares(cluster_of(TABLES[0], 16), Wishes(exclude=["w0"]))


@pytest.mark.parametrize(
    ("batch_size", "wished", "expected"),
    [
        (12, None, [1, 2, 3, 4, 6, 12]),
        (7, None, [1, 7]),
        (12, 5, [5]),
        (360, None, [1, 2, 4, 8, 15, 30, 60, 120, 180, 360]),
    ],
)
def test_a_batch_is_cut_evenly_unless_wished_otherwise(
    batch_size: int, wished: int | None, expected: list[int]
) -> None:
    assert micro_batch_counts(batch_size, wished) == expected


def test_the_plan_passes_its_own_check() -> None:
    solution = solve(cluster_of(TABLES[0], 16))
    solution.plan.check(32, solution.chosen.costs.profile.workers)


def test_a_start_up_cost_makes_larger_microbatches() -> None:
    def pieces(start_up: float) -> int:
        timings = [timing("layer", start_up + size, start_up + size, size=size) for size in (1, 64)]
        workers = [device(name, 0, 0, timings=timings) for name in "ab"]
        return solve(profile(4, workers, batch_size=64), Wishes(replicas=False)).plan.micro_batches

    assert pieces(0) == 64
    assert pieces(0.5) > pieces(20)


def test_the_coordinator_takes_layers_where_it_has_time() -> None:
    own = coordinator([*ends(0.5, 1), timing("layer", 1, 2), timing("layer", 64, 128, size=64)])
    measured = profile(12, [device("w", 1, 2)], own, batch_size=32)
    chosen = solve(measured, Wishes(replicas=False)).chosen
    # 12 layers and ends worth one: 5.5 and 6.5 would be level.
    assert sum(seat.num_layers for seat in chosen.seats_of("coordinator")) in (5, 6)


def test_memory_moves_layers_to_where_they_fit() -> None:
    weights = [*model(8).parts[:2], Part("layer", GIB)]
    workers = [
        device("small", 1, 1, memory_bytes=int(2.5 * GIB)),
        device("big", 2, 2, memory_bytes=20 * GIB),
    ]
    found = profile(8, workers, model_options={"parts": weights}, batch_size=32)
    assert shares(found, Wishes()) == {"small": 2, "big": 6}
    more = Wishes(memory_bytes={"small": 20 * GIB})
    assert shares(found, more)["small"] > 2


def test_a_device_without_the_users_precision_gets_its_fastest_dtype() -> None:
    volta = [timing("layer", 9, 9), timing("layer", 1, 1, dtype="float16")]
    ampere = [timing("layer", 1, 1, dtype="bfloat16")]
    workers = [device("v100", 0, 0, timings=volta), device("a10", 0, 0, timings=ampere)]
    own_ends = [timing(t.part, 0, 0, size=t.micro_batch_size, dtype="bfloat16") for t in ends()]
    found = profile(
        4, workers, coordinator(own_ends), model_options={"dtype": "bfloat16"}, batch_size=64
    )
    dtypes = {stage.worker: stage.dtype for stage in solve(found).plan.stages}
    assert dtypes == {"v100": "float16", "a10": None}


def test_a_model_that_fits_nowhere_is_refused_with_what_is_short() -> None:
    weights = [*model(8).parts[:2], Part("layer", GIB)]
    workers = [device("small", 1, 1, memory_bytes=int(2.5 * GIB))]
    with pytest.raises(PlanError, match=r"hold 2 of 8 layers .*6 layers or about 6.0 GiB"):
        solve(profile(8, workers, model_options={"parts": weights}, batch_size=4))


def test_a_profile_in_which_nothing_takes_time_is_refused() -> None:
    nothing = profile(4, [device("w", 0, 0)], coordinator([*device("", 0, 0).timings, *ends()]))
    with pytest.raises(PlanError, match="a step takes 0 seconds.*Measure the layers again"):
        solve(replace(nothing, batch_size=2))


def test_layers_that_take_no_time_beside_ends_that_do_are_planned_and_judged() -> None:
    own = coordinator([*device("", 0, 0).timings, *ends(1, 1)])
    given_profile = replace(profile(4, [device("w", 0, 0)], own), batch_size=2)
    assert judge(solve(given_profile)).tokens_per_second > 0


def test_too_many_layers_on_too_many_unlike_devices_are_refused_at_once() -> None:
    workers = [device(f"w{number}", 1 + number, 2) for number in range(500)]
    with pytest.raises(PlanError, match="at most 10 unlike devices. Exclude the slowest ones"):
        solve(profile(1000, workers, batch_size=4))
