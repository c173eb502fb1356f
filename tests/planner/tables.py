"""Published measurements of mixed GPUs with their known best splits, in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One model on one set of devices, one device per stage; links and memory left aside.

    Args:
        name: The model and how it was run.
        num_layers: Its decoder layers.
        layer_milliseconds: One layer on each device: forward, forward again, backward.
        best_layers: The best split.
        bottleneck: Its slowest stage.
        bound: By the sum of the devices' speeds.
        even: The slowest stage of an even split.
        best_single: All layers on the fastest device.
    """

    name: str
    num_layers: int
    layer_milliseconds: list[float]
    best_layers: list[int]
    bottleneck: float
    bound: float
    even: float
    best_single: float


TABLES = [
    Row("7b fp16 b4", 32, [43.3, 81.3, 81.3, 464.5], [15, 8, 8, 1], 650, 642, 3716, 1385),
    Row("7b fp32 b4", 32, [181.7, 378.3, 378.3, 412.5], [14, 6, 6, 6], 2544, 2422, 3300, 5815),
    Row("3b fp16 b1", 26, [10.3, 19.6, 73.1], [16, 8, 2], 165, 161, 585, 268),
    Row("33b fp16 b1", 60, [53.6, 90.7], [38, 22], 2036, 2021, 2721, 3214),
]
