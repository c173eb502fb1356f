"""Optimizers as users write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def loss_of(closure: Any) -> Any:
    """What a closure returns; None without one."""
    with torch.enable_grad():
        return None if closure is None else closure()


class Lion(Optimizer):
    """Steps each parameter by the sign of its momentum."""

    def __init__(self, params: Any, lr: float = 0.01, betas: Any = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = loss_of(closure)
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.add_((momentum * first + p.grad * (1 - first)).sign(), alpha=-group["lr"])
                momentum.mul_(second).add_(p.grad, alpha=1 - second)
        return loss


class Counting(Lion):
    """Counts its steps in the group, and warms up by that count."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = min(1.0, group["count"] / 4) * 0.02
        return super().step(closure)


class CountingWithGradients(Counting):
    """Counts only where it has gradients: a process without any would count otherwise."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if any(p.grad is not None for p in group["params"]):
                group["count"] = group.get("count", 0) + 1
            group["lr"] = min(1.0, group.get("count", 0) / 4) * 0.02
        return Lion.step(self, closure)


class InFloat32(Optimizer):
    """Keeps its momentum in float32, beside weights of any dtype."""

    def __init__(self, params: Any, lr: float = 0.003) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = loss_of(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                wide = torch.zeros_like(p, dtype=torch.float32)
                momentum = self.state[p].setdefault("momentum", wide)
                momentum.mul_(0.9).add_(p.grad.float())
                p.copy_(p.float() - group["lr"] * momentum)
        return loss


class Normalized(Lion):
    """Divides all gradients by their common norm."""

    def step(self, closure: Any = None) -> Any:
        found = [p.grad for group in self.param_groups for p in group["params"]]
        gradients: list[Tensor] = [gradient for gradient in found if gradient is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for group in self.param_groups:
            group["lr"] = 0.01 * float(norm)
        return super().step(closure)


class Noisy(Lion):
    """Adds noise."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(torch.randn_like(p))
        return super().step(closure)


class Decreasing(Optimizer):
    """Steps less and less, by a count in an attribute, which no other process has."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = loss_of(closure)
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, group["lr"])
        return loss

    def _step(self, p: Tensor, lr: float) -> None:
        assert p.grad is not None
        p.sub_(p.grad, alpha=lr / self.count)


class Preconditioned(Decreasing):
    """Keeps a square for each side of a matrix, as Shampoo does."""

    def _step(self, p: Tensor, lr: float) -> None:
        assert p.grad is not None
        p.sub_(p.grad, alpha=lr)
        if p.ndim == 2:
            state = self.state[p]
            for key, square in (("left", p.grad @ p.grad.T), ("right", p.grad.T @ p.grad)):
                state[key] = state.get(key, 0) + square
            p.sub_(state["left"] @ p.grad @ state["right"], alpha=lr)


class OfBase(torch.optim.SGD):
    """Lets its base step."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        # Torch runs the hooks of a base's step where an optimizer of the base was made.
        torch.optim.SGD([torch.ones(1)], lr)
        super().__init__(params, lr)

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(p.grad, alpha=group["lr"])
        return loss


class Wanting(Lion):
    """Its constructor wants more than its defaults."""

    def __init__(self, params: Any, model: Any) -> None:
        super().__init__(params, lr=0.01)
        self.model = model


class Sparing(torch.optim.SGD):
    """Steps by the gradient of an L1 penalty of weight 0.01 too."""

    def step(self, closure: Any = None) -> Any:
        loss = loss_of(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(p.data.sign(), alpha=0.01 * group["lr"])
        super().step()
        return loss


class SlowAdamW(torch.optim.AdamW):
    """Lookahead: every second step the weights go half of the way that they have gone since."""

    def step(self, closure: Any = None) -> Any:
        loss = loss_of(closure)
        parameters = [p for group in self.param_groups for p in group["params"]]
        stepped = [p for p in parameters if p.grad is not None]
        before = {p: p.data.clone() for p in stepped if "slow" not in self.state[p]}
        super().step()
        for p in stepped:
            slow = self.state[p].setdefault("slow", before.get(p))
            if float(self.state[p]["step"]) % 2 == 0:
                p.data.copy_(slow.lerp_(p.data, 0.5))
        return loss


class Centering(torch.optim.SGD):
    """Takes the mean off gradients, before or after those of the batch are there."""

    is_early = True

    def step(self, closure: Any = None) -> Any:
        if not self.is_early and closure is not None:
            with torch.enable_grad():
                closure()
            closure = None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.sub_(p.grad.mean())
        return super().step(closure)


class CenteringLater(Centering):
    """Takes it off when they are there."""

    is_early = False
