"""What is kept of messages, what a new worker is told again, and which answers are dropped."""

from __future__ import annotations

import errno
import os
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import IO, Any

import pytest
import torch

from lightning_hetero.errors import CheckpointError
from lightning_hetero.pipeline.journal import (
    FrameStore,
    Journal,
    RepeatedMessages,
    SentLog,
    StoredFrame,
)
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame, FrameReader, encode_frame
from lightning_hetero.protocol.values import DictNode

STAMP = {"forwards": 2, "backwards": 1}


@pytest.fixture
def store() -> Iterator[FrameStore]:
    found = FrameStore(100)
    yield found
    found.close()


def frames_of(content: bytes) -> list[m.Message]:
    reader, found = FrameReader(), []
    while content:
        buffer = reader.buffer()
        part = content[: len(buffer)]
        buffer[: len(part)] = part
        content = content[len(part) :]
        if (frame := reader.advance(len(part))) is not None:
            found.append(frame.message)
    return found


def in_files(kept: list[StoredFrame]) -> list[bool]:
    return [each.file is not None for each in kept]


def test_frames_beyond_the_limit_are_read_from_files(store: FrameStore) -> None:
    contents = [bytes([number]) * 40 for number in range(6)]
    kept = [store.put(content) for content in contents]
    assert in_files(kept) == [False, False, True, True, True, True]
    assert [each.read() for each in kept] == contents
    assert store.num_bytes == 240
    for each in kept:
        store.drop(each)
    assert store.num_bytes == 0
    again = [store.put(content) for content in contents]
    assert in_files(again) == [False, False, True, True, True, True]
    assert again[2].position == 0
    assert [each.read() for each in again] == contents


def test_files_do_not_grow_though_new_frames_come_before_old_ones_go(store: FrameStore) -> None:
    """As behind each snapshot, where what was said since it was asked for stays."""
    kept = deque(store.put(b"k" * 40) for _ in range(4))
    positions = []
    for number in range(100):
        kept += [store.put(bytes([number]) * 40), store.put(bytes([number + 1]) * 40)]
        positions += [each.position for each in kept]
        for _ in range(2):
            store.drop(kept.popleft())
    assert max(positions) <= 6 * 40
    assert [each.read() for each in kept] == [bytes([n]) * 40 for n in (98, 99, 99, 100)]


