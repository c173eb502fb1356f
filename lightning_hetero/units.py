"""Amounts as a person writes and reads them: bytes, rates, seconds, percent."""

from __future__ import annotations

import re

from .errors import PlanError

_BYTES_IN = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}
_AMOUNT = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_BYTES_IN)})")


def parse_bytes(text: str) -> int:
    """Read an amount of memory such as ``10GiB`` or ``10 GiB``.

    Raises:
        PlanError: If the text is not a number above 0 with a unit after it.
    """
    match = _AMOUNT.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise PlanError(
            f"The memory {text!r} is not a size such as 10GiB: a number above 0 and one of "
            f"{', '.join(_BYTES_IN)}."
        )
    return int(float(match[1]) * _BYTES_IN[match[2]])


def in_bytes(amount: float) -> str:
    """An amount of memory with one decimal, in the largest fitting unit from MiB to PiB."""
    for unit, size in (("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30)):
        if amount >= size:
            return f"{amount / size:.1f} {unit}"
    return f"{amount / 2**20:.1f} MiB"


def in_short_bytes(amount: float) -> str:
    """An amount of memory in the largest fitting unit, short enough for a drawing."""
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


def time_unit(seconds: float) -> tuple[float, str]:
    """The seconds and the name of a person's unit for such a duration."""
    # At these limits, three digits round up to the next unit.
    if seconds < 0.9995:
        return 1e-3, "ms"
    if seconds < 119.5:
        return 1.0, "s"
    return (60.0, "min") if seconds < 119.5 * 60 else (3600.0, "h")


def in_duration(seconds: float) -> str:
    """A duration with three digits, in milliseconds, seconds, minutes or hours."""
    size, unit = time_unit(seconds)
    amount = seconds / size
    # The format "g" writes an exponent if a value rounds to a thousand.
    return f"{amount:.3g} {unit}" if amount < 999.5 else f"{amount:,.0f} {unit}"


def in_samples(count: int) -> str:
    """A number of samples with its noun."""
    return "1 sample" if count == 1 else f"{count} samples"


def in_micro_batches(count: int) -> str:
    """A number of micro-batches with its noun."""
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"


def in_layers(count: float) -> str:
    """A number of layers with its noun."""
    return "1 layer" if count == 1 else f"{count:.0f} layers"


def in_percent(share: float) -> str:
    """A share in percent: a whole number, or with one decimal if it would round to 0 or 1."""
    percent = 100 * share
    return f"{percent:.0f} %" if abs(percent) >= 1.95 else f"{percent:.1f} %"


def in_percent_apart(share: float, other: float) -> tuple[str, str]:
    """Two shares in percent, with enough decimals, up to six, to distinguish them."""
    said = in_percent(share), in_percent(other)
    for digits in range(1, 7):
        if said[0] != said[1] or share == other:
            break
        said = f"{100 * share:.{digits}f} %", f"{100 * other:.{digits}f} %"
    return said


def _short(value: float) -> str:
    """A whole number from 10 on, one decimal from 1 on, two significant digits below."""
    if value >= 10:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def in_share(share: int, total: int) -> str:
    """A replica's part of the micro-batches: ``2 of 3``, or ``warm spare`` for 0."""
    return f"{share} of {total}" if share else "warm spare"
