"""`lightning-hetero verify`: compare the workers' results with those of one device."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ..model.layers import DecoderLayer
from ..pipeline.tolerance import Comparison, Verdict
from ..plan import Plan
from ..planner.solver import even_plan
from ..strategy.deploy import Site
from ..verify.rehearsal import Rehearsal
from .options import Project, add_project_options, project_of

if TYPE_CHECKING:
    from .options import Commands

_COLUMNS = ("worker", "layers", "loss", "activation", "gradient", "of weights", "allowed", "")


def add_to(commands: Commands) -> None:
    verify = commands.add_parser(
        "verify", help="whether the workers compute what one device computes"
    )
    verify.set_defaults(run=_run)
    add_project_options(verify)
    verify.add_argument(
        "--plan",
        metavar="FILE",
        type=Path,
        help="who has which layers (default: the config's; where that is 'auto', 'even')",
    )


def _run(options: argparse.Namespace) -> None:
    verdict = _verdict(project_of(options), options.plan)
    Console().print(_rendered(verdict))
    sys.exit(0 if verdict.is_right else 1)


def _verdict(project: Project, named: Path | None) -> Verdict:
    def rehearse(site: Site, layers: list[DecoderLayer]) -> Verdict:
        plan = _plan(project, named, len(layers), site.find_workers())
        return Rehearsal(site, layers, plan).verdict()

    return project.instead_of_training(rehearse, "there is nothing to verify")


def _plan(project: Project, named: Path | None, num_layers: int, names: list[str]) -> Plan:
    if named is None:
        given = project.strategy.plan_choice.given(num_layers, names)
        return given or replace(even_plan(num_layers, names), micro_batches=2)
    plan = Plan.from_yaml(named)
    plan.check(num_layers, names)
    return plan


def _rendered(verdict: Verdict) -> Group:
    table = Table(
        *_COLUMNS, box=box.SIMPLE_HEAD, title="largest relative errors against one device"
    )
    for comparison in [*verdict.stages, verdict.together]:
        table.add_row(*_cells(comparison))
    return Group(table, *(Text(line) for line in _lines(verdict)))


def _cells(comparison: Comparison) -> list[Text]:
    first, end = comparison.layers
    errors = (
        comparison.loss,
        comparison.activation,
        comparison.gradient,
        comparison.parameters.error,
    )
    return [
        Text(comparison.who),
        Text(f"{first} to {end - 1}"),
        *(_error(error, comparison.tolerance) for error in errors),
        Text(f"{comparison.tolerance:.1e}"),
        Text("ok", "green") if comparison.is_right else Text("WRONG", "bold red"),
    ]


def _error(error: float | None, tolerance: float) -> Text:
    if error is None:
        return Text("-")
    return Text(f"{error:.1e}", "" if error <= tolerance else "bold red")


def _lines(verdict: Verdict) -> list[str]:
    worst = [
        f"{stage.who}: the gradient that is furthest off is {stage.parameters.name}"
        for stage in verdict.stages
        if stage.parameters.error > stage.tolerance
    ]
    return [*worst, verdict.sentence]
