"""The command line: python -m examples.fine_tune fit --config my.yaml."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import lightning as L
import transformers
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.errors import HeteroError, traceback_there

from .data import FineTuneData
from .hub import HubError
from .loading import LoraError
from .module import FineTuner
from .rows import DataError


class FineTuneCLI(LightningCLI):
    """LightningCLI with the workers at the top of the YAML."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--workers",
            type=int | Literal["auto"] | list[str],
            default=2,
            help="a number of local workers, auto for those that announce themselves on the "
            "network, or a list of host:port; 0 trains on this device alone",
        )
        parser.add_argument(
            "--plan", type=str, default="auto", help="auto, even, replicated, or a YAML file"
        )
        parser.add_argument(
            "--micro_batches", type=int | None, default=None, help="pieces of a batch"
        )
        parser.add_argument(
            "--token", type=str | None, default=None, help="the file of the workers' token"
        )
        parser.add_argument(
            "--recovery", type=bool, default=False, help="get over broken connections"
        )
        parser.link_arguments("model.base", "data.base")

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        if self._get(self.config, "trainer.strategy") != "auto":
            raise HeteroError(
                "`trainer.strategy` is set; leave it out, and set `workers` (0 for this device "
                "alone) and `plan` at the top of the YAML."
            )
        workers = self._get(self.config, "workers")
        if workers != 0:
            kwargs["strategy"] = HeteroPipelineStrategy(
                workers=workers,
                plan=self._get(self.config, "plan"),
                micro_batches=self._get(self.config, "micro_batches"),
                token_file=self._get(self.config, "token"),
                recovery=self._get(self.config, "recovery"),
                checkpoint_weights="trainable",
            )
        else:
            accumulated = self._get(self.config, "trainer.accumulate_grad_batches")
            kwargs["accumulate_grad_batches"] = accumulated * self._get(self.config, "data.window")
        return super().instantiate_trainer(**kwargs)


def main(arguments: Sequence[str] | None = None) -> FineTuneCLI:
    """Do what these arguments, or else those of the command line, ask for."""
    return FineTuneCLI(
        FineTuner,
        FineTuneData,
        save_config_kwargs={"overwrite": True},
        args=arguments and [*arguments],
    )


def keep_quiet() -> None:
    """Silence notices that have no bearing on this example."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # The batches are slices of memory; loading them in other processes would only cost time.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated.*")
    # peft asks for a property that transformers has renamed.
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*")


if __name__ == "__main__":
    keep_quiet()
    try:
        main()
    except (DataError, HubError, LoraError, HeteroError) as error:
        sys.exit(f"{traceback_there(error)}{error}")
