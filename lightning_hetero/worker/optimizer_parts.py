"""The worker's side of training: its optimizers, gradients and averages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..pipeline.optimizer import (
    Clipping,
    Group,
    StageOptimizer,
    WeightAverages,
    averaged_tensors,
    clip_gradients,
    gradient_norms,
)
from ..protocol import messages as m
from ..protocol.values import Packer, unpack
from ..transport.channel import Channel, Handler
from .layers import MOST_COPIES, StageLayers


class TrainedSide:
    """Steps, clips, freezes and averages the layers' weights when the coordinator asks for it.

    Args:
        coordinator: The channel to the coordinator.
        layers: The layers of the session.
        take_timings: Returns the time that training took since the last optimizer step.

    Attributes:
        handlers: What carries out each kind of message.
    """

    def __init__(
        self,
        coordinator: Channel,
        layers: StageLayers,
        take_timings: Callable[[int], m.Timings],
    ) -> None:
        self._coordinator = coordinator
        self._layers = layers
        self._take_timings = take_timings
        self.train_anew()
        self.handlers: dict[type, Handler] = {
            m.BuildOptimizer: self._on_build_optimizer,
            m.LoadOptimizerState: self._on_load_optimizer_state,
            m.SetTrained: self._on_set_trained,
            m.ZeroGradients: self._on_zero_gradients,
            m.MeasureNorms: self._on_measure_norms,
            m.ClipGradients: self._on_clip_gradients,
            m.ApplyOptimizer: self._on_apply_optimizer,
            m.AverageWeights: self._on_average_weights,
            m.FetchOptimizerState: self._on_fetch_optimizer_state,
        }

    def train_anew(self) -> None:
        """Forget optimizers and averages; the layers have changed."""
        self._optimizers: dict[int, StageOptimizer] = {}
        self._averages = WeightAverages([])

    def _on_build_optimizer(self, message: m.BuildOptimizer, tensors: tuple[Tensor, ...]) -> None:
        groups = [Group(g.parameters, unpack(g.options, tensors)) for g in message.groups]
        defaults = unpack(message.defaults, tensors)
        self._optimizers[message.optimizer] = StageOptimizer(
            message.class_name, defaults, groups, self._layers.parameters()
        )
        self._coordinator.send(m.Done())

    def _on_load_optimizer_state(
        self, message: m.LoadOptimizerState, tensors: tuple[Tensor, ...]
    ) -> None:
        optimizer = self._optimizer(message.optimizer)
        optimizer.load_state(message.parameter, unpack(message.state, tensors))

    def _on_set_trained(self, message: m.SetTrained, _tensors: tuple[Tensor, ...]) -> None:
        for parameter in self._layers.named_parameters(message.parameters):
            parameter.requires_grad_(message.requires_grad)

    def _on_zero_gradients(self, message: m.ZeroGradients, _tensors: tuple[Tensor, ...]) -> None:
        for parameter in self._layers.named_parameters(message.parameters):
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
            self._averages = WeightAverages(
                averaged_tensors(nn.ModuleList(self._layers.numbered.values()))
            )
        elif message.action == "update":
            self._averages.update(message.num_averaged, message.decay)
        elif message.action == "swap":
            self._averages.swap()
        else:
            self._averages.adopt()

    def _on_fetch_optimizer_state(
        self, message: m.FetchOptimizerState, _tensors: tuple[Tensor, ...]
    ) -> None:
        for name, state in self._optimizer(message.optimizer).state().items():
            packer = Packer()
            value = packer.pack(state, f"the optimizer state of {name}")
            self._coordinator.send(m.OptimizerState(name, value), *packer.tensors)
            self._coordinator.wait_until_sent(MOST_COPIES)
        self._coordinator.send(m.Done())

    def _optimizer(self, number: int) -> StageOptimizer:
        if number not in self._optimizers:
            raise ModelError(f"This worker has no optimizer {number} yet.")
        return self._optimizers[number]

    def _gradients(self, optimizer: int | None) -> dict[str, Tensor]:
        """The gradients that an optimizer would use, or all, by their parameters' names."""
        parameters = (
            self._layers.parameters() if optimizer is None else self._optimizer(optimizer).optimized
        )
        # A parameter that its layer has twice is known by the last of its names.
        names = {parameter: name for name, parameter in parameters.items()}
        return {name: p.grad for p, name in names.items() if p.grad is not None}
