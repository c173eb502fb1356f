"""Fleets of unlike cards from their published peaks, for what adapters train on at home.

The model is Llama 3.1 8B in NF4 with adapters: weights are frozen, so a backward has the operations
of a forward. Cards reach a like share of their published peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hetero.plan import COORDINATOR
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

from .profiles import GIB

TERAFLOPS: Mapping[str, float] = {
    "rtx5090": 209.5,
    "rtx4090": 165.2,
    "rtx3090": 71.0,
    "v100": 112.0,
    "m40": 6.8,
    "strix": 59.4,
}
"""Published peaks of dense multiplications in 16 bits with sums in float32; the M40 and older
cards in float32."""

MEMORY_GIB: Mapping[str, float] = {
    "rtx5090": 32,
    "rtx4090": 24,
    "rtx3090": 24,
    "v100": 16,
    "m40": 12,
    "strix": 96,
}

REACHED = 0.4
"""The share of its peak that a card reaches."""

HIDDEN, LAYERS, VOCABULARY = 4096, 32, 128_256
LAYER_PARAMETERS = 218_112_000
ADAPTER_PARAMETERS = 1_310_720
GIGABIT = LinkSpeed(latency_seconds=0.0005, bytes_per_second=1.1e8)


def fleet(coordinator: str, workers: Sequence[str], tokens: int, **others: Any) -> Profile:
    """The script on one card, and workers on others, with samples of so many tokens."""
    layer = 2 * LAYER_PARAMETERS * tokens + 2 * tokens**2 * HIDDEN
    head = 2 * HIDDEN * VOCABULARY * tokens
    ends = {EMBEDDING: 0.0, HEAD: head}
    own = _device(COORDINATOR, coordinator, {**ends, "layer": layer}, tokens)
    beside = [_device(name, name, {"layer": layer}, tokens) for name in workers]
    return Profile(
        VERSION,
        _model(tokens),
        [own, *beside],
        **({"default_link": GIGABIT, "batch_size": 1} | others),
    )


def _model(tokens: int) -> ModelProfile:
    table = 2 * HIDDEN * VOCABULARY
    adapter = 4 * ADAPTER_PARAMETERS
    return ModelProfile(
        "8B in NF4 with adapters",
        ["layer"] * LAYERS,
        [
            Part(EMBEDDING, table),
            Part(HEAD, table),
            Part(
                "layer",
                int(0.53 * LAYER_PARAMETERS),
                ADAPTER_PARAMETERS,
                gradient_bytes=adapter,
                optimizer_bytes=2 * adapter,
            ),
        ],
        tokens_per_sample=tokens,
        activation_bytes_per_sample=2 * HIDDEN * tokens,
        gradient_bytes_per_sample=2 * HIDDEN * tokens,
        dtype="bfloat16",
    )


def _device(name: str, card: str, operations: Mapping[str, float], tokens: int) -> DeviceProfile:
    saved = {"layer": 34 * HIDDEN * tokens, HEAD: 6 * VOCABULARY * tokens, EMBEDDING: 0}
    timings = []
    for part, count in operations.items():
        seconds = count / (REACHED * 1e12 * TERAFLOPS[card])
        kept = saved[part]
        timings.append(Timing(part, 1, seconds, seconds, kept, 2 * kept, "bfloat16"))
    return DeviceProfile(name, card, int(MEMORY_GIB[card] * GIB), base_bytes=GIB, timings=timings)
