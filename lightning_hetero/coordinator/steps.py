"""The coordinator's side of steps: forwards and backwards on workers, and their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ..devices.copies import Copies
from ..errors import HeteroError, ModelError, RemoteProtocolError
from ..pipeline.boundary import BatchNumbers, Gradients, Surroundings
from ..pipeline.codec import (
    Leg,
    decode_activation,
    decode_gradients,
    encode_activation,
    encode_arguments,
    encode_gradients,
)
from ..pipeline.handover import Request, Returned
from ..pipeline.placement import COORDINATOR_STAGE
from ..pipeline.recorder import Recorder
from ..pipeline.rule import Key
from ..plan import Narrowing
from ..protocol import messages as m
from ..protocol.frames import Content, Frame, encode_frame
from ..protocol.values import Digests, Packer
from ..transport.channel import send_copied
from .answer_checks import DueAnswers, check_narrowed
from .member import Member

if TYPE_CHECKING:
    from .layers import RemoteLayers

Counted = TypeVar("Counted")


class OutgoingArguments:
    """The arguments of the layers for one micro-batch, on their way to all stages.

    A digest of its content shows whether a worker has a tensor already. Where the content is still
    being copied from the device, the writing thread encodes the message when the copy is done.
    """

    def __init__(self, step: int, key: Key, surroundings: Surroundings, copies: Copies) -> None:
        self._step, self._key, self._surroundings = step, key, surroundings
        # Each tensor once: layers share masks and rotary tables.
        originals = [*{id(tensor): tensor for tensor in surroundings.tensors}.values()]
        self._copy = copies.to_host(originals)
        # The originals stay alive, to keep their ids.
        self._originals = originals
        pairs = zip(originals, self._copy.tensors, strict=True)
        self._hosts = {id(original): host for original, host in pairs}
        self._digests = Digests(self._hosts)

    def send(self, worker: Member, leg: Leg, layers: Container[int]) -> None:
        """Send a worker the arguments of a stage's layers, and the micro-batch's way through it.

        Raises:
            LocalProtocolError: If an argument cannot be sent.
        """
        if self._copy.is_immediate:
            try:
                message, tensors = self._say(worker, leg, layers)
                worker.channel.send(message, *tensors)
            except BaseException:
                worker.forget_constants()
                raise
        else:
            # A wrong argument is refused here, in the thread of the caller.
            message, _ = self._pack(leg, layers, Packer())
            worker.channel.send_later(message, partial(self._encode, worker, leg, layers))

    def _encode(self, worker: Member, leg: Leg, layers: Container[int]) -> list[memoryview]:
        self._copy.wait()
        try:
            message, tensors = self._say(worker, leg, layers)
            return encode_frame(Frame(message, tuple(tensors)))
        except HeteroError:
            worker.forget_constants()
            raise

    def _say(self, worker: Member, leg: Leg, layers: Container[int]) -> Content:
        with worker.constants_lock:
            packer = Packer(worker.constants, self._digests)
            message, tensors = self._pack(leg, layers, packer)
        return message, [self._hosts.get(id(tensor), tensor) for tensor in tensors]

    def _pack(self, leg: Leg, layers: Container[int], packer: Packer) -> Content:
        return encode_arguments(self._step, self._key, self._surroundings, layers, packer, leg)


class RemoteStages:
    """Runs steps on the stages of a plan. Implements `Stages` for the driver.

    Not thread-safe: only the thread with the turn may use it.

    Args:
        layers: The layers on the workers.
        recorder: Records the spans of this process.
        copies: Copies tensors from and to the device of this process's computation.

    Attributes:
        layers: As given.
        copies: As given.
        num_tokens: Positions of hidden states sent into the stages for training.
        dropout_step: The number of the present batch for dropout masks.
        first_microbatch: The number of the first micro-batch of the present batch in the step.
        in_flight: The most micro-batches in flight in the present step.
        ways: By micro-batch and visit of the present step, the worker of each stage on its way.
        norms_due: For each worker with gradients from here, in this step or in the accumulated ones
            before, the trained parameters of its stage.
        num_exchanges: The number of requested exchanges of replicas.
        awaits_backward: Whether the backward of the latest loss is still to run; it publishes the
            gradients here.
    """

    def __init__(self, layers: RemoteLayers, recorder: Recorder, copies: Copies) -> None:
        self.layers = layers
        self.copies = copies
        self.num_tokens = 0
        self.dropout_step = 0
        self.first_microbatch = 0
        self.in_flight = 1
        self.ways: dict[Key, dict[int, Member]] = {}
        self.norms_due: dict[Member, set[str]] = {}
        self.num_exchanges = 0
        self.awaits_backward = False
        # Called before gradients are sent.
        self._on_backward: Callable[[], None] = lambda: None
        self._narrowings: Sequence[Narrowing] = ()
        # Whether gradients have been sent since the latest sums of replicas.
        self._has_new_gradients = False
        # The exchange with sums from workers to this process, if there is one.
        self._sums_due: int | None = None
        # The exchange begun in the present step, and the workers that know of it.
        self._begun: int | None = None
        self._told: set[Member] = set()
        self._connections = layers.connections
        self._recorder = recorder
        self._due = DueAnswers()
        self._timings: list[tuple[str, m.Timings]] = []
        self._counts = _Counts()
        layers.connections.asides[m.Timings] = self._on_timings

    def begin_plan(self, narrowings: Sequence[Narrowing]) -> None:
        """Begin a plan, without gradients.

        Args:
            narrowings: The rounding at each boundary: from this process to the first stage, between
                the stages, and back to this process; empty without rounding.
        """
        self.norms_due.clear()
        self._narrowings = narrowings

    def begin_step(
        self,
        max_in_flight: int,
        accumulate: bool,
        dropout_step: int | None = None,
        *,
        is_trial: bool = False,
        first_microbatch: int = 0,
        forwards_first: bool = False,
    ) -> None:
        """Start a step on every stage; a trial leaves gradients and dropout masks as they are.

        Args:
            max_in_flight: The most micro-batches in flight on a stage.
            accumulate: Whether the step adds to the present gradients.
            dropout_step: The number of its batch for dropout masks; None counts on, except in a
                trial.
            is_trial: Whether it leaves no trace.
            first_microbatch: The number of its first micro-batch.
            forwards_first: Whether workers run forwards before backwards.

        Raises:
            ModelError: If workers wait for gradients from here; they would not begin.
            WorkerError: If a worker, or a link between two workers, was lost before.
        """
        connections = self._connections
        connections.settle()
        connections.check_linked()
        self._check_nobody_waits()
        keeps_gradients = accumulate or is_trial
        connections.part.before_step(keeps_gradients)
        self.copies.keep_for(max_in_flight)
        step = connections.begin_step()
        self.first_microbatch, self.in_flight = first_microbatch, max_in_flight
        counted = self.dropout_step + (not is_trial)
        self.dropout_step = counted if dropout_step is None else dropout_step
        self._recorder.begin_step()
        self._due.begin_step()
        self._begun = None
        if not keeps_gradients:
            self._forget_gradients()
        begin = partial(m.BeginStep, step, max_in_flight, keeps_gradients, forwards_first)
        stamps = [(worker, self.stamp(worker)) for worker in connections.members]
        self._counts, self.ways = _Counts(), {}
        # An idle worker counts the steps too, since it may get layers before a later step.
        for worker, stamp in stamps:
            connections.send(worker, begin(**stamp))

    def next_batch(self, first_microbatch: int, dropout_step: int) -> None:
        """Let the micro-batches of another batch go on with the step; see `begin_step`.

        Raises:
            WorkerError: If a worker, or a link between two workers, was lost before.
        """
        self._connections.check_linked()
        self._counts.end_batch()
        self.first_microbatch, self.dropout_step = first_microbatch, dropout_step

    def _check_nobody_waits(self) -> None:
        hosted = self.layers.holdings.placement.hosted
        if self._sums_due is not None and hosted is not None and hosted.is_split:
            raise ModelError(
                "Layers on workers were called behind `training_step` and before the backward of "
                "its loss, where the workers of a stage with `optimizer: split` wait for the "
                "gradients from here. Call the model within `training_step` or behind the backward "
                "(`on_after_backward`), or take `optimizer: split` from the plan."
            )

    def stamp(self, worker: Member) -> dict[str, int]:
        """The progress of a worker's stages together in the present step, for requests to run after
        it."""
        counts = self._counts
        return {"forwards": counts.returned[worker], "backwards": counts.gone_back[worker]}

    def stamp_of_all(self, worker: Member) -> dict[str, int]:
        """The forwards and backwards sent through a worker's stages in the present step."""
        counts = self._counts
        return {"forwards": counts.sent[worker], "backwards": counts.sent_back[worker]}

    def stamp_of_earlier(self, worker: Member) -> dict[str, int]:
        """The forwards sent through a worker's stages in the present step, and all backwards of the
        batches before the present one, for requests to run before the next forwards."""
        counts = self._counts
        return {"forwards": counts.sent[worker], "backwards": counts.due_earlier[worker]}

    def present_step(self) -> int:
        """The step of the gradients; begins one before the first forward of a run."""
        if self._connections.step == 0:
            self.begin_step(1, accumulate=True)
        return self._connections.step

    def abort_step(self) -> None:
        """Make every stage forget the present step; never raises."""
        self._forget_gradients()
        self.awaits_backward = False
        # Micro-batches under way may still come back, so their ways stay known.
        self._counts = _Counts()
        self._connections.give_up_step()
        if self._connections.step > 0:
            with suppress(HeteroError):
                step = self._connections.step
                self._connections.broadcast(m.AbortStep(step, self.num_exchanges))
            self._connections.requests.give_up_step()

    def _forget_gradients(self) -> None:
        self.norms_due.clear()
        self._has_new_gradients, self._sums_due = False, None

    @contextmanager
    def calling_before_backwards(self, on_backward: Callable[[], None]) -> Iterator[None]:
        """Inside, the function is called before gradients are sent."""
        before, self._on_backward = self._on_backward, on_backward
        try:
            yield
        finally:
            self._on_backward = before

    def await_backward(self) -> None:
        """The backward of a loss comes next, and publishes the gradients."""
        self.awaits_backward = True

    def note_published(self) -> None:
        """The backward of the latest loss has published the gradients."""
        self.awaits_backward = False

    def note_zeroed(self) -> None:
        """Gradients on workers were dropped; no norms are due."""
        self.norms_due.clear()

    def drop_caches(self, numbers: Sequence[int]) -> None:
        """Let every stage forget key-value caches."""
        self._connections.check_usable()
        self._connections.broadcast(m.DropCaches(list(numbers)))

    def send_forward(
        self, key: Key, hidden: Tensor, surroundings: Surroundings, is_whole: bool = False
    ) -> None:
        """Send hidden states to the first stage, and each stage its layers' arguments."""
        with self._recorder.span("pack", key, "Activation"):
            self._send_forward(key, hidden, surroundings, is_whole)
        if surroundings.grad_enabled and key.visit == 0:
            self.note_tokens(hidden)

    def note_tokens(self, hidden: Tensor) -> None:
        """Count the tokens of a micro-batch in training."""
        # Token ids for an embedding on a worker lack the dimension of features.
        shape = hidden.shape[:-1] if hidden.is_floating_point() else hidden.shape
        num_tokens = shape.numel()
        self.num_tokens += num_tokens
        self._recorder.note_training(num_tokens)

    def _send_forward(
        self, key: Key, hidden: Tensor, surroundings: Surroundings, is_whole: bool
    ) -> None:
        holdings, step = self.layers.holdings, self._connections.step
        batch = BatchNumbers(self.dropout_step, self.first_microbatch)
        surroundings = replace(surroundings, batch=batch)
        # Where the module has several lists of layers, a visit passes the stages of one.
        called = {call.layer_index for call in surroundings.calls}
        way = {
            number: worker
            for number, worker in holdings.way(key.microbatch, is_whole).items()
            if not called.isdisjoint(holdings.stages[number].layers)
        }
        entering = Request(hidden, surroundings).entering
        self._due.note_forward(key, entering, surroundings)
        self.ways[key] = way
        arguments = OutgoingArguments(step, key, surroundings, self.copies)
        for leg, worker in self._counts.legs(key, way):
            arguments.send(worker, leg, holdings.stages[leg.stage].layers)
        stage = min(way)
        with torch.set_grad_enabled(surroundings.grad_enabled):
            dtype = self._narrowing_at(stage - 1).activation_dtype
            content = encode_activation(step, key, entering, dtype, stage=stage)
        send_copied(way[stage].channel, content, self.copies)

    def send_backward(
        self, key: Key, gradients: Gradients, unsent: Collection[int] | None = None
    ) -> None:
        """Send the gradients of a returned activation to the last stage."""
        self._on_backward()
        self._due.note_backward(key)
        self._has_new_gradients = True
        way = self.ways[key]
        last = max(way)
        if way[last] not in self.norms_due and any(g is not None for g in gradients.tensors):
            self.norms_due[way[last]] = self.layers.holdings.trained_names(last, way[last])
        with self._recorder.span("pack", key, "Gradients"):
            dtype = self._narrowing_at(last).gradient_dtype
            ordered = replace(gradients, places=self._counts.places(way))
            content = encode_gradients(self._connections.step, key, ordered, dtype, stage=last)
            if unsent is not None:
                # Before these gradients: their backward begins as soon as they come.
                self._reduce_on(self._finished(way.values(), unsent))
            send_copied(way[last].channel, content, self.copies)

    def _finished(self, workers: Iterable[Member], unsent: Collection[int]) -> list[Member]:
        """The workers without any of these micro-batches on their way."""
        holdings = self.layers.holdings
        if not holdings.placement.has_replicas:
            return []
        ways = [holdings.way(index, is_whole=False).values() for index in unsent]
        return [worker for worker in workers if not any(worker in way for way in ways)]

    def reduce(self) -> None:
        """Let replicas add up their gradients after all sent actions have run; does not wait for
        it."""
        if self._has_new_gradients and self.layers.holdings.placement.has_replicas:
            self._reduce_on(self._connections.workers)
        self._has_new_gradients, self._begun = False, None

    def take_sums_due(self, has_more: bool) -> int | None:
        """The exchange with sums from workers to this process, if there is one. It begins now if
        there are new gradients, or if this process ``has_more``."""
        self._has_new_gradients |= self._sums_due is None and has_more
        self.reduce()
        number, self._sums_due = self._sums_due, None
        return number

    def _reduce_on(self, workers: Collection[Member]) -> None:
        """Let these replicas add up their gradients after all actions sent to them have run."""
        if not workers:
            return
        number = self.open_exchange()
        for worker in workers:
            if worker not in self._told:
                message = m.ReduceGradients(number, **self.stamp_of_all(worker))
                self._connections.send(worker, message)
                self._told.add(worker)

    def open_exchange(self) -> int:
        """The number of the present step's exchange; the first call begins it, and `reduce` then
        reports it to all workers."""
        if self._begun is None:
            self._begun = self.next_exchange()
            self._told.clear()
            self._has_new_gradients = True
            if self.layers.holdings.placement.hosted is not None:
                self._sums_due = self._begun
        return self._begun

    def next_exchange(self) -> int:
        """The number of a new exchange."""
        self.num_exchanges += 1
        return self.num_exchanges

    def _narrowing_at(self, boundary: int) -> Narrowing:
        """The rounding after a stage; 0 is the boundary after this process's first layers."""
        return self._narrowings[boundary] if self._narrowings else Narrowing()

    def receive(self) -> Returned:
        """Wait for the next activation or gradients of the present step."""
        connections = self._connections
        with self._recorder.span("wait"):
            while True:
                arrived = connections.receive(connections.deadlines.progress_seconds)
                if (returned := self._returned(*arrived)) is not None:
                    return returned

    def take_arrived(self) -> list[Returned]:
        """The arrived activations and gradients of the present step; does not wait."""
        found: list[Returned] = []
        while (arrived := self._connections.receive_arrived()) is not None:
            if (returned := self._returned(*arrived)) is not None:
                found.append(returned)
        return found

    def _returned(self, worker: Member, frame: Frame) -> Returned | None:
        """The content of a stage's result; None for a leftover of an aborted step."""
        message, connections, holdings = frame.message, self._connections, self.layers.holdings
        if message.step != connections.step:
            return None
        with connections.blaming(worker):
            if isinstance(message, m.Activation):
                way = self._way_from(message, worker)
                decode = partial(decode_activation, message)
                activation = self.copies.to_device(frame.tensors, decode)
                self._due.take_activation(message.key, activation, holdings.layers, holdings.dtypes)
                _count(self._counts.returned, way.values())
                if activation.requires_grad:
                    _count(self._counts.due_back, way.values())
                return Returned(message.key, activation)
            if isinstance(message, m.Gradient):
                way = self._way_from(message, worker)
                decoding = partial(decode_gradients, message)
                gradients = self.copies.to_device(frame.tensors, decoding)
                self._due.take_gradients(message.key, gradients)
                _count(self._counts.gone_back, way.values())
                return Returned(message.key, gradients)
        return None

    def _way_from(self, message: m.Activation | m.Gradient, sender: Member) -> dict[int, Member]:
        """The way of a returned micro-batch; refuses results not from the stage at its end, and
        other rounding than the plan's."""
        kind, way = type(message).__name__, self.ways.get(message.key)
        if way is None:
            raise RemoteProtocolError(
                f"Nobody waits for its {kind} of micro-batch {message.microbatch}, visit "
                f"{message.visit}."
            )
        is_forward = isinstance(message, m.Activation)
        stage = max(way) if is_forward else min(way)
        narrowing, expected = self.layers.holdings.stages[stage].narrowing, way[stage]
        if sender is not expected or message.stage != COORDINATOR_STAGE:
            raise RemoteProtocolError(
                f"{kind} should come from stage {stage}, which {expected.name} "
                f"serves, and for stage {COORDINATOR_STAGE}; it is for stage {message.stage}."
            )
        dtype = narrowing.activation_dtype if is_forward else narrowing.gradient_dtype
        check_narrowed(message.narrowed, dtype)
        return way

    def take_timings(self) -> list[tuple[str, m.Timings]]:
        """The workers' timings since the last call, each with the worker's name."""
        taken, self._timings = self._timings, []
        return taken

    def _on_timings(self, worker: Member, message: m.Timings) -> None:
        self._timings.append((worker.name, message))


