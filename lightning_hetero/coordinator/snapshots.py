"""The coordinator's side of snapshots: the files from which a lost worker's state comes back.

    <folder>/3-base    every tensor of worker 3 as it was sent, but for those in a checkpoint
    <folder>/3-7       its part of snapshot 7: what has changed since, with optimizer state

A snapshot is of use when every worker's part of it is in its file. All parts are of the same place
between two steps. A thread of its own writes the files, so that no step waits for a disk.

When layers have moved, the next snapshot also tells what a worker got from others. That part of it
is kept beside the base, as long as it has a tensor that the worker still holds.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from ..errors import RemoteProtocolError, SaveError
from ..model.four_bit import State
from ..protocol import messages as m
from ..protocol.frames import Frame, FrameReader, encode_frame
from ..protocol.tensor_bytes import tensor_bytes
from ..protocol.values import unpack

# Locked by the process whose folder it is in; the lock goes with the process.
_CLAIM = "claim"

Contents = Iterator[tuple[str, Tensor, State]]

# The number of the file of what a worker got when it was deployed; snapshots are numbered from 1.
_BASE = 0


class Bases:
    """Which files of one worker have the tensors that its latest snapshot lacks. Touches no file.

    Attributes:
        missing: The tensors that no file has: others had them before layers moved.
    """

    def __init__(self) -> None:
        self.missing: set[str] = set()
        # By the number of a snapshot, the names that its file is good for; None for all.
        self._names: dict[int, set[str] | None] = {_BASE: None}

    def __contains__(self, number: int) -> bool:
        return number in self._names

    def note_move(self, kept: Collection[str], got: Collection[str]) -> list[int]:
        """Note which tensors the worker has kept as layers moved, and which it has got.

        Returns:
            The numbers of the files that have nothing of use any more.
        """
        self.missing = (self.missing & {*kept}) | {*got}
        names = {
            number: {*kept} if own is None else own & {*kept} for number, own in self._names.items()
        }
        self._names = {number: own for number, own in names.items() if own}
        return [number for number, own in names.items() if not own]

    def note_whole(self, number: int, told: Collection[str]) -> None:
        """Note a snapshot that has told these tensors, besides what changes."""
        if told:
            self._names[number] = {*told}
            self.missing -= {*told}

    def newest_first(self) -> list[tuple[int, set[str] | None]]:
        """The files' numbers, each with the names that it is good for; None for all."""
        return sorted(self._names.items(), reverse=True)


class SnapshotFiles:
    """The files of a run.

    Args:
        folder: Holds the files; it is removed at the end, or by the next run beside it if this
            process is killed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _sweep(folder.parent)
            self._claim = _claimed(folder)
        except OSError as error:
            raise _not_written(folder, error) from error
        self._writer = ThreadPoolExecutor(1, "snapshots")
        # Of each worker that has one, the number of its latest whole snapshot.
        self._latest: dict[int, int] = {}
        self._bases: dict[int, Bases] = {}

    def close(self) -> None:
        """Remove all files. May be called twice."""
        self._writer.shutdown(cancel_futures=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._claim.close()

    @property
    def are_there(self) -> bool:
        """Whether nobody else has removed the files."""
        return (self.folder / _CLAIM).exists()

    def base(self, worker: int) -> Path:
        """The file of the tensors that a worker got when it was deployed."""
        return self.folder / f"{worker}-base"

    def part(self, worker: int, number: int) -> Path:
        """The file of a worker's part of a snapshot."""
        return self.base(worker) if number == _BASE else self.folder / f"{worker}-{number}"

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
                        file.writelines(encode_frame(Frame(said, (tensor, *state.values()))))
                    yield name, tensor, state
        except OSError as error:
            raise _not_written(self.base(worker), error) from error

    def add(self, worker: int, number: int, piece: Tensor) -> Future[None]:
        """Write a piece of a worker's part behind those before."""
        return self._writer.submit(_append, self.part(worker, number), tensor_bytes(piece))

    def bases_of(self, worker: int) -> Bases:
        """Which files of a worker have the tensors that its latest snapshot lacks."""
        return self._bases.setdefault(worker, Bases())

    def note_move(self, worker: int, kept: Collection[str], got: Collection[str]) -> None:
        """Note which tensors a worker has kept as layers moved, and which it has got; its latest
        snapshot is of no use any more."""
        latest = self._latest.pop(worker, None)
        bases = self.bases_of(worker)
        needless = {*bases.note_move(kept, got), *([] if latest is None else [latest])}
        for number in needless:
            if number not in bases:
                self.drop(worker, number)

    def note_whole(self, worker: int, number: int, told: Collection[str] = ()) -> None:
        """A worker's part of a snapshot is whole: the one before it is needless.

        Args:
            worker: The worker's number.
            number: The snapshot's number.
            told: The tensors that it has told though they have not changed.
        """
        former, bases = self._latest.get(worker), self.bases_of(worker)
        self._latest[worker] = number
        bases.note_whole(number, told)
        if former is not None and former not in bases:
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
        """The tensors of a worker that its latest snapshot may lack, each as a `LoadTensor`.

        A tensor may come several times; the first one is the latest.
        """
        for number, names in self.bases_of(worker).newest_first():
            path = self.part(worker, number)
            for frame in _frames(path) if path.exists() else ():
                loaded = frame if number == _BASE else _as_load(frame)
                if names is None or getattr(loaded.message, "name", "") in names:
                    yield loaded


def _as_load(frame: Frame) -> Frame:
    """A tensor of a snapshot as it would be sent to a worker that is deployed.

    Raises:
        RemoteProtocolError: If the frame holds anything else.
    """
    message = frame.message
    if not isinstance(message, m.SnapshotTensor):
        raise RemoteProtocolError(f"A snapshot holds {message}, which is no part of it.")
    parts = [message.content, *message.state.values()]
    tensors = [unpack(part, frame.tensors) for part in parts]
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise RemoteProtocolError(f"{message.name!r} came in a snapshot without its content.")
    return Frame(m.LoadTensor(message.name, [*message.state]), tuple(tensors))


def _claimed(folder: Path) -> BinaryIO:
    """Make a folder; it is this process's until the returned file is closed.

    The folder has its name only when it is claimed, so that no other process sweeps it before.
    """
    unnamed = Path(tempfile.mkdtemp(prefix="new-", dir=folder.parent))
    claim = (unnamed / _CLAIM).open("wb")
    # Without locks on this file system nobody sweeps there, as `_sweep` needs the lock.
    with suppress(OSError):
        fcntl.flock(claim, fcntl.LOCK_EX)
    unnamed.rename(folder)
    return claim


def _sweep(folder: Path) -> None:
    """Remove the folders of processes that are gone, as far as this one may."""
    for claim_of_other in folder.glob(f"run-*/{_CLAIM}"):
        with suppress(OSError), claim_of_other.open("r+b") as claim:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(claim_of_other.parent, ignore_errors=True)


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
