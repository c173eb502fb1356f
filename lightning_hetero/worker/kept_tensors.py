"""The tensors of a worker's last run, which the next one goes on with, and the shelf that has them.

A worker keeps all tensors when a session ends. On the next `Deploy` it drops the tensors that the
new stage cannot use. For each remaining one the coordinator sends a fingerprint; the worker drops a
tensor whose fingerprint differs. So frozen weights are not sent again for a second run of a model,
and no weight is sent for a validation after a training.

The shelf is a file in main memory, where the process of a session leaves tensors to the next one:

    page 0       the place and length of the index; zeros while there are no tensors
    page 1 ...   the tensors, each from the beginning of a page
    behind them  the index: the names, dtypes and shapes, as MessagePack

Only the session's own process has the file, and those before and after it. The next process trusts
nothing in it: the index is decoded against its schema, and the coordinator compares digests of the
tensors. Processes take turns by a lock that the system releases when a process ends, however it
ends.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from ..devices.device import device_for
from ..devices.main_memory import free_main_memory
from ..errors import HeteroError
from ..model.tensors import Content, named_contents
from ..protocol import messages as m
from ..protocol.tensor_bytes import TensorSpec, fingerprint_of, tensor_bytes, tensor_from_bytes

logger = logging.getLogger(__name__)

KEPT_SECONDS = 600.0
"""After so long without a session, a worker frees the tensors that it keeps."""

_PLACE = struct.Struct(">QQ")
_MOST_INDEX_BYTES = 64 * 2**20
# A tensor is left only if this many times its bytes are free: the process has it twice meanwhile.
_FREE_SHARE = 2


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor, or a part of its state, whose ``name`` is not empty."""

    name: str
    spec: TensorSpec
    start: int


_decoder = msgspec.msgpack.Decoder(dict[str, list[_Part]])


class _Mapped(NamedTuple):
    memory: mmap.mmap
    parts: dict[str, list[_Part]]


class SharedShelf:
    """Tensors in a file that has no name; processes get it by its descriptor.

    Args:
        descriptor: The file.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def take_all(self) -> dict[str, Content]:
        """Remove the tensors and return copies of them.

        It waits until the process that leaves them has left them or has ended. There are none if
        that process was killed before.
        """
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
        found = self._read()
        # The end of a mapping has closed a copy of the descriptor, which releases the lock. No
        # other process waits for it yet: the next one starts when this one's session is over.
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
        os.ftruncate(self.descriptor, 0)
        return found

    def _read(self) -> dict[str, Content]:
        try:
            mapped = self._mapped()
            return {} if mapped is None else _copied(mapped)
        except (HeteroError, KeyError, OSError, ValueError) as error:
            logger.warning("the tensors of the last session are dropped: %s", error)
            return {}

    def put(self, contents: dict[str, Content]) -> None:
        """Replace the tensors; the dictionary is empty afterwards.

        Each tensor is freed before the next one is written. Tensors that do not fit into the free
        memory are dropped.
        """
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
        os.ftruncate(self.descriptor, 0)
        index: dict[str, list[_Part]] = {}
        end = mmap.PAGESIZE
        try:
            while contents:
                name, content = contents.popitem()
                if free_main_memory() > _FREE_SHARE * content.num_bytes:
                    index[name], end = self._put_one(content, end)
        except OSError as error:
            logger.warning("the tensors of this session are dropped: %s", error)
            os.ftruncate(self.descriptor, 0)
            contents.clear()
        else:
            self._finish(index, end)

    def release(self) -> None:
        """Let the next process take the tensors; this one must not use the shelf any more."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    def _put_one(self, content: Content, end: int) -> tuple[list[_Part], int]:
        parts = []
        for name, tensor in content.parts.items():
            parts.append(_Part(name, TensorSpec.of(tensor), end))
            end = _end_of_page(self._write(tensor_bytes(tensor), end))
        return parts, end

    def _finish(self, index: dict[str, list[_Part]], end: int) -> None:
        if not index:
            return
        encoded = msgspec.msgpack.encode(index)
        self._write(memoryview(encoded), end)
        self._write(memoryview(_PLACE.pack(end, len(encoded))), 0)

    def _write(self, data: memoryview, start: int) -> int:
        """Write at a place of the file; returns where the bytes end."""
        while data:
            num_bytes = os.pwrite(self.descriptor, data, start)
            data, start = data[num_bytes:], start + num_bytes
        return start

    def _mapped(self) -> _Mapped | None:
        num_bytes = os.fstat(self.descriptor).st_size
        if num_bytes < mmap.PAGESIZE:
            return None
        memory = mmap.mmap(self.descriptor, num_bytes)
        start, length = _PLACE.unpack_from(memory)
        if not 0 < length <= _MOST_INDEX_BYTES:
            return None
        return _Mapped(memory, _decoder.decode(memory[start : start + length]))


