"""Plain Lightning on one core, with whole batches or accumulating over micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl

from benchmarks.peers.job import Job, Speaker
from benchmarks.training import Decoder, fit

WHOLE_BATCHES = "one core, whole batches"


class TellAtEnd(pl.Callback):
    """Tells of the run when its last step is done, before weights are brought back."""

    def __init__(self, speaker: Speaker, split_of: Callable[[], tuple[int, str]]) -> None:
        self._speaker = speaker
        self._split_of = split_of

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, Decoder)
        split, plan = self._split_of()
        self._speaker.done(
            step_seconds=module.step_seconds, losses=module.losses, split=split, plan=plan
        )


def run(job: Job) -> None:
    """The whole model in this process."""
    speaker = Speaker()
    speaker.ready()
    accumulate = 1 if job.peer == WHOLE_BATCHES else job.micro_batches
    fit(
        job.workload.module(job.num_layers),
        job.workload.loader(job.num_steps, job.micro_batches, accumulate),
        accumulate=accumulate,
        callbacks=[TellAtEnd(speaker, lambda: (job.num_layers, ""))],
    )
