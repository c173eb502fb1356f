"""The worker's side of optimizers: it steps, clips, freezes and averages its layers' weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError, RemoteProtocolError
from ..model.tensors import Content, named_tensors
from ..pipeline.optimizer import (
    Clipping,
    Group,
    StageOptimizer,
    WeightAverages,
    averaged_tensors,
    clip_gradients,
    gradient_norms,
    most_in_state,
)
from ..protocol import messages as m
from ..protocol.values import Packer, Value, unpack
from ..transport.channel import Channel, Handler
from .layers import MOST_COPIES, SessionLayers

_Moved = m.MovedTensor | m.SnapshotTensor


@dataclass(frozen=True)
class Belongings:
    """The results of training for parameters, besides their content: states and averages.

    Args:
        states: The states of parameters, by the number of the optimizer.
        averages: Running averages by the names of their tensors.
    """

    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    averages: dict[str, Tensor] = field(default_factory=dict)

    def state_of(self, name: str) -> dict[int, Any]:
        """The states of one parameter, by the number of the optimizer."""
        return {number: own[name] for number, own in self.states.items() if name in own}

    def packed(self, packer: Packer, name: str, content: Content) -> dict[str, Any]:
        """The fields of a `MovedTensor` or a `SnapshotTensor` for a tensor with its states and
        average.
        """
        where = f"the optimizer state of {name}"
        states = self.state_of(name).items()
        return {
            "name": name,
            "content": packer.pack(content.tensor),
            "state": {part: packer.pack(tensor) for part, tensor in content.state.items()},
            "optimizers": {number: packer.pack(state, where) for number, state in states},
            "average": packer.pack(self.averages.get(name)),
        }

    def restrict_to(self, names: Collection[str]) -> Belongings:
        """The states and averages of the tensors of these names."""
        states = {
            number: {name: state for name, state in own.items() if name in names}
            for number, own in self.states.items()
        }
        return Belongings(states, {n: a for n, a in self.averages.items() if n in names})

    def drop_states(self, names: Iterable[str]) -> None:
        """Drop the optimizers' states of the tensors of these names."""
        for name in names:
            for own in self.states.values():
                own.pop(name, None)

    def drop(self, names: Iterable[str]) -> None:
        """Drop the states and averages of the tensors of these names."""
        names = [*names]
        self.drop_states(names)
        for name in names:
            self.averages.pop(name, None)


