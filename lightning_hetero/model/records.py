"""What a forward records of a run of hollow layers, and where runs begin and end.

Each thread records for itself. What goes along with the hidden states gets its name here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from ..errors import ModelError
from .half_layers import is_second_half
from .layer_call import ENTERED, Carried, LayerCall, entering, returned
from .layers import EMBEDDING_LAYER, DecoderLayer
from .placeholders import Assumptions, HiddenStatesAway, tensors_in


class Records(threading.local):
    """What the forward in the present thread has recorded of a run of hollow layers.

    Attributes:
        calls: The calls of the layers so far; None outside of the run.
        sent: The hidden states before the first layer.
        entering: What enters the first layer besides them, by name.
        along: What goes along, by name: tensors that have entered, and placeholders.
        assumptions: What the model was told of placeholders without certainty.
    """

    calls: Any = None
    sent: Any = None
    entering: Mapping[str, Tensor] = MappingProxyType({})
    along: Mapping[str, Tensor] = MappingProxyType({})
    assumptions: Any = None

    def begin(self, sent: Tensor) -> None:
        """Begin a run with these hidden states."""
        self.calls, self.sent = [], sent
        self.entering, self.along = {}, {ENTERED: sent}
        self.assumptions = Assumptions()

    def forget(self) -> None:
        """Drop what was recorded."""
        self.calls = self.sent = None
        self.entering = self.along = MappingProxyType({})

    def is_behind(self, number: int, value: Any) -> bool:
        """Whether a value is a placeholder for what a layer of this run has returned."""
        is_ours = isinstance(value, HiddenStatesAway) and value.is_of(self.assumptions)
        return is_ours and value.number == number

    def carry(self, tree: Any) -> Any:
        """A call's arguments with `Carried` in the place of what goes along."""
        if not any(map(self._goes_along, tensors_in(tree))):
            return tree
        return apply_to_collection(tree, Tensor, self._carried)

    def _goes_along(self, tensor: Tensor) -> bool:
        if isinstance(tensor, HiddenStatesAway):
            return tensor.is_of(self.assumptions)
        return torch.is_grad_enabled() and tensor.requires_grad

    def _carried(self, tensor: Tensor) -> Tensor | Carried:
        if not self._goes_along(tensor):
            return tensor
        if isinstance(tensor, HiddenStatesAway):
            name = returned(tensor.number, tensor.position)
            self.along = {**self.along, name: tensor}
            return Carried(name)
        for name, other in ((ENTERED, self.sent), *self.entering.items()):
            if other is tensor:
                return Carried(name)
        if tensor.is_meta:
            raise ModelError(
                "A layer on a worker gets a parameter of another one as an argument, and the "
                "content of that is not here. Keep both layers with the coordinator."
            )
        name = entering(1 + len(self.entering))
        self.entering = {**self.entering, name: tensor}
        self.along = {**self.along, name: tensor}
        return Carried(name)

    def forms(self, call: LayerCall) -> Callable[[], dict[str, Tensor]]:
        """Finds the forms of what goes along to a layer, when they are wanted."""
        found = {name: self.along[name] for name in call.carried}
        return lambda: {
            name: tensor.form().on_meta if isinstance(tensor, HiddenStatesAway) else tensor
            for name, tensor in found.items()
        }


@dataclass(frozen=True)
class Span:
    """The layers that are hollow at present, in runs: the first layers of runs, the last ones, and
    the first ones with a cache."""

    firsts: frozenset[int]
    lasts: frozenset[int]
    firsts_with_cache: frozenset[int]

    @classmethod
    def of(cls, layers: Mapping[int, nn.Module], begins: Collection[int]) -> Span:
        """The span of layers; a run ends before each layer in ``begins``."""
        runs: list[list[int]] = []
        for number in sorted(layers):
            if not runs or number in begins:
                runs.append([])
            runs[-1].append(number)
        with_cache = (
            next((n for n in run if n != EMBEDDING_LAYER and not is_second_half(layers[n])), None)
            for run in runs
        )
        return cls(
            frozenset(run[0] for run in runs),
            frozenset(run[-1] for run in runs),
            frozenset(number for number in with_cache if number is not None),
        )

    def last_of(self, number: int) -> int:
        """The last layer of the run of a layer."""
        return min(last for last in self.lasts if last >= number)


def list_begins(layers: Mapping[int, DecoderLayer]) -> set[int]:
    """The numbers of layers that begin another list than the layer before them is in."""
    pairs = zip(layers.items(), list(layers.items())[1:], strict=False)
    return {n for (_, before), (n, layer) in pairs if layer.list_index != before.list_index}
