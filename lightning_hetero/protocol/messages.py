"""What all messages are made of: their base, and the bounds of their fields.

The opening of a conversation: who speaks, in which version, on what.

What any conversation has: signs of life, pauses, failures and its end.

The measuring of a device, of layers and of links, before anything is deployed.

The giving of layers to a stage: their description, their tensors, the start.

What goes through the stages in a step.

A stage's weights, gradients and optimizers between its forwards and backwards.

What tells how a run goes: clocks, records of steps, and a worker's status.

Every message, as a typed value. Decoding checks each field against these classes.

base.py        what all are made of: the base class, and the bounds of fields
greeting.py    the opening of a conversation
conversing.py  what any conversation has: signs of life, pauses, failures, its end
measuring.py   devices, layers and links, before anything is deployed
layers.py      the giving of layers to a stage
steps.py       what goes through the stages in a step
weights.py     a stage's weights, gradients and optimizers
observing.py   clocks, records of steps, and a worker's status

What a stage says of the time it took: single spans, and sums over many steps.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from ..plan import Dtype, WireDtype
from .tensors import TensorSpec
from .values import NUM_SLOTS, Value

Slot = Annotated[int, msgspec.Meta(ge=0, le=NUM_SLOTS - 1)]
# The input embedding is layer -1.
LayerNumber = Annotated[int, msgspec.Meta(ge=-1, le=2**40)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Name = Annotated[str, msgspec.Meta(max_length=1024)]
Text = Annotated[str, msgspec.Meta(max_length=2**20)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
LongSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
ProbeBytes = Annotated[int, msgspec.Meta(ge=0, le=2**27)]
# Bounds the entries of what has few.
FEW = msgspec.Meta(max_length=64)


class BaseMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages; the tag on the wire is the class's name.

    ``is_kept`` says that the receiver keeps the tensors for long, as weights are, so that they
    come in memory of their own instead of a buffer that is used again. ``is_probe`` says that they
    are large and nothing like what comes later, so that their buffers are not kept.
    """

    is_kept: ClassVar[bool] = False
    is_probe: ClassVar[bool] = False

    def __str__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        fields = " ".join(f"{name}={str(value)[:60]}" for name, value in shown.items())
        return f"{type(self).__name__} {fields}".rstrip()


# Every frame carries it. It grows when a message changes that conversations need after Hello.
PROTOCOL_VERSION = 2


class Equipment(msgspec.Struct, frozen=True):
    """What one end of a conversation runs on.

    Args:
        versions: Those of Python, of this package and of the libraries that layers are made of; a
            library that is not installed is left out.
        device: The device as torch calls it.
        device_name: What the device is sold as.
        memory_bytes: All of the device's memory; 0 if it does not say.
        dtypes: Floating-point types that the device computes in.
        capabilities: What not every worker can do, such as ``nf4`` or ``flash_attention_2``.
    """

    versions: Annotated[dict[Name, Name], FEW] = {}
    device: Name = ""
    device_name: Name = ""
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0
    dtypes: Annotated[list[Name], FEW] = []
    capabilities: Annotated[list[Name], FEW] = []


class Hello(BaseMessage, frozen=True, tag=True, forbid_unknown_fields=False):
    """Opens a conversation.

    Every version reads the Hello, Welcome and Failure of every other, to say what is wrong: fields
    are only ever added to them, with a default, and those that are not known are passed over.
    """

    protocol: int
    role: Name = ""
    session: Name = ""
    equipment: Equipment = msgspec.field(default_factory=Equipment)


class Welcome(BaseMessage, frozen=True, tag=True, forbid_unknown_fields=False):
    """The worker takes the conversation. ``utc_seconds`` is what its clock says."""

    protocol: int
    equipment: Equipment = msgspec.field(default_factory=Equipment)
    utc_seconds: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 0.0


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


class ParameterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One parameter or buffer of a stage, ``<layer index>.<name inside the layer>``."""

    name: Name
    tensor: TensorSpec
    requires_grad: bool


class Deploy(BaseMessage, frozen=True, tag=True):
    """Build a stage's layers, in the place of those that it has; their tensors follow. The
    neighbors stay who they are. ``recipe`` is JSON for the model folder,
    ``dtype`` what the stage computes in, if not in what it is given, and the two others what it
    rounds the activations and gradients to that it sends. With ``compile`` layers are compiled."""

    stage_index: Count
    recipe: Text
    parameters: list[ParameterSpec]
    recompute: bool
    seed: int
    downstream_address: Name
    dtype: Dtype | None = None
    activation_dtype: WireDtype | None = None
    gradient_dtype: WireDtype | None = None
    compile: bool = False


class Built(BaseMessage, frozen=True, tag=True):
    """The layers of a `Deploy` are built. Of the ``held`` tensors the worker still has some content
    from before, which may be the one that it is to get: they are worth an `OfferTensor`."""

    held: list[Name] = []


class LoadTensor(BaseMessage, frozen=True, tag=True):
    """One parameter's or buffer's content; the tensors after it are its ``state``, if it is stored
    in 4 bits.

    What is to be stored in 4 bits and comes without state is packed by the worker. The worker says
    `Loaded` when it has the tensor in its place: a coordinator that waits for it does not flood it.
    """

    is_kept = True

    name: Name
    state: list[Name] = []


class Loaded(BaseMessage, frozen=True, tag=True):
    """A tensor is in its place."""

    name: Name


class OfferTensor(BaseMessage, frozen=True, tag=True):
    """Take the content that you hold for this tensor, if its fingerprint is this one."""

    name: Name
    fingerprint: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class OfferAnswered(BaseMessage, frozen=True, tag=True):
    """Whether the tensor is in its place now; if not, its content has to be sent."""

    name: Name
    is_taken: bool


class Launch(BaseMessage, frozen=True, tag=True):
    """All tensors are there: connect to the downstream neighbor and get ready for steps."""


class Narrowed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that was rounded for its way: what it is to become again, and how many of the
    frame's tensors it is in."""

    dtype: Literal["float64", "float32", "bfloat16", "float16"]
    num_parts: Literal[1, 2]


class BeginStep(BaseMessage, frozen=True, tag=True):
    """A new step; without ``accumulate`` the gradients of the steps before are dropped. Dropout
    masks are drawn for ``dropout_step``, which no trial counts in."""

    step: Count
    in_flight: Annotated[int, msgspec.Meta(ge=1)]
    accumulate: bool
    dropout_step: Count = 0


class SetAttributes(BaseMessage, frozen=True, tag=True):
    """Plain attributes of a module of a layer that have changed on the coordinator, as text, and
    the names of those that are gone there."""

    layer_index: LayerNumber
    path: Name
    values: Text
    gone: list[Name] = []


class BuffersUpdated(BaseMessage, frozen=True, tag=True):
    """These buffers of a stage were updated by each micro-batch of a step or, with ``is_again``, by
    a forward that ran again."""

    names: list[Name]
    is_again: bool


class CacheArgument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The key-value cache that a layer is called with: its number, the argument's position or name,
    the positions and the window that the coordinator counts for the layer, and the tensor of the
    samples that are wanted of it, if not all."""

    number: Count
    place: Count | Name
    length: Count
    window: Count | None
    rows: Value


class LayerArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the model called one layer, its hidden states and its key-value cache left out, and the
    length of the tuple that it takes the layer to return; 0 stands for a tensor. ``other_mode``
    names the modules inside the layer whose mode is not ``training``."""

    layer_index: LayerNumber
    training: bool
    args: Value
    kwargs: Value
    tuple_length: Count
    cache: CacheArgument | None = None
    other_mode: list[Name] = []


class Arguments(BaseMessage, frozen=True, tag=True):
    """What a stage's layers are called with for one micro-batch. ``kept`` says which of the
    frame's tensors the stage keeps for later ones, and in which slot. A trial leaves nothing
    behind in the layers."""

    step: Count
    microbatch: Count
    visit: Count
    grad_enabled: bool
    autocast_dtype: str | None
    collect: list[Name]
    calls: list[LayerArguments]
    kept: dict[Count, Slot] = {}
    is_trial: bool = False


class Activation(BaseMessage, frozen=True, tag=True):
    """Hidden states on their way downstream, and the outputs of each kind that are collected so
    far; ``requires_grad`` is for each tensor, ``narrowed`` for those that were rounded."""

    step: Count
    microbatch: Count
    visit: Count
    requires_grad: list[bool]
    collected: list[Name]
    narrowed: list[Narrowed | None] = []


class Gradient(BaseMessage, frozen=True, tag=True):
    """The gradients of an activation on their way upstream; ``is_present`` says for each of its
    tensors whether one is needed and comes. With ``keeps_graph`` others may follow them."""

    step: Count
    microbatch: Count
    visit: Count
    is_present: list[bool]
    keeps_graph: bool = False
    narrowed: list[Narrowed | None] = []


