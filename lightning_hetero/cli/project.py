"""The project of a LightningCLI config: model, data and Trainer, to look at and not to train."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningCLI

from ..errors import ModelError, ProfileError
from ..model.layers import DecoderLayer
from ..strategy.deploy import Site

Found = TypeVar("Found")
Action = Callable[[Site, list[DecoderLayer]], None]


class Project(LightningCLI):
    """Builds model, data and Trainer from a config."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing while the objects are made."""

    def instead_of_training(
        self,
        calling: Callable[[Action], AbstractContextManager[None]],
        action: Callable[[Site, list[DecoderLayer]], Found],
        purpose: str,
    ) -> Found:
        """Attach the model to its Trainer and its data, call ``action``, and train nothing.

        Args:
            calling: The context of the strategy in which its run calls a function in place of
                sending the layers to the workers.
            action: Gets the layers where a run would send them.
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
        with calling(act):
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
