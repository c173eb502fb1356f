"""One layer of each kind, as everybody who measures builds it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..model.allowed_imports import ImportedHere
from ..model.captured_outputs import SilencedHooks
from ..model.custom_layers import BlocksRecipe
from ..model.layer_call import LayerCall
from ..model.layers import DecoderLayer
from ..model.recipe import Recipe, write_recipe
from ..pipeline.bench import Bench, Clock, LayerTrial
from ..pipeline.codec import Content
from ..pipeline.handover import surroundings_here
from ..pipeline.stage_layers import build_for_values, describe_parameters
from ..runtime.measuring import say_prepare


@dataclass(frozen=True)
class Blueprint:
    """What layers are built from, here and on workers.

    Args:
        kinds: The kind of each layer of the model.
        layers: One layer of the model for each kind, by its number.
        recipe: Builds these.
        buffers: The values of their buffers, as far as they are here.
    """

    kinds: list[str]
    layers: Mapping[int, nn.Module]
    recipe: Recipe | BlocksRecipe
    buffers: Mapping[str, Tensor]

    @classmethod
    def draw(cls, root: nn.Module, layers: Sequence[DecoderLayer], kinds: list[str]) -> Blueprint:
        """The blueprint for a model. The last layer of each kind stands for it: what comes into it
        is like what comes into most others.

        Raises:
            ModelError: If a layer cannot be rebuilt elsewhere.
        """
        numbers = sorted({kind: number for number, kind in enumerate(kinds)}.values())
        chosen = [(number, layers[number]) for number in numbers]
        modules = {number: layer.module for number, layer in chosen}
        buffers = {
            f"{number}.{name}": buffer
            for number, module in modules.items()
            for name, buffer in module.named_buffers(remove_duplicate=False)
            if not buffer.is_meta
        }
        return cls(kinds, modules, write_recipe(root, chosen), buffers)

    def number_of(self, kind: str) -> int:
        """The layer that stands for a kind."""
        return next(number for number in self.layers if self.kinds[number] == kind)

    def build(self) -> nn.ModuleDict:
        """The layers without content."""
        specs = describe_parameters(self.layers)
        return build_for_values(self.recipe.to_json(), specs, ImportedHere())

    def on_meta(self) -> dict[int, nn.Module]:
        """For each layer of the model, the one that stands for it, without content."""
        built = self.build()
        for layer in built.values():
            SilencedHooks(layer)  # nothing of theirs is to be collected
        return {n: built[str(self.number_of(kind))] for n, kind in enumerate(self.kinds)}

    def bench(self, device: torch.device, clock: Clock = time.perf_counter) -> Bench:
        """Where the layers are measured in this process."""
        return Bench(device, self.build, self.buffers, clock)

    def for_workers(self) -> Content:
        """What a worker builds them from."""
        return say_prepare(self.recipe, self.layers, self.buffers)


class MadeUpOutputs:
    """Outputs such as layers add to those that a model collects, from layers with values made up.

    Args:
        blueprint: The layers.
        bench: Where they are run.
    """

    def __init__(self, blueprint: Blueprint, bench: Bench) -> None:
        self._blueprint = blueprint
        self._bench = bench
        self._known: dict[tuple[int, int, tuple[str, ...]], list[tuple[str, Tensor]]] = {}

    def __call__(
        self, hidden: Tensor, call: LayerCall, kinds: Sequence[str]
    ) -> Iterable[tuple[str, Tensor]]:
        number = self._blueprint.number_of(self._blueprint.kinds[call.layer_index])
        key = number, len(hidden), tuple(kinds)
        if key not in self._known:
            around = surroundings_here(hidden, [replace(call, layer_index=number)], kinds)
            trial = LayerTrial(
                number=number,
                hidden_shape=tuple(hidden.shape),
                hidden_dtype=hidden.dtype,
                wants_gradient=False,
                surroundings=around,
                recompute=False,
                dtype=None,
                converts_weights=True,
                patience_seconds=0.0,
            )
            self._known[key] = list(self._bench.collected(trial))
        return [(kind, _leaf(tensor)) for kind, tensor in self._known[key]]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())
