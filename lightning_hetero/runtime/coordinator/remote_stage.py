"""What the coordinator asks a worker to serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ...model.custom_layers import BlocksRecipe
from ...model.four_bit import State
from ...model.layers import DecoderLayer
from ...model.pretrained import CheckpointWeights
from ...model.recipe import Recipe, write_recipe
from ...model.tensors import (
    dtypes_on_stage,
    has_four_bit,
    locate,
    named_contents,
    named_tensors,
    stored_in_four_bits,
)
from ...plan import Dtype, Narrowing, Plan
from ...protocol.tensors import DTYPES
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


def remote_stages(
    root: nn.Module,
    stages: Sequence[dict[int, DecoderLayer]],
    plan: Plan,
    weights: CheckpointWeights | None,
    seed: int,
    converts_weights: bool,
) -> list[RemoteStage]:
    """The remote stages of a plan with these layers of the module.

    Raises:
        ModelError: If a worker could not build them.
    """
    return [
        RemoteStage(
            recipe=write_recipe(root, list(layers.items())),
            layers=(modules := {number: layer.module for number, layer in layers.items()}),
            contents=partial(_contents, modules, weights),
            recompute=stage.recompute or _checkpoints_gradients(layers),
            seed=seed,
            dtype=stage.dtype,
            converts_weights=converts_weights,
            narrowing=narrowing,
            compile=stage.compile,
        )
        for stage, layers, narrowing in zip(
            plan.remote_stages, stages, plan.stage_narrowings, strict=True
        )
    ]


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


def _contents(
    layers: Mapping[int, nn.Module], weights: CheckpointWeights | None
) -> Iterator[tuple[str, Tensor, State]]:
    """The layers' tensors from here or, where they are not here, from the checkpoint."""
    for name, tensor, state in named_contents(layers):
        if tensor.is_meta and weights is not None:
            owner, leaf, _ = locate(layers, name)
            yield name, *weights.read(owner, leaf, for_worker=True)
        else:
            yield name, tensor, state


def _checkpoints_gradients(layers: dict[int, DecoderLayer]) -> bool:
    """Whether the user switched on Hugging Face's gradient checkpointing for these layers."""
    return any(getattr(layer.module, "gradient_checkpointing", False) for layer in layers.values())
