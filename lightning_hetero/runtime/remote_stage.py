"""What the coordinator asks a worker to serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..model.blocks import BlocksRecipe
from ..model.packed import State
from ..model.recipe import Recipe
from ..model.tensors import dtypes_on_stage, has_four_bit, named_tensors, stored_in_four_bits
from ..plan import Dtype, Narrowing
from ..wire.tensors import DTYPES
from .conversations import ConnectedWorker
from .sending import Load


@dataclass(frozen=True)
class RemoteStage:
    """What the coordinator asks a worker to serve.

    Args:
        recipe: How to build the layers.
        layers: Hollow ones, or those about to be, by their numbers.
        contents: Their tensors with their states, one by one.
        recompute: As in the plan.
        seed: Start of all dropout masks.
        dtype: As in the plan.
        converts_weights: Whether ``dtype`` is for weights too; under autocast it is not.
        narrowing: What it rounds the activations to that it sends downstream, and the gradients
            that it sends upstream.
        compile: As in the plan.
    """

    recipe: Recipe | BlocksRecipe
    layers: Mapping[int, nn.Module]
    contents: Callable[[], Iterator[tuple[str, Tensor, State]]]
    recompute: bool
    seed: int
    dtype: Dtype | None = None
    converts_weights: bool = True
    narrowing: Narrowing = Narrowing()
    compile: bool = False

    @property
    def has_four_bit(self) -> bool:
        """Whether some of its weights are stored in 4 bits."""
        return has_four_bit(self.layers)

    @property
    def tensor_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor there."""
        converts = self.dtype is not None and self.converts_weights
        return dtypes_on_stage(self.layers, DTYPES[self.dtype] if converts else None)  # type: ignore[index]


def load_of(worker: ConnectedWorker, stage: RemoteStage) -> Load:
    """All of a stage's tensors. What it has in another dtype, it does not hold as it would come."""
    here = {name: tensor.dtype for name, tensor in named_tensors(stage.layers)}
    there = stage.tensor_dtypes
    return Load(
        worker,
        stage.contents(),
        is_packed_there=lambda name: stored_in_four_bits(stage.layers, name),
        may_be_held=lambda name: name in here and here[name] == there[name],
    )
