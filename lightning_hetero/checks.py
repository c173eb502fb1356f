"""What is refused before a run, with a sentence that says what would do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from .model.layers import DecoderLayer
from .plan import Plan


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _are_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)


# By the argument's name: whether a value will do, and what would.
_ARGUMENTS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "workers": (
        lambda value: _is_count(value, 0) or _are_texts(value),
        'a number of local workers, or a list of "host:port"',
    ),
    "plan": (
        lambda value: isinstance(value, (str, PathLike, Plan)),
        '"auto", "even", the path of a YAML file, or a Plan',
    ),
    "layers": (
        lambda value: (
            value is None
            or isinstance(value, str)
            or _are_texts(value)
            or (callable(value) and not isinstance(value, nn.Module))
        ),
        "the dotted path of a ModuleList or of one layer, a list of paths, a function from the "
        "LightningModule to its layers, or None",
    ),
    "micro_batches": (
        lambda value: value is None or _is_count(value, 1),
        "a whole number from 1, or None for the plan's",
    ),
    "micro_batching": (lambda value: value in ("step", "boundary"), '"step" or "boundary"'),
    "loss_weighting": (
        lambda value: callable(value) or value in ("samples", "labels", "auto"),
        '"samples", "labels", "auto", or a function from a micro-batch to its weight',
    ),
    "checkpoint_weights": (lambda value: value in ("all", "trainable"), '"all" or "trainable"'),
}


def check_arguments(**values: Any) -> None:
    """Refuse an argument of the strategy that it would misunderstand.

    Raises:
        MisconfigurationException: With the argument's name.
    """
    for name, value in values.items():
        is_fine, wanted = _ARGUMENTS[name]
        if not is_fine(value):
            raise MisconfigurationException(f"`{name}` is {value!r:.80}; it must be {wanted}.")


def check_not_compiled(module: pl.LightningModule, layers: Sequence[DecoderLayer]) -> None:
    """Refuse `torch.compile` around or inside of layers that are to be handed over.

    Raises:
        MisconfigurationException: With the name of what is compiled.
    """
    if module._compiler_ctx is not None:
        _refuse_compiled(type(module).__name__)
    for name, part in module.named_modules():
        if part._compiled_call_impl is not None or hasattr(part, "_orig_mod"):
            for layer in layers:
                is_around = not name or layer.name.startswith(f"{name}.")
                if is_around or f"{name}.".startswith(f"{layer.name}."):
                    _refuse_compiled(name or type(module).__name__)


def _refuse_compiled(name: str) -> None:
    raise MisconfigurationException(
        f"{name} is compiled by `torch.compile`, which cannot follow layers to workers; leave them "
        "uncompiled, and compile at most modules that neither contain nor are decoder layers."
    )


def warn_of_idle_devices(devices: Sequence[torch.device] | None) -> None:
    """Say that this process computes on one device, whatever the Trainer was given."""
    if devices is not None and len(devices) > 1:
        rank_zero_warn(
            f"This process computes on {devices[0]} alone, so {len(devices) - 1} of the Trainer's "
            f"{len(devices)} devices stay idle. Set `devices=1`, and start workers on the others."
        )
