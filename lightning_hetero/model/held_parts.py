"""What layers that are away consist of: another tensor or module, or a hook, would have no effect.

A worker has built the layers as they were, and computes with that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..errors import ModelError
from .captured_outputs import has_hooks
from .half_layers import in_tree
from .layers import DecoderLayer
from .tensors import locate, named_tensors

# Hooks of Lightning, such as those of its profiler and its summary, observe and change nothing.
_OBSERVERS = ("lightning.", "pytorch_lightning.")


class HeldParts:
    """The tensors and modules of layers that are away.

    Args:
        layers: The layers by their numbers; their tensors are on ``meta``.
    """

    def __init__(self, layers: Mapping[int, DecoderLayer]) -> None:
        modules = {number: layer.module for number, layer in layers.items()}
        # Each tensor with its full name, and with the dictionary and key that hold it.
        self._tensors: list[tuple[str, Mapping[str, Tensor | None], str, Tensor]] = []
        for name, tensor in named_tensors(modules):
            owner, leaf, _ = locate(modules, name)
            number, _, inner = name.partition(".")
            held = owner._parameters if leaf in owner._parameters else owner._buffers
            self._tensors.append((f"{layers[int(number)].name}.{inner}", held, leaf, tensor))
        # Each module with its full name, and with its children.
        self._modules = [
            (f"{layer.name}.{path}".rstrip("."), module, dict(module._modules))
            for layer in layers.values()
            for path, module in layer.module.named_modules()
        ]
        # A hook on the layer itself is called where the model calls the layer: here.
        called_here = {part for layer in layers.values() for part in in_tree(layer.module)}
        self._silent = [(n, module) for n, module, _ in self._modules if module not in called_here]
        # The number of hooks of this process so far.
        self._num_hooks = RemovableHandle.next_id

    def check(self) -> None:
        """Refuse what was put into the layers: the worker would not get it.

        Raises:
            ModelError: With its name and the remedy.
        """
        with torch._C.DisableTorchFunctionSubclass():  # otherwise `is_meta` is slow
            for name, held, leaf, tensor in self._tensors:
                if held.get(leaf) is not tensor or not tensor.is_meta:
                    raise ModelError(
                        f"{name} was replaced by another tensor, but its layer lives on a worker, "
                        "which computes with the old one. Set its content with "
                        "`load_state_dict()`, or keep the layer with the coordinator."
                    )
        for name, module, children in self._modules:
            if module._modules != children:
                names = [*children, *module._modules]
                child = next(n for n in names if children.get(n) is not module._modules.get(n))
                raise ModelError(
                    f"{name}.{child} was added, removed or replaced by another module, but its "
                    "layer lives on a worker, which computes with the modules that it had before. "
                    "Do it before `fit`, or keep the layer with the coordinator."
                )
        if RemovableHandle.next_id != self._num_hooks:
            self._check_hooks()
            self._num_hooks = RemovableHandle.next_id

    def _check_hooks(self) -> None:
        for name, module in self._silent:
            if has_hooks(module, besides=_observes):
                raise hook_away(name)


def hook_away(name: str) -> ModelError:
    """The error for a hook of a module that is away."""
    return ModelError(
        f"{name} has a hook, which would not fire on a worker. Remove the hook, or keep the layer "
        "with the coordinator."
    )


def _observes(hook: Callable[..., Any]) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(_OBSERVERS)
