"""A worker's session: one coordinator's stage, from Deploy to Goodbye.

The channels of a worker's session to the stages beside its own.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from ..devices.copies import Copies
from ..devices.device import device_for
from ..errors import HeteroError, LocalProtocolError, ModelError, WorkerUnreachable
from ..model.allowed_imports import Allowed
from ..model.four_bit import multiply_in
from ..model.layers import EMBEDDING_LAYER, check_token_ids
from ..pipeline.codec import (
    Content,
    decode_activation,
    decode_arguments,
    decode_gradients,
    encode_result,
)
from ..pipeline.rule import Action, Key
from ..pipeline.runner import Result, StageRunner
from ..pipeline.stage import CompiledLayers, LayerState, Stage
from ..pipeline.stage_layers import KeptTensors
from ..plan import Narrowing
from ..protocol import messages as m
from ..protocol.frames import Frame
from ..protocol.session import upstream_session
from ..protocol.tensors import DTYPES
from ..protocol.values import KeptConstants
from ..transport.address import Address
from ..transport.channel import Arrival, Channel, Handler, Inbox, of_action, of_request, send_copied
from ..transport.connection import Traffic
from ..transport.deadlines import Deadlines
from ..transport.handshake import Identity, dial
from .layers import StageLayers
from .optimizer import TimedTraining, TrainedSide
from .owner import Owner, RunRecord
from .telemetry import RecordedSide
from .trials import MeasuredSide, answer_probe


class Neighbors:
    """Who is upstream and downstream; the coordinator is, where no other stage is yet.

    Args:
        coordinator: The channel to the coordinator.
        dial: Opens a channel, not started yet, to another worker of the session.

    Attributes:
        upstream: The present channel to the stage before.
        downstream: The present channel to the stage behind.
        downstream_address: Where the latter listens; empty for the last stage.
    """

    def __init__(self, coordinator: Channel, dial: Callable[[str], Channel]) -> None:
        self.upstream = coordinator
        self.downstream = coordinator
        self.downstream_address = ""
        self._coordinator = coordinator
        self._dial = dial

    def check_same(self, address: str, stage_index: int) -> None:
        """Refuse another downstream neighbor than the one that this stage is linked with.

        Raises:
            ModelError: With both addresses.
        """
        is_linked = self.downstream is not self._coordinator
        if is_linked and address != self.downstream_address:
            raise ModelError(
                f"Stage {stage_index} is linked with {self.downstream_address} and should "
                f"become so with {address or 'nobody'}; layers move between the "
                "same workers in the same order."
            )

    def connect(self) -> Channel | None:
        """The channel to the downstream neighbor, not started yet; None where it is there already,
        as when layers have moved, or nobody is.

        Raises:
            WorkerUnreachable: If the neighbor does not answer or refuses.
        """
        if not self.downstream_address or self.downstream is not self._coordinator:
            return None
        self.downstream = self._dial(self.downstream_address)
        return self.downstream

    def let_go_upstream(self) -> None:
        """End the channel to the stage before."""
        channel, self.upstream = self.upstream, self._coordinator
        channel.close()

    def pass_on(self, content: Content, copies: Copies) -> None:
        """Send an activation downstream or gradients upstream.

        A neighbor that has said goodbye is told nothing more: it lost the coordinator, or was let
        go by it, so the coordinator knows.
        """
        message, _ = content
        channel = self.downstream if isinstance(message, m.Activation) else self.upstream
        try:
            send_copied(channel, content, copies)
        except LocalProtocolError:
            if not channel.has_ended:
                raise

    def stages(self, stage_index: int) -> dict[Channel, int]:
        """The channels by the stages behind them, for the stage of that number; the last stage has
        the coordinator's twice."""
        found = {self.downstream: stage_index + 1, self.upstream: stage_index - 1}
        return {**found, self._coordinator: 0}

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What has gone over each channel, the coordinator's too."""
        beside = {"upstream": self.upstream, "downstream": self.downstream}
        return {
            "coordinator": self._coordinator.traffic,
            **{k: c.traffic for k, c in beside.items() if c is not self._coordinator},
        }

    def close(self) -> None:
        """Say goodbye to everybody, the coordinator too."""
        for channel in {self.upstream, self.downstream, self._coordinator}:
            channel.close(m.Goodbye())


logger = logging.getLogger(__name__)

