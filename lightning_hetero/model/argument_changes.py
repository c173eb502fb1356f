"""Copies of a call's arguments, and refusals of changed tensors: workers run the call later.

    call of layer 4 ─▶ call of layer 5 ─▶ call of layer 6 ─▶ all of it leaves
         note               note               note            check

On one device a layer has computed by the time when the model goes on, and the model may change the
arguments. Here lists and dictionaries are copied at the call, and a tensor changed meanwhile is
refused. All layers of one forward compute in the modes of torch of its first call.

A layer's change of its arguments would stay on its worker, so the worker refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import compress, repeat
from operator import ne, not_
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from ..errors import ModelError
from .attributes import ATOMS, Snapshot
from .layer_call import LayerCall
from .layers import describe_layer
from .placeholders import HiddenStatesAway, training_flags
from .state import Stamp, Stamps

# Older versions of transformers lack it.
_SHARED_STATES = getattr(transformers.cache_utils, "KVSharingDict", dict)
_CONTAINERS = (dict, list, tuple, _SHARED_STATES)


class Modes(NamedTuple):
    """The modes of torch in this thread that change a layer's results."""

    gradients: bool
    inference: bool
    autocast: torch.dtype | None
    default_dtype: torch.dtype

    @classmethod
    def here(cls, device: str) -> Modes:
        """The present modes, with the autocast of a kind of device."""
        is_cast = torch.is_autocast_enabled(device)
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_autocast_dtype(device) if is_cast else None,
            torch.get_default_dtype(),
        )

    def check(self, first: Modes, number: int) -> None:
        """Refuse other modes than the modes of the forward's first call.

        Args:
            first: The modes of the first layer's call.
            number: The number of the layer called now.

        Raises:
            ModelError: With the mode and the remedy.
        """
        if self == first:
            return
        name = next(n for n in self._fields if getattr(self, n) != getattr(first, n))
        what, remedy = _IN_WORDS[name]
        raise ModelError(
            f"{describe_layer(number).capitalize()} is called under another {what} than the layers "
            f"on workers before it ({getattr(self, name)} and {getattr(first, name)}), and workers "
            f"compute all layers of a forward alike. {remedy}, or keep these layers with the "
            "coordinator."
        )


_IN_WORDS = {
    "gradients": (
        "grad mode",
        "Put `torch.no_grad()` around all of them or none; to freeze some, call "
        "`requires_grad_(False)` on them",
    ),
    "inference": ("inference mode", "Put `torch.inference_mode()` around all of them or none"),
    "autocast": ("dtype of autocast", "Put `torch.autocast` around all of them or none"),
    "default_dtype": ("default dtype", "Set the default dtype before the first of them"),
}


class GivenTensors:
    """The tensors given by a forward to layers on workers, and their content then."""

    def __init__(self) -> None:
        # By its id, the layer that got a tensor, and the tensor as it was then.
        self._noted: dict[int, tuple[int | None, Stamp]] = {}
        self._flags: list[tuple[int, list[Tensor], list[bool]]] = []

    def note(self, tensors: Sequence[Tensor], number: int | None) -> None:
        """Note tensors given to a layer, or used between two layers."""
        # In C, since the layers of a model share most of them.
        are_new = map(not_, map(self._noted.__contains__, map(id, tensors)))
        for tensor in compress(tensors, are_new):
            if not (isinstance(tensor, HiddenStatesAway) or tensor.is_meta):
                self._noted[id(tensor)] = number, Stamp.of(tensor, is_exact=True)

    def note_flags(self, number: int, parameters: Iterable[Tensor]) -> None:
        """Note whether the parameters of a layer train."""
        found = [*parameters]
        self._flags.append((number, found, training_flags(found)))

    def check(self) -> None:
        """Refuse changed tensors, and layers frozen for their call only.

        Raises:
            ModelError: With the form of the tensor and its use, or with the layer.
        """
        for number, parameters, flags in self._flags:
            if training_flags(parameters) != flags:
                raise ModelError(
                    f"`requires_grad` of parameters of {describe_layer(number)} was set after the "
                    "model had called it, and its worker computes the call later. Set it before "
                    "the forward and leave it until the backward, or keep the layer with the "
                    "coordinator."
                )
        for layer, stamp in self._noted.values():
            if stamp.has_changed:
                tensor, user = stamp.tensor, "the model had computed with it between two layers"
                if layer is not None:
                    user = f"the model had called {describe_layer(layer)} with it"
                raise ModelError(
                    f"A {tensor.dtype} of the shape {tuple(tensor.shape)} was changed in place "
                    f"after {user}, and workers get it later. Change a copy of it (`clone`; "
                    "`x = x + y` for `x += y`), or keep these layers with the coordinator."
                )


