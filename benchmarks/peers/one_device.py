"""Plain Lightning on one core, with whole batches or accumulating over micro-batches."""

from __future__ import annotations

import lightning.pytorch as pl

from benchmarks.peers import workload
from benchmarks.peers.job import Job, Speaker
from benchmarks.training import Decoder, fit

WHOLE_BATCHES = "one core, whole batches"


class TellAtEnd(pl.Callback):
    """Tells of the run when its last step is done, before weights are brought back."""

    def __init__(self, speaker: Speaker) -> None:
        self._speaker = speaker

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, Decoder)
        layers = module.model.model.layers
        here = [layer for layer in layers if not next(layer.parameters()).is_meta]
        self._speaker.done(step_seconds=module.step_seconds, losses=module.losses, split=len(here))


def run(job: Job) -> None:
    """The whole model in this process."""
    speaker = Speaker()
    speaker.ready()
    accumulate = 1 if job.peer == WHOLE_BATCHES else job.micro_batches
    fit(
        Decoder(workload.config(job.num_layers)),
        workload.loader(job.num_steps, job.micro_batches, accumulate),
        accumulate=accumulate,
        callbacks=[TellAtEnd(speaker)],
    )