class FullDisk:
    """A file for which the disk has room for the first bytes only."""

    def __init__(self, file: IO[bytes], num_bytes: int) -> None:
        self._file, self._num_bytes = file, num_bytes

    def write(self, content: memoryview) -> int:
        room = self._num_bytes - self._file.tell()
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._file.write(content[:room])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.follows(
    "Free space there, or name another folder by the environment variable TMPDIR.",
)
@pytest.mark.parametrize("num_bytes", [None, 0, 100])
def test_frames_for_which_the_disk_has_no_room_stay_in_memory(
    num_bytes: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(**options: Any) -> Any:
        if num_bytes is None:
            raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")
        return FullDisk(made(**options), num_bytes)

    made = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    store, contents = FrameStore(100), [bytes([number]) * 40 for number in range(9)]
    kept = [store.put(content) for content in contents]
    assert sum(in_files(kept)) == (3 if num_bytes else 0)
    assert [each.read() for each in kept] == contents
    assert store.num_bytes == 360
    assert caplog.text.count("the temporary folder cannot be written") == 1
    for each in kept:
        store.drop(each)
    assert store.num_bytes == 0
    store.close()
    monkeypatch.undo()
    caplog.clear()
    store = FrameStore(100)
    assert sum(in_files([store.put(content) for content in contents])) > 3
    assert not caplog.text
    store.close()


def test_a_frame_that_has_changed_on_the_disk_is_found() -> None:
    store = FrameStore(0)
    kept = store.put(b"weights")
    assert kept.file is not None
    assert kept.read() == b"weights"
    for position in range(7):
        changed = bytearray(b"weights")
        changed[position] ^= 1
        os.pwrite(kept.file._file.fileno(), changed, 0)
        with pytest.raises(CheckpointError, match="A temporary file in .* has other bytes than"):
            kept.read()
    os.ftruncate(kept.file._file.fileno(), 3)
    with pytest.raises(CheckpointError, match="a block of 7 bytes of which 3 were read"):
        kept.read()
    store.close()


def test_a_closed_store_keeps_what_a_thread_still_puts() -> None:
    store = FrameStore(0)
    early = store.put(b"early")
    store.close()
    late = store.put(b"late")
    assert late.read() == b"late"
    for each in (early, late):
        store.drop(each)
    assert store.num_bytes == 0


class Kept:
    """A journal, and what was said to its worker."""

    def __init__(self, store: FrameStore) -> None:
        self.journal = Journal(store, self._stamp)

    def _stamp(self) -> Mapping[str, int]:
        return STAMP

    def say(self, *messages: m.Message) -> None:
        for message in messages:
            encode = self.journal.keep(
                message, lambda each=message: encode_frame(Frame(each)), True
            )
            assert frames_of(b"".join(encode())) == [message]

    def repeated(self) -> list[m.Message]:
        found = []
        for message, read in self.journal.repeat():
            assert frames_of(read()) == [message]
            found.append(message)
        return found


BUILD = m.BuildOptimizer(0, "AdamW", None, [], request=7)
FROZEN = m.SetTrained(["0.weight"], False, forwards=2)


def step(number: int) -> list[m.Message]:
    return [
        m.BeginStep(number, 2, accumulate=False, forwards=1),
        m.Arguments(number, 0, 0, True, None, [], []),
        m.Gradient(number, 0, 0, [False]),
        m.ApplyOptimizer(number, 0, [], forwards=1, backwards=1),
    ]


def test_all_is_repeated_in_its_order_and_unstamped_requests_wait(store: FrameStore) -> None:
    kept = Kept(store)
    load = m.LoadOptimizerState(0, "0.weight", DictNode({}))
    kept.say(*step(1), load, *step(2))
    assert kept.repeated() == [*step(1), m.Wait(**STAMP), load, *step(2)]


def test_signs_of_life_and_ends_are_not_kept(store: FrameStore) -> None:
    kept = Kept(store)
    kept.say(m.Ping(), m.Pong(), m.KeepSent(1), m.ForgetSent(1), m.TakeSnapshot(1, False))
    assert kept.repeated() == []
    assert store.num_bytes == 0


def test_a_snapshot_leaves_what_it_does_not_hold(store: FrameStore) -> None:
    kept = Kept(store)
    average = m.AverageWeights("begin", 0, 0.5, forwards=1)
    kept.say(BUILD, *step(1), FROZEN, average, m.AverageWeights("update", 1, 0.5))
    for answer in (m.Done(request=7), m.Timings(1, 0.1, 0.1, 1)):
        assert kept.journal.takes(answer)
    kept.journal.mark()
    kept.say(*step(2))
    kept.journal.note_begun()
    assert kept.journal.takes(m.Timings(2, 0.1, 0.1, 1))
    kept.journal.cut()
    unstamped = m.SetTrained(["0.weight"], False)
    standing = [BUILD, unstamped, m.AverageWeights("go on", 0, None)]
    assert kept.repeated() == [*standing, *step(2)]
    # The answers that are repeated: to BuildOptimizer, and to the second step.
    answers: list[m.Message] = [m.Done(request=7), m.Timings(2, 0.2, 0.2, 1)]
    assert [kept.journal.takes(answer) for answer in answers] == [False, False]
    assert [kept.journal.takes(answer) for answer in answers] == [True, True]


def test_of_what_standing_messages_set_again_and_again_only_the_latest_is_kept(
    store: FrameStore,
) -> None:
    """As parameters that two optimizers freeze in turn, or a temperature that falls."""

    def attributes(values: str, path: str = "", gone: Sequence[str] = ()) -> m.SetAttributes:
        return m.SetAttributes(0, path, values, [*gone])

    kept = Kept(store)
    for number in range(5):
        kept.say(BUILD, attributes('{"a": 1}'), attributes('{"a": 1}', "mlp"))
        kept.say(m.SetTrained(["0.weight"], True), m.SetTrained(["0.bias"], False))
        kept.say(m.SetTrained(["0.weight"], False), m.Record(number % 2 == 0, False))
        kept.say(attributes('{"b": 2}', gone=["a"]), attributes(f'{{"a": {number}}}'))
        kept.journal.mark()
        kept.journal.cut()
    assert kept.repeated() == [
        *[BUILD] * 5,
        attributes('{"a": 1}', "mlp"),
        m.SetTrained(["0.bias"], False),
        m.SetTrained(["0.weight"], False),
        m.Record(True, False),
        attributes('{"b": 2}', gone=["a"]),
        attributes('{"a": 4}'),
    ]
    read = [read() for _, read in kept.journal.repeat()]
    assert store.num_bytes == sum(map(len, read))


def test_a_snapshot_that_is_not_used_leaves_everything(store: FrameStore) -> None:
    kept = Kept(store)
    kept.say(*step(1))
    kept.journal.mark()
    kept.say(*step(2))
    kept.journal.unmark()
    kept.journal.cut()
    assert kept.repeated() == [*step(1), *step(2)]


def test_an_answered_question_is_forgotten_and_an_open_one_goes_on(store: FrameStore) -> None:
    kept = Kept(store)
    fetch, norms = (
        m.FetchTensors(["0.weight", "0.bias"], request=1),
        m.MeasureNorms(0, 0, request=2),
    )
    weight, bias = m.TensorContent("0.weight", request=1), m.TensorContent("0.bias", request=1)
    kept.say(fetch, norms)
    assert {*kept.journal.requests} == {1, 2}
    for answer in (weight, bias, m.Done(request=1)):
        assert kept.journal.takes(answer)
    assert kept.repeated() == [norms]
    assert kept.journal.takes(m.Norms({}, request=2))
    assert kept.repeated() == []
    kept.say(fetch)
    assert kept.journal.takes(weight)
    assert kept.repeated() == [m.Wait(**STAMP), fetch]
    said = (weight, bias, m.Done(request=1))
    assert [kept.journal.takes(answer) for answer in said] == [False, True, True]
    assert not kept.journal.requests


def test_only_the_answers_to_the_same_request_are_dropped(store: FrameStore) -> None:
    """Whatever the order in which they come, and however many requests have the same class."""
    kept = Kept(store)
    zeroed = [m.ZeroGradients([], True, request=number) for number in (1, 2, 3)]
    kept.say(*zeroed)
    assert kept.journal.takes(m.Done(request=2))
    assert kept.repeated() == zeroed
    assert kept.journal.takes(m.Failure("A new worker has no memory for it.", request=2))
    numbers = (1, 2, 3, 2)
    assert [kept.journal.takes(m.Done(request=n)) for n in numbers] == [True, False, True, True]
    kept.journal.mark()
    kept.journal.cut()
    assert not kept.journal.requests
    assert kept.repeated() == []


def test_micro_batches_are_dropped_by_their_number(store: FrameStore) -> None:
    kept = Kept(store)
    kept.say(*step(1))

    def gradient(microbatch: int) -> m.Gradient:
        return m.Gradient(1, microbatch, 0, [False], keeps_graph=True)

    assert [kept.journal.takes(gradient(n)) for n in (0, 1, 0)] == [True] * 3
    kept.repeated()
    found = [kept.journal.takes(gradient(n)) for n in (0, 0, 0, 1, 1, 2)]
    assert found == [False, False, True, False, True, True]


def test_what_was_given_up_is_kept_again_from_the_next_snapshot_on(store: FrameStore) -> None:
    kept = Kept(store)
    kept.say(BUILD, *step(1), m.AbortStep(1))
    assert kept.journal.fault == "Step 1 was given up, and no snapshot was taken since."
    kept.say(*step(2), FROZEN)
    assert kept.repeated() == [m.Wait(**STAMP), BUILD, FROZEN]
    kept.journal.mark()
    kept.say(*step(3))
    kept.journal.note_begun()
    kept.journal.cut()
    assert kept.journal.fault is None
    assert kept.repeated() == [BUILD, m.SetTrained(["0.weight"], False), *step(3)]


def test_caches_are_known_until_they_are_dropped(store: FrameStore) -> None:
    kept = Kept(store)
    cache = m.CacheArgument(7, 0, 0, None, None)
    call = m.LayerArguments(0, False, None, None, 0, cache)
    kept.say(m.Arguments(1, 0, 0, False, None, [], [call]))
    assert kept.journal.has_caches
    kept.say(m.DropCaches([7]))
    assert not kept.journal.has_caches


def test_a_worker_keeps_activations_and_gradients_until_they_are_needless(
    store: FrameStore,
) -> None:
    log, sent = SentLog(store), []
    for number in (1, 2, 3):
        message = m.Activation(number, 0, 0, [True], [])
        frame = Frame(message, (torch.full((2,), float(number)),))
        encode = log.keep(2, message, partial(encode_frame, frame), number != 2)
        sent.append(b"".join(encode()))
    assert log.keep(2, m.Goodbye(), list, True)() == []
    assert [entry.read() for entry in log.sent_to(2)] == sent
    assert log.sent_to(1) == []
    log.forget(2, 0)
    assert [entry.read() for entry in log.sent_to(2)] == sent[2:]


def test_a_worker_keeps_what_replicas_exchange_until_its_exchange_is_needless(
    store: FrameStore,
) -> None:
    log = SentLog(store)
    sums = [m.ReplicaTensors(2, 1, number, "sums", [], True) for number in (1, 2, 3)]
    said = [m.Activation(1, 0, 0, [True], []), *sums, m.Activation(2, 0, 0, [True], [])]
    for message in said:
        log.keep(2, message, partial(encode_frame, Frame(message)), True)
    assert [entry.message for entry in log.sent_to(2)] == said
    before_bytes = store.num_bytes
    log.forget(1, 2)
    assert [entry.message for entry in log.sent_to(2)] == [sums[2], said[-1]]
    assert 0 < store.num_bytes < before_bytes
    log.forget(2, 3)
    assert store.num_bytes == 0


def test_repeats_of_earlier_steps_are_forgotten() -> None:
    repeats = RepeatedMessages()
    early, late = m.Activation(1, 0, 0, [True], []), m.Activation(2, 0, 0, [True], [])
    assert repeats.takes(early)
    assert repeats.takes(late)
    repeats.begin_step(2)
    repeats.begin()
    assert repeats.takes(early)  # the runner knows that its step is over
    assert not repeats.takes(late)
    assert repeats.takes(late)
