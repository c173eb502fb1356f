"""Gradients of the whole model, here and on the workers, for those who look at them themselves."""

from __future__ import annotations

from torch import nn

from .coordinator.deployment import Deployment
from .pipeline.optimizer import (
    Clipping,
    clip_gradients,
    clipping_factor,
    gradient_norms,
    total_norm,
)


def norms_by_name(module: nn.Module, deployment: Deployment | None) -> dict[str, float]:
    """The 2-norm of every gradient that there is, by its parameter's name."""
    here = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    norms = dict(zip(here, gradient_norms([*here.values()]), strict=True))
    if deployment is not None:
        norms.update(deployment.grad_norms())
    # In the module's order.
    return {name: norms[name] for name, _ in module.named_parameters() if name in norms}


def clip_by_global_norm(module: nn.Module, deployment: Deployment | None, max_norm: float) -> float:
    """Scale all gradients so that their norm together is at most ``max_norm``.

    Returns:
        The norm before.
    """
    norm = total_norm([*norms_by_name(module, deployment).values()])
    clipping = Clipping(factor=clipping_factor(max_norm, norm))
    clip_gradients([p.grad for p in module.parameters() if p.grad is not None], clipping)
    if deployment is not None:
        deployment.coordinator.clip_gradients(None, clipping)
    return norm
