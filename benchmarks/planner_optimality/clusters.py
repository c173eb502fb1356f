"""Random clusters, small enough for a brute force: of two to six devices for lines, and of two to
four for plans with replicas."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from lightning_hetero.plan import COORDINATOR
from lightning_hetero.planner.profile import (
    EMBEDDING,
    ENDS,
    HEAD,
    VERSION,
    DeviceProfile,
    Link,
    LinkSpeed,
    ModelProfile,
    Part,
    Profile,
    Timing,
)

GIB = 2**30
LAYERS = {2: (6, 24), 3: (6, 16), 4: (6, 12), 5: (6, 10), 6: (6, 9)}
"""The fewest and the most layers, by the number of devices."""

SIZES = (1, 2, 4, 8, 16)


SMALL_LAYERS = {2: (2, 6), 3: (2, 5), 4: (2, 4)}
"""The fewest and the most layers of small clusters, by the number of devices."""


def draw_small_cluster(seed: int) -> Profile:
    """A cluster of up to four devices, whose model trains between all and one in 100,000 of
    its parameters. So replicas, lines, and lines with replicas are each the best plan somewhere."""
    draw = random.Random(seed)
    num_devices = draw.randint(2, 4)
    layers = ["layer"] * draw.randint(*SMALL_LAYERS[num_devices])
    if draw.random() < 0.3:
        layers = [draw.choice(["dense", "mixture"]) for _ in layers]
    names = [COORDINATOR, *(f"worker-{number}" for number in range(1, num_devices))]
    trained = _log_uniform(draw, 1e-5, 1)
    parts = [_part(name, draw, trained) for name in [*ENDS, *dict.fromkeys(layers)]]
    return _made_up(draw, layers, parts, names, (1e8, 1e10), [4, 8, 8, 16])


def draw_cluster(seed: int) -> Profile:
    """A made-up model on made-up devices.

    Devices differ by up to 16 times in speed, 12 times in memory and 40 times in the cost of a
    start. Links differ by up to 100 times. Some links share a medium, some models have two kinds of
    layers, some embeddings may leave, and some workers lack the user's precision.
    """
    draw = random.Random(seed)
    num_devices = draw.randint(2, 6)
    kinds = ["layer"] if draw.random() < 0.7 else ["dense", "mixture"]
    layers = [draw.choice(kinds) for _ in range(draw.randint(*LAYERS[num_devices]))]
    names = [COORDINATOR, *(f"worker-{number}" for number in range(1, num_devices))]
    parts = [_part(name, draw) for name in [*ENDS, *dict.fromkeys(layers)]]
    return _made_up(draw, layers, parts, names, (5e7, 2e9), [2, 4, 4, 8, 16, 32])


def with_heads(profile: Profile, seed: int) -> Profile:
    """The cluster with a head that may leave. It was measured on nine of ten workers, as fast as
    their layers allow or up to twice as slow, and takes up to eight times as long as before."""
    draw = random.Random(seed)
    times, model = _log_uniform(draw, 1, 8), profile.model
    devices, kinds = [], profile.model.kinds
    own = profile.device(COORDINATOR)
    for device in profile.devices:
        factor = times * draw.uniform(1, 2) * _slowness(device, kinds) / _slowness(own, kinds)
        heads = [_slower(each, factor) for each in own.timings if each.part == HEAD]
        if device is own:
            others = [each for each in own.timings if each.part != HEAD]
            heads = [_slower(each, times) for each in own.timings if each.part == HEAD]
        else:
            others, heads = device.timings, heads if draw.random() < 0.9 else []
        devices.append(replace(device, timings=[*others, *heads]))
    model = replace(model, head_may_leave=True)
    return replace(profile, model=model, devices=devices)


def _slowness(device: DeviceProfile, kinds: Sequence[str]) -> float:
    return sum(each.forward_seconds for each in device.timings if each.part in kinds)


def _slower(timing: Timing, factor: float) -> Timing:
    return replace(
        timing,
        forward_seconds=timing.forward_seconds * factor,
        backward_seconds=timing.backward_seconds * factor,
    )


def _made_up(
    draw: random.Random,
    layers: list[str],
    parts: list[Part],
    names: list[str],
    bytes_per_second: tuple[float, float],
    batch_sizes: list[int],
) -> Profile:
    """The profile of a made-up model, whose parts are drawn, on devices of these names."""
    model = ModelProfile(
        "made up",
        layers,
        parts,
        tokens_per_sample=512,
        activation_bytes_per_sample=2**22,
        gradient_bytes_per_sample=2**22,
        embedding_may_leave=draw.random() < 0.5,
    )
    return Profile(
        VERSION,
        model,
        [_device(name, model, draw) for name in names],
        list(_links(names, draw)),
        LinkSpeed(draw.uniform(0.0001, 0.002), _log_uniform(draw, *bytes_per_second)),
        draw.choice(batch_sizes),
    )


def _part(name: str, draw: random.Random, trained: float = 1.0) -> Part:
    size = int(draw.uniform(0.2, 1) * GIB)
    gradient_bytes = int(size * trained)
    return Part(name, size, gradient_bytes // 4, gradient_bytes, 2 * gradient_bytes)


def _device(name: str, model: ModelProfile, draw: random.Random) -> DeviceProfile:
    seconds, memory_bytes = _log_uniform(draw, 0.002, 0.032), _log_uniform(draw, 8, 96) * GIB
    start, dtype = _log_uniform(draw, 0.1, 4), model.dtype
    if name != COORDINATOR and draw.random() < 0.1:
        dtype = "bfloat16"
    timings = []
    for kind in model.kinds:
        timings += _timings(kind, seconds * draw.uniform(0.7, 1.4), start, dtype)
    if name == COORDINATOR:
        timings += _timings(EMBEDDING, seconds * draw.uniform(0.05, 0.3), start, dtype)
        timings += _timings(HEAD, seconds * draw.uniform(0.3, 2), start, dtype)
    optimizer_seconds = {kind: seconds * draw.uniform(0.1, 1) for kind in model.kinds}
    return DeviceProfile(name, "made up", int(memory_bytes), GIB, timings, optimizer_seconds)


def _timings(part: str, seconds: float, start: float, dtype: str) -> list[Timing]:
    """A third forward; ``start`` is the cost of an action in samples."""
    return [
        Timing(
            part,
            size,
            seconds / 3 * (size + start),
            seconds * 2 / 3 * (size + start),
            saved_bytes=size * 2**27,
            peak_bytes=size * 2**28,
            dtype=dtype,
        )
        for size in SIZES
    ]


def _links(names: list[str], draw: random.Random) -> Iterator[Link]:
    """Half of the clusters have measured links; in a third of these, some share a medium."""
    if draw.random() < 0.5:
        return
    shares = draw.random() < 1 / 3
    for source in names:
        for target in names:
            if source != target:
                speed = _log_uniform(draw, 2e7, 2e9)
                shared = f"card of {source}" if shares and draw.random() < 0.5 else None
                yield Link(source, target, draw.uniform(0.0001, 0.003), speed, shared)


def _log_uniform(draw: random.Random, low: float, high: float) -> float:
    return float(low * (high / low) ** draw.random())
