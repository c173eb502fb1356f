"""The wing of adapters: what describes, builds and watches layers takes it in here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from .adapters import AdapterSwitches
    from .layers import Adapters


def describe_adapters(owner: nn.Module, layers: Sequence[nn.Module]) -> Adapters | None:
    """Describe the adapters inside a model's layers, if there are any.

    Raises:
        ModelError: If they cannot be injected elsewhere, or are merged into the weights.
    """
    if not _are_of_peft(layers):
        return None
    from . import adapters

    return adapters.describe_adapters(owner, layers)


def inject_adapters(model: nn.Module, described: Adapters) -> None:
    """Put adapters without content into a model on ``meta``.

    Raises:
        ModelError: If peft is missing here or cannot inject them.
    """
    from . import adapters

    adapters.inject_adapters(model, described)


def adapter_switches(layer: nn.Module) -> AdapterSwitches | None:
    """Detects changes of a layer's adapters; None without adapters."""
    if not _are_of_peft([layer]):
        return None
    from .adapters import AdapterSwitches

    return AdapterSwitches(layer)


def _are_of_peft(layers: Iterable[nn.Module]) -> bool:
    """Whether layers have modules of PEFT, or of classes made from its own."""
    kinds = {type(module) for layer in layers for module in layer.modules()}
    packages = {base.__module__.partition(".")[0] for kind in kinds for base in kind.__mro__}
    return "peft" in packages
