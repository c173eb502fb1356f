"""The dtypes of a step's computation, by Lightning's precision plugin."""

from __future__ import annotations

import torch

from .._lightning import MixedPrecision, Precision, pl
from ..pipeline.turns import casts_here


def autocast_dtype(plugin: Precision) -> torch.dtype | None:
    """The dtype of autocast under mixed precision, if it is on."""
    if not isinstance(plugin, MixedPrecision):
        return None
    return torch.bfloat16 if "bf16" in plugin.precision else torch.float16


def computing_dtypes(module: pl.LightningModule) -> list[torch.dtype]:
    """The dtypes in which a step of a module may compute, with autocast entered outside."""
    found = [parameter.dtype for parameter in module.parameters()]
    found += [dtype for _, dtype in casts_here()]
    autocast = autocast_dtype(module.trainer.precision_plugin)
    return found if autocast is None else [*found, autocast]


def scaler_of(plugin: Precision) -> torch.amp.GradScaler | None:
    """The scaler of the loss, under precision '16-mixed' only."""
    scaler: torch.amp.GradScaler | None = getattr(plugin, "scaler", None)
    return scaler
