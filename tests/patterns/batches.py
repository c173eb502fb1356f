"""Batches of all shapes, and layers that take the sequence first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .learner import (
    BATCH_SIZE,
    CLASSES,
    LENGTH,
    NUM_STEPS,
    WIDTH,
    Evaluated,
    Learner,
    Manual,
    all_samples,
    batches_of,
    cross_entropy,
)
from .pattern import Pattern

ONE_PIECE = "goes through the stages in one piece"


def encoder() -> nn.Module:
    """A layer that takes (length, batch, width), as torch has it by default."""
    return nn.TransformerEncoderLayer(WIDTH, 2, dim_feedforward=24, dropout=0.0)


class SequenceFirst(Evaluated):
    """Turns hidden states for layers of torch that want the sequence first."""

    layer = encoder
    is_masked = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs).transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH) if self.is_masked else None
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask)
        return self.leave(hidden.transpose(0, 1))


class MaskedSequenceFirst(SequenceFirst):
    """With a mask of (length, length)."""

    is_masked = True


class ManualSequenceFirst(Manual, SequenceFirst):
    """Optimizes by hand."""


class ManualMaskedSequenceFirst(Manual, MaskedSequenceFirst):
    """Optimizes by hand, with a mask."""


class LengthFirst(SequenceFirst):
    """Gets batches of (length, batch), so that it turns nothing."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.leave(hidden)


def _turned(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*batch, strict=True)
    return torch.stack(inputs, dim=1), torch.stack(targets, dim=1)


def length_first() -> DataLoader[Any]:
    """A data loader that collates along the second dimension."""
    return batches_of(all_samples(), collate_fn=_turned)


def ready_length_first() -> DataLoader[Any]:
    """The same batches from a data set of batches, of which no loader knows the size."""
    found = all_samples()
    starts = range(0, len(found), BATCH_SIZE)
    ready: Any = [_turned(found[start : start + BATCH_SIZE]) for start in starts]
    return DataLoader(ready, batch_size=None)


class Uncollated(Learner):
    """Gets a list of samples and collates them itself."""

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = zip(*batch, strict=True)
        return super().loss((torch.stack(inputs), torch.stack(targets)))


class UncollatedTensors(Learner):
    """Gets a list of equally long tensors, and predicts which feature is largest."""

    def loss(self, batch: Any) -> Tensor:
        inputs = torch.stack(batch)
        return super().loss((inputs, inputs[..., :CLASSES].argmax(-1)))


def listed() -> DataLoader[Any]:
    """Lists of pairs."""
    return batches_of(all_samples(), collate_fn=list)


def listed_tensors() -> DataLoader[Any]:
    """Lists of tensors."""
    inputs: Any = [inputs for inputs, _ in all_samples()]
    return batches_of(inputs, collate_fn=list)


class OneSample(Learner):
    """Gets a sample without a dimension for the batch."""

    def loss(self, batch: Any) -> Tensor:
        inputs, target = batch
        return cross_entropy(self(inputs)[None], target)


def single() -> DataLoader[Any]:
    """One position after the other."""
    singles: Any = [(inputs[0], targets[0]) for inputs, targets in all_samples()[:NUM_STEPS]]
    return DataLoader(singles, batch_size=None)


def square() -> DataLoader[Any]:
    """As many samples in a batch as positions in a sequence."""
    return batches_of(all_samples()[: LENGTH * NUM_STEPS], batch_size=LENGTH)


BOUNDARY = {"micro_batching": "boundary"}

PATTERNS = [
    Pattern("sequence first", "Layers of torch with `batch_first=False`.", SequenceFirst),
    Pattern(
        "sequence first, boundary",
        "The same with whole batches.",
        SequenceFirst,
        settings=BOUNDARY,
    ),
    Pattern(
        "sequence first, by hand",
        "The same under manual optimization.",
        ManualSequenceFirst,
    ),
    Pattern(
        "sequence first, masked",
        "With a mask of (length, length).",
        MaskedSequenceFirst,
    ),
    Pattern(
        "sequence first, masked, boundary",
        "The same with whole batches.",
        MaskedSequenceFirst,
        settings=BOUNDARY,
    ),
    Pattern(
        "sequence first, masked, by hand",
        "The same under manual optimization.",
        ManualMaskedSequenceFirst,
    ),
    Pattern(
        "as many samples as positions",
        "Layers that take the sequence first, and square batches.",
        SequenceFirst,
        square,
        settings=BOUNDARY,
        said=ONE_PIECE,
        remedy={"batch_dim": 1},
    ),
    Pattern(
        "batches of (length, batch)",
        "The data loader collates along the second dimension.",
        LengthFirst,
        length_first,
    ),
    Pattern(
        "batches of (length, batch), boundary",
        "The same with whole batches.",
        LengthFirst,
        length_first,
        settings=BOUNDARY,
    ),
    Pattern(
        "ready batches of (length, batch)",
        "No data loader knows how many samples a batch has.",
        LengthFirst,
        ready_length_first,
        refused=r"`batch_dim=1`",
        remedy={"batch_dim": 1},
    ),
    Pattern("list of samples", "The batch is a list of pairs.", Uncollated, listed),
    Pattern(
        "list of tensors",
        "The batch is a list of equally long tensors.",
        UncollatedTensors,
        listed_tensors,
    ),
    Pattern(
        "hidden states of one dimension",
        "A sample has no dimension for the batch.",
        OneSample,
        single,
        settings={"micro_batches": 1},
    ),
    Pattern(
        "hidden states of one dimension, boundary",
        "The same with whole batches.",
        OneSample,
        single,
        settings=BOUNDARY,
        said=ONE_PIECE,
    ),
]
