"""The coordinator's side of attributes of layers: it sends workers the attributes changed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from ..errors import ModelError
from ..model.attributes import Change, differences, is_followed, write_change
from ..model.hollow import HollowLayers
from ..model.layers import DecoderLayer, describe_layer
from ..model.recipe import Recipe, build_layers, joined
from ..model.wings import changes_outside
from ..protocol import messages as m
from .worker_stages import RemoteStage

if TYPE_CHECKING:
    from .steps import RemoteStages


class PlainAttributes:
    """Sends layers' attributes changed here to the workers of these layers.

    Args:
        layers: The layers on workers by their numbers.
        stages: Know the progress of each worker, and the present batch.
        hollow: The layers here; they note the changes.
        changed: Attributes that already differ from the layers built by the workers.
    """

    def __init__(
        self,
        layers: Mapping[int, DecoderLayer],
        stages: RemoteStages,
        hollow: HollowLayers,
        changed: Sequence[Change],
    ) -> None:
        self._layers = layers
        self._stages = stages
        self._connections = stages.layers.connections
        self._held = hollow.held
        self._changed_outside = changes_outside(layer.module for layer in layers.values())
        self._held.note_unsent(changed)
        # The step and the first micro-batch of the batch of the latest hand-over.
        self._latest = -1, 0

    def follow(self) -> None:
        """Send the changes. You must call this at every hand-over of the present step.

        A forward that runs again in its backward needs the attributes of its batch, so workers run
        the backwards of the batches before first.

        Raises:
            ModelError: If a worker must not have an attribute, if an earlier micro-batch of the
                step went without it, or if a value outside of the layers has changed.
        """
        if (place := self._changed_outside()) is not None:
            raise ModelError(
                f"{place} has changed since the layers went to their workers. Layers compute with "
                "it, and no worker has the change: keep it in an attribute of the layers, which is "
                "sent before the next step, pass it as an argument, or keep the layers with the "
                "coordinator."
            )
        present = self._connections.step, self._stages.first_microbatch
        is_first, self._latest = present != self._latest, present
        if self._held.unsent:
            self._send(self._held.unsent, is_first)
            self._held.note_sent()

    def _send(self, unsent: Sequence[Change], is_first: bool) -> None:
        if not is_first:
            change = unsent[0]
            raise ModelError(
                f"The attribute {self._held.name_of(change)} was changed in the middle of step "
                f"{self._connections.step}: other micro-batches, or other calls of the model, went "
                f"to the worker of {describe_layer(change.layer_index)} before it. Change it in "
                "`on_train_batch_start` or earlier, or keep the layer with the coordinator."
            )
        self._connections.check_usable()
        holdings = self._stages.layers.holdings
        for number, stage in holdings.stages.items():
            for change in unsent:
                if change.layer_index in stage.layers:
                    layer = self._layers[change.layer_index]
                    text, gone = write_change(change, layer.name)
                    said = partial(m.SetAttributes, change.layer_index, change.path, text, gone)
                    for worker in holdings.holders(number):
                        self._connections.send(
                            worker, said(**self._stages.stamp_of_earlier(worker))
                        )


def changed_since_recipe(
    stages: Sequence[RemoteStage], layers: Mapping[int, DecoderLayer]
) -> list[Change]:
    """The attributes that differ from layers built from their recipes.

    A recipe for layers of the user's own contains their attributes. The recipe of a Hugging Face
    model contains its config, but not the attributes set on a layer.

    Raises:
        ModelError: If an attribute cannot be sent.
    """
    made = {
        int(number): layer
        for recipe in joined(stage.recipe for stage in stages if isinstance(stage.recipe, Recipe))
        for number, layer in build_layers(recipe).items()
    }
    are_here = {n: layer for stage in stages for n, layer in stage.layers.items() if n in made}
    for number, layer in are_here.items():
        _check_same_classes(layers[number].name, layer, made[number])
    found = differences(are_here, made, is_followed)
    for change in found:
        write_change(change, layers[change.layer_index].name)
    return found


def _check_same_classes(name: str, layer: nn.Module, made: nn.Module) -> None:
    """Refuse a layer with a module replaced by a module of another class.

    Raises:
        ModelError: With the module and both classes.
    """
    # Each parametrized module has a class of its own.
    here, there = (
        {
            path: type_before_parametrizations(module)
            for path, module in each.named_modules(remove_duplicate=False)
        }
        for each in (layer, made)
    )
    for path in {**here, **there}:
        mine, theirs = here.get(path), there.get(path)
        if mine is theirs:
            continue
        raise ModelError(
            f"{name}.{path} is {_named(mine)} here, and a worker has {_named(theirs)} there: "
            "workers build layers by the config of their model. Change the config before the model "
            "is built, or keep the layer with the coordinator."
        )


def _named(kind: type | None) -> str:
    return "nothing" if kind is None else kind.__name__
