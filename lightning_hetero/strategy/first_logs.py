"""What the first batch logs, as a whole and by its micro-batches together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Values that differ by less may differ by rounding, or by one sample that rounding has moved.
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Logged:
    """The numbers that one run of a batch has logged.

    Args:
        values: By name.
        batch_sizes: By the names for which ``batch_size`` was given.
        resolutions: The relative distance of two numbers of a value's dtype, by its name.
    """

    values: dict[str, float] = field(default_factory=dict)
    batch_sizes: dict[str, float] = field(default_factory=dict)
    resolutions: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, value: Any, *_args: Any, **kwargs: Any) -> None:
        """Stands in for ``LightningModule.log``; metrics and whatever else is no number are left
        out."""
        is_number = isinstance(value, (int, float))
        if is_number or (isinstance(value, Tensor) and value.numel() == 1):
            self.values[name] = float(value)
            if isinstance(value, Tensor) and value.is_floating_point():
                self.resolutions[name] = torch.finfo(value.dtype).eps
            if kwargs.get("batch_size") is not None:
                self.batch_sizes[name] = float(kwargs["batch_size"])


def differing(whole: Logged, cut: Logged, rounding: float = 0.0) -> dict[str, str]:
    """What differs in words, by the name of the value.

    Args:
        whole: What the batch has logged.
        cut: What its micro-batches have logged together.
        rounding: The relative difference of a loss that rounding explains.
    """
    found: dict[str, str] = {}
    for what, first, second, least in (
        ("", whole.values, cut.values, rounding),
        ("the batch size of ", whole.batch_sizes, cut.batch_sizes, 0.0),
    ):
        for name, value in first.items():
            other = second.get(name, value)
            # Each of the two is rounded to its dtype.
            resolution = whole.resolutions.get(name, 0.0) + cut.resolutions.get(name, 0.0)
            tolerance = max(_TOLERANCE, least, resolution)
            if abs(other - value) > tolerance * max(abs(value), abs(other)):
                text = f"{what}{name!r} ({value:.6g} and {other:.6g})"
                found[name] = f"{found[name]}, {text}" if name in found else text
    return found
