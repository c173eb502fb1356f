"""`lightning-hetero verify`: compare the workers' results with one device's."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from rich import box
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from ..model.layers import DecoderLayer
from ..pipeline.tolerance import Comparison, RehearsalVerdict
from ..plan import Plan
from ..planner.solver import even_plan
from ..planner.verdict import show
from ..replan.planning import PlanChoice
from ..strategy.deploy import PlanSource, Site
from ..strategy.strategy import HeteroPipelineStrategy
from ..verify.rehearsal import Rehearsal
from .project import project_of

_COLUMNS = ("layers", "loss", "activation", "gradient", "of weights", "allowed", "")


def run(options: argparse.Namespace) -> None:
    project = project_of(options)
    strategy = HeteroPipelineStrategy.of(project.trainer)
    choice = strategy.plan_choice if options.plan is None else PlanChoice(options.plan, None)

    def rehearse(site: Site, layers: list[DecoderLayer]) -> RehearsalVerdict:
        plan = _plan(choice, len(layers), site.find_workers())
        return Rehearsal(site, layers, plan).verdict()

    verdict = project.instead_of_training(
        strategy.instead_of_training, rehearse, "there is nothing to verify"
    )
    show(_rendered(verdict))
    sys.exit(0 if verdict.is_right else 1)


def _plan(choice: PlanSource, num_layers: int, names: list[str]) -> Plan:
    given = choice.given(num_layers, names)
    return given or replace(even_plan(num_layers, names), micro_batches=2)


def _rendered(verdict: RehearsalVerdict) -> Group:
    table = Table(
        Column("worker", overflow="fold"),
        *_COLUMNS,
        box=box.SIMPLE_HEAD,
        title="largest relative errors against one device",
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


def _lines(verdict: RehearsalVerdict) -> list[str]:
    worst = [
        f"{stage.who}: the least exact gradient is {stage.parameters.name}"
        for stage in verdict.stages
        if stage.parameters.error > stage.tolerance
    ]
    return [*worst, verdict.sentence]