@dataclass
class _Counts:
    """The counts of the workers' actions in one step, sent and returned.

    Attributes:
        sent: The forwards sent through each worker's stages.
        sent_back: The backwards sent through them.
        returned: The forwards already back in this process.
        gone_back: The returned backwards.
        due_back: The backwards of the returned forwards.
        due_earlier: The due backwards of batches before the present one.
    """

    sent: Counter[Member] = field(default_factory=Counter)
    sent_back: Counter[Member] = field(default_factory=Counter)
    returned: Counter[Member] = field(default_factory=Counter)
    gone_back: Counter[Member] = field(default_factory=Counter)
    due_back: Counter[Member] = field(default_factory=Counter)
    due_earlier: Counter[Member] = field(default_factory=Counter)
    # By worker, stage and visit; by worker and stage.
    _forwards: Counter[tuple[Member, int, int]] = field(default_factory=Counter)
    _backwards: Counter[tuple[Member, int]] = field(default_factory=Counter)

    def end_batch(self) -> None:
        """All forwards of the batch have returned, and another batch comes into the step."""
        self.due_earlier = Counter(self.due_back)

    def legs(self, key: Key, way: Mapping[int, Member]) -> Iterator[tuple[Leg, Member]]:
        """Count a forward; yields its way through each stage, with the stage's worker."""
        _count(self.sent, way.values())
        for number, worker in way.items():
            before, behind = way.get(number - 1), way.get(number + 1)
            counted = worker, number, key.visit
            yield (
                Leg(
                    number,
                    before.number if before else 0,
                    behind.number if behind else 0,
                    self._forwards[counted],
                ),
                worker,
            )
            self._forwards[counted] += 1

    def places(self, way: Mapping[int, Member]) -> tuple[int, ...]:
        """Count a backward; returns its place in each stage, the last stage first."""
        counted = [(worker, number) for number, worker in sorted(way.items(), reverse=True)]
        found = tuple(self._backwards[each] for each in counted)
        _count(self._backwards, counted)
        _count(self.sent_back, way.values())
        return found


def _count(counts: Counter[Counted], things: Iterable[Counted]) -> None:
    """Count a few things; `Counter.update` is made for many, and takes long to begin."""
    for each in things:
        counts[each] += 1
