"""`lightning-hetero plan`: choose the layers of each device from measurements."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.text import Text

from ..errors import PlanError
from ..plan import Plan
from ..planner.cards import FASTEST, SLOWEST, with_card
from ..planner.profile import Profile
from ..planner.solver import Solution, Wishes, parse_memory, parse_pin, predict_given, solve
from ..planner.verdict import bottleneck, judge, render, show
from .options import new_file, writing

Value = TypeVar("Value")
Decide = Callable[[Profile, Wishes], Solution]


def run(options: argparse.Namespace) -> None:
    profile = Profile.from_yaml(options.profile)
    wishes = Wishes(
        pins=_each_once(parse_pin(text) for text in options.pin),
        exclude=options.exclude,
        memory_bytes=_each_once(parse_memory(text) for text in options.memory),
        batch_size=options.batch_size,
        micro_batches=options.micro_batches,
        accumulate_grad_batches=options.accumulate,
        replicas=not options.no_replicas,
    )
    if options.given or options.what_if:
        _check_question(options)
        given = Plan.from_yaml(options.given) if options.given else None
        decide = solve if given is None else partial(predict_given, given)
        if options.what_if:
            show(_with_cards(profile, options.what_if, decide, wishes))
            return
        solution = decide(profile, wishes)
        show(Group(render(judge(solution)), Text(bottleneck(solution.chosen))))
        return
    path = options.output or new_file("plan.yaml")
    solution = solve(profile, wishes)
    with writing("plan", path):
        solution.plan.to_yaml(path)
    show(render(judge(solution)))
    print(f"The plan is in {path}.")


def _each_once(pairs: Iterable[tuple[str, Value]]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for name, value in pairs:
        if name in values:
            raise PlanError(f"{name!r} is given twice, as {values[name]} and {value}; keep one.")
        values[name] = value
    return values


def _without(wishes: Wishes, guessed: set[str]) -> Wishes:
    """The wishes for a profile without the guessed devices."""
    return replace(
        wishes,
        pins={name: layers for name, layers in wishes.pins.items() if name not in guessed},
        memory_bytes={n: size for n, size in wishes.memory_bytes.items() if n not in guessed},
        exclude=[name for name in wishes.exclude if name not in guessed],
    )


def _check_question(options: argparse.Namespace) -> None:
    """Refuse options in contradiction to a question.

    Raises:
        PlanError: With the option to leave out.
    """
    if options.output is not None:
        raise PlanError(
            f"The option --output {options.output} has nothing to write: --given and "
            "--what-if write no plan. Leave it out."
        )
    if options.given and (options.pin or options.micro_batches):
        raise PlanError(
            f"The plan --given {options.given} has its own layers and micro-batches; leave out "
            "--pin and --micro-batches."
        )


def _with_cards(
    profile: Profile, cards: Iterable[str], decide: Decide, wishes: Wishes
) -> RenderableType:
    """The plan with guessed cards, its range, and the speed of the measured devices alone."""
    middle = fastest = slowest = profile
    guesses = []
    for card in cards:
        fastest = with_card(fastest, card, FASTEST).profile
        slowest = with_card(slowest, card, SLOWEST).profile
        guesses.append(with_card(middle, card))
        middle = guesses[-1].profile
    solution = decide(middle, wishes)
    ends = [decide(each, wishes).chosen.tokens_per_second for each in (slowest, fastest)]
    added = {guess.name for guess in guesses} - {device.name for device in profile.devices}
    try:
        before = decide(profile, _without(wishes, added)).chosen
    except PlanError as error:
        measured = str(error)
    else:
        measured = f"a plan makes {before.tokens_per_second:,.0f} tokens/s."
    said = [
        *map(str, guesses),
        f"The plan above is for the middle of the guess; at its ends a plan makes "
        f"{ends[0]:,.0f} to {ends[1]:,.0f} tokens/s.",
        f"Without the guess: {measured}",
    ]
    return Group(render(judge(solution)), *map(Text, said))
