"""Running the stages of a plan on workers: steps, gradients, optimizers.

What the model passed to its layers, on its way to all stages.

The plain attributes of layers on workers, which follow those of the same layers here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..devices.copies import Copies
from ..devices.device import device_for
from ..errors import HeteroError, ModelError, RemoteProtocolError
from ..model.attributes import AttributeState, Change, differences, write_change
from ..model.layers import DecoderLayer, describe_layer
from ..model.recipe import Recipe, build_layers
from ..pipeline.boundary import Activation, Gradients
from ..pipeline.codec import (
    Content,
    decode_activation,
    decode_gradients,
    encode_arguments,
    encode_result,
)
from ..pipeline.handover import Returned
from ..pipeline.optimizer import AveragingAction, Clipping, Group
from ..pipeline.recorder import APPLY
from ..pipeline.rule import Key
from ..pipeline.stage import Surroundings
from ..plan import Narrowing
from ..protocol import messages as m
from ..protocol.frames import Frame, encode_frame
from ..protocol.values import Digests, Packer, unpack
from ..transport.address import Address
from ..transport.channel import send_copied
from ..transport.deadlines import Deadlines
from ..transport.handshake import Identity
from .answers import DueAnswers, check_narrowed, check_norms, check_optimizer_state
from .connections import ConnectedWorker
from .layers import RemoteStage, TensorConversations


class OutgoingArguments:
    """What the model passed to its layers for one micro-batch, on its way to all stages.

    Which tensors a worker keeps already is told by their content. So where that is still being
    copied, messages are put together when it is there.
    """

    def __init__(self, step: int, key: Key, surroundings: Surroundings, copies: Copies) -> None:
        self._step, self._key, self._surroundings = step, key, surroundings
        self._originals = _once(surroundings.tensors)
        self._copy = copies.to_host(self._originals)
        pairs = zip(self._originals, self._copy.tensors, strict=True)
        self._hosts = {id(original): host for original, host in pairs}
        self._digests = Digests(self._hosts)

    def send(self, worker: ConnectedWorker, layers: Container[int]) -> None:
        """Send a stage what its layers are called with.

        Raises:
            LocalProtocolError: If an argument cannot be sent.
        """
        if self._copy.is_immediate:
            try:
                message, tensors = self._say(worker, layers)
                worker.channel.send(message, *tensors)
            except BaseException:
                worker.forget_constants()
                raise
        else:
            # What cannot be sent is refused here, where somebody hears it.
            message, _ = self._pack(layers, Packer())
            worker.channel.send_later(message, partial(self._encode, worker, layers))

    def _encode(self, worker: ConnectedWorker, layers: Container[int]) -> list[memoryview]:
        self._copy.wait()
        try:
            message, tensors = self._say(worker, layers)
            return encode_frame(Frame(message, tuple(tensors)))
        except HeteroError:
            worker.forget_constants()
            raise

    def _say(self, worker: ConnectedWorker, layers: Container[int]) -> Content:
        with worker.constants_lock:
            message, tensors = self._pack(layers, Packer(worker.constants, self._digests))
        return message, [self._hosts.get(id(tensor), tensor) for tensor in tensors]

    def _pack(self, layers: Container[int], packer: Packer) -> Content:
        return encode_arguments(self._step, self._key, self._surroundings, layers, packer)


def _once(tensors: Iterable[Tensor]) -> Sequence[Tensor]:
    """Each tensor once: layers share masks and rotary tables."""
    return [*{id(tensor): tensor for tensor in tensors}.values()]


CPU = torch.device("cpu")


class Coordinator(TensorConversations):
    """Runs the stages of a plan on their workers.

    Implements `Stages` for the driver. Not thread-safe: only the thread that has the turn may use
    it.

    Args:
        workers: Name and address of each remote stage's worker.
        identity: What they are shown.
        narrowing: What the coordinator rounds the activations to that it sends to the first stage,
            and the gradients that it sends to the last one.
        device: What this process computes on.
        copies: Those of the device; None for what fits it.

    Attributes:
        num_tokens: Positions of hidden states that were sent for training.
        dropout_step: The number of the present step for dropout masks, without the trials.

    Raises:
        WorkerUnreachable: If one does not answer or refuses.
    """

    def __init__(
        self,
        workers: Sequence[tuple[str, Address]],
        deadlines: Deadlines,
        identity: Identity,
        narrowing: Narrowing | None = None,
        device: torch.device = CPU,
        copies: Copies | None = None,
    ) -> None:
        super().__init__(
            workers, deadlines, identity, device, copies or device_for(device).copies()
        )
        self._narrowing = narrowing or Narrowing()
        self.num_tokens = 0
        self.dropout_step = 0
        self._timings: list[tuple[int, m.Timings]] = []
        self._buffer_updates: list[m.BuffersUpdated] = []
        self._is_applying = False
        self._stepping = contextlib.ExitStack()
        self._has_failed_applying = False
        self._due = DueAnswers()
        # The parameters of the last stage that have got gradients.
        self._norms_due: set[str] = set()
        # Of each optimizer, the name of its class and those of its parameters.
        self._optimized: dict[int, tuple[str, set[str]]] = {}

    def serve(self, names: Sequence[str], narrowing: Narrowing) -> None:
        """Keep these workers for the stages of a plan that was not known before."""
        self.keep(names)
        self._norms_due.clear()
        self._narrowing = narrowing

    # steps

    def begin_step(self, max_in_flight: int, accumulate: bool, is_trial: bool = False) -> None:
        """Start a step on every stage; a trial leaves gradients and dropout masks as they are."""
        self._check_linked()
        self.copies.keep_for(max_in_flight)
        self.step += 1
        self.dropout_step += not is_trial
        self.recorder.begin_step()
        self._due.begin_step()
        keeps_gradients = accumulate or is_trial
        if not keeps_gradients:
            self._norms_due.clear()
        message = m.BeginStep(self.step, max_in_flight, keeps_gradients, self.dropout_step)
        self._broadcast(message)

    def abort_step(self) -> None:
        """Make every stage forget the present step; never raises."""
        self._norms_due.clear()
        if self.step > 0:
            with contextlib.suppress(HeteroError):
                self._broadcast(m.AbortStep(self.step))

    def _present_step(self) -> int:
        """The step that gradients belong to; before the first forward there is none yet."""
        if self.step == 0:
            self.begin_step(1, accumulate=True)
        return self.step

    def drop_caches(self, numbers: Sequence[int]) -> None:
        """Let every stage forget key-value caches."""
        self._check_usable()
        self._broadcast(m.DropCaches(list(numbers)))

    def send_forward(self, key: Key, hidden: Tensor, surroundings: Surroundings) -> None:
        """Send hidden states to the first stage, and each stage its layers' arguments."""
        with self.recorder.span("pack", key, "Activation"):
            self._send_forward(key, hidden, surroundings)
        if surroundings.grad_enabled and key.visit == 0:
            # Token ids for an embedding on a worker have no dimension of features.
            shape = hidden.shape[:-1] if hidden.is_floating_point() else hidden.shape
            num_tokens = shape.numel()
            self.num_tokens += num_tokens
            self.recorder.note_training(num_tokens)

    def _send_forward(self, key: Key, hidden: Tensor, surroundings: Surroundings) -> None:
        self._due.note_forward(key, hidden, surroundings)
        arguments = OutgoingArguments(self.step, key, surroundings, self.copies)
        for worker, stage in zip(self._workers, self._held.stages, strict=True):
            arguments.send(worker, stage.layers)
        with torch.set_grad_enabled(surroundings.grad_enabled):
            content = encode_result(self.step, key, Activation(hidden), self._narrowing)
        send_copied(self._workers[0].channel, content, self.copies)

    def send_backward(self, key: Key, gradients: Gradients) -> None:
        """Send the gradients of a returned activation to the last stage."""
        self._due.note_backward(key)
        if not self._norms_due and any(gradient is not None for gradient in gradients.tensors):
            self._norms_due = self._trained_names(self._workers[-1])
        with self.recorder.span("pack", key, "Gradients"):
            content = encode_result(self.step, key, gradients, self._narrowing)
            send_copied(self._workers[-1].channel, content, self.copies)

    def receive(self) -> Returned:
        """Wait for the next activation or gradients of the present step."""
        with self.recorder.span("wait"):
            while True:
                returned = self._returned(*self._receive(self._deadlines.progress_seconds))
                if returned is not None:
                    return returned

    def take_arrived(self) -> list[Returned]:
        """The same without waiting: what has come by now."""
        found: list[Returned] = []
        while not self._inbox.empty():
            worker, frame = self._heard(self._deadlines.progress_seconds)
            if not self._is_aside(worker, frame.message):
                returned = self._returned(worker, frame)
                found += [] if returned is None else [returned]
        return found

    def _returned(self, worker: ConnectedWorker, frame: Frame) -> Returned | None:
        """What a stage has sent; None for what is left over from an aborted step."""
        message = frame.message
        if not isinstance(message, (m.Activation, m.Gradient)) or message.step != self.step:
            return None
        key = Key(message.microbatch, message.visit)
        with self._blaming(worker):
            self._check_is_theirs(worker, message)
            if isinstance(message, m.Gradient):
                gradients = self.copies.to_device(frame.tensors, partial(decode_gradients, message))
                self._due.take_gradients(key, gradients)
                return Returned(key, gradients)
            activation = self.copies.to_device(frame.tensors, partial(decode_activation, message))
            self._due.take_activation(key, activation, self._held.layers, self._held.dtypes)
            return Returned(key, activation)

    def _check_is_theirs(self, worker: ConnectedWorker, message: m.Activation | m.Gradient) -> None:
        """Activations come from the last stage, and gradients from the first one."""
        is_gradient = isinstance(message, m.Gradient)
        number = 1 if is_gradient else len(self._workers)
        if worker.number != number:
            raise RemoteProtocolError(f"{type(message).__name__} should come from stage {number}.")
        narrowing = self._held.stages[number - 1].narrowing
        wanted = narrowing.gradient_dtype if is_gradient else narrowing.activation_dtype
        check_narrowed(message.narrowed, wanted)

    def take_timings(self) -> list[tuple[int, m.Timings]]:
        """What stages, by their numbers, have said of their steps; each is told once."""
        taken, self._timings = self._timings, []
        return taken

    # what layers keep

    def set_attributes(self, layer_index: int, path: str, values: str, gone: Sequence[str]) -> None:
        """Let a module of a layer have these attributes in the forwards to come."""
        self._check_usable()
        message = m.SetAttributes(layer_index, path, values, list(gone))
        for worker, stage in zip(self._workers, self._held.stages, strict=True):
            if layer_index in stage.layers:
                worker.channel.send(message)

    def take_buffer_updates(self) -> list[m.BuffersUpdated]:
        """What stages have said of buffers that are updated too often; each is told once."""
        taken, self._buffer_updates = self._buffer_updates, []
        return taken

    # gradients

    def set_trained(self, names: Sequence[str], requires_grad: bool) -> None:
        """Freeze remote parameters, or train them, from the next forward on."""
        for worker, own in self._by_owner(names):
            worker.channel.send(m.SetTrained(own, requires_grad))

    def zero_gradients(self, names: Sequence[str], set_to_none: bool) -> None:
        """Drop the gradients of remote parameters, or make them zero.

        Waits until it is done: the gradients of a backward that follows come to a stage from its
        neighbor, and could overtake what comes from here.
        """
        self._check_usable()
        self._norms_due.clear()
        asked = list(self._by_owner(names))
        for worker, own in asked:
            self._send(worker, m.ZeroGradients(own, set_to_none))
        self._collect(m.Done, [worker for worker, _ in asked])

    def gradient_norms(self, optimizer: int | None = None) -> dict[str, float]:
        """The norms of remote gradients by their parameters' names: those that an optimizer
        would use, or all."""
        return self.ask_gradient_norms(optimizer)()

    def ask_gradient_norms(self, optimizer: int | None = None) -> Callable[[], dict[str, float]]:
        """The same, to be waited for by calling what is returned; until then only gradients here
        may be looked at."""
        self._broadcast(m.MeasureNorms(self._present_step(), optimizer))

        def answered() -> dict[str, float]:
            with self.recorder.span("wait", message="Norms"):
                answers = self._collect(m.Norms, self._workers)
            found: dict[str, float] = {}
            for worker, answer in answers:
                with self._blaming(worker):
                    self._check_norms(worker, answer.norms, optimizer)
                found.update(answer.norms)
            return found

        return answered

    def _check_norms(
        self, worker: ConnectedWorker, norms: Mapping[str, float], optimizer: int | None
    ) -> None:
        optimized = None if optimizer is None else self._optimized[optimizer][1]
        check_norms(norms, self._held.of(worker), optimized)
        due = self._norms_due if optimized is None else self._norms_due.intersection(optimized)
        if worker is self._workers[-1] and due and not norms:
            raise RemoteProtocolError(
                f"It got gradients and told the norm of none, {min(due)!r} for one."
            )

    def _trained_names(self, worker: ConnectedWorker) -> set[str]:
        held = self._held.of(worker).items()
        return {name for name, each in held if each.is_trained}

    def clip_gradients(self, optimizer: int | None, clipping: Clipping) -> None:
        """Clip the remote gradients that an optimizer would use, or all; does not wait for it."""
        step = self._present_step()
        message = m.ClipGradients(step, optimizer, clipping.factor, clipping.value)
        self._broadcast(message)

    # optimizers

    def build_optimizer(
        self, optimizer: int, class_name: str, defaults: Mapping[str, Any], groups: Sequence[Group]
    ) -> None:
        """Give every stage its part of an optimizer."""
        names = {name for group in groups for name in group.parameters}
        self._optimized[optimizer] = class_name, names
        for worker in self._workers:
            packer = Packer()
            packed_defaults = packer.pack(dict(defaults), "An optimizer default")
            specs = [
                m.GroupSpec(
                    [name for name in group.parameters if self._held.owner_of.get(name) is worker],
                    packer.pack(dict(group.options), "An optimizer option"),
                )
                for group in groups
            ]
            worker.channel.send(
                m.BuildOptimizer(optimizer, class_name, packed_defaults, specs), *packer.tensors
            )
        self._await_done()

    def apply_optimizer(self, optimizer: int, options: Sequence[Mapping[str, Any]]) -> None:
        """Let every stage step; does not wait for it.

        You must call `note_applied` when this process has stepped too.
        """
        self._is_applying = True
        packer = Packer()
        values = [packer.pack(dict(group), "An optimizer option") for group in options]
        message = m.ApplyOptimizer(self._present_step(), optimizer, values)
        self._broadcast(message, *packer.tensors)
        self._stepping.close()
        self._stepping.enter_context(self.recorder.span("optimizer", message=APPLY))

    def note_applied(self) -> None:
        """The optimizer has stepped here as it does, or will do, on the stages."""
        self._is_applying = False
        self._stepping.close()

    @property
    def is_between_steps(self) -> bool:
        """Whether all weights are, or will be when the stages have done their work, of one step.

        They are not after an exception inside the optimizer's step.
        """
        return not self._is_applying and not self._has_failed_applying

    def optimizer_state(self, optimizer: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """An optimizer's state of all remote parameters, with their names, one by one."""
        requests = [(worker, m.FetchOptimizerState(optimizer)) for worker in self._workers]
        told: set[str] = set()
        for sender, message, tensors in self._ask(requests, m.OptimizerState):
            name = message.parameter
            with self._blaming(sender):
                parameter = self._optimized_parameter(sender, optimizer, name)
                if parameter is None or name in told:
                    raise RemoteProtocolError(
                        f"It sent optimizer state of {name!r}, not asked for that or no more."
                    )
                state = unpack(message.state, tensors)
                is_torchs = "." not in self._optimized[optimizer][0]
                state = check_optimizer_state(name, state, parameter, is_torchs)
            told.add(name)
            yield name, state

    def _optimized_parameter(
        self, worker: ConnectedWorker, optimizer: int, name: str
    ) -> Tensor | None:
        """A worker's parameter of that name, if an optimizer has it, under whatever name."""
        held = self._held.tensors.get(name)
        if held is None or self._held.owner_of.get(name) is not worker:
            return None
        _, names = self._optimized[optimizer]
        if name in names:
            return held.parameter
        optimized = (self._held.tensors[each].parameter for each in names)
        return next((each for each in optimized if each is held.parameter), None)

    def load_optimizer_state(self, optimizer: int, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace an optimizer's state of remote parameters."""
        for name, values in state.items():
            packer = Packer()
            value = packer.pack(dict(values), f"the optimizer state of {name}")
            message = m.LoadOptimizerState(optimizer, name, value)
            self._held.owner_of[name].channel.send(message, *packer.tensors)

    def average_weights(
        self, action: AveragingAction, num_averaged: int = 0, decay: float | None = None
    ) -> None:
        """Do something with every stage's running average of its weights; does not wait for it."""
        self._check_usable()
        self._broadcast(m.AverageWeights(action, num_averaged, decay))

    def _note_failure(self, worker: ConnectedWorker, failure: m.Failure) -> None:
        worker.forget_constants()  # whether it has taken the last ones is not known
        self._has_failed_applying |= failure.in_optimizer_step

    def _is_aside(self, worker: ConnectedWorker, message: m.Message) -> bool:
        if isinstance(message, m.Timings):
            self._timings.append((worker.number, message))
            return True
        if isinstance(message, m.BuffersUpdated):
            self._buffer_updates.append(message)
            return True
        return super()._is_aside(worker, message)


# Adapters and what is stored in 4 bits have switches of their own, which `AdapterSwitches` watches.
_NOT_FOLLOWED = frozenset({"bitsandbytes", "peft"})


class PlainAttributes:
    """Sends attributes that were changed here, before the first micro-batch of a step that needs
    them.

    Args:
        layers: The layers on workers by their numbers.
        coordinator: Has deployed them.
        changed: What is another already than workers have built.
    """

    def __init__(
        self,
        layers: Mapping[int, DecoderLayer],
        coordinator: Coordinator,
        changed: Sequence[Change],
    ) -> None:
        modules = {number: layer.module for number, layer in layers.items()}
        self._layers = layers
        self._coordinator = coordinator
        self._state = AttributeState(modules, _is_followed)
        self._unsent = list(changed)
        self._latest_step = -1

    def follow(self) -> None:
        """Send what has changed; to be called at every hand-over of the present step.

        Raises:
            ModelError: If a worker must not have it, or if an earlier micro-batch of the step went
                without it.
        """
        step = self._coordinator.step
        is_first, self._latest_step = step != self._latest_step, step
        self._unsent += self._state.take_changes()
        for change in self._unsent if is_first else ():
            text, gone = write_change(change, self._name_of(change))
            self._coordinator.set_attributes(change.layer_index, change.path, text, gone)
        if self._unsent and not is_first:
            change = self._unsent[0]
            raise ModelError(
                f"The attribute {self._name_of(change)}.{change.names[0]} was changed in the "
                f"middle of step {step}: other micro-batches, or other calls of the model, went to "
                f"the worker of {describe_layer(change.layer_index)} before it. Change it in "
                "`on_train_batch_start` or earlier, or keep the layer with the coordinator."
            )
        self._unsent = []

    def _name_of(self, change: Change) -> str:
        return f"{self._layers[change.layer_index].name}.{change.path}".rstrip(".")


def changed_since_recipe(
    stages: Sequence[RemoteStage], layers: Mapping[int, DecoderLayer]
) -> list[Change]:
    """The attributes that are others than those of layers made from their recipes.

    A recipe for layers of the user's own holds their attributes. That of a Hugging Face model holds
    its config, and what was set on a layer is not in it.

    Raises:
        ModelError: If one of them cannot be sent.
    """
    found = []
    for stage in stages:
        if isinstance(stage.recipe, Recipe):
            built = build_layers(stage.recipe)
            made = {number: built[str(number)] for number in stage.layers}
            found += differences(stage.layers, made, _is_followed)
    for change in found:
        write_change(change, f"{layers[change.layer_index].name}.{change.path}".rstrip("."))
    return found


def _is_followed(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] not in _NOT_FOLLOWED
