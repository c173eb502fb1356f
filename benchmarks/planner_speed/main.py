"""Seconds of one core that planning takes: from a profile in memory to the plan and its verdict."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from lightning_hetero.planner.profile import (
    EMBEDDING,
    HEAD,
    VERSION,
    DeviceProfile,
    LinkSpeed,
    ModelProfile,
    Part,
    Profile,
    Timing,
)
from lightning_hetero.planner.solver import solve
from lightning_hetero.planner.verdict import BY_SPEEDS, judge

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A cluster of made-up devices; those of one kind were measured alike."""

    name: str
    num_workers: int
    num_kinds: int
    num_layers: int
    goal_seconds: float | None = None
    trains_all: bool = True


CASES = [
    Case("3 different", 3, 3, 32),
    Case("5 different", 5, 5, 48, goal_seconds=4),
    Case("8 different", 8, 8, 80, goal_seconds=1),
    Case("64 of 6 kinds", 64, 6, 128, goal_seconds=30),
    Case("5 different, adapters", 5, 5, 48, goal_seconds=4, trains_all=False),
    Case("8 different, adapters", 8, 8, 80, trains_all=False),
    Case("64 of 6 kinds, adapters", 64, 6, 128, trains_all=False),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--heads", action="store_true", help="let the head leave too")
    options = parser.parse_args()
    columns = ("workers", "layers", "plan, s", "goal, s", "verdict, s", "chosen", "of the bound")
    table = Table(*columns)
    for case in CASES:
        table.add_row(*measure(case, options.rounds, options.batch_size, options.heads))
    Console().print(table)


def measure(case: Case, rounds: int, batch_size: int, heads: bool) -> list[str]:
    """A row of the table; each round has another cluster."""
    plan_seconds, verdict_seconds, achieved, chosen = [], [], [], []
    for seed in range(rounds):
        profile = make_profile(case, batch_size, seed)
        profile = with_heads(profile) if heads else profile
        start = time.process_time()
        solution = solve(profile)
        planned = time.process_time()
        verdict = judge(solution)
        verdict_seconds.append(time.process_time() - planned)
        plan_seconds.append(planned - start)
        achieved.append(solution.chosen.tokens_per_second / verdict.bounds[BY_SPEEDS])
        chosen.append(len(solution.chosen.workers))
    return [
        case.name,
        str(case.num_layers),
        f"{max(plan_seconds):.2f}",
        "" if case.goal_seconds is None else f"< {case.goal_seconds:g}",
        f"{max(verdict_seconds):.2f}",
        "/".join(map(str, chosen)),
        f"{statistics.median(achieved):.0%}",
    ]


def make_profile(case: Case, batch_size: int, seed: int) -> Profile:
    """Devices of 1 to 16 times the same speed and 8 to 80 GiB, and wires of 1 GB/s."""
    draw = random.Random(seed)
    kinds = [(draw.uniform(0.5, 8), draw.uniform(8, 80)) for _ in range(case.num_kinds)]
    devices = [make_coordinator()]
    for number in range(case.num_workers):
        milliseconds, gibibytes = kinds[number % case.num_kinds]
        devices.append(
            DeviceProfile(
                f"worker-{number}",
                f"kind {number % case.num_kinds}",
                int(gibibytes * GIB),
                GIB,
                make_timings("layer", milliseconds / 1000),
                {"layer": 0.001},
            )
        )
    trained = 2**28 if case.trains_all else 2**20
    layer = Part("layer", GIB // 4, trained // 2, trained, 2 * trained)
    model = make_model(case.num_layers, layer, embedding_may_leave=True)
    return Profile(
        VERSION, model, devices, default_link=LinkSpeed(0.0001, 1e9), batch_size=batch_size
    )


def with_heads(profile: Profile) -> Profile:
    """The profile with a head as slow as eight layers, which may leave the coordinator."""
    devices = []
    for device in profile.devices:
        (layer,) = {timing.part for timing in device.timings} - {EMBEDDING, HEAD} or {HEAD}
        one = next(each for each in device.timings if each.part == layer)
        heads = make_timings(HEAD, 8 * (one.forward_seconds + one.backward_seconds) / 1.5)
        others = [each for each in device.timings if each.part != HEAD]
        devices.append(replace(device, timings=[*others, *heads]))
    return replace(profile, model=replace(profile.model, head_may_leave=True), devices=devices)


def make_model(num_layers: int, layer: Part, embedding_may_leave: bool) -> ModelProfile:
    """Equal layers between an embedding and a head of a quarter of a GiB."""
    return ModelProfile(
        "made up",
        [layer.name] * num_layers,
        [Part(EMBEDDING, GIB // 4), Part(HEAD, GIB // 4), layer],
        tokens_per_sample=1024,
        activation_bytes_per_sample=2**23,
        gradient_bytes_per_sample=2**23,
        embedding_may_leave=embedding_may_leave,
    )


def make_coordinator() -> DeviceProfile:
    timings = [timing for part in (EMBEDDING, HEAD) for timing in make_timings(part, 0.0005)]
    return DeviceProfile("coordinator", "kind 0", 16 * GIB, GIB, timings)


def make_timings(part: str, seconds: float, saved_bytes: int = 2**24) -> list[Timing]:
    """A start-up cost of half a sample, a third forward, and so many bytes saved per sample."""
    return [
        Timing(
            part,
            size,
            seconds / 3 * (size + 0.5),
            seconds * 2 / 3 * (size + 0.5),
            saved_bytes=size * saved_bytes,
            peak_bytes=size * 2 * saved_bytes,
        )
        for size in (1, 2, 4, 8)
    ]


if __name__ == "__main__":
    main()