def open_shelf() -> SharedShelf | None:
    """A new, empty shelf; None where the system has no files in main memory."""
    if not hasattr(os, "memfd_create"):
        return None
    return SharedShelf(os.memfd_create("lightning-hetero"))


def _copied(mapped: _Mapped) -> dict[str, Content]:
    """Copies of the tensors; the pages of each tensor are freed before the next one is copied."""
    found = {}
    for name, parts in mapped.parts.items():
        tensors = {}
        for part in parts:
            view = memoryview(mapped.memory)
            tensors[part.name] = tensor_from_bytes(part.spec, view, part.start).clone()
            if part.spec.num_bytes:
                length = _end_of_page(part.start + part.spec.num_bytes) - part.start
                mapped.memory.madvise(mmap.MADV_REMOVE, part.start, length)
        found[name] = Content(tensors.pop(""), tensors)
    return found


def _end_of_page(position: int) -> int:
    return -(-position // mmap.PAGESIZE) * mmap.PAGESIZE


class KeptTensors:
    """Tensors of a worker's former layers, by name; no layer uses them any more.

    Args:
        shelf: Where a former process has left tensors, and this one leaves its own.
    """

    def __init__(self, shelf: SharedShelf | None = None) -> None:
        self._unread = self._shelf = shelf
        self._reading = threading.Lock()
        self._mine: dict[str, Content] = {}

    @property
    def _contents(self) -> dict[str, Content]:
        with self._reading:
            shelf, self._unread = self._unread, None
            if shelf is not None:
                self._mine = shelf.take_all()
            return self._mine

    def num_bytes_on(self, torch_device: torch.device) -> int:
        """Bytes that the tensors take in the memory of devices of this kind."""
        contents, device = list(self._contents.values()), device_for(torch_device)
        return sum(c.num_bytes for c in contents if device.holds(c.tensor))

    def leave_to_next(self) -> None:
        """Leave the tensors to the next process; this one has none afterwards."""
        if self._shelf is not None and self._unread is None:
            self._shelf.put(self._mine)
            self._shelf.release()

    def keep(self, layers: Mapping[int, nn.Module]) -> None:
        """Keep the tensors of layers that are no more in use, and drop those kept before."""
        self.forget()
        seen: set[int] = set()
        for name, tensor, state in named_contents(layers):
            # A shared tensor is kept once: the next layers may have two tensors of equal content.
            if not tensor.is_meta and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                self._contents[name] = Content(tensor.detach().as_subclass(Tensor), state)

    def restrict_to(self, specs: Sequence[m.ParameterSpec]) -> list[str]:
        """Drop tensors that cannot be one of these, and return the names of the others."""
        wanted = {spec.name: spec.tensor for spec in specs}
        contents = self._contents
        for name, content in list(contents.items()):
            if name not in wanted or TensorSpec.of(content.tensor) != wanted[name]:
                del contents[name]
        return list(contents)

    def take(self, name: str, fingerprint: bytes) -> Content | None:
        """Remove a tensor, and return it if it has this fingerprint."""
        content = self._contents.pop(name, None)
        if content is None or fingerprint_of(content.parts) != fingerprint:
            return None
        return content

    def drop(self, name: str) -> None:
        """Drop one tensor."""
        self._contents.pop(name, None)

    def forget(self) -> None:
        """Drop all tensors, also those of a former process."""
        with self._reading:
            shelf, self._unread = self._unread, None
            if shelf is not None:
                shelf.put({})
            self._mine.clear()
