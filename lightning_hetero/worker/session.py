"""A worker's session: one coordinator's stages, from Deploy to Goodbye.

`StageSession` runs the loop and composes parts with the names that the coordinator's parts have:

    neighbors   the channels to the other workers
    layers      builds layers, takes their tensors, sends them
    optimizers  steps, clips, freezes and averages
    timing      times the actions

and others that `wings` makes:

    replicas    adds up gradients with the workers that hold the same stages
    moves       passes tensors on to other workers as layers move, and takes theirs
    snapshots   tells the state for a worker that takes this one's place, or takes it
    takeover    makes room for a second session beside this one
    telemetry   records the actions
    trials      measures layers, optimizers and links before anything is deployed

Each part has a table `handlers`: the function that carries out each kind of its messages.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import traceback
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..devices.device import device_for, is_out_of_memory
from ..devices.thread_device import heed_num_threads
from ..errors import (
    ChannelError,
    HeteroError,
    LocalProtocolError,
    ModelError,
    WorkerUnreachable,
)
from ..model.layers import (
    EMBEDDING_LAYER,
    check_token_ids,
    describe_layers,
    is_end,
    last_decoder_layer,
)
from ..model.stored import multiply_in
from ..pipeline.boundary import Activation, Gradients
from ..pipeline.codec import (
    decode_activation,
    decode_arguments,
    decode_gradients,
    encode_activation,
    encode_gradients,
)
from ..pipeline.layer_runs import CompiledLayers
from ..pipeline.rule import Action
from ..pipeline.runner import Runner
from ..pipeline.stage import LayerState, Stage
from ..pipeline.stage_layers import numbered_layers
from ..plan import Narrowing
from ..protocol import messages as m
from ..protocol.bases import Waits
from ..protocol.frames import Frame
from ..protocol.tensor_bytes import DTYPES
from ..protocol.values import KeptConstants
from ..transport.address import Address
from ..transport.channel import Arrival, Channel, Handler, Inbox, of_action
from ..transport.handshake import dial
from .layers import SessionLayers
from .neighbors import SessionNeighbors
from .optimizers import SessionOptimizers
from .owner import Host, ServedRun
from .parts import SessionSite, no_part
from .timing import SessionTiming
from .wings import holder_of, session_parts, streamed_weights

if TYPE_CHECKING:
    from ..transport.line import Line

logger = logging.getLogger(__name__)

# The most of an error's text, and of its traceback, that is sent.
_MOST_TEXT = 2**16
_IF_MEMORY_IS_SHORT = (
    " (to need less memory: use more `micro_batches`, as each is smaller; a smaller `in_flight`; "
    "`recompute: true` or `recompute: layers` for this stage; or fewer layers on this worker)"
)
# The names of a run's sessions begin alike. A process that knows a whole name could join.
_MOST_OF_NAME = 8


@dataclass(frozen=True)
class _Repetition:
    """From which step on a session repeats a lost worker's work, and from when until when."""

    first_step: int
    start_seconds: float
    end_seconds: float | None = None

    @property
    def status(self) -> m.Repetition:
        """For who looks at the worker."""
        end_seconds = time.monotonic() if self.end_seconds is None else self.end_seconds
        seconds = end_seconds - self.start_seconds
        return m.Repetition(self.first_step, seconds, self.end_seconds is not None)


class SessionOver(Exception):
    """Ends a session's loop."""