class GivenArguments:
    """The arguments of a layer's call on a worker; the layer must leave them as they are.

    Args:
        call: The call, with its tensors.
    """

    def __init__(self, call: LayerCall) -> None:
        self._layer_index = call.layer_index
        self._places: list[str] = []
        tensors: list[Tensor] = []
        self._others: list[tuple[str, Snapshot]] = []
        for place, value in (*enumerate(call.args), *call.kwargs.items()):
            # Most are tensors or cannot change, and a snapshot of such takes many times as long.
            items = value if type(value) is tuple else (value,)
            changeable = [item for item in items if type(item) not in ATOMS]
            if all(map(isinstance, changeable, repeat(Tensor))):
                self._places += repeat(str(place), len(changeable))
                tensors += changeable
            else:
                self._others.append((str(place), Snapshot(value)))
        self._stamps = Stamps.of(tensors)

    def check(self, layer: nn.Module) -> None:
        """Refuse a layer if it has changed an argument.

        Raises:
            ModelError: With the argument.
        """
        place = next(self._changed(), None)
        if place is not None:
            number = self._layer_index
            raise ModelError(
                f"The forward of {describe_layer(number)} ({type(layer).__name__}) changed its "
                f"argument {place!r} on a worker. Neither the model nor a layer of another worker "
                "would see the change. Return what is new, or keep the layer with the coordinator."
            )

    def _changed(self) -> Iterator[str]:
        """The places of changed arguments."""
        present = Stamps.of(self._stamps.tensors)
        yield from compress(self._places, map(ne, present.versions, self._stamps.versions))
        yield from (place for place, given in self._others if not given.is_same())


def check_entered(entered: Iterable[Stamp]) -> None:
    """Refuse layers if they have changed received tensors in place.

    Args:
        entered: The tensors before the layers ran.

    Raises:
        ModelError: With the remedy.
    """
    if any(stamp.has_changed for stamp in entered):
        raise ModelError(
            "A layer on a worker changes its hidden states in place, and the model, which has them "
            "too, would not see that. Write `x = x + y` for `x += y`, or keep the layer with the "
            "coordinator."
        )


def copied(value: Any) -> Any:
    """Copies of nested lists, tuples and dictionaries, also of derived classes; other content is
    not copied.

    Layers of Gemma 3n and 4 share keys and values in a limited dictionary class of transformers;
    its copy is an ordinary dictionary.
    """
    if not isinstance(value, _CONTAINERS):
        return value
    if type(value) is tuple and not any(map(isinstance, value, repeat(_CONTAINERS))):
        return value  # nothing in it can change
    if isinstance(value, dict):
        found = dict(value) if type(value) is dict else copy(value)
        # In C, since few arguments are containers and this runs for each layer's call.
        are_nested = map(isinstance, value.values(), repeat(_CONTAINERS))
        for key, item in compress(value.items(), are_nested):
            found[key] = copied(item)  # outputs of transformers have no `update`
        return found
    if isinstance(value, _SHARED_STATES):
        return {key: copied(item) for key, item in value.items()}
    inside = [copied(item) if isinstance(item, _CONTAINERS) else item for item in value]
    if isinstance(value, list):
        items = copy(value)
        items[:] = inside
        return items
    # A named tuple is made in another way, and a `torch.Size` holds only numbers.
    make = tuple if type(value) is tuple else getattr(value, "_make", None)
    return value if make is None else make(inside)
