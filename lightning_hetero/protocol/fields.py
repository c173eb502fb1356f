"""The types of messages' fields: bounds of numbers and texts, and values without tensors.

Text from another machine is shown on terminals and in logs. Only `Words` makes it harmless.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import msgspec

# The input embedding is layer -1.
LayerNumber = Annotated[int, msgspec.Meta(ge=-1, le=2**40)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Name = Annotated[str, msgspec.Meta(max_length=1024)]
Text = Annotated[str, msgspec.Meta(max_length=2**20)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
LongSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
# May be above 1.
Share = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
ProbeBytes = Annotated[int, msgspec.Meta(ge=0, le=2**27)]
# Bounds short lists and dictionaries.
FEW = msgspec.Meta(max_length=64)
# On the recording process's own clock, whose zero is arbitrary.
Moment = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**60)]
_Name = Annotated[str, msgspec.Meta(max_length=64)]

SpanKind = Literal["forward", "backward", "loss", "optimizer", "take", "pack", "wait", "send"]
ACTIONS: frozenset[SpanKind] = frozenset({"forward", "backward", "loss", "optimizer"})


# The only field whose text has several lines. They may hold tabs.
_OF_LINES = "traceback"


def printable(text: str, kept: str = "") -> str:
    """The text with its invisible characters, such as control characters, as text: ``\\x1b``.

    A printable text stays as it is, so a second call returns the same text.

    Args:
        kept: Characters to keep as they are.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode()
        for each in text
    )


class Words(msgspec.Struct, frozen=True):
    """Base of values whose texts are for people, such as reasons and names of devices.

    Their texts are printable as soon as a value is decoded or made, so a peer cannot control the
    reader's terminal or forge a line of a log. Only a traceback keeps its lines. Texts for
    programs, such as names of tensors, belong into other classes, and errors quote them by
    ``repr``.
    """

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            told = getattr(self, name)
            shown = _printable_in(told, "\n\t" if name == _OF_LINES else "")
            if shown != told:
                msgspec.structs.force_setattr(self, name, shown)


def _printable_in(told: Any, kept: str) -> Any:
    """A field's text, or the texts in its list or dictionary, as `printable` shows them."""
    if isinstance(told, str):
        return printable(told, kept)
    if isinstance(told, list):
        return [_printable_in(each, kept) for each in told]
    if isinstance(told, dict):
        return {printable(key): _printable_in(each, kept) for key, each in told.items()}
    return told


class Key(NamedTuple):
    """Identifies work by micro-batch and visit (0 for its first pass through the stages).

    A model that runs its decoder twice in one ``training_step`` visits the stages twice.
    """

    microbatch: int
    visit: int = 0


