"""Every message, as a typed value. To add a message is to add one class here.

In order: the opening of a conversation; the common messages of all conversations (signs of life,
pauses, failures, the end); a stage's layers and tensors; the tensors through the stages in a step;
gradients, optimizers and weights; fingerprints. Measurements, records and status are in
`measurements.py`, exchanges between processes with the same layers in `replicas.py`, and the
replacement of a lost worker in `snapshots.py`.

Each class, or its base, declares who may send it in its states (``said``), and its other rules; see
`Message`. Decoding checks every field against its type and bounds.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated, Literal

import msgspec

from ..plan import Dtype
from .bases import (
    IdleRequest,
    LoadingRequest,
    Repeated,
    ServingRequest,
    Speaker,
    StageReport,
    State,
    Waits,
    by,
    by_anyone,
    kinds_below,
)
from .bases import InstantMessage as InstantMessage
from .bases import Message as Message
from .bases import MicrobatchMessage as MicrobatchMessage
from .bases import StampedRequest as StampedRequest
from .fields import Count, LayerNumber, LongSeconds, Name, Numerics, Seconds, Text, Words
from .fields import Equipment as Equipment
from .fields import LinkStatus as LinkStatus
from .fields import Narrowed as Narrowed
from .fields import Repetition as Repetition
from .fields import Sample as Sample
from .fields import SpareStatus as SpareStatus
from .fields import StageRange as StageRange
from .fields import StageStatus as StageStatus
from .measurements import AskClock as AskClock
from .measurements import ClockTold as ClockTold
from .measurements import DescribeDevice as DescribeDevice
from .measurements import DeviceDescribed as DeviceDescribed
from .measurements import FetchRecord as FetchRecord
from .measurements import LayerMeasured as LayerMeasured
from .measurements import LinkMeasured as LinkMeasured
from .measurements import MeasureLink as MeasureLink
from .measurements import MeasureOptimizer as MeasureOptimizer
from .measurements import NotMeasured as NotMeasured
from .measurements import OptimizerMeasured as OptimizerMeasured
from .measurements import PrepareLayers as PrepareLayers
from .measurements import Probe as Probe
from .measurements import ProbeAnswer as ProbeAnswer
from .measurements import ReadingMeasured as ReadingMeasured
from .measurements import Record as Record
from .measurements import StageRecord as StageRecord
from .measurements import Status as Status
from .measurements import Timings as Timings
from .replicas import ReduceGradients as ReduceGradients
from .replicas import ReplicaContent as ReplicaContent
from .replicas import ReplicaTensors as ReplicaTensors
from .replicas import UpdateTensors as UpdateTensors
from .snapshots import AskRoom as AskRoom
from .snapshots import CaughtUp as CaughtUp
from .snapshots import ForgetSent as ForgetSent
from .snapshots import KeepSent as KeepSent
from .snapshots import NeighborReplaced as NeighborReplaced
from .snapshots import OpenSession as OpenSession
from .snapshots import ReplaceNeighbor as ReplaceNeighbor
from .snapshots import Replay as Replay
from .snapshots import RoomTold as RoomTold
from .snapshots import SentKept as SentKept
from .snapshots import SessionOpened as SessionOpened
from .snapshots import SnapshotBegun as SnapshotBegun
from .snapshots import SnapshotPart as SnapshotPart
from .snapshots import SnapshotTensor as SnapshotTensor
from .snapshots import TakeSnapshot as TakeSnapshot
from .snapshots import Wait as Wait
from .tensor_bytes import TensorSpec
from .values import ArithmeticBehind as ArithmeticBehind
from .values import CacheArgument as CacheArgument
from .values import LayerArguments as LayerArguments
from .values import ParameterSpec as ParameterSpec
from .values import PeerSpec as PeerSpec
from .values import Slot, Value
from .values import StageSpec as StageSpec

# Every frame carries it. It grows with every change of a message.
PROTOCOL_VERSION = 20

# How many characters of a peer's own words are shown.
_MOST_SHOWN = 100


class Hello(Message, Words, frozen=True, forbid_unknown_fields=False):
    """Opens a conversation.

    Every version reads the Hello, Welcome and Failure of every other version, so it can report a
    difference: new fields need a default, fields are never removed, and unknown fields are ignored.
    ``member`` is the number of a worker as it dials its neighbor; see `Deploy`. A joining worker
    says its ``name`` in plans, and the ``address`` at which it listens; its second process says the
    only ``session`` it takes. A worker asks by the name of its ``run`` for the run at the door
    while its coordinator is away, and does not come in. A coordinator says the name of its run as
    ``session`` when it watches a spare.

    A coordinator says the name of its ``process``, and the name of a process that has ``ended``, so
    a worker stops waiting for that process.

    Both ends shall keep a broken conversation for ``linger_seconds``. With the ``secret`` of its
    Welcome the conversation goes on: ``attempt`` counts the tries, and the sender has ``received``
    so many frames after the Welcome.
    """

    said = (
        by(Speaker.COORDINATOR, State.OPENING, then=State.GREETING)
        | by(Speaker.UPSTREAM, State.OPENING, then=State.GREETING)
        | by(Speaker.WATCHER, State.OPENING, then=State.GREETING)
        | by(Speaker.JOINER, State.OPENING, then=State.GREETING)
    )
    protocol: int
    role: Name = ""
    session: Name = ""
    equipment: Equipment = msgspec.field(default_factory=Equipment)
    member: Count = 0
    linger_seconds: Seconds = 0.0
    secret: Name = ""
    attempt: Count = 0
    received: Count = 0
    name: Name = ""
    address: Name = ""
    run: Name = ""
    process: Name = ""
    ended: Name = ""


class Welcome(Message, Words, frozen=True, forbid_unknown_fields=False):
    """The worker accepts the conversation. ``utc_seconds`` is the time on its clock.

    A coordinator says it to a joining worker, with the name of its ``run``, and again with each
    ``note`` on how long to wait. ``is_spare`` means: the run has begun without the worker.

    Both ends keep a broken conversation for ``linger_seconds``; the peer can go on with it by the
    ``secret``. The sender has ``received`` so many frames after the Hello.
    """

    said = (
        by(Speaker.WORKER, State.GREETING, then=State.IDLE)
        | by(Speaker.DOWNSTREAM, State.GREETING, then=State.LINKED)
        | by(Speaker.WATCHED, State.GREETING, then=State.TELLING)
        | by(Speaker.DOOR, State.GREETING, State.WAITING, then=State.WAITING)
    )
    protocol: int
    equipment: Equipment = msgspec.field(default_factory=Equipment)
    utc_seconds: LongSeconds = 0.0
    linger_seconds: Seconds = 0.0
    secret: Name = ""
    received: Count = 0
    note: Name = ""
    is_spare: bool = False
    run: Name = ""


class Ping(InstantMessage, frozen=True):
    """Asks for a sign of life."""


class Pong(InstantMessage, Words, frozen=True):
    """A sign of life. ``doing`` is the sender's present or latest work; ``received`` is the number
    of arrived frames, or 0 if the peer does not need it."""

    doing: Name = ""
    received: Count = 0

    @property
    def reported_activity(self) -> str:
        """The peer's own words, cut to keep logs short."""
        return self.doing[:_MOST_SHOWN]