class DropCaches(BaseMessage, frozen=True, tag=True):
    """Forget these key-value caches: nobody holds them any more."""

    numbers: list[Count]


class AbortStep(BaseMessage, frozen=True, tag=True):
    """Forget the step: saved activations, gradients, pending actions, and all key-value caches."""

    step: Count


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


class SetTrained(BaseMessage, frozen=True, tag=True):
    """From the next forward on, parameters are frozen, or are so no longer."""

    parameters: list[Name]
    requires_grad: bool


class ZeroGradients(BaseMessage, frozen=True, tag=True):
    """Drop the gradients of parameters or, without ``set_to_none``, make them zero; then say
    `Done`."""

    parameters: list[Name]
    set_to_none: bool


class MeasureNorms(BaseMessage, frozen=True, tag=True):
    """Asks for the norms of gradients: those that an optimizer would use, or all."""

    step: Count
    optimizer: Count | None


class Norms(BaseMessage, frozen=True, tag=True):
    """The gradient norm of every parameter that has a gradient."""

    step: Count
    norms: dict[Name, float]


class ClipGradients(BaseMessage, frozen=True, tag=True):
    """Multiply gradients by a factor or cut them at a value: those that an optimizer would use,
    or all."""

    step: Count
    optimizer: Count | None
    factor: float | None
    value: float | None


class GroupSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One parameter group of an optimizer; ``options`` is everything but the parameters."""

    parameters: list[Name]
    options: Value


class BuildOptimizer(BaseMessage, frozen=True, tag=True):
    """Build the stage's part of an optimizer; ``class_name`` is one of torch.optim or, with
    ``bitsandbytes.`` before it, of that library's. Optimizers are known by their numbers."""

    optimizer: Count
    class_name: Name
    defaults: Value
    groups: list[GroupSpec]


class LoadOptimizerState(BaseMessage, frozen=True, tag=True):
    """An optimizer's state of one parameter."""

    is_kept = True

    optimizer: Count
    parameter: Name
    state: Value


class ApplyOptimizer(BaseMessage, frozen=True, tag=True):
    """Step an optimizer with these group options."""

    step: Count
    optimizer: Count
    options: list[Value]


class Timings(BaseMessage, frozen=True, tag=True):
    """What the stage has computed for training since it last said so, told with each optimizer
    step: the seconds of all forwards, of all backwards, and the number of micro-batches."""

    step: Count
    forward_seconds: Seconds
    backward_seconds: Seconds
    num_microbatches: Count


class FetchOptimizerState(BaseMessage, frozen=True, tag=True):
    """Asks for an optimizer's state of every parameter of the stage."""

    optimizer: Count


class OptimizerState(BaseMessage, frozen=True, tag=True):
    """The optimizer's state of one parameter."""

    is_kept = True

    parameter: Name
    state: Value


class AverageWeights(BaseMessage, frozen=True, tag=True):
    """What to do with the running average of the stage's weights: make one, bring it up to date
    with the present weights, exchange the two, or go on with it as the weights.

    Without ``decay`` every update counts the same; ``num_averaged`` is their number so far.
    """

    action: Literal["begin", "update", "swap", "adopt"]
    num_averaged: Count
    decay: float | None


class FetchTensors(BaseMessage, frozen=True, tag=True):
    """Asks for the content of parameters and buffers."""

    names: list[Name]


class TensorContent(BaseMessage, frozen=True, tag=True):
    """One tensor that was asked for, and its state as in `LoadTensor`."""

    is_kept = True

    name: Name
    state: list[Name] = []


class FetchGradients(BaseMessage, frozen=True, tag=True):
    """Asks for the gradients of parameters, each as a `TensorContent`; one that has none is left
    out."""

    names: list[Name]


# On the clock of the process that recorded it, whose zero is anywhere.
Moment = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**60)]
_Name = Annotated[str, msgspec.Meta(max_length=64)]

SpanKind = Literal["forward", "backward", "loss", "optimizer", "take", "pack", "wait", "send"]
ACTIONS: frozenset[SpanKind] = frozenset({"forward", "backward", "loss", "optimizer"})


