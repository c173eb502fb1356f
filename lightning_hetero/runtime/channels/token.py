"""The token: one secret in a file, by which the coordinator and the workers know each other.

Whoever has it may train on the workers, and read and change what they are sent. It is read here and
handed on as it is; it never stands in a message to people.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from ...errors import TokenError
from .private import check_private

DEFAULT_FILE = Path("~/.config/lightning-hetero/token")
FILE_VARIABLE = "LIGHTNING_HETERO_TOKEN_FILE"

SECRET_BYTES = 32
# Tells a token that was damaged in copying from one of another run.
_CHECK_BYTES = 4
# So that people, and programs that look for secrets in the wrong places, know one when they see it.
_MARK = "lht1_"
# A file that is much longer is something else.
_MOST_FILE_BYTES = 4096


@dataclass(frozen=True)
class Token:
    """A secret of 256 bits. It does not print and cannot be pickled, so it gets into no log, no
    error and no checkpoint."""

    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Token:
        """A token that nobody has seen."""
        return cls(secrets.token_bytes(SECRET_BYTES))

    @classmethod
    def from_text(cls, text: str) -> Token:
        """Read a token as `to_text` writes it.

        Raises:
            ValueError: If it is none; without the text, which may be a secret of somebody's.
        """
        words = text.split()
        if len(words) != 1 or not words[0].startswith(_MARK):
            raise ValueError("what stands there is no token")
        try:
            content = base64.b64decode(words[0].removeprefix(_MARK), b"-_", validate=True)
        except ValueError:
            raise ValueError("the token there is damaged") from None
        secret, check = content[:SECRET_BYTES], content[SECRET_BYTES:]
        if len(secret) != SECRET_BYTES or not secrets.compare_digest(check, _check_of(secret)):
            raise ValueError("the token there is damaged")
        return cls(secret)

    def to_text(self) -> str:
        """The token as one line for its file."""
        content = self.secret + _check_of(self.secret)
        return _MARK + base64.urlsafe_b64encode(content).decode()

    def __reduce__(self) -> NoReturn:
        raise TypeError("A token is not pickled; pass on the name of its file.")


def write_token_file(path: Path, token: Token) -> None:
    """Make a file of a token that only its owner may read.

    Raises:
        TokenError: If there is something already, or it cannot be written.
    """
    try:
        _make_folder(path.parent)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise TokenError(
            f"{str(path)!r} is there already, and whoever uses its token would lose it; name "
            "another file, or remove this one first."
        ) from None
    except OSError as error:
        raise TokenError(f"The token file cannot be written: {error}.") from error
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(token.to_text() + "\n")
    except OSError as error:
        path.unlink()
        raise TokenError(f"The token cannot be written to {str(path)!r}: {error}.") from error


def _make_folder(path: Path) -> None:
    if not path.is_dir():
        path.mkdir(mode=0o700, parents=True)


def read_token_file(path: Path) -> Token:
    """The token of a file that nobody but its owner may read.

    Raises:
        TokenError: If the file is missing, open to others, or has no token of ours in it.
    """
    try:
        with path.open("rb") as file:
            check_private(file, "The token file", "use it", TokenError)
            content = file.read(_MOST_FILE_BYTES)
    except FileNotFoundError:
        raise TokenError(
            f"There is no token file {str(path)!r}; make one with `lightning-hetero token`, or "
            "copy that of the other machines there."
        ) from None
    except OSError as error:
        raise TokenError(f"The token file cannot be read: {error}.") from error
    try:
        return Token.from_text(content.decode("ascii", "replace"))
    except ValueError as error:
        raise TokenError(
            f"The token file {str(path)!r} is of no use: {error}; make one with "
            "`lightning-hetero token`, or copy that of the other machines once more."
        ) from None


def find_token_file(named: str | os.PathLike[str] | None) -> Path | None:
    """The token file to be used: the named one, that of the environment variable, or the default
    one if it is there. An empty variable stands for none."""
    if named is not None:
        return Path(named).expanduser()
    if FILE_VARIABLE in os.environ:
        text = os.environ[FILE_VARIABLE]
        return Path(text).expanduser() if text else None
    default = DEFAULT_FILE.expanduser()
    return default if default.exists() else None


def _check_of(secret: bytes) -> bytes:
    return hashlib.sha256(b"lightning-hetero token" + secret).digest()[:_CHECK_BYTES]
