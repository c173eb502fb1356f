"""A worker's session: one coordinator's stage, from Deploy to Goodbye."""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import HeteroError, LocalProtocolError, ModelError, WorkerUnreachable
from ..model.four_bit import multiply_in, state_of
from ..model.imports import Allowed
from ..model.tensors import locate, named_tensors
from ..pipeline.activation import Activation, Gradients
from ..pipeline.averaging import WeightAverages, averaged_tensors
from ..pipeline.compiling import CompiledLayers
from ..pipeline.copies import copies_for
from ..pipeline.optimizer import Clipping, Group, StageOptimizer, clip_gradients, gradient_norms
from ..pipeline.rule import Action, Key
from ..pipeline.runner import Result, StageRunner
from ..pipeline.stage import Stage
from ..pipeline.stopwatch import Stopwatch
from ..plan import Narrowing
from ..wire import messages as m
from ..wire.constants import KeptConstants
from ..wire.frames import Frame
from ..wire.session import upstream_session
from ..wire.tensors import DTYPES
from ..wire.values import Packer, unpack
from .activity import of_action, of_request
from .address import Address
from .channel import Arrival, Channel, Inbox
from .deadlines import Deadlines
from .handshake import Identity, dial
from .keeping import KeptTensors
from .measured import MeasuredSide, answer_probe
from .outgoing import send_copied
from .owner import Owner, RunRecord
from .recorded import RecordedSide
from .stage_layers import StageLayers
from .tally import Tally
from .translation import (
    Content,
    read_activation,
    read_arguments,
    read_gradients,
    say_activation,
    say_gradients,
)

logger = logging.getLogger(__name__)

# Of an error's text and traceback each; more helps nobody.
_MOST_TEXT = 2**16

# Tensors of a GPU that are on their way at once: what is sent is copied to main memory first.
_MOST_COPIES = 2


def _can_wait(content: Frame | HeteroError) -> bool:
    """Whether something that arrived may be left until the owner lets the worker go on."""
    at_once = (m.Failure, m.Goodbye, m.Paused, m.Resumed)
    return isinstance(content, Frame) and not isinstance(content.message, at_once)


class SessionOver(Exception):
    """Ends a session's loop."""


