"""Lightning's hooks about checkpoints: what a run over stages writes, and how it is read.

Checkpoints: what goes into them, and files that are written straight to the disk, whole or not
at all.

    .unfinished-1f0c93ab.tmp ── written, flushed ──▶ renamed to epoch=1-step=100.ckpt

Lightning writes the whole checkpoint into memory first, so that a save takes its size once more.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ..atomic_file import replacing
from ..coordinator.deployment import Deployment
from ..errors import HeteroError, ModelError, SaveError, WeightsLost
from ..model.four_bit import accepting_states
from ..model.lazy_weights import weights_in_checkpoint
from ..model.tensors import keys_of, leave_out, left_out_of

logger = logging.getLogger(__name__)

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class FileCheckpointIO(TorchCheckpointIO):
    """Lightning's own checkpoints; those on local disks are written without a copy in memory."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write the file; what was there before stays until the new one is whole.

        Raises:
            SaveError: If it cannot be written.
        """
        filesystem, local_path = url_to_fs(str(path))
        if storage_options is not None or not isinstance(filesystem, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        file_path = Path(local_path)
        with _saying_why(local_path):
            file_path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file_path) as file:
                torch.save(checkpoint, file)


class Gathering:
    """Brings together what goes into a checkpoint, from here and from the stages.

    Args:
        trainable_only: Whether what has never trained is left out.

    Attributes:
        is_in_run: Whether a run has begun and not ended.
    """

    def __init__(self, trainable_only: bool) -> None:
        self._trainable_only = trainable_only
        self.is_in_run = False
        self._loss: WeightsLost | None = None
        self._untold: WeightsLost | None = None
        self._ever_trained: set[Tensor] = set()
        # Why the checkpoint that is being made after an exception cannot be written.
        self._unsaved: HeteroError | None = None

    def begin_run(self) -> None:
        """What was lost in the run before does not matter any more."""
        self.is_in_run, self._loss, self._untold = True, None, None

    def note_loss(self, loss: WeightsLost | None) -> None:
        """What has not come home at the end of the run, if anything has not."""
        self._loss = self._untold = loss

    def end_run(self, module: pl.LightningModule | None) -> None:
        """The last thing of a run. If it raises, Lightning ends the run once more.

        Raises:
            WeightsLost: If something is lost and no other exception ends the run; the log says it
                otherwise.
        """
        loss, self._untold = self._untold, None
        # Not `sys.exc_info`: the user may train inside an `except` of his own.
        is_interrupted = module is not None and _is_interrupted(module)
        self.is_in_run = loss is not None and not is_interrupted
        if self.is_in_run and loss is not None:
            raise loss
        if loss is not None:
            logger.error("%s", loss)

    def note_trained(self, module: nn.Module) -> None:
        """What trains in some phase of a run belongs into checkpoints of its later ones."""
        if self._trainable_only:
            self._ever_trained |= {p for p in module.parameters() if p.requires_grad}

    def weights(
        self,
        module: pl.LightningModule,
        deployment: Deployment | None,
        state_dict: Callable[[], dict[str, Any]],
    ) -> dict[str, Any]:
        """The module's state dict as it goes into a checkpoint."""

        def gather() -> dict[str, Any]:
            if self._loss is not None and not self._loss.are_weights_whole:
                raise WeightsLost(str(self._loss)) from self._loss
            self.note_trained(module)
            left_out: set[Tensor] = set()
            if self._trainable_only:
                left_out.update(set(module.parameters()) - self._ever_trained)
            with nullcontext() if deployment is None else deployment.gathering(left_out):
                state = state_dict()
            if left_out:
                leave_out(state, keys_of(left_out, module))
            return state

        self._unsaved = None
        return self._unless_interrupted(module, deployment, gather)

    def optimizer_state(
        self,
        module: pl.LightningModule,
        deployment: Deployment | None,
        state_dict: Callable[[], dict[str, Any]],
    ) -> dict[str, Any]:
        """An optimizer's state dict as it goes into a checkpoint."""

        def gather() -> dict[str, Any]:
            if self._loss is not None:
                raise WeightsLost(str(self._loss), True) from self._loss
            return state_dict()

        return self._unless_interrupted(module, deployment, gather)

    def _unless_interrupted(
        self,
        module: pl.LightningModule,
        deployment: Deployment | None,
        fetch: Callable[[], dict[str, Any]],
    ) -> dict[str, Any]:
        """What a checkpoint needs.

        An exception that ends the run makes callbacks write checkpoints. What hinders them is
        logged, since Lightning would let it take the exception's place and leave the workers busy.
        """
        try:
            if deployment is not None:
                deployment.check_between_steps()
            return fetch()
        except HeteroError as error:
            if not self.is_in_run or not _is_interrupted(module):
                raise
            self._unsaved = error
            return {}

    def is_complete(self, checkpoint: Mapping[str, Any], path: str | Path) -> bool:
        """Whether the checkpoint that was made last may be written; the log says why not.

        Raises:
            ModelError: If weights are not here.
        """
        if self._unsaved is not None:
            logger.error("No checkpoint was written to %s. %s", path, self._unsaved)
            return False
        _check_complete(checkpoint, path)
        return True


class SavedCheckpoints:
    """The checkpoints of a run that are there, and how to go on from them."""

    def __init__(self) -> None:
        # In their order, and whether training can go on from each.
        self._paths: dict[str, bool] = {}

    def forget(self) -> None:
        """A run begins."""
        self._paths.clear()

    def note(self, path: str | Path, checkpoint: Mapping[str, Any]) -> None:
        """One was written."""
        self._paths.pop(str(path), None)
        self._paths[str(path)] = "optimizer_states" in checkpoint

    def note_removed(self, path: str | Path) -> None:
        """One was removed."""
        self._paths.pop(str(path), None)

    def remedy(self, began_with: str | Path | None) -> str:
        """How to go on if this run has lost its weights, to follow "and".

        Args:
            began_with: The checkpoint that the run went on from.
        """
        whole = [path for path, is_whole in self._paths.items() if is_whole]
        if whole:
            return (
                f"go on from the last checkpoint of this run, `fit(..., ckpt_path={whole[-1]!r})`"
            )
        if self._paths:
            last = next(reversed(self._paths))
            return f"load the weights of {last!r}, the last checkpoint of this run, into it"
        if began_with is not None:
            return (
                "go on from the checkpoint with which this run began, since it has written none, "
                f"`fit(..., ckpt_path={str(began_with)!r})`"
            )
        return "begin again, since no checkpoint was written in this run"


@contextmanager
def unless_interrupted(module: pl.LightningModule) -> Iterator[None]:
    """Inside, a checkpoint is written; after an exception that ends the run, an error of that must
    not take its place and is logged."""
    try:
        yield
    except SaveError as error:
        if not _is_interrupted(module):
            raise
        logger.error("%s", error)


def _is_interrupted(module: pl.LightningModule) -> bool:
    return module.trainer.state.status is TrainerStatus.INTERRUPTED


def checkpoint_io_or_ours(chosen: CheckpointIO | None) -> CheckpointIO:
    """The user's own choice, or what writes our checkpoints where nothing is chosen."""
    if isinstance(chosen, _WrappingCheckpointIO):
        chosen.checkpoint_io = FileCheckpointIO()  # it keeps another one that it has
    return chosen or FileCheckpointIO()


def _check_complete(checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """Refuse to write weights that are not here.

    Raises:
        ModelError: With their names.
    """
    state = checkpoint.get("state_dict", {})
    missing = [key for key, value in state.items() if isinstance(value, Tensor) and value.is_meta]
    if missing:
        raise ModelError(f"The checkpoint {str(path)!r} would lack the weights {missing}.")


def keeping_frozen(checkpoint: Mapping[str, Any], root: nn.Module) -> Mapping[str, Any]:
    """The checkpoint, with the root's own frozen weights for those that were left out of it."""
    missing = left_out_of(checkpoint["state_dict"], root)
    if not missing:
        return checkpoint
    rank_zero_info(
        f"{len(missing)} weights that do not train are not in the checkpoint and stay as the "
        f"module has them, {next(iter(missing))} the first of them"
    )
    state = copy(checkpoint["state_dict"])  # with the versions that torch notes on it
    state.update(missing)
    return {**checkpoint, "state_dict": state}


@contextmanager
def _saying_why(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        first = _what_ended_it(error)
        if not isinstance(first, OSError):
            raise first from first.__cause__
        remedy = "make room there" if first.errno in _NO_ROOM else "see to it"
        raise SaveError(
            f"The checkpoint {path!r} could not be written: {first.strerror or first}. Nothing of "
            f"it is left, and what was in its place is untouched; {remedy}, or save to another "
            "folder (`dirpath` of ModelCheckpoint, `default_root_dir` of the Trainer)."
        ) from first


def _what_ended_it(error: Exception) -> BaseException:
    """The system's error, or an interrupt: torch's writer raises an error of its own after it."""
    link: BaseException | None = error
    while isinstance(link, Exception) and not isinstance(link, OSError):
        link = link.__context__
    return link or error


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
