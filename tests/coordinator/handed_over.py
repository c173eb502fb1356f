"""A whole batch, and the hand-over of it to a layer with arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.boundary import Surroundings
from lightning_hetero.pipeline.handover import Request

BATCH = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0))


class Computing(nn.Module):
    """A layer that computes with its arguments too."""

    def __init__(self, layer: Callable[..., Tensor]) -> None:
        super().__init__()
        self._layer = layer

    def forward(self, hidden: Tensor, *arguments: Any) -> Tensor:
        return self._layer(hidden, *arguments)


def request_with(*arguments: Any, **of_call: Any) -> Request:
    call = LayerCall(1, True, arguments, {}, **of_call)
    return Request(BATCH, Surroundings(True, None, [call]))
