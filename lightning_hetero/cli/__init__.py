"""The command `lightning-hetero`: a file for each of its commands."""

from __future__ import annotations

import argparse
import sys

from ..errors import HeteroError
from . import diagram, doctor, mesh, plan, profile, report, token, top, verify, worker, workers

COMMANDS = (
    worker,
    workers,
    token,
    mesh,
    doctor,
    profile,
    plan,
    diagram,
    verify,
    top,
    report,
)


def main() -> None:
    """Entry point of the command."""
    options = _parser().parse_args()
    try:
        options.run(options)
    except HeteroError as error:
        sys.exit(f"lightning-hetero: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-hetero", description="Train one model on mixed hardware."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser
