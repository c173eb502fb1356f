"""The coordinator's own ends, run as in training with layers that only pass hidden states on.

start ─ embedding ─▶ enter │ layers pass │ leave ─ head, loss ─▶ end      forward
      ◀─ embedding ─       │             │       ◀─ loss, head ─          backward
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from ..devices.memory import MemoryMeter, metering, synchronize
from ..errors import ModelError
from ..model.layer_call import LayerCall
from ..model.layers import DecoderLayer
from ..model.passing import Outputs, PassingLayers
from ..pipeline.bench import Clock, Measurement, median_of_blocks
from ..pipeline.handover import surroundings_here
from ..pipeline.results import loss_of
from ..pipeline.stage import Surroundings
from .leaving import Unreadable


@dataclass(frozen=True)
class Example:
    """What the model passes to its layers for one micro-batch.

    Args:
        inputs: The form of the hidden states that come into each layer, on ``meta``.
        wants_gradient: Whether those before the first one have a backward.
        surroundings: What the layers run under, and how the model called each, by their numbers.
    """

    inputs: Mapping[int, Tensor]
    wants_gradient: bool
    surroundings: Surroundings
    calls: Mapping[int, LayerCall]

    @property
    def hidden(self) -> Tensor:
        """The form of the hidden states before the first layer."""
        return self.inputs[0]


@dataclass(frozen=True)
class Ends:
    """What the coordinator's own ends took."""

    embedding: Measurement
    head: Measurement


@dataclass
class _Pass:
    """One run of ``training_step`` on its way, with what the clock and the memory said."""

    clock: Clock
    device: torch.device
    meter: MemoryMeter | None
    moments: list[float] = field(default_factory=list)
    taken_bytes: list[int] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    entered: list[Tensor] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    around: Surroundings | None = None

    def mark(self) -> None:
        """Another part of the run ends here."""
        synchronize(self.device)
        if self.meter is not None:
            self.taken_bytes.append(self.meter.taken_bytes())
            self.peak_bytes.append(self.meter.peak_bytes())
            self.meter.reset_peak()
        self.moments.append(self.clock())

    def enter(self, hidden: Tensor, call: LayerCall) -> None:
        """The model has come to its first layer."""
        self.around = self.around or surroundings_here(hidden, [call])
        if not self.entered:
            self.mark()
        self.entered.append(hidden)

    def leave(self, hidden: Tensor) -> Tensor:
        """The model goes on behind its last layer."""
        leaf = hidden.detach().requires_grad_(torch.is_grad_enabled())
        self.leaves.append(leaf)
        if len(self.leaves) == 1:
            self.mark()
        return leaf


class _AnythingBehind(_Pass):
    """A run that goes on with any numbers behind the last layer."""

    def leave(self, hidden: Tensor) -> Tensor:
        return super().leave(torch.randn_like(hidden))


class EndsRunner:
    """Runs ``training_step`` on micro-batches while no layer computes.

    Args:
        module: Attached to its Trainer; its own ends are on their device.
        layers: All its decoder layers.
        on_meta: For each of them one without content.
        outputs: Makes up what a layer adds to collected outputs.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        layers: Sequence[DecoderLayer],
        on_meta: Mapping[int, nn.Module],
        outputs: Outputs,
        clock: Clock,
    ) -> None:
        self._module = module
        self._layers = layers
        self._on_meta = on_meta
        self._outputs = outputs
        self._clock = clock
        self.device = module.trainer.strategy.root_device

    def example(self, batch: Any) -> Example:
        """What the layers are called with for a micro-batch that is on its device.

        Raises:
            ModelError: If the model does not come to its layers, or not through all of them.
        """
        passed = self._new_pass()
        _, passing = self._forward(batch, passed)
        if passed.around is None or not passed.leaves:
            raise ModelError(
                f"`training_step` of {type(self._module).__name__} does not run all decoder layers,"
                " so they cannot be measured; use plan='even', or a plan of your own."
            )
        wants_gradient = passed.entered[0].requires_grad
        return Example(passing.inputs, wants_gradient, passed.around, passing.calls)

    def only_layers_read(self, embedding: nn.Module, batch: Any) -> bool:
        """Whether what an embedding gives enters the first layer as it is and goes nowhere else,
        and nobody reads its weight."""
        passed = _AnythingBehind(self._clock, self.device, None)
        with Unreadable(embedding) as unreadable:
            loss, _ = self._forward(batch, passed)
            if loss is None or not loss.isfinite().all() or unreadable.is_weight_read(loss):
                return False
        return unreadable.is_what_entered(passed.entered)

    def measure(self, batch: Any, patience_seconds: float) -> Ends:
        """What both ends take for a micro-batch; the ends have gradients afterwards."""

        def run() -> list[float]:
            moments = self._run(batch, None).moments
            return [end - start for start, end in zip(moments, moments[1:], strict=False)]

        run()
        with metering(self.device) as meter:
            metered = self._run(batch, meter)
        times = median_of_blocks(run, patience_seconds)
        embedding_forward, _, head_forward, head_backward, embedding_backward = times
        _, kept, _, with_loss, _, _ = metered.taken_bytes
        _, embedding_peak, _, head_peak, loss_peak, last_peak = metered.peak_bytes
        return Ends(
            Measurement(
                embedding_forward, embedding_backward, kept, max(embedding_peak, last_peak)
            ),
            Measurement(
                head_forward,
                head_backward,
                max(0, with_loss - kept),
                max(0, max(head_peak, loss_peak) - kept),
            ),
        )

    def _run(self, batch: Any, meter: MemoryMeter | None) -> _Pass:
        passed = self._new_pass(meter)
        loss, _ = self._forward(batch, passed)
        passed.mark()
        # Parts of the model may share a piece of the graph, as in the driver.
        if loss is not None and loss.requires_grad:
            torch.autograd.backward(loss, retain_graph=True)
        del loss
        for out, leaf in list(zip(passed.entered, passed.leaves, strict=True))[:0:-1]:
            _backward(out, leaf, retain_graph=True)
        passed.mark()
        _backward(passed.entered[0], passed.leaves[0], retain_graph=False)
        passed.mark()
        return passed

    def _new_pass(self, meter: MemoryMeter | None = None) -> _Pass:
        return _Pass(self._clock, self.device, meter)

    def _forward(self, batch: Any, passed: _Pass) -> tuple[Tensor | None, PassingLayers]:
        passing = PassingLayers(
            self._module,
            self._layers,
            self._on_meta,
            self._outputs,
            passed.enter,
            passed.leave,
        )
        trainer = self._module.trainer
        with passing.passing(), torch.enable_grad():
            passed.mark()
            with trainer.precision_plugin.train_step_context():
                result = self._step()(batch)
        return loss_of(result), passing

    def _step(self) -> Callable[[Any], Any]:
        step = self._module.training_step
        if is_param_in_hook_signature(step, "batch_idx", min_args=2):
            return lambda batch: step(batch, 0)
        return step


def _backward(out: Tensor, leaf: Tensor, retain_graph: bool) -> None:
    if out.requires_grad and leaf.grad is not None:
        torch.autograd.backward(out, leaf.grad, retain_graph=retain_graph)
