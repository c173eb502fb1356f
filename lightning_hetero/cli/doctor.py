"""`lightning-hetero doctor`: find out why a worker cannot be used, hop by hop."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from ..devices.description import equipment_here
from ..doctor.checks import Outcome, Report, WantedPlan, advice
from ..doctor.visit import Options, credentials_or_error, visit
from ..errors import PlanError
from ..plan import Plan
from ..planner.profile import Profile
from ..planner.verdict import show
from ..transport.token import find_token_file

_MARKS: dict[Outcome, tuple[str, str]] = {
    "passed": ("ok", "green"),
    "warned": ("look", "yellow"),
    "failed": ("FAILS", "bold red"),
    "skipped": ("-", "dim"),
}


def run(options: argparse.Namespace) -> None:
    shared = Options(
        credentials=credentials_or_error(find_token_file(options.token_file)),
        equipment=equipment_here(torch.device("cpu")),
        connect_seconds=options.timeout,
        measure_seconds=options.seconds,
        wanted=_wanted(options.profile, options.plan),
    )
    reports = []
    for address in options.addresses:
        report = visit(address, shared)
        reports.append(report)
        if not options.json:
            show(_rendered(report))
    if options.json:
        print(json.dumps(_as_data(reports), indent=2))
    else:
        for line in advice(reports):
            show(Text(line))
    sys.exit(0 if all(report.is_usable for report in reports) else 1)


def _wanted(profile: str | None, plan: str | None) -> WantedPlan | None:
    if profile is None:
        if plan is not None:
            raise PlanError(
                f"The plan {plan!r} does not show how many bytes a step sends; name the profile "
                "of its model with --profile."
            )
        return None
    return WantedPlan(Profile.from_yaml(profile), None if plan is None else Plan.from_yaml(plan))


def _rendered(report: Report) -> Table:
    failing = report.failing
    verdict = "can be used" if failing is None else f"cannot be used: {failing.check}"
    title = Text(f"{report.address} {verdict}", style="green" if failing is None else "bold red")
    table = Table(box=box.SIMPLE, show_header=False, title=title, title_justify="left")
    for finding in report.findings:
        mark, style = _MARKS[finding.outcome]
        text = finding.text + (f"; {finding.remedy}" if finding.remedy else "")
        table.add_row(finding.check, Text(mark, style=style), Text(text))
    return table


def _as_data(reports: Sequence[Report]) -> dict[str, object]:
    return {
        "usable": all(report.is_usable for report in reports),
        "advice": advice(reports),
        "workers": [
            {
                "address": report.address,
                "usable": report.is_usable,
                "failing": None if report.failing is None else report.failing.check,
                "checks": [asdict(finding) for finding in report.findings],
            }
            for report in reports
        ],
    }
