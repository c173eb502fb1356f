from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightning.pytorch.plugins.precision import Precision

from lightning_hetero.precision import RemoteSteps


class FakeOptimizer:
    """Notes what a `RemoteOptimizer` would be told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def clip_by_norm(self, value: float) -> None:
        self.told.append(("norm", value))

    def clip_by_value(self, value: float) -> None:
        self.told.append(("value", value))

    def step(self) -> None:
        self.told.append("step")

    def detach(self) -> None:
        self.told.append("detach")


def test_clipping_and_stepping_go_to_the_stages_until_detached() -> None:
    plugin, optimizer = Precision(), FakeOptimizer()
    plugin._after_closure = lambda *_: optimizer.told.append("hooks and clipping")  # type: ignore[method-assign]
    steps = RemoteSteps(plugin, optimizer)  # type: ignore[arg-type]
    plugin.clip_gradients(SimpleNamespace(), 0.5)  # type: ignore[arg-type]
    plugin.clip_gradients(SimpleNamespace(), 0.1, gradient_clip_algorithm="value")  # type: ignore[arg-type]
    plugin._after_closure(SimpleNamespace(), SimpleNamespace(param_groups=[]))  # type: ignore[arg-type]
    steps.detach()
    assert optimizer.told == [
        ("norm", 0.5),
        ("value", 0.1),
        "hooks and clipping",
        "step",
        "detach",
    ]
    assert vars(plugin) == vars(Precision())
