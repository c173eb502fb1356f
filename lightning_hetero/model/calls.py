"""How a model calls a decoder layer, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerCall:
    """One call of one layer, its hidden states left out."""

    layer_index: int
    training: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
