"""`lightning-hetero verify`: whether the workers compute what one device computes."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import _TunerExitException
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ..coordinator.workers import Fleet
from ..errors import ModelError
from ..model.layers import DecoderLayer
from ..pipeline.tolerance import Comparison, Verdict
from ..plan import Plan
from ..planner.solver import even_plan
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


def _verdict(project: Project, plan: Path | None) -> Verdict:
    strategy = project.strategy
    found: list[Verdict] = []

    def rehearse(module: pl.LightningModule, layers: list[DecoderLayer], fleet: Fleet) -> None:
        names = fleet.find(strategy.root_device, strategy.deadlines)
        chosen = _plan(project, plan, len(layers), names)
        found.append(Rehearsal(module, layers, fleet, chosen, strategy.deadlines).verdict())
        # What Lightning itself ends a run with that was only to try something.
        raise _TunerExitException

    strategy.rehearsal = rehearse
    project.fit()
    if not found:
        raise ModelError(
            f"{type(project.model).__name__} has no decoder layers that could be found, so there "
            "is nothing to verify; name them with `layers=`."
        )
    return found[0]


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
