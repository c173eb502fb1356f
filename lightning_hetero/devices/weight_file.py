"""Tensors in a file of this process: their memory is the file, and the system reads it in and out.

A file has no name, so it vanishes with its process. It is mapped for reading and writing, and
shared: a change of a tensor is a change of the file, so no change is ever lost. Such pages count as
the system's cache and not as data of the process; see ``RssFile`` and ``VmData`` in
``/proc/self/status``.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..atomic_file import folder_in_cache
from ..errors import ModelError

# As torch aligns its own memory: sums of products may depend on it.
_ALIGNMENT_BYTES = 64
# A larger request to read ahead may be cut by the system.
_READ_BYTES = 2**24
# Written pages are not free memory before the disk has them, and control groups may not wait.
_MOST_UNWRITTEN_BYTES = 2**25

_MOUNTS = Path("/proc/self/mountinfo")
_IN_MEMORY = {"tmpfs", "ramfs"}
_OTHER_FOLDER = (
    "start the worker with XDG_CACHE_HOME=FOLDER for a folder on another disk, give it fewer "
    "layers, or take `weights` out of the plan"
)


def folder_for_weights(num_bytes: int) -> Path:
    """The folder for weights of this process, with enough free space.

    Args:
        num_bytes: The bytes to be written.

    Raises:
        ModelError: If there is no such folder, or it is in main memory, or its disk is too full.
    """
    folder = folder_in_cache("weights")
    if folder is None:
        raise ModelError(
            "This worker has no home folder for its weights; start it with XDG_CACHE_HOME=FOLDER."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        raise ModelError(
            f"This worker cannot keep weights in {folder} ({error}); {_OTHER_FOLDER}."
        ) from error
    if is_in_memory(folder):
        raise ModelError(
            f"The folder {folder} of this worker is in main memory, so weights in it would take "
            f"as much memory as before; {_OTHER_FOLDER}."
        )
    if num_bytes > free_bytes:
        raise _disk_full(folder, num_bytes, free_bytes)
    return folder


def is_in_memory(folder: Path) -> bool:
    """Whether the files of a folder are in main memory; False where the system does not say."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return False
    kinds = {fields[fields.index("-") + 1] for fields in mounts if fields[2] == number}
    return bool(kinds & _IN_MEMORY)


def _disk_full(folder: Path, num_bytes: int, free_bytes: int) -> ModelError:
    return ModelError(
        f"The disk of this worker's folder {folder} has {free_bytes} free bytes, and the frozen "
        f"weights take {num_bytes}; {_OTHER_FOLDER}."
    )


@dataclass(frozen=True)
class _Region:
    """A part of a mapped file."""

    piece: _Piece
    start: int
    num_bytes: int

    def tensor(self, like: Tensor) -> Tensor:
        """The region as a tensor with the dtype and the shape of another one."""
        mapped = self.piece.mapped
        found = torch.frombuffer(mapped, dtype=torch.uint8, count=self.num_bytes, offset=self.start)
        return found.view(like.dtype).view(like.shape)


class _Piece:
    """A mapped file without a name."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._folder = folder
        with tempfile.TemporaryFile(dir=folder) as file:
            self._number = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._number)
        self.num_bytes = num_bytes
        self._used_bytes = self._unwritten_bytes = 0
        os.ftruncate(self._number, num_bytes)
        self.mapped = mmap.mmap(self._number, num_bytes)

    @property
    def untaken_bytes(self) -> int:
        return self.num_bytes - self._used_bytes

    def take(self, num_bytes: int) -> _Region:
        start = self._used_bytes
        self._used_bytes += aligned(num_bytes)
        return _Region(self, start, num_bytes)

    def write(self, region: _Region, content: memoryview) -> None:
        # A write to the mapping would end the process where the disk is full.
        written = 0
        while written < region.num_bytes:
            piece = content[written : written + _MOST_UNWRITTEN_BYTES]
            count = os.pwrite(self._number, piece, region.start + written)
            written += count
            self._unwritten_bytes += count
            if self._unwritten_bytes >= _MOST_UNWRITTEN_BYTES:
                self.sync()

    def sync(self) -> None:
        os.fsync(self._number)
        self._unwritten_bytes = 0

    def read_ahead(self) -> None:
        for start in range(0, self._used_bytes, _READ_BYTES):
            count = min(_READ_BYTES, self._used_bytes - start)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._number, start, count, os.POSIX_FADV_WILLNEED)
            else:
                os.pread(self._number, count, start)

    def drop(self) -> None:
        self.mapped.madvise(mmap.MADV_DONTNEED)

    def forget(self) -> None:
        self.drop()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._number, 0, 0, os.POSIX_FADV_DONTNEED)


class WeightFile:
    """Named tensors in a file.

    Args:
        folder: A folder of `folder_for_weights`.
        num_bytes: The bytes of all tensors, as far as they are known.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._folder = folder
        # The file has holes, which take no space, until something is written.
        self._piece_bytes = max(aligned(num_bytes), mmap.PAGESIZE)
        self._pieces: list[_Piece] = []
        self._regions: dict[str, _Region] = {}

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(region.num_bytes for region in self._regions.values())

    def keep(self, name: str, tensor: Tensor) -> Tensor:
        """Write a tensor, and return one with the same content and the file as its memory.

        A tensor of the same name and size is overwritten.

        Raises:
            ModelError: If it cannot be written.
        """
        if tensor.numel() == 0:
            return tensor
        source = tensor.detach().cpu().contiguous()
        try:
            region = self._regions.get(name)
            if region is None or region.num_bytes != source.nbytes:
                region = self._regions[name] = self._take(source.nbytes)
            kept = region.tensor(source)
            if kept.data_ptr() != source.data_ptr():
                content = source.reshape(-1).view(torch.uint8).numpy().data
                region.piece.write(region, content)
        except OSError as error:
            raise ModelError(
                f"The tensor {name!r} cannot be written into {self._folder} of this worker "
                f"({error}); {_OTHER_FOLDER}."
            ) from error
        return kept

    def sync(self) -> None:
        """Write everything to the disk, so that the system can take the memory back at once.

        Raises:
            ModelError: If the disk fails.
        """
        try:
            for piece in self._pieces:
                piece.sync()
        except OSError as error:
            raise ModelError(
                f"The weights cannot be written into {self._folder} of this worker ({error}); "
                f"{_OTHER_FOLDER}."
            ) from error

    def read_ahead(self) -> None:
        """Have the system read the file, as far as it has memory to spare."""
        for piece in self._pieces:
            piece.read_ahead()

    def drop(self) -> None:
        """Take the pages out of this process; the system may keep them in its cache."""
        for piece in self._pieces:
            piece.drop()

    def forget(self) -> None:
        """The same, and ask the system to drop them from its cache too."""
        for piece in self._pieces:
            piece.forget()

    def _take(self, num_bytes: int) -> _Region:
        for piece in self._pieces:
            if piece.untaken_bytes >= aligned(num_bytes):
                return piece.take(num_bytes)
        self._pieces.append(_Piece(self._folder, max(self._piece_bytes, aligned(num_bytes))))
        return self._pieces[-1].take(num_bytes)


def aligned(num_bytes: int) -> int:
    """The bytes that a tensor takes in a file."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
