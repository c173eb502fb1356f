"""The messages of measurements: devices, layers, optimizers and links before anything is deployed,
and clocks, records, timings and status while a stage serves."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated

import msgspec

from ..plan import Dtype, Weights
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
    """Asks for a description of the worker's device, perhaps with how it reads frozen weights."""

    answers = ("DeviceDescribed",)
    with_reading: bool = False


class ReadingMeasured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast frozen weights are read, and how many bytes of them have a place."""

    bytes_per_second: Annotated[float, msgspec.Meta(gt=0, le=1e18)]
    most_bytes: Count


class DeviceDescribed(IdleAnswer, Words, frozen=True):
    """The worker's device; workers with an equal ``memory`` share it."""

    device: Name
    memory: Name
    free_bytes: Count
    base_bytes: Count
    dtypes: list[Dtype]
    versions: dict[Name, Name]
    weights: dict[Weights, ReadingMeasured] = {}


class PrepareLayers(IdleRequest, frozen=True):
    """Build layers for measurements, with made-up values.

    The frame's tensors are the content of ``buffers``: their values matter. ``recipe`` and
    ``parameters`` are as in `Deploy`.
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
    """The bytes requested by a probe."""

    said = by(Speaker.WORKER, State.IDLE) | by(Speaker.DOWNSTREAM, State.LINKED)
    is_probe = True


class NotMeasured(IdleAnswer, Words, frozen=True):
    """Measuring raised an error, or (``is_unreachable``) the other worker cannot be reached."""

    reason: Text
    traceback: Text
    is_out_of_memory: bool
    is_unreachable: bool = False


class LayerMeasured(IdleAnswer, frozen=True):
    """Time and memory of one forward and one backward of the layer.

    Args:
        spread: How much longer the median of the repeated runs took than the fastest, as a share.
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
    """With each optimizer step: the seconds of all forwards and of all backwards in training since
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
    """The time on the clock of the sender's spans."""

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
    """A stage's record, and the health of its device.

    ``num_dropped`` spans did not fit. ``health`` holds the device's reports, by names with their
    units at the end.
    """

    totals: Totals
    spans: Annotated[list[Span], msgspec.Meta(max_length=2**16)]
    num_dropped: Count
    health: Annotated[dict[Name, Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]], FEW]


class Status(Message, frozen=True):
    """A worker's work, for a watcher; ``stage`` is None while the worker is free.

    ``moment_seconds`` is on the worker's own clock; two answers give rates. ``spare`` is the run
    for which a free worker waits; None if it does not wait.
    """

    said = by(Speaker.WATCHED, State.TELLING, then=State.CLOSED)
    moment_seconds: LongSeconds
    used_bytes: Bytes
    stage: StageStatus | None
    spare: SpareStatus | None = None
