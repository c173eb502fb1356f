"""Layers compiled by `torch.compile`, each by itself, as the plan's ``compile`` asks.

Layers that are alike share what is compiled: torch keeps it by the code of their class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Call = Callable[..., Any]

INDUCTOR = "inductor"


def compiled(function: Call, backend: str = INDUCTOR) -> Call:
    """The function, compiled when it is first called; sizes that change become dynamic.

    Args:
        backend: torch's name for what compiles.
    """
    # Random numbers as without compilation, so that a forward that runs again has the same masks.
    options: dict[str, Any] | None = {"fallback_random": True} if backend == INDUCTOR else None
    found: Call = torch.compile(function, backend=backend, options=options)
    return found


@dataclass
class CompiledLayers:
    """The layers of a stage, each compiled when it is first called.

    Args:
        backend: As in `compiled`.
    """

    backend: str = INDUCTOR
    _calls: dict[nn.Module, Call] = field(default_factory=dict)

    def of(self, layer: nn.Module) -> Call:
        """What is called instead of the layer."""
        if layer not in self._calls:
            self._calls[layer] = compiled(layer.forward, self.backend)
        return self._calls[layer]
