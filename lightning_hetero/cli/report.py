"""`lightning-hetero report`: write an HTML page about a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..report.html import report
from ..report.run_record import read_run
from .options import add_output_option, writing

HELP = "write an HTML page about a run"
NAME = "report.html"


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "folder",
        type=Path,
        metavar="RUN_DIR",
        help="folder with the run's logs, such as lightning_logs/version_0",
    )
    add_output_option(command, "the page", f"{NAME} in RUN_DIR")


def run(options: argparse.Namespace) -> None:
    page = report(read_run(options.folder))
    path = options.output or options.folder / NAME
    with writing("report", path):
        path.write_text(page, encoding="utf-8")
    print(f"The report is in {path}.")
