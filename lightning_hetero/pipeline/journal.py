"""Journals: a process keeps its messages, so that another worker can take a lost one's place.

    coordinator ──▶ worker    Journal    all messages since the latest snapshot
    worker ──▶ worker         SentLog    activations, gradients, exchanges of replicas, since then
    receiver                  RepeatedMessages   messages of the lost worker: dropped when repeated

A worker is a function of its snapshot and of the messages after it. So its replacement gets the
same frames again. A part of its messages has been received before, and is dropped: so many answers
to each request, by its number, and so many messages of each kind, step and micro-batch. This file
does not use sockets.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ..protocol import messages as m
from ..protocol.bases import Repeated
from ..protocol.frames import Encode, Frame, encode_frame
from ..written_blocks import WrittenBlock

logger = logging.getLogger(__name__)


# The identity of a repeated message: its class, its step, and for micro-batches number and place.
Identity = tuple[Any, ...]

MOST_IN_MEMORY_BYTES = 256 * 2**20
"""Frames beyond this size are kept in temporary files."""


def is_standing(message: m.Message) -> bool:
    """Whether to repeat a message to a replacement worker, with any snapshot."""
    return message.repeated is Repeated.ALWAYS


def identity_of(message: m.Message) -> Identity:
    """The common facts of a message and of its repetition by the sender's replacement."""
    kind = type(message).__name__
    if message.key is None:
        return (kind,)
    return kind, message.step, message.stage_number, message.key


class _FrameFile:
    """A temporary file of frames, which becomes empty with its last one.

    It has no name, so that it vanishes with this process.
    """

    def __init__(self) -> None:
        # Without a buffer, a full disk is noticed at the frame without room.
        self._file = tempfile.TemporaryFile(prefix="lightning-hetero-", buffering=0)  # noqa: SIM115
        self._num_bytes = 0
        self.num_frames = 0

    def append(self, frame: bytes) -> int:
        """Append a frame; returns its position.

        Raises:
            OSError: If the disk is full. The next frame overwrites the written part.
        """
        position = self._file.seek(self._num_bytes)
        rest = memoryview(frame)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._num_bytes += len(frame)
        self.num_frames += 1
        return position

    def read(self, position: int, num_bytes: int) -> bytes:
        """Read a frame."""
        self._file.seek(position)
        content = bytearray(num_bytes)
        rest = memoryview(content)
        while rest and (count := self._file.readinto(rest)):
            rest = rest[count:]
        return bytes(content[: num_bytes - len(rest)])

    def drop(self) -> None:
        """Forget one of the frames."""
        self.num_frames -= 1
        if self.num_frames == 0:
            self._num_bytes = 0
            self._file.truncate(0)

    def close(self) -> None:
        self._file.close()