class Numerics(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The settings of torch with an effect on numbers; the defaults are torch's.

    Args:
        matmul_precision: The precision of products in float32: a word of torch's older setting,
            or two of the newer one, for CUDA and for oneDNN, with a slash between them.
        deterministic: Whether operations have to be deterministic.
        only_warns: Whether operations that are not deterministic only warn.
        other_precisions: The same for convolutions of CUDA, convolutions of oneDNN and recurrent
            layers of oneDNN.
        flash_attention: Whether torch may take this kernel of attention; and so on.
        cudnn: Whether torch may take the kernels of this library; and so on.
        cudnn_benchmark: Whether cuDNN tries its kernels, and takes the fastest.
        cudnn_deterministic: Whether cuDNN takes deterministic kernels alone.
        float16_reduced_sums: Whether sums within products of this type may be rounded on the way.
        float16_split_sums: Whether such sums may be cut in pieces; and so on.
        float16_accumulation: Whether products of this type are summed in it.
        half_math_attention: Whether the plain kernel of attention sums in the type of its input.
        fast_encoder: Whether `torch.nn.TransformerEncoderLayer` may take its short way.
    """

    matmul_precision: Name = "highest"
    other_precisions: Name = "tf32/none/none"
    deterministic: bool = False
    only_warns: bool = False
    flash_attention: bool = True
    memory_efficient_attention: bool = True
    math_attention: bool = True
    cudnn_attention: bool = True
    cudnn: bool = True
    cudnn_benchmark: bool = False
    cudnn_deterministic: bool = False
    onednn: bool = True
    onednn_deterministic: bool = False
    float16_reduced_sums: bool = True
    float16_split_sums: bool = True
    bfloat16_reduced_sums: bool = True
    bfloat16_split_sums: bool = True
    float16_accumulation: bool = False
    half_math_attention: bool = False
    fast_encoder: bool = True


class Span(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One piece of a process's work, from one moment to another.

    Args:
        kind: An action (``loss`` is the head and the loss with its backward, ``optimizer`` all work
            of the optimizer's step); ``take`` or ``pack`` a message; ``wait`` for one; or ``send``,
            beside the others.
        microbatch: The micro-batch; None without one.
        visit: The visit, as in `Key`.
        message: The class of the taken, packed or sent message.
        num_bytes: Bytes of the message's tensors; for ``send``, of the whole frame.
        peer: The process at the message's other end, by its number; 0 is the coordinator.
        arrived_seconds: When the taken message had arrived.
        stage: The stage of an action; for a message, its receiving stage.
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
    stage: _Number = 0


class Totals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sums over all recorded training steps; they only grow.

    Args:
        step_seconds: From the beginning of each step to its end at this stage.
        seconds: By kind, without nested spans: all kinds but ``send`` add up to the step.
        counts: Number of spans of each kind.
        sending_seconds: Time spent sending, over all links.
        from_replicas_bytes: Gradients and weights from other replicas of a stage.
        num_steps: Steps of the optimizer.
        num_microbatches: Forwards; on the coordinator, micro-batches handed over.
        num_tokens: Positions of the hidden states; the coordinator counts them.
        num_ready: Actions ready to run, added up over all choices.
        num_choices: How often the stage chose an action.
    """

    step_seconds: _Amount = 0.0
    seconds: dict[SpanKind, _Amount] = {}
    counts: dict[SpanKind, _Number] = {}
    sending_seconds: _Amount = 0.0
    sent_bytes: _Number = 0
    received_bytes: _Number = 0
    from_replicas_bytes: _Number = 0
    num_steps: _Number = 0
    num_microbatches: _Number = 0
    num_tokens: _Number = 0
    num_ready: _Number = 0
    num_choices: _Number = 0


class Equipment(Words, frozen=True):
    """The machine, device and software of one end of a conversation.

    Args:
        versions: Versions of Python, of this package and of the libraries of layers; libraries that
            are not installed are left out.
        device: The device as torch calls it.
        device_name: The name under which the device is sold.
        memory_bytes: All of the device's memory; 0 if it is unknown.
        dtypes: Floating-point types of the device's computations.
        capabilities: Abilities of only some workers, such as ``nf4`` or ``flash_attention_2``.
        host: The name of its machine on the network.
        machine: Equal for all processes on one machine, and different on another machine.
    """

    versions: Annotated[dict[Name, Name], FEW] = {}
    device: Name = ""
    device_name: Name = ""
    memory_bytes: Bytes = 0
    dtypes: Annotated[list[Name], FEW] = []
    capabilities: Annotated[list[Name], FEW] = []
    host: Name = ""
    machine: Name = ""


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The round trip of one probe: its bytes, and the seconds until the answer had arrived."""

    num_bytes: Count
    seconds: Seconds


class ClockSample(NamedTuple):
    """One question: when we asked, the time on the peer's clock, when we had the answer."""

    asked_seconds: float
    told_seconds: float
    heard_seconds: float


class Narrowed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor rounded for sending: its dtype before, and how many of the frame's tensors it
    takes."""

    dtype: Literal["float64", "float32", "bfloat16", "float16"]
    num_parts: Literal[1, 2]


class LinkStatus(Words, frozen=True, forbid_unknown_fields=True):
    """Bytes over one of a stage's links."""

    peer: Name
    sent_bytes: Bytes
    received_bytes: Bytes


class StageRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The number of a stage, and the half-open range of its decoder layers."""

    number: Count
    first_layer: Count
    end_layer: Count


class Repetition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The steps that a replacement of a lost worker repeats, or has repeated.

    Args:
        first_step: The first step that it repeats.
        seconds: For how long; from the beginning until now, or until it had caught up.
        is_over: Whether it has caught up.
    """

    first_step: Count
    seconds: LongSeconds
    is_over: bool


class SpareStatus(Words, frozen=True, forbid_unknown_fields=True):
    """The run that a free worker waits for; the run takes it if it needs one more worker.

    Args:
        run: Distinguishes runs; empty if the worker does not know it.
        coordinator: The coordinator of the run.
    """

    run: Name
    coordinator: Name


class StageStatus(Words, frozen=True, forbid_unknown_fields=True):
    """A worker's stages and work in a run.

    Args:
        run: Distinguishes runs; has no other meaning.
        coordinator: The worker's coordinator.
        stages: The stages of the worker.
        step: The present step.
        training_seconds: From the first training step to the latest optimizer step.
        busy_seconds: How much of that time the worker computed.
        links: The links to the coordinator and to its neighbors.
        is_measuring: Whether the coordinator measures here, before a stage is deployed.
        repetition: The steps that the worker repeats; None unless it replaces a lost worker.
    """

    run: Name
    coordinator: Name
    stages: Annotated[list[StageRange], FEW]
    step: Count
    training_seconds: LongSeconds
    busy_seconds: LongSeconds
    links: Annotated[list[LinkStatus], FEW]
    is_measuring: bool = False
    repetition: Repetition | None = None
