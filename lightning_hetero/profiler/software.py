"""The software's time for a micro-batch: what goes on around computing, at both ends of a boundary.

Micro-batches go through a stage without layers that is in this process too, by the same driver,
codec and runner as in a run. Every message becomes bytes and is read again, as between two
processes:

    driver ── arguments, activation ──▶ runner of no layers     (coordinator │ worker)
           ◀── activation ──
           ── gradients ──▶
           ◀── gradients ──

Seconds are those of the processor, because other programs change these least. A worker's end is
measured here too, and not on the worker: its processor counts as equally fast.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Container
from dataclasses import replace
from typing import NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from ..errors import RemoteProtocolError
from ..model.layer_call import LayerCall
from ..pipeline.boundary import Activation, Gradients, Surroundings
from ..pipeline.codec import (
    Leg,
    decode_activation,
    decode_arguments,
    decode_gradients,
    encode_activation,
    encode_arguments,
    encode_gradients,
)
from ..pipeline.driver import BatchWork, Driver, Limits, MicrobatchStep, StepGradients
from ..pipeline.handover import Request, Returned
from ..pipeline.random_numbers import Draws
from ..pipeline.rule import Key
from ..pipeline.runner import Runner
from ..pipeline.stage import Stage
from ..pipeline.turns import TurnThreads, current_turn
from ..protocol import messages as m
from ..protocol.frames import Content, Frame, FrameReader, encode_frame
from ..protocol.values import KeptConstants, Packer
from .embedding_and_head import Example
from .measured_model import ModelSighting

_CPU = torch.device("cpu")
_STAGE_INDEX = 1
_MICRO_BATCHES = 4
# The fastest counts; the first ones warm up.
_NUM_STEPS = 8


class Software(NamedTuple):
    """Seconds of the software for one micro-batch, forward and backward.

    Args:
        coordinator: On the coordinator.
        worker: On a worker with one stage.
    """

    coordinator: float
    worker: float


def measure_software(sighting: ModelSighting) -> Software:
    """Measure what goes on around the layers of a micro-batch of the smallest size.

    Raises:
        LocalProtocolError: If an argument of a layer cannot be sent.
    """
    size, example = min(sighting.subject.examples.items())
    batch = sighting.cutting.batch(size)
    calling = sighting.runner.calling_seconds(batch, _NUM_STEPS)
    if sighting.cutting.at_boundary:
        calling *= size / sighting.batch_size
    found = between_layers(example)
    return found._replace(coordinator=found.coordinator + calling)


def between_layers(example: Example) -> Software:
    """The two ends of a boundary: micro-batches leave the coordinator, and a worker takes them."""
    form = example.hidden
    hidden = torch.zeros(form.shape, dtype=form.dtype, requires_grad=True)
    calls = [_on_cpu(call) for _, call in sorted(example.calls.items())]
    request = Request(hidden, replace(example.surroundings, calls=calls, carried={}))

    def training_step() -> Tensor:
        turn = current_turn()
        if turn is None:
            raise RuntimeError("A micro-batch that is measured runs in a turn.")
        returned: Activation = turn.hand_over(request)
        return returned.hidden.sum()

    stage, threads = _StageHere({*example.calls}), TurnThreads()
    driver = Driver(stage, StepGradients([], []), lambda loss: loss, Draws(0), threads)
    steps = [MicrobatchStep(training_step, lambda: 1.0)] * _MICRO_BATCHES
    found = []
    try:
        for number in range(1, _NUM_STEPS + 1):
            before, start = stage.seconds, time.process_time()
            driver.run(BatchWork(steps, number, accumulates=False), Limits(_MICRO_BATCHES))
            away = stage.seconds - before
            found.append((time.process_time() - start - away, away))
    finally:
        threads.close()
    own, away = (min(seconds) / _MICRO_BATCHES for seconds in zip(*found, strict=True))
    return Software(own, away)


def _on_cpu(call: LayerCall) -> LayerCall:
    args, kwargs = apply_to_collection((call.args, call.kwargs), Tensor, Tensor.cpu)
    return replace(call, args=args, kwargs=kwargs)


class _StageHere:
    """A remote stage without layers, in this process; implements `Stages`.

    Args:
        layers: The layers whose arguments are sent.

    Attributes:
        seconds: The time of the worker's end so far.
    """

    def __init__(self, layers: Container[int]) -> None:
        self.seconds = 0.0
        self._layers = layers
        self._runner = Runner([Stage(nn.ModuleDict(), _CPU, _STAGE_INDEX)])
        self._constants = KeptConstants()
        self._arrived: deque[tuple[Key, Frame]] = deque()
        self._step = 0

    def begin_step(
        self,
        max_in_flight: int,
        accumulate: bool,
        dropout_step: int | None = None,
        *,
        first_microbatch: int = 0,
        forwards_first: bool = False,
    ) -> None:
        self._step += 1
        self._runner.begin(self._step, max_in_flight, accumulate, forwards_first)

    def next_batch(self, first_microbatch: int, dropout_step: int) -> None:
        """Nothing: each batch is a step."""

    def abort_step(self) -> None:
        self._runner.abort()

    def reduce(self) -> None:
        """Nothing: there are no replicas."""

    def send_forward(
        self, key: Key, hidden: Tensor, surroundings: Surroundings, is_whole: bool = False
    ) -> None:
        leg, packer = Leg(_STAGE_INDEX, place=key.microbatch), Packer()
        arguments = _passed(
            encode_arguments(self._step, key, surroundings, self._layers, packer, leg)
        )
        self._take(key, arguments, _passed(encode_activation(self._step, key, Activation(hidden))))

    def send_backward(
        self, key: Key, gradients: Gradients, unsent: Collection[int] | None = None
    ) -> None:
        self._take(key, _passed(encode_gradients(self._step, key, gradients)))

    def receive(self) -> Returned:
        key, frame = self._arrived.popleft()
        return Returned(key, _decoded(frame))

    def take_arrived(self) -> list[Returned]:
        return [self.receive() for _ in range(len(self._arrived))]

    def _take(self, key: Key, *frames: Frame) -> None:
        """Do what a worker does: decode, run the action that is ready then, and encode."""
        start = time.process_time()
        for frame in frames:
            self._runner.take(self._step, _STAGE_INDEX, key, self._content(frame))
        action = self._runner.next_action()
        if action is None:
            raise RuntimeError(f"Nothing is ready for {key} in a stage that is measured.")
        found = self._runner.run(action)
        if isinstance(found, Activation):
            answer = encode_activation(self._step, key, found)
        else:
            answer = encode_gradients(self._step, key, found)
        self._arrived.append((key, _passed(answer)))
        self.seconds += time.process_time() - start

    def _content(self, frame: Frame) -> Activation | Gradients | Surroundings:
        if not isinstance(frame.message, m.Arguments):
            return _decoded(frame)
        arguments = decode_arguments(frame.message, frame.tensors, self._constants)
        return replace(arguments, calls=[], collect=[], passes=[])


def _decoded(frame: Frame) -> Activation | Gradients:
    if isinstance(frame.message, m.Activation):
        return decode_activation(frame.message, frame.tensors)
    if isinstance(frame.message, m.Gradient):
        return decode_gradients(frame.message, frame.tensors)
    raise RemoteProtocolError(f"{frame.message} is neither an activation nor a gradient.")


def _passed(content: Content) -> Frame:
    """A message and its tensors as the other end reads them."""
    message, tensors = content
    reader, found = FrameReader(), None
    for part in encode_frame(Frame(message, tuple(tensors))):
        while part:
            buffer = reader.buffer()
            num_bytes = min(len(buffer), len(part))
            buffer[:num_bytes] = part[:num_bytes]
            part = part[num_bytes:]
            found = reader.advance(num_bytes)
    if found is None:
        raise RemoteProtocolError(f"{message} is no whole frame.")
    return found
