"""The coordinator's side of snapshots: it takes them, and a lost worker's state comes back from
their files.

    <folder>/3-base-1  every tensor of worker 3 as it was sent, but for those in a checkpoint
    <folder>/3-7       its part of snapshot 7: tensors changed since, with optimizer state

A snapshot is of use when every worker's part of it is in its file. All parts are of the same place
between two steps. A thread of its own writes the files, so steps do not wait for a disk.

The digest of every block stays in memory: if a file is read with other bytes, the run ends.

Each tensor of a worker is found in the file with its latest content. A snapshot is taken before
layers move, so the next worker's tensors are found in the files of the worker before. A file is
removed when tensors are no longer found in it.
"""

from __future__ import annotations

import fcntl
import math
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from ..recovery import Recovery
from ..transport.channel import LOOK_SECONDS
from ..written_blocks import WrittenBlock, read_blocks, write_blocks
from .run_part import Contents, Sources

if TYPE_CHECKING:
    from .member import Member
    from .steps import RemoteStages

# Locked by the process that owns its folder; the lock goes with the process.
_CLAIM = "claim"
# The content of the file, to keep other programs' folders.
_CLAIMED = b"This folder has the snapshots of a run of lightning-hetero.\n"

# A worker's part of a snapshot is at most so many times its tensors, and some more.
_MOST_TIMES = 8
_MOST_BESIDE_BYTES = 2**24


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
        # By worker and tensor, the file with its latest content; and for a coming plan.
        self._found: dict[int, dict[str, Path]] = {}
        self._sent: dict[int, dict[str, Path]] = {}
        self._num_bases = 0
        # By worker, its part of the latest snapshot of its layers.
        self._latest: dict[int, Path] = {}
        # The blocks written to each file. The writing thread adds to a file before it is read.
        self._blocks: dict[Path, list[WrittenBlock]] = {}

    def close(self) -> None:
        """Remove all files. May be called twice."""
        self._writer.shutdown(cancel_futures=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._claim.close()

    @property
    def are_there(self) -> bool:
        """Whether the files were not removed by others."""
        return (self.folder / _CLAIM).exists()

    def part(self, worker: int, number: int) -> Path:
        """The file of a worker's part of a snapshot."""
        return self.folder / f"{worker}-{number}"

    def spooled(
        self, worker: int, contents: Contents, is_wanted: Callable[[str], bool]
    ) -> Contents:
        """Pass on tensors to a worker, and write the wanted ones to a file.

        Raises:
            SaveError: If the file cannot be written.
        """
        self._num_bases += 1
        path = self.folder / f"{worker}-base-{self._num_bases}"
        sent = self._sent[worker] = {}
        try:
            for each in contents:
                if is_wanted(each.name):
                    frame = Frame(each.message, (each.tensor, *each.state.values()))
                    for buffer in encode_frame(frame):
                        self._writer.submit(self._append, path, buffer).result()
                    sent[each.name] = path
                yield each
        except OSError as error:
            raise _not_written(path, error) from None

    def add(self, worker: int, number: int, piece: Tensor) -> Future[None]:
        """Append a piece to a worker's part."""
        path = self.part(worker, number)
        return self._writer.submit(self._append, path, tensor_bytes(piece))

    def _append(self, path: Path, content: memoryview) -> None:
        with path.open("ab") as file:
            self._blocks.setdefault(path, []).extend(write_blocks(file, content))

    def forget_sent(self) -> None:
        """Forget the tensors sent since `follow`: their plan is not carried out."""
        self._sent = {}
        self.drop_unused()

    def follow(self, sources: Sources) -> None:
        """Find the tensors of the next plan from now on: tensors sent to a worker in its file, and
        the others in the files of their sources."""
        found, self._sent = self._sent, {}
        for (name, target), source in sources.items():
            path = None if source is None else self._found.get(source.number, {}).get(name)
            if path is not None:
                found.setdefault(target.number, {})[name] = path
        self._found, self._latest = found, {}
        self.drop_unused()

    def note_whole(self, number: int, names: Mapping[int, Collection[str]]) -> None:
        """A snapshot is whole.

        Args:
            number: The snapshot's number.
            names: By worker, the tensors in its part.
        """
        for worker, own in names.items():
            path = self._latest[worker] = self.part(worker, number)
            self._found.setdefault(worker, {}).update(dict.fromkeys(own, path))
        self.drop_unused()

    def drop_unused(self) -> None:
        """Remove the files without the latest content of a tensor."""
        used = {path for own in self._found.values() for path in own.values()}
        self._writer.submit(self._remove_others, used)

    def _remove_others(self, used: Collection[Path]) -> None:
        for path in self._blocks.keys() - used:
            del self._blocks[path]
            path.unlink(missing_ok=True)

    def num_bytes(self, worker: int) -> int:
        """The size of a worker's part of the latest snapshot of its layers; 0 without a
        snapshot."""
        path = self._latest.get(worker)
        return 0 if path is None else sum(each.num_bytes for each in self._blocks.get(path, ()))

    def names(self, worker: int) -> Collection[str]:
        """The tensors of a worker in files."""
        return self._found.get(worker, {}).keys()

    def frames(self, worker: int) -> Iterator[Frame]:
        """The latest content of each tensor of a worker, from the files.

        Raises:
            CheckpointError: When used, if a file's bytes are not the written ones.
            RemoteProtocolError: If its tensors differ from its worker's report.
        """
        found = self._found.get(worker, {})
        for path in dict.fromkeys(found.values()):
            missing = {name for name, own in found.items() if own == path}
            for frame in self._frames(path):
                message = frame.message
                if not isinstance(message, (m.SnapshotTensor, m.LoadTensor)):
                    raise RemoteProtocolError(
                        f"A snapshot holds {message}, which is no part of it."
                    )
                if message.name in missing:
                    missing.discard(message.name)
                    yield frame
            if missing:
                raise RemoteProtocolError(f"A snapshot lacks the tensors {sorted(missing)[:5]}.")

    def _frames(self, path: Path) -> Iterator[Frame]:
        """The frames of a file, one by one; empty for a file never written."""
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
        step: The step before it.
        exchange: The latest exchange of replicas before it.
        missing: The workers with incomplete parts.
        names: By the number of a worker, the tensors in its part.
        written: The pieces in writing.
        num_bytes: The arrived bytes, by worker.
    """

    number: int
    step: int
    exchange: int
    missing: set[Member]
    names: dict[int, Collection[str]] = field(default_factory=dict)
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
        folder: The place for files; a folder for this run is made in it.
        stages: Runs the steps.

    Attributes:
        files: The files of the run.
        step: The step before the latest whole snapshot; 0 before the first one.
        has_moved: Whether layers have moved since; workers cannot be replaced then.

    Raises:
        SaveError: If the folder cannot be written.
    """

    def __init__(
        self,
        settings: Recovery,
        folder: Path,
        stages: RemoteStages,
    ) -> None:
        self.files = SnapshotFiles(folder / f"run-{secrets.token_hex(4)}")
        self.step = 0
        self.has_moved = False
        self._settings = settings
        self._layers, connections = stages.layers, stages.layers.connections
        self._connections = connections
        self._stages = stages
        self._number = self._whole_number = 0
        self._latest_seconds = time.monotonic()
        self._coming: _Snapshot | None = None
        # By worker, the tensors with other content than in the files, to ask for: it does not send
        # them unasked.
        self._untold: dict[Member, set[str]] = {}
        # Whether the latest snapshot was not written.
        self._is_unwritten = False
        connections.asides[m.SnapshotBegun] = self._on_begun
        connections.tensor_asides[m.SnapshotPart] = self._take_piece

    def take_if_due(self, kept_bytes: int, with_gradients: bool) -> None:
        """Take a snapshot before a step, if it is time.

        Args:
            kept_bytes: The bytes of messages since the latest snapshot.
            with_gradients: Whether the step adds to present gradients.
        """
        self._use_if_whole()
        journals = self._journals
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
            self._take(with_gradients)

    @property
    def _journals(self) -> Collection[Journal]:
        return self._connections.part.journals.values()

    def _give_up(self, journals: Collection[Journal], cause: str) -> None:
        """Stop keeping messages, here and on the workers, until a snapshot is whole."""
        for journal in journals:
            journal.give_up(
                f"More than {self._settings.log_gib:g} GiB were sent while {cause} (`log_gib` of "
                "`Recovery`)."
            )
        connections = self._connections
        connections.broadcast(m.ForgetSent(connections.step, self._stages.num_exchanges))

    def _take(self, with_gradients: bool) -> None:
        connections = self._connections
        self._number += 1
        for worker in connections.workers:
            also = sorted(self._untold.get(worker, ()))
            stamp = self._stages.stamp(worker)
            request = m.TakeSnapshot(self._number, with_gradients, also, **stamp)
            connections.requests.send(worker, request)
            # A snapshot does not hold the worker's constants.
            worker.forget_constants()
            if (journal := connections.part.journals.get(worker)) is not None:
                journal.mark()
        self._coming = _Snapshot(
            self._number, connections.step, self._stages.num_exchanges, {*connections.workers}
        )

    # around a move

    def is_taken_by(self, end_seconds: float) -> bool:
        """Take a snapshot before a move, and wait for it until a moment at most; returns whether it
        is whole by then."""
        self.forget_coming()
        number = self._number + 1
        if not self._journals or any(journal.has_caches for journal in self._journals):
            return False
        self._take(with_gradients=False)
        while (coming := self._coming) is not None and time.monotonic() < end_seconds:
            if self._connections.is_ending():
                break
            if coming.missing:
                self._connections.hear()
            else:
                wait(coming.written, timeout=LOOK_SECONDS)
                self._use_if_whole()
        self.forget_coming()
        return self._whole_number == number

    def follow(self, sources: Sources, rounded: Collection[str], has_snapshot: bool) -> None:
        """Layers have moved: find the content of their tensors where it was.

        Args:
            sources: The source of each worker's tensors missing in the checkpoint.
            rounded: The tensors with another dtype than before.
            has_snapshot: Whether a snapshot of the state before the move is whole.
        """
        self.files.follow(sources)
        former, self._untold = self._untold, {}
        for (name, target), source in sources.items():
            # The worker itself sends the rest of the tensors missing in its files.
            is_told = has_snapshot or (source is target and name not in former.get(target, ()))
            if source is not None and (name in rounded or not is_told):
                self._untold.setdefault(target, set()).add(name)
        if not has_snapshot:
            self.has_moved, self._latest_seconds = True, -math.inf

    # on its way

    def _on_begun(self, worker: Member, message: m.SnapshotBegun) -> None:
        coming = self._coming
        if coming is None or coming.number != message.number:
            return
        stages = self._layers.holdings.stages_of(worker)
        with self._connections.blaming(worker):
            if unknown := {*message.names}.difference(*(stage.names for stage in stages)):
                raise RemoteProtocolError(f"It has no tensors {sorted(unknown)[:5]} to tell of.")
        coming.names[worker.number] = message.names
        if (journal := self._connections.part.journals.get(worker)) is not None:
            journal.note_begun()

    def _take_piece(
        self, worker: Member, message: m.SnapshotPart, tensors: Sequence[Tensor]
    ) -> None:
        """Write a piece of a worker's part.

        Raises:
            RemoteProtocolError: If the worker sends more than its layers can have, or not one
                piece.
        """
        if len(tensors) != 1:
            raise RemoteProtocolError(f"A piece of a snapshot came as {len(tensors)} tensors.")
        (piece,) = tensors
        coming = self._coming
        if coming is None or coming.number != message.number or worker not in coming.missing:
            return  # the snapshot is no longer used
        if worker.number not in coming.names:
            raise RemoteProtocolError("It has not told which tensors its part of a snapshot has.")
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
            self._forget()
            return
        self._is_unwritten = False
        self.step, self._whole_number, self._untold = coming.step, coming.number, {}
        self.files.note_whole(coming.number, coming.names)
        for journal in self._journals:
            journal.cut()
        self._connections.broadcast(m.ForgetSent(coming.step, coming.exchange))
        if self.has_moved:
            self.has_moved = False
            rank_zero_info("the state behind the move is safe, so lost workers are replaced again")

    def _note_unwritten(self, error: BaseException) -> None:
        """Warn of an unwritten snapshot, once: the next ones are likely to fail too."""
        if not self._is_unwritten:
            rank_zero_warn(
                f"A snapshot was not written to {self.files.folder.parent}, and the one before it "
                f"stays ({error}). Until the next one is written, workers in the place of lost "
                "ones have more to repeat. Free space there, or start the next run with "
                "Recovery(folder=...) elsewhere."
            )
        self._is_unwritten = True

    def forget_coming(self) -> None:
        """Discard the snapshot on its way."""
        coming, self._coming = self._coming, None
        if coming is not None:
            self._forget()

    def _forget(self) -> None:
        self.files.drop_unused()
        for journal in self._journals:
            journal.unmark()


def _claimed(folder: Path) -> BinaryIO:
    """Make a folder; it is this process's until the returned file is closed.

    The folder has its name only when it is claimed, so other processes do not sweep it before.
    """
    unnamed = Path(tempfile.mkdtemp(prefix="new-", dir=folder.parent))
    claim = (unnamed / _CLAIM).open("wb")
    claim.write(_CLAIMED)
    claim.flush()
    # Without locks on this file system folders are not swept, as `_sweep` needs the lock.
    with suppress(OSError):
        fcntl.flock(claim, fcntl.LOCK_EX)
    unnamed.rename(folder)
    return claim


def _sweep(folder: Path) -> None:
    """Remove the folders of ended processes, as far as this process may."""
    for claim_of_other in folder.glob(f"run-*/{_CLAIM}"):
        with suppress(OSError), claim_of_other.open("r+b") as claim:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if claim.read(len(_CLAIMED) + 1) == _CLAIMED:
                shutil.rmtree(claim_of_other.parent, ignore_errors=True)


def _frames_in(content: memoryview, reader: FrameReader) -> Iterator[Frame]:
    """The frames ending in the next bytes of a file."""
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
