"""What the first batch logs, as a whole and by its micro-batches together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

# Values that differ by less may differ by rounding, or by one sample that rounding has moved.
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Logged:
    """The numbers that one run of a batch has logged.

    Args:
        values: By name.
        batch_sizes: By the names for which ``batch_size`` was given.
    """

    values: dict[str, float] = field(default_factory=dict)
    batch_sizes: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, value: Any, *_args: Any, **kwargs: Any) -> None:
        """Stands in for ``LightningModule.log``; metrics and whatever else is no number are left
        out."""
        is_number = isinstance(value, (int, float))
        if is_number or (isinstance(value, Tensor) and value.numel() == 1):
            self.values[name] = float(value)
            if kwargs.get("batch_size") is not None:
                self.batch_sizes[name] = float(kwargs["batch_size"])


def differing(whole: Logged, cut: Logged) -> list[str]:
    """The names of values, and of values with batch sizes, that differ."""
    return list(
        dict.fromkeys(
            (
                *_differing(whole.values, cut.values),
                *_differing(whole.batch_sizes, cut.batch_sizes),
            )
        )
    )


def in_words(names: Sequence[str], whole: Logged, cut: Logged) -> str:
    """The values of some names, for a warning."""
    return ", ".join(_each_in_words(names, whole, cut))


def _differing(whole: Mapping[str, float], cut: Mapping[str, float]) -> Iterator[str]:
    for name, value in whole.items():
        other = cut.get(name, value)
        if abs(other - value) > _TOLERANCE * max(abs(value), abs(other)):
            yield name


def _each_in_words(names: Sequence[str], whole: Logged, cut: Logged) -> Iterator[str]:
    for what, first, second in (
        ("", whole.values, cut.values),
        ("the batch size of ", whole.batch_sizes, cut.batch_sizes),
    ):
        for name in _differing(first, second):
            if name in names:
                yield f"{what}{name!r} ({first[name]:.6g} and {second[name]:.6g})"