class FrameStore:
    """Keeps frames in memory, and frames beyond a limit in temporary files, as far as the disk has
    room.

    Args:
        most_bytes: The most bytes in memory.

    Attributes:
        num_bytes: The bytes of all frames, in memory and in files.
    """

    def __init__(self, most_bytes: int = MOST_IN_MEMORY_BYTES) -> None:
        self._most_bytes = most_bytes
        self.num_bytes = 0
        self._memory_bytes = 0
        # The last file takes the next frame. They take turns: a single file would grow until the
        # end of the run, if it always has some new frame when the old frames are dropped.
        self._files: list[_FrameFile] = []
        # Whether a file could not be written.
        self._is_full = False
        self._is_closed = False
        # The writing threads of channels put frames with tensors copied from a device.
        self._changing = threading.Lock()

    def put(self, frame: bytes, in_memory: bool = False) -> StoredFrame:
        """Keep a frame until it is dropped.

        Args:
            frame: The bytes of the frame.
            in_memory: Keep it in memory beyond the limit too. It may stay until the run ends, and
                its file would never become empty.
        """
        with self._changing:
            self.num_bytes += len(frame)
            fits = in_memory or self._memory_bytes + len(frame) <= self._most_bytes
            if not fits and (stored := self._written(frame)) is not None:
                return stored
            self._memory_bytes += len(frame)
            return StoredFrame(self, len(frame), frame)

    def _written(self, frame: bytes) -> StoredFrame | None:
        """Keep a frame in a file, if possible."""
        if self._is_closed:
            return None
        try:
            file = self._next_file()
            position, block = file.append(frame), WrittenBlock.of(frame)
            return StoredFrame(self, len(frame), b"", position, file, block)
        except OSError as error:
            if not self._is_full:
                self._is_full = True
                logger.warning(
                    "What a worker in the place of a lost one would be told stays in memory beyond "
                    "%.0f MiB, since the temporary folder cannot be written (%s). Free space "
                    "there, or name another folder by the environment variable TMPDIR.",
                    self._most_bytes / 2**20,
                    error,
                )
            return None

    def _next_file(self) -> _FrameFile:
        """The file for the next frame.

        Raises:
            OSError: Without a writable temporary folder.
        """
        if len(self._files) < 2:
            self._files.append(_FrameFile())
        elif self._files[0].num_frames == 0:
            self._files.reverse()
        return self._files[-1]

    def read(self, frame: StoredFrame) -> bytes:
        """The bytes of a frame.

        Raises:
            CheckpointError: If the file's bytes are not the written ones.
        """
        if frame.file is None or frame.block is None:
            return frame.content
        with self._changing:
            content = frame.file.read(frame.position, frame.num_bytes)
        frame.block.check(content, f"A temporary file in {tempfile.gettempdir()!r}")
        return content

    def drop(self, frame: StoredFrame) -> None:
        """Forget a frame."""
        with self._changing:
            self.num_bytes -= frame.num_bytes
            if frame.file is None:
                self._memory_bytes -= frame.num_bytes
            elif not self._is_closed:
                frame.file.drop()

    def close(self) -> None:
        """Remove the files; their frames cannot be read afterwards."""
        with self._changing:
            self._is_closed = True
            for file in self._files:
                file.close()


@dataclass(frozen=True)
class StoredFrame:
    """A frame in a store.

    Args:
        store: The store.
        num_bytes: The length of the frame.
        content: Its bytes; empty if it is in a file.
        position: Where it is in its file.
        file: The file; None if the frame is in memory.
        block: The bytes written to the file; None if the frame is in memory.
    """

    store: FrameStore
    num_bytes: int
    content: bytes
    position: int = 0
    file: _FrameFile | None = None
    block: WrittenBlock | None = None

    def read(self) -> bytes:
        """The bytes of the frame."""
        return self.store.read(self)


class KeptMessage:
    """A message that was sent, with its frame.

    Args:
        message: The message.
        encode: Encodes the frame; it waits for the device if that still copies tensors.
        store: Keeps the frame.

    Attributes:
        message: As given.
        stamp: The receiver's progress by then, for messages without it.
    """

    def __init__(self, message: m.Message, encode: Encode, store: FrameStore) -> None:
        self.message = message
        self.stamp: Mapping[str, int] = {}
        self._encode = encode
        self._store = store
        self._frame: StoredFrame | None = None

    def read(self) -> bytes:
        """The bytes of the frame; it is kept from the first call on."""
        if self._frame is None:
            content = b"".join(self._encode())
            self._frame = self._store.put(content, in_memory=is_standing(self.message))
            self._encode = list  # its tensors are no longer needed
            return content
        return self._frame.read()

    def encoding(self, is_ready: bool) -> Encode:
        """The encoder of the frame for a channel; an unready one waits for the device first."""
        if not is_ready:
            return lambda: [memoryview(self.read())]
        content = self.read()
        return lambda: [memoryview(content)]

    def drop(self) -> None:
        """Give the memory of the frame back."""
        if self._frame is not None:
            self._store.drop(self._frame)


class SentLog:
    """The activations, gradients and sums of gradients from a worker to other workers.

    Args:
        store: Keeps the frames.
    """

    def __init__(self, store: FrameStore) -> None:
        self.store = store
        self._entries: dict[int, deque[KeptMessage]] = {}

    def keep(self, member: int, message: m.Message, encode: Encode, is_ready: bool) -> Encode:
        """Keep a message to the worker of a number; returns the encoder of its frame."""
        if not message.is_between_workers:
            return encode
        entry = KeptMessage(message, encode, self.store)
        encode = entry.encoding(is_ready)
        self._entries.setdefault(member, deque()).append(entry)
        return encode

    def forget(self, step: float, exchange: float) -> None:
        """Drop the messages of steps, and of exchanges of replicas, up to these numbers."""
        for number, entries in self._entries.items():
            self._entries[number] = deque()
            for entry in entries:
                if _is_behind(entry.message, step, exchange):
                    self._entries[number].append(entry)
                else:
                    entry.drop()

    def sent_to(self, member: int) -> list[KeptMessage]:
        """The kept messages for the worker of a number, in their order."""
        return list(self._entries.get(member, ()))


