"""Imported in a worker: what it says is wrong in the way that a file names, which tests change."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.bases import Speaker
from lightning_hetero.transport.channel import Channel

FILE_VARIABLE = "LIE_FILE"

Said = tuple[m.Message, tuple[Tensor, ...]]
Change = Callable[[Any, tuple[Tensor, ...]], Iterable[Said]]


@dataclass(frozen=True)
class Lie:
    """What becomes of messages of a kind, and what is said of it by whoever hears them."""

    kind: type[m.Message]
    change: Change
    says: str


def _same(message: m.Message, *tensors: Tensor) -> list[Said]:
    return [(message, tensors)]


def _saying(**changes: Any) -> Change:
    return lambda message, tensors: [(msgspec.structs.replace(message, **changes), tensors)]


def _with(function: Callable[[Tensor], Tensor]) -> Change:
    """Another first tensor."""
    return lambda message, tensors: [(message, (function(tensors[0]), *tensors[1:]))]


def _renumbered(stages: dict[int, int]) -> Change:
    """For another stage."""
    return lambda said, tensors: [
        (msgspec.structs.replace(said, stage=stages.get(said.stage, said.stage)), tensors)
    ]


def _twice(message: m.Message, tensors: tuple[Tensor, ...]) -> list[Said]:
    return [(message, tensors)] * 2


def _never(_message: m.Message, _tensors: tuple[Tensor, ...]) -> list[Said]:
    return []


def _norms(change: Callable[[dict[str, float]], dict[str, float]]) -> Change:
    return lambda said, _: _same(msgspec.structs.replace(said, norms=change(said.norms)))


def _doubled(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor], dim=-1)


def _state(change: Callable[[Tensor], Tensor]) -> Change:
    """Other moments; a step count is left as it is."""
    return lambda said, tensors: _same(said, *(change(t) if t.ndim else t for t in tensors))


CONTENT = {
    "a weight under another name": Lie(
        m.TensorContent, _saying(name="99.evil.weight"), "'99.evil.weight', which it was not asked"
    ),
    "no weights": Lie(m.TensorContent, _never, "did not send the tensors"),
    "a weight twice": Lie(m.TensorContent, _twice, "which it was not asked for"),
    "a part of a weight": Lie(m.TensorContent, _with(lambda t: t[:1]), r"and came as float32\[1"),
    "whole numbers for a weight": Lie(m.TensorContent, _with(Tensor.long), "and came as int64"),
    "a weight in float64": Lie(m.TensorContent, _with(Tensor.double), "and came as float64"),
    "a weight with scales": Lie(
        m.TensorContent,
        lambda said, t: _same(msgspec.structs.replace(said, state=["absmax"]), *t, *t),
        r"came with a state, \['absmax'\]",
    ),
    "a weight without content": Lie(
        m.TensorContent, lambda said, _: _same(said), "does not describe its 0 tensors"
    ),
}
STATE = {
    "state of another parameter": Lie(
        m.OptimizerState, _saying(parameter="99.evil.weight"), "state of '99.evil.weight'"
    ),
    "state twice": Lie(m.OptimizerState, _twice, "not asked for or has come"),
    "state of another shape": Lie(m.OptimizerState, _state(_doubled), "state 'exp_avg' of .* came"),
    "state of whole numbers": Lie(m.OptimizerState, _state(Tensor.long), "came as int64"),
    "state that is a number": Lie(m.OptimizerState, _saying(state=3), "optimizer state of .* is 3"),
}
NORMS = {
    "norms twice": Lie(m.Norms, _twice, "without being asked"),
    "norms for another request": Lie(m.Norms, _saying(request=2**30), "without being asked"),
    "norms for no request": Lie(m.Norms, _saying(request=0), "without being asked"),
    "no norms": Lie(m.Norms, _norms(lambda _: {}), "told no norm"),
    "the norm of another parameter": Lie(
        m.Norms, _norms(lambda norms: {**norms, "99.evil.weight": 1.0}), "norm of '99.evil.weight'"
    ),
    "negative norms": Lie(
        m.Norms, _norms(lambda norms: dict.fromkeys(norms, -3.0)), "told -3 as the gradient norm"
    ),
}
FORWARD = {
    "half of the samples": Lie(m.Activation, _with(lambda t: t[: len(t) // 2]), r"it sent float32"),
    "one sample": Lie(m.Activation, _with(lambda t: t[:1]), r"it sent float32\[1, 10, 16\]"),
    "one position": Lie(m.Activation, _with(lambda t: t[:, :1]), r"it sent float32\[3, 1, 16\]"),
    "hidden states in float64": Lie(m.Activation, _with(Tensor.double), "it sent float64"),
    "hidden states in float16": Lie(m.Activation, _with(Tensor.half), "it sent float16"),
    "whole hidden states": Lie(
        m.Activation,
        lambda said, t: _same(msgspec.structs.replace(said, requires_grad=[False]), t[0].long()),
        "it sent int64",
    ),
    "wide hidden states": Lie(m.Activation, _with(_doubled), r"it sent float32\[3, 10, 32\]"),
    "another micro-batch": Lie(m.Activation, _saying(microbatch=77), "of micro-batch 77"),
    "another visit": Lie(m.Activation, _saying(visit=1), "visit 1"),
    "an activation twice": Lie(m.Activation, _twice, "Nobody waits for its activation"),
    "an activation for its own stage": Lie(
        m.Activation, _saying(stage=1), "for stage 0; it is for stage 1"
    ),
    "an output that nobody collects": Lie(
        m.Activation,
        lambda said, t: _same(
            msgspec.structs.replace(said, requires_grad=[True] * 2, collected=["router_logits"]),
            t[0],
            t[0],
        ),
        r"\['router_logits'\] that nobody collects",
    ),
    "rounded hidden states": Lie(
        m.Activation,
        lambda said, t: _same(
            msgspec.structs.replace(said, narrowed=[m.Narrowed("float32", 1)]), t[0].bfloat16()
        ),
        "It rounded what it sent",
    ),
}
BACKWARD = {
    "a part of the gradients": Lie(m.Gradient, _with(lambda t: t[:1]), r"came as float32\[1, 10"),
    "gradients in float64": Lie(m.Gradient, _with(Tensor.double), "came as float64"),
    "whole gradients": Lie(m.Gradient, _with(Tensor.long), "came as int64"),
    "gradients twice": Lie(m.Gradient, _twice, "Nobody waits for its gradients"),
    "gradients for its own stage": Lie(
        m.Gradient, _saying(stage=1), "for stage 0; it is for stage 1"
    ),
    "more gradients": Lie(
        m.Gradient,
        lambda said, t: _same(msgspec.structs.replace(said, is_present=[True] * 2), t[0], t[0]),
        "It sent 2 gradients, and 1 are due",
    ),
}
# Between workers: who hears it fails, and names what came.
TO_NEIGHBOR = {
    "gradients in float64": Lie(m.Gradient, _with(Tensor.double), "came as torch.float64"),
    "a part of the gradients": Lie(m.Gradient, _with(lambda t: t[:1]), r"of the shape \[1, 10"),
    "whole hidden states": Lie(m.Activation, _with(Tensor.long), "came as torch.int64"),
    "an activation twice": Lie(m.Activation, _twice, "Activation for stage 2 .* came twice"),
    "gradients twice": Lie(m.Gradient, _twice, "Gradients for stage 1 .* came twice"),
    "an activation for nobody": Lie(m.Activation, _saying(stage=9), r"for stage 9, .* has \[2\]"),
    "gradients for nobody": Lie(m.Gradient, _saying(stage=9), r"for stage 9, .* has \[1\]"),
}
# Where the liar has stages 1 and 3, and who hears it stages 2 and 4.
IN_TURNS = {
    "the late activation for the early stage": Lie(
        m.Activation, _renumbered({4: 2}), "Activation for stage 2 .* came twice"
    ),
    "the early activation for the late stage": Lie(
        m.Activation, _renumbered({2: 4}), "Gradients for stage 3 .* came without its activation"
    ),
    "an activation for its own stage": Lie(
        m.Activation, _renumbered({2: 3}), r"for stage 3, .* has \[2, 4\]"
    ),
    "gradients of the other boundary": Lie(
        m.Gradient, _renumbered({2: 4}), "Gradient for stage 4 came from worker 1"
    ),
}
TO_COORDINATOR = {**CONTENT, **STATE, **NORMS, **FORWARD, **BACKWARD}

_send = Channel.send


def _lying_send(channel: Channel, message: m.Message, *tensors: Tensor) -> None:
    is_neighbor = channel._session.ours is not Speaker.WORKER
    lies = {**TO_NEIGHBOR, **IN_TURNS} if is_neighbor else TO_COORDINATOR
    to_whom, _, name = Path(os.environ[FILE_VARIABLE]).read_text().partition(": ")
    lie = lies.get(name) if to_whom == ("n" if is_neighbor else "c") else None
    if lie is None or not isinstance(message, lie.kind):
        _send(channel, message, *tensors)
        return
    for said, content in lie.change(message, tensors):
        _send(channel, said, *content)


if FILE_VARIABLE in os.environ:
    Channel.send = _lying_send  # type: ignore[method-assign]
