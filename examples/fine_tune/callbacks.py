"""Callbacks: the adapter that is saved, and samples that are written at each validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

from .data import FineTuneData
from .module import FineTuner
from .writing import write


class SaveAdapter(L.Callback):
    """Write the adapter, as PEFT reads it, and the tokenizer when training ends.

    The adapter of an earlier run stays: a later one gets the next free name, such as `adapter-2`.

    Args:
        folder: Where they are written; by default `adapter` in the Trainer's `default_root_dir`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module, data = _ours(trainer, pl_module)
        wanted = self.folder or Path(trainer.default_root_dir, "adapter")
        folder = _free(wanted)
        module.model.save_pretrained(str(folder))
        data.tokenizer.save_pretrained(folder)
        former = "" if folder == wanted else f" {wanted} has that of an earlier run."
        print(f"The adapter is in {folder}.{former}")


def _free(folder: Path) -> Path:
    """The folder, or the next one beside it of which no run has made use."""
    names = chain([folder.name], (f"{folder.name}-{number}" for number in count(2)))
    return next(path for name in names if not (path := folder.with_name(name)).exists())


class Samples(L.Callback):
    """Let the model write after each validation: to the terminal, and to TensorBoard or W&B.

    Args:
        number: How many held-out prompts are answered.
        prompts: Prompts of your own, answered besides.
        max_tokens: The longest answer.
    """

    def __init__(self, number: int = 2, prompts: Sequence[str] = (), max_tokens: int = 60) -> None:
        self.number = number
        self.prompts = prompts
        self.max_tokens = max_tokens

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        module, data = _ours(trainer, pl_module)
        rows = [
            (asked, write(module.model, data.tokenizer, token_ids, self.max_tokens))
            for asked, token_ids in self._asked(data)
        ]
        for asked, answer in rows:
            print(f"\nprompt   {asked}\nanswer   {answer}")
        for logger in trainer.loggers:
            _log(logger, rows, trainer.global_step)

    def _asked(self, data: FineTuneData) -> Iterator[tuple[str, list[int]]]:
        for sample in data.held_out[: self.number]:
            yield data.tokenizer.decode(sample.prompt), sample.prompt
        for text in self.prompts:
            yield text, data.encoder.encode_prompt(text)


def _log(logger: Any, rows: list[tuple[str, str]], step: int) -> None:
    if isinstance(logger, TensorBoardLogger):
        text = "\n\n".join(f"**{asked}**\n\n{answer}" for asked, answer in rows)
        logger.experiment.add_text("samples", text, step)
    elif isinstance(logger, WandbLogger):
        logger.log_text("samples", ["prompt", "answer"], [list(row) for row in rows], step=step)


def _ours(trainer: L.Trainer, module: L.LightningModule) -> tuple[FineTuner, FineTuneData]:
    data = getattr(trainer, "datamodule", None)
    if not isinstance(module, FineTuner) or not isinstance(data, FineTuneData):
        raise TypeError(
            f"This callback works with FineTuner and FineTuneData, not {type(module).__name__} and "
            f"{type(data).__name__}."
        )
    return module, data
