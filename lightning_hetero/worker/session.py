"""A worker's session: one coordinator's stage, from Deploy to Goodbye.

`StageSession` runs the loop and composes parts with the names that the coordinator's parts have:

    neighbors   the channels to the stages beside this one
    layers      builds layers, takes their tensors, sends them
    training    steps, clips, freezes and averages
    telemetry   times and records the stage's actions
    trials      measures layers, optimizers and links before anything is deployed

Each part has a table `handlers`: the function that carries out each kind of its messages.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from torch import Tensor, nn

from ..devices.copies import Copies
from ..devices.device import device_for
from ..errors import ChannelError, HeteroError, LocalProtocolError, ModelError, WorkerUnreachable
from ..model.four_bit import multiply_in
from ..model.layers import EMBEDDING_LAYER, check_token_ids, describe_layers
from ..pipeline.boundary import Activation, Gradients
from ..pipeline.codec import (
    decode_activation,
    decode_arguments,
    decode_gradients,
    encode_activation,
    encode_gradients,
)
from ..pipeline.rule import Action, Key
from ..pipeline.runner import StageRunner
from ..pipeline.stage import CompiledLayers, LayerState, Stage
from ..plan import Narrowing
from ..protocol import messages as m
from ..protocol.frames import Content, Frame
from ..protocol.tensors import DTYPES
from ..protocol.values import KeptConstants
from ..transport.address import Address
from ..transport.channel import Arrival, Channel, Handler, Inbox, of_action, send_copied
from ..transport.connection import Traffic
from ..transport.handshake import dial
from .layers import StageLayers
from .optimizer_parts import TrainedSide
from .owner import Host, RunRecord
from .telemetry import RecordedSide
from .trials import MeasuredSide, answer_probe

logger = logging.getLogger(__name__)

# The most of an error's text, and of its traceback, that is sent.
_MOST_TEXT = 2**16
# The names of a run's sessions begin alike. A process that knows a whole name could join.
_MOST_OF_NAME = 8


class Neighbors:
    """The channels to the neighboring stages; at either end, the channel to the coordinator.

    Args:
        coordinator: The channel to the coordinator.
        dial: Opens a channel, not started yet, to the worker at an address that serves the session
            of that name.

    Attributes:
        upstream: The present channel to the stage before this one.
        downstream: The present channel to the stage behind this one.
        downstream_address: Where the stage behind listens; empty for the last stage.
    """

    def __init__(self, coordinator: Channel, dial: Callable[[str, str], Channel]) -> None:
        self.upstream = coordinator
        self.downstream = coordinator
        self.downstream_address = ""
        self._downstream_session = ""
        self._is_relayed = False
        self._coordinator = coordinator
        self._dial = dial

    def expect(self, address: str, session: str) -> None:
        """Note the downstream neighbor, which `connect` will dial."""
        self.downstream_address, self._downstream_session = address, session

    def check_same(self, address: str, stage_index: int) -> None:
        """Refuse another downstream neighbor than the one that this stage is linked with.

        Raises:
            ModelError: With both addresses.
        """
        is_linked = self.downstream is not self._coordinator or self._is_relayed
        if is_linked and address != self.downstream_address:
            raise ModelError(
                f"Stage {stage_index} is linked with {self.downstream_address}, and the new plan "
                f"links it with {address or 'nobody'}; layers move between the same workers in "
                "the same order."
            )

    def connect(self) -> Channel | None:
        """Open the channel to the downstream neighbor, which the caller must start; None if it is
        open already, as after layers have moved, or if this is the last stage.

        Raises:
            WorkerUnreachable: If the neighbor does not answer or refuses. From then on the
                coordinator stands for it.
        """
        is_open = self.downstream is not self._coordinator or self._is_relayed
        if not self.downstream_address or is_open:
            return None
        try:
            self.downstream = self._dial(self.downstream_address, self._downstream_session)
        except WorkerUnreachable:
            self._is_relayed = True
            raise
        return self.downstream

    def let_go_upstream(self) -> None:
        """End the channel to the stage before."""
        channel, self.upstream = self.upstream, self._coordinator
        channel.close()

    def pass_on(self, channel: Channel, content: Content, copies: Copies) -> None:
        """Send an activation downstream, or gradients upstream.

        A neighbor that has said goodbye receives nothing more: it lost the coordinator, or the
        coordinator freed it, so the coordinator knows.
        """
        try:
            send_copied(channel, content, copies)
        except LocalProtocolError:
            if not channel.has_ended:
                raise

    def stages(self, stage_index: int) -> dict[Channel, int]:
        """The number of the stage at the other end of each channel; 0 for the coordinator.

        Args:
            stage_index: The number of this stage.
        """
        found = {self.downstream: stage_index + 1, self.upstream: stage_index - 1}
        return {**found, self._coordinator: 0}

    @property
    def traffic(self) -> dict[str, Traffic]:
        """The bytes that have gone over each channel, the coordinator's too."""
        found = {"coordinator": self._coordinator.traffic}
        for name, channel in (("upstream", self.upstream), ("downstream", self.downstream)):
            if channel is not self._coordinator:
                found[name] = channel.traffic
        return found

    def close(self, last_word: m.Message) -> None:
        """Say the last word to the coordinator, and goodbye to the neighbors."""
        for channel in {self.upstream, self.downstream} - {self._coordinator}:
            channel.close(m.Goodbye())
        self._coordinator.close(last_word)


