"""The plain attributes of layers on workers, which follow those of the same layers here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from ...coordinator.layers import RemoteStage
from ...coordinator.training import Coordinator
from ...errors import ModelError
from ...model.attributes import AttributeState, Change, differences, write_change
from ...model.layers import DecoderLayer, describe_layer
from ...model.recipe import Recipe, build_layers

# Adapters and what is stored in 4 bits have switches of their own, which `AdapterSwitches` watches.
_NOT_FOLLOWED = frozenset({"bitsandbytes", "peft"})


class PlainAttributes:
    """Sends attributes that were changed here, before the first micro-batch of a step that needs
    them.

    Args:
        layers: The layers on workers by their numbers.
        coordinator: Has deployed them.
        changed: What is another already than workers have built.
    """

    def __init__(
        self,
        layers: Mapping[int, DecoderLayer],
        coordinator: Coordinator,
        changed: Sequence[Change],
    ) -> None:
        modules = {number: layer.module for number, layer in layers.items()}
        self._layers = layers
        self._coordinator = coordinator
        self._state = AttributeState(modules, _is_followed)
        self._unsent = list(changed)
        self._latest_step = -1

    def follow(self) -> None:
        """Send what has changed; to be called at every hand-over of the present step.

        Raises:
            ModelError: If a worker must not have it, or if an earlier micro-batch of the step went
                without it.
        """
        step = self._coordinator.step
        is_first, self._latest_step = step != self._latest_step, step
        self._unsent += self._state.take_changes()
        for change in self._unsent if is_first else ():
            text, gone = write_change(change, self._name_of(change))
            self._coordinator.set_attributes(change.layer_index, change.path, text, gone)
        if self._unsent and not is_first:
            change = self._unsent[0]
            raise ModelError(
                f"The attribute {self._name_of(change)}.{change.names[0]} was changed in the "
                f"middle of step {step}: other micro-batches, or other calls of the model, went to "
                f"the worker of {describe_layer(change.layer_index)} before it. Change it in "
                "`on_train_batch_start` or earlier, or keep the layer with the coordinator."
            )
        self._unsent = []

    def _name_of(self, change: Change) -> str:
        return f"{self._layers[change.layer_index].name}.{change.path}".rstrip(".")


def changed_since_recipe(
    stages: Sequence[RemoteStage], layers: Mapping[int, DecoderLayer]
) -> list[Change]:
    """The attributes that are others than those of layers made from their recipes.

    A recipe for layers of the user's own holds their attributes. That of a Hugging Face model holds
    its config, and what was set on a layer is not in it.

    Raises:
        ModelError: If one of them cannot be sent.
    """
    found = []
    for stage in stages:
        if isinstance(stage.recipe, Recipe):
            built = build_layers(stage.recipe)
            made = {number: built[str(number)] for number in stage.layers}
            found += differences(stage.layers, made, _is_followed)
    for change in found:
        write_change(change, f"{layers[change.layer_index].name}.{change.path}".rstrip("."))
    return found


def _is_followed(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] not in _NOT_FOLLOWED
