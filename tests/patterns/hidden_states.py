"""Hidden states that a model uses between its layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .learner import CLASSES, NUM_LAYERS, WIDTH, Learner, cross_entropy
from .pattern import Pattern

AWAY = r"wants (the )?hidden states (behind layer \d+, which|that) are on a worker"
ALL_BUT_THE_LAST = {"here": NUM_LAYERS - 1}


class Keeping(Learner):
    """Has the hidden states behind each layer."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, kept = self.enter(inputs), []
        for layer in self.layers:
            hidden = layer(hidden)
            kept.append(hidden)
        return self.use(kept)

    def use(self, kept: list[Tensor]) -> Tensor:
        """What becomes of them."""
        raise NotImplementedError


class DeepSupervision(Keeping):
    """Has a head behind every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(NUM_LAYERS))

    def forward(self, inputs: Tensor) -> Any:
        hidden, logits = self.enter(inputs), []
        for layer, head in zip(self.layers, self.heads, strict=True):
            hidden = layer(hidden)
            logits.append(head(hidden))
        return logits

    def loss(self, batch: Any) -> Tensor:
        losses = [cross_entropy(logits, batch[1]) for logits in self(batch[0])]
        return torch.stack(losses).mean()


class LayerMixing(Keeping):
    """Weighs the hidden states of all layers, as ELMo does."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.linspace(0, 1, NUM_LAYERS))

    def use(self, kept: list[Tensor]) -> Tensor:
        mixed = (torch.stack(kept) * self.weights.softmax(0).view(-1, 1, 1, 1)).sum(0)
        return self.leave(mixed)


class EarlyExit(Learner):
    """A sample whose hidden states hardly change leaves the layers."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        for layer in self.layers:
            following = layer(hidden)
            change = (following - hidden).norm(dim=(1, 2), keepdim=True)
            hidden = torch.where(
                change > 0.1 * hidden.norm(dim=(1, 2), keepdim=True), following, hidden
            )
        return self.leave(hidden)


class KeptForTheLoss(Keeping):
    """Penalizes hidden states that were kept in a list."""

    def use(self, kept: list[Tensor]) -> Tensor:
        self.kept = kept
        return self.leave(kept[-1])

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + 0.1 * torch.stack([hidden.square().mean() for hidden in self.kept]).mean()


class LoggedNorms(Learner):
    """Logs how large the hidden states are."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden)
            self.log(f"size_{number}", hidden.detach().square().mean())
        return self.leave(hidden)


class SkipConnection(Learner):
    """Adds the hidden states of an early layer to those of a late one."""

    def forward(self, inputs: Tensor) -> Tensor:
        first = hidden = self.layers[0](self.enter(inputs))
        for layer in self.layers[1:]:
            hidden = layer(hidden)
        return self.leave(hidden + first)


class SumsBetweenLayers(Learner):
    """Has residual connections and masks of its own."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        is_kept = (hidden[..., :1].detach() > -1.0).float()
        for layer in self.layers:
            hidden = hidden + 0.5 * layer(hidden) * is_kept
        return self.leave(hidden)


PATTERNS = [
    Pattern(
        "deep supervision",
        "A head and a loss behind every layer.",
        DeepSupervision,
        refused=AWAY,
        remedy=ALL_BUT_THE_LAST,
    ),
    Pattern(
        "early exit",
        "Samples leave the layers by a norm.",
        EarlyExit,
        refused=AWAY,
        remedy=ALL_BUT_THE_LAST,
    ),
    Pattern(
        "layer mixing",
        "The head sees a weighted mean of all layers' hidden states.",
        LayerMixing,
    ),
    Pattern(
        "hidden states kept in a list",
        "The loss uses hidden states that the forward kept.",
        KeptForTheLoss,
        said="`training_step` changes kept",
    ),
    Pattern(
        "logged norms",
        "Sizes of hidden states are logged and nothing else.",
        LoggedNorms,
        refused=AWAY,
        remedy=ALL_BUT_THE_LAST,
    ),
    Pattern(
        "skip connection",
        "What an early layer gave is added behind the last one.",
        SkipConnection,
    ),
    Pattern(
        "sums between layers",
        "The model adds to the hidden states what each layer returns, times a mask.",
        SumsBetweenLayers,
    ),
]
