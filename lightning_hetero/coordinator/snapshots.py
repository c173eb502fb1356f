"""The coordinator's side of snapshots: the files from which a lost worker's state comes back.

    <folder>/3-base    every tensor of worker 3 as it was sent, but for those in a checkpoint
    <folder>/3-7       its part of snapshot 7: what has changed since, with optimizer state

A snapshot is of use when every worker's part of it is in its file. All parts are of the same place
between two steps. A thread of its own writes the files, so that no step waits for a disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from ..errors import RemoteProtocolError, SaveError
from ..model.four_bit import State
from ..protocol import messages as m
from ..protocol.frames import Frame, FrameReader, encode_frame
from ..protocol.tensors import tensor_bytes

Contents = Iterator[tuple[str, Tensor, State]]


class SnapshotFiles:
    """The files of a run.

    Args:
        folder: Holds the files; it is removed at the end.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _not_written(folder, error) from error
        self._writer = ThreadPoolExecutor(1, "snapshots")
        # Of each worker that has one, the number of its latest whole snapshot.
        self._latest: dict[int, int] = {}

    def close(self) -> None:
        """Remove all files."""
        self._writer.shutdown(cancel_futures=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def base(self, worker: int) -> Path:
        """The file of the tensors that a worker got when it was deployed."""
        return self.folder / f"{worker}-base"

    def part(self, worker: int, number: int) -> Path:
        """The file of a worker's part of a snapshot."""
        return self.folder / f"{worker}-{number}"

    def spooled(
        self, worker: int, contents: Contents, is_wanted: Callable[[str], bool]
    ) -> Contents:
        """Pass tensors on that go to a worker, and write those that are wanted to its base.

        Raises:
            SaveError: If the file cannot be written.
        """
        try:
            with self.base(worker).open("wb") as file:
                for name, tensor, state in contents:
                    if is_wanted(name):
                        said = m.LoadTensor(name, list(state))
                        for buffer in encode_frame(Frame(said, (tensor, *state.values()))):
                            file.write(buffer)
                    yield name, tensor, state
        except OSError as error:
            raise _not_written(self.base(worker), error) from error

    def add(self, worker: int, number: int, piece: Tensor) -> Future[None]:
        """Write a piece of a worker's part behind those before."""
        return self._writer.submit(_append, self.part(worker, number), tensor_bytes(piece))

    def note_whole(self, worker: int, number: int) -> None:
        """A worker's part of a snapshot is whole: the one before it is needless."""
        former = self._latest.get(worker)
        self._latest[worker] = number
        if former is not None:
            self.drop(worker, former)

    def drop(self, worker: int, number: int) -> None:
        """Remove a worker's part of a snapshot."""
        self._writer.submit(self.part(worker, number).unlink, missing_ok=True)

    def num_bytes(self, worker: int) -> int:
        """The size of a worker's latest snapshot; 0 if there is none yet."""
        number = self._latest.get(worker)
        return 0 if number is None else self.part(worker, number).stat().st_size

    def latest(self, worker: int) -> Iterator[Frame]:
        """The frames of a worker's latest snapshot; none if there is no snapshot yet."""
        number = self._latest.get(worker)
        return iter(()) if number is None else _frames(self.part(worker, number))

    def base_frames(self, worker: int) -> Iterator[Frame]:
        """The tensors of a worker's base."""
        return _frames(self.base(worker))


def _append(path: Path, content: memoryview) -> None:
    with path.open("ab") as file:
        file.write(content)


def _frames(path: Path) -> Iterator[Frame]:
    """The frames of a file, one by one.

    Raises:
        RemoteProtocolError: If it holds anything else.
    """
    with path.open("rb") as file:
        reader = FrameReader()
        while num_bytes := _read_into(file, reader.buffer()):
            if (frame := reader.advance(num_bytes)) is not None:
                yield frame
        reader.close()


def _read_into(file: BinaryIO, buffer: memoryview) -> int:
    return file.readinto(buffer)  # type: ignore[attr-defined, no-any-return]


def _not_written(path: Path, error: OSError) -> SaveError:
    return SaveError(
        f"The file {str(path)!r} from which a lost worker would come back cannot be written: "
        f"{error.strerror or error}. Free some space there, name another folder "
        "(`recovery=Recovery(folder=...)`), or go on without `recovery`."
    )


def check_snapshot(frames: Iterable[Frame], names: Collection[str]) -> Iterator[Frame]:
    """Pass the frames of a snapshot on; refuse what a worker cannot have told of its layers.

    Raises:
        RemoteProtocolError: With the message.
    """
    for frame in frames:
        message = frame.message
        if not isinstance(message, m.SnapshotTensor) or message.name not in names:
            raise RemoteProtocolError(f"A snapshot holds {message}, which is no part of it.")
        yield frame
