"""One training step of a module on a batch, and what is to be compared of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from ..coordinator.deployment import Deployment
from ..errors import BatchError
from ..model.layer_call import take_hidden
from ..model.layers import DecoderLayer
from ..model.placeholders import is_away
from ..pipeline.results import loss_of


@dataclass
class Observed:
    """What one step gave; everything is on the CPU.

    Args:
        loss: What ``training_step`` returned.
        activations: The hidden states behind layers, by their numbers.
        before: The gradients of the hidden states before layers, where these want one.
        gradients: Those of the parameters of each layer, by their names in it.
    """

    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    activations: dict[int, Tensor] = field(default_factory=dict)
    before: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Observer:
    """Runs steps that can be compared: on one batch, without dropout, from the same random state.

    Args:
        module: In evaluation mode, attached to its Trainer.
        layers: What is observed, by number.
        batch: On its device.
        ends: First and last layers of stages.
        seed: Where random numbers start in each step.
    """

    module: pl.LightningModule
    layers: Mapping[int, DecoderLayer]
    batch: Any
    ends: Sequence[tuple[int, int]]
    seed: int

    def step(self, deployment: Deployment | None = None) -> Observed:
        """One step, with layers where they are."""
        observed = Observed()
        self.module.zero_grad(set_to_none=True)
        with ExitStack() as stack:
            for first, last in self.ends:
                self._watch(first, last, observed, stack)
            if deployment is not None:
                pieces = deployment.plan.micro_batches
                stack.enter_context(deployment.whole_batch_step(pieces, accumulate=False))
            loss = self._loss()
            loss.backward()
            observed.loss = _copied(loss)
        observed.gradients = self._gradients(deployment)
        self.module.zero_grad(set_to_none=True)
        return observed

    def _watch(self, first: int, last: int, observed: Observed, stack: ExitStack) -> None:
        def note_input(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden, _, _ = take_hidden(first, args, kwargs)
            if hidden.requires_grad and not is_away(hidden):
                hidden.register_hook(lambda grad: observed.before.update({first: _copied(grad)}))

        def note_output(_layer: nn.Module, _args: Any, output: Any) -> None:
            hidden = output if isinstance(output, Tensor) else output[0]
            if not is_away(hidden):
                observed.activations[last] = _copied(hidden)

        before = self.layers[first].module.register_forward_pre_hook(note_input, with_kwargs=True)
        stack.callback(before.remove)
        stack.callback(self.layers[last].module.register_forward_hook(note_output).remove)

    def _loss(self) -> Tensor:
        torch.manual_seed(self.seed)
        with torch.enable_grad(), self.module.trainer.precision_plugin.train_step_context():
            loss = loss_of(_step_of(self.module)(self.batch))
        if loss is None:
            raise BatchError(
                "training_step returned None for the first batch, which asks to skip it, so "
                "nothing can be compared."
            )
        return loss

    def _gradients(self, deployment: Deployment | None) -> dict[int, dict[str, Tensor]]:
        found: dict[int, dict[str, Tensor]] = {}
        away = _gradients_away(deployment)
        for number, layer in self.layers.items():
            here = {
                name: _copied(parameter.grad)
                for name, parameter in layer.module.named_parameters()
                if parameter.grad is not None
            }
            found[number] = here | away.get(number, {})
        return found


def _gradients_away(deployment: Deployment | None) -> dict[int, dict[str, Tensor]]:
    """The gradients on workers, by the numbers of their layers and their names there."""
    found: dict[int, dict[str, Tensor]] = {}
    if deployment is not None:
        trained = [name for p, name in deployment.names_of.items() if p.requires_grad]
        for name, gradient in deployment.coordinator.fetch_gradients(trained).items():
            number, _, inside = name.partition(".")
            found.setdefault(int(number), {})[inside] = gradient
    return found


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()


def _step_of(module: pl.LightningModule) -> Callable[[Any], Any]:
    step = module.training_step
    if is_param_in_hook_signature(step, "batch_idx", min_args=2):
        return lambda batch: step(batch, 0)
    return step