# A paused worker takes these messages at once; it holds all others until it is resumed.
_NEVER_HELD = (m.Failure, m.Goodbye, m.Paused, m.Resumed)


_LAST_WORDS = (m.Failure, m.Goodbye)


class SessionOver(Exception):
    """Ends a session's loop."""


def _failure(error: BaseException, in_optimizer_step: bool = False) -> m.Failure:
    """What the coordinator is told of an error."""
    reason = f"{type(error).__name__}: {error}"[:_MOST_TEXT]
    trace = "".join(traceback.format_exception(error))[-_MOST_TEXT:]
    return m.Failure(reason, trace, in_optimizer_step)


class StageSession:
    """Serves one coordinator. Everything happens in the thread that calls `run`.

    Args:
        name: The session's name, which no other session has. A neighbor learns it from the
            coordinator.
        coordinator: The channel to the coordinator, not started yet.
        host: The worker that serves the session.
    """

    def __init__(self, name: str, coordinator: Channel, host: Host) -> None:
        self.name = name
        self._host = host
        self._budget = host.owner.budget()
        # The arrivals that wait while the owner pauses the worker; None while it is not paused.
        self._held: deque[Arrival] | None = None
        self._began_seconds = time.monotonic()
        self._served, self._ended = "", "it failed"
        self._coordinator = coordinator
        self._neighbors = Neighbors(coordinator, self._dial_neighbor)
        self._copies = device_for(host.device).copies()
        self._inbox: Inbox = SimpleQueue()
        self._runner = StageRunner(Stage(nn.ModuleDict(), host.device, 0))
        self._narrowing = Narrowing()
        self._constants = KeptConstants()
        self._layers = StageLayers(coordinator, host)
        self._trials = MeasuredSide(coordinator, host, self._dial_neighbor)
        self._telemetry = RecordedSide(coordinator, host.device, self._stages_beside)
        self._recorder = self._telemetry.recorder
        take_timings = self._telemetry.take_timings
        self._training = TrainedSide(coordinator, self._runner.stage, self._layers, take_timings)
        self._handlers = self._handler_of_each()

    def _handler_of_each(self) -> dict[type, Handler]:
        """What carries out each kind of message."""
        return {
            **self._trials.handlers,
            **self._telemetry.handlers,
            **self._training.handlers,
            **self._layers.handlers,
            m.Paused: self._on_paused,
            m.Resumed: self._on_resumed,
            m.Deploy: self._on_deploy,
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
        """Take the channel that the upstream neighbor opened.

        Raises:
            ChannelError: If this process cannot serve the channel; the coordinator is told so too.
        """
        try:
            self._start(channel)
        except ChannelError as error:
            with contextlib.suppress(HeteroError):
                self._coordinator.send(m.Failure(str(error)))
            raise
        self._neighbors.upstream = channel

    def wish(self, message: m.Paused | m.Resumed) -> None:
        """Tell the session that its owner pauses or resumes it, after the present micro-batch."""
        self._inbox.put(Arrival(self._coordinator, Frame(message)))

    @property
    def record(self) -> RunRecord:
        """The record of the session, for the owner."""
        seconds = time.monotonic() - self._began_seconds
        peer, steps = self._coordinator.peer, self._runner.step
        return RunRecord(peer, self._served, steps, seconds, self._ended)

    def status(self) -> m.StageStatus:
        """The stage's present work; any thread may ask."""
        layers = self._layers.numbered.keys()
        traffic = self._neighbors.traffic.items()
        return m.StageStatus(
            run=self.name[:_MOST_OF_NAME],
            coordinator=self._coordinator.peer,
            stage_index=self._stage_index,
            first_layer=max(0, min(layers, default=0)),  # the embedding is no decoder layer
            end_layer=max(layers, default=-1) + 1,
            step=self._runner.step,
            training_seconds=self._recorder.training_seconds,
            busy_seconds=self._recorder.busy_seconds,
            links=[m.LinkStatus(name, t.sent_bytes, t.received_bytes) for name, t in traffic],
            is_measuring=self._trials.is_measuring,
        )

    def run(self) -> None:
        """Serve until the coordinator says goodbye or is gone."""
        last_word: m.Message = m.Goodbye()
        try:
            self._start(self._coordinator)
            while True:
                while not self._inbox.empty():
                    self._take(self._inbox.get())
                action = self._runner.next_action() if self._held is None else None
                if action is not None:
                    self._perform(action)
                else:
                    with self._recorder.span("wait"):
                        arrival = self._inbox.get()
                    self._take(arrival)
        except SessionOver as end:
            self._ended = str(end)
            logger.info("session with %s is over: %s", self._coordinator.peer, end)
        except BaseException as error:
            self._ended = f"{type(error).__name__}: {error}"
            last_word = _failure(error)
            raise
        finally:
            with contextlib.ExitStack() as last_steps:  # each one, whatever another one raises
                last_steps.callback(self._trials.forget)
                last_steps.callback(self._layers.retire)
                last_steps.callback(self._neighbors.close, last_word)

    def _take(self, arrival: Arrival) -> None:
        """Carry out what has arrived, or hold it while the owner pauses the worker.

        The end of the conversation comes first, whatever stands before it in the queue.
        """
        while self._coordinator.has_ended and not self._is_end(arrival):
            arrival = self._inbox.get()
        content = arrival.content
        if isinstance(content, HeteroError):
            self._on_end(arrival.channel, str(content))
            return
        message = content.message
        if self._held is not None and type(message) not in _NEVER_HELD:
            self._held.append(arrival)
        elif (handler := self._handlers.get(type(message))) is not None:
            self._carry_out(handler, arrival, content)
        elif isinstance(message, m.Failure):
            self._on_end(arrival.channel, message.reason)
        elif isinstance(message, m.Probe):
            self._carry_out(partial(answer_probe, arrival.channel), arrival, content)
        elif arrival.channel is self._coordinator:
            raise SessionOver("goodbye")
        else:
            self._on_goodbye_of_neighbor(arrival.channel)

    def _is_end(self, arrival: Arrival) -> bool:
        """Whether this is how the coordinator has ended the conversation."""
        content = arrival.content
        ends = isinstance(content, HeteroError) or isinstance(content.message, _LAST_WORDS)
        return ends and arrival.channel is self._coordinator

    def _carry_out(self, handler: Handler, arrival: Arrival, frame: Frame) -> None:
        message = frame.message
        self._coordinator.activity = message.requested_activity or self._coordinator.activity
        try:
            with self._telemetry.taking(arrival, message):
                handler(message, frame.tensors)
        except SessionOver:
            raise
        # Also SystemExit: a layer's code must not end the session without a word.
        except BaseException as error:
            self._report(error, in_optimizer_step=isinstance(message, m.ApplyOptimizer))

    def _perform(self, action: Action) -> None:
        """Run an action and send its result on."""
        self._coordinator.activity = of_action(action, self._runner.step)
        try:
            if self._runner.is_training(action):
                content = self._telemetry.run_training(self._runner, action)
            else:
                content = self._runner.run(action)
            self._tell_of_buffers()
            self._route(action.key, content)
        except BaseException as error:
            self._report(error)

    def _report(self, error: BaseException, in_optimizer_step: bool = False) -> None:
        """Tell the coordinator that a piece of work has raised, and forget the step."""
        logger.warning("stage %d failed: %s", self._stage_index, error)
        self._runner.abort()
        self._coordinator.send(_failure(error, in_optimizer_step))

    def _on_end(self, channel: Channel, reason: str) -> None:
        """End the session with its coordinator; report a lost neighbor."""
        if channel is self._coordinator:
            raise SessionOver(reason)
        lost = self._stages_beside().get(channel)
        if lost is None:
            return  # a neighbor that only measured the link
        with contextlib.suppress(LocalProtocolError):
            self._coordinator.send(m.NeighborLost(lost, reason))

    def _on_goodbye_of_neighbor(self, channel: Channel) -> None:
        """Before there is a stage, a neighbor comes to measure the link and goes again."""
        if not self._layers.numbered and channel is self._neighbors.upstream:
            self._neighbors.let_go_upstream()

    def _on_paused(self, message: m.Paused, _tensors: tuple[Tensor, ...]) -> None:
        if self._held is None:
            self._held = deque()
            self._coordinator.send(message)

    def _on_resumed(self, message: m.Resumed, _tensors: tuple[Tensor, ...]) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            self._coordinator.send(message)
            while held:
                self._take(held.popleft())

    def _stages_beside(self) -> dict[Channel, int]:
        return self._neighbors.stages(self._stage_index)

    @property
    def _stage_index(self) -> int:
        return self._runner.stage.stage_index

    def _on_deploy(self, message: m.Deploy, _tensors: tuple[Tensor, ...]) -> None:
        self._trials.forget()
        self._neighbors.check_same(message.downstream_address, self._stage_index)
        self._host.owner.check_stage(message.parameters)
        if self._budget is not None:
            self._budget.reserve(message.parameters)
        layers, held = self._layers.build(message)
        self._neighbors.expect(message.downstream_address, message.downstream_session)
        dtype = None if message.dtype is None else DTYPES[message.dtype]
        if dtype is not None:
            multiply_in(layers, dtype)
        stage = Stage(
            layers=layers,
            device=self._host.device,
            stage_index=message.stage_index,
            recompute=message.recompute,
            seed=message.seed,
            dtype=dtype,
            compiled=CompiledLayers() if message.compile else None,
            state=LayerState(self._layers.numbered),
        )
        self._runner = StageRunner(stage)
        numbered = self._layers.numbered
        kind = type(numbered[max(numbered)]).__name__
        self._served = f"stage {message.stage_index}, {describe_layers(numbered)} ({kind})"
        self._narrowing = Narrowing(message.activation_dtype, message.gradient_dtype)
        self._training.train(stage)
        self._coordinator.send(m.Built(held))

    def _on_launch(self, _message: m.Launch, _tensors: tuple[Tensor, ...]) -> None:
        self._layers.check_complete()
        try:
            opened = self._neighbors.connect()
        except WorkerUnreachable as error:
            self._coordinator.send(m.NeighborUnreachable(str(error)[:_MOST_TEXT]))
            opened = None
        if opened is not None:
            self._start(opened)
        self._coordinator.send(m.Done())

    def _start(self, channel: Channel) -> None:
        pool = self._copies.receive_pool()
        if self._budget is not None:
            pool.count_with(self._budget.allocate)
        channel.start(self._inbox, pool)

    def _dial_neighbor(self, text: str, session: str) -> Channel:
        address, host = Address.parse(text), self._host
        channel, _ = dial(address, "neighbor", session, host.deadlines, host.identity)
        return channel

    def _on_begin_step(self, message: m.BeginStep, _tensors: tuple[Tensor, ...]) -> None:
        self._copies.keep_for(message.in_flight)
        self._recorder.begin_step()
        accumulate, dropout_step = message.accumulate, message.dropout_step
        self._runner.begin(message.step, message.in_flight, accumulate, dropout_step)

    def _on_set_attributes(self, message: m.SetAttributes, _tensors: tuple[Tensor, ...]) -> None:
        self._layers.set_attributes(message)
        if self._runner.stage.state is not None:
            self._runner.stage.state.note_attributes()

    def _on_arguments(self, message: m.Arguments, tensors: tuple[Tensor, ...]) -> None:
        read = partial(decode_arguments, message, constants=self._constants)
        self._runner.take_arguments(message.key, self._copies.to_device(tensors, read))

    def _on_activation(self, message: m.Activation, tensors: tuple[Tensor, ...]) -> None:
        embedding = self._layers.numbered.get(EMBEDDING_LAYER)
        if embedding is not None and tensors:
            check_token_ids(embedding, tensors[0])
        activation = self._copies.to_device(tensors, partial(decode_activation, message))
        self._runner.take_activation(message.step, message.key, activation)

    def _on_gradient(self, message: m.Gradient, tensors: tuple[Tensor, ...]) -> None:
        gradients = self._copies.to_device(tensors, partial(decode_gradients, message))
        self._runner.take_gradients(message.step, message.key, gradients)

    def _on_drop_caches(self, message: m.DropCaches, _tensors: tuple[Tensor, ...]) -> None:
        self._runner.stage.caches.drop(message.numbers)

    def _on_abort_step(self, _message: m.AbortStep, _tensors: tuple[Tensor, ...]) -> None:
        self._runner.abort()
        self._telemetry.take_timings(0)

    def _tell_of_buffers(self) -> None:
        state = self._runner.stage.state
        for updates in () if state is None else state.take_updates():
            self._coordinator.send(m.BuffersUpdated(list(updates.names), updates.is_again))

    def _route(self, key: Key, content: Activation | Gradients) -> None:
        """Send an activation downstream, or gradients upstream."""
        step = self._runner.step
        with self._recorder.span("pack", key, type(content).__name__):
            if isinstance(content, Activation):
                channel = self._neighbors.downstream
                said = encode_activation(step, key, content, self._narrowing.activation_dtype)
            else:
                channel = self._neighbors.upstream
                said = encode_gradients(step, key, content, self._narrowing.gradient_dtype)
            self._neighbors.pass_on(channel, said, self._copies)
