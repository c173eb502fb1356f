"""The project of a LightningCLI config: model, data and Trainer, to inspect and not to train."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from .._lightning import FOR_OTHER_PROJECTS, DummyLogger, MisconfigurationException, pl
from ..errors import ModelError, ProfileError
from ..model.layers import DecoderLayer, without_layers
from ..strategy.deploy import Site
from ..yaml_file import check_kind, read_yaml

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI
else:
    LightningCLI = importlib.import_module(f"{pl.__name__}.cli").LightningCLI

Found = TypeVar("Found")
Action = Callable[[Site, list[DecoderLayer]], None]


class Project(LightningCLI):
    """Builds model, data and Trainer from a config."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Do not run a command: only make the objects."""

    def instead_of_training(
        self,
        calling: Callable[[Action], AbstractContextManager[None]],
        action: Callable[[Site, list[DecoderLayer]], Found],
        purpose: str,
    ) -> Found:
        """Attach the model to its Trainer and its data, and call ``action`` in place of training.

        Args:
            calling: The strategy's context for calls in place of a deployment: inside it, a run
                calls a function and does not send the layers to the workers.
            action: Gets the layers in place of the workers.
            purpose: The use of the layers, as the end of a sentence.

        Raises:
            ModelError: If the model does not have decoder layers.
        """
        found: list[Found] = []

        def act(site: Site, layers: list[DecoderLayer]) -> None:
            if layers:
                found.append(action(site, layers))
            # The Trainer's `fit` ends without a step, a validation, or a callback's own `fit`.
            self.trainer.limit_train_batches = 0
            self.trainer.limit_val_batches = 0
            self.trainer.callbacks = []  # type: ignore[attr-defined]

        # Without training, the run does not need a folder, but callbacks may want a logger.
        self.trainer.loggers = [DummyLogger()] if self.trainer.loggers else []
        with calling(act):
            self.trainer.fit(self.model, datamodule=self.datamodule)
        if not found:
            raise ModelError(
                f"{without_layers(self.model)}, so {purpose}; name them with `layers` of the "
                "strategy in the config."
            )
        return found[0]


def project_of(options: argparse.Namespace) -> Project:
    """The project of the options.

    Raises:
        ProfileError: If a file is not a config, if a value in it cannot be used, or if a class
            named by the options does not exist or has another base.
    """
    merged: dict[str, Any] = {}
    names = " with ".join(map(repr, options.config))
    for path in options.config:
        content = read_yaml(path, ProfileError)
        merged |= content if isinstance(content, dict) else {}
        try:
            check_kind(content, "a config of LightningCLI", ProfileError)
        except ProfileError as error:
            raise ProfileError(f"The file {path!r} is not a config. {error}") from error
    given = {"model": options.model, "data": options.data}
    unnamed = [
        part
        for part, name in given.items()
        if name is None and "class_path" not in (merged.get(part) or {"class_path": None})
    ]
    if len(unnamed) > 1:  # LightningCLI says so of one after the other
        raise ProfileError(
            f"The config {names} cannot be used. It names no class for the "
            f"{' and the '.join(unnamed)}. {_to_name(*unnamed)}"
        )
    # Projects import their own modules by plain names, like scripts in the working folder.
    sys.path.insert(0, os.getcwd())
    # LightningCLI reads the command line, and warns where it is given another.
    sys.argv = [sys.argv[0], "fit", *(f"--config={path}" for path in options.config)]
    model = None if options.model is None else _class_named(options.model, pl.LightningModule)
    data = None if options.data is None else _class_named(options.data, pl.LightningDataModule)
    raising = {"exit_on_error": False}
    try:
        return Project(
            model, data, save_config_callback=None, parser_kwargs={**raising, "fit": raising}
        )
    except (argparse.ArgumentError, ValueError, MisconfigurationException) as error:
        fault = _fault(error)
        if fault is None:
            raise
        raise ProfileError(f"The config {names} cannot be used. {fault}") from error


def _class_named(name: str, base: type) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, ValueError, AttributeError) as error:
        raise ProfileError(f"There is no class {name!r}: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ProfileError(f"{name!r} is not a {base.__name__} of {pl.__name__}. {_two_names()}")
    return found


def _two_names() -> str:
    """The likely fault of a class with another base, as a sentence with the remedy."""
    return (
        f"The command uses {pl.__name__}, so all classes of the config must be of this name; "
        f"{FOR_OTHER_PROJECTS}."
    )


# Lines of jsonargparse's errors without information on the fault.
_NOISE = re.compile(r"Does not validate|Subtypes:|Errors:|Given value|- Expected a <class")


def _fault(error: Exception) -> str | None:
    """The fault of a config in one line; None for an error of the project's own code."""
    if isinstance(error, MisconfigurationException):
        return str(error)
    if not isinstance(error, argparse.ArgumentError) and "Does not validate" not in str(error):
        return None
    lines = [line.strip() for line in str(error).splitlines()]
    telling = [line for line in lines if not _NOISE.match(line)]
    if len(telling) < 2 and len(lines) > 1:  # no more than the key
        telling += [line for line in lines if re.match(r"- Expected|Given value:", line)]
    text = " ".join(line.removeprefix("- ") for line in telling)
    text = re.sub(r'Parser key "([^"]*)"', r"\1", text)
    text = text.replace("Subcommand 'fit' does not accept option", "There is no option")
    if missing := re.search(r"arguments are required: .*fit\.(model|data)\b", text):
        return f"It names no class for the {missing[1]}. {_to_name(missing[1])}"
    hint = ""
    if "does not correspond to a subclass" in text:
        hint = f" {_two_names()}"
    elif base := re.search(r"^(model|data)\b.* class_path '[\w.]*\.Lightning(Data)?Module'", text):
        hint = f" {_to_name(base[1])}"
    elif "There is no option" in text:
        hint = " The command takes a config of which is for `Trainer`, model and data."
    return f"{text.rstrip('.')}.{hint}"


def _to_name(*parts: str) -> str:
    options = " ".join(f"--{part} my_module.My{part.capitalize()}" for part in parts)
    return f"If your script gives it to name it here too, such as `{options}`."
