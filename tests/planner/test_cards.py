"""Published figures of cards, and devices that are guessed from them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from lightning_hetero.errors import PlanError
from lightning_hetero.plan import COORDINATOR
from lightning_hetero.planner.cards import (
    FASTEST,
    MIDDLE,
    SLOWEST,
    card_of,
    cards,
    find_card,
    with_card,
)
from lightning_hetero.planner.profile import HEAD, DeviceProfile, Link, Profile

from .profiles import coordinator, device, profile, timing

LINKS = [Link(COORDINATOR, "l4:1", 0.001, 1e9), Link("l4:1", COORDINATOR, 0.002, 2e9)]


def measured(name: str = "NVIDIA L4", **others: Any) -> Profile:
    """A worker with an L4 and a coordinator that is no card."""
    return profile(4, [device("l4:1", 1.0, 2.0, device=name, **others)], links=LINKS, batch_size=4)


def test_every_row_of_the_table_is_whole() -> None:
    assert len(cards()) >= 25
    for card in cards():
        assert card.operations_per_second["float32"] > 1e12
        assert 1e11 < card.bytes_per_second < 1e13
        assert card.memory_bytes >= 6 * 2**30
        assert card.watts is None or 50 < card.watts < 1500
        assert card.source.split()[0] in {"NVIDIA", "AMD", "Apple", "Intel"}
        # No card computes more slowly in fewer bits.
        assert min(card.operations_per_second.values()) == card.operations_per_second["float32"]
    names = [name for card in cards() for name in card.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("described", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM4 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM5"),
        ("Tesla T4", "T4"),
        ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
        ("Intel(R) Arc(TM) A770 Graphics", "Arc A770"),
        ("Apple M1 Max", "M1 Max"),
        # A chip of the same name in a laptop is another chip.
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", None),
        ("AMD Radeon 8060S Graphics", "Radeon 8060S"),
        ("NVIDIA GeForce GTX TITAN X", "GTX TITAN X"),
        ("Tesla V100-PCIE-16GB", "V100 PCIe 16GB"),
        ("Tesla P100-PCIE-16GB", "P100 PCIe 16GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM4 40GB"),
        ("Tesla M40 24GB", "M40 24GB"),
        ("AMD Radeon PRO W6800", "W6800"),
        ("Apple M4 Max", "M4 Max"),
        ("Intel Xeon", None),
    ],
)
def test_a_card_is_found_by_what_its_driver_says(described: str, name: str | None) -> None:
    found = card_of(described)
    assert (found.name if found else None) == name


def test_an_unknown_card_is_refused_with_those_most_like_it() -> None:
    with pytest.raises(PlanError, match=r"no figures of a card 'RTX 409'; known are RTX 4090"):
        find_card("RTX 409")


def test_a_new_worker_is_scaled_between_arithmetic_and_bandwidth() -> None:
    by_arithmetic, by_memory = 30.3 / 82.6, 300 / 1008
    seconds = {}
    for lean in (FASTEST, MIDDLE, SLOWEST):
        guess = with_card(measured(), "RTX 4090", lean)
        found = guess.profile.device("RTX 4090")
        seconds[lean] = found.timings[0].forward_seconds
        assert (found.memory_bytes, found.watts) == (24 * 2**30, 450)
    assert seconds[FASTEST] == pytest.approx(by_memory)
    assert seconds[SLOWEST] == pytest.approx(by_arithmetic)
    assert seconds[MIDDLE] == pytest.approx(math.sqrt(by_arithmetic * by_memory))
    assert "RTX 4090 is a guess and was not measured" in str(guess)
    assert "0.30 (bound by memory bandwidth) to 0.37 (bound by arithmetic)" in str(guess)


@pytest.mark.parametrize("may_leave", [False, True])
def test_a_new_worker_has_a_head_that_may_leave(may_leave: bool) -> None:
    like = measured()
    (worker,) = (each for each in like.devices if each.name != COORDINATOR)
    worker = replace(worker, timings=[*worker.timings, timing(HEAD, 4.0, 8.0)])
    model = replace(like.model, head_may_leave=may_leave)
    like = replace(like, model=model, devices=[like.devices[0], worker])
    found = with_card(like, "RTX 4090", FASTEST).profile.device("RTX 4090")
    heads = [each.forward_seconds for each in found.timings if each.part == HEAD]
    assert heads == ([pytest.approx(4 * 300 / 1008)] if may_leave else [])


def test_a_new_worker_has_the_links_of_the_measured_one() -> None:
    found = with_card(measured(), "RTX 4090").profile
    found.check()
    links = {(link.source, link.target): link.bytes_per_second for link in found.links}
    assert links[COORDINATOR, "RTX 4090"] == 1e9
    assert links["RTX 4090", COORDINATOR] == 2e9
    assert links["RTX 4090", "l4:1"] == 2e9
    assert len(links) == 6


def test_two_new_workers_have_two_names() -> None:
    one = with_card(measured(), "RTX 4090")
    two = with_card(one.profile, "RTX 4090")
    two.profile.check()
    assert (one.name, two.name) == ("RTX 4090", "RTX 4090 no. 2")


def test_a_card_may_take_the_place_of_a_device() -> None:
    guess = with_card(measured(price_per_hour=0.5), "l4:1=H100 PCIe")
    assert guess.name == "l4:1"
    assert guess.profile.workers == ["l4:1"]
    assert guess.profile.links == LINKS
    assert guess.profile.device("l4:1").device == "H100 PCIe"
    assert guess.profile.device("l4:1").price_per_hour is None


def in_dtype(dtype: Any) -> Profile:
    timings = [timing("layer", 1.0, 2.0, dtype=dtype), timing("layer", 3.0, 6.0)]
    worker = DeviceProfile("l4:1", "NVIDIA L4", 2**30, timings=timings)
    return profile(4, [worker], coordinator(), model_options={"dtype": dtype}, batch_size=4)


def test_a_dtype_that_a_card_lacks_is_left_out() -> None:
    found = with_card(in_dtype("bfloat16"), "P40").profile.device("P40")
    assert [timing.dtype for timing in found.timings] == ["float32"]


@pytest.mark.parametrize(
    ("given", "wish", "said"),
    [
        (measured("Intel Xeon"), "RTX 4090", r"has none that fits: .* l4:1 \(Intel Xeon\)"),
        (measured(), "l5:1=RTX 4090", "names no device of the profile; its devices are"),
        (measured(), "coordinator=RTX 4090", "has none that fits"),
    ],
)
def test_what_cannot_be_guessed_is_refused(given: Profile, wish: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        with_card(given, wish)


def test_a_card_without_any_measured_dtype_is_refused() -> None:
    only = [timing("layer", 1.0, 2.0, dtype="bfloat16")]
    worker = DeviceProfile("l4:1", "NVIDIA L4", 2**30, timings=only)
    with pytest.raises(PlanError, match=r"P40 computes in float32, and l4:1 was measured in bfl"):
        with_card(profile(4, [worker], batch_size=4), "P40")
