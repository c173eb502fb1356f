"""`lightning-hetero profile`: measure a model on its devices, and train nothing."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningCLI
from rich.console import Console
from rich.text import Text

from ..errors import PlanError, ProfileError
from ..planning.profile import Profile
from ..strategy import HeteroPipelineStrategy
from .commands import new_file

if TYPE_CHECKING:
    from .commands import Commands


def add_to(commands: Commands) -> None:
    profile = commands.add_parser(
        "profile", help="measure a model on its devices, and train nothing"
    )
    profile.set_defaults(run=_run)
    profile.add_argument(
        "config", metavar="CONFIG", help="a config of LightningCLI, with the strategy in it"
    )
    profile.add_argument(
        "--model",
        metavar="CLASS",
        help="module.Class where the config has no class_path for it",
    )
    profile.add_argument(
        "--data", metavar="CLASS", help="module.Class where the config has no class_path for it"
    )
    profile.add_argument(
        "--force", action="store_true", help="measure, also what was measured before"
    )
    profile.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="where it is written, in place of what is there (default: a new profile.yaml)",
    )


def _run(options: argparse.Namespace) -> None:
    path = new_file("profile.yaml") if options.output is None else Path(options.output)
    # Projects import their own modules by plain names, as `python main.py` finds them.
    sys.path.insert(0, os.getcwd())
    # LightningCLI reads the command line, and warns where it is given another.
    sys.argv = [sys.argv[0], "fit", "--config", options.config]
    cli = _ProfilingCLI(
        None if options.model is None else _class_named(options.model, pl.LightningModule),
        None if options.data is None else _class_named(options.data, pl.LightningDataModule),
        save_config_callback=None,
    )
    profile = cli.measured(options.force)
    try:
        profile.to_yaml(path)
    except OSError as error:
        raise PlanError(f"The profile cannot be written to {str(path)!r}: {error}.") from error
    Console().print(Text(f"The profile is in {path}."))


class _ProfilingCLI(LightningCLI):
    """Builds model, data and Trainer from a config, and has the strategy measure them."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing is run while the objects are made."""

    def measured(self, force: bool) -> Profile:
        """What the strategy's devices take.

        Raises:
            ProfileError: If the config has another strategy, or nothing was measured.
        """
        strategy = self.trainer.strategy
        if not isinstance(strategy, HeteroPipelineStrategy):
            raise ProfileError(
                f"The config's strategy is {type(strategy).__name__}, and only "
                "HeteroPipelineStrategy measures devices; name it under trainer.strategy."
            )
        # No run, so no folder for it either.
        self.trainer.loggers = []
        with strategy.plan_choice.only_measuring(force):
            self.trainer.fit(self.model, datamodule=self.datamodule)
        return strategy.plan_choice.measured_profile(self.model)


def _class_named(name: str, base: type) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, ValueError, AttributeError) as error:
        raise ProfileError(f"There is no class {name!r}: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ProfileError(f"{name!r} is no {base.__name__}.")
    return found
