"""Layers as public projects write them: with closures, static methods and records of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 8


@dataclass
class Derived:
    """Its constructor computes more than the fields, as many configs do."""

    width: int = WIDTH
    heads: int = 2

    def __post_init__(self) -> None:
        self.per_head = self.width // self.heads
        self.names = [f"head {number}" for number in range(self.heads)]

    @cached_property
    def scale(self) -> float:
        return float(self.per_head) ** -0.5


def scaled(factor: float, shift: float = 0.0) -> Callable[..., Tensor]:
    """A function that keeps its factor."""

    def run(x: Tensor, times: float = 1.0, *, more: float = 1.0) -> Tensor:
        return x * (factor * times * more) + shift

    return run


class Loose(nn.Module):
    """A block whose attributes are code."""

    def __init__(self, seed: int, factor: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.settings = Derived()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.value = nn.ModuleDict({"line": nn.Linear(WIDTH, WIDTH)})
        self.mix = lambda x: self.gate(x).sigmoid() * self.value["line"](x) * factor
        self.squash = Loose.tanh
        self.after = self.soften
        self.scaled = scaled(0.25, shift=0.1)
        self.gelu = partial(functional.gelu, approximate="tanh")
        self.norm_class = nn.LayerNorm
        self.order = [self.gate, self.value["line"]]
        narrow = self.gate

        def through(x: Tensor) -> Tensor:
            return narrow(x) + self.mix(x)

        self.through = through

    @staticmethod
    def tanh(x: Tensor) -> Tensor:
        return torch.tanh(x)

    def soften(self, x: Tensor) -> Tensor:
        return x * self.settings.scale

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.squash(self.mix(x)) + self.gelu(self.through(x))
        for module in self.order:
            x = x + self.after(self.scaled(module(x), more=0.5))
        assert self.norm_class is nn.LayerNorm
        return x + self.settings.per_head * 0.01 * len(self.settings.names)


class Outside(nn.Module):
    """Refers to a module that is not in it."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.run = lambda x: other(self.line(x))

    def forward(self, x: Tensor) -> Any:
        return self.run(x)
