"""Where a precision plugin clips, unscales and steps, the stages do too.

Lightning sends every clipping and every step through its precision plugin. The private names that
this relies on, `_after_closure` of the plugin and the state that a GradScaler keeps for each
optimizer, are used nowhere else in the package.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from .errors import ModelError
from .pipeline.optimizer import optimizer_gradients
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
        scaler = scaler_of(self._plugin)
        is_finite = scaler is None or self._unscale(scaler, optimizer)
        before = _versions(optimizer)
        self._original_after_closure(model, optimizer)
        if before and not self.optimizer.is_clipped and not before & _versions(optimizer):
            raise ModelError(
                "All gradients on this process were changed before the optimizer's step, and those "
                "of layers on workers were not here to be changed; clip them with "
                "`self.clip_gradients(...)` in `configure_gradient_clipping`, or with the "
                "Trainer's `gradient_clip_val`."
            )
        if is_finite:
            self.optimizer.step()
        else:
            self.optimizer.skip()

    def _unscale(self, scaler: torch.amp.GradScaler, optimizer: Any) -> bool:
        """Take the loss scale off the stages' gradients, as the scaler did with those here.

        Returns:
            Whether all gradients everywhere are finite; if not, the scaler will skip the step.
        """
        state = scaler._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.UNSCALED:
            return False  # there was no loss, so nobody steps
        found: dict[Any, Tensor] = state["found_inf_per_device"]
        is_finite = self.optimizer.unscale(scaler.get_scale())
        if not is_finite or not found:
            # Where nothing trains on this process, the scaler has not looked at anything yet.
            found[torch.device("cpu")] = torch.tensor(0.0 if is_finite else 1.0)
        return not any(flag.item() for flag in found.values())


def _versions(optimizer: Optimizer) -> set[tuple[int, int]]:
    """What tells whether gradients were replaced or changed in place."""
    return {(id(gradient), gradient._version) for gradient in optimizer_gradients(optimizer)}


def scaler_of(plugin: Precision) -> torch.amp.GradScaler | None:
    """What scales the loss under precision '16-mixed'; None under any other."""
    scaler: torch.amp.GradScaler | None = getattr(plugin, "scaler", None)
    return scaler
