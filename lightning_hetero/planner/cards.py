"""Published figures of cards, and guesses of unmeasured devices from them.

An unmeasured card is guessed from a measured one: work bound by arithmetic scales with the peak
operations per second, and work bound by memory with the bandwidth. The truth lies between these two
or near them.
"""

from __future__ import annotations

import csv
import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from msgspec.structs import replace

from ..errors import PlanError
from ..plan import COORDINATOR, Dtype
from .profile import ENDS, HEAD, DeviceProfile, Link, Profile, Timing

FASTEST, MIDDLE, SLOWEST = 0.0, 0.5, 1.0
"""Where between the two bounds a guess lies."""

_TABLE = Path(__file__).with_name("cards.csv")
# Words of drivers and sellers around the name of a card.
_NOISE = re.compile(
    r"nvidia|geforce|amd|radeon|instinct|intel|apple|tesla|graphics|\(r\)|\(tm\)|[^a-z0-9]"
)


@dataclass(frozen=True)
class Card:
    """A row of the table.

    Args:
        name: The short name.
        names: This and other names, in the form for comparison.
        operations_per_second: The published peak by dtype, without sparsity, with sums in float32.
            Only the dtypes in which the card computes.
        memory_bytes: Its memory.
        bytes_per_second: The bandwidth of its memory.
        watts: The vendor's limit; None if it is not published.
        source: The vendor's document with the figures.
    """

    name: str
    names: frozenset[str]
    operations_per_second: Mapping[Dtype, float]
    memory_bytes: int
    bytes_per_second: float
    watts: float | None
    source: str


@cache
def cards() -> tuple[Card, ...]:
    """All cards of the table."""
    with _TABLE.open(encoding="utf-8", newline="") as file:
        return tuple(map(_card, csv.DictReader(file)))


def _card(row: Mapping[str, str]) -> Card:
    columns: dict[Dtype, str] = {
        "float32": "fp32_teraflops",
        "float16": "fp16_teraflops",
        "bfloat16": "bf16_teraflops",
    }
    names = [row["card"], *filter(None, row["other_names"].split(";"))]
    return Card(
        name=row["card"],
        names=frozenset(map(_bare, names)),
        operations_per_second={
            dtype: 1e12 * float(row[column]) for dtype, column in columns.items() if row[column]
        },
        memory_bytes=int(row["memory_gib"]) * 2**30,
        bytes_per_second=1e9 * float(row["gigabytes_per_second"]),
        watts=float(row["watts"]) if row["watts"] else None,
        source=row["source"],
    )


def _bare(name: str) -> str:
    """The name without optional words and marks."""
    return _NOISE.sub("", name.lower())


def card_of(device: str) -> Card | None:
    """The card named by a device's description; None if it is not in the table."""
    return next((card for card in cards() if _bare(device) in card.names), None)


def find_card(name: str) -> Card:
    """The card with a name.

    Raises:
        PlanError: If the table lacks the card, with the most similar names.
    """
    found = card_of(name)
    if found is not None:
        return found
    known = [card.name for card in cards()]
    alike = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known
    raise PlanError(f"There are no figures of a card {name!r}; known are {', '.join(alike)}.")


@dataclass(frozen=True)
class Guess:
    """A profile with a guessed device.

    Args:
        profile: With the device.
        name: The device.
        card: Its card.
        like: The measured device; the guess scales its timings.
        like_card: The card of the measured device.
        factors: Seconds of a layer over the measured seconds, at least and at most.
    """

    profile: Profile
    name: str
    card: Card
    like: str
    like_card: Card
    factors: tuple[float, float]

    def __str__(self) -> str:
        least, most = self.factors
        watts = "" if self.card.watts is None else f", {self.card.watts:.0f} W"
        return (
            f"{self.name} is a guess and was not measured. It is {self.like} "
            f"({self.like_card.name}) scaled to published peak figures: a layer takes "
            f"{least:.2f} (bound by {self._bound(least)}) to {most:.2f} (bound by "
            f"{self._bound(most)}) times as long. Memory {self.card.memory_bytes / 2**30:.0f} GiB"
            f"{watts}. Source: {self.card.source}."
        )

    def _bound(self, factor: float) -> str:
        by_memory = self.like_card.bytes_per_second / self.card.bytes_per_second
        return "memory bandwidth" if math.isclose(factor, by_memory) else "arithmetic"


