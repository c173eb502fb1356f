"""The command line: LightningCLI with a module, a data module, and the strategy in the YAML."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.cli import LightningCLI

from data import TextData
from module import ByteModel


def main(arguments: Sequence[str] | None = None) -> LightningCLI:
    """Do what these arguments, or else those of the command line, ask for."""
    return LightningCLI(
        ByteModel, TextData, save_config_kwargs={"overwrite": True}, args=arguments and [*arguments]
    )


if __name__ == "__main__":
    main()
