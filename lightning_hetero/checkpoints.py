"""Lightning's hooks about checkpoints: what a run over stages writes, and how it is read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.optim import Optimizer
from typing_extensions import override

from .coordinator.deployment import Deployment
from .model.four_bit import accepting_states
from .model.pretrained import weights_in_checkpoint
from .saving import (
    Gathering,
    SavedCheckpoints,
    checkpoint_io_or_ours,
    keeping_frozen,
    unless_interrupted,
)


class CheckpointingStrategy(SingleDeviceStrategy):
    """Makes checkpoints as of one device, wherever layers and optimizer state are.

    Args:
        trainable_only: Whether what does not train is left out of them.
        accelerator: As for every Lightning strategy.
        checkpoint_io: As for every Lightning strategy; None writes files without a copy in memory.
        precision_plugin: As for every Lightning strategy.
    """

    def __init__(
        self,
        trainable_only: bool,
        accelerator: Accelerator | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
    ) -> None:
        super().__init__(
            accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin
        )
        self._gathering = Gathering(trainable_only)
        self._saved = SavedCheckpoints()
        self._deployment: Deployment | None = None

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        self._checkpoint_io = checkpoint_io_or_ours(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # A parameter on `meta` takes no content, and before the setup there are no others.
        return weights_in_checkpoint(self._module()) is not None

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if strict:
            checkpoint = keeping_frozen(checkpoint, self._module())
        with accepting_states(self._module()):
            super().load_model_state_dict(checkpoint, strict)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state_dict = super().lightning_module_state_dict
        return self._gathering.weights(self._module(), self._deployment, state_dict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        fetch = partial(super().optimizer_state, optimizer)
        return self._gathering.optimizer_state(self._module(), self._deployment, fetch)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if self._gathering.is_complete(checkpoint, filepath):
            with unless_interrupted(self._module()):
                super().save_checkpoint(checkpoint, filepath, storage_options)
                self._saved.note(filepath, checkpoint)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)
        self._saved.note_removed(filepath)

    def _module(self) -> pl.LightningModule:
        if self.lightning_module is None:
            raise MisconfigurationException("The strategy has no LightningModule yet.")
        return self.lightning_module