class Span(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Something that a stage did, from one moment to another.

    Args:
        kind: An action (``loss`` is the head and the loss with its backward, ``optimizer`` all that
            belongs to its step); ``take`` and ``pack`` a message; ``wait`` for one; or ``send``,
            which goes on beside the others.
        microbatch: Of which micro-batch, if of one.
        visit: As in `Key`.
        message: What was taken, packed or sent.
        num_bytes: Of its tensors, or of all of it where it was sent.
        peer: The stage that it came from or went to.
        arrived_seconds: When what was taken had come.
    """

    kind: SpanKind
    start_seconds: Moment
    end_seconds: Moment
    microbatch: _Number | None = None
    visit: _Number = 0
    message: _Name = ""
    num_bytes: _Number = 0
    peer: _Number | None = None
    arrived_seconds: Moment | None = None


class Totals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sums over all training steps that were recorded; they only grow.

    Args:
        step_seconds: From the beginning of each step to its end at this stage.
        seconds: By kind, without what was inside them: all kinds but ``send`` add up to the step.
        counts: How many spans of each kind there were.
        sending_seconds: How long something was being sent, on each link.
        num_steps: Steps of the optimizer.
        num_microbatches: Forwards, or on the coordinator micro-batches handed over.
        num_tokens: Positions of the hidden states; the coordinator counts them.
        num_ready: Actions that could have run, added up over the choices.
        num_choices: How often one was chosen.
    """

    step_seconds: _Amount = 0.0
    seconds: dict[SpanKind, _Amount] = {}
    counts: dict[SpanKind, _Number] = {}
    sending_seconds: _Amount = 0.0
    sent_bytes: _Number = 0
    received_bytes: _Number = 0
    num_steps: _Number = 0
    num_microbatches: _Number = 0
    num_tokens: _Number = 0
    num_ready: _Number = 0
    num_choices: _Number = 0


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


Message = (
    Hello
    | Welcome
    | Ping
    | Pong
    | Goodbye
    | Failure
    | NeighborLost
    | Paused
    | Resumed
    | Done
    | Deploy
    | Built
    | LoadTensor
    | Loaded
    | OfferTensor
    | OfferAnswered
    | Launch
    | BuildOptimizer
    | LoadOptimizerState
    | BeginStep
    | SetAttributes
    | BuffersUpdated
    | Arguments
    | Activation
    | Gradient
    | DropCaches
    | AbortStep
    | SetTrained
    | ZeroGradients
    | MeasureNorms
    | Norms
    | ClipGradients
    | ApplyOptimizer
    | Timings
    | AskClock
    | ClockTold
    | Record
    | FetchRecord
    | StageRecord
    | AverageWeights
    | FetchTensors
    | FetchGradients
    | TensorContent
    | FetchOptimizerState
    | OptimizerState
    | DescribeDevice
    | DeviceDescribed
    | PrepareLayers
    | MeasureLayer
    | LayerMeasured
    | MeasureOptimizer
    | OptimizerMeasured
    | MeasureLink
    | LinkMeasured
    | Probe
    | ProbeAnswer
    | NotMeasured
    | Status
)

__all__ = [
    "AbortStep",
    "Activation",
    "ApplyOptimizer",
    "Arguments",
    "AskClock",
    "AverageWeights",
    "BeginStep",
    "BuffersUpdated",
    "BuildOptimizer",
    "Built",
    "CacheArgument",
    "ClipGradients",
    "ClockTold",
    "Deploy",
    "DescribeDevice",
    "DeviceDescribed",
    "Done",
    "DropCaches",
    "Equipment",
    "Failure",
    "FetchGradients",
    "FetchOptimizerState",
    "FetchRecord",
    "FetchTensors",
    "Goodbye",
    "Gradient",
    "GroupSpec",
    "Hello",
    "Launch",
    "LayerArguments",
    "LayerMeasured",
    "LinkMeasured",
    "LinkStatus",
    "LoadOptimizerState",
    "LoadTensor",
    "Loaded",
    "MeasureLayer",
    "MeasureLink",
    "MeasureNorms",
    "MeasureOptimizer",
    "Message",
    "Narrowed",
    "NeighborLost",
    "Norms",
    "NotMeasured",
    "OfferAnswered",
    "OfferTensor",
    "OptimizerMeasured",
    "OptimizerState",
    "PROTOCOL_VERSION",
    "ParameterSpec",
    "Paused",
    "Ping",
    "Pong",
    "PrepareLayers",
    "Probe",
    "ProbeAnswer",
    "Record",
    "Resumed",
    "Sample",
    "SetAttributes",
    "SetTrained",
    "StageRecord",
    "StageStatus",
    "Status",
    "TensorContent",
    "Timings",
    "Welcome",
    "ZeroGradients",
]
