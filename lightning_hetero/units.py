"""Amounts as a person says them."""

from __future__ import annotations


def in_bytes(amount: float) -> str:
    """In GiB, or in MiB below one."""
    return f"{amount / 2**30:.1f} GiB" if amount >= 2**30 else f"{amount / 2**20:.1f} MiB"


def in_layers(count: float) -> str:
    """With its noun."""
    return "1 layer" if count == 1 else f"{count:.0f} layers"


def in_percent(share: float) -> str:
    """Whole, or with a digit where that would be nothing."""
    percent = 100 * share
    return f"{percent:.0f} %" if abs(percent) >= 1.95 else f"{percent:.1f} %"
