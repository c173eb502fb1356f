"""Every message, as a typed value. Decoding checks each field against these classes."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from ..plan import Dtype, WireDtype
from .constants import NUM_SLOTS
from .records import Moment, Span, Totals
from .tensors import TensorSpec
from .values import Value

# Every frame carries it. It grows when a message changes that conversations need after Hello.
PROTOCOL_VERSION = 1

Slot = Annotated[int, msgspec.Meta(ge=0, le=NUM_SLOTS - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Name = Annotated[str, msgspec.Meta(max_length=1024)]
Text = Annotated[str, msgspec.Meta(max_length=2**20)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
LongSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
ProbeBytes = Annotated[int, msgspec.Meta(ge=0, le=2**27)]
_Few = msgspec.Meta(max_length=64)


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages; the tag on the wire is the class's name.

    ``is_kept`` says that the receiver keeps the tensors for long, as weights are, so that they
    come in memory of their own instead of a buffer that is used again.
    """

    is_kept: ClassVar[bool] = False

    def __str__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        fields = " ".join(f"{name}={str(value)[:60]}" for name, value in shown.items())
        return f"{type(self).__name__} {fields}".rstrip()


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

    versions: Annotated[dict[Name, Name], _Few] = {}
    device: Name = ""
    device_name: Name = ""
    memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0
    dtypes: Annotated[list[Name], _Few] = []
    capabilities: Annotated[list[Name], _Few] = []


class Hello(_Message, frozen=True, tag=True, forbid_unknown_fields=False):
    """Opens a conversation.

    Every version reads the Hello, Welcome and Failure of every other, to say what is wrong: fields
    are only ever added to them, with a default, and those that are not known are passed over.
    """

    protocol: int
    role: Name = ""
    session: Name = ""
    equipment: Equipment = msgspec.field(default_factory=Equipment)


class Welcome(_Message, frozen=True, tag=True, forbid_unknown_fields=False):
    """The worker takes the conversation. ``utc_seconds`` is what its clock says."""

    protocol: int
    equipment: Equipment = msgspec.field(default_factory=Equipment)
    utc_seconds: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 0.0


class Ping(_Message, frozen=True, tag=True):
    """Asks for a sign of life."""


class Pong(_Message, frozen=True, tag=True):
    """A sign of life, and what the sender does or did last, for people."""

    doing: Name = ""


class Goodbye(_Message, frozen=True, tag=True):
    """Ends a conversation in good order."""


class Failure(_Message, frozen=True, tag=True, forbid_unknown_fields=False):
    """Something went wrong on the sender's side, or the receiver broke a rule."""

    reason: Text
    traceback: Text = ""
    in_optimizer_step: bool = False


class NeighborLost(_Message, frozen=True, tag=True):
    """A stage's channel to another stage ended."""

    stage_index: Count
    reason: Text


class Paused(_Message, frozen=True, tag=True):
    """The worker's owner wants its device: nothing is computed until `Resumed`."""


class Resumed(_Message, frozen=True, tag=True):
    """The worker goes on where it was paused."""


class Done(_Message, frozen=True, tag=True):
    """The last request is carried out."""


class ParameterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One parameter or buffer of a stage, ``<layer index>.<name inside the layer>``."""

    name: Name
    tensor: TensorSpec
    requires_grad: bool


class Deploy(_Message, frozen=True, tag=True):
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


class Built(_Message, frozen=True, tag=True):
    """The layers of a `Deploy` are built. Of the ``held`` tensors the worker still has some content
    from before, which may be the one that it is to get: they are worth an `OfferTensor`."""

    held: list[Name] = []


class Narrowed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that was rounded for its way: what it is to become again, and how many of the
    frame's tensors it is in."""

    dtype: Literal["float64", "float32", "bfloat16", "float16"]
    num_parts: Literal[1, 2]


class LoadTensor(_Message, frozen=True, tag=True):
    """One parameter's or buffer's content; the tensors after it are its ``state``, if it is stored
    in 4 bits.

    What is to be stored in 4 bits and comes without state is packed by the worker. The worker says
    `Loaded` when it has the tensor in its place: a coordinator that waits for it does not flood it.
    """

    is_kept = True

    name: Name
    state: list[Name] = []


class Loaded(_Message, frozen=True, tag=True):
    """A tensor is in its place."""

    name: Name


class OfferTensor(_Message, frozen=True, tag=True):
    """Take the content that you hold for this tensor, if its fingerprint is this one."""

    name: Name
    fingerprint: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class OfferAnswered(_Message, frozen=True, tag=True):
    """Whether the tensor is in its place now; if not, its content has to be sent."""

    name: Name
    is_taken: bool


