"""The solver, from a profile to a plan: the published clusters, wishes, memory and dtypes.

The even plan has every layer once, shares that differ by at most one, and the coordinator first.
"""

from __future__ import annotations

import dataclasses
import io
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console

from lightning_hetero.errors import PlanError, ProfileError
from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.planner.feasibility import candidate_of, shortages
from lightning_hetero.planner.profile import Link, Part, Profile
from lightning_hetero.planner.simulation import SimulatedRun, Simulation
from lightning_hetero.planner.solver import (
    Wishes,
    apply,
    even_plan,
    micro_batch_counts,
    parse_memory,
    parse_pin,
    solve,
)
from lightning_hetero.planner.verdict import judge, render

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


def test_a_batch_of_a_million_samples_is_planned_with_few_simulations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sample keeps 16 MiB in a layer, so most numbers of micro-batches fit nowhere."""
    num_played = 0

    def counted(run: SimulatedRun) -> Simulation:
        nonlocal num_played
        num_played += 1
        return played(run)

    played = SimulatedRun.play
    monkeypatch.setattr(SimulatedRun, "play", counted)
    workers = [
        device(
            f"w{number}",
            0,
            0,
            timings=[
                timing("layer", each * n, 2 * each * n, size=n, saved_bytes=n * 2**24)
                for n in (1, 64)
            ],
        )
        for number, each in enumerate([0.001, 0.002])
    ]
    chosen = solve(profile(8, workers, batch_size=10**6)).chosen
    assert not shortages(chosen)
    assert len(chosen.workers) == 2
    assert num_played < 150


def test_an_excluded_device_has_nothing() -> None:
    assert "w0" not in shares(cluster_of(TABLES[0], 16), Wishes(exclude=["w0"]))


@pytest.mark.parametrize(
    ("batch_size", "wished", "window", "expected"),
    [
        (12, None, 1, [1, 2, 3, 4, 6, 12]),
        (7, None, 1, [1, 7]),
        (12, 5, 1, [5]),
        (360, None, 1, [1, 2, 4, 8, 15, 30, 60, 120, 180, 360]),
        (8, None, 8, [8]),
        (16, None, 4, [4, 8, 16]),
        (16, 1, 4, [4]),
        (16, 11, 4, [8]),
    ],
)
def test_a_batch_is_cut_evenly_unless_wished_otherwise(
    batch_size: int, wished: int | None, window: int, expected: list[int]
) -> None:
    assert micro_batch_counts(batch_size, wished, window) == expected


def test_the_pieces_of_a_window_are_never_joined() -> None:
    windowed = replace(cluster_of(TABLES[0], 16), window=8)
    assert solve(windowed).plan.micro_batches % 8 == 0
    assert solve(windowed, Wishes(micro_batches=2)).plan.micro_batches == 8
    wished = solve(windowed, Wishes(micro_batches=16)).plan
    assert candidate_of(dataclasses.replace(wished, micro_batches=1), windowed).micro_batches == 8
    with pytest.raises(PlanError, match="must be a multiple of that"):
        solve(windowed, Wishes(batch_size=12))
    with pytest.raises(ProfileError, match="multiple of window"):
        replace(windowed, window=5).check()


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


LINE = Wishes(replicas=False)


def with_software(profile_: Profile, seconds: float) -> Profile:
    """The profile with so much software per micro-batch in each process."""
    devices = [replace(each, software_seconds=seconds) for each in profile_.devices]
    return replace(profile_, devices=devices)


def test_software_makes_steps_of_many_micro_batches_longer() -> None:
    known = profile(8, [device("a", 0.001, 0.002)], batch_size=64)
    plan = Plan([StagePlan(["a"], (0, 8))], 64)
    added = with_software(known, 0.006)
    for count in (4, 64):
        pieces = dataclasses.replace(plan, micro_batches=count, in_flight=count)
        # The worker is the slowest process; the first start and the last backward are not its own.
        more = count * 0.006 + 2 * 0.002
        found = candidate_of(pieces, added).step_seconds
        assert found == pytest.approx(candidate_of(pieces, known).step_seconds + more)


def test_software_makes_fewer_micro_batches() -> None:
    known = profile(8, [device(name, 0.001, 0.002) for name in "ab"], batch_size=64)
    assert solve(known, LINE).plan.micro_batches == 64
    assert 1 < solve(with_software(known, 0.006), LINE).plan.micro_batches < 64


def test_where_layers_are_tiny_beside_the_software_one_device_has_all() -> None:
    timings = [*ends(), *device("", 0.001, 0.002).timings]
    known = profile(8, [device("a", 0.001, 0.002)], coordinator(timings), batch_size=16)
    assert solve(known).chosen.workers == ("a",)
    alone = solve(with_software(known, 0.5)).chosen
    assert alone.workers == ()
    # Nothing goes anywhere.
    assert alone.step_seconds == pytest.approx(8 * 16 * 0.003)


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
    assert judge(solve(given_profile)).candidate.tokens_per_second > 0


def test_too_many_layers_on_too_many_unlike_devices_are_refused_at_once() -> None:
    workers = [device(f"w{number}", 1 + number, 2) for number in range(500)]
    with pytest.raises(PlanError, match="at most 10 unlike devices. Exclude the slowest ones"):
        solve(profile(1000, workers, batch_size=4))


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


num_layers_and_workers = st.integers(0, 200).flatmap(
    lambda num_layers: st.tuples(st.just(num_layers), st.integers(0, min(num_layers, 40)))
)


def names(num_workers: int) -> list[str]:
    return [f"worker-{index}:9999" for index in range(num_workers)]


def even_shares(plan: Plan) -> list[int]:
    return [len(stage.layer_indices) for stage in plan.stages]


@given(num_layers_and_workers)
def test_every_layer_is_in_one_stage_and_the_order_is_kept(case: tuple[int, int]) -> None:
    num_layers, num_workers = case
    plan = even_plan(num_layers, names(num_workers))
    layers = [index for stage in plan.stages for index in stage.layer_indices]
    assert layers == list(range(num_layers))


@given(num_layers_and_workers)
def test_shares_differ_by_at_most_one_and_every_worker_has_a_layer(case: tuple[int, int]) -> None:
    coordinator, *workers = even_shares(even_plan(case[0], names(case[1])))
    assert max([coordinator, *workers]) - min([coordinator, *workers]) <= 1
    assert all(workers)


@given(num_layers_and_workers)
def test_the_coordinator_is_first_and_has_the_smallest_share(case: tuple[int, int]) -> None:
    plan = even_plan(case[0], names(case[1]))
    assert [stage.worker for stage in plan.stages] == ["coordinator", *names(case[1])]
    assert even_shares(plan)[0] == min(even_shares(plan))


@given(num_layers_and_workers)
def test_an_even_plan_fits_its_model_and_workers(case: tuple[int, int]) -> None:
    num_layers, num_workers = case
    even_plan(num_layers, names(num_workers)).check(num_layers, names(num_workers))


def test_seven_layers_on_two_workers() -> None:
    plan = even_plan(7, ["a:1", "b:1"])
    assert [stage.layers for stage in plan.stages] == [(0, 2), (2, 4), (4, 7)]


@given(num_layers=st.integers(0, 50), excess=st.integers(1, 50))
def test_more_workers_than_layers_are_refused_with_both_numbers(
    num_layers: int, excess: int
) -> None:
    num_workers = num_layers + excess
    expected = f"has {num_layers} layers, too few for {num_workers} workers"
    with pytest.raises(PlanError, match=expected):
        even_plan(num_layers, names(num_workers))


def test_where_a_stage_fits_only_by_layers_the_plan_says_so() -> None:
    timings = [timing("layer", 1, 2, saved_bytes=100, peak_bytes=110)]
    worker = device("w", 0, 0, timings=timings, memory_bytes=1000)
    given = profile(40, [worker], batch_size=4, model_options={"activation_bytes_per_sample": 8})
    found = solve(given)
    (stage,) = found.plan.stages
    assert (stage.workers, stage.layers, stage.recompute) == (["w"], (0, 40), "layers")
    assert shortages(candidate_of(found.plan, given)) == []
    console = Console(width=200, file=io.StringIO())
    console.print(render(judge(found)))
    assert "float32 recompute by layers" in console.file.getvalue()  # type: ignore[attr-defined]
    # 40 inputs and what is sent on, for each micro-batch; one layer's graph; two boundaries.
    need = found.chosen.need("w")
    per_sample = found.chosen.in_flight * (41 * 8) + 110 + 2 * 8
    assert need.total == found.chosen.size * per_sample
    whole = Plan([dataclasses.replace(stage, recompute=True)], found.plan.micro_batches, 1)
    (short,) = shortages(candidate_of(whole, given))
    assert short.text.endswith(" short; recompute there by layers or move 36 layers.")
