"""Amounts as text, and text as amounts."""

from __future__ import annotations

import pytest

from lightning_hetero import units
from lightning_hetero.errors import PlanError

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10GiB", 10 * GIB),
        ("1.5GiB", GIB + GIB // 2),
        ("512MiB", GIB // 2),
        ("10GB", 10**10),
        ("16 GiB", 16 * GIB),
    ],
)
def test_bytes_are_read_with_their_unit(text: str, expected: int) -> None:
    assert units.parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["10  GB", "10e9", "10", "10gib", "-1GiB", "0GiB", "GiB", ""])
def test_bytes_without_a_clear_unit_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="such as 10GiB.*one of MB, GB, MiB, GiB") as refused:
        units.parse_bytes(text)
    assert repr(text) in str(refused.value)


def test_amounts_are_written_with_their_unit() -> None:
    assert [units.in_bytes(amount) for amount in (23.54 * GIB, GIB / 2)] == [
        "23.5 GiB",
        "512.0 MiB",
    ]
    assert [units.in_short_bytes(amount) for amount in (2**41, 23.54 * GIB, 3 * 2**19, 512)] == [
        "2.0 TiB",
        "24 GiB",
        "1.5 MiB",
        "0.5 KiB",
    ]
    rates = [units.in_bytes_per_second(rate) for rate in (2.5e9, 117e6, 1500)]
    assert rates == ["2.5 GB/s", "117 MB/s", "1.5 kB/s"]
    assert [units.in_seconds(seconds) for seconds in (0.0002, 2.5)] == ["0.2 ms", "2.5 s"]
    assert [units.in_bytes(amount) for amount in (10**12, 2**41, 10**15, 2**50)] == [
        "931.3 GiB",
        "2.0 TiB",
        "909.5 TiB",
        "1.0 PiB",
    ]
    assert [units.in_micro_batches(count) for count in (1, 8)] == [
        "1 micro-batch",
        "8 micro-batches",
    ]
    assert [units.in_layers(count) for count in (1, 2)] == ["1 layer", "2 layers"]
    assert [units.in_percent(share) for share in (0.5, 0.004)] == ["50 %", "0.4 %"]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0125, "12.5 ms"),
        (0.99996, "1 s"),
        (90.0, "90 s"),
        (119.7, "2 min"),
        (999.9, "16.7 min"),
        (9000.0, "2.5 h"),
        (5e6, "1,389 h"),
    ],
)
def test_durations_are_written_in_a_unit_of_their_size(seconds: float, shown: str) -> None:
    assert units.in_duration(seconds) == shown