class Goodbye(Message, frozen=True):
    """Ends a conversation in good order."""

    repeated = Repeated.NEVER
    is_held = False
    said = by_anyone(then=State.CLOSED)


class Failure(Message, Words, frozen=True, forbid_unknown_fields=False):
    """Something went wrong on the sender's side, or the receiver broke a rule.

    It ends the conversation, except while a stage is loaded or served. With ``is_replaced`` the
    answering process ends with its session, and another process takes its place: dial again. A
    worker that is busy because it waits for a coordinator says the name of the coordinator's
    process as ``away``. Without a ``request`` it concerns the step or the conversation.
    """

    repeated = Repeated.NEVER
    is_held = False
    said = by_anyone(then=State.CLOSED) | by_anyone(State.LOADING, State.SERVING)
    reason: Text
    traceback: Text = ""
    in_optimizer_step: bool = False
    is_replaced: bool = False
    away: Name = ""


class NeighborReport(StageReport, frozen=True):
    """Base of a worker's reports on its channel to another worker."""

    member: Count


class NeighborLost(NeighborReport, Words, frozen=True):
    """The worker's channel to another worker ended."""

    reason: Text


class NeighborAway(NeighborReport, Words, frozen=True):
    """The worker's connection to another worker broke, and may come back."""

    reason: Text