def with_card(profile: Profile, wish: str, lean: float = MIDDLE) -> Guess:
    """Add a worker with a card, or put a card in the place of a device.

    A new worker has the links of the scaled device, or of the first worker if the scaled device is
    the coordinator.

    Args:
        profile: The measurements.
        wish: ``CARD`` for a new worker, or ``WORKER=CARD``.
        lean: Where the guess lies, from `FASTEST` to `SLOWEST`.

    Raises:
        PlanError: If the card or the worker is unknown, or the profile lacks a device to scale.
    """
    place, _, name = wish.rpartition("=")
    card = find_card(name)
    names = [device.name for device in profile.devices]
    if place and place not in names:
        raise PlanError(
            f"The wish {wish!r} names no device of the profile; its devices are {', '.join(names)}."
        )
    like, like_card = _most_alike(profile, card, place)
    factors = _factors(like, like_card, card, profile.model.dtype)
    # A worker's head counts only where it may leave.
    ends = ENDS if place == COORDINATOR else (HEAD,) * profile.model.head_may_leave
    kept = {*profile.model.kinds, *ends}
    timings = _timings(like, like_card, card, kept, lean)
    by_memory = like_card.bytes_per_second / card.bytes_per_second
    device = replace(
        like,
        name=place or _free_name(card, names),
        device=card.name,
        memory_bytes=card.memory_bytes,
        timings=timings,
        optimizer_seconds={
            part: seconds * by_memory
            for part, seconds in like.optimizer_seconds.items()
            if part in kept
        },
        largest_micro_batch=None,
        versions={},
        price_per_hour=None,
        watts=card.watts,
    )
    return Guess(
        _with_device(profile, device, like), device.name, card, like.name, like_card, factors
    )


def _most_alike(profile: Profile, card: Card, place: str) -> tuple[DeviceProfile, Card]:
    """The measured device with the most similar known card."""
    measured = [(device, card_of(device.device)) for device in profile.devices if device.timings]
    # Only the coordinator has timings of both ends.
    known = [
        (device, found)
        for device, found in measured
        if found is not None
        and (place != COORDINATOR or device.name == COORDINATOR)
        and {timing.part for timing in device.timings} & {*profile.model.kinds}
    ]
    if not known:
        devices = ", ".join(f"{device.name} ({device.device})" for device in profile.devices)
        raise PlanError(
            f"{card.name} is guessed by scaling a measured card whose figures are known, and the "
            f"profile has none that fits: {devices}. If one of them is such a card, write its name "
            "under `device`."
        )
    dtype = profile.model.dtype
    return min(known, key=lambda pair: sum(abs(math.log(f)) for f in _both(pair[1], card, dtype)))


def _both(like: Card, card: Card, dtype: Dtype) -> tuple[float, float]:
    """The factors of work bound by arithmetic, and of work bound by memory."""
    used = (
        dtype
        if {dtype} <= {*like.operations_per_second} & {*card.operations_per_second}
        else "float32"
    )
    by_arithmetic = like.operations_per_second[used] / card.operations_per_second[used]
    return by_arithmetic, like.bytes_per_second / card.bytes_per_second


def _factors(like: DeviceProfile, like_card: Card, card: Card, dtype: Dtype) -> tuple[float, float]:
    dtypes = {timing.dtype for timing in like.timings} & {*card.operations_per_second}
    used = dtype if dtype in dtypes else "float32"
    least, most = sorted(_both(like_card, card, used))
    return least, most


def _timings(
    like: DeviceProfile, like_card: Card, card: Card, kept: set[str], lean: float
) -> list[Timing]:
    """The timings of the kept parts, scaled."""
    timings = [
        scaled
        for timing in like.timings
        if (scaled := _scaled(timing, like_card, card, lean)) is not None and timing.part in kept
    ]
    if not timings:
        dtypes = sorted({timing.dtype for timing in like.timings})
        raise PlanError(
            f"{card.name} computes in {', '.join(card.operations_per_second)}, and {like.name} was "
            f"measured in {', '.join(dtypes)} alone. Measure it in another dtype too, by "
            "`PipelineProfiler(dtypes=['float32'])`."
        )
    return timings


def _scaled(timing: Timing, like: Card, card: Card, lean: float) -> Timing | None:
    """A timing on another card; None if one of the cards does not compute in its dtype."""
    if not {timing.dtype} <= {*like.operations_per_second} & {*card.operations_per_second}:
        return None
    least, most = sorted(_both(like, card, timing.dtype))
    factor = least ** (1 - lean) * most**lean
    return timing.slowed(factor)


def _free_name(card: Card, names: list[str]) -> str:
    name, number = card.name, 1
    while name in names:
        number += 1
        name = f"{card.name} no. {number}"
    return name


def _with_device(profile: Profile, device: DeviceProfile, like: DeviceProfile) -> Profile:
    if any(each.name == device.name for each in profile.devices):
        devices = [device if each.name == device.name else each for each in profile.devices]
        return replace(profile, devices=devices)
    pattern = like.name if like.name != COORDINATOR else next(iter(profile.workers), "")
    links = [copied for link in profile.links for copied in _copies(link, pattern, device.name)]
    return replace(profile, devices=[*profile.devices, device], links=[*profile.links, *links])


def _copies(link: Link, pattern: str, name: str) -> list[Link]:
    """A link of the pattern copied to the new device, and, from its link with the coordinator, the
    link between both."""
    if pattern == link.source:
        between = [replace(link, target=pattern, source=name)] if link.target == COORDINATOR else []
        return [replace(link, source=name), *between]
    if pattern == link.target:
        between = [replace(link, source=pattern, target=name)] if link.source == COORDINATOR else []
        return [replace(link, target=name), *between]
    return []
