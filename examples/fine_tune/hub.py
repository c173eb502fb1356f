"""The Hub's errors, as one sentence that names what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)


class HubError(Exception):
    """A model or a data set cannot be read from the Hub; the message says why and what to do."""


@contextmanager
def plain_hub_errors(kind: str, name: str) -> Iterator[None]:
    """Turn what goes wrong between here and the Hub into a sentence.

    Args:
        kind: What is read: "model" or "data set".
        name: Its name on the Hub, or a folder.

    Raises:
        HubError: Where the Hub, the network or the name is the cause. Other errors pass.
    """
    try:
        yield
    except Exception as error:
        told = _told(error, kind, name)
        if told is None:
            raise
        raise HubError(told) from error


def _told(error: Exception, kind: str, name: str) -> str | None:
    causes = list(_causes(error))
    page = f"https://huggingface.co/{'datasets/' if kind == 'data set' else ''}{name}"
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return (
            f"The {kind} {name} is gated. Accept its terms at {page}, make a token at "
            "https://huggingface.co/settings/tokens, and log in here: hf auth login."
        )
    if any(isinstance(cause, RepositoryNotFoundError | HFValidationError) for cause in causes):
        return (
            f"There is no {kind} {name}, neither as a folder here nor on the Hub. Check the "
            "spelling; if it is private, log in first: hf auth login."
        )
    if any(isinstance(c, LocalEntryNotFoundError | OfflineModeIsEnabled) for c in causes) or any(
        isinstance(cause, ConnectionError) for cause in causes
    ):
        return (
            f"The {kind} {name} is no folder here, and the Hub cannot be reached. Check the "
            "network, or give the folder of a copy."
        )
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and everything that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
