"""The token: a secret in a file, shared by the coordinator and its workers.

A process with the token may train on the workers, and read and change their messages. `tls.py`
proves to a peer that a process has the token. Errors and logs never show the token.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

from ..errors import TokenError

DEFAULT_FILE = Path("~/.config/lightning-hetero/token")
FILE_VARIABLE = "LIGHTNING_HETERO_TOKEN_FILE"

SECRET_BYTES = 32
# Bytes of a checksum. It tells a damaged token from another run's token.
_CHECK_BYTES = 4
# Lets people, and programs that search for leaked secrets, recognise a token.
_MARK = "lht1_"
# A longer file holds something else.
_MOST_FILE_BYTES = 4096


@dataclass(frozen=True)
class Token:
    """A secret of 256 bits.

    It does not print and cannot be pickled, so logs, errors and checkpoints never hold it.
    """

    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Token:
        """A new random token."""
        return cls(secrets.token_bytes(SECRET_BYTES))

    @classmethod
    def from_text(cls, text: str) -> Token:
        """Read a token as `to_text` writes it.

        Raises:
            ValueError: If the text is not a token. The error leaves out the text: it may be another
                secret.
        """
        words = text.split()
        if len(words) != 1 or not words[0].startswith(_MARK):
            raise ValueError("the text there is not a token")
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
        raise TypeError("A token cannot be pickled; pass the name of its file instead.")


def _check_of(secret: bytes) -> bytes:
    return hashlib.sha256(b"lightning-hetero token" + secret).digest()[:_CHECK_BYTES]


def find_token_file(named: str | os.PathLike[str] | None) -> Path | None:
    """The token file: the named one, else the file of the environment variable, else the default
    file if it exists. An empty variable switches the default file off.

    Raises:
        TokenError: If the name begins with ``~``, and this user does not have a home folder.
    """
    if named is not None:
        return expanded(Path(named))
    if FILE_VARIABLE in os.environ:
        text = os.environ[FILE_VARIABLE]
        return expanded(Path(text)) if text else None
    with suppress(TokenError):
        default = expanded(DEFAULT_FILE)
        # False also where this user may not look.
        return default if os.path.exists(default) else None
    return None


def expanded(path: Path) -> Path:
    """The path of a token file with the user's home folder in place of ``~``.

    Raises:
        TokenError: If the user does not have a home folder.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise TokenError(
            f"The token file {str(path)!r} cannot be found, as this user has no home folder: name "
            "the file by its whole path, or set HOME."
        ) from error


def write_token_file(path: Path, token: Token) -> None:
    """Write a token to a new file, readable by its owner only.

    Raises:
        TokenError: If the file exists, or cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        is_there = isinstance(error, FileExistsError)
        if is_there and path.parent.is_dir():
            raise TokenError(
                f"{str(path)!r} is there already, and overwriting it would lock out every machine "
                "that uses its token; name another file, or remove this one first."
            ) from None
        why = f"{error.filename!r} is no folder" if is_there else error.strerror or error
        raise TokenError(
            f"The token file {str(path)!r} cannot be written: {why}; name another file."
        ) from error
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(token.to_text() + "\n")
    except OSError as error:
        path.unlink()
        raise TokenError(
            f"The token file {str(path)!r} cannot be written: {error.strerror or error}."
        ) from error


def read_token_file(path: Path) -> Token:
    """Read the token from a file, readable by its owner only.

    Raises:
        TokenError: If the file is missing, open to others, another user's, or does not hold a
            token.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            _check_own(file)
            _check_folders(path)
            _check_private(file)
            content = file.read(_MOST_FILE_BYTES)
    except FileNotFoundError:
        raise TokenError(
            f"There is no token file {str(path)!r}; make one with `lightning-hetero token`, or "
            "copy the file of the other machines to this path."
        ) from None
    except OSError as error:
        raise TokenError(
            f"The token file {str(path)!r} cannot be read: {error.strerror or error}; name a file "
            "that `lightning-hetero token` wrote."
        ) from error
    try:
        return Token.from_text(content.decode("ascii", "replace"))
    except ValueError as error:
        raise TokenError(
            f"The token file {str(path)!r} cannot be used: {error}; make one with "
            "`lightning-hetero token`, or copy the file of the other machines again."
        ) from None


def _without_waiting(path: str, flags: int) -> int:
    """Open a file without waiting: a named pipe would wait for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _check_own(file: IO[Any]) -> None:
    """Refuse pipes and devices, and a file of another user: the other user may exchange the token.

    Raises:
        TokenError: With the name and the remedy.
    """
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        raise TokenError(
            f"The token file {str(file.name)!r} is not a plain file, but a pipe or a device; "
            "name a file that `lightning-hetero token` wrote."
        )
    if found.st_uid not in (os.geteuid(), 0):
        raise TokenError(
            f"The token file {str(file.name)!r} belongs to the user with number {found.st_uid}, "
            f"and this process runs as number {os.geteuid()}, so that another user may exchange "
            f"the token; copy the file, or `chown {os.geteuid()} {file.name}`."
        )


def _check_folders(path: Path) -> None:
    """Refuse a token file if every user may exchange files in its folder.

    Raises:
        TokenError: With the folder and the remedy.
    """
    for folder in path.resolve().parents:
        mode = folder.stat().st_mode
        # In a folder such as /tmp only the owner of a file may exchange it.
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise TokenError(
                f"The token file {str(path)!r} is in {str(folder)!r}, where all users may exchange "
                f"files (mode {stat.S_IMODE(mode):04o}); `chmod o-w {folder}`, or name a file in a "
                "folder of your own."
            )


def _check_private(file: IO[Any]) -> None:
    """Refuse an open file if other users than its owner may read, write or run it."""
    mode = os.fstat(file.fileno()).st_mode
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise TokenError(
            f"The token file {str(file.name)!r} has mode {stat.S_IMODE(mode):04o}, so that others "
            f"may use it; `chmod 600 {file.name}`."
        )