class NeighborBack(NeighborReport, frozen=True):
    """The worker's connection to another worker came back."""


class NeighborUnreachable(StageReport, Words, frozen=True):
    """The worker cannot reach another worker; the coordinator has to forward between the two."""

    member: Count
    reason: Text


class Paused(Message, frozen=True):
    """The worker's owner wants the device: the worker does not compute until `Resumed`."""

    is_held = False
    said = by(Speaker.WORKER, State.IDLE, State.LOADING, State.SERVING)


class Resumed(Message, frozen=True):
    """The worker continues where it was paused."""

    is_held = False
    said = by(Speaker.WORKER, State.IDLE, State.LOADING, State.SERVING)


class Leaving(Message, frozen=True):
    """The worker's owner wants it to end. It serves on until the coordinator says goodbye."""

    waits = Waits.FOR_NOTHING
    is_held = False
    said = by(Speaker.WORKER, State.IDLE, State.LOADING, State.SERVING)


class Done(Message, frozen=True):
    """The worker has carried out a request."""

    said = by(Speaker.WORKER, State.IDLE, State.LOADING, State.SERVING)


class Deploy(Message, frozen=True):
    """Build the layers of stages in place of the present ones; their tensors follow.

    Workers are numbered from 1 on. A second `Deploy` keeps the channels to other workers. The
    worker keeps the tensors for `SendTensor` until `Launch`.

    Args:
        member: The number of the receiving worker.
        stages: All stages of the worker, in the order of their layers; empty for an idle worker.
        peers: The receivers of its activations or tensors.
        seed: Start of all dropout masks.
        kept: The worker's present tensors that stay, with their optimizer state.
        receivers: The workers in later `SendTensor` messages.
    """

    repeated = Repeated.UNTIL_SNAPSHOT
    said = by(Speaker.COORDINATOR, State.IDLE, State.SERVING, then=State.LOADING)
    answers = ("Built",)
    requests = "building its layers"
    member: Count
    stages: list[StageSpec]
    peers: list[PeerSpec]
    seed: int
    kept: list[Name] = []
    receivers: list[Count] = []


class Built(Message, frozen=True):
    """The layers of a `Deploy` are built."""

    said = by(Speaker.WORKER, State.LOADING)


class LoadTensor(LoadingRequest, frozen=True):
    """The content of one parameter or buffer.

    For a tensor in 4 bits the frame's other tensors are its ``state``; without state the worker
    quantizes the content itself. With a ``row`` the frame has some rows of a large parameter from
    this one on, and the rows of a parameter come in their order.
    """

    repeated = Repeated.UNTIL_SNAPSHOT
    waits = Waits.BESIDE_SUMS
    answers = ("Done",)
    is_kept = True
    requests = "loading its weights"
    name: Name
    state: list[Name] = []
    row: Count | None = None


class SendTensor(Message, frozen=True):
    """Send a tensor of a former layer to another worker, as a `MovedTensor`.

    The other worker answers. Tensors sent before that have ``arrived`` are freed.
    """

    repeated = Repeated.UNTIL_SNAPSHOT
    said = by(Speaker.COORDINATOR, State.LOADING)
    answers = ("Done",)
    requests = "sending weights to another worker"
    name: Name
    member: Count
    arrived: list[Name] = []