# Of an error's text and traceback each; more helps nobody.
_MOST_TEXT = 2**16


def _can_wait(content: Frame | HeteroError) -> bool:
    """Whether something that arrived may be left until the owner lets the worker go on."""
    at_once = (m.Failure, m.Goodbye, m.Paused, m.Resumed)
    return isinstance(content, Frame) and not isinstance(content.message, at_once)


class SessionOver(Exception):
    """Ends a session's loop."""


class StageSession:
    """Serves one coordinator. Everything happens in the thread that calls `run`.

    Args:
        name: The session's name, which its neighbors know.
        coordinator: The channel to the coordinator, not started yet.
        device: Where the stage computes.
        allowed: What its layers may be made of besides torch's and transformers' own.
        identity: What its downstream neighbor is shown.
        owner: Whose device it is.
        kept: What the worker holds of its last session, and will of this one.
    """

    def __init__(
        self,
        name: str,
        coordinator: Channel,
        device: torch.device,
        deadlines: Deadlines,
        allowed: Allowed,
        identity: Identity,
        owner: Owner | None = None,
        kept: KeptTensors | None = None,
    ) -> None:
        kept = kept or KeptTensors()
        self.name = name
        self._owner = owner or Owner()
        # What arrives while the owner wants the device, until then.
        self._held: deque[Arrival] = deque()
        self._is_paused = False
        self._began_seconds = time.monotonic()
        self._served, self._ended = "", "it failed"
        self._identity = identity
        self._coordinator = coordinator
        self._neighbors = Neighbors(coordinator, self._dial_neighbor)
        self._device = device
        self._copies = device_for(device).copies()
        self._deadlines = deadlines
        self._inbox: Inbox = SimpleQueue()
        self._layers = StageLayers(device, allowed, kept)
        self._runner = StageRunner(Stage(nn.ModuleDict(), device, 0))
        self._narrowing = Narrowing()
        self._constants = KeptConstants()
        self._measuring = MeasuredSide(
            coordinator, device, deadlines, allowed, self._dial_neighbor, self._owner, kept
        )
        self._recording = RecordedSide(coordinator, device, self._stages_beside)
        self._recorder = self._recording.recorder
        self._timed = TimedTraining(self._recorder)
        self._trained = TrainedSide(coordinator, self._runner.stage, self._layers, self._timed.take)
        self._handlers = self._handler_of_each()

    def _handler_of_each(self) -> dict[type, Handler]:
        """What carries out each kind of message."""
        return {
            **self._measuring.handlers,
            **self._recording.handlers,
            **self._trained.handlers,
            m.Paused: self._on_paused,
            m.Resumed: self._on_resumed,
            m.Deploy: self._on_deploy,
            m.LoadTensor: self._on_load_tensor,
            m.OfferTensor: self._on_offer_tensor,
            m.Launch: self._on_launch,
            m.BeginStep: self._on_begin_step,
            m.SetAttributes: self._on_set_attributes,
            m.Arguments: self._on_arguments,
            m.Activation: self._on_activation,
            m.Gradient: self._on_gradient,
            m.DropCaches: self._on_drop_caches,
            m.AbortStep: self._on_abort_step,
        }

    def attach_upstream(self, channel: Channel) -> None:
        """Take the channel that the upstream neighbor opened."""
        self._neighbors.upstream = channel
        self._start(channel)

    def wish(self, message: m.Paused | m.Resumed) -> None:
        """Tell the session what its owner wants; it does so after the micro-batch at hand."""
        self._inbox.put(Arrival(self._coordinator, Frame(message)))

    @property
    def record(self) -> RunRecord:
        """What it was, for its owner."""
        seconds = time.monotonic() - self._began_seconds
        peer, steps = self._coordinator.peer, self._runner.step
        return RunRecord(peer, self._served, steps, seconds, self._ended)

    def status(self) -> m.StageStatus:
        """What it does at this moment; any thread may ask."""
        layers, traffic = self._layers.numbered.keys(), self._neighbors.traffic
        about = self._stage_index, self._runner.step
        return self._recording.status(self.name, layers, *about, traffic)

    def run(self) -> None:
        """Serve until the coordinator says goodbye or is gone."""
        self._start(self._coordinator)
        try:
            while True:
                self._take_what_arrived()
                action = None if self._is_paused else self._runner.next_action()
                if action is not None:
                    self._guarded(self._perform, action)
                else:
                    self._take(self._next_arrival())
        except SessionOver as end:
            self._ended = str(end)
            logger.info("session with %s is over: %s", self._coordinator.peer, end)
        finally:
            self._neighbors.close()
            self._layers.retire()
            self._measuring.forget()

    def _next_arrival(self) -> Arrival:
        with self._recorder.span("wait"):
            return self._inbox.get()

    def _take_what_arrived(self) -> None:
        while not self._inbox.empty():
            self._take(self._inbox.get())

    def _take(self, arrival: Arrival) -> None:
        content, is_coordinator = arrival.content, arrival.channel is self._coordinator
        if self._is_paused and _can_wait(content):
            self._held.append(arrival)
        elif isinstance(content, HeteroError):
            self._on_end(arrival.channel, str(content))
        elif isinstance(content.message, m.Failure):
            self._on_end(arrival.channel, content.message.reason)
        elif isinstance(content.message, m.Goodbye):
            if is_coordinator:
                raise SessionOver("goodbye")
            self._on_goodbye_of_neighbor(arrival.channel)
        elif isinstance(content.message, m.Probe):
            self._guarded(answer_probe, arrival.channel, content.message)
        else:
            handler = self._handlers[type(content.message)]
            self._note_activity(of_request(content.message))
            with self._recording.taking(arrival, content.message):
                self._guarded(handler, content.message, content.tensors)

    def _note_activity(self, activity: str) -> None:
        self._coordinator.activity = activity or self._coordinator.activity

    def _on_end(self, channel: Channel, reason: str) -> None:
        """Without its coordinator a stage has nothing to do; a lost neighbor is reported."""
        if channel is self._coordinator:
            raise SessionOver(reason)
        lost = self._stages_beside().get(channel)
        if lost is None:
            return  # one that only measured the link, and is gone
        with contextlib.suppress(LocalProtocolError):
            self._coordinator.send(m.NeighborLost(lost, reason))

    def _on_goodbye_of_neighbor(self, channel: Channel) -> None:
        """Before there is a stage, a neighbor comes to measure the link and goes again."""
        if not self._layers.numbered and channel is self._neighbors.upstream:
            self._neighbors.let_go_upstream()

    def _guarded(self, act: Callable[..., None], *args: Any) -> None:
        """Run a piece of work; what it raises is the coordinator's to know."""
        try:
            act(*args)
        except SessionOver:
            raise
        except Exception as error:
            logger.warning("stage %d failed: %s", self._stage_index, error)
            self._runner.abort()
            reason = f"{type(error).__name__}: {error}"[:_MOST_TEXT]
            trace = traceback.format_exc()[-_MOST_TEXT:]
            in_optimizer_step = act == self._handlers[m.ApplyOptimizer]
            self._coordinator.send(m.Failure(reason, trace, in_optimizer_step))

    def _on_paused(self, message: m.Paused, _tensors: tuple[Tensor, ...]) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._coordinator.send(message)

    def _on_resumed(self, message: m.Resumed, _tensors: tuple[Tensor, ...]) -> None:
        if self._is_paused:
            self._is_paused = False
            self._coordinator.send(message)
            while self._held:
                self._take(self._held.popleft())

    def _stages_beside(self) -> dict[Channel, int]:
        return self._neighbors.stages(self._stage_index)

    @property
    def _stage_index(self) -> int:
        return self._runner.stage.stage_index

    def _on_deploy(self, message: m.Deploy, _tensors: tuple[Tensor, ...]) -> None:
        self._measuring.forget()
        self._neighbors.check_same(message.downstream_address, self._stage_index)
        self._owner.check_stage(message.parameters)
        layers, held = self._layers.build(message)
        self._neighbors.downstream_address = message.downstream_address
        dtype = None if message.dtype is None else DTYPES[message.dtype]
        if dtype is not None:
            multiply_in(layers, dtype)
        stage = Stage(
            layers=layers,
            device=self._device,
            stage_index=message.stage_index,
            recompute=message.recompute,
            seed=message.seed,
            dtype=dtype,
            compiled=CompiledLayers() if message.compile else None,
            state=LayerState(self._layers.numbered),
        )
        self._runner = StageRunner(stage)
        self._served = _shown(stage.stage_index, self._layers.numbered)
        self._narrowing = Narrowing(message.activation_dtype, message.gradient_dtype)
        self._trained.train(stage)
        self._coordinator.send(m.Built(held))

    def _on_load_tensor(self, message: m.LoadTensor, tensors: tuple[Tensor, ...]) -> None:
        self._layers.load(message, tensors)
        self._coordinator.send(m.Loaded(message.name))

    def _on_offer_tensor(self, message: m.OfferTensor, _tensors: tuple[Tensor, ...]) -> None:
        is_taken = self._layers.take_held(message)
        self._coordinator.send(m.OfferAnswered(message.name, is_taken))

    def _on_launch(self, _message: m.Launch, _tensors: tuple[Tensor, ...]) -> None:
        self._layers.check_complete()
        try:
            opened = self._neighbors.connect()
        except WorkerUnreachable as error:
            self._coordinator.send(m.NeighborLost(self._stage_index + 1, str(error)))
            return
        if opened is not None:
            self._start(opened)
        self._coordinator.send(m.Done())

    def _start(self, channel: Channel) -> None:
        channel.start(self._inbox, self._copies.receive_pool())

    def _dial_neighbor(self, text: str) -> Channel:
        address, rules = Address.parse(text), upstream_session()
        channel, _ = dial(address, rules, "neighbor", self.name, self._deadlines, self._identity)
        return channel

    def _on_begin_step(self, message: m.BeginStep, _tensors: tuple[Tensor, ...]) -> None:
        self._copies.keep_for(message.in_flight)
        self._recorder.begin_step()
        about = message.step, message.in_flight, message.accumulate, message.dropout_step
        self._runner.begin(*about)

    def _on_set_attributes(self, message: m.SetAttributes, _tensors: tuple[Tensor, ...]) -> None:
        self._layers.set_attributes(message)
        if self._runner.stage.state is not None:
            self._runner.stage.state.note_attributes()

    def _on_arguments(self, message: m.Arguments, tensors: tuple[Tensor, ...]) -> None:
        key = Key(message.microbatch, message.visit)
        read = partial(decode_arguments, message, constants=self._constants)
        self._runner.take_arguments(key, self._copies.to_device(tensors, read))

    def _on_activation(self, message: m.Activation, tensors: tuple[Tensor, ...]) -> None:
        embedding = self._layers.numbered.get(EMBEDDING_LAYER)
        if embedding is not None and tensors:
            check_token_ids(embedding, tensors[0])
        key = Key(message.microbatch, message.visit)
        activation = self._copies.to_device(tensors, partial(decode_activation, message))
        self._runner.take_activation(message.step, key, activation)

    def _on_gradient(self, message: m.Gradient, tensors: tuple[Tensor, ...]) -> None:
        key = Key(message.microbatch, message.visit)
        gradients = self._copies.to_device(tensors, partial(decode_gradients, message))
        self._runner.take_gradients(message.step, key, gradients)

    def _on_drop_caches(self, message: m.DropCaches, _tensors: tuple[Tensor, ...]) -> None:
        self._runner.stage.caches.drop(message.numbers)

    def _on_abort_step(self, _message: m.AbortStep, _tensors: tuple[Tensor, ...]) -> None:
        self._runner.abort()
        self._timed.take(0)

    def _perform(self, action: Action) -> None:
        self._note_activity(of_action(action, self._runner.step))
        if not self._runner.is_training(action):
            result = self._runner.run(action)
        else:
            result = self._timed.run(self._runner, action)
        self._tell_of_buffers()
        self._route(result)

    def _tell_of_buffers(self) -> None:
        state = self._runner.stage.state
        for updates in () if state is None else state.take_updates():
            self._coordinator.send(m.BuffersUpdated(list(updates.names), updates.is_again))

    def _route(self, result: Result) -> None:
        key, content = result.action.key, result.content
        with self._recorder.span("pack", key, type(content).__name__):
            said = encode_result(self._runner.step, key, content, self._narrowing)
            self._neighbors.pass_on(said, self._copies)


def _shown(stage_index: int, numbered: Mapping[int, nn.Module]) -> str:
    """What a stage serves, for people."""
    first, last = min(numbered), max(numbered)
    kind = type(numbered[last]).__name__
    with_embedding = "the input embedding and " if first == EMBEDDING_LAYER else ""
    return f"stage {stage_index}, {with_embedding}layers {max(first, 0)} to {last} ({kind})"
