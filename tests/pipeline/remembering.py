"""A layer that keeps what it has seen in a key-value cache, and a stage of such layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from lightning_hetero.model.layer_call import CacheUse, LayerCall
from lightning_hetero.pipeline.boundary import Activation, Surroundings
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.pipeline.stage import Stage

ONE = torch.ones(2, 1, 3)


class Remembering(nn.Module):
    """Adds up all that it has ever seen; `asks` is the layer whose memory it uses."""

    def __init__(self, layer_idx: int, asks: int | None = None) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.asks = layer_idx if asks is None else asks

    def forward(self, hidden: Tensor, first: Any = None, past: Cache | None = None) -> Tensor:
        cache = first if past is None else past
        keys, _ = cache.update(hidden[:, None], hidden[:, None], self.asks)
        return hidden + keys.sum(dim=2)


def stage_of(*modules: nn.Module) -> Stage:
    layers = nn.ModuleDict({str(4 + i): module for i, module in enumerate(modules)})
    return Stage(layers, torch.device("cpu"), stage_index=1)


def surroundings(*uses: CacheUse) -> Surroundings:
    calls = [
        LayerCall(4 + i, False, (None,) if use.place == 0 else (), {}, cache=use)
        for i, use in enumerate(uses)
    ]
    return Surroundings(False, None, calls)


def run(stage: Stage, *uses: CacheUse, hidden: Tensor = ONE) -> Tensor:
    return stage.forward(Key(0), Activation(hidden), surroundings(*uses)).hidden


def use(number: int = 1, length: int = 0, **options: Any) -> CacheUse:
    return CacheUse(number, options.pop("place", "past"), length, **options)
