"""`lightning-hetero report`: write an HTML page about a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ..errors import PictureError
from ..report.html import report
from ..report.run_record import read_run
from .options import add_output_option

if TYPE_CHECKING:
    from .options import Commands

NAME = "report.html"


def add_to(commands: Commands) -> None:
    command = commands.add_parser("report", help="write an HTML page about a run")
    command.set_defaults(run=_run)
    command.add_argument(
        "folder",
        type=Path,
        metavar="RUN_DIR",
        help="folder with the run's logs, such as lightning_logs/version_0",
    )
    add_output_option(command, "the page", f"{NAME} in RUN_DIR")


def _run(options: argparse.Namespace) -> None:
    page = report(read_run(options.folder))
    path = options.output or options.folder / NAME
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise PictureError(f"The report cannot be written to {str(path)!r}: {error}.") from error
    Console().print(Text(f"The report is in {path}."))
