"""What a Trainer's data loaders say of the batches that they give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import default_collate

from .errors import BatchError
from .pipeline.microbatch import SampleFinder, Samples


@dataclass(frozen=True)
class Collated:
    """What is known of a batch besides its tensors.

    Args:
        num_samples: How many samples were collated; None if that is not known.
        may_be_listed: Whether the batch may be a list with one entry per sample.
    """

    num_samples: int | None = None
    may_be_listed: bool = False


def collated_by(loader: Any, batch_idx: int) -> Collated:
    """What a data loader says of one of its batches; little if it is none of torch's."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    size = getattr(batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        return Collated()
    collate = getattr(loader, "collate_fn", default_collate)
    left = _num_samples(loader) - size * batch_idx
    return Collated(min(size, left) if left > 0 else size, collate is not default_collate)


def _num_samples(loader: Any) -> int:
    """How many samples an epoch has; 0 if nobody knows."""
    try:
        return len(loader.sampler)
    except (TypeError, AttributeError, NotImplementedError):
        return 0


class BatchReader:
    """Finds the samples in the batches of a Trainer.

    Args:
        trainer: Gives the batches.
        batch_dim: The dimension that counts samples, if the user named it.
    """

    def __init__(self, trainer: pl.Trainer, batch_dim: int | None) -> None:
        self._trainer = trainer
        self._finder = SampleFinder(batch_dim)

    def find(self, batch: Any, rest: Any) -> Samples:
        """Where the samples of a batch are.

        Args:
            batch: As the step gets it.
            rest: The step's other arguments: the batch's number, and its loader's if there are
                several.

        Raises:
            BatchError: If it holds no tensor that could be cut.
        """
        numbers = [number for number in rest if isinstance(number, int)]
        loader = self._loader(numbers[1] if len(numbers) > 1 else 0)
        known = collated_by(loader, numbers[0] if numbers else 0)
        return self._finder.find(batch, known.num_samples, known.may_be_listed)

    def count(self, batch: Any, rest: Any) -> int | None:
        """How many samples a batch has; None if that cannot be told."""
        try:
            return self.find(batch, rest).count
        except BatchError:
            return None

    def _loader(self, number: int) -> Any:
        """The data loader of the present loop; None where several give one batch together."""
        trainer = self._trainer
        if trainer.training:
            return trainer.train_dataloader
        loaders: Any = trainer.val_dataloaders
        if trainer.testing:
            loaders = trainer.test_dataloaders
        elif trainer.predicting:
            loaders = trainer.predict_dataloaders
        if isinstance(loaders, (list, tuple)):
            return loaders[number] if number < len(loaders) else None
        return loaders
