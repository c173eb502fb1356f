"""Few scenarios in which each two values meet that may meet: a value of each axis, or two options.

A fault of several values is nearly always one of two of them together.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import combinations, product

from .outcome import INEXACT
from .scenario import EVENTS, OPTIONS, SHAPES, Rule, Scenario, verdict

MOST_OPTIONS = 3
"""Of a scenario of the table. With more, fewer options would have the bits of the reference."""

Pair = tuple[str, str]
_ORDER = {value: number for number, value in enumerate([*SHAPES, *OPTIONS, *EVENTS])}


def all_pairs() -> list[Pair]:
    """Each two values of two axes, and each two options; a run in which nothing happens is a part
    of each run in which something does."""
    events = [event for event in EVENTS if event != "none"]
    across = [*product(SHAPES, events), *product(SHAPES, OPTIONS), *product(OPTIONS, events)]
    return [*across, *combinations(OPTIONS, 2)]


def scenario_of(values: Iterable[str]) -> Scenario:
    """The scenario with these values; a line without event where there are no others."""
    given = sorted(set(values), key=_ORDER.__getitem__)
    found = [[value for value in given if value in axis] for axis in (SHAPES, OPTIONS, EVENTS)]
    shapes, options, events = found
    return Scenario(*(shapes or ["line"]), tuple(options), *(events or ["none"]))


def covered(scenario: Scenario) -> set[Pair]:
    """The pairs that a scenario tries.

    Where an option keeps a run from having the bits of the reference, only the pairs of that option
    count: a slight fault of two other values would pass.
    """
    inexact = INEXACT & {*scenario.options}
    return {pair for pair in scenario.pairs if not inexact or inexact & {*pair}}


@cache
def refused() -> dict[Scenario, Rule]:
    """For each two values that are refused, a scenario with them alone."""
    found = {scenario_of(pair): verdict(scenario_of(pair)) for pair in all_pairs()}
    return {scenario: rule for scenario, rule in found.items() if rule and rule.refused}


@cache
def impossible() -> dict[Pair, str]:
    """The pairs that do not exist, with the reason."""
    found = {pair: verdict(scenario_of(pair)) for pair in all_pairs()}
    return {pair: rule.impossible for pair, rule in found.items() if rule and rule.impossible}


@cache
def running() -> list[Scenario]:
    """The scenarios that run: together they cover all other pairs. They are always the same."""
    missing = dict.fromkeys(pair for pair in all_pairs() if verdict(scenario_of(pair)) is None)
    found = []
    while missing:
        chosen = _grown(next(iter(missing)), missing)
        for pair in covered(chosen):
            missing.pop(pair, None)
        found.append(chosen)
    return found


def tried_by(pair: Pair) -> str:
    """The scenario that tries two values, or why there is none; empty if it is missing."""
    if pair in impossible():
        return f"impossible: {impossible()[pair]}"
    if scenario_of(pair) in refused():
        return f"refused: {refused()[scenario_of(pair)].refused}"
    return next((str(each) for each in running() if pair in covered(each)), "")


def _grown(pair: Pair, missing: Iterable[Pair]) -> Scenario:
    """The scenario of a pair, with further values that cover most of the missing pairs."""
    values, wanted = {*pair}, {*missing}
    axes = [(tuple(SHAPES), 1), (EVENTS, 1), *[(OPTIONS, MOST_OPTIONS)] * MOST_OPTIONS]
    for axis, most in axes:
        if len(values & {*axis}) == most:
            continue
        tried = [scenario_of({*values, value}) for value in axis if value not in values]
        tried = [each for each in tried if verdict(each) is None and pair in covered(each)]
        best = max(tried, key=lambda each: len(wanted & covered(each)))
        values = {*best.values} if most == 1 else {*values, *best.options}
    return scenario_of(values)


def with_each_value(scenarios: Iterable[Scenario]) -> list[Scenario]:
    """Few of the scenarios, in which each value is that is in any."""
    left, found = [*scenarios], []
    missing = {value for scenario in left for value in scenario.values}
    while missing:
        best = max(left, key=lambda each: len(missing & {*each.values}))
        missing -= {*best.values}
        found.append(best)
    return found
