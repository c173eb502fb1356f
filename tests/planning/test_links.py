from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.planning.links import fit_link


def round_trips(
    latency: float, bytes_per_second: float, sizes: list[int]
) -> list[tuple[int, float]]:
    return [(size, 2 * latency + size / bytes_per_second) for size in sizes for _ in range(3)]


@given(
    latency=st.floats(1e-5, 0.5),
    bytes_per_second=st.floats(1e5, 1e9),
    sizes=st.sets(st.integers(2**10, 2**26), min_size=2),
)
def test_a_link_without_noise_is_found(
    latency: float, bytes_per_second: float, sizes: set[int]
) -> None:
    trips = round_trips(latency, bytes_per_second, sorted(sizes))
    link = fit_link("a", "b", trips)
    for num_bytes, seconds in trips:
        found = 2 * link.latency_seconds + num_bytes / link.bytes_per_second
        assert found >= seconds * (1 - 1e-9)
    if max(sizes) - min(sizes) > 2**20:
        assert link.bytes_per_second == pytest.approx(bytes_per_second, rel=1e-3)


def test_one_slow_transfer_among_many_changes_nothing() -> None:
    trips = round_trips(0.001, 1e8, [1024, 2**24])
    quiet = fit_link("a", "b", trips)
    trips[1] = (trips[1][0], 5.0)
    trips[4] = (trips[4][0], 5.0)
    assert fit_link("a", "b", trips) == quiet


def test_a_link_on_which_more_takes_no_longer_is_as_fast_as_any() -> None:
    link = fit_link("a", "b", [(1024, 0.002), (2**20, 0.001)])
    assert link.bytes_per_second == 1e12
    assert (link.source, link.target) == ("a", "b")
