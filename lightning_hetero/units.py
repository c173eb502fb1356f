"""Amounts as a person writes and reads them: bytes, rates, seconds, percent."""

from __future__ import annotations

import re

from .errors import PlanError

_BYTES_IN = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}
_AMOUNT = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_BYTES_IN)})")


def parse_bytes(text: str) -> int:
    """Read an amount of memory such as ``10GiB`` or ``10 GiB``.

    Raises:
        PlanError: If the text is no number above 0 followed by a unit.
    """
    match = _AMOUNT.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise PlanError(
            f"The memory {text!r} is not a size such as 10GiB: a number above 0 and one of "
            f"{', '.join(_BYTES_IN)}."
        )
    return int(float(match[1]) * _BYTES_IN[match[2]])


def in_bytes(amount: float) -> str:
    """An amount of memory in GiB, or in MiB below one GiB, with one decimal."""
    return f"{amount / 2**30:.1f} GiB" if amount >= 2**30 else f"{amount / 2**20:.1f} MiB"


def in_short_bytes(amount: float) -> str:
    """An amount of memory in the largest unit that fits, as short as a drawing needs it."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if amount >= size:
            return f"{_short(amount / size)} {unit}"
    return f"{_short(amount / 2**10)} KiB"


def in_bytes_per_second(rate: float) -> str:
    """A bandwidth in GB/s, MB/s or kB/s."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6)):
        if rate >= size:
            return f"{_short(rate / size)} {unit}"
    return f"{_short(rate / 1e3)} kB/s"


def in_seconds(seconds: float) -> str:
    """A duration in seconds, or in milliseconds below one second."""
    return f"{_short(1e3 * seconds)} ms" if seconds < 1 else f"{_short(seconds)} s"


def in_layers(count: float) -> str:
    """A number of layers with its noun."""
    return "1 layer" if count == 1 else f"{count:.0f} layers"


def in_percent(share: float) -> str:
    """A share in percent: a whole number, with one decimal where that would round to 0 or 1."""
    percent = 100 * share
    return f"{percent:.0f} %" if abs(percent) >= 1.95 else f"{percent:.1f} %"


def _short(value: float) -> str:
    """No decimals from 10 on, one from 1 on, two significant digits below."""
    if value >= 10:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"
