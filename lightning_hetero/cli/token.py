"""`lightning-hetero token`: make the common secret of all machines of a run."""

from __future__ import annotations

import argparse
import getpass
import shlex
import sys

from ..errors import TokenError
from ..transport.token import DEFAULT_FILE, FILE_VARIABLE, Token, expanded, write_token_file


def run(options: argparse.Namespace) -> None:
    path = expanded(options.file).absolute()
    if options.paste:
        write_token_file(path, _pasted_token())
        print(f"Wrote the token to {path}.")
        return
    write_token_file(path, Token.new())
    print(
        f"Wrote a new token to {path}. Everyone with the token may train on your workers, so "
        "copy it only to machines of the run, for instance with\n\n  ssh MACHINE 'umask 077; "
        f"mkdir -p {DEFAULT_FILE.parent}; cat > {DEFAULT_FILE}' < {shlex.quote(str(path))}\n\nor "
        "by pasting its one line into `lightning-hetero token --paste` there. Then "
        "`lightning-hetero worker --listen 0.0.0.0:9999` finds it. If the token is not in "
        f"{DEFAULT_FILE}, name its file with `--token-file`, with `token_file=` of the strategy, "
        f"or with the environment variable {FILE_VARIABLE}."
    )


def _pasted_token() -> Token:
    """The token on standard input; on a terminal the command asks for it and does not show it.

    Raises:
        TokenError: If the text is not a token.
    """
    text = getpass.getpass("Token: ") if sys.stdin.isatty() else sys.stdin.readline()
    try:
        return Token.from_text(text)
    except ValueError as error:
        raise TokenError(f"No token was written: {error}; copy its whole line.") from None
