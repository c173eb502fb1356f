"""The token file of a pairing machine: its place, and its first content."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import TokenError
from ..transport.token import (
    DEFAULT_FILE,
    FILE_VARIABLE,
    Token,
    expanded,
    find_token_file,
    read_token_file,
    write_token_file,
)
from .exchange import Receipt


def pairing_file(named: Path | None) -> Path:
    """The token file of this machine, whether it exists or not.

    Raises:
        TokenError: If this user has no home folder, or has switched the token off.
    """
    found = find_token_file(named)
    if found is not None:
        return found.absolute()
    if FILE_VARIABLE in os.environ:
        raise TokenError(
            f"The variable {FILE_VARIABLE} is empty, so this process has no token, and pairing is "
            "about one; unset the variable, or name a file with `--token-file`."
        )
    return expanded(DEFAULT_FILE)


def token_here(path: Path) -> Token:
    """The token of a file; a new one if the file does not exist.

    Raises:
        TokenError: If the file cannot be used or written.
    """
    if not os.path.lexists(path):
        write_token_file(path, Token.new())
    return read_token_file(path)


def keep_token(path: Path, token: Token) -> Receipt:
    """Write an arrived token, unless this machine has one.

    Raises:
        TokenError: If the file cannot be used or written.
    """
    if os.path.lexists(path):
        return Receipt.SAME if read_token_file(path) == token else Receipt.OTHER_TOKEN
    write_token_file(path, token)
    return Receipt.KEPT
