"""The coordinator's side of steps: forwards and backwards on the stages of a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Sequence
from functools import partial

import torch
from torch import Tensor

from ..devices.copies import Copies
from ..errors import HeteroError, RemoteProtocolError
from ..pipeline.boundary import Activation, Gradients, Surroundings
from ..pipeline.codec import (
    decode_activation,
    decode_gradients,
    encode_activation,
    encode_arguments,
    encode_gradients,
)
from ..pipeline.handover import Returned
from ..pipeline.placement import COORDINATOR_STAGE
from ..pipeline.recorder import Recorder
from ..pipeline.rule import Key
from ..plan import Narrowing
from ..protocol import messages as m
from ..protocol.frames import Content, Frame, encode_frame
from ..protocol.values import Digests, Packer
from ..transport.channel import send_copied
from .answers import DueAnswers, check_narrowed
from .connections import Connections
from .layers import RemoteLayers
from .member import Member

FIRST_STAGE = 1
"""The number of the stage that takes activations from this process."""


class OutgoingArguments:
    """The arguments of the layers for one micro-batch, on their way to all stages.

    A digest of its content tells whether a worker has a tensor already. Where the content is still
    being copied from the device, the writing thread encodes the message when the copy is done.
    """

    def __init__(self, step: int, key: Key, surroundings: Surroundings, copies: Copies) -> None:
        self._step, self._key, self._surroundings = step, key, surroundings
        # Each tensor once: layers share masks and rotary tables.
        originals = [*{id(tensor): tensor for tensor in surroundings.tensors}.values()]
        self._copy = copies.to_host(originals)
        # The originals stay alive, so that their ids stay theirs.
        self._originals = originals
        pairs = zip(originals, self._copy.tensors, strict=True)
        self._hosts = {id(original): host for original, host in pairs}
        self._digests = Digests(self._hosts)

    def send(self, worker: Member, stage: int, layers: Container[int]) -> None:
        """Send a worker the arguments of a stage's layers.

        Raises:
            LocalProtocolError: If an argument cannot be sent.
        """
        if self._copy.is_immediate:
            try:
                message, tensors = self._say(worker, stage, layers)
                worker.channel.send(message, *tensors)
            except BaseException:
                worker.forget_constants()
                raise
        else:
            # An argument that cannot be sent is refused here, in the thread of the caller.
            message, _ = self._pack(stage, layers, Packer())
            worker.channel.send_later(message, partial(self._encode, worker, stage, layers))

    def _encode(self, worker: Member, stage: int, layers: Container[int]) -> list[memoryview]:
        self._copy.wait()
        try:
            message, tensors = self._say(worker, stage, layers)
            return encode_frame(Frame(message, tuple(tensors)))
        except HeteroError:
            worker.forget_constants()
            raise

    def _say(self, worker: Member, stage: int, layers: Container[int]) -> Content:
        with worker.constants_lock:
            packer = Packer(worker.constants, self._digests)
            message, tensors = self._pack(stage, layers, packer)
        return message, [self._hosts.get(id(tensor), tensor) for tensor in tensors]

    def _pack(self, stage: int, layers: Container[int], packer: Packer) -> Content:
        return encode_arguments(self._step, self._key, self._surroundings, layers, packer, stage)


class RemoteStages:
    """Runs steps on the stages of a plan. Implements `Stages` for the driver.

    Not thread-safe: only the thread that has the turn may use it.

    Args:
        connections: The workers.
        layers: The layers that the workers hold.
        recorder: Records the spans of this process.
        copies: Copies tensors from and to the device that this process computes on.

    Attributes:
        copies: As given.
        narrowing: The dtypes to which this process rounds the activations that it sends to the
            first stage, and the gradients that it sends to the last stage.
        num_tokens: Positions of hidden states that were sent for training.
        dropout_step: The number of the present step for dropout masks, which trials do not count.
        norms_due: Parameters of the last stage that have received gradients in this step or in
            those accumulated before.
    """

    def __init__(
        self, connections: Connections, layers: RemoteLayers, recorder: Recorder, copies: Copies
    ) -> None:
        self.copies = copies
        self.narrowing = Narrowing()
        self.num_tokens = 0
        self.dropout_step = 0
        self.norms_due: set[str] = set()
        self._connections = connections
        self._layers = layers
        self._recorder = recorder
        self._due = DueAnswers()
        self._timings: list[tuple[str, m.Timings]] = []
        self._forget_counts()
        connections.asides[m.Timings] = self._on_timings

    def begin_step(self, max_in_flight: int, accumulate: bool, is_trial: bool = False) -> None:
        """Start a step on every stage; a trial leaves gradients and dropout masks as they are.

        Raises:
            WorkerError: If a worker, or a link between two, was lost before.
        """
        connections = self._connections
        connections.check_linked()
        self.copies.keep_for(max_in_flight)
        connections.step += 1
        connections.in_flight = max_in_flight
        self.dropout_step += not is_trial
        self._recorder.begin_step()
        self._due = DueAnswers()
        keeps_gradients = accumulate or is_trial
        if not keeps_gradients:
            self.norms_due = set()
        message = m.BeginStep(
            connections.step, max_in_flight, keeps_gradients, self.dropout_step, **self.stamp()
        )
        self._forget_counts()
        # An idle worker counts the steps too, since it may get layers before a later one.
        for worker in list(connections.members):
            connections.send(worker, message)

    def stamp(self) -> dict[str, int]:
        """What every stage has done in the present step, for requests that belong behind it."""
        return {"forwards": self._num_forwards_done, "backwards": self._num_backwards_done}

    def stamp_of_sent(self) -> dict[str, int]:
        """The forwards of the present step that have been sent, for requests that belong between
        these and the next ones."""
        return {"forwards": self._num_forwards_sent}

    def _forget_counts(self) -> None:
        self._num_forwards_sent = self._num_forwards_done = self._num_backwards_done = 0

    @property
    def last_stage(self) -> int:
        """The number of the stage that sends activations to this process."""
        return len(self._layers.holdings.stages)

    def present_step(self) -> int:
        """The step that gradients belong to; begins one if no forward has run yet."""
        if self._connections.step == 0:
            self.begin_step(1, accumulate=True)
        return self._connections.step

    def abort_step(self) -> None:
        """Make every stage forget the present step; never raises."""
        self.norms_due = set()
        self._forget_counts()
        if self._connections.step > 0:
            with contextlib.suppress(HeteroError):
                self._connections.broadcast(m.AbortStep(self._connections.step))

    def drop_caches(self, numbers: Sequence[int]) -> None:
        """Let every stage forget key-value caches."""
        self._connections.check_usable()
        self._connections.broadcast(m.DropCaches(list(numbers)))

    def send_forward(self, key: Key, hidden: Tensor, surroundings: Surroundings) -> None:
        """Send hidden states to the first stage, and each stage its layers' arguments."""
        with self._recorder.span("pack", key, "Activation"):
            self._send_forward(key, hidden, surroundings)
        if surroundings.grad_enabled and key.visit == 0:
            # Token ids for an embedding on a worker have no dimension of features.
            shape = hidden.shape[:-1] if hidden.is_floating_point() else hidden.shape
            num_tokens = shape.numel()
            self.num_tokens += num_tokens
            self._recorder.note_training(num_tokens)

    def _send_forward(self, key: Key, hidden: Tensor, surroundings: Surroundings) -> None:
        self._due.note_forward(key, hidden, surroundings)
        self._num_forwards_sent += 1
        step = self._connections.step
        arguments = OutgoingArguments(step, key, surroundings, self.copies)
        serving = self._connections.serving
        for number, stage in self._layers.holdings.stages.items():
            arguments.send(serving[number], number, stage.layers)
        with torch.set_grad_enabled(surroundings.grad_enabled):
            dtype = self.narrowing.activation_dtype
            content = encode_activation(step, key, Activation(hidden), dtype, stage=FIRST_STAGE)
        send_copied(serving[FIRST_STAGE].channel, content, self.copies)

    def send_backward(self, key: Key, gradients: Gradients) -> None:
        """Send the gradients of a returned activation to the last stage."""
        self._due.note_backward(key)
        last = self.last_stage
        if not self.norms_due and any(gradient is not None for gradient in gradients.tensors):
            held = self._layers.holdings.of_stage(last).items()
            self.norms_due = {name for name, each in held if each.is_trained}
        with self._recorder.span("pack", key, "Gradients"):
            dtype = self.narrowing.gradient_dtype
            content = encode_gradients(self._connections.step, key, gradients, dtype, stage=last)
            send_copied(self._connections.serving[last].channel, content, self.copies)

    def receive(self) -> Returned:
        """Wait for the next activation or gradients of the present step."""
        connections = self._connections
        with self._recorder.span("wait"):
            while True:
                arrived = connections.receive(connections.deadlines.progress_seconds)
                if (returned := self._returned(*arrived)) is not None:
                    return returned

    def take_arrived(self) -> list[Returned]:
        """The activations and gradients of the present step that have arrived; does not wait."""
        found: list[Returned] = []
        while (arrived := self._connections.receive_arrived()) is not None:
            if (returned := self._returned(*arrived)) is not None:
                found.append(returned)
        return found

    def _returned(self, worker: Member, frame: Frame) -> Returned | None:
        """The content of a stage's result; None if an aborted step has left it over."""
        message, connections, holdings = frame.message, self._connections, self._layers.holdings
        if message.step != connections.step:
            return None
        with connections.blaming(worker):
            if isinstance(message, m.Activation):
                narrowing = self._narrowing_of(message, worker, self.last_stage)
                check_narrowed(message.narrowed, narrowing.activation_dtype)
                decode = partial(decode_activation, message)
                activation = self.copies.to_device(frame.tensors, decode)
                self._due.take_activation(message.key, activation, holdings.layers, holdings.dtypes)
                self._num_forwards_done += 1
                return Returned(message.key, activation)
            if isinstance(message, m.Gradient):
                narrowing = self._narrowing_of(message, worker, FIRST_STAGE)
                check_narrowed(message.narrowed, narrowing.gradient_dtype)
                decoding = partial(decode_gradients, message)
                gradients = self.copies.to_device(frame.tensors, decoding)
                self._due.take_gradients(message.key, gradients)
                self._num_backwards_done += 1
                return Returned(message.key, gradients)
        return None

    def _narrowing_of(
        self, message: m.Activation | m.Gradient, sender: Member, stage: int
    ) -> Narrowing:
        """The rounding of a stage's results; refuses a result of another stage."""
        expected = self._connections.serving[stage]
        if sender is not expected or message.stage != COORDINATOR_STAGE:
            raise RemoteProtocolError(
                f"{type(message).__name__} should come from stage {stage}, which {expected.name} "
                f"serves, and for stage {COORDINATOR_STAGE}; it is for stage {message.stage}."
            )
        return self._layers.holdings.stages[stage].narrowing

    def take_timings(self) -> list[tuple[str, m.Timings]]:
        """The timings that workers have sent since the last call, each with the worker's name."""
        taken, self._timings = self._timings, []
        return taken

    def _on_timings(self, worker: Member, message: m.Timings) -> None:
        self._timings.append((worker.name, message))
