"""Orders to begin with, and devices that stand in for each other."""

from __future__ import annotations

from lightning_hetero.plan import COORDINATOR
from lightning_hetero.planning.candidates import Costs
from lightning_hetero.planning.orders import Orders, interchangeable
from lightning_hetero.planning.profile import Link

from .profiles import device, profile


def test_devices_of_one_measurement_and_like_links_stand_in_for_each_other() -> None:
    workers = [device(f"w{number}", 1, 2) for number in range(3)] + [device("other", 1, 3)]
    classes = interchangeable(Costs(profile(4, workers), {}))
    assert classes == {"w0": 0, "w1": 0, "w2": 0, "other": 1}


def test_a_pin_or_a_link_of_its_own_sets_a_device_apart() -> None:
    workers = [device(f"w{number}", 1, 2) for number in range(3)]
    slow_link = Link(COORDINATOR, "w2", 1, 1)
    classes = interchangeable(Costs(profile(4, workers, links=[slow_link]), {"w0": (0, 1)}))
    assert len(set(classes.values())) == 3


def test_the_fastest_come_first() -> None:
    workers = [device(name, seconds, 0) for name, seconds in (("c", 3), ("a", 1), ("b", 2))]
    orders = Orders(Costs(profile(4, workers), {}), 1)
    assert orders.by_speed == ["a", "b", "c"]
    assert orders.usual(["c", "a"]) == [["a", "c"]]


def test_where_links_differ_an_order_along_the_fast_ones_is_begun_with_too() -> None:
    workers = [device(name, seconds, 0) for name, seconds in (("c", 3), ("a", 1), ("b", 2))]
    links = [Link(COORDINATOR, "a", 0, 1), Link(COORDINATOR, "b", 0, 1), Link("c", "a", 0, 2)]
    sizes = {"activation_bytes_per_sample": 8}
    of = profile(4, workers, None, links, sizes, batch_size=1)
    assert Orders(Costs(of, {}), 1).usual(["a", "b", "c"]) == [["a", "b", "c"], ["c", "b", "a"]]


def test_free_devices_go_between_pins_where_most_is_to_do() -> None:
    workers = [device(name, 1, 1) for name in ("p", "q", "x", "y", "z")]
    pins = {"q": (40, 41), "p": (9, 10), COORDINATOR: (0, 9)}
    order = Orders(Costs(profile(61, workers), pins), 1).by_speed_and_pins(list("pqxyz"))
    assert order[0] == "p"
    assert order.index("q") in (2, 3)
