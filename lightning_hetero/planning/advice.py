"""What to tell a person about a plan: what does not fit, whom to leave out, who was left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..plan import COORDINATOR
from ..units import in_percent
from .candidates import Candidate
from .search import LEAST_GAIN, Search
from .shortage import shortages

MOST_TRIED = 8
"""Devices that are tried with and without, for each is a search of its own."""


@dataclass(frozen=True)
class Advice:
    """One thing to say.

    Args:
        kind: What it is about.
        worker: Whom it concerns.
        text: A sentence.
    """

    kind: Literal["does not fit", "leave out", "left out", "slow link"]
    worker: str
    text: str


def advise(candidate: Candidate, search: Search) -> list[Advice]:
    """All that is worth saying, the gravest first."""
    unfit = [Advice("does not fit", short.name, short.text) for short in shortages(candidate)]
    if unfit:
        return unfit
    return [
        *_better_without(candidate, search),
        *_left_out(candidate, search),
        *_slow_links(candidate),
    ]


def _better_without(candidate: Candidate, search: Search) -> Iterator[Advice]:
    spans = zip(candidate.names, candidate.ranges, strict=True)
    num_layers = {name: end - first for name, (first, end) in spans}
    few_layers_first = sorted(candidate.workers, key=lambda name: num_layers[name])
    for name in search.one_of_each(few_layers_first)[:MOST_TRIED]:
        others = [other for other in candidate.workers if other != name]
        without = search.best_with(others, below=candidate.step_seconds)
        if without is not None:
            longer = in_percent(candidate.step_seconds / without.step_seconds - 1)
            text = f"leave `{name}` out: with it a step takes {longer} longer."
            yield Advice("leave out", name, text)


def _left_out(candidate: Candidate, search: Search) -> Iterator[Advice]:
    spare = [name for name in candidate.costs.profile.workers if name not in candidate.workers]
    kinds = search.one_of_each(spare)
    for name in kinds[:MOST_TRIED]:
        alike = sum(search.are_alike(name, other) for other in spare) - 1
        who = f"`{name}` and {alike} like it are" if alike else f"`{name}` is"
        reason = _why_left_out(candidate, search, name)
        yield Advice("left out", name, f"{who} left out: {reason}")
    if len(kinds) > MOST_TRIED:
        others = ", ".join(f"`{name}`" for name in kinds[MOST_TRIED:])
        text = f"left out like them, though not tried one by one: {others}."
        yield Advice("left out", kinds[MOST_TRIED], text)


def _why_left_out(candidate: Candidate, search: Search, name: str) -> str:
    holder = candidate.costs.holder(name, candidate.size)
    if holder.speed.most_layers == 0:
        known = {timing.part for timing in holder.device.timings}
        if known.isdisjoint(candidate.costs.profile.model.kinds):
            return "it was measured with none of the model's layers."
        return f"not one layer fits there with {candidate.size} samples in a micro-batch."
    beside = search.best_with([*candidate.workers, name])
    if beside is None:
        return "no order has layers for it too."
    change = beside.step_seconds / candidate.step_seconds - 1
    if change >= 0:
        return f"with it a step would take {in_percent(change)} longer."
    return (
        f"with it a step would take only {in_percent(-change)} less; "
        f"below {in_percent(LEAST_GAIN)} a device is not worth its risk of drifting or failing."
    )


def _slow_links(candidate: Candidate) -> Iterator[Advice]:
    busy = candidate.busy_seconds_of_media
    for medium, seconds in busy.items():
        if seconds > candidate.bottleneck_seconds:
            more = in_percent(seconds / candidate.bottleneck_seconds - 1)
            text = (
                f"the link {medium} is the bottleneck: a micro-batch takes it {more} longer than "
                "the slowest stage; a faster link would help, other layers would not."
            )
            yield Advice("slow link", COORDINATOR, text)
