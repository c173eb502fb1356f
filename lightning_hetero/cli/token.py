"""`lightning-hetero token`: the secret that all machines of a run share."""

from __future__ import annotations

import argparse
import getpass
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import TokenError
from ..transport.token import DEFAULT_FILE, FILE_VARIABLE, Token, write_token_file

if TYPE_CHECKING:
    from .options import Commands


def add_to(commands: Commands) -> None:
    token = commands.add_parser("token", help="make the secret that all machines of a run share")
    token.set_defaults(run=_run)
    token.add_argument(
        "file",
        nargs="?",
        type=Path,
        default=DEFAULT_FILE,
        metavar="FILE",
        help="where to put it; nothing is overwritten (default: %(default)s)",
    )
    token.add_argument(
        "--paste",
        action="store_true",
        help="ask for the token of another machine, or read it from standard input",
    )


def _run(options: argparse.Namespace) -> None:
    path = options.file.expanduser().absolute()
    if options.paste:
        write_token_file(path, _pasted_token())
        print(f"Wrote the token to {path}.")
        return
    write_token_file(path, Token.new())
    print(
        f"Wrote a new token to {path}. Whoever has it may train on your workers, so copy it only "
        "to machines of the run, for instance with\n\n"
        f"  ssh MACHINE 'umask 077; mkdir -p {DEFAULT_FILE.parent}; cat > {DEFAULT_FILE}' "
        f"< {shlex.quote(str(path))}\n\n"
        "or by pasting its one line into `lightning-hetero token --paste` there. "
        "Then `lightning-hetero worker --listen 0.0.0.0:9999` finds it by itself. Elsewhere than "
        f"in {DEFAULT_FILE} it is named by `--token-file`, by `token_file=` of the strategy, or by "
        f"the environment variable {FILE_VARIABLE}."
    )


def _pasted_token() -> Token:
    """The token that stands on standard input; on a terminal it is asked for and not shown.

    Raises:
        TokenError: If it is none.
    """
    text = getpass.getpass("Token: ") if sys.stdin.isatty() else sys.stdin.readline()
    try:
        return Token.from_text(text)
    except ValueError as error:
        raise TokenError(f"Nothing was written: {error}; copy its whole line.") from None