class Launch(_Message, frozen=True, tag=True):
    """All tensors are there: connect to the downstream neighbor and get ready for steps."""


class GroupSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One parameter group of an optimizer; ``options`` is everything but the parameters."""

    parameters: list[Name]
    options: Value


class BuildOptimizer(_Message, frozen=True, tag=True):
    """Build the stage's part of an optimizer; ``class_name`` is one of torch.optim or, with
    ``bitsandbytes.`` before it, of that library's. Optimizers are known by their numbers."""

    optimizer: Count
    class_name: Name
    defaults: Value
    groups: list[GroupSpec]


class LoadOptimizerState(_Message, frozen=True, tag=True):
    """An optimizer's state of one parameter."""

    is_kept = True

    optimizer: Count
    parameter: Name
    state: Value


class BeginStep(_Message, frozen=True, tag=True):
    """A new step; without ``accumulate`` the gradients of the steps before are dropped."""

    step: Count
    in_flight: Annotated[int, msgspec.Meta(ge=1)]
    accumulate: bool


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
    length of the tuple that it takes the layer to return; 0 stands for a tensor."""

    layer_index: Count
    training: bool
    args: Value
    kwargs: Value
    tuple_length: Count
    cache: CacheArgument | None = None


class Arguments(_Message, frozen=True, tag=True):
    """What a stage's layers are called with for one micro-batch. ``kept`` says which of the
    frame's tensors the stage keeps for later ones, and in which slot."""

    step: Count
    microbatch: Count
    visit: Count
    grad_enabled: bool
    autocast_dtype: str | None
    collect: list[Name]
    calls: list[LayerArguments]
    kept: dict[Count, Slot] = {}


class Activation(_Message, frozen=True, tag=True):
    """Hidden states on their way downstream, and the outputs of each kind that are collected so
    far; ``requires_grad`` is for each tensor, ``narrowed`` for those that were rounded."""

    step: Count
    microbatch: Count
    visit: Count
    requires_grad: list[bool]
    collected: list[Name]
    narrowed: list[Narrowed | None] = []


class Gradient(_Message, frozen=True, tag=True):
    """The gradients of an activation on their way upstream; ``is_present`` says for each of its
    tensors whether one is needed and comes. With ``keeps_graph`` others may follow them."""

    step: Count
    microbatch: Count
    visit: Count
    is_present: list[bool]
    keeps_graph: bool = False
    narrowed: list[Narrowed | None] = []


class DropCaches(_Message, frozen=True, tag=True):
    """Forget these key-value caches: nobody holds them any more."""

    numbers: list[Count]


class AbortStep(_Message, frozen=True, tag=True):
    """Forget the step: saved activations, gradients, pending actions, and all key-value caches."""

    step: Count


class SetTrained(_Message, frozen=True, tag=True):
    """From the next forward on, parameters are frozen, or are so no longer."""

    parameters: list[Name]
    requires_grad: bool


class ZeroGradients(_Message, frozen=True, tag=True):
    """Drop the gradients of parameters or, without ``set_to_none``, make them zero; then say
    `Done`."""

    parameters: list[Name]
    set_to_none: bool


class MeasureNorms(_Message, frozen=True, tag=True):
    """Asks for the norms of gradients: those that an optimizer would use, or all."""

    step: Count
    optimizer: Count | None


class Norms(_Message, frozen=True, tag=True):
    """The gradient norm of every parameter that has a gradient."""

    step: Count
    norms: dict[Name, float]


class ClipGradients(_Message, frozen=True, tag=True):
    """Multiply gradients by a factor or cut them at a value: those that an optimizer would use,
    or all."""

    step: Count
    optimizer: Count | None
    factor: float | None
    value: float | None


class ApplyOptimizer(_Message, frozen=True, tag=True):
    """Step an optimizer with these group options."""

    step: Count
    optimizer: Count
    options: list[Value]


class Timings(_Message, frozen=True, tag=True):
    """What the stage has computed for training since it last said so, told with each optimizer
    step: the seconds of all forwards, of all backwards, and the number of micro-batches."""

    step: Count
    forward_seconds: Seconds
    backward_seconds: Seconds
    num_microbatches: Count


class AskClock(_Message, frozen=True, tag=True):
    """Asks what the peer's clock shows; answered at once, also while it computes."""

    number: Count


class ClockTold(_Message, frozen=True, tag=True):
    """What the clock showed that the peer's spans are on."""

    number: Count
    moment_seconds: Moment


