from __future__ import annotations

from msgspec.structs import replace

from lightning_hetero.planner.profile import VERSION, DeviceProfile, Link, Profile
from lightning_hetero.profiler.measure import usable_memory
from lightning_hetero.profiler.run import (
    merged,
    pairs_without_link,
    restricted,
    still_true,
    with_present_memory,
)
from lightning_hetero.protocol.messages import DeviceDescribed

from ..planner.profiles import device, model

GIB = 2**30


def now(memory: str = "main", **values: object) -> DeviceDescribed:
    """A device as it is now."""
    found = DeviceDescribed("a processor", memory, 8 * GIB, GIB, [], {"torch": "2"})
    return replace(found, **values)


def known(*names: str) -> Profile:
    devices = [
        device(name, 1.0, 2.0, device="a processor", versions={"torch": "2"}) for name in names
    ]
    links = [Link(a, b, 0.1, 1e6) for a in names for b in names if a != b]
    return Profile(VERSION, model(1), devices, links)


def names(devices: list[DeviceProfile]) -> list[str]:
    return [one.name for one in devices]


def test_processes_with_one_memory_share_its_free_part() -> None:
    described = {
        "coordinator": now(),
        "one": now(),
        "two": now("gpu"),
        "three": now(base_bytes=3 * GIB),
    }
    shared = usable_memory(described)
    free = 8 * GIB // 3
    assert shared == {
        "coordinator": GIB + free,
        "one": GIB + free,
        "two": 9 * GIB,
        "three": 3 * GIB + free,
    }


def test_a_known_profile_gets_the_present_memory() -> None:
    described = {"coordinator": now("main", base_bytes=3 * GIB), "one": now("other")}
    found = with_present_memory(known("coordinator", "one"), described, 2 * GIB)
    assert [d.memory_bytes for d in found.devices] == [11 * GIB, 9 * GIB]
    assert [d.base_bytes for d in found.devices] == [GIB, GIB]


def test_a_changed_device_and_changed_libraries_are_dropped() -> None:
    before = known("coordinator", "one", "two", "away")
    described = {
        "coordinator": now(),
        "one": now(device="another processor"),
        "two": now(versions={"torch": "3"}),
    }
    after = still_true(before, described)
    assert names(after.devices) == ["coordinator", "away"]
    assert {(link.source, link.target) for link in after.links} == {
        ("coordinator", "away"),
        ("away", "coordinator"),
    }


def test_new_measurements_complete_the_known_profile() -> None:
    old = known("coordinator", "one")
    fresh = replace(old.device("one"), memory_bytes=5)
    new = replace(
        old, devices=[fresh, device("two", 1.0, 2.0)], links=[Link("two", "one", 0.1, 1e6)]
    )
    both = merged(new, old)
    assert names(both.devices) == ["one", "two", "coordinator"]
    assert both.device("one").memory_bytes == 5
    assert len(both.links) == 3
    assert merged(new, None) is new


def test_a_restricted_profile_has_only_the_present_processes() -> None:
    found = restricted(known("coordinator", "one", "two"), ["coordinator", "two"])
    assert names(found.devices) == ["coordinator", "two"]
    assert len(found.links) == 2


def test_pairs_are_measured_once_and_only_if_a_direction_is_missing() -> None:
    links = [Link("a", "b", 0.1, 1e6), Link("b", "a", 0.1, 1e6), Link("a", "c", 0.1, 1e6)]
    assert pairs_without_link(["a", "b", "c"], links) == [("a", "c"), ("b", "c")]
