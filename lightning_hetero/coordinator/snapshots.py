"""The coordinator's side of snapshots: it takes them, and a lost worker's state comes back from
their files.

    <folder>/3-base    every tensor of worker 3 as it was sent, but for those in a checkpoint
    <folder>/3-7       its part of snapshot 7: what has changed since, with optimizer state

A snapshot is of use when every worker's part of it is in its file. All parts are of the same place
between two steps. A thread of its own writes the files, so that no step waits for a disk.

The digest of every block stays in memory: a file that has other bytes when it is read ends the run.

When layers have moved, the next snapshot also tells what a worker got from others. That part of it
is kept beside the base, as long as it has a tensor that the worker still holds.
"""

from __future__ import annotations

import fcntl
import math
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from ..errors import CheckpointError, RemoteProtocolError, SaveError
from ..model.tensors import named_tensors
from ..pipeline.journal import Journal
from ..protocol import messages as m
from ..protocol.frames import Frame, FrameReader, encode_frame
from ..protocol.tensor_bytes import tensor_bytes
from ..protocol.values import unpack
from ..recovery import Recovery
from ..transport.channel import LOOK_SECONDS
from ..written_blocks import WrittenBlock, read_blocks, write_blocks
from .run_part import Contents, Names

if TYPE_CHECKING:
    from .connections import Connections
    from .layers import RemoteLayers
    from .member import Member
    from .steps import RemoteStages

# Locked by the process whose folder it is in; the lock goes with the process.
_CLAIM = "claim"
# What the file says, so that no other program's folder is removed.
_CLAIMED = b"This folder has the snapshots of a run of lightning-hetero.\n"

# A worker's part of a snapshot is at most so many times its tensors, and some more.
_MOST_TIMES = 8
_MOST_BESIDE_BYTES = 2**24
_MOVED = "Layers have moved, and no snapshot has come to its end since."

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

    def missing_behind(self, kept: Collection[str], got: Collection[str]) -> set[str]:
        """The tensors that no file would have behind a move in which the worker has kept some, and
        has got others."""
        return (self.missing & {*kept}) | {*got}

    def note_move(self, kept: Collection[str], got: Collection[str]) -> list[int]:
        """Note which tensors the worker has kept as layers moved, and which it has got.

        Returns:
            The numbers of the files that have nothing of use any more.
        """
        self.missing = self.missing_behind(kept, got)
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
            raise _not_written(folder, error) from None
        self._writer = ThreadPoolExecutor(1, "snapshots")
        # Of each worker that has one, the number of its latest whole snapshot.
        self._latest: dict[int, int] = {}
        self._bases: dict[int, Bases] = {}
        # What was written to each file. The writing thread adds to one that nobody reads yet.
        self._blocks: dict[Path, list[WrittenBlock]] = {}

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
        path = self.base(worker)
        blocks = self._blocks[path] = []
        try:
            with path.open("wb") as file:
                for name, tensor, state in contents:
                    if is_wanted(name):
                        said = m.LoadTensor(name, list(state))
                        for buffer in encode_frame(Frame(said, (tensor, *state.values()))):
                            blocks.extend(write_blocks(file, buffer))
                    yield name, tensor, state
        except OSError as error:
            raise _not_written(path, error) from None

    def add(self, worker: int, number: int, piece: Tensor) -> Future[None]:
        """Write a piece of a worker's part behind those before."""
        path = self.part(worker, number)
        return self._writer.submit(self._append, path, tensor_bytes(piece))

    def _append(self, path: Path, content: memoryview) -> None:
        with path.open("ab") as file:
            self._blocks.setdefault(path, []).extend(write_blocks(file, content))

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
        self._writer.submit(self._remove, self.part(worker, number))

    def _remove(self, path: Path) -> None:
        self._blocks.pop(path, None)
        path.unlink(missing_ok=True)

    def num_bytes(self, worker: int) -> int:
        """The size of a worker's latest snapshot; 0 if there is none yet."""
        number = self._latest.get(worker)
        return 0 if number is None else self.part(worker, number).stat().st_size

    def latest(self, worker: int) -> Iterator[Frame]:
        """The frames of a worker's latest snapshot; none if there is no snapshot yet.

        Raises:
            CheckpointError: When used, if the file has not what was written.
        """
        number = self._latest.get(worker)
        return iter(()) if number is None else self._frames(self.part(worker, number))

    def base_frames(self, worker: int) -> Iterator[Frame]:
        """The tensors of a worker that its latest snapshot may lack, each as a `LoadTensor`.

        A tensor may come several times; the first one is the latest.

        Raises:
            CheckpointError: When used, if a file has not what was written.
        """
        for number, names in self.bases_of(worker).newest_first():
            path = self.part(worker, number)
            for frame in self._frames(path):
                loaded = frame if number == _BASE else _as_load(frame)
                if names is None or getattr(loaded.message, "name", "") in names:
                    yield loaded

    def _frames(self, path: Path) -> Iterator[Frame]:
        """The frames of a file, one by one; none of a file to which nothing was written."""
        blocks = self._blocks.get(path, [])
        if not blocks:
            return
        reader = FrameReader()
        try:
            with path.open("rb") as file:
                for content in read_blocks(file, blocks, f"The file {str(path)!r}"):
                    yield from _frames_in(content, reader)
        except OSError as error:
            raise CheckpointError(
                f"The file {str(path)!r} from which a lost worker would come back cannot be read: "
                f"{error.strerror or error}. Let nothing clean its folder up, or name another one "
                "(`recovery=Recovery(folder=...)`), and go on from the last checkpoint of the run."
            ) from error
        reader.close()


