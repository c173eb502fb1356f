"""Random fleets of 16 to 128 devices of several kinds, too many for a brute force."""

from __future__ import annotations

import random

from benchmarks.planner_optimality.clusters import GIB
from benchmarks.planner_speed.main import make_model, make_timings
from lightning_hetero.plan import COORDINATOR
from lightning_hetero.planner.profile import (
    EMBEDDING,
    HEAD,
    VERSION,
    DeviceProfile,
    LinkSpeed,
    Part,
    Profile,
)


def draw_fleet(seed: int, num_devices: int) -> Profile:
    """A made-up model on three to eight kinds of devices, or on devices that are all unlike.

    Devices differ by up to 16 times in speed and 10 times in memory. The model takes a tenth to a
    half of all memory, and trains all its parameters or one in 256 of them.
    """
    draw = random.Random(f"{seed} {num_devices}")
    num_kinds = num_devices if draw.random() < 0.25 else draw.randint(3, 8)
    kinds = [
        (_log_uniform(draw, 0.002, 0.032), int(_log_uniform(draw, 8, 80) * GIB))
        for _ in range(num_kinds)
    ]
    speeds = [kinds[number % num_kinds] for number in range(num_devices)]
    num_layers = draw.choice([32, 48, 64, 80, 128])
    trains_all = draw.random() < 0.5
    held = draw.uniform(0.1, 0.5) * sum(memory for _, memory in speeds) / num_layers
    held = int(min(held, 0.4 * min(memory for _, memory in speeds)))
    weights = held // 4 if trains_all else held
    trained = weights if trains_all else weights // 256
    layer = Part("layer", weights, trained // 4, trained, 2 * trained)
    model = make_model(num_layers, layer, embedding_may_leave=draw.random() < 0.5)
    devices = [
        _device(COORDINATOR if number == 0 else f"worker-{number}", *speed)
        for number, speed in enumerate(speeds)
    ]
    link = LinkSpeed(draw.uniform(0.0001, 0.001), _log_uniform(draw, 1e8, 1e10))
    return Profile(
        VERSION, model, devices, default_link=link, batch_size=draw.choice([32, 64, 128])
    )


def _device(name: str, seconds: float, memory_bytes: int) -> DeviceProfile:
    """A device whose actions cost half a sample to start, a third of them forward."""
    parts = {"layer": seconds}
    if name == COORDINATOR:
        parts |= {EMBEDDING: 0.0005, HEAD: 0.0005}
    made = (make_timings(part, each, saved_bytes=2**25) for part, each in parts.items())
    timings = [timing for each in made for timing in each]
    return DeviceProfile(name, "made up", memory_bytes, GIB, timings, {"layer": seconds / 10})


def _log_uniform(draw: random.Random, low: float, high: float) -> float:
    return float(low * (high / low) ** draw.random())
