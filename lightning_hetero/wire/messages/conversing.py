"""What any conversation has: signs of life, pauses, failures and its end."""

from __future__ import annotations

from .base import BaseMessage, Count, Name, Text


class Ping(BaseMessage, frozen=True, tag=True):
    """Asks for a sign of life."""


class Pong(BaseMessage, frozen=True, tag=True):
    """A sign of life, and what the sender does or did last, for people."""

    doing: Name = ""


class Goodbye(BaseMessage, frozen=True, tag=True):
    """Ends a conversation in good order."""


class Failure(BaseMessage, frozen=True, tag=True, forbid_unknown_fields=False):
    """Something went wrong on the sender's side, or the receiver broke a rule."""

    reason: Text
    traceback: Text = ""
    in_optimizer_step: bool = False


class NeighborLost(BaseMessage, frozen=True, tag=True):
    """A stage's channel to another stage ended."""

    stage_index: Count
    reason: Text


class Paused(BaseMessage, frozen=True, tag=True):
    """The worker's owner wants its device: nothing is computed until `Resumed`."""


class Resumed(BaseMessage, frozen=True, tag=True):
    """The worker goes on where it was paused."""


class Done(BaseMessage, frozen=True, tag=True):
    """The last request is carried out."""
