"""What tells how a run goes: clocks, records of steps, and a worker's status."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..records import Moment, Span, Totals
from .base import FEW, BaseMessage, Bytes, Count, LongSeconds, Name


class AskClock(BaseMessage, frozen=True, tag=True):
    """Asks what the peer's clock shows; answered at once, also while it computes."""

    number: Count


class ClockTold(BaseMessage, frozen=True, tag=True):
    """What the clock showed that the peer's spans are on."""

    number: Count
    moment_seconds: Moment


class Record(BaseMessage, frozen=True, tag=True):
    """From the next step on, record what the stage does, or do so no longer; ``keeps_spans`` says
    whether single spans are wanted besides sums."""

    is_on: bool
    keeps_spans: bool


class FetchRecord(BaseMessage, frozen=True, tag=True):
    """Asks for what was recorded; the spans are handed out once."""

    number: Count
    with_spans: bool


class StageRecord(BaseMessage, frozen=True, tag=True):
    """What was recorded, and how the device is. ``num_dropped`` spans were too many to be kept; of
    ``health`` there is what can be read, by names that end in their units."""

    number: Count
    totals: Totals
    spans: Annotated[list[Span], msgspec.Meta(max_length=2**16)]
    num_dropped: Count
    health: Annotated[dict[Name, Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]], FEW]


class LinkStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What has gone over one of a stage's links."""

    peer: Name
    sent_bytes: Bytes
    received_bytes: Bytes


class StageStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stage is and does.

    Args:
        run: Tells runs apart, and nothing else.
        coordinator: Whom it serves.
        stage_index: Its number, 0 before there is a stage.
        first_layer: Of its layers.
        end_layer: Behind the last one.
        step: The present one.
        training_seconds: From its first training step to its latest optimizer step.
        busy_seconds: What it computed in that time.
        links: To the coordinator and to its neighbors.
    """

    run: Name
    coordinator: Name
    stage_index: Count
    first_layer: Count
    end_layer: Count
    step: Count
    training_seconds: LongSeconds
    busy_seconds: LongSeconds
    links: Annotated[list[LinkStatus], FEW]


class Status(BaseMessage, frozen=True, tag=True):
    """What a worker does, for whoever watches it; ``stage`` is None while it is free.

    ``moment_seconds`` is on a clock that only this worker has, to make rates of two answers.
    """

    moment_seconds: LongSeconds
    used_bytes: Bytes
    stage: StageStatus | None
