"""A stage: consecutive layers, and their forward and backward on one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..model.calls import LayerCall
from .rule import Key
from .seeds import seed_action


@dataclass(frozen=True)
class Surroundings:
    """What a forward runs under: grad mode, autocast, and what the model passed to each layer."""

    grad_enabled: bool
    autocast_dtype: torch.dtype | None
    calls: Sequence[LayerCall]


@dataclass(frozen=True)
class _Saved:
    """What a forward keeps for its backward: its graph, or its inputs to run it again."""

    leaf: Tensor
    output: Tensor | None
    surroundings: Surroundings


@dataclass
class Stage:
    """Layers keyed by their numbers, and what is saved for backwards.

    Args:
        layers: The layers, keyed by their numbers, with real weights.
        device: Where they compute.
        stage_index: Number of the stage; the coordinator's part is stage 0.
        recompute: Keep only the inputs and run the forward again in the backward.
        seed: Start of all dropout masks.
    """

    layers: nn.ModuleDict
    device: torch.device
    stage_index: int
    recompute: bool = False
    seed: int = 0
    step: int = 0
    _saved: dict[Key, _Saved] = field(default_factory=dict)

    def forward(
        self, key: Key, hidden: Tensor, requires_grad: bool, surroundings: Surroundings
    ) -> Tensor:
        """The hidden states behind the last layer, cut from the graph.

        Its ``requires_grad`` says whether a backward will want a gradient for it.
        """
        leaf = hidden.to(self.device)
        if surroundings.grad_enabled:
            leaf = leaf.detach().requires_grad_(requires_grad)
        keep_graph = surroundings.grad_enabled and not self.recompute
        output = self._run_layers(key, leaf, surroundings, keep_graph)
        wanted = surroundings.grad_enabled and self._wants_gradient(requires_grad, output)
        if wanted:
            self._saved[key] = _Saved(leaf, output if keep_graph else None, surroundings)
        return output.detach().requires_grad_(wanted)

    def backward(self, key: Key, gradient: Tensor | None) -> Tensor | None:
        """Accumulate parameter gradients; the gradient of the stage's input, if it wants one."""
        saved = self._saved.pop(key, None)
        if saved is None or gradient is None:
            return None
        output = saved.output
        if output is None:
            output = self._run_layers(key, saved.leaf, saved.surroundings, keep_graph=True)
        torch.autograd.backward(output, gradient.to(self.device))
        return saved.leaf.grad

    def has_saved(self, microbatch: int) -> bool:
        """Whether a backward of the micro-batch is still to come."""
        return any(key.microbatch == microbatch for key in self._saved)

    def forget(self) -> None:
        """Drop everything saved for backwards."""
        self._saved.clear()

    def _wants_gradient(self, requires_grad: bool, output: Tensor) -> bool:
        if not self.recompute:
            return output.requires_grad
        return requires_grad or any(p.requires_grad for p in self.layers.parameters())

    def _run_layers(
        self, key: Key, hidden: Tensor, surroundings: Surroundings, keep_graph: bool
    ) -> Tensor:
        seed_action(self.seed, self.step, self.stage_index, *key)
        with torch.set_grad_enabled(keep_graph), self._autocast(surroundings.autocast_dtype):
            for call in surroundings.calls:
                layer = self.layers[str(call.layer_index)].train(call.training)
                output = layer(hidden, *call.args, **call.kwargs)
                if not isinstance(output, Tensor):
                    raise ModelError(
                        f"Layer {call.layer_index} ({type(layer).__name__}) returns a "
                        f"{type(output).__name__}; only layers that return one tensor can live on "
                        "a worker in this version."
                    )
                hidden = output
        return hidden

    def _autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)
