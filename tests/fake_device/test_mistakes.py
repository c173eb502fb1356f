"""Each mistake in the waits of copies, threads and generators is noticed on the fake device.

Every case runs right first, so that a mistake is what fails and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetero.devices.copies import HostCopy, StreamedCopies
from lightning_hetero.devices.device import Accelerator, device_for, forked_generators
from lightning_hetero.devices.streams import AcceleratorStreams
from lightning_hetero.devices.thread_device import ThreadDevice
from lightning_hetero.pipeline.boundary import Activation
from lightning_hetero.pipeline.random_numbers import seed_action
from lightning_hetero.pipeline.turns import Finished, Turn, TurnThreads

from . import faults, reset, waits_here
from .process import on_fake_device

FAKE = "fake:0"
NUMBERS = 1000

Undo = Callable[[], None]


def copies_here() -> StreamedCopies[Any]:
    found = device_for(torch.device(FAKE)).copies()
    assert isinstance(found, StreamedCopies)
    return found


def received(copies: StreamedCopies[Any], pool: Any, value: float) -> Activation:
    """A tensor comes, into memory that the reader's pool may use again."""
    host = torch.frombuffer(pool.take(4 * NUMBERS), dtype=torch.float32).fill_(value)
    return copies.to_device([host], lambda tensors: Activation(tensors[0]))


def there_and_back() -> None:
    """A stage: tensors come, it computes, and results leave; memory is used again and again."""
    copies = copies_here()
    pool = copies.receive_pool()
    before = waits_here()
    for value in range(4):
        coming, next_one = (received(copies, pool, number) for number in (value, value + 0.5))
        coming.land()
        leaving = copies.to_host([coming.hidden * 2])
        del coming
        next_one.land()
        last = copies.to_host([next_one.hidden * 2])
        del next_one
        assert waits_here() == before, "the computing thread has waited"
        sender = threading.Thread(target=leaving.wait)  # as the writer of a channel does
        sender.start()
        sender.join()
        last.wait()
        before = waits_here()
        assert leaving.tensors[0].eq(2 * value).all()
        assert last.tensors[0].eq(2 * value + 1).all()
    copies.close()
    assert faults() == []


def many_come() -> None:
    """Tensors come before the first one is used, and their memory is free in between."""
    copies = copies_here()
    pool = copies.receive_pool()
    come = [received(copies, pool, value) for value in range(3)]
    for value, content in enumerate(come):
        content.land()
        assert (content.hidden + 0).cpu().eq(value).all()
    copies.close()
    assert faults() == []


def a_turn() -> None:
    """User code runs in a turn, on the device and stream of its driver."""
    torch.accelerator.set_device_index(1)
    torch.accelerator.set_stream(torch.Stream("fake:1"))
    weight = torch.ones(3, device="fake")

    def step() -> list[float]:
        return (weight * torch.ones(3, device="fake")).tolist()

    threads = TurnThreads()
    try:
        assert Turn(step, "step", threads).start() == Finished([1.0, 1.0, 1.0])
    finally:
        threads.close()


def a_seeded_action() -> None:
    """A forward that runs again draws the same mask, and the user's own numbers go on."""
    torch.manual_seed(1)
    expected = torch.rand(4, device=FAKE).tolist()
    torch.manual_seed(1)
    with forked_generators():
        masks = []
        for _ in range(2):
            seed_action(1, 2, 3)
            masks.append(torch.rand(4, device=FAKE).tolist())
        assert masks[0] == masks[1]
    assert torch.rand(4, device=FAKE).tolist() == expected


def patched(owner: Any, name: str, other: Any) -> Undo:
    before = getattr(owner, name)
    setattr(owner, name, other)
    return lambda: setattr(owner, name, before)


def no_wait_on_the_way_in() -> Undo:
    return patched(AcceleratorStreams, "compute_after", lambda self, mark, used: None)


def no_wait_on_the_way_out() -> Undo:
    """The copy out waits for nothing."""

    def copy_out(self: Any, after: Any, sources: Any, hosts: Any) -> Any:
        with self.inside(self._leaving):
            for source, host in zip(sources, hosts, strict=True):
                host.copy_(source, non_blocking=True)
                source.record_stream(self._leaving)
        return self._mark(self._leaving)

    return patched(AcceleratorStreams, "copy_out", copy_out)


def no_wait_on_the_host() -> Undo:
    return patched(HostCopy, "wait", lambda self: None)


def computing_is_not_waited_for() -> Undo:
    """The mark that the copy out waits for stands in another stream than the one that computes."""
    return patched(AcceleratorStreams, "mark_computed", lambda self: self._mark(self._coming))


def no_record_stream() -> Undo:
    return patched(Tensor, "record_stream", lambda self, stream: None)


def a_buffer_is_not_held() -> Undo:
    before = StreamedCopies.to_device

    def to_device(self: Any, tensors: Any, read: Any) -> Any:
        content = before(self, tensors, read)
        self._coming.clear()
        return content

    return patched(StreamedCopies, "to_device", to_device)


def the_device_of_a_thread_is_not_set() -> Undo:
    return patched(ThreadDevice, "take_over", lambda self: None)


def the_generator_is_not_forked() -> Undo:
    return patched(Accelerator, "generator_states", classmethod(lambda cls: []))


MISTAKES: dict[str, tuple[Callable[[], Undo], Callable[[], None]]] = {
    mistake.__name__: (mistake, scene)
    for mistake, scene in (
        (no_wait_on_the_way_in, there_and_back),
        (no_wait_on_the_way_out, there_and_back),
        (no_wait_on_the_host, there_and_back),
        (computing_is_not_waited_for, there_and_back),
        (no_record_stream, there_and_back),
        (a_buffer_is_not_held, many_come),
        (the_device_of_a_thread_is_not_set, a_turn),
        (the_generator_is_not_forked, a_seeded_action),
    )
}


@contextmanager
def made(mistake: Callable[[], Undo]) -> Iterator[None]:
    undo = mistake()
    try:
        yield
    finally:
        undo()


@pytest.mark.parametrize("name", MISTAKES)
@on_fake_device
def test_a_mistake_is_noticed(name: str) -> None:
    mistake, scene = MISTAKES[name]
    scene()
    with made(mistake), pytest.raises((AssertionError, RuntimeError)):
        scene()
    reset()  # its faults are not those of the test
