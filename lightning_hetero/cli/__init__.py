"""The command `lightning-hetero`, with one module per command.

To add a command, add its options to `options.COMMANDS`, and a module of its name with ``run``.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from ..errors import HeteroError, traceback_there
from ..optional import import_extra
from .options import COMMANDS, command_line

__all__ = ["COMMANDS", "command_line", "main"]


def main() -> None:
    """Entry point of the command line."""
    parser = command_line()
    options = parser.parse_args()
    try:
        if options.print_completion is not None:
            shtab = import_extra("shtab", "completion", "completion needs it")
            print(shtab.complete(parser, options.print_completion))
            return
        if options.command is None:
            parser.print_help()
            return
        # Most commands import torch, which takes seconds, so only the called one is imported.
        _take_lightning(options)
        import_module(f".{options.command}", __name__).run(options)
    except HeteroError as error:
        sys.exit(f"{traceback_there(error)}lightning-hetero: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _take_lightning(options: argparse.Namespace) -> None:
    """Take `pytorch_lightning` for this process if a config names the module for it."""
    other = f"{__name__.partition('.')[0]}.pytorch_lightning"
    configs = [Path(name) for name in getattr(options, "config", [])]
    if any(each.is_file() and other.encode() in each.read_bytes() for each in configs):
        import_module(other)