def _is_behind(message: m.Message, step: float, exchange: float) -> bool:
    """Whether a message belongs to a later step or exchange."""
    if isinstance(message, m.ReplicaTensors):
        return message.round > exchange
    return message.step is not None and message.step > step


class RepeatedMessages:
    """Counts a peer's messages, and drops the repetitions by its replacement."""

    def __init__(self) -> None:
        self._received: Counter[Identity] = Counter()
        self._due: Counter[Identity] = Counter()

    def takes(self, message: m.Message) -> bool:
        """Whether a message is new; counts it then."""
        identity = identity_of(message)
        if self._due[identity] > 0:
            self._due[identity] -= 1
            return False
        self._received[identity] += 1
        return True

    def begin(self) -> None:
        """Another process takes the peer's place, and begins to repeat the peer's messages."""
        self._due = Counter(self._received)

    def begin_step(self, step: float) -> None:
        """Forget earlier steps; their counts are no longer used."""
        for counts in (self._received, self._due):
            for identity in [i for i in counts if len(i) > 1 and (i[1] or 0) < step]:
                del counts[identity]


class Journal:
    """The coordinator's messages to one worker since the worker's latest snapshot.

    Args:
        store: Keeps the frames.
        stamp: The progress of the worker's stages in the present step.

    Attributes:
        fault: Why the messages cannot be repeated, as a sentence; None if they can.
    """

    def __init__(self, store: FrameStore, stamp: Callable[[], Mapping[str, int]]) -> None:
        self.fault: str | None = None
        self._store = store
        self._stamp = stamp
        # By the setting of each message, or by their numbers.
        self._standing: dict[Hashable, KeptMessage] = {}
        self._entries: dict[int, KeptMessage] = {}
        # The number of the next entry.
        self._num_entries = 0
        # The entries of requests, by the requests' numbers.
        self._requests: dict[int, int] = {}
        # The worker's messages: answers by the numbers of kept requests, reports by class.
        self._answered: Counter[int | type] = Counter()
        self._reported: Counter[int | type] = Counter()
        self._repeats = RepeatedMessages()
        # The messages that a replacement worker will repeat.
        self._due: Counter[int | type] = Counter()
        self._caches: set[int] = set()
        self._fault_at = 0
        # Of the snapshot on its way: the entries before it, and the reports.
        self._mark: int | None = None
        self._reported_before: Counter[int | type] = Counter()

    def keep(self, message: m.Message, encode: Encode, is_ready: bool) -> Encode:
        """Keep a message; returns the encoder of its frame."""
        if message.repeated is Repeated.NEVER:
            return encode
        self._note_caches(message)
        if message.begins_step and message.step is not None:
            self._repeats.begin_step(message.step)
        if isinstance(message, m.AbortStep):
            self.give_up(f"Step {message.step} was given up, and no snapshot was taken since.")
        if self.fault is not None and self._mark is None and not is_standing(message):
            return encode
        entry = KeptMessage(message, encode, self._store)
        encode = entry.encoding(is_ready)
        if message.key is None and not isinstance(message, m.StampedRequest):
            entry.stamp = self._stamp()
        self._entries[self._num_entries] = entry
        if message.request:
            self._requests[message.request] = self._num_entries
        self._num_entries += 1
        return encode

    def give_up(self, fault: str) -> None:
        """Keep only standing messages until the next snapshot, because the others cannot be
        repeated."""
        self.fault, self._fault_at, self._mark = fault, self._num_entries, None
        for number, entry in list(self._entries.items()):
            if not is_standing(entry.message):
                self._drop(number)

    def _drop(self, number: int) -> None:
        """Forget an entry and the answers to it."""
        entry = self._entries.pop(number)
        self._requests.pop(entry.message.request, None)
        self._answered.pop(entry.message.request, None)
        entry.drop()

    @property
    def requests(self) -> Collection[int]:
        """The numbers of the requests to repeat to a replacement worker."""
        return self._requests.keys()

    @property
    def has_caches(self) -> bool:
        """Whether the worker has key-value caches; snapshots do not hold them."""
        return bool(self._caches)

    def _note_caches(self, message: m.Message) -> None:
        if isinstance(message, m.Arguments):
            calls = (call.cache for call in message.calls)
            self._caches.update(cache.number for cache in calls if cache is not None)
        elif isinstance(message, m.DropCaches):
            self._caches.difference_update(message.numbers)

    def takes(self, message: m.Message) -> bool:
        """Whether a message of the worker is new; notes it then."""
        if message.key is not None:
            return self._repeats.takes(message)
        said = message.request or type(message)
        # A replacement worker may fail where the lost worker has not.
        is_failure = isinstance(message, m.Failure)
        if self._due[said] > 0 and not is_failure:
            self._due[said] -= 1
            return False
        if isinstance(message, (m.Timings, m.BuffersUpdated)):
            self._reported[type(message)] += 1
        elif (number := self._requests.get(message.request)) is not None:
            self._answered[message.request] += not is_failure
            # A standing message may no longer be an entry, and it is repeated though answered.
            entry = self._entries.get(number)
            is_question = entry is not None and entry.message.repeated is Repeated.UNTIL_ANSWERED
            if is_question and not message.is_piece:
                self._drop(number)
        return True

    def mark(self) -> None:
        """A snapshot is asked for: it holds the effects of all messages so far."""
        self._mark = self._num_entries

    def note_begun(self) -> None:
        """The worker has made its reports on the messages before the snapshot."""
        self._reported_before = Counter(self._reported)

    def unmark(self) -> None:
        """The snapshot on its way is not used."""
        self._mark = None

    def cut(self) -> None:
        """The snapshot is safe: drop the messages with effects in it."""
        mark, self._mark = self._mark, None
        if mark is None:
            return  # the messages since the request for it cannot be repeated
        for number in [number for number in self._entries if number < mark]:
            entry = self._entries[number]
            if (standing := self._standing_of(entry)) is entry:
                del self._entries[number]
            else:
                self._drop(number)
            if standing is not None:
                self._stand(number, standing)
        self._reported -= self._reported_before
        if self._fault_at <= mark:
            self.fault = None

    def _stand(self, number: int, entry: KeptMessage) -> None:
        """Keep a message to repeat, in the place of a message made needless by it."""
        what = entry.message.sets
        key = number if what is None else what
        if (needless := self._standing.pop(key, None)) is not None:
            needless.drop()
        self._standing[key] = entry

    def _standing_of(self, entry: KeptMessage) -> KeptMessage | None:
        """The message to repeat to a replacement worker for a message with its effect in the
        snapshot."""
        message = entry.message
        if not isinstance(message, m.AverageWeights):
            return entry if is_standing(message) else None
        if message.action not in ("begin", "go on"):
            return None
        # The averages themselves are in the snapshot.
        said = m.AverageWeights("go on", 0, None)
        return KeptMessage(said, lambda: encode_frame(Frame(said)), self._store)

    def repeat(self) -> Iterator[tuple[m.Message, Callable[[], bytes]]]:
        """All messages to repeat to a replacement worker, in their order, each with a reader of its
        frame.

        Answers received before are dropped from now on.
        """
        self.unmark()
        self._due = self._answered + self._reported
        self._repeats.begin()
        for entry in list(self._standing.values()):
            yield _unstamped(entry)
        for entry in list(self._entries.values()):
            if entry.stamp:
                wait = m.Wait(forwards=entry.stamp["forwards"], backwards=entry.stamp["backwards"])
                yield wait, partial(_frame_of, wait)
            yield entry.message, entry.read


def _unstamped(entry: KeptMessage) -> tuple[m.Message, Callable[[], bytes]]:
    """A standing message without its place in a finished step."""
    if not isinstance(entry.message, m.StampedRequest):
        return entry.message, entry.read
    message = msgspec.structs.replace(entry.message, forwards=0, backwards=0)
    return message, partial(_frame_of, message)


def _frame_of(message: m.Message) -> bytes:
    """The frame of a message without tensors."""
    return b"".join(encode_frame(Frame(message)))
