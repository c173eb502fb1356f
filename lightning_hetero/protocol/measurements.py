"""The messages of measurements, before anything is deployed: devices, layers, optimizers, links."""

from __future__ import annotations

from ..plan import Dtype
from .bases import IdleAnswer, IdleRequest
from .fields import (
    Count,
    Name,
    ProbeBytes,
    Sample,
    Seconds,
    Share,
    Text,
    Words,
)
from .session import Message, Speaker, State, by
from .values import ParameterSpec, Value


class DescribeDevice(IdleRequest, frozen=True):
    """Asks what the worker computes on."""


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

    is_kept = True
    recipe: Text
    parameters: list[ParameterSpec]
    buffers: list[Name]


class MeasureLink(IdleRequest, frozen=True):
    """Measure the link to another worker, in both directions; it is named as in `Deploy`."""

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
