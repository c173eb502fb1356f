"""The command `lightning-hetero`, with one module per subcommand.

To add a subcommand, add a module with ``HELP``, ``add_options`` and ``run``, and add its name to
`COMMANDS`.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from ..errors import HeteroError

COMMANDS = (
    *("worker", "workers", "token", "mesh", "doctor", "profile"),
    *("plan", "diagram", "verify", "top", "report"),
)
"""The modules of the subcommands, in the order of the help text."""


def main() -> None:
    """Entry point of the command line."""
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
    for name in COMMANDS:
        module = import_module(f".{name}", __package__)
        command = commands.add_parser(name, help=module.HELP)
        command.set_defaults(run=module.run)
        module.add_options(command)
    return parser
