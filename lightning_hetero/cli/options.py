"""What the commands share: their common options, and the project of a LightningCLI config."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningCLI

from ..errors import HeteroError, ModelError, PlanError, ProfileError
from ..model.layers import DecoderLayer
from ..strategy.deploy import Site
from ..strategy.strategy import HeteroPipelineStrategy
from ..transport.address import Address
from ..transport.token import DEFAULT_FILE, FILE_VARIABLE

Found = TypeVar("Found")


def add_project_options(command: argparse.ArgumentParser) -> None:
    """Add the options that name a project."""
    command.add_argument(
        "config", metavar="CONFIG", help="a config of LightningCLI, with the strategy in it"
    )
    command.add_argument(
        "--model",
        metavar="CLASS",
        help="module.Class where the config has no class_path for it",
    )
    command.add_argument(
        "--data", metavar="CLASS", help="module.Class where the config has no class_path for it"
    )


class Project(LightningCLI):
    """Builds model, data and Trainer from a config."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing while the objects are made."""

    @property
    def strategy(self) -> HeteroPipelineStrategy:
        """The strategy of the config.

        Raises:
            ProfileError: If the config names another strategy.
        """
        strategy = self.trainer.strategy
        if not isinstance(strategy, HeteroPipelineStrategy):
            raise ProfileError(
                f"The config's strategy is {type(strategy).__name__}, and only "
                "HeteroPipelineStrategy has workers; name it under trainer.strategy."
            )
        return strategy

    def instead_of_training(
        self, action: Callable[[Site, list[DecoderLayer]], Found], purpose: str
    ) -> Found:
        """Attach the model to its Trainer and its data, call ``action``, and train nothing.

        Args:
            action: Gets the layers where a run would send them to the workers.
            purpose: What the layers are for, as the end of a sentence.

        Raises:
            ModelError: If the model has no decoder layers.
        """
        found: list[Found] = []

        def act(site: Site, layers: list[DecoderLayer]) -> None:
            if layers:
                found.append(action(site, layers))
            # The Trainer's `fit` ends without a step, a validation, or a callback's own `fit`.
            self.trainer.limit_train_batches = 0
            self.trainer.limit_val_batches = 0
            self.trainer.callbacks = []  # type: ignore[attr-defined]

        self.trainer.loggers = []  # A run that trains nothing needs no folder.
        with self.strategy.instead_of_training(act):
            self.trainer.fit(self.model, datamodule=self.datamodule)
        if not found:
            raise ModelError(
                f"{type(self.model).__name__} has no decoder layers that could be found, so "
                f"{purpose}; name them with `layers=`."
            )
        return found[0]


def project_of(options: argparse.Namespace) -> Project:
    """The project that the options name.

    Raises:
        ProfileError: If a class that the options name does not exist or has another base.
    """
    # Projects import their own modules by plain names, like scripts in the working folder.
    sys.path.insert(0, os.getcwd())
    # LightningCLI reads the command line, and warns where it is given another.
    sys.argv = [sys.argv[0], "fit", "--config", options.config]
    return Project(
        None if options.model is None else _class_named(options.model, pl.LightningModule),
        None if options.data is None else _class_named(options.data, pl.LightningDataModule),
        save_config_callback=None,
    )


def _class_named(name: str, base: type) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, ValueError, AttributeError) as error:
        raise ProfileError(f"There is no class {name!r}: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ProfileError(f"{name!r} is not a {base.__name__}.")
    return found


def add_addresses(command: argparse.ArgumentParser, name: str) -> None:
    """Add the addresses of one or more workers as the argument ``name``."""
    command.add_argument(
        name,
        nargs="+",
        type=Address.parse,
        metavar="HOST:PORT",
        help="addresses of the workers",
    )


def add_token_option(command: argparse.ArgumentParser, text: str) -> None:
    """Add ``--token-file``; the text says what the token is for."""
    command.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"{text} (default: ${FILE_VARIABLE}, where an empty value stands for no token, or "
        f"{DEFAULT_FILE} if it exists)",
    )


def add_output_option(command: argparse.ArgumentParser, text: str, default: str) -> None:
    """Add ``-o`` and ``--output`` for a file that may exist; the text says what is in the file."""
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=f"{text}; an existing file is replaced (default: {default})",
    )


def new_file(name: str) -> Path:
    """The path of a file in the current folder that does not exist yet.

    Raises:
        PlanError: If the file exists.
    """
    path = Path(name)
    if path.exists():
        raise PlanError(f"{name!r} is there already; name it with --output to replace it.")
    return path


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Write a file in this block; the error of a file that cannot be written names it.

    Raises:
        HeteroError: If the block raises an error of the operating system.
    """
    try:
        yield
    except OSError as error:
        raise HeteroError(f"The {what} cannot be written to {str(path)!r}: {error}.") from error