Handler = Callable[[Any, tuple[Tensor, ...]], None]


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
        self._upstream = coordinator
        self._downstream = coordinator
        self._device = device
        self._copies = copies_for(device)
        self._deadlines = deadlines
        self._inbox: Inbox = SimpleQueue()
        self._layers = StageLayers(device, allowed, kept)
        self._downstream_address = ""
        self._runner = StageRunner(Stage(nn.ModuleDict(), device, 0))
        self._narrowing = Narrowing()
        self._optimizers: dict[int, StageOptimizer] = {}
        self._averages = WeightAverages([])
        self._constants = KeptConstants()
        self._stopwatch = Stopwatch(device)
        self._num_timed = 0
        self._measuring = MeasuredSide(
            coordinator, device, deadlines, allowed, self._dial_neighbor, self._owner, kept
        )
        self._recording = RecordedSide(coordinator, device, self._neighbors)
        self._recorder = self._recording.recorder
        self._tally = Tally()
        self._handlers = self._handler_of_each()

    def _handler_of_each(self) -> dict[type, Handler]:
        """What carries out each kind of message."""
        return {
            **self._measuring.handlers,
            **self._recording.handlers,
            m.Paused: self._on_paused,
            m.Resumed: self._on_resumed,
            m.Deploy: self._on_deploy,
            m.LoadTensor: self._on_load_tensor,
            m.OfferTensor: self._on_offer_tensor,
            m.Launch: self._on_launch,
            m.BuildOptimizer: self._on_build_optimizer,
            m.LoadOptimizerState: self._on_load_optimizer_state,
            m.BeginStep: self._on_begin_step,
            m.Arguments: self._on_arguments,
            m.Activation: self._on_activation,
            m.Gradient: self._on_gradient,
            m.DropCaches: self._on_drop_caches,
            m.AbortStep: self._on_abort_step,
            m.SetTrained: self._on_set_trained,
            m.ZeroGradients: self._on_zero_gradients,
            m.MeasureNorms: self._on_measure_norms,
            m.ClipGradients: self._on_clip_gradients,
            m.ApplyOptimizer: self._on_apply_optimizer,
            m.AverageWeights: self._on_average_weights,
            m.FetchTensors: self._on_fetch_tensors,
            m.FetchGradients: self._on_fetch_gradients,
            m.FetchOptimizerState: self._on_fetch_optimizer_state,
        }

    def attach_upstream(self, channel: Channel) -> None:
        """Take the channel that the upstream neighbor opened."""
        self._upstream = channel
        channel.start(self._inbox, self._copies.receive_pool())

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
        neighbors = {"upstream": self._upstream, "downstream": self._downstream}
        links = {
            "coordinator": self._coordinator.traffic,
            **{k: c.traffic for k, c in neighbors.items() if c is not self._coordinator},
        }
        about = self.name, self._coordinator.peer, self._layers.numbered.keys()
        return self._tally.status(*about, self._stage_index, self._runner.step, links)

    def run(self) -> None:
        """Serve until the coordinator says goodbye or is gone."""
        self._coordinator.start(self._inbox, self._copies.receive_pool())
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
            self._close_channels()
            self._layers.retire()

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
        if channel not in (self._upstream, self._downstream):
            return  # one that only measured the link, and is gone
        lost = self._stage_index + (1 if channel is self._downstream else -1)
        with contextlib.suppress(LocalProtocolError):
            self._coordinator.send(m.NeighborLost(lost, reason))

    def _on_goodbye_of_neighbor(self, channel: Channel) -> None:
        """Before there is a stage, a neighbor comes to measure the link and goes again."""
        if not self._layers.numbered and channel is self._upstream:
            self._upstream = self._coordinator
            channel.close()

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
            self._coordinator.send(m.Failure(reason, trace, act == self._on_apply_optimizer))

    def _close_channels(self) -> None:
        for channel in {self._upstream, self._downstream, self._coordinator}:
            channel.close(m.Goodbye())

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

    def _neighbors(self) -> dict[Channel, int]:
        """The channels by the stages behind them; the last stage has the coordinator's twice."""
        index = self._stage_index
        found = {self._downstream: index + 1, self._upstream: index - 1}
        return {**found, self._coordinator: 0}

    @property
    def _stage_index(self) -> int:
        return self._runner.stage.stage_index

    def _on_deploy(self, message: m.Deploy, _tensors: tuple[Tensor, ...]) -> None:
        self._measuring.forget()
        self._check_neighbor(message)
        self._owner.check_stage(message.parameters)
        layers, held = self._layers.build(message)
        self._downstream_address = message.downstream_address
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
        )
        self._runner = StageRunner(stage)
        self._served = _shown(stage.stage_index, self._layers.numbered)
        self._narrowing = Narrowing(message.activation_dtype, message.gradient_dtype)
        self._optimizers = {}
        self._averages = WeightAverages([])
        self._coordinator.send(m.Built(held))

    def _check_neighbor(self, message: m.Deploy) -> None:
        """Refuse another neighbor than the one that this stage is linked with."""
        is_linked = self._downstream is not self._coordinator
        if is_linked and message.downstream_address != self._downstream_address:
            raise ModelError(
                f"Stage {self._stage_index} is linked with {self._downstream_address} and should "
                f"become so with {message.downstream_address or 'nobody'}; layers move between the "
                "same workers in the same order."
            )

    def _on_load_tensor(self, message: m.LoadTensor, tensors: tuple[Tensor, ...]) -> None:
        self._layers.load(message, tensors)
        self._coordinator.send(m.Loaded(message.name))

    def _on_offer_tensor(self, message: m.OfferTensor, _tensors: tuple[Tensor, ...]) -> None:
        is_taken = self._layers.take_held(message)
        self._coordinator.send(m.OfferAnswered(message.name, is_taken))

    def _on_launch(self, _message: m.Launch, _tensors: tuple[Tensor, ...]) -> None:
        self._layers.check_complete()
        # When layers have moved, the link to the neighbor is there already.
        if self._downstream_address and self._downstream is self._coordinator:
            try:
                self._downstream = self._dial_neighbor(self._downstream_address)
            except WorkerUnreachable as error:
                self._coordinator.send(m.NeighborLost(self._stage_index + 1, str(error)))
                return
            self._downstream.start(self._inbox, self._copies.receive_pool())
        self._coordinator.send(m.Done())

    def _dial_neighbor(self, text: str) -> Channel:
        address, rules = Address.parse(text), upstream_session()
        channel, _ = dial(address, rules, "neighbor", self.name, self._deadlines, self._identity)
        return channel

    def _on_build_optimizer(self, message: m.BuildOptimizer, tensors: tuple[Tensor, ...]) -> None:
        groups = [Group(g.parameters, unpack(g.options, tensors)) for g in message.groups]
        defaults = unpack(message.defaults, tensors)
        self._optimizers[message.optimizer] = StageOptimizer(
            message.class_name, defaults, groups, self._parameters()
        )
        self._coordinator.send(m.Done())

    def _on_load_optimizer_state(
        self, message: m.LoadOptimizerState, tensors: tuple[Tensor, ...]
    ) -> None:
        optimizer = self._optimizer(message.optimizer)
        optimizer.load_state(message.parameter, unpack(message.state, tensors))

    def _on_begin_step(self, message: m.BeginStep, _tensors: tuple[Tensor, ...]) -> None:
        self._copies.keep_for(message.in_flight)
        self._recorder.begin_step()
        self._tally.begin()
        self._runner.begin(message.step, message.in_flight, message.accumulate)

    def _on_arguments(self, message: m.Arguments, tensors: tuple[Tensor, ...]) -> None:
        key = Key(message.microbatch, message.visit)
        read = partial(read_arguments, message, constants=self._constants)
        self._runner.take_arguments(key, self._copies.to_device(tensors, read))

    def _on_activation(self, message: m.Activation, tensors: tuple[Tensor, ...]) -> None:
        key = Key(message.microbatch, message.visit)
        activation = self._copies.to_device(tensors, partial(read_activation, message))
        self._runner.take_activation(message.step, key, activation)

    def _on_gradient(self, message: m.Gradient, tensors: tuple[Tensor, ...]) -> None:
        key = Key(message.microbatch, message.visit)
        gradients = self._copies.to_device(tensors, partial(read_gradients, message))
        self._runner.take_gradients(message.step, key, gradients)

    def _on_drop_caches(self, message: m.DropCaches, _tensors: tuple[Tensor, ...]) -> None:
        self._runner.stage.caches.drop(message.numbers)

    def _on_abort_step(self, _message: m.AbortStep, _tensors: tuple[Tensor, ...]) -> None:
        self._runner.abort()
        self._take_timings(0)

    def _on_set_trained(self, message: m.SetTrained, _tensors: tuple[Tensor, ...]) -> None:
        for parameter in self._named(message.parameters):
            parameter.requires_grad_(message.requires_grad)

    def _on_zero_gradients(self, message: m.ZeroGradients, _tensors: tuple[Tensor, ...]) -> None:
        for parameter in self._named(message.parameters):
            if parameter.grad is not None:
                parameter.grad = None if message.set_to_none else torch.zeros_like(parameter.grad)
        self._coordinator.send(m.Done())

    def _on_measure_norms(self, message: m.MeasureNorms, _tensors: tuple[Tensor, ...]) -> None:
        gradients = self._gradients(message.optimizer)
        norms = dict(zip(gradients, gradient_norms([*gradients.values()]), strict=True))
        self._coordinator.send(m.Norms(message.step, norms))

    def _on_clip_gradients(self, message: m.ClipGradients, _tensors: tuple[Tensor, ...]) -> None:
        gradients = [*self._gradients(message.optimizer).values()]
        clip_gradients(gradients, Clipping(message.factor, message.value))

    def _on_apply_optimizer(self, message: m.ApplyOptimizer, tensors: tuple[Tensor, ...]) -> None:
        options = [unpack(value, tensors) for value in message.options]
        self._optimizer(message.optimizer).step(options)
        self._coordinator.send(self._take_timings(message.step))

    def _on_average_weights(self, message: m.AverageWeights, _tensors: tuple[Tensor, ...]) -> None:
        if message.action == "begin":
            self._averages = WeightAverages(averaged_tensors(self._runner.stage.layers))
        elif message.action == "update":
            self._averages.update(message.num_averaged, message.decay)
        elif message.action == "swap":
            self._averages.swap()
        else:
            self._averages.adopt()

    def _on_fetch_tensors(self, message: m.FetchTensors, _tensors: tuple[Tensor, ...]) -> None:
        for name in message.names:
            owner, leaf, tensor = locate(self._layers.numbered, name)
            state = state_of(owner, leaf)
            self._coordinator.send(m.TensorContent(name, list(state)), tensor, *state.values())
            self._coordinator.wait_until_sent(_MOST_COPIES)
        self._coordinator.send(m.Done())

    def _on_fetch_gradients(self, message: m.FetchGradients, _tensors: tuple[Tensor, ...]) -> None:
        for name, parameter in zip(message.names, self._named(message.names), strict=True):
            if parameter.grad is not None:
                self._coordinator.send(m.TensorContent(name), parameter.grad)
                self._coordinator.wait_until_sent(_MOST_COPIES)
        self._coordinator.send(m.Done())

    def _on_fetch_optimizer_state(
        self, message: m.FetchOptimizerState, _tensors: tuple[Tensor, ...]
    ) -> None:
        for name, state in self._optimizer(message.optimizer).state().items():
            packer = Packer()
            value = packer.pack(state, f"the optimizer state of {name}")
            self._coordinator.send(m.OptimizerState(name, value), *packer.tensors)
            self._coordinator.wait_until_sent(_MOST_COPIES)
        self._coordinator.send(m.Done())

    def _perform(self, action: Action) -> None:
        self._note_activity(of_action(action, self._runner.step))
        if not self._runner.is_training(action):
            result = self._runner.run(action)
        else:
            result = self._train(action)
        self._route(result)

    def _train(self, action: Action) -> Result:
        kind: Literal["forward", "backward"] = "forward" if action.kind == "F" else "backward"
        self._recorder.note_choice(self._runner.num_ready)
        with self._stopwatch.measuring(kind), self._recorder.span(kind, action.key):
            result = self._runner.run(action)
        if action.kind == "F" and action.key.visit == 0:
            self._num_timed += 1
            self._recorder.note_training()
        return result

    def _take_timings(self, step: int) -> m.Timings:
        """What training has taken since the last time."""
        num_microbatches, self._num_timed = self._num_timed, 0
        laps = self._stopwatch.take()
        seconds = laps.seconds("forward"), laps.seconds("backward")
        self._tally.note(sum(seconds))
        return m.Timings(step, *seconds, num_microbatches)

    def _route(self, result: Result) -> None:
        key, content = result.action.key, result.content
        with self._recorder.span("pack", key, type(content).__name__):
            self._send_result(key, content)

    def _send_result(self, key: Key, content: Activation | Gradients) -> None:
        step = self._runner.step
        if isinstance(content, Activation):
            wire_dtype = self._narrowing.activation_dtype
            said = say_activation(step, key, content, wire_dtype)
            self._send_to_neighbor(self._downstream, said)
        else:
            wire_dtype = self._narrowing.gradient_dtype
            said = say_gradients(step, key, content, wire_dtype)
            self._send_to_neighbor(self._upstream, said)

    def _send_to_neighbor(self, channel: Channel, content: Content) -> None:
        """A neighbor that has said goodbye is told nothing more: it lost the coordinator, or was
        let go by it, so the coordinator knows."""
        try:
            send_copied(channel, content, self._copies)
        except LocalProtocolError:
            if not channel.has_ended:
                raise

    def _optimizer(self, number: int) -> StageOptimizer:
        if number not in self._optimizers:
            raise ModelError(f"Stage {self._stage_index} has no optimizer {number} yet.")
        return self._optimizers[number]

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {
            n: p for n, p in named_tensors(self._layers.numbered) if isinstance(p, nn.Parameter)
        }

    def _named(self, names: list[str]) -> list[nn.Parameter]:
        parameters = self._parameters()
        unknown = sorted(set(names) - set(parameters))
        if unknown:
            raise ModelError(f"Stage {self._stage_index} has no parameters {unknown[:5]}.")
        return [parameters[name] for name in names]

    def _gradients(self, optimizer: int | None) -> dict[str, Tensor]:
        """The gradients that an optimizer would use, or all, by their parameters' names."""
        parameters = (
            self._parameters() if optimizer is None else self._optimizer(optimizer).optimized
        )
        # A parameter that its layer has twice is known by the last of its names.
        names = {parameter: name for name, parameter in parameters.items()}
        return {name: p.grad for p, name in names.items() if p.grad is not None}


def _shown(stage_index: int, numbered: Mapping[int, nn.Module]) -> str:
    """What a stage serves, for people."""
    first, last = min(numbered), max(numbered)
    kind = type(numbered[first]).__name__
    return f"stage {stage_index}, layers {first} to {last} ({kind})"