@dataclass
class _Snapshot:
    """A snapshot on its way to its files.

    Attributes:
        number: From 1 on.
        step: The step behind which it is.
        exchange: The latest exchange of replicas before it.
        missing: The workers whose parts are not whole yet.
        told: The tensors that workers tell though they have not changed.
        written: The pieces that are being written.
        num_bytes: The bytes that have come, by worker.
    """

    number: int
    step: int
    exchange: int
    missing: set[Member]
    told: Mapping[Member, Collection[str]]
    written: list[Future[None]] = field(default_factory=list)
    num_bytes: dict[Member, int] = field(default_factory=dict)

    @property
    def is_written(self) -> bool:
        """Whether all of it is in its files, or could not be written."""
        return not self.missing and all(piece.done() for piece in self.written)


class Snapshots:
    """Takes snapshots of the workers' state between two steps.

    Args:
        settings: The user's wishes.
        folder: Where files may lie; a folder for this run is made in it.
        connections: The workers.
        layers: The layers that they hold.
        stages: Runs the steps.
        before_drop: Called before the files of the plan before a move are dropped.

    Attributes:
        files: The files of the run.
        step: The step behind which the latest whole snapshot is; 0 before the first one.
        has_moved: Whether layers have moved behind it.

    Raises:
        SaveError: If the folder cannot be written.
    """

    def __init__(
        self,
        settings: Recovery,
        folder: Path,
        connections: Connections,
        layers: RemoteLayers,
        stages: RemoteStages,
        before_drop: Callable[[], None],
    ) -> None:
        self.files = SnapshotFiles(folder / f"run-{secrets.token_hex(4)}")
        self.step = 0
        self.has_moved = False
        self._before_drop = before_drop
        self._settings = settings
        self._connections = connections
        self._layers = layers
        self._stages = stages
        self._number = 0
        self._latest_seconds = time.monotonic()
        self._coming: _Snapshot | None = None
        # What each worker has kept and got in a move that the files do not follow yet.
        self._held_move: tuple[Names, Names] | None = None
        # Whether the latest snapshot was not written.
        self._is_unwritten = False
        connections.asides[m.SnapshotBegun] = self._on_begun
        connections.tensor_asides[m.SnapshotPart] = self._take_piece

    def take_if_due(self, kept_bytes: int, with_gradients: bool) -> None:
        """Take a snapshot before a step, if it is time.

        Args:
            kept_bytes: The bytes of messages since the latest one.
            with_gradients: Whether the step adds to gradients that are there.
        """
        self._use_if_whole()
        workers = self._connections.workers
        journals = [worker.journal for worker in workers if worker.journal is not None]
        is_full = kept_bytes > self._settings.log_gib * 2**30
        seconds = time.monotonic() - self._latest_seconds
        is_due = is_full or seconds >= self._settings.every_seconds
        if not journals or self._coming is not None or not is_due:
            return
        has_caches = any(journal.has_caches for journal in journals)
        if is_full and has_caches:
            self._give_up(journals, "a key-value cache was in use, which no snapshot holds")
        elif is_full and self._is_unwritten:
            self._give_up(journals, f"no snapshot could be written to {self.files.folder.parent}")
        if not has_caches:
            missing = {worker: self.files.bases_of(worker.number).missing for worker in workers}
            self._take(with_gradients, missing)

    def _give_up(self, journals: Collection[Journal], cause: str) -> None:
        """Keep nothing, here and on the workers, until a snapshot is whole."""
        for journal in journals:
            journal.give_up(
                f"More than {self._settings.log_gib:g} GiB were sent while {cause} (`log_gib` of "
                "`Recovery`)."
            )
        connections = self._connections
        connections.broadcast(m.ForgetSent(connections.step, connections.num_exchanges))

    def _take(self, with_gradients: bool, missing: Mapping[Member, Collection[str]]) -> None:
        """Ask for a snapshot, with the tensors that no file has."""
        connections = self._connections
        self._number += 1
        told = {worker: {*own} for worker, own in missing.items()}
        for worker in connections.workers:
            stamp = self._stages.stamp(worker)
            also = sorted(told[worker])
            request = m.TakeSnapshot(self._number, with_gradients, also, **stamp)
            connections.requests.send(worker, request)
            # What the worker keeps is in no snapshot.
            worker.forget_constants()
            if worker.journal is not None:
                worker.journal.mark()
        self._coming = _Snapshot(
            self._number, connections.step, connections.num_exchanges, {*connections.workers}, told
        )

    # behind a move

    def take_behind_move(self, kept: Names, got: Names) -> None:
        """Take a snapshot of layers that have moved.

        The files have the plan before until it is whole, or until `hold_no_more`.
        """
        self.has_moved, self._held_move = True, (kept, got)
        missing = {}
        for worker in self._connections.workers:
            bases = self.files.bases_of(worker.number)
            missing[worker] = bases.missing_behind(kept.get(worker, ()), got.get(worker, ()))
            if worker.journal is not None:
                worker.journal.give_up(_MOVED)
        self._take(False, missing)

    @property
    def is_held(self) -> bool:
        """Whether the files have the plan before a move, and the snapshot behind it is coming."""
        return self._held_move is not None and self._coming is not None

    def wait(self) -> None:
        """Wait for a part of the snapshot on its way."""
        coming = self._coming
        if coming is None:
            return
        if coming.missing:
            self._connections.hear()
        else:
            wait(coming.written, timeout=LOOK_SECONDS)
            self._use_if_whole()

    def hold_no_more(self) -> None:
        """Let the files follow a move whose snapshot is not whole yet; another one is due."""
        if self._held_move is not None:
            self._follow_move()
            self._latest_seconds = -math.inf

    def _follow_move(self) -> None:
        """Keep no file any more of what has moved."""
        if self._held_move is None:
            return
        (kept, got), self._held_move = self._held_move, None
        self._before_drop()
        for worker in self._connections.workers:
            self.files.note_move(worker.number, kept.get(worker, ()), got.get(worker, ()))

    # on its way

    def _on_begun(self, worker: Member, message: m.SnapshotBegun) -> None:
        is_coming = self._coming is not None and self._coming.number == message.number
        if is_coming and worker.journal is not None:
            worker.journal.note_begun()

    def _take_piece(
        self, worker: Member, message: m.SnapshotPart, tensors: Sequence[Tensor]
    ) -> None:
        """Write a piece of a worker's part.

        Raises:
            RemoteProtocolError: If the worker tells more than its layers can have, or no piece.
        """
        if len(tensors) != 1:
            raise RemoteProtocolError(f"A piece of a snapshot came as {len(tensors)} tensors.")
        (piece,) = tensors
        coming = self._coming
        if coming is None or coming.number != message.number or worker not in coming.missing:
            return  # that snapshot is not used any more
        num_bytes = coming.num_bytes.get(worker, 0) + piece.nbytes
        most = _MOST_TIMES * self._bytes_of(worker) + _MOST_BESIDE_BYTES
        if num_bytes > most:
            raise RemoteProtocolError(
                f"Its part of a snapshot has more than {num_bytes} bytes, and at most {most} fit "
                "its layers."
            )
        coming.num_bytes[worker] = num_bytes
        coming.written.append(self.files.add(worker.number, message.number, piece))
        if message.is_last:
            coming.missing.discard(worker)
            self._use_if_whole()

    def _bytes_of(self, worker: Member) -> int:
        stages = self._layers.holdings.stages_of(worker)
        return sum(t.nbytes for stage in stages for _, t in named_tensors(stage.layers))

    def _use_if_whole(self) -> None:
        """Go on from the snapshot on its way if all of it is in its files."""
        coming = self._coming
        if coming is None or not coming.is_written:
            return
        self._coming, self._latest_seconds = None, time.monotonic()
        errors = (each.exception() for each in coming.written)
        if (error := next((e for e in errors if e is not None), None)) is not None:
            self._note_unwritten(error)
            self._forget(coming)
            return
        self._is_unwritten = False
        self.step = coming.step
        self._follow_move()
        for worker in self._connections.workers:
            self.files.note_whole(worker.number, coming.number, coming.told.get(worker, ()))
            if worker.journal is not None:
                worker.journal.cut()
        self._connections.broadcast(m.ForgetSent(coming.step, coming.exchange))
        if self.has_moved:
            self.has_moved = False
            rank_zero_info("the state behind the move is safe, so lost workers are replaced again")

    def _note_unwritten(self, error: BaseException) -> None:
        """Say that a snapshot was not written; the next ones are likely not to be either."""
        if not self._is_unwritten:
            rank_zero_warn(
                f"A snapshot was not written to {self.files.folder.parent}, and the one before it "
                f"stays ({error}). Until the next one is written, workers in the place of lost "
                "ones have more to repeat. Free space there, or start the next run with "
                "Recovery(folder=...) elsewhere."
            )
        self._is_unwritten = True

    def forget_coming(self) -> None:
        """Use the snapshot on its way no more, nor the move that it is behind."""
        coming, self._coming = self._coming, None
        if coming is not None:
            self._forget(coming)
        if self._held_move is not None:
            self._held_move, self.has_moved = None, False

    def _forget(self, coming: _Snapshot) -> None:
        for worker in self._connections.workers:
            self.files.drop(worker.number, coming.number)
            if worker.journal is not None:
                worker.journal.unmark()


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
    claim.write(_CLAIMED)
    claim.flush()
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
            if claim.read(len(_CLAIMED) + 1) == _CLAIMED:
                shutil.rmtree(claim_of_other.parent, ignore_errors=True)


def _frames_in(content: memoryview, reader: FrameReader) -> Iterator[Frame]:
    """The frames that end in the next bytes of a file."""
    while content:
        buffer = reader.buffer()
        part = content[: len(buffer)]
        buffer[: len(part)] = part
        content = content[len(part) :]
        if (frame := reader.advance(len(part))) is not None:
            yield frame


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
