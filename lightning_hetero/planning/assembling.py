"""Puts what was measured on each device together, and to what was measured before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from ..planner.profile import DeviceProfile, Link, Profile


@dataclass(frozen=True)
class Station:
    """A process as it is now, measured or not.

    Args:
        name: As plans call it.
        device: What it computes on.
        memory: Which memory it has; stations of one share it.
        free_bytes: What is free of that.
        base_bytes: What the process takes already, without the model.
        held_bytes: What it holds of the model before that is put where it belongs.
        versions: Of libraries and drivers.
    """

    name: str
    device: str
    memory: str
    free_bytes: int
    base_bytes: int
    versions: Mapping[str, str]
    held_bytes: int = 0

    def is_of(self, profile: DeviceProfile) -> bool:
        """Whether a profile was measured here, with the same libraries."""
        known = (profile.name, profile.device, profile.versions)
        return known == (self.name, self.device, dict(self.versions))


def shared_memory_bytes(stations: Sequence[Station]) -> dict[str, int]:
    """What each station may use, its base included; what is free is shared out evenly among those
    of one memory."""
    sharers = Counter(station.memory for station in stations)
    return {
        station.name: max(
            1,
            station.base_bytes + station.held_bytes + station.free_bytes // sharers[station.memory],
        )
        for station in stations
    }


def with_present_memory(profile: Profile, stations: Sequence[Station]) -> Profile:
    """The profile with the memory that its devices have now."""
    memory_bytes = shared_memory_bytes(stations)
    base_bytes = {station.name: station.base_bytes for station in stations}
    devices = [
        structs.replace(
            device, memory_bytes=memory_bytes[device.name], base_bytes=base_bytes[device.name]
        )
        for device in profile.devices
    ]
    return structs.replace(profile, devices=devices)


def still_true(profile: Profile, stations: Sequence[Station]) -> Profile:
    """The profile without what is now another device of the same name, or has other libraries."""
    present = {station.name: station for station in stations}
    devices = [
        device
        for device in profile.devices
        if device.name not in present or present[device.name].is_of(device)
    ]
    names = {device.name for device in devices}
    links = [link for link in profile.links if {*_ends(link)} <= names]
    return structs.replace(profile, devices=devices, links=links)


def merged(new: Profile, old: Profile | None) -> Profile:
    """A profile with the devices and links of an older one that it does not have."""
    if old is None:
        return new
    names = {device.name for device in new.devices}
    ends = {(link.source, link.target) for link in new.links}
    devices = [device for device in old.devices if device.name not in names]
    names |= {device.name for device in devices}
    return structs.replace(
        new,
        devices=[*new.devices, *devices],
        links=[*new.links, *(link for link in old.links if _ends(link) not in ends)],
    )


def restricted(profile: Profile, names: Sequence[str]) -> Profile:
    """The profile of these devices alone, in this order."""
    return structs.replace(
        profile,
        devices=[profile.device(name) for name in names],
        links=[link for link in profile.links if {*_ends(link)} <= {*names}],
    )


def pairs_without_link(names: Sequence[str], links: Iterable[Link]) -> list[tuple[str, str]]:
    """Pairs of processes whose link has not been measured, each once."""
    known = {_ends(link) for link in links}
    return [
        (first, second)
        for index, first in enumerate(names)
        for second in names[index + 1 :]
        if (first, second) not in known or (second, first) not in known
    ]


def _ends(link: Link) -> tuple[str, str]:
    return link.source, link.target