class MovedTensor(Message, frozen=True):
    """A tensor from its former worker, with its state.

    Args:
        member: The number of the receiving worker.
        name: As in `LoadTensor`.
        content: The tensor.
        state: The parts of its state in 4 bits.
        optimizers: Its state in each optimizer, by the optimizer's number.
        average: Its running average; None without one.
    """

    repeated = Repeated.UNTIL_SNAPSHOT
    said = (
        by(Speaker.UPSTREAM, State.LINKED)
        | by(Speaker.WORKER, State.LOADING)
        | by(Speaker.COORDINATOR, State.LOADING)
    )
    is_kept = True
    requests = "loading weights of another worker"
    member: Count
    name: Name
    content: Value
    state: dict[Name, Value] = {}
    optimizers: dict[Count, Value] = {}
    average: Value = None


class Launch(Message, frozen=True):
    """All tensors are loaded: connect to the workers downstream and get ready for steps."""

    repeated = Repeated.UNTIL_SNAPSHOT
    answers = ("Done",)
    said = by(Speaker.COORDINATOR, State.LOADING, then=State.SERVING)
    requests = "connecting to its neighbors"


class BeginStep(StampedRequest, frozen=True):
    """A new step; without ``accumulate`` the worker drops the gradients of earlier steps. Left-over
    work of the step before is dropped. With ``forwards_first`` forwards run before backwards, as in
    a window of several batches."""

    repeated = Repeated.UNTIL_SNAPSHOT
    begins_step = True
    is_exact = False
    step: Count
    in_flight: Annotated[int, msgspec.Meta(ge=1)]
    accumulate: bool
    forwards_first: bool = False


class SetAttributes(StampedRequest, frozen=True):
    """Changes of plain attributes of a module inside a layer on the coordinator, as text, and the
    names of deleted attributes (``gone``)."""

    repeated = Repeated.ALWAYS
    is_exact = False
    layer_index: LayerNumber
    path: Name
    values: Text
    gone: list[Name] = []

    @property
    def sets(self) -> Hashable:
        names = msgspec.json.decode(self.values, type=dict[str, msgspec.Raw])
        return SetAttributes, self.layer_index, self.path, frozenset((*names, *self.gone))


class BuffersUpdated(StageReport, Words, frozen=True):
    """Buffers of a stage updated by every micro-batch of a step or, with ``is_again``, by a
    recomputed forward."""

    names: list[Name]
    is_again: bool


class Arguments(MicrobatchMessage, frozen=True):
    """The arguments of a stage's layers for one micro-batch, and the micro-batch's way.

    The hidden states come from the process ``upstream`` and go to the process ``downstream``; 0 is
    the coordinator. ``place`` counts the process's earlier forwards of the same visit in this
    stage. ``kept`` maps tensors of the frame to the slots in which the stage keeps them for later.
    A trial (``is_trial``) leaves the layers unchanged, and computes in evaluation mode unless it
    ``keeps_modes``, or ``keeps_own_modes`` of modules with code of the user's own. The stage
    computes with the settings ``numerics``, and makes tensors of ``default_dtype`` where layers do
    not name a dtype. ``passes`` names the other tensors that go downstream with the hidden states,
    and ``entering`` names the arriving hidden states. By ``dropout_step`` and ``first_microbatch``,
    the numbers of the batch, the layers draw random numbers.
    """

    repeated = Repeated.UNTIL_SNAPSHOT
    grad_enabled: bool
    autocast_dtype: str | None
    collect: list[Name]
    calls: list[LayerArguments]
    kept: dict[Count, Slot] = {}
    is_trial: bool = False
    keeps_modes: bool = False
    keeps_own_modes: bool = False
    upstream: Count = 0
    downstream: Count = 0
    place: Count = 0
    numerics: Numerics = Numerics()
    default_dtype: Name = "float32"
    passes: list[Name] = []
    entering: Name = ""
    dropout_step: Count = 0
    first_microbatch: Count = 0


