"""A batch and its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .copies import Copies
from .microbatch import (
    LossWeighting,
    LossWeights,
    Samples,
    batch_size,
    first_samples,
    loss_weights,
    spans,
    split_batch,
)


@dataclass(frozen=True)
class CutBatch:
    """A batch and the micro-batches that it is cut into.

    Args:
        whole: The batch.
        microbatches: Its micro-batches, in the order of the samples.
        num_samples: The samples of each.
        samples: Where the samples of the batch are; None for a batch of several data loaders.
    """

    whole: Any
    microbatches: Sequence[Any]
    num_samples: Sequence[int]
    samples: Samples | None

    @classmethod
    def of(cls, batch: Any, num_microbatches: int, samples: Samples | None) -> CutBatch:
        """Cut a batch; without ``samples`` it is a list with a batch of each data loader.

        Raises:
            BatchError: If something in it cannot be cut.
        """
        if samples is None:
            pieces = split_batch(batch, num_microbatches, of_several_loaders=True)
            return cls(batch, pieces, [batch_size(_one_of(piece)) for piece in pieces], None)
        pieces = split_batch(batch, num_microbatches, samples=samples)
        lengths = [end - start for start, end in spans(samples.count, num_microbatches)]
        return cls(batch, pieces, lengths, samples)

    @classmethod
    def uncut(cls, batch: Any) -> CutBatch:
        """A batch as its own only micro-batch."""
        return cls(batch, [batch], [1], None)

    def first(self, count: int) -> CutBatch:
        """The first micro-batches, and the batch that they would be the pieces of."""
        if count >= len(self.microbatches):
            return self
        lengths = self.num_samples[:count]
        several = self.samples is None
        whole = first_samples(self.whole, sum(lengths), several, self.samples)
        samples = None if self.samples is None else replace(self.samples, count=sum(lengths))
        return CutBatch(whole, self.microbatches[:count], lengths, samples)

    def weights(self, weighting: LossWeighting, copies: Copies) -> LossWeights:
        """How much the micro-batches' losses count; see `loss_weights`."""
        if len(self.microbatches) == 1:
            return LossWeights(lambda: [1.0])
        return loss_weights(self.microbatches, weighting, self.num_samples, copies)


def _one_of(batches: Sequence[Any]) -> Any:
    """The first of several loaders' batches; a loader that has ended has none."""
    return next(batch for batch in batches if batch is not None)
