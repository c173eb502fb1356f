"""What a stage says of the time it took: single spans, and sums over many steps."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

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
