"""The random numbers of an action depend on its place alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_hetero.pipeline.stage import seed_action

places = st.tuples(st.integers(0, 10**6), st.integers(0, 64), st.integers(0, 64), st.integers(0, 4))


@pytest.fixture(autouse=True, scope="module")
def own_random_state() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


def draw(seed: int, *place: int) -> Tensor:
    seed_action(seed, *place)
    return torch.rand(4)


@given(st.integers(0, 2**63 - 1), places, places)
def test_a_place_draws_the_same_whatever_was_drawn_before(
    seed: int, place: tuple[int, ...], other: tuple[int, ...]
) -> None:
    first = draw(seed, *place)
    draw(seed, *other)
    assert torch.equal(draw(seed, *place), first)


@given(st.integers(0, 2**63 - 1), places, places)
def test_different_places_draw_differently(
    seed: int, place: tuple[int, ...], other: tuple[int, ...]
) -> None:
    same = torch.equal(draw(seed, *place), draw(seed, *other))
    assert same == (place == other)


def test_the_order_of_a_places_numbers_counts() -> None:
    assert not torch.equal(draw(0, 1, 2), draw(0, 2, 1))


def test_another_seed_draws_differently() -> None:
    assert not torch.equal(draw(0, 1, 2), draw(1, 1, 2))