class SessionOptimizers:
    """Steps, clips, freezes and averages the layers' weights when the coordinator asks for it.

    Args:
        coordinator: The channel to the coordinator.
        layers: The layers of the session.
        take_timings: Returns the time of training since the last optimizer step.
        dropped: The parameters with gradients dropped at the start of the step.
        is_owned: Whether this worker, among its replicas, owns a parameter.

    Attributes:
        leaving: The states and averages of former layers' tensors.
        handlers: The handler of each kind of message.
    """

    def __init__(
        self,
        coordinator: Channel,
        layers: SessionLayers,
        take_timings: Callable[[int], m.Timings],
        dropped: Callable[[], Collection[Tensor]],
        is_owned: Callable[[str], bool],
    ) -> None:
        self._coordinator = coordinator
        self._layers = layers
        self._take_timings = take_timings
        self._dropped = dropped
        self._is_owned = is_owned
        self._is_stepped: Callable[[str], bool] = lambda _name: True
        self._optimizers: dict[int, StageOptimizer] = {}
        self._averages = WeightAverages({})
        self._is_averaging = False
        # The states and averages of tensors here, until their optimizers are built and averages go
        # on.
        self._awaiting = Belongings()
        self.leaving = Belongings()
        self.handlers: dict[type, Handler] = {
            m.BuildOptimizer: self._on_build_optimizer,
            m.LoadOptimizerState: self._on_load_optimizer_state,
            m.SetTrained: self._on_set_trained,
            m.ZeroGradients: self._on_zero_gradients,
            m.MeasureNorms: self._on_measure_norms,
            m.ClipGradients: self._on_clip_gradients,
            m.AverageWeights: self._on_average_weights,
            m.FetchOptimizerState: self._on_fetch_optimizer_state,
        }

    @property
    def has_optimizers(self) -> bool:
        """Whether any optimizer has a part here."""
        return bool(self._optimizers)

    @property
    def present(self) -> Belongings:
        """The states and averages of the present tensors."""
        return Belongings(
            {number: self._all_states(number) for number in self._known_optimizers()},
            {**self._awaiting.averages, **self._averages.present},
        )

    def train_anew(self, kept: Collection[str], stepped: Callable[[str], bool]) -> None:
        """Take optimizers and averages apart; the layers have changed.

        Args:
            kept: The kept tensors of the layers; the states and averages of the others are
                `leaving`.
            stepped: Whether this worker steps a parameter from now on.
        """
        former = self.present
        self._awaiting = former.restrict_to(set(kept))
        # Also tensors for another worker that stay here too.
        self.leaving = former
        self._awaiting.drop_states([name for name in kept if not stepped(name)])
        self._is_stepped = stepped
        self._optimizers = {}
        self._averages = WeightAverages({})
        self._is_averaging = False

    def take_moved(self, message: _Moved, tensors: tuple[Tensor, ...]) -> None:
        """Put a tensor from another process into its place, and take its states and average. If
        another process steps the tensor, drop the optimizer's state.
        """
        name = message.name
        tensor = partial(tensor_in, message, tensors=tensors)
        content = tensor(message.content)
        state = {part: tensor(value) for part, value in message.state.items()}
        self._layers.take(name, Content(content, state))
        states = {number: unpack(value, tensors) for number, value in message.optimizers.items()}
        for found in states.values():
            _check_state(name, found, content)
        average = None if message.average is None else tensor(message.average)
        for number, found in states.items() if self._is_stepped(name) else ():
            self._awaiting.states.setdefault(number, {})[name] = found
        if average is not None:
            self._awaiting.averages[name] = average

    def forget_leaving(self) -> None:
        """Drop the states and averages of leaving tensors."""
        self.leaving = Belongings()

    def check_nothing_waits(self) -> None:
        """Refuse a step while received states or averages are unused.

        Raises:
            ModelError: With the names of some of these tensors.
        """
        waiting = {name for own in self._awaiting.states.values() for name in own}
        waiting.update(self._awaiting.averages)
        if waiting:
            raise ModelError(
                f"The optimizer's state or average of {sorted(waiting)[:5]} has come here, but "
                "the optimizer or average to use it has not."
            )

    def _on_build_optimizer(self, message: m.BuildOptimizer, tensors: tuple[Tensor, ...]) -> None:
        groups = [Group(g.parameters, unpack(g.options, tensors)) for g in message.groups]
        defaults = unpack(message.defaults, tensors)
        self._optimizers[message.optimizer] = StageOptimizer(
            message.class_name, defaults, groups, self._layers.parameters(), self._layers.allowed
        )
        for name, state in self._awaiting.states.pop(message.optimizer, {}).items():
            self._optimizers[message.optimizer].load_state(name, state)
        self._coordinator.send(m.Done(request=message.request))

    def _on_load_optimizer_state(
        self, message: m.LoadOptimizerState, tensors: tuple[Tensor, ...]
    ) -> None:
        optimizer = self._optimizer(message.optimizer)
        optimizer.load_state(message.parameter, unpack(message.state, tensors))

    def _on_set_trained(self, message: m.SetTrained, _tensors: tuple[Tensor, ...]) -> None:
        for name in message.parameters if message.requires_grad else ():
            self._layers.hold(name)
        for parameter in self._layers.named_parameters(message.parameters):
            parameter.requires_grad_(message.requires_grad)
        if self._is_averaging and message.requires_grad:
            self._averages.include(self._averaged(()))

    def _on_zero_gradients(self, message: m.ZeroGradients, _tensors: tuple[Tensor, ...]) -> None:
        for parameter in self._layers.named_parameters(message.parameters):
            if message.only_dropped:
                if parameter.grad is None and self._had_gradient(parameter):
                    parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad is not None:
                parameter.grad = None if message.set_to_none else torch.zeros_like(parameter.grad)
        self._coordinator.send(m.Done(request=message.request))

    def _had_gradient(self, parameter: Tensor) -> bool:
        """Whether a gradient was dropped at the start of the step. A replacement worker never had
        the gradient; there, an optimizer's state for the parameter shows it.
        """
        states = (each.optimizer.state for each in self._optimizers.values())
        was_dropped = any(parameter is each for each in self._dropped())
        return was_dropped or any(state.get(parameter) for state in states)

    def _on_measure_norms(self, message: m.MeasureNorms, _tensors: tuple[Tensor, ...]) -> None:
        found = self._gradients(message.optimizer).items()
        gradients = {name: gradient for name, gradient in found if self._is_owned(name)}
        norms = dict(zip(gradients, gradient_norms([*gradients.values()]), strict=True))
        self._coordinator.send(m.Norms(norms, request=message.request))

    def _on_clip_gradients(self, message: m.ClipGradients, _tensors: tuple[Tensor, ...]) -> None:
        gradients = [*self._gradients(message.optimizer).values()]
        clip_gradients(gradients, Clipping(message.factor, message.value))

    def apply_optimizer(self, message: m.ApplyOptimizer, tensors: tuple[Tensor, ...]) -> None:
        """Step an optimizer, and report the time of training to the coordinator."""
        options = [unpack(value, tensors) for value in message.options]
        self._optimizer(message.optimizer).step(options)
        self._coordinator.send(self._take_timings(message.step))

    def _on_average_weights(self, message: m.AverageWeights, _tensors: tuple[Tensor, ...]) -> None:
        if message.action in ("begin", "go on"):
            present = dict(self._awaiting.averages) if message.action == "go on" else {}
            self._awaiting.averages.clear()
            self._averages = WeightAverages(self._averaged(present), present)
            self._is_averaging = True
        elif message.action == "update":
            self._averages.update(message.num_averaged, message.decay)
        elif message.action == "swap":
            self._averages.swap()
        else:
            self._averages.adopt()

    def _on_fetch_optimizer_state(
        self, message: m.FetchOptimizerState, _tensors: tuple[Tensor, ...]
    ) -> None:
        if message.optimizer not in self._known_optimizers():
            raise ModelError(f"This worker has no optimizer {message.optimizer} yet.")
        states = self._all_states(message.optimizer)
        states.update(self.leaving.states.get(message.optimizer, {}))
        for name in message.parameters:
            state = states.get(name)
            if not state:
                continue
            packer = Packer()
            value = packer.pack(state, f"the optimizer state of {name}")
            said = m.OptimizerState(name, value, request=message.request)
            self._coordinator.send(said, *packer.tensors)
            self._coordinator.wait_until_sent(MOST_COPIES)
        self._coordinator.send(m.Done(request=message.request))

    def _averaged(self, going_on: Collection[str]) -> dict[str, Tensor]:
        """The tensors to average: training tensors, and tensors with running averages."""
        layers = {str(number): layer for number, layer in self._layers.numbered.items()}
        tensors = {n: t for n, t in named_tensors(self._layers.numbered) if n in going_on}
        return averaged_tensors(nn.ModuleDict(layers)) | tensors

    def _known_optimizers(self) -> set[int]:
        return {*self._optimizers, *self._awaiting.states, *self.leaving.states}

    def _all_states(self, number: int) -> dict[str, Any]:
        """The state of each parameter in an optimizer, built or about to be."""
        built = self._optimizers.get(number)
        return {**self._awaiting.states.get(number, {}), **({} if built is None else built.state())}

    def _optimizer(self, number: int) -> StageOptimizer:
        if number not in self._optimizers:
            raise ModelError(f"This worker has no optimizer {number} yet.")
        return self._optimizers[number]

    def _gradients(self, optimizer: int | None) -> dict[str, Tensor]:
        """The gradients for an optimizer, or all, by their parameters' names."""
        parameters = (
            self._layers.parameters() if optimizer is None else self._optimizer(optimizer).optimized
        )
        # If a layer has a parameter twice, the last name counts.
        names = {parameter: name for name, parameter in parameters.items()}
        return {name: p.grad for p, name in names.items() if p.grad is not None}


def tensor_in(message: _Moved, value: Value, tensors: tuple[Tensor, ...]) -> Tensor:
    """A tensor of a message.

    Raises:
        RemoteProtocolError: If the value is not a tensor.
    """
    found = unpack(value, tensors)
    if not isinstance(found, Tensor):
        raise RemoteProtocolError(f"{message.name!r} came with {found!r:.60}, no tensor.")
    return found


def _check_state(name: str, state: object, content: Tensor) -> None:
    """Refuse an optimizer's state if it is too large for its parameter.

    Raises:
        RemoteProtocolError: With the parameter's name.
    """
    if not isinstance(state, dict):
        raise RemoteProtocolError(f"The optimizer state of {name!r} came as {state!r:.60}.")
    most = most_in_state(content)
    for key, value in state.items():
        if isinstance(value, Tensor) and value.numel() > most:
            raise RemoteProtocolError(
                f"The optimizer state {key!r} of {name!r} has {value.numel()} numbers, and at most "
                f"{most} can belong to the parameter."
            )
