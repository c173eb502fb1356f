"""`lightning-hetero report`: write an HTML page about a run."""

from __future__ import annotations

import argparse

from ..report.html import report
from ..report.run_record import read_run
from .options import writing

NAME = "report.html"


def run(options: argparse.Namespace) -> None:
    page = report(read_run(options.folder))
    path = options.output or options.folder / NAME
    with writing("report", path):
        path.write_text(page, encoding="utf-8")
    print(f"The report is in {path}.")
