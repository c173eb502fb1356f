"""Checkpoints of a run over stages: their content, and their files.

A file is written straight to the disk, whole or not at all. Lightning's own writer builds the whole
checkpoint in memory first, and so takes its size again.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from pathlib import Path
from typing import IO, Any

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from .._lightning import CheckpointIO, TorchCheckpointIO, TrainerStatus, _WrappingCheckpointIO, pl
from ..atomic_file import replacing
from ..coordinator.deployment import Deployment
from ..errors import HeteroError, ModelError, SaveError, WeightsLost
from ..model.tensors import keys_of, leave_out, left_out_of

logger = logging.getLogger(__name__)

# Makes a state dict.
MakeState = Callable[[], dict[str, Any]]

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class FileCheckpointIO(TorchCheckpointIO):
    """Writes Lightning's checkpoints; on a local disk, without a copy in memory."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write the file; the file before it stays until the new one is complete.

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
                torch.save(checkpoint, _OpenUntilClosed(file))  # type: ignore[arg-type]


class _OpenUntilClosed:
    """A file that drops everything written after its close.

    Torch's writer writes the file's end at the latest when it is destroyed, for example after a
    Ctrl-C. An exception there would abort this process.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, content: Any) -> int:
        """Write to the file while it is open."""
        return len(content) if self._file.closed else self._file.write(content)

    def flush(self) -> None:
        """Write the buffered bytes."""
        self._file.flush()


class Checkpoints:
    """The checkpoints of a strategy's runs: their content, and the written files.

    Args:
        trainable_only: Whether checkpoints leave out parameters that have never trained.

    Attributes:
        is_incomplete: Whether the present run has lost something, or a checkpoint of it was not
            written after an exception.
    """

    def __init__(self, trainable_only: bool) -> None:
        self.is_incomplete = False
        self._trainable_only = trainable_only
        self._is_in_run = False
        self._loss: WeightsLost | None = None
        self._unreported: WeightsLost | None = None
        self._ever_trained: set[Tensor] = set()
        # Why the present checkpoint after an exception cannot be written.
        self._unsaved: HeteroError | None = None
        # The files of this run in their order, and whether each can resume training.
        self._paths: dict[str, bool] = {}

    def begin_run(self) -> None:
        """Forget the lost weights of the run before."""
        self._is_in_run, self._loss, self._unreported = True, None, None
        self.is_incomplete = False

    def forget_files(self) -> None:
        """Forget the files of the training before."""
        self._paths.clear()

    def note_loss(self, loss: WeightsLost | None) -> None:
        """Note the `WeightsLost` of a run's end, if there is one."""
        self._loss = self._unreported = loss
        self.is_incomplete |= loss is not None

    def end_run(self, module: pl.LightningModule | None) -> None:
        """End a run, as its last act. If this raises, Lightning ends it again.

        Raises:
            WeightsLost: If something is lost, unless another exception ends the run; then the loss
                is logged.
        """
        loss, self._unreported = self._unreported, None
        # `sys.exc_info` would also see an exception that the user's own code is handling.
        is_interrupted = module is not None and _is_interrupted(module)
        self._is_in_run = loss is not None and not is_interrupted
        if loss is not None and not is_interrupted:
            raise loss
        if loss is not None:
            logger.error("%s", loss)

    def note_trained(self, module: nn.Module) -> None:
        """Note the trained parameters: later checkpoints of a run hold them, even if frozen by
        then."""
        if self._trainable_only:
            self._ever_trained |= {p for p in module.parameters() if p.requires_grad}

    def weights(
        self, module: pl.LightningModule, deployment: Deployment | None, state_dict: MakeState
    ) -> dict[str, Any]:
        """The module's state dict for a checkpoint."""

        def gather() -> dict[str, Any]:
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
        return self._gathered(module, deployment, gather, weights_alone=True)

    def optimizer_state(
        self, module: pl.LightningModule, deployment: Deployment | None, state_dict: MakeState
    ) -> dict[str, Any]:
        """An optimizer's state dict for a checkpoint."""
        return self._gathered(module, deployment, state_dict, weights_alone=False)

    def _gathered(
        self,
        module: pl.LightningModule,
        deployment: Deployment | None,
        gather: MakeState,
        *,
        weights_alone: bool,
    ) -> dict[str, Any]:
        """A part of a checkpoint; empty if it cannot be gathered after an exception.

        After an exception that ends the run, callbacks write checkpoints. If such a checkpoint
        cannot be gathered, the error is kept for the log: Lightning would raise it in place of the
        exception and leave the workers busy.
        """
        try:
            with nullcontext() if deployment is None else deployment.saving():
                loss = self._loss
                if loss is not None and not (weights_alone and loss.are_weights_whole):
                    raise WeightsLost(str(loss), are_weights_whole=not weights_alone) from loss
                return gather()
        except HeteroError as error:
            if not self._is_in_run or not _is_interrupted(module):
                raise
            self._unsaved = error
            return {}

    def save(
        self,
        module: pl.LightningModule,
        checkpoint: Mapping[str, Any],
        path: str | Path,
        write: Callable[[], None],
    ) -> None:
        """Write the latest gathered checkpoint, if it is complete.

        Raises:
            ModelError: If weights are missing.
            SaveError: If the file cannot be written; after an exception, this error is only logged.
        """
        if self._unsaved is not None:
            self.is_incomplete = True
            logger.error("No checkpoint was written to %s. %s", path, self._unsaved)
            return
        _check_complete(checkpoint, path)
        try:
            write()
        except SaveError as error:
            if not _is_interrupted(module):
                raise
            self.is_incomplete = True
            logger.error("%s", error)
        else:
            self._paths.pop(str(path), None)
            self._paths[str(path)] = "optimizer_states" in checkpoint

    def note_removed(self, path: str | Path) -> None:
        """Note the removal of a file."""
        self._paths.pop(str(path), None)

    def remedy(self, began_with: str | Path | None) -> str:
        """How to continue a run after the loss of its weights; the text follows "and".

        Args:
            began_with: The checkpoint from which the run resumed.
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


def _is_interrupted(module: pl.LightningModule) -> bool:
    return module.trainer.state.status is TrainerStatus.INTERRUPTED


def checkpoint_io_or_ours(chosen: CheckpointIO | None) -> CheckpointIO:
    """The user's own choice, or else `FileCheckpointIO`."""
    if isinstance(chosen, _WrappingCheckpointIO):
        chosen.checkpoint_io = FileCheckpointIO()  # Ignored if it wraps another one already.
    return chosen or FileCheckpointIO()


def _check_complete(checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """Refuse to write a checkpoint with missing weights.

    Raises:
        ModelError: With their names.
    """
    state = checkpoint.get("state_dict", {})
    missing = [key for key, value in state.items() if isinstance(value, Tensor) and value.is_meta]
    if missing:
        raise ModelError(f"The checkpoint {str(path)!r} would lack the weights {missing}.")


def keeping_frozen(checkpoint: Mapping[str, Any], root: nn.Module) -> Mapping[str, Any]:
    """The checkpoint, completed with the frozen weights of the loading module."""
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
        remedy = "free some space there" if first.errno in _NO_ROOM else "fix the cause above"
        raise SaveError(
            f"The checkpoint {path!r} could not be written: {first.strerror or first}. Nothing of "
            f"it is left, and what was in its place is untouched; {remedy}, or save to another "
            "folder (`dirpath` of ModelCheckpoint, `default_root_dir` of the Trainer)."
        ) from first


def _what_ended_it(error: Exception) -> BaseException:
    """The first error: the system's, or an interrupt. Torch's writer raises its own error after
    it."""
    link: BaseException | None = error
    while isinstance(link, Exception) and not isinstance(link, OSError):
        link = link.__context__
    return link or error
