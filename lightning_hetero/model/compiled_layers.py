"""Layers compiled by the user with `torch.compile`, each by itself.

A worker gets the layer without the wrapper, and the plan says whether the worker compiles it. So
all layers of such a model run uncompiled while some are on workers:

    layers.3 = torch.compile(layer)      a wrapper, with the layer as its child `_orig_mod`
    layers.3.compile()                   the layer itself: it calls compiled code
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from .override import ForwardOverride, stand_in

_CHILD = "_orig_mod"
_IN_PLACE = "_compiled_call_impl"


def without_wrapper(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """The name and module of a layer inside its wrapper, if it has one."""
    while _CHILD in module._modules:
        name, module = f"{name}.{_CHILD}", module.get_submodule(_CHILD)
    return name, module


def without_wrapper_names(path: str) -> str:
    """The path of a module without wrappers."""
    return ".".join(part for part in path.split(".") if part != _CHILD)


def compiles_only(part: nn.Module, layer: nn.Module) -> bool:
    """Whether a compiled module is this layer, or its wrapper."""
    return part is layer or without_wrapper("", part)[1] is layer


def uncompile(root: nn.Module, layers: Iterable[nn.Module]) -> list[Callable[[], None]]:
    """Let layers run uncompiled; returns functions that undo it.

    Args:
        root: The LightningModule.
        layers: The layers inside their wrappers.
    """
    inside = set(layers)
    undo: list[Callable[[], None]] = []
    for module in root.modules():
        if _CHILD in module._modules and without_wrapper("", module)[1] in inside:
            undo.append(_Uncompiled(module).put_on().take_off)
        elif module in inside and vars(module).get(_IN_PLACE) is not None:
            undo.append(stand_in(module, _IN_PLACE, None))
    return undo


class _Uncompiled(ForwardOverride):
    """The ``forward`` of a wrapper that calls its layer as it is."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.get_submodule(_CHILD)(*args, **kwargs)
