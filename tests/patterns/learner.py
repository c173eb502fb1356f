"""What the patterns begin with: a small LightningModule, its layers, and batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

FEATURES = 6
WIDTH = 16
CLASSES = 5
LENGTH = 6
BATCH_SIZE = 8
NUM_LAYERS = 4
NUM_STEPS = 3


class Block(nn.Module):
    """An ordinary layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.grow = nn.Linear(WIDTH, 24)
        self.shrink = nn.Linear(24, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.update(hidden)

    def update(self, hidden: Tensor) -> Tensor:
        """What the layer adds."""
        update: Tensor = self.shrink(self.grow(self.norm(hidden)).tanh())
        return update


class Learner(pl.LightningModule):
    """Classifies every position of a sequence; each pattern changes one thing of it."""

    # What the layers are made by.
    layer: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(FEATURES, WIDTH)
        made: Any = type(self).layer
        self.layers = nn.ModuleList(made() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)
        # Losses of samples are to differ, so that what weighs them wrongly is seen.
        nn.init.normal_(self.head.weight, std=0.7)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.leave(hidden)

    def leave(self, hidden: Tensor) -> Tensor:
        """What follows the layers."""
        logits: Tensor = self.head(hidden)
        return logits

    def loss(self, batch: Any) -> Tensor:
        """Of one batch."""
        inputs, targets = batch
        return cross_entropy(self(inputs), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Evaluated(Learner):
    """Validates and predicts too."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=BATCH_SIZE)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits: Tensor = self(batch[0])
        return logits


class Manual(Learner):
    """Optimizes by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.log("loss", loss)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def cross_entropy(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Over all positions."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), **options)


def sample(number: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one sequence. Later samples are larger, so that pieces differ."""
    generator = torch.Generator().manual_seed(number)
    size = 1.0 + 0.3 * (number % BATCH_SIZE)
    inputs = size * torch.randn(LENGTH, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (LENGTH,), generator=generator)


def all_samples() -> list[tuple[Tensor, Tensor]]:
    """Those of all steps."""
    return [sample(number) for number in range(BATCH_SIZE * NUM_STEPS)]


def batches_of(items: Any, **options: Any) -> DataLoader[Any]:
    """Batches of these samples in their order."""
    return DataLoader(items, **{"batch_size": BATCH_SIZE, **options})


def samples() -> DataLoader[Any]:
    """Batches of inputs and targets."""
    return batches_of(all_samples())
