"""The run that tests of exactness compare: a few steps over padded batches."""

from __future__ import annotations

from functools import cache
from typing import Any

from ..models import TinyModule, fit, loader

NUM_LAYERS = 5
BATCH_SIZE = 12
# The learning rate falls after the third one.
NUM_STEPS = 5

Clip = tuple[str, float]
"""The algorithm and its bound."""


def train(
    module: TinyModule,
    strategy: Any,
    accumulate: int = 1,
    clip: Clip | None = None,
    padded: bool = True,
) -> TinyModule:
    algorithm, value = clip or (None, None)
    return fit(
        module,
        strategy,
        loader(BATCH_SIZE * NUM_STEPS * accumulate, BATCH_SIZE, padded),
        max_steps=NUM_STEPS,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=value,
        gradient_clip_algorithm=algorithm,
    )


@cache
def plain_run(accumulate: int = 1, clip: Clip | None = None) -> TinyModule:
    """The run of Lightning alone."""
    return train(TinyModule(NUM_LAYERS), "auto", accumulate, clip)


@cache
def accumulated_run(pieces: int, tied: bool = False) -> TinyModule:
    """Lightning alone on whole sequences, accumulating over so many micro-batches of a batch."""
    module = TinyModule(NUM_LAYERS, tie_word_embeddings=tied)
    data = loader(BATCH_SIZE * NUM_STEPS, BATCH_SIZE // pieces)
    return fit(module, data=data, accumulate_grad_batches=pieces)
