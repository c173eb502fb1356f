"""Experts apart: taken where the links allow it, and said why not elsewhere."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from lightning_hetero.planner.candidates import Costs
from lightning_hetero.planner.experts import best_apart, has_experts
from lightning_hetero.planner.feasibility import candidate_of, check_plan
from lightning_hetero.planner.profile import EMBEDDING, HEAD, LinkSpeed, Part, Profile, Timing
from lightning_hetero.planner.solver import Wishes, solve
from lightning_hetero.planner.verdict import judge, sentences

from .profiles import GIB, coordinator, device, ends, profile, timing

TOKENS = 500
ATTENTION, EXPERTS = 5e-6, 40e-6
"""Seconds for a token and a layer, forward."""


def timings(**seconds: float) -> list[Timing]:
    return [
        timing(kind, each * TOKENS * size, 2 * each * TOKENS * size, size=size)
        for kind, each in seconds.items()
        for size in (1, 16)
    ]


def mixture(
    bytes_per_second: float, speeds: tuple[float, float] = (1, 1), memory_gib: float = 64
) -> Profile:
    """Eight layers in halves on two workers; ``speeds`` are how many times as fast the first one
    computes attention, and the second one experts."""
    kinds = ["attention", "experts"] * 8
    fast_attention, fast_experts = speeds
    workers = [
        device("a", 0, 0, timings=timings(attention=ATTENTION, experts=fast_experts * EXPERTS)),
        device("b", 0, 0, timings=timings(attention=fast_attention * ATTENTION, experts=EXPERTS)),
    ]
    parts = [
        *(Part(end, 0) for end in (EMBEDDING, HEAD)),
        Part("attention", GIB // 64),
        Part("experts", GIB, is_experts=True),
    ]
    sizes = {
        "parts": parts,
        "tokens_per_sample": TOKENS,
        "activation_bytes_per_sample": 8192 * TOKENS,
        "gradient_bytes_per_sample": 8192 * TOKENS,
    }
    found = profile(kinds, workers, coordinator(ends()), (), sizes, batch_size=16)
    speed = LinkSpeed(latency_seconds=1e-4, bytes_per_second=bytes_per_second)
    memory_bytes = int(memory_gib * GIB)
    devices = [replace(each, memory_bytes=memory_bytes) for each in found.devices]
    return replace(found, devices=devices, default_link=speed)


def line_of(given: Profile) -> str:
    (line,) = (
        each
        for each in sentences(judge(solve(given, Wishes(replicas=False))))
        if each.startswith("experts apart")
    )
    return line


def test_over_a_slow_link_experts_stay_with_their_attention() -> None:
    """At 1 Gbit/s an activation travels for 74 µs, and the experts of a token take 40."""
    given = mixture(1.1e8)
    assert solve(given, Wishes(replicas=False)).chosen.has_lone_seats
    line = line_of(given)
    assert "times as long as this plan: bound by the link " in line
    assert line.endswith(
        "for a token and layer the link takes 74.5 µs one way, the attention 5 µs forward, and the "
        "experts 40 µs"
    )


def test_over_a_fast_link_each_device_does_what_it_does_best() -> None:
    given = mixture(1e11, speeds=(16, 8))
    chosen = solve(given).chosen
    assert not chosen.has_lone_seats
    assert {seat.layers[0] % 2 for seat in chosen.seats_of("a")} == {0}
    assert {seat.layers[0] % 2 for seat in chosen.seats_of("b")} == {1}
    assert len(chosen.seats) == 2 + 16
    assert ", is this plan: not bound by a link" in line_of(given)
    line = candidate_of(chosen.plan(), given)
    assert line.step_seconds == pytest.approx(chosen.step_seconds)
    assert check_plan(chosen.plan(), given) == []
    chosen.plan().check(16, ["a", "b"])


def test_the_plan_with_experts_apart_is_faster_than_any_line() -> None:
    given = mixture(1e11, speeds=(16, 8))
    apart = solve(given).chosen
    lines = replace(given, model=replace(given.model, parts=_without_marks(given)))
    assert solve(lines).chosen.has_lone_seats
    assert apart.step_seconds < 0.98 * solve(lines).chosen.step_seconds


def _without_marks(given: Profile) -> list[Part]:
    return [replace(part, is_experts=False) for part in given.model.parts]


def test_without_room_for_all_experts_they_are_not_apart() -> None:
    given = mixture(1e11, speeds=(16, 8), memory_gib=7)
    assert solve(given).chosen.has_lone_seats
    assert line_of(given) == (
        "experts apart: no two workers hold the attention and the experts of all layers"
    )


def test_each_worker_has_room_for_all_its_stages() -> None:
    given = mixture(1e11, speeds=(16, 8))
    apart = best_apart(Costs(given, {}), ["a", "b"], [16])
    assert apart is not None
    assert apart.workers == ("a", "b")
    assert apart.need("b").weights == 8 * GIB
    assert apart.need("a").weights == 8 * GIB // 64


def test_pins_and_models_without_halves_have_no_experts_apart() -> None:
    given = mixture(1e11, speeds=(16, 8))
    pinned = solve(given, Wishes(pins={"a": (0, 4)})).chosen
    assert pinned.seats_of("a")[0].layers == (0, 4)
    whole = profile(4, [device("w", 1, 2)], batch_size=4)
    assert not has_experts(Costs(whole, {}))
    assert not any("experts" in line for line in sentences(judge(solve(whole))))
