"""The messages of measurements: devices, layers, optimizers and links before anything is deployed,
and clocks, records, timings and status while a stage serves."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated

import msgspec

from ..plan import Dtype
from .bases import (
    IdleAnswer,
    IdleRequest,
    InstantMessage,
    Message,
    Repeated,
    ServingRequest,
    Speaker,
    StageReport,
    State,
    by,
)
from .fields import (
    FEW,
    Bytes,
    Count,
    LongSeconds,
    Moment,
    Name,
    ProbeBytes,
    Sample,
    Seconds,
    Share,
    Span,
    SpareStatus,
    StageStatus,
    Text,
    Totals,
    Words,
)
from .values import ParameterSpec, Value


class DescribeDevice(IdleRequest, frozen=True):
    """Asks what the worker computes on."""

    answers = ("DeviceDescribed",)


class DeviceDescribed(IdleAnswer, Words, frozen=True):
    """What the worker computes on; workers that name the same ``memory`` share it."""

    device: Name
    memory: Name
    free_bytes: Count
    base_bytes: Count
    dtypes: list[Dtype]
    versions: dict[Name, Name]


class PrepareLayers(IdleRequest, frozen=True):
    """Build layers for measurements, with made-up values.

    The frame's tensors are the content of ``buffers``, whose values matter. ``recipe`` and
    ``parameters`` mean what they mean in `Deploy`.
    """

    answers = ("Done", "NotMeasured")
    is_kept = True
    recipe: Text
    parameters: list[ParameterSpec]
    buffers: list[Name]


class MeasureLink(IdleRequest, frozen=True):
    """Measure the link to another worker, in both directions; it is named as in `Deploy`."""

    answers = ("LinkMeasured", "NotMeasured")
    requests = "measuring a link"
    address: Name
    session: Name
    patience_seconds: Seconds


class LinkMeasured(IdleAnswer, frozen=True):
    """Round trips with bytes on the way ``there``, and with bytes on the way ``back``."""

    there: list[Sample]
    back: list[Sample]


class Probe(Message, frozen=True):
    """Asks for an answer of ``answer_bytes`` bytes; may carry bytes itself."""

    said = by(Speaker.COORDINATOR, State.IDLE) | by(Speaker.UPSTREAM, State.LINKED)
    answers = ("ProbeAnswer",)
    is_probe = True
    answer_bytes: ProbeBytes


class ProbeAnswer(Message, frozen=True):
    """The bytes that a probe asked for."""

    said = by(Speaker.WORKER, State.IDLE) | by(Speaker.DOWNSTREAM, State.LINKED)
    is_probe = True


class NotMeasured(IdleAnswer, Words, frozen=True):
    """Measuring raised an error, or (``is_unreachable``) the other worker cannot be reached."""

    reason: Text
    traceback: Text
    is_out_of_memory: bool
    is_unreachable: bool = False


class LayerMeasured(IdleAnswer, frozen=True):
    """What one forward and one backward of the layer took.

    Args:
        spread: The share by which the median of the repeated runs took longer than the fastest.
    """

    forward_seconds: Seconds
    backward_seconds: Seconds
    saved_bytes: Count
    peak_bytes: Count
    spread: Share


class MeasureOptimizer(IdleRequest, frozen=True):
    """Measure the optimizer's step for one of the prepared layers; ``class_name`` as in
    `BuildOptimizer`."""

    answers = ("OptimizerMeasured", "NotMeasured")
    requests = "measuring an optimizer"
    layer_index: Count
    class_name: Name
    defaults: Value
    options: Value
    patience_seconds: Seconds


class OptimizerMeasured(IdleAnswer, frozen=True):
    """Seconds of one step, and bytes of the layer's optimizer state."""

    step_seconds: Seconds
    state_bytes: Count


class Timings(StageReport, frozen=True):
    """With each optimizer step: the seconds of all forwards and of all backwards that trained since
    the last `Timings`, and their number of micro-batches."""

    reports = "the optimizer's part of step {message.step}"
    step: Count
    forward_seconds: Seconds
    backward_seconds: Seconds
    num_microbatches: Count


class AskClock(InstantMessage, frozen=True):
    """Asks for the time on the peer's clock; answered at once, even while the peer computes."""

    number: Count


class ClockTold(InstantMessage, frozen=True):
    """The time on the clock that the sender's spans use."""

    number: Count
    moment_seconds: Moment


class Record(ServingRequest, frozen=True):
    """Switch recording on or off from the next step on; with ``keeps_spans`` the stage keeps single
    spans besides sums."""

    repeated = Repeated.ALWAYS
    is_on: bool
    keeps_spans: bool

    @property
    def sets(self) -> Hashable:
        return Record


class FetchRecord(ServingRequest, frozen=True):
    """Asks for the recorded sums and spans; each span is sent once."""

    repeated = Repeated.UNTIL_ANSWERED
    answers = ("StageRecord",)
    with_spans: bool


class StageRecord(StageReport, Words, frozen=True):
    """What a stage recorded, and the health of its device.

    ``num_dropped`` spans did not fit. ``health`` holds what the device reports, by names that end
    in their units.
    """

    totals: Totals
    spans: Annotated[list[Span], msgspec.Meta(max_length=2**16)]
    num_dropped: Count
    health: Annotated[dict[Name, Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]], FEW]


class Status(Message, frozen=True):
    """What a worker does, for a watcher; ``stage`` is None while the worker is free.

    ``moment_seconds`` is on the worker's own clock; two answers give rates. ``spare`` is the run
    for which a free worker waits; None if it waits for none.
    """

    said = by(Speaker.WATCHED, State.TELLING, then=State.CLOSED)
    moment_seconds: LongSeconds
    used_bytes: Bytes
    stage: StageStatus | None
    spare: SpareStatus | None = None
