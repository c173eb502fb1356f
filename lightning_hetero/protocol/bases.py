"""The bases of messages: who may send the messages of a kind, and when."""

from __future__ import annotations

from typing import ClassVar

from .fields import Count, Key
from .session import Message, Speaker, State, by, by_anyone


class IdleRequest(Message, frozen=True):
    """Base of what the coordinator may ask before a stage is deployed."""

    said = by(Speaker.COORDINATOR, State.IDLE)


class IdleAnswer(Message, frozen=True):
    """Base of what a worker answers before a stage is deployed."""

    said = by(Speaker.WORKER, State.IDLE)


class ServingRequest(Message, frozen=True):
    """Base of what the coordinator may say to a stage that serves."""

    said = by(Speaker.COORDINATOR, State.SERVING)


class LoadingRequest(Message, frozen=True):
    """Base of what the coordinator may ask while a stage is loaded and while it serves."""

    said = by(Speaker.COORDINATOR, State.LOADING, State.SERVING)


class StampedRequest(ServingRequest, frozen=True, kw_only=True):
    """Base of requests that have their place between forwards and backwards.

    A worker carries one out when its stages have run so many ``forwards`` and ``backwards`` of the
    present step together, however late or early it comes. More of them are an error if
    ``is_exact``.
    """

    is_exact: ClassVar[bool] = True
    forwards: Count = 0
    backwards: Count = 0


class StageReport(Message, frozen=True):
    """Base of what a stage may say while it is loaded and while it serves."""

    said = by(Speaker.WORKER, State.LOADING, State.SERVING)


class InstantMessage(Message, frozen=True):
    """Base of the messages that channels exchange themselves; they do not reach the inbox."""

    said = by_anyone()


class ForStage(Message, frozen=True, kw_only=True):
    """Base of the messages that a stage takes; stage 0 is the coordinator's."""

    said = by(Speaker.COORDINATOR, State.SERVING)
    stage: Count = 0

    @property
    def stage_number(self) -> int:
        """The stage that takes the message."""
        return self.stage


class MicrobatchMessage(ForStage, frozen=True):
    """Base of the messages about one micro-batch and visit in a step."""

    recorded_as = "take"
    step: Count
    microbatch: Count
    visit: Count

    @property
    def key(self) -> Key:
        """The micro-batch and visit that the message is about."""
        return Key(self.microbatch, self.visit)