class Record(_Message, frozen=True, tag=True):
    """From the next step on, record what the stage does, or do so no longer; ``keeps_spans`` says
    whether single spans are wanted besides sums."""

    is_on: bool
    keeps_spans: bool


class FetchRecord(_Message, frozen=True, tag=True):
    """Asks for what was recorded; the spans are handed out once."""

    number: Count
    with_spans: bool


class StageRecord(_Message, frozen=True, tag=True):
    """What was recorded, and how the device is. ``num_dropped`` spans were too many to be kept; of
    ``health`` there is what can be read, by names that end in their units."""

    number: Count
    totals: Totals
    spans: Annotated[list[Span], msgspec.Meta(max_length=2**16)]
    num_dropped: Count
    health: Annotated[dict[Name, Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]], _Few]


class AverageWeights(_Message, frozen=True, tag=True):
    """What to do with the running average of the stage's weights: make one, bring it up to date
    with the present weights, exchange the two, or go on with it as the weights.

    Without ``decay`` every update counts the same; ``num_averaged`` is their number so far.
    """

    action: Literal["begin", "update", "swap", "adopt"]
    num_averaged: Count
    decay: float | None


class FetchTensors(_Message, frozen=True, tag=True):
    """Asks for the content of parameters and buffers."""

    names: list[Name]


class TensorContent(_Message, frozen=True, tag=True):
    """One tensor that was asked for, and its state as in `LoadTensor`."""

    is_kept = True

    name: Name
    state: list[Name] = []


class FetchGradients(_Message, frozen=True, tag=True):
    """Asks for the gradients of parameters, each as a `TensorContent`; one that has none is left
    out."""

    names: list[Name]


class FetchOptimizerState(_Message, frozen=True, tag=True):
    """Asks for an optimizer's state of every parameter of the stage."""

    optimizer: Count


class OptimizerState(_Message, frozen=True, tag=True):
    """The optimizer's state of one parameter."""

    is_kept = True

    parameter: Name
    state: Value


class DescribeDevice(_Message, frozen=True, tag=True):
    """Asks what the worker computes on."""


class DeviceDescribed(_Message, frozen=True, tag=True):
    """What the worker computes on; workers that name the same ``memory`` share it."""

    device: Name
    memory: Name
    free_bytes: Count
    base_bytes: Count
    dtypes: list[Dtype]
    versions: dict[Name, Name]


class PrepareLayers(_Message, frozen=True, tag=True):
    """Build layers to be measured, with values made up; the frame's tensors are those of the
    ``buffers``, whose values matter. ``recipe`` and ``parameters`` are as in `Deploy`."""

    is_kept = True

    recipe: Text
    parameters: list[ParameterSpec]
    buffers: list[Name]


class MeasureLayer(_Message, frozen=True, tag=True):
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


class LayerMeasured(_Message, frozen=True, tag=True):
    """What one forward and one backward of the layer took."""

    forward_seconds: Seconds
    backward_seconds: Seconds
    saved_bytes: Count
    peak_bytes: Count


class MeasureOptimizer(_Message, frozen=True, tag=True):
    """Measure the optimizer's step for one of the prepared layers; the class is as in
    `BuildOptimizer`."""

    layer_index: Count
    class_name: Name
    defaults: Value
    options: Value
    patience_seconds: Seconds


class OptimizerMeasured(_Message, frozen=True, tag=True):
    """What a step took, and the bytes of the layer's optimizer state."""

    step_seconds: Seconds
    state_bytes: Count


class MeasureLink(_Message, frozen=True, tag=True):
    """Measure the link to another worker of the session, in both directions."""

    address: Name
    patience_seconds: Seconds


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long it took until so many bytes were there and the answer was back."""

    num_bytes: Count
    seconds: Seconds


class LinkMeasured(_Message, frozen=True, tag=True):
    """What was sent there, and what came back from there."""

    there: list[Sample]
    back: list[Sample]


class Probe(_Message, frozen=True, tag=True):
    """Asks for an answer of so many bytes; may itself carry some."""

    answer_bytes: ProbeBytes


class ProbeAnswer(_Message, frozen=True, tag=True):
    """The bytes that a probe asked for."""


class NotMeasured(_Message, frozen=True, tag=True):
    """The layer, the optimizer or the link that was to be measured raised an error."""

    reason: Text
    traceback: Text
    is_out_of_memory: bool


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
    links: Annotated[list[LinkStatus], _Few]


class Status(_Message, frozen=True, tag=True):
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
