"""Layers that keep something from one forward to the next, in a module that workers import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .models import VOCABULARY
from .own_layers import WIDTH, OwnModule, Settings


class Running(nn.Module):
    """Normalizes over the batch, drops at random, and counts its calls in a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen += 1
        mixed = self.norm(self.line(hidden).transpose(1, 2)).transpose(1, 2)
        return hidden + self.dropout(mixed)


class Keeping(nn.Module):
    """A linear layer; subclasses say what it keeps between forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.line(hidden).tanh() * self.factor(hidden)

    def factor(self, hidden: Tensor) -> Any:
        """What the layer's update is multiplied by."""
        raise NotImplementedError


class Caching(Keeping):
    """Computes something once, until the model resets it."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: Tensor | None = None

    def factor(self, hidden: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = hidden.detach().mean()
        return self.cache


class Counting(Keeping):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def factor(self, hidden: Tensor) -> float:
        self.num_calls += 1
        return 1.0 / self.num_calls


class Listing(Keeping):
    """Changes a list in place."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def factor(self, hidden: Tensor) -> float:
        self.seen.append(float(hidden.detach().mean()))
        return self.seen[0]


class CachingInTable(Keeping):
    """Keeps tensors in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.table: dict[int, Tensor] = {}

    def factor(self, hidden: Tensor) -> Tensor:
        return self.table.setdefault(0, hidden.detach().mean())


@dataclass
class Progress:
    """State outside of the layer itself."""

    num_calls: int = 0


class CountingInside(Keeping):
    """Counts in an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.progress = Progress()

    def factor(self, hidden: Tensor) -> float:
        self.progress.num_calls += 1
        return 1.0 / self.progress.num_calls


class CountingInClass(Keeping):
    """Counts outside of itself, in its class."""

    num_calls: ClassVar[int] = 0

    def factor(self, hidden: Tensor) -> float:
        CountingInClass.num_calls += 1
        return 1.0


class Restoring(Keeping):
    """Has something in an attribute only while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.present: Tensor | None = None

    def factor(self, hidden: Tensor) -> Tensor:
        self.present = hidden.sigmoid()
        found, self.present = self.present, None
        return found


class Scaled(Keeping):
    """Reads settings that a user may change during the run."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0
        self.window: int | None = None
        self.settings = Settings()
        self.options = {"gain": [1.0, 2.0]}

    def factor(self, hidden: Tensor) -> Tensor:
        factor = self.settings.factor * self.options["gain"][1] / self.temperature
        seen = torch.ones(hidden.shape[1], device=hidden.device) * factor
        return (seen if self.window is None else seen + seen[: self.window].sum())[:, None]


class Averaging(Keeping):
    """Keeps a running mean of its inputs in a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))

    def factor(self, hidden: Tensor) -> Tensor:
        self.mean.lerp_(hidden.detach().mean((0, 1)), 0.1)
        return self.mean.clone()


class LayeredModel(nn.Module):
    """An embedding, layers that are called one after the other, and a head."""

    def __init__(self, make: Callable[[], nn.Module], num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class LayeredModule(OwnModule):
    """An ordinary LightningModule around layers of one kind."""

    def __init__(self, make: Callable[[], nn.Module], num_layers: int = 3) -> None:
        super().__init__(1)
        self.model = LayeredModel(make, num_layers)  # type: ignore[assignment]

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.model(batch["input_ids"])


class Growing(Keeping):
    """Keeps a table for each position in a buffer, which grows with the longest sequence."""

    table: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0, WIDTH), persistent=False)

    def factor(self, hidden: Tensor) -> Tensor:
        if self.table is None or len(self.table) < hidden.shape[1]:
            self.table = torch.ones(hidden.shape[1], WIDTH)
        return self.table[: hidden.shape[1]]


class Following(Keeping):
    """Has a target network of its own weights that its forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def factor(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.target.data.mul_(0.9)
        return self.target.clone()


class Scaling(Keeping):
    """Brings its weights to a norm of 1 in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.full((WIDTH,), 3.0))

    def factor(self, hidden: Tensor) -> Tensor:
        self.scales.data = nn.functional.normalize(self.scales.data, dim=0)
        return self.scales.clone()
