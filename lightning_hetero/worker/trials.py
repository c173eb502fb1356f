"""The worker's side of measuring: layers, optimizers and links, before layers are deployed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from msgspec import structs
from torch import Tensor
from typing_extensions import override

from ..devices.description import describe_device
from ..devices.device import device_for
from ..errors import ModelError, WorkerUnreachable
from ..pipeline.bench import Bench, LayerTrial, OptimizerTrial, attempt
from ..pipeline.stage_layers import build_for_values
from ..plan import Weights
from ..protocol import messages as m
from ..transport.channel import Channel, Handler, Inbox
from ..transport.link_probe import exchange_over, measure_link, payload
from .parts import Answer, SessionPart, SessionSite

logger = logging.getLogger(__name__)


class SessionTrials(SessionPart):
    """Answers a coordinator that measures. Everything happens in the session's thread.

    Args:
        site: The session.
        measure_reading: Measures how fast a device gets frozen weights, by their place.
    """

    def __init__(
        self,
        site: SessionSite,
        measure_reading: Callable[[torch.device], dict[Weights, m.ReadingMeasured]],
    ) -> None:
        self._coordinator = site.coordinator
        self._measure_reading = measure_reading
        self._host = site.host
        self._dial_neighbor = site.dial_neighbor
        self._bench: Bench | None = None
        self.handlers: dict[type, Handler] = {
            m.DescribeDevice: self._on_describe_device,
            m.PrepareLayers: partial(self._answer, self._prepare_layers),
            m.MeasureLayer: partial(self._answer, self._measure_layer),
            m.MeasureOptimizer: partial(self._answer, self._measure_optimizer),
            m.MeasureLink: partial(self._answer, self._measure_link),
        }
        self.answers: dict[type, Answer] = {m.Probe: _answer_probe}

    @override
    def before_deploy(self) -> None:
        self.close()

    @override
    def close(self) -> None:
        """Free the memory of the measured layers."""
        self._bench, self.is_measuring = None, False
        device_for(self._host.device).free_cache()

    def _on_describe_device(self, message: m.DescribeDevice, _tensors: Any) -> None:
        self.is_measuring = True
        description = self._host.owner.description(describe_device(self._host.device))
        weights = self._measure_reading(self._host.device) if message.with_reading else {}
        answer = structs.replace(description, weights=weights, request=message.request)
        self._coordinator.send(answer)

    def _answer(
        self, measure: Callable[[Any, Any], m.Message], message: Any, tensors: tuple[Tensor, ...]
    ) -> None:
        """Send the measurement, or the reason for its absence."""
        self.is_measuring = True
        found = attempt(partial(measure, message, tensors), self._host.device)
        if isinstance(found, m.NotMeasured):
            logger.warning("%s failed: %s", type(message).__name__, found.reason)
        self._coordinator.send(structs.replace(found, request=message.request))

    def _prepare_layers(self, message: m.PrepareLayers, tensors: tuple[Tensor, ...]) -> m.Message:
        buffers = dict(zip(message.buffers, tensors, strict=True))
        device, allowed = self._host.device, self._host.allowed
        build = partial(build_for_values, message.recipe, message.parameters, allowed, device)
        build()  # fails now if the layers cannot be built
        if self._bench is not None:
            self._bench.forget()
        self._bench = Bench(device, build, buffers, allowed=allowed)
        return m.Done()

    def _measure_layer(self, message: m.MeasureLayer, tensors: tuple[Tensor, ...]) -> m.Message:
        here = tuple(tensor.to(self._host.device) for tensor in tensors)
        return self._prepared().measure_layer(LayerTrial.decode(message, here))

    def _measure_optimizer(
        self, message: m.MeasureOptimizer, tensors: tuple[Tensor, ...]
    ) -> m.Message:
        return self._prepared().measure_optimizer(OptimizerTrial.decode(message, tensors))

    def _measure_link(self, message: m.MeasureLink, _tensors: Any) -> m.Message:
        try:
            channel = self._dial_neighbor(message.address, message.session, 0)
        except WorkerUnreachable as error:
            return m.NotMeasured(str(error), "", is_out_of_memory=False, is_unreachable=True)
        inbox = Inbox()
        channel.start(inbox)
        try:
            exchange = exchange_over(channel, inbox, self._host.deadlines.request_seconds)
            return measure_link(exchange, message.patience_seconds)
        finally:
            channel.close(m.Goodbye())

    def _prepared(self) -> Bench:
        if self._bench is None:
            raise ModelError("No layers were prepared to be measured.")
        return self._bench


def _answer_probe(channel: Channel, probe: m.Probe, _tensors: tuple[Tensor, ...]) -> None:
    """Send back as many bytes as a probe asks for."""
    channel.send(m.ProbeAnswer(request=probe.request), *payload(probe.answer_bytes))
