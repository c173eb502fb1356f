"""The worker's side of measuring: layers, optimizers and links, before anything is deployed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..devices.description import describe_device
from ..devices.memory import free_cached_memory
from ..errors import ModelError
from ..model.allowed_imports import Allowed
from ..pipeline.bench import Bench, LayerTrial, OptimizerTrial, attempt
from ..pipeline.stage_layers import KeptTensors, build_for_values
from ..protocol import messages as m
from ..transport.channel import Channel, Handler
from ..transport.deadlines import Deadlines
from ..transport.link_probe import exchange_over, measure_link, new_inbox, payload
from .owner import Owner

logger = logging.getLogger(__name__)


class MeasuredSide:
    """Answers a coordinator that measures. Everything happens in the session's thread.

    Args:
        coordinator: The channel to the coordinator.
        device: What is measured.
        allowed: What layers may be made of.
        dial_neighbor: Opens a channel, not started yet, to another worker of the session.
        owner: Whose device it is.
        kept: What the worker holds of its last session, which counts as free.
    """

    def __init__(
        self,
        coordinator: Channel,
        device: torch.device,
        deadlines: Deadlines,
        allowed: Allowed,
        dial_neighbor: Callable[[str], Channel],
        owner: Owner,
        kept: KeptTensors,
    ) -> None:
        self._kept = kept
        self._dial_neighbor = dial_neighbor
        self._owner = owner
        self._coordinator = coordinator
        self._device = device
        self._deadlines = deadlines
        self._allowed = allowed
        self._bench: Bench | None = None
        self.handlers: dict[type, Handler] = {
            m.DescribeDevice: self._on_describe_device,
            m.PrepareLayers: partial(self._answer, self._prepare_layers),
            m.MeasureLayer: partial(self._answer, self._measure_layer),
            m.MeasureOptimizer: partial(self._answer, self._measure_optimizer),
            m.MeasureLink: partial(self._answer, self._measure_link),
        }

    def forget(self) -> None:
        """Free the memory of what was measured."""
        self._bench = None
        free_cached_memory(self._device)

    def _on_describe_device(self, _message: m.DescribeDevice, _tensors: Any) -> None:
        found = describe_device(self._device, self._kept.num_bytes)
        self._coordinator.send(self._owner.description(found))

    def _answer(
        self, measure: Callable[[Any, Any], m.Message], message: Any, tensors: tuple[Tensor, ...]
    ) -> None:
        """Say what was measured, or why nothing was."""
        found = attempt(partial(measure, message, tensors), self._device)
        if isinstance(found, m.NotMeasured):
            logger.warning("%s failed: %s", type(message).__name__, found.reason)
        self._coordinator.send(found)

    def _prepare_layers(self, message: m.PrepareLayers, tensors: tuple[Tensor, ...]) -> m.Message:
        buffers = dict(zip(message.buffers, tensors, strict=True))
        build = partial(build_for_values, message.recipe, message.parameters, self._allowed)
        build()  # what cannot be built is said at once
        self._kept.forget()  # layers are measured as if the worker had just started
        self._bench = Bench(self._device, build, buffers)
        return m.Done()

    def _measure_layer(self, message: m.MeasureLayer, tensors: tuple[Tensor, ...]) -> m.Message:
        here = tuple(tensor.to(self._device) for tensor in tensors)
        return self._prepared().measure_layer(LayerTrial.decode(message, here))

    def _measure_optimizer(
        self, message: m.MeasureOptimizer, tensors: tuple[Tensor, ...]
    ) -> m.Message:
        return self._prepared().measure_optimizer(OptimizerTrial.decode(message, tensors))

    def _measure_link(self, message: m.MeasureLink, _tensors: Any) -> m.Message:
        channel = self._dial_neighbor(message.address)
        inbox = new_inbox()
        channel.start(inbox)
        try:
            exchange = exchange_over(channel, inbox, self._deadlines.request_seconds)
            return measure_link(exchange, message.patience_seconds)
        finally:
            channel.close(m.Goodbye())

    def _prepared(self) -> Bench:
        if self._bench is None:
            raise ModelError("No layers were prepared to be measured.")
        return self._bench


def answer_probe(channel: Channel, probe: m.Probe) -> None:
    """Send what a probe asks for."""
    channel.send(m.ProbeAnswer(), *payload(probe.answer_bytes))
