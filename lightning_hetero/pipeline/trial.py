"""A trial: a layer's forward that computes what it would in training, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def on_trial(layer: nn.Module) -> Iterator[None]:
    """Inside, a layer drops nothing at random, and only what normalizes over a batch keeps its
    mode. Behind it modes and buffers are what they were, and no buffer counts as changed."""
    modes = {module: module.training for module in layer.modules()}
    buffers = {module: dict(module._buffers) for module in modes}
    copies: dict[Tensor, Tensor] = {}
    try:
        for module in modes:
            if not isinstance(module, _BatchNorm):
                module.training = False
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    # Modules may share one, and what one writes the other one reads.
                    module._buffers[name] = copies.setdefault(buffer, buffer.clone())
        yield
    finally:
        for module, training in modes.items():
            module.training = training
            module._buffers.clear()
            module._buffers.update(buffers[module])
