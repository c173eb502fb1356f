"""State dicts of hollow layers: they are filled from the workers, and stored there."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import ModelError
from .partial_layers import in_tree
from .state import Stamp
from .tensors import (
    flatten,
    keys_of,
    leave_out,
    places,
    state_in,
    tensor_at,
    tensors_by_key,
)


class RemoteTensors(Protocol):
    """Access to the weights of hollow layers, under the names of `tensors.py`."""

    def fetch(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read tensors, and the quantization state of tensors in 4 bits."""

    def store(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite tensors."""


@dataclass(frozen=True)
class _Given:
    """A tensor in a state dict, fetched from a worker.

    Args:
        name: Its name on the worker.
        key: Its key in the state dict.
        tensor: A weak reference to it.
        alias: As it was then; shares its count of changes, but not its memory: it may be freed.
    """

    name: str
    key: str
    tensor: weakref.ref[Tensor]
    alias: Stamp

    @classmethod
    def of(cls, name: str, key: str, tensor: Tensor) -> _Given:
        with torch.inference_mode(False):
            alias = tensor.detach()
            alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return cls(name, key, weakref.ref(tensor), Stamp.of(alias))


class HollowStateDicts:
    """Lets ``state_dict`` and ``load_state_dict`` reach the tensors of hollow layers.

    Args:
        layers: The layers by their numbers.
        remote: Access to their tensors.

    Attributes:
        remote: Access to the layers' tensors.
    """

    def __init__(self, layers: Mapping[int, nn.Module], remote: RemoteTensors) -> None:
        self._layers = layers
        self.remote = remote
        self._undo = ExitStack()
        # Tensors left out of state dicts, and not fetched.
        self._left_out: set[Tensor] = set()
        # The tensors given to state dicts.
        self._given: list[_Given] = []

    def attach(self) -> None:
        """Install the hooks; the layers must be empty."""
        for number, layer in self._layers.items():
            outermost = in_tree(layer)
            for path, module in layer.named_modules():
                start = f"{number}.{path}." if path else f"{number}."
                fill = partial(self._fill, start, module in outermost)
                pass_on = partial(self._pass_on, start)
                self._undo.callback(module.register_state_dict_post_hook(fill).remove)
                self._undo.callback(module.register_load_state_dict_pre_hook(pass_on).remove)

    def detach(self) -> None:
        """Remove the hooks; the layers must have their content again."""
        self._undo.close()

    @contextmanager
    def leaving_out(self, tensors: set[Tensor]) -> Iterator[None]:
        """Inside, state dicts lack some tensors."""
        self._left_out = tensors
        try:
            yield
        finally:
            self._left_out = set()

    def changed_key(self) -> str | None:
        """The key of a state dict's tensor, fetched from a worker and changed in place since, if
        there is one. On one device such a change would be in the weight."""
        # A tensor without references cannot change any more; an earlier change stays.
        self._given = [
            each for each in self._given if each.alias.has_changed or each.tensor() is not None
        ]
        return next((each.key for each in self._given if each.alias.has_changed), None)

    def _fill(
        self,
        start: str,
        is_outermost: bool,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        _metadata: Any,
    ) -> None:
        """Replace the ``meta`` tensors in a state dict, with one request per layer."""
        if not is_outermost and _has_entered_parent(state, prefix, start):
            return  # the parent's hook fetches these tensors too
        if self._left_out:
            leave_out(state, keys_of(self._left_out, module, prefix), prefix)
        names = _names_by_key(module, prefix, state, start)
        if not names:
            return
        found = self.remote.fetch(list(dict.fromkeys(names.values())))
        for key in [key for key in state if key.startswith(prefix)]:
            # Each key is removed and added again, so that a tensor's quantization state follows it.
            content = state.pop(key)
            if key in names:
                content, parts = found[names[key]], state_in(found, names[key])
                if not content.is_inference():
                    self._given.append(_Given.of(names[key], key, content))
                state.update(flatten(key, content, parts))
            else:
                state[key] = content

    def _pass_on(
        self,
        start: str,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *_rest: Any,
    ) -> None:
        """Store the tensors that ``load_state_dict`` would copy into a module's ``meta``
        tensors."""
        if metadata.get("assign_to_params_buffers"):
            raise ModelError(
                f"{prefix.rstrip('.')} lives on a worker, and load_state_dict(assign=True) would "
                "put other parameters in the place of its own; call it without `assign`."
            )
        sent = {}
        for leaf, place in places(module).items():
            tensor, content = tensor_at(module, leaf), state.get(prefix + place)
            if content is not None and not content.is_meta and content.shape == tensor.shape:
                # The state of a tensor in 4 bits is sent too; torch would call it unexpected.
                parts = state_in(state, prefix + place)
                for part in parts:
                    del state[f"{prefix}{place}.{part}"]
                sent.update(flatten(start + leaf, content.to(tensor.dtype), parts))
                # torch then checks the shape of this meta tensor and copies nothing.
                del state[prefix + place]
                state[prefix + leaf] = torch.empty_like(content, device="meta")
        if sent:
            self.remote.store(sent)
            self._given = [
                replace(each, alias=Stamp.of(each.alias.tensor)) if each.name in sent else each
                for each in self._given
            ]


def _has_entered_parent(state: dict[str, Any], prefix: str, start: str) -> bool:
    """Whether this call of ``state_dict`` reached a module through its parent.

    torch notes every module in the metadata before it enters the module's children.
    """
    own = f"{start.split('.')[-2]}."
    parent = prefix.removesuffix(own)
    return parent != prefix and parent[:-1] in getattr(state, "_metadata", {})


def _names_by_key(
    module: nn.Module, prefix: str, state: dict[str, Any], start: str
) -> dict[str, str]:
    """The names of a module's tensors on ``meta`` in a state dict.

    A tensor under two keys of the module gets one name.
    """
    names: dict[str, str] = {}
    first: dict[int, str] = {}
    for key, (path, tensor) in tensors_by_key(module, prefix).items():
        content = state.get(key)
        if isinstance(content, Tensor) and content.is_meta:
            names[key] = first.setdefault(id(tensor), start + path)
    return names
