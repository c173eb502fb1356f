"""Where a precision plugin clips and steps, the stages do too.

Lightning sends every clipping and every step through its precision plugin. The private name that
this relies on, `_after_closure`, is used nowhere else in the package.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.precision import Precision

from .runtime.remote_optimizer import RemoteOptimizer


class RemoteSteps:
    """Diverts a precision plugin's clipping and stepping until `detach`."""

    _DIVERTED = ("clip_grad_by_norm", "clip_grad_by_value", "_after_closure")

    def __init__(self, plugin: Precision, optimizer: RemoteOptimizer) -> None:
        self.optimizer = optimizer
        self._plugin = plugin
        self._original_after_closure = plugin._after_closure
        plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign,assignment]
        plugin.clip_grad_by_value = self._clip_by_value  # type: ignore[method-assign,assignment]
        plugin._after_closure = self._after_closure  # type: ignore[method-assign]

    def detach(self) -> None:
        """Leave plugin and optimizer ordinary ones."""
        self.optimizer.detach()
        for name in self._DIVERTED:
            delattr(self._plugin, name)

    def _clip_by_norm(self, _optimizer: Any, clip_val: float) -> None:
        self.optimizer.clip_by_norm(clip_val)

    def _clip_by_value(self, _optimizer: Any, clip_val: float) -> None:
        self.optimizer.clip_by_value(clip_val)

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        """Gradients are final here, and the optimizer is about to step."""
        self._original_after_closure(model, optimizer)
        self.optimizer.step()
