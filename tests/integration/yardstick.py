"""The run that tests of exactness compare: a few steps over padded batches."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_hetero import Plan, StagePlan

from ..models import TinyModule, fit, loader

NUM_LAYERS = 5
BATCH_SIZE = 12
# The learning rate falls after the third one.
NUM_STEPS = 4

NUM_PIECES = 4

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


def plan_over(workers: list[str], num_stages: int, on_coordinator: int, pieces: int) -> Plan:
    """Some layers on the coordinator, the others in nearly equal shares on workers."""
    used = workers[: num_stages - 1]
    stages = [StagePlan(["coordinator"], (0, on_coordinator))] if on_coordinator else []
    left = NUM_LAYERS - on_coordinator
    ends = [on_coordinator + left * (i + 1) // len(used) for i in range(len(used))]
    starts = [on_coordinator, *ends[:-1]]
    stages += [StagePlan([w], (s, e)) for w, s, e in zip(used, starts, ends, strict=True)]
    return Plan(stages, micro_batches=pieces)


class TwiceModule(TinyModule):
    """Runs its decoder twice per step, and once more without a gradient."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        first = self.model(**batch)
        with torch.no_grad():
            target = self.model(**batch).logits
        second = self.model(inputs_embeds=self.model.model.embed_tokens(batch["input_ids"]) * 1.5)
        return first.loss + (second.logits - target).square().mean()
