"""The measuring of a device, of layers and of links, before anything is deployed."""

from __future__ import annotations

import msgspec

from ...plan import Dtype
from ..tensors import TensorSpec
from ..values import Value
from .base import BaseMessage, Count, Name, ProbeBytes, Seconds, Text
from .layers import ParameterSpec
from .steps import Arguments


class DescribeDevice(BaseMessage, frozen=True, tag=True):
    """Asks what the worker computes on."""


class DeviceDescribed(BaseMessage, frozen=True, tag=True):
    """What the worker computes on; workers that name the same ``memory`` share it."""

    device: Name
    memory: Name
    free_bytes: Count
    base_bytes: Count
    dtypes: list[Dtype]
    versions: dict[Name, Name]


class PrepareLayers(BaseMessage, frozen=True, tag=True):
    """Build layers to be measured, with values made up; the frame's tensors are those of the
    ``buffers``, whose values matter. ``recipe`` and ``parameters`` are as in `Deploy`."""

    is_kept = True

    recipe: Text
    parameters: list[ParameterSpec]
    buffers: list[Name]


class MeasureLayer(BaseMessage, frozen=True, tag=True):
    """Measure one of the prepared layers, for about ``patience_seconds``, with hidden states made
    up and with these arguments. ``dtype`` and ``recompute`` are as in `Deploy`; the weights are in
    that dtype too where ``converts_weights`` says so."""

    arguments: Arguments
    hidden: TensorSpec
    wants_gradient: bool
    recompute: bool
    dtype: Dtype | None
    converts_weights: bool
    patience_seconds: Seconds


class LayerMeasured(BaseMessage, frozen=True, tag=True):
    """What one forward and one backward of the layer took."""

    forward_seconds: Seconds
    backward_seconds: Seconds
    saved_bytes: Count
    peak_bytes: Count


class MeasureOptimizer(BaseMessage, frozen=True, tag=True):
    """Measure the optimizer's step for one of the prepared layers; the class is as in
    `BuildOptimizer`."""

    layer_index: Count
    class_name: Name
    defaults: Value
    options: Value
    patience_seconds: Seconds


class OptimizerMeasured(BaseMessage, frozen=True, tag=True):
    """What a step took, and the bytes of the layer's optimizer state."""

    step_seconds: Seconds
    state_bytes: Count


class MeasureLink(BaseMessage, frozen=True, tag=True):
    """Measure the link to another worker of the session, in both directions."""

    address: Name
    patience_seconds: Seconds


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long it took until so many bytes were there and the answer was back."""

    num_bytes: Count
    seconds: Seconds


class LinkMeasured(BaseMessage, frozen=True, tag=True):
    """What was sent there, and what came back from there."""

    there: list[Sample]
    back: list[Sample]


class Probe(BaseMessage, frozen=True, tag=True):
    """Asks for an answer of so many bytes; may itself carry some."""

    is_probe = True
    answer_bytes: ProbeBytes


class ProbeAnswer(BaseMessage, frozen=True, tag=True):
    """The bytes that a probe asked for."""

    is_probe = True


class NotMeasured(BaseMessage, frozen=True, tag=True):
    """The layer, the optimizer or the link that was to be measured raised an error."""

    reason: Text
    traceback: Text
    is_out_of_memory: bool
