"""Blocks that leave a part of their work to objects, as those of diffusers do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from .own_layers import WIDTH, Settings, squared_relu

T = TypeVar("T")


class Stateless:
    """Has nothing but its code."""

    made = 0

    def __init__(self) -> None:
        Stateless.made += 1

    def __call__(self, block: ProcessedBlock, hidden: Tensor) -> Tensor:
        return torch.tanh(block.mix(hidden))


class Rule(ABC, Generic[T]):
    """What an object derives from."""

    scale = 0.25

    @abstractmethod
    def __matmul__(self, hidden: Tensor) -> Tensor: ...


class Scaled(Rule[int]):
    """Is called by an operator, and has an attribute in front of one of its class."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.settings = Settings(factor=0.5)
        self.activation = squared_relu

    def __matmul__(self, hidden: Tensor) -> Tensor:
        return self.activation(hidden) * self.scale * self.settings.factor


class Several:
    """Has other objects, and the block that has it."""

    def __init__(self, block: ProcessedBlock) -> None:
        self.rules = [Scaled(0.5), Scaled(0.75)]
        self.named = {"last": (Scaled(1.0),)}
        self.block = block

    def apply(self, hidden: Tensor) -> Tensor:
        for rule in self.rules:
            hidden = hidden + rule @ hidden
        return self.block.norm(hidden + self.named["last"][0] @ hidden)


class Counting:
    """Keeps state in a forward, which a worker cannot report."""

    def __init__(self) -> None:
        self.inner = [Scaled(1.0)]

    def __call__(self, _block: Any, hidden: Tensor) -> Tensor:
        self.inner[0].scale += 1.0
        return hidden * self.inner[0].scale


class ProcessedBlock(nn.Module):
    """Delegates to its objects."""

    def __init__(self, seed: int = 0, processor: Any = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.processor = processor or Stateless()
        self.several = Several(self)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.several.apply(self.processor(self, hidden))


class Context:
    """What a block tells its parts, and they each other."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.marks: list[float] = []


class Part(nn.Module):
    """Reads what its block has put into the context."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.context = context
        self.marks = context.marks

    def forward(self, hidden: Tensor) -> Tensor:
        self.marks.append(2.0)
        return self.line(hidden).tanh() * self.context.scale


class TellingBlock(nn.Module):
    """Its context is as before when it ends, so that it keeps no state."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.context = Context()
        self.part = Part(self.context)

    def forward(self, hidden: Tensor) -> Tensor:
        self.context.scale = 0.5
        found = self.part(hidden)
        self.context.scale = 1.0
        return hidden + found * self.context.marks.pop()
