"""Layers and optimizers that read what changes in mid-run, each in another place."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .own_optimizers import loss_of
from .patterns.learner import Block

SCALE = 1.0
SETTINGS = {"scale": 1.0}


def scaled(update: Tensor, scale: float = 1.0) -> Tensor:
    """What a layer adds."""
    return update * scale


@lru_cache
def scale_by_environment() -> float:
    return float(os.environ.get("SCALE_OF_LAYERS", "1"))


class Box:
    """Holds a number."""

    def __init__(self) -> None:
        self.scale = 1.0


class InAttributes(Block):
    """Reads a dictionary, a list and an object among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = {"scale": 1.0}
        self.scales = [1.0]
        self.box = Box()

    def update(self, hidden: Tensor) -> Tensor:
        scale = self.settings["scale"] * self.scales[0] * self.box.scale
        return super().update(hidden) * scale


class InGlobals(Block):
    """Reads globals of its module, and calls its functions."""

    def update(self, hidden: Tensor) -> Tensor:
        return scaled(super().update(hidden)) * (SCALE * SETTINGS["scale"])


class InClass(Block):
    """Reads an attribute of its class."""

    scale = 1.0

    def update(self, hidden: Tensor) -> Tensor:
        return super().update(hidden) * self.scale


class InEnvironment(Block):
    """Reads the environment at each call."""

    def update(self, hidden: Tensor) -> Tensor:
        return super().update(hidden) * float(os.environ.get("SCALE_OF_LAYERS", "1"))


class InCache(Block):
    """Reads what a function has kept."""

    def update(self, hidden: Tensor) -> Tensor:
        return super().update(hidden) * scale_by_environment()


class ByTorch(Block):
    """Calls functions of torch."""

    def update(self, hidden: Tensor) -> Tensor:
        update: Tensor = functional.softplus(super().update(hidden))
        return update


class Doubling(torch.autograd.Function):
    """Passes hidden states on, and gradients twice as large."""

    factor = 2.0

    @staticmethod
    def forward(_ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * Doubling.factor


class InBackward(Block):
    """Reads a number in its backward alone."""

    def update(self, hidden: Tensor) -> Tensor:
        found: Tensor = Doubling.apply(super().update(hidden))  # type: ignore[no-untyped-call]
        return found


class InTraining(Block):
    """Reads a global in training alone."""

    def update(self, hidden: Tensor) -> Tensor:
        return super().update(hidden) * (SCALE if self.training else 1.0)


class Descent(torch.optim.Optimizer):
    """Descends; numbers in places of its own change how far."""

    scale = 1.0
    start_of_coupling = 10**9

    def __init__(self, params: Any, lr: float = 0.1, factor: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "factor": factor})
        self.own_scale = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = loss_of(closure)
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for p in trained:
                self.state[p]["step"] = self.state[p].get("step", 0) + 1
            by = self.scale * self.own_scale * self.defaults["factor"]
            for p in trained:
                p.add_(p.grad, alpha=-group["lr"] * by / self.norm(trained))
        return loss

    def norm(self, trained: list[Any]) -> float:
        """What the step is divided by."""
        return 1.0


class CouplingLater(Descent):
    """Divides by the common norm, from a step on."""

    def norm(self, trained: list[Any]) -> float:
        if self.state[trained[0]]["step"] < 8:
            return 1.0
        return float(torch.stack([p.grad.norm() for p in trained]).norm())


class CouplingLarge(Descent):
    """Divides by the common norm where that is large."""

    def norm(self, trained: list[Any]) -> float:
        return max(1.0, float(torch.stack([p.grad.norm() for p in trained]).norm()) / 100)


class CouplingInWindow(Descent):
    """Divides by the common norm at sizes that no trial has."""

    def norm(self, trained: list[Any]) -> float:
        found = float(torch.stack([p.grad.norm() for p in trained]).norm())
        return found if 1e-3 < found < 1.0 else 1.0


class GrowingLater(Descent):
    """Has a number in its group that grows with the common norm, from a step on."""

    def norm(self, trained: list[Any]) -> float:
        if self.state[trained[0]]["step"] >= 8:
            group = self.param_groups[0]
            norm = float(torch.stack([p.grad.norm() for p in trained]).norm())
            group["growth"] = group.get("growth", 1.0) * (1 + norm)
        return self.param_groups[0].get("growth", 1.0)