def _failure(error: BaseException, message: m.Message | None = None, where: str = "") -> m.Failure:
    """The report of an error to the coordinator, perhaps of an error in a message."""
    after = where + (_IF_MEMORY_IS_SHORT if is_out_of_memory(error) else "")
    reason = f"{type(error).__name__}: {error}"[: _MOST_TEXT - len(after)] + after
    trace = "".join(traceback.format_exception(error))[-_MOST_TEXT:]
    in_optimizer_step = isinstance(message, m.ApplyOptimizer)
    return m.Failure(reason, trace, in_optimizer_step, request=message.request if message else 0)


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
        # Requests that wait for forwards and backwards, and what has come behind them.
        self._awaiting: deque[tuple[Arrival, Frame]] = deque()
        self._began_seconds = time.monotonic()
        self._served, self._ended = "", "it failed"
        # What it repeats in the place of a lost worker; any thread may read it.
        self._repetition: _Repetition | None = None
        # Whether each action is reported as it begins: it may end this process as it ended others.
        self._reports_actions = False
        self._coordinator = coordinator
        coordinator.forward_by(self._let_neighbors_go)
        self._neighbors = SessionNeighbors(coordinator, self._dial_neighbor)
        self._copies = device_for(host.device).copies()
        self._inbox: Inbox = SimpleQueue()
        self._runner = Runner([])
        self._narrowings: dict[int, Narrowing] = {}
        self._constants = KeptConstants()
        self._layers = SessionLayers(coordinator, host, streamed_weights)
        self._timing = SessionTiming(host.device, self._neighbors)
        self._recorder = self._timing.recorder
        self._replicas = holder_of(self._layers, self._copies, self._neighbors)
        self._optimizers = SessionOptimizers(
            coordinator,
            self._layers,
            self._timing.take_timings,
            lambda: self._runner.dropped,
            self._replicas.is_owned,
        )
        site = SessionSite(
            coordinator,
            host,
            self._budget,
            self._recorder,
            self._layers,
            self._optimizers,
            self._replicas,
            self._neighbors,
            self._dial_neighbor,
        )
        self._parts = session_parts(site)
        self._handlers = self._handler_of_each()
        self._answers = {kind: answer for p in self._parts for kind, answer in p.answers.items()}

    def _handler_of_each(self) -> dict[type, Handler]:
        """The handler of each kind of message."""
        return {
            **{kind: handler for p in self._parts for kind, handler in p.handlers.items()},
            **self._optimizers.handlers,
            **self._layers.handlers,
            **self._replicas.handlers,
            m.ReplaceNeighbor: self._on_replace_neighbor,
            m.Replay: self._on_replay,
            m.Wait: self._on_wait,
            m.Paused: self._on_paused,
            m.Resumed: self._on_resumed,
            m.Leaving: self._on_leaving,
            m.Deploy: self._on_deploy,
            m.Launch: self._on_launch,
            m.BeginStep: self._on_begin_step,
            m.SetAttributes: self._on_set_attributes,
            m.Arguments: self._on_arguments,
            m.Activation: self._on_activation,
            m.Gradient: self._on_gradient,
            m.DropCaches: self._on_drop_caches,
            m.AbortStep: self._on_abort_step,
            m.ApplyOptimizer: self._on_apply_optimizer,
            m.ReduceGradients: self._on_reduce_gradients,
        }

    def attach_upstream(self, channel: Channel, member: int) -> None:
        """Know the channel that another worker, the one with this number, has opened."""
        self._neighbors.attach(channel, member)

    def start_upstream(self, channel: Channel) -> None:
        """Start a channel that is attached.

        Raises:
            ChannelError: If this process cannot serve the channel; the coordinator is told so too.
        """
        try:
            self._start(channel)
        except ChannelError as error:
            with contextlib.suppress(HeteroError):
                self._coordinator.send(m.Failure(str(error)))
            raise

    def wish(self, message: m.Paused | m.Resumed | m.Leaving) -> None:
        """Tell the session what its owner wants, after the present micro-batch."""
        self._inbox.put(Arrival(self._coordinator, Frame(message)))

    @property
    def record(self) -> ServedRun:
        """The record of the session, for the owner."""
        seconds = time.monotonic() - self._began_seconds
        peer, steps = self._coordinator.peer, self._runner.step
        return ServedRun(peer, self._served, steps, seconds, self._ended)

    def line_with(self, secret: str) -> Line | None:
        """The line of this session that has the secret; any thread may ask."""
        for channel in (self._coordinator, *self._neighbors.upstream):
            lingering = channel.line.lingering
            if lingering is not None and lingering.is_secret(secret):
                return channel.line
        return None

    @property
    def waits_seconds(self) -> float:
        """How long the session waits for a coordinator whose connection broke; 0 if none did."""
        lingering = self._coordinator.line.lingering
        return lingering.seconds if lingering is not None and self._coordinator.is_away else 0.0

    @property
    def has_lost_coordinator(self) -> bool:
        """Whether the conversation with the coordinator is over; the session is about to end."""
        return self._coordinator.is_over

    def give_up_coordinator(self, reason: str) -> None:
        """End the session if it waits for a coordinator whose connection broke; any thread may
        call it."""
        self._coordinator.line.give_up(reason)

    def _let_neighbors_go(self, frame: Frame) -> bool:
        """Wait for no broken connection when the coordinator says goodbye.

        Called in its channel's reading thread, as the thread that computes may wait for a neighbor.
        """
        if isinstance(frame.message, m.Goodbye):
            self._neighbors.make_final()
        return False

    def status(self) -> m.StageStatus:
        """The worker's present work; any thread may ask."""
        traffic = self._neighbors.traffic.items()
        return m.StageStatus(
            run=self.name[:_MOST_OF_NAME],
            coordinator=self._coordinator.peer,
            stages=[_range_of(stage) for stage in self._runner.stages],
            step=self._runner.step,
            training_seconds=self._recorder.training_seconds,
            busy_seconds=self._recorder.busy_seconds,
            links=[m.LinkStatus(name, t.sent_bytes, t.received_bytes) for name, t in traffic],
            is_measuring=any(part.is_measuring for part in self._parts),
            repetition=None if self._repetition is None else self._repetition.status,
        )

    def run(self) -> None:
        """Serve until the coordinator says goodbye or is gone."""
        last_word: m.Message = m.Goodbye()
        try:
            device = device_for(self._host.device)
            device.wake()
            device.make_current()
            heed_num_threads()
            self._start(self._coordinator)
            while True:
                while not self._inbox.empty():
                    self._take(self._inbox.get())
                action = self._next_action() if self._held is None else None
                if action is not None:
                    self._perform(action)
                    self._carry_out_due()
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
                last_steps.callback(self._copies.close)
                for part in self._parts:
                    last_steps.callback(part.close)
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
        if self._held is not None and message.is_held:
            self._held.append(arrival)
        elif type(message) in self._handlers:
            if self._has_to_wait(message):
                self._awaiting.append((arrival, content))
            else:
                self._carry_out(self._handlers[type(message)], arrival, content)
            self._carry_out_due()
        elif isinstance(message, m.Failure):
            self._on_end(arrival.channel, message.reason)
        elif type(message) in self._answers:
            answer = partial(self._answers[type(message)], arrival.channel)
            self._carry_out(answer, arrival, content)
        elif not isinstance(message, m.Goodbye):
            self._report(no_part(type(message).__name__), message)
        elif arrival.channel is self._coordinator:
            raise SessionOver("goodbye")
        else:
            self._on_goodbye_of_neighbor(arrival.channel)

    def _has_to_wait(self, message: m.Message) -> bool:
        """Whether a message comes after forwards and backwards still to run, or after another
        waiting message.

        Messages needed by forwards and backwards never wait. Arguments do, so later forwards do not
        overtake a request.
        """
        if message.waits is Waits.FOR_NOTHING:
            return False
        is_behind = bool(self._awaiting) or self._waits_for_replicas(message)
        return is_behind or isinstance(message, m.StampedRequest)

    def _waits_for_replicas(self, message: m.Message) -> bool:
        """Whether a message comes after an exchange on its way."""
        passes = self._replicas.is_adding_up and message.waits is Waits.BESIDE_SUMS
        return self._replicas.is_waiting and not passes

    def _next_action(self) -> Action | None:
        """The action that the rule chooses; None if there is none that may run."""
        return self._runner.next_action(self._most_backwards())

    def _most_backwards(self) -> float:
        """The most backwards that may run in this step before the next request is carried out.

        The coordinator has waited for the answer to some requests, such as one to drop gradients,
        before it sent new ones. While a lost worker is repeated, a neighbor sends at once what it
        has kept of these.

        Nothing stands still here. The coordinator sends all that is repeated, and a `Wait` that
        ends it, before it waits for any worker again; so whether such a request comes is known
        without a backward of this worker. The request itself comes behind as many backwards as the
        coordinator had got back by then, and these came behind no gradients that were sent later.
        """
        if not self._replicas.is_repeating:
            return math.inf
        for _, frame in self._awaiting:
            message = frame.message
            if isinstance(message, m.StampedRequest) and message.is_exact:
                return message.backwards
            if message.begins_step or (isinstance(message, m.Wait) and message.is_end):
                return math.inf
        return 0.0  # such a request may still come

    def _carry_out_due(self) -> None:
        """Carry out the requests for which all forwards and backwards before them have run."""
        while self._awaiting:
            arrival, frame = self._awaiting[0]
            message = frame.message
            if self._waits_for_replicas(message):
                return
            if isinstance(message, m.StampedRequest):
                stamp = message.forwards, message.backwards, message.is_exact
                try:
                    if not self._runner.has_done(*stamp):
                        return
                except ModelError as error:
                    self._awaiting.popleft()
                    self._report(error, message)
                    continue
            self._awaiting.popleft()
            self._carry_out(self._handlers[type(message)], arrival, frame)

    def _is_end(self, arrival: Arrival) -> bool:
        """Whether this is how the coordinator has ended the conversation."""
        content = arrival.content
        last_word = content if isinstance(content, HeteroError) else content.message
        ends = isinstance(last_word, (HeteroError, m.Failure, m.Goodbye))
        return ends and arrival.channel is self._coordinator

    def _carry_out(self, handler: Handler, arrival: Arrival, frame: Frame) -> None:
        message = frame.message
        if self._neighbors.is_former(arrival.channel):
            return
        self._note_activity(message.requested_activity or self._coordinator.activity)
        try:
            if isinstance(message, (m.Activation, m.Gradient)):
                if self._runner.is_late(message.step):
                    return
                if not self._neighbors.is_new(message, arrival.channel):
                    return
                self._neighbors.check_way(message, arrival.channel)
            if isinstance(message, m.ReplicaTensors):
                self._neighbors.check_source(message.source, arrival.channel)
            with self._timing.taking(arrival, message):
                handler(message, frame.tensors)
        except SessionOver:
            raise
        # Also SystemExit: a layer's code must not end the session without a word.
        except BaseException as error:
            self._report(error, message)

    def _perform(self, action: Action) -> None:
        """Run an action and send its result on."""
        self._note_activity(of_action(action, self._runner.step))
        try:
            if action.kind == "B":
                self._replicas.note_backward()
            with self._sending_early(action):
                if self._runner.is_training(action):
                    content = self._timing.run_training(self._runner, action)
                else:
                    content = self._runner.run(action)
            self._tell_of_buffers()
            self._route(action, content)
        except BaseException as error:
            several = len(self._runner.stages) > 1
            self._report(error, where=f" (in stage {action.stage_index})" if several else "")

    def _note_activity(self, activity: str) -> None:
        self._coordinator.note_activity(activity, at_once=self._reports_actions)

    def _sending_early(self, action: Action) -> AbstractContextManager[None]:
        """Inside, gradients leave for their owners, if this is the last backward before that."""
        message = self._awaiting[0][1].message if self._awaiting else None
        if action.kind != "B" or not isinstance(message, m.ReduceGradients):
            return nullcontext()
        is_last = self._runner.has_done(message.forwards, message.backwards - 1, is_exact=False)
        return self._replicas.sending_early(message.round) if is_last else nullcontext()

    def _report(
        self, error: BaseException, message: m.Message | None = None, where: str = ""
    ) -> None:
        """Tell the coordinator that a message or an action has raised, and forget the step."""
        logger.warning("%s failed: %s%s", self._served or "the session", error, where)
        self._runner.abort()
        self._coordinator.send(_failure(error, message, where))

    def _on_end(self, channel: Channel, reason: str) -> None:
        """End the session with its coordinator; report a lost neighbor."""
        if channel is self._coordinator:
            raise SessionOver(reason)
        lost = self._neighbors.numbers.get(channel)
        if not lost:
            return  # a neighbor that only measured the link
        if self._neighbors.has_another(channel):
            return  # nothing is lost with one of two conversations
        with contextlib.suppress(LocalProtocolError):
            self._coordinator.send(m.NeighborLost(lost, reason))

    def _on_goodbye_of_neighbor(self, channel: Channel) -> None:
        """Before there is a stage, a neighbor comes to measure the link and goes again."""
        if not self._layers.numbered and self._neighbors.is_upstream(channel):
            self._neighbors.let_go(channel)

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

    def _on_leaving(self, message: m.Leaving, _tensors: tuple[Tensor, ...]) -> None:
        self._coordinator.send(message)

    def _on_deploy(self, message: m.Deploy, _tensors: tuple[Tensor, ...]) -> None:
        for part in self._parts:
            part.before_deploy()
        parameters = [each for stage in message.stages for each in stage.parameters]
        self._host.owner.check_stages(message.stages)
        if self._budget is not None:
            self._budget.reserve(parameters)
        built = self._layers.build(message)
        self._neighbors.expect(message)
        self._replicas.expect(message)
        self._optimizers.train_anew(message.kept, self._replicas.is_stepped)
        self._connect(message.receivers)
        stages = zip(message.stages, built, strict=True)
        self._runner = Runner(
            [self._stage(spec, layers, message.seed) for spec, layers in stages],
            self._runner.step,
        )
        self._narrowings = {
            spec.number: Narrowing(spec.activation_dtype, spec.gradient_dtype)
            for spec in message.stages
        }
        self._served = _described(self._runner.stages, self._layers.numbered)
        self._coordinator.send(m.Built(request=message.request))

    def _stage(self, spec: m.StageSpec, layers: nn.ModuleDict, seed: int) -> Stage:
        dtype = None if spec.dtype is None else DTYPES[spec.dtype]
        if dtype is not None:
            multiply_in(layers, dtype)
        return Stage(
            layers=layers,
            device=self._host.device,
            stage_index=spec.number,
            recompute=spec.recompute,
            seed=seed,
            dtype=dtype,
            compiled=CompiledLayers() if spec.compile else None,
            state=LayerState(numbered_layers(layers), len(spec.holders) > 1, spec.constants),
            weights=self._layers.streamed.get(spec.number),
        )

    def _on_launch(self, message: m.Launch, _tensors: tuple[Tensor, ...]) -> None:
        self._layers.check_complete()
        self._optimizers.forget_leaving()
        for part in self._parts:
            part.on_launch()
        self._connect(self._neighbors.peers)
        self._coordinator.send(m.Done(request=message.request))

    def _on_replace_neighbor(
        self, message: m.ReplaceNeighbor, _tensors: tuple[Tensor, ...]
    ) -> None:
        reason = ""
        try:
            self._neighbors.replace(message, self._start)
        except WorkerUnreachable as error:
            reason = str(error)[:_MOST_TEXT]
        self._coordinator.send(m.NeighborReplaced(reason, request=message.request))

    def _on_replay(self, message: m.Replay, _tensors: tuple[Tensor, ...]) -> None:
        self._runner.go_on_after(message.step, message.has_more)
        if message.has_more:
            self._repetition = _Repetition(message.step + 1, time.monotonic())
            self._replicas.begin_repetition()
            self._reports_actions = True

    def _on_wait(self, message: m.Wait, _tensors: tuple[Tensor, ...]) -> None:
        if message.is_end:
            if self._repetition is not None:
                self._repetition = replace(self._repetition, end_seconds=time.monotonic())
            self._replicas.end_repetition()
            self._coordinator.send(m.CaughtUp(request=message.request))

    def _connect(self, numbers: Iterable[int]) -> None:
        """Open the channels to other workers; tell the coordinator which are out of reach."""
        for number, error in self._neighbors.connect(numbers, self._start).items():
            self._coordinator.send(m.NeighborUnreachable(number, str(error)[:_MOST_TEXT]))

    def _start(self, channel: Channel) -> None:
        pool = self._copies.receive_pool()
        if self._budget is not None:
            pool.count_with(self._budget.allocate)
        channel.start(self._inbox, pool)

    def _dial_neighbor(self, text: str, session: str, member: int) -> Channel:
        host, lingering = self._host, self._coordinator.line.lingering
        seconds = 0.0 if lingering is None else lingering.seconds
        deadlines = replace(host.deadlines, linger_seconds=seconds)
        address = Address.parse(text)
        channel, _ = dial(address, "neighbor", session, deadlines, host.identity, member)
        return channel

    def _on_begin_step(self, message: m.BeginStep, _tensors: tuple[Tensor, ...]) -> None:
        self._optimizers.check_nothing_waits()
        self._reports_actions = self._replicas.is_repeating
        self._copies.keep_for(message.in_flight)
        self._neighbors.begin_step(message.step)
        self._recorder.begin_step()
        first = message.forwards_first
        self._runner.begin(message.step, message.in_flight, message.accumulate, first)

    def _on_reduce_gradients(
        self, message: m.ReduceGradients, _tensors: tuple[Tensor, ...]
    ) -> None:
        self._replicas.reduce(message.round)
        if not self._optimizers.has_optimizers:
            # Where the coordinator steps all parameters, nothing else ends the step here.
            self._coordinator.send(self._timing.take_timings(self._runner.step))

    def _on_apply_optimizer(self, message: m.ApplyOptimizer, tensors: tuple[Tensor, ...]) -> None:
        self._optimizers.apply_optimizer(message, tensors)
        self._replicas.follow_step(message.round)

    def _on_set_attributes(self, message: m.SetAttributes, _tensors: tuple[Tensor, ...]) -> None:
        self._layers.set_attributes(message)
        for stage in self._runner.stages:
            if stage.state is not None:
                stage.state.note_attributes()

    def _on_arguments(self, message: m.Arguments, tensors: tuple[Tensor, ...]) -> None:
        read = partial(decode_arguments, message, constants=self._constants)
        surroundings = self._copies.to_device(tensors, read)
        if self._runner.is_late(message.step):
            return
        self._neighbors.note_way(message)
        self._runner.take(message.step, message.stage, message.key, surroundings)

    def _on_activation(self, message: m.Activation, tensors: tuple[Tensor, ...]) -> None:
        layers = self._runner.stage(message.stage).layers
        if str(EMBEDDING_LAYER) in layers and tensors:
            check_token_ids(layers[str(EMBEDDING_LAYER)], tensors[0])
        activation = self._copies.to_device(tensors, partial(decode_activation, message))
        self._runner.take(message.step, message.stage, message.key, activation)

    def _on_gradient(self, message: m.Gradient, tensors: tuple[Tensor, ...]) -> None:
        gradients = self._copies.to_device(tensors, partial(decode_gradients, message))
        self._runner.take(message.step, message.stage, message.key, gradients)

    def _on_drop_caches(self, message: m.DropCaches, _tensors: tuple[Tensor, ...]) -> None:
        for stage in self._runner.stages:
            stage.caches.drop(message.numbers)

    def _on_abort_step(self, message: m.AbortStep, _tensors: tuple[Tensor, ...]) -> None:
        self._runner.abort()
        self._replicas.end(message.round)
        self._timing.take_timings(0)

    def _tell_of_buffers(self) -> None:
        for stage in self._runner.stages:
            for updates in () if stage.state is None else stage.state.take_updates():
                self._coordinator.send(m.BuffersUpdated(list(updates.names), updates.is_again))

    def _route(self, action: Action, content: Activation | Gradients) -> None:
        """Send an activation to the stage behind, or gradients to the stage before."""
        step, key, number = self._runner.step, action.key, action.stage_index
        narrowing, neighbors = self._narrowings[number], self._neighbors
        with self._recorder.span("pack", key, type(content).__name__):
            if isinstance(content, Activation):
                target = 0 if neighbors.is_last(step, number, key) else number + 1
                channel = neighbors.way_down(step, number, key)
                dtype = narrowing.activation_dtype
                said = partial(encode_activation, step, key, content, dtype, target)
            else:
                target = 0 if neighbors.is_first(step, number, key) else number - 1
                channel = neighbors.way_up(step, number, key)
                dtype = narrowing.gradient_dtype
                said = partial(encode_gradients, step, key, content, dtype, target)
            if channel is None:
                self._runner.take(step, target, key, content)
            else:
                neighbors.pass_on(channel, said(), self._copies)


def _range_of(stage: Stage) -> m.StageRange:
    numbers = [int(number) for number in stage.layers if not is_end(int(number))]
    return m.StageRange(stage.stage_index, min(numbers, default=0), max(numbers, default=-1) + 1)


def _described(stages: Sequence[Stage], layers: Mapping[int, nn.Module]) -> str:
    """The stages of a worker, for its owner."""
    if not stages:
        return "no stage"
    numbers = " and ".join(str(stage.stage_index) for stage in stages)
    kind = type(layers[last_decoder_layer(layers)]).__name__
    return f"stage {numbers}, {describe_layers(layers)} ({kind})"
