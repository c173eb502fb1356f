"""Layers as a user writes them, without Hugging Face, in a module that can be imported."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .models import SEQUENCE_LENGTH, VOCABULARY, TinyModule

WIDTH = 16


@dataclass
class Settings:
    """What nanoGPT and its like keep in every block."""

    heads: int = 2
    factor: float = 0.5


class Order(enum.Enum):
    """Where the norm stands."""

    BEFORE = "before"
    BEHIND = "behind"


def squared_relu(x: Tensor) -> Tensor:
    """An activation of the user's own."""
    return functional.relu(x).square()


class Ramp(nn.Module):
    """Makes tensors in its forward, and names no dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        steps = torch.linspace(0, 1, WIDTH) / torch.tensor(3.0)
        return hidden + torch.tanh(self.mix(hidden)) * steps


class Gain(nn.Module):
    """Has a bare parameter, a buffer that is saved and one that is not."""

    table: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.register_buffer("scale", torch.full((1,), 0.8))
        self.register_buffer("table", torch.rand(WIDTH), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.gain * self.scale + self.table


class Block(nn.Module):
    """Attention and a perceptron; what its constructor wants cannot be guessed from the object."""

    def __init__(self, settings: Settings, *, width: int, seed_of_weights: int) -> None:
        super().__init__()
        torch.manual_seed(seed_of_weights)
        self.settings = settings
        self.order = Order.BEFORE
        self.activation = squared_relu
        self.final = functional.gelu
        self.dims = {"split": (2, -1), "width": [width]}
        self.lowest = float("-inf")
        self.dtype_of_mask = torch.bool
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width, bias=False)
        self.gain = Gain()
        self.grow = nn.Sequential(nn.Linear(width, 24), nn.Dropout(0.0))
        self.shrink = nn.ModuleDict({"out": nn.Linear(24, width)})
        self.nothing = None
        # One weight in two places of the block.
        self.tied = nn.Linear(width, width)
        self.again = nn.Linear(width, width)
        self.again.weight = self.tied.weight

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        normed = self.norm(x) if self.order is Order.BEFORE else x
        query, key, value = (
            part.unflatten(-1, (self.settings.heads, -1)).transpose(1, 2)
            for part in self.mix(normed).chunk(3, dim=-1)
        )
        scores = query @ key.transpose(-1, -2) * self.settings.factor
        if mask is not None:
            scores = scores.masked_fill(mask.to(self.dtype_of_mask), self.lowest)
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        x = x + self.gain(mixed) * scale
        x = x + self.shrink["out"](self.activation(self.grow(x)))
        return x + self.final(self.again(self.tied(x)))


class Stack(nn.Module):
    """A small language model: embedding, blocks, head."""

    def __init__(self, num_layers: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        settings = Settings()
        self.blocks = nn.ModuleList(
            Block(settings, width=WIDTH, seed_of_weights=number) for number in range(num_layers)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        mask = torch.ones(SEQUENCE_LENGTH, SEQUENCE_LENGTH, device=tokens.device).triu(1).bool()
        mask = mask.expand(len(tokens), 1, -1, -1)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, mask, scale=1.0 / (1 + number))
        logits: Tensor = self.head(hidden)
        return logits


class OwnModule(TinyModule):
    """An ordinary LightningModule around it."""

    def __init__(self, num_layers: int = 5) -> None:
        super().__init__(1)
        self.model = Stack(num_layers)  # type: ignore[assignment]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"])
        labels = batch["labels"][:, 1:].flatten()
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def pack_into_four_bits(root: nn.Module) -> None:
    """Store the linear layers of a model in 4 bits, but for those that share a weight."""
    import bitsandbytes

    weights = [p for module in root.modules() for p in module.parameters(recurse=False)]
    for module in list(root.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and sum(p is child.weight for p in weights) == 1:
                linear = bitsandbytes.nn.Linear4bit(
                    child.in_features,
                    child.out_features,
                    bias=child.bias is not None,
                    compute_dtype=torch.float32,
                    quant_type="nf4",
                )
                linear.load_state_dict(child.state_dict())
                setattr(module, name, linear.to("cpu"))
