"""Small profiles for the planner's tests, built from seconds per layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lightning_hetero.plan import COORDINATOR
from lightning_hetero.planner.profile import (
    EMBEDDING,
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
INSTANT = LinkSpeed(latency_seconds=0, bytes_per_second=1e18)


def timing(part: str, forward: float, backward: float, size: int = 1, **others: Any) -> Timing:
    return Timing(part, size, forward, backward, **others)


def ends(forward: float = 0, backward: float = 0) -> list[Timing]:
    """The embedding and the head, which take this long at any micro-batch size."""
    return [
        timing(part, forward, backward, size=size) for part in (EMBEDDING, HEAD) for size in (1, 64)
    ]


def device(name: str, forward: float, backward: float, **others: Any) -> DeviceProfile:
    """A device that takes so long for one layer and one sample, and proportionally for more."""
    timings = [
        timing("layer", forward * size, backward * size, size=size, saved_bytes=size)
        for size in (1, 64)
    ]
    given: dict[str, Any] = {"device": "test", "memory_bytes": GIB, "timings": timings} | others
    return DeviceProfile(name, **given)


def coordinator(timings: Sequence[Timing] = (), **others: Any) -> DeviceProfile:
    """A coordinator that holds no layer, and whose ends take no time where nothing is given."""
    return DeviceProfile(
        COORDINATOR, "test", **({"memory_bytes": GIB, "timings": [*(timings or ends())]} | others)
    )


def model(layers: int | Sequence[str], **others: Any) -> ModelProfile:
    kinds = ["layer"] * layers if isinstance(layers, int) else list(layers)
    names = [EMBEDDING, HEAD, *dict.fromkeys(kinds)]
    given: dict[str, Any] = {
        "parts": [Part(name, parameter_bytes=0) for name in names],
        "tokens_per_sample": 1,
        "activation_bytes_per_sample": 0,
        "gradient_bytes_per_sample": 0,
    }
    return ModelProfile("test", kinds, **(given | others))


def profile(
    layers: int | Sequence[str],
    workers: Sequence[DeviceProfile],
    own: DeviceProfile | None = None,
    links: Sequence[Link] = (),
    model_options: Mapping[str, Any] | None = None,
    **others: Any,
) -> Profile:
    """A profile with links that take no time where nothing is given."""
    return Profile(
        VERSION,
        model(layers, **(model_options or {})),
        [own or coordinator(), *workers],
        list(links),
        **({"default_link": INSTANT} | others),
    )


def content(of: Profile) -> Any:
    """What a reader of its file returns."""
    return msgspec.to_builtins(of)
