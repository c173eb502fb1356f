"""The command line: python -m examples.diffusion fit --config examples/diffusion/tiny.yaml."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from lightning.pytorch.cli import LightningCLI

from lightning_hetero.errors import HeteroError, traceback_there

from .data import DataError, DiffusionData
from .module import DiffusionTuner


def main(arguments: Sequence[str] | None = None) -> LightningCLI:
    """Do what these arguments, or else those of the command line, ask for."""
    return LightningCLI(
        DiffusionTuner,
        DiffusionData,
        save_config_kwargs={"overwrite": True},
        args=arguments and [*arguments],
    )


if __name__ == "__main__":
    # The batches are small files; loading them in other processes would only cost time.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    try:
        main()
    except (DataError, HeteroError) as error:
        sys.exit(f"{traceback_there(error)}{error}")