class MeasureLayer(IdleRequest, frozen=True):
    """Measure one of the prepared layers with these arguments and made-up hidden states.

    ``recompute`` and ``dtype`` are as in `Deploy`; with ``converts_weights`` the weights are
    converted to ``dtype`` too. The measurement takes about ``patience_seconds``.
    """

    answers = ("LayerMeasured", "NotMeasured")
    requests = "measuring a layer"
    arguments: Arguments
    hidden: TensorSpec
    wants_gradient: bool
    recompute: bool
    dtype: Dtype | None
    converts_weights: bool
    patience_seconds: Seconds


class Activation(MicrobatchMessage, frozen=True):
    """Hidden states on their way downstream, the outputs collected so far by kind, and other
    tensors by name.

    ``requires_grad`` has one entry per tensor; ``narrowed`` describes the rounded tensors.
    """

    repeated = Repeated.UNTIL_SNAPSHOT
    waits = Waits.FOR_NOTHING
    is_between_workers = True
    said = (
        MicrobatchMessage.said
        | by(Speaker.WORKER, State.SERVING)
        | by(Speaker.UPSTREAM, State.LINKED)
    )
    reports = "the forward of micro-batch {message.microbatch} in step {message.step}"
    requires_grad: list[bool]
    collected: list[Name]
    narrowed: list[Narrowed | None] = []


class Gradient(MicrobatchMessage, frozen=True):
    """The gradients of an activation on their way upstream.

    ``is_present`` says for each tensor of the activation whether its gradient is in the frame. With
    ``keeps_graph`` another backward of the same activation may follow. ``places`` has a number for
    this stage and for each earlier stage: its process's earlier backwards in the stage.
    """

    repeated = Repeated.UNTIL_SNAPSHOT
    waits = Waits.FOR_NOTHING
    is_between_workers = True
    said = (
        MicrobatchMessage.said
        | by(Speaker.WORKER, State.SERVING)
        | by(Speaker.DOWNSTREAM, State.LINKED)
    )
    reports = "the backward of micro-batch {message.microbatch} in step {message.step}"
    is_present: list[bool]
    keeps_graph: bool = False
    narrowed: list[Narrowed | None] = []
    places: list[Count] = []


class DropCaches(ServingRequest, frozen=True):
    """Drop these key-value caches; the model has dropped them."""

    repeated = Repeated.UNTIL_SNAPSHOT
    numbers: list[Count]


class AbortStep(ServingRequest, frozen=True):
    """Drop the step: saved activations, gradients, pending actions, and all key-value caches.

    The exchanges of replicas up to ``round`` are over.
    """

    repeated = Repeated.UNTIL_SNAPSHOT
    waits = Waits.FOR_NOTHING
    step: Count
    round: Count = 0


class SetTrained(StampedRequest, frozen=True):
    """Freeze or unfreeze parameters from the next forward on."""

    repeated = Repeated.ALWAYS
    is_exact = False
    parameters: list[Name]
    requires_grad: bool

    @property
    def sets(self) -> Hashable:
        return SetTrained, tuple(self.parameters)


class ZeroGradients(StampedRequest, frozen=True):
    """Drop the gradients of parameters or, without ``set_to_none``, set them to zero; the worker
    answers `Done`. With ``only_dropped``, zeros are for parameters that had a gradient as the step
    began, and have lost it."""

    repeated = Repeated.UNTIL_SNAPSHOT
    answers = ("Done",)
    parameters: list[Name]
    set_to_none: bool
    only_dropped: bool = False


class MeasureNorms(StampedRequest, frozen=True):
    """Asks for gradient norms of the parameters of one optimizer, or of all parameters."""

    repeated = Repeated.UNTIL_ANSWERED
    answers = ("Norms",)
    requests = "measuring its gradient norms"
    recorded_as = "optimizer"
    step: Count
    optimizer: Count | None


class Norms(Message, frozen=True):
    """The norm of every gradient, by its parameter."""

    said = by(Speaker.WORKER, State.SERVING)
    norms: dict[Name, float]


class ClipGradients(StampedRequest, frozen=True):
    """Scale gradients by a factor or clamp them to a value, for one optimizer's parameters or for
    all."""

    repeated = Repeated.UNTIL_SNAPSHOT
    recorded_as = "optimizer"
    step: Count
    optimizer: Count | None
    factor: float | None
    value: float | None


class GroupSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One parameter group of an optimizer; ``options`` is all but the parameters."""

    parameters: list[Name]
    options: Value


class BuildOptimizer(ServingRequest, frozen=True):
    """Build the stage's part of an optimizer; later messages call it by its number.

    ``class_name`` is a class of torch.optim or, with the prefix ``bitsandbytes.``, of bitsandbytes.
    """

    repeated = Repeated.ALWAYS
    answers = ("Done",)
    requests = "building an optimizer"
    optimizer: Count
    class_name: Name
    defaults: Value
    groups: list[GroupSpec]


class LoadOptimizerState(ServingRequest, frozen=True):
    """The optimizer's state of one parameter, for the worker to load."""

    repeated = Repeated.UNTIL_SNAPSHOT
    is_kept = True
    requests = "loading an optimizer's state"
    optimizer: Count
    parameter: Name
    state: Value


class ApplyOptimizer(StampedRequest, frozen=True):
    """Step an optimizer with these group options.

    If only the owners of replicas step, the replicas then exchange weights in the exchange
    ``round``.
    """

    repeated = Repeated.UNTIL_SNAPSHOT
    requests = "the optimizer's part of step {message.step}"
    recorded_as = "optimizer"
    step: Count
    optimizer: Count
    options: list[Value]
    round: Count = 0


class FetchOptimizerState(LoadingRequest, frozen=True):
    """Asks for an optimizer's state of some parameters; parameters without state are left out."""

    repeated = Repeated.UNTIL_ANSWERED
    waits = Waits.BESIDE_SUMS
    answers = ("OptimizerState", "Done")
    requests = "sending its optimizer's state"
    optimizer: Count
    parameters: list[Name]


class OptimizerState(StageReport, frozen=True):
    """The optimizer's state of one parameter, as the worker has it."""

    is_piece = True
    is_kept = True
    parameter: Name
    state: Value


class AverageWeights(StampedRequest, frozen=True):
    """Begin a running average of the stage's weights, go on with it after layers have moved, update
    it with the present weights, swap the two, or adopt the average as the weights.

    To go on, a tensor without an average begins with its present content. Without ``decay`` every
    update weighs the same; ``num_averaged`` counts the updates so far.
    """

    repeated = Repeated.ALWAYS
    action: Literal["begin", "go on", "update", "swap", "adopt"]
    num_averaged: Count
    decay: float | None


class FetchTensors(LoadingRequest, frozen=True):
    """Asks for the content of parameters and buffers."""

    repeated = Repeated.UNTIL_ANSWERED
    waits = Waits.BESIDE_SUMS
    answers = ("TensorContent", "Done")
    requests = "sending its weights"
    names: list[Name]


class FetchGradients(ServingRequest, frozen=True):
    """Asks for the gradients of parameters, each as a `TensorContent`; parameters without a
    gradient are left out."""

    repeated = Repeated.UNTIL_ANSWERED
    answers = ("TensorContent", "Done")
    names: list[Name]


class TensorContent(StageReport, frozen=True):
    """One requested tensor, with its ``state`` as in `LoadTensor`."""

    is_piece = True
    is_kept = True
    name: Name
    state: list[Name] = []


class FetchFingerprints(ServingRequest, frozen=True):
    """Asks for the fingerprints of tensors that the coordinator also has."""

    repeated = Repeated.UNTIL_ANSWERED
    waits = Waits.BESIDE_SUMS
    answers = ("Fingerprints",)
    requests = "comparing its weights"
    step: Count
    names: list[Name]


class Fingerprints(Message, frozen=True):
    """The fingerprints of the requested tensors, in their order."""

    said = by(Speaker.WORKER, State.SERVING)
    found: list[Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]]


# All classes of messages, as a decoder needs them.
KINDS = tuple(kinds_below(Message))
_KIND_OF = {kind.__name__: kind for kind in KINDS}
# The classes that answer a request; every declared name must be known.
ANSWERS = frozenset(_KIND_OF[name] for kind in KINDS for name in kind.answers)
