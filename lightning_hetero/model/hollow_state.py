"""What state dicts say of hollow layers: they are filled from where the tensors are.

state_dict ─▶ layer 4, its keys with meta tensors ─▶ fetch all of layer 4 ─▶ real tensors
                                                           (a half: of each of its children)
load_state_dict ─▶ what would be copied into a meta tensor ─▶ store
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import ModelError
from .halves import in_tree
from .state_dicts import keys_of, leave_out, places, tensor_at, tensors_by_key
from .tensors import flatten, state_in


class RemoteTensors(Protocol):
    """Where a hollow layer's weights are. Names are those of `tensors.py`."""

    def fetch(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Bring the content of tensors here, with the state of those stored in 4 bits."""

    def store(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the content of tensors there."""


class HollowStateDicts:
    """Lets ``state_dict`` and ``load_state_dict`` reach the tensors of hollow layers.

    Args:
        layers: The layers by their numbers.
        remote: Where their tensors are.

    Attributes:
        remote: As given.
        left_out: What state dicts lack; it is not fetched then.
    """

    def __init__(self, layers: Mapping[int, nn.Module], remote: RemoteTensors) -> None:
        self._layers = layers
        self.remote = remote
        self._hooks: list[RemovableHandle] = []
        self.left_out: set[Tensor] = set()

    def attach(self) -> None:
        """Begin; the layers are empty from now on."""
        for number, layer in self._layers.items():
            outermost = in_tree(layer)
            for path, module in layer.named_modules():
                fill = partial(self._fill, number, path, module in outermost)
                pass_on = partial(self._pass_on, _name(number, path))
                self._hooks += [
                    module.register_state_dict_post_hook(fill),
                    module.register_load_state_dict_pre_hook(pass_on),
                ]

    def detach(self) -> None:
        """End; the layers have their content again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _fill(
        self,
        number: int,
        path: str,
        is_outermost: bool,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        _metadata: Any,
    ) -> None:
        """Put real tensors where ``state_dict`` found ``meta`` ones: a layer's with one request."""
        if not is_outermost and _has_entered_parent(state, prefix, path):
            return  # which asks for all that it has
        if self.left_out:
            leave_out(state, keys_of(self.left_out, module, prefix), prefix)
        names = _names_by_key(module, prefix, state, _name(number, path))
        if not names:
            return
        found = self.remote.fetch(list(dict.fromkeys(names.values())))
        for key in [key for key in state if key.startswith(prefix)]:
            # Taken out and put in again, so that what belongs to a tensor comes right behind it.
            content = state.pop(key)
            if key in names:
                content, parts = found[names[key]], state_in(found, names[key])
                state.update(flatten(key, content, parts))
            else:
                state[key] = content

    def _pass_on(
        self,
        name: str,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *_rest: Any,
    ) -> None:
        """Send what ``load_state_dict`` would copy into a module's ``meta`` tensors."""
        if metadata.get("assign_to_params_buffers"):
            raise ModelError(
                f"{prefix.rstrip('.')} lives on a worker, and load_state_dict(assign=True) would "
                "put other parameters in the place of its own; call it without `assign`."
            )
        sent = {}
        for leaf, place in places(module).items():
            tensor, content = tensor_at(module, leaf), state.get(prefix + place)
            if content is not None and not content.is_meta and content.shape == tensor.shape:
                # What belongs to a tensor in 4 bits goes with it; torch knows no place for it.
                parts = state_in(state, prefix + place)
                for part in parts:
                    del state[f"{prefix}{place}.{part}"]
                sent.update(flatten(name + leaf, content.to(tensor.dtype), parts))
                # A meta tensor in its place: torch checks the shape and copies nothing.
                del state[prefix + place]
                state[prefix + leaf] = torch.empty_like(content, device="meta")
        if sent:
            self.remote.store(sent)


def _name(number: int, path: str) -> str:
    """What comes before the names of a module's own tensors."""
    return f"{number}.{path}." if path else f"{number}."


def _has_entered_parent(state: dict[str, Any], prefix: str, path: str) -> bool:
    """Whether this call of ``state_dict`` came to a module through the one that it is in.

    torch notes every module that it enters before it enters those inside.
    """
    own = f"{path.rpartition('.')[2]}."
    parent = prefix.removesuffix(own)
    return parent != prefix and parent[:-1] in getattr(state, "_metadata", {})


def _names_by_key(
    module: nn.Module, prefix: str, state: dict[str, Any], start: str
) -> dict[str, str]:
    """The names of those tensors of a module that a state dict has without content.

    A tensor that the module has twice is asked for once.
    """
    names: dict[str, str] = {}
    first: dict[int, str] = {}
    for key, (path, tensor) in tensors_by_key(module, prefix).items():
        content = state.get(key)
        if isinstance(content, Tensor) and content.is_meta:
            names[key] = first.setdefault(id(tensor), start + path)
    return names
