"""`lightning-hetero plan`: decide from measurements which device holds which layers."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TypeVar

from rich.console import Console

from ..errors import PlanError
from ..planner.profile import Profile
from ..planner.solver import Wishes, parse_memory, parse_pin, solve
from ..planner.verdict import judge, render
from .options import new_file, writing

Value = TypeVar("Value")


def run(options: argparse.Namespace) -> None:
    profile = Profile.from_yaml(options.profile)
    wishes = Wishes(
        pins=_each_once(parse_pin(text) for text in options.pin),
        exclude=options.exclude,
        memory_bytes=_each_once(parse_memory(text) for text in options.memory),
        batch_size=options.batch_size,
        micro_batches=options.micro_batches,
    )
    path = options.output or new_file("plan.yaml")
    solution = solve(profile, wishes)
    with writing("plan", path):
        solution.plan.to_yaml(path)
    Console().print(render(judge(solution)))
    print(f"The plan is in {path}.")


def _each_once(pairs: Iterable[tuple[str, Value]]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for name, value in pairs:
        if name in values:
            raise PlanError(f"{name!r} is given twice, as {values[name]} and {value}; keep one.")
        values[name] = value
    return values
