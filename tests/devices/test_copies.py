"""Copies: what waits for what, and when memory is reused.

The first tests run on a made-up device with streams. The last ones replace the functions of
`torch.cuda` that copies call, and check the calls and their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from lightning_hetero.devices.copies import PlainCopies, StreamedCopies, already_here
from lightning_hetero.devices.cuda import CudaStreams
from lightning_hetero.devices.device import device_for
from lightning_hetero.errors import ChannelError, ModelError
from lightning_hetero.pipeline.boundary import Activation, Gradients
from lightning_hetero.protocol.tensor_bytes import SMALLEST_KEPT_BYTES

from .made_up_streams import MadeUpStreams, on_device

NUMBERS = SMALLEST_KEPT_BYTES // 4


@pytest.fixture
def streams() -> MadeUpStreams:
    return MadeUpStreams()


@pytest.fixture
def copies(streams: MadeUpStreams) -> StreamedCopies[object]:
    return StreamedCopies(streams)


def computed(streams: MadeUpStreams, value: float, size: int = NUMBERS) -> Tensor:
    """A tensor of the device that holds -1 until the device has come to computing it."""
    memory = torch.full((size,), -1.0)
    streams.compute(partial(memory.fill_, value))  # type: ignore[arg-type]
    return on_device(memory)


def host_tensor(copies: StreamedCopies[object], value: float) -> tuple[Tensor, object]:
    """A tensor that a channel has received, and the pool with its memory."""
    pool = copies.receive_pool()
    return torch.frombuffer(pool.take(4 * NUMBERS), dtype=torch.float32).fill_(value), pool


def test_a_copy_to_the_host_has_earlier_results_and_the_sender_waits_for_it(
    streams: MadeUpStreams, copies: StreamedCopies[object]
) -> None:
    first = computed(streams, 1)
    copy = copies.to_host([first])
    streams.compute(partial(torch.Tensor.fill_, first.as_subclass(Tensor), 2))
    assert not copy.is_immediate
    assert not copy.tensors[0].any()  # nobody has waited, so nothing has happened
    copy.wait()
    assert copy.tensors[0].eq(1).all()


def test_copies_to_the_host_keep_dtypes_shapes_and_strides(
    streams: MadeUpStreams, copies: StreamedCopies[object]
) -> None:
    tensors = [
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor([True, False, True]),
        torch.ones((), dtype=torch.bfloat16),
        torch.empty(0, 4, dtype=torch.int64),
        torch.arange(5),
    ]
    copy = copies.to_host([on_device(tensor) for tensor in tensors])
    copy.wait()
    for found, expected in zip(copy.tensors, tensors, strict=True):
        assert type(found) is Tensor
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    assert len(streams.pinned) == 1


def test_tensors_in_main_memory_are_not_copied(
    streams: MadeUpStreams, copies: StreamedCopies[object]
) -> None:
    here, there = torch.ones(3), on_device(torch.ones(2))
    assert copies.to_host([here, there]).tensors[0].data_ptr() == here.data_ptr()
    alone = copies.to_host([here])
    alone.wait()  # for nothing
    # It is queued like the others all the same: what was begun first is sent first.
    assert not alone.is_immediate


def test_memory_of_a_host_copy_is_reused_only_after_it_was_sent(
    copies: StreamedCopies[object], streams: MadeUpStreams
) -> None:
    first = copies.to_host([computed(streams, 1)])
    second = copies.to_host([computed(streams, 2)])
    first.wait()
    second.wait()
    assert first.tensors[0].eq(1).all()
    assert second.tensors[0].eq(2).all()
    assert len(streams.pinned) == 2
    del first
    third = copies.to_host([computed(streams, 3)])
    third.wait()
    assert third.tensors[0].eq(3).all()
    assert second.tensors[0].eq(2).all()
    assert len(streams.pinned) == 2


def test_computing_waits_for_arriving_tensors_only_when_they_are_used(
    streams: MadeUpStreams, copies: StreamedCopies[object]
) -> None:
    host, _ = host_tensor(copies, 7)
    seen: list[float] = []
    coming = copies.to_device([host], lambda tensors: Activation(tensors[0]))
    hidden = coming.hidden.as_subclass(Tensor)
    streams.compute(lambda: seen.append(float(hidden[0])))
    coming.land()
    streams.compute(lambda: seen.append(float(hidden[0])))
    streams.computing.finish()
    assert seen == [-1, 7]


def test_receive_memory_is_not_reused_before_its_copy_has_finished(
    streams: MadeUpStreams, copies: StreamedCopies[object]
) -> None:
    pool = copies.receive_pool()

    def arrive(value: float) -> Activation:
        """A frame comes, into the pool's memory, and nobody holds it but the copy."""
        host = torch.frombuffer(pool.take(4 * NUMBERS), dtype=torch.float32).fill_(value)
        return copies.to_device([host], lambda tensors: Activation(tensors[0]))

    first, second = arrive(1), arrive(2)
    assert len(streams.pinned) == 2
    first.land()
    second.land()
    streams.computing.finish()
    assert first.hidden.eq(1).all()
    assert second.hidden.eq(2).all()
    arrive(3)  # notes that the copies are through
    arrive(4)
    assert len(streams.pinned) == 3


def test_tensors_made_from_arriving_tensors_are_kept_while_in_use(
    streams: MadeUpStreams, copies: StreamedCopies[object]
) -> None:
    host, _ = host_tensor(copies, 1)
    widened: list[Tensor] = []

    def read(tensors: tuple[Tensor, ...]) -> Gradients:
        assert streams.is_coming
        widened.append(tensors[0].double())
        return Gradients((widened[0], None))

    gradients = copies.to_device([host], read)
    assert streams.used == []
    gradients.land()
    assert any(tensor is widened[0] for tensor in streams.used)
    assert len(streams.used) == 2


def test_the_pool_keeps_buffers_for_the_micro_batches_in_flight(
    streams: MadeUpStreams, copies: StreamedCopies[object]
) -> None:
    copies.keep_for(1)
    for num_pinned in (12, 12 + 12 - 4):
        flying = [copies.to_host([on_device(torch.zeros(NUMBERS))]) for _ in range(12)]
        assert len(streams.pinned) == num_pinned
        flying[-1].wait()
        del flying


def test_pinned_buffers_have_the_sizes_that_torch_takes_and_serve_other_lengths(
    streams: MadeUpStreams, copies: StreamedCopies[object]
) -> None:
    leaving = copies.to_host([on_device(torch.zeros(NUMBERS + 1))])
    leaving.wait()
    del leaving
    copies.to_host([on_device(torch.zeros(2 * NUMBERS))]).wait()
    assert streams.pinned == [2 * SMALLEST_KEPT_BYTES]
    coming = copies.receive_pool().take(3 * SMALLEST_KEPT_BYTES)
    assert len(coming) == streams.pinned[-1] == 4 * SMALLEST_KEPT_BYTES


def test_a_large_mask_is_copied_from_pinned_memory(
    streams: MadeUpStreams, copies: StreamedCopies[object]
) -> None:
    mask = torch.arange(SMALLEST_KEPT_BYTES) % 3 == 0
    small = mask[:9].clone()
    coming = copies.to_device([mask, small], lambda tensors: Gradients(tensors))
    expected = mask.clone()
    mask.logical_not_()  # its own memory may be used again
    assert len(streams.pinned) == 1
    copies.close()
    found, _ = coming.tensors
    assert found is not None
    assert torch.equal(found.as_subclass(Tensor), expected)


def test_at_the_end_of_a_session_no_copy_is_left(
    streams: MadeUpStreams, copies: StreamedCopies[object]
) -> None:
    host, _ = host_tensor(copies, 7)
    coming = copies.to_device([host], lambda tensors: Activation(tensors[0]))
    leaving = copies.to_host([computed(streams, 3)])
    copies.close()
    assert coming.hidden.as_subclass(Tensor).eq(7).all()
    assert leaving.tensors[0].eq(3).all()
    copies.close()


def test_copies_of_a_device_without_streams_are_immediate() -> None:
    copies = device_for(torch.device("cpu")).copies()
    assert isinstance(copies, PlainCopies)
    hidden = torch.ones(2, requires_grad=True)
    copy = copies.to_host([hidden])
    assert copy.is_immediate
    assert copy.tensors[0].data_ptr() == hidden.data_ptr()
    content = copies.to_device([hidden], lambda tensors: Activation(*tensors))
    assert content.hidden is hidden
    assert content.land is already_here


class Refused(Tensor):
    """A tensor that torch cannot move to some device, as float64 on Apple's GPUs."""

    def to(self, device: torch.device) -> Tensor:  # type: ignore[override]
        raise TypeError("the framework doesn't support float64")


def test_a_tensor_that_a_device_cannot_hold_is_refused_with_its_dtype() -> None:
    copies = PlainCopies(torch.device("mps"))
    tensor = torch.ones(2, dtype=torch.float64).as_subclass(Refused)
    with pytest.raises(ModelError, match=r"'mps' cannot hold a tensor of torch\.float64\. Convert"):
        copies.to_device([tensor], lambda tensors: Activation(*tensors))


GPU = torch.device("cuda", 1)


class PlayedCuda:
    """The part of `torch.cuda` that copies use; it writes down its calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.names = iter(["leaving", "coming"])
        self.current = "compute"
        self.is_broken = False

    def Stream(self, device: torch.device) -> PlayedStream:
        assert device == GPU
        return PlayedStream(next(self.names), self)

    def current_stream(self, device: torch.device) -> PlayedStream:
        return PlayedStream(self.current, self)

    @contextmanager
    def stream(self, stream: PlayedStream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def Event(self, blocking: bool) -> PlayedEvent:
        assert blocking
        return PlayedEvent(self)


class PlayedStream:
    def __init__(self, name: str, cuda: PlayedCuda) -> None:
        self.name, self.cuda = name, cuda

    def wait_event(self, event: PlayedEvent) -> None:
        self.cuda.log.append(f"{self.name} waits for {event.name}")


class PlayedEvent:
    name = "nothing"

    def __init__(self, cuda: PlayedCuda) -> None:
        self.cuda = cuda

    def record(self, stream: PlayedStream) -> None:
        self.name = f"{stream.name}'s mark"
        self.cuda.log.append(f"{stream.name} is marked")

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        if self.cuda.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.cuda.log.append(f"the thread waits for {self.name}")


class Played(Tensor):
    """A tensor that says when it is copied to, or in which stream it is used."""

    cuda: PlayedCuda

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    def to(self, device: torch.device, non_blocking: bool) -> Tensor:  # type: ignore[override]
        assert (device, non_blocking) == (GPU, True)
        self.cuda.log.append(f"{self.cuda.current} copies in")
        return played(self.clone(), self.cuda)

    def detach(self) -> Tensor:  # type: ignore[override]
        self.cuda.log.append(f"{self.cuda.current} copies out")
        return self.as_subclass(Tensor)

    def record_stream(self, stream: Any) -> None:
        self.cuda.log.append(f"kept for {stream.name}")


def played(tensor: Tensor, cuda: PlayedCuda) -> Tensor:
    found = tensor.as_subclass(Played)
    found.cuda = cuda
    return found


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> PlayedCuda:
    found = PlayedCuda()
    for name in ("Stream", "current_stream", "stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))

    def pinned(streams: CudaStreams, num_bytes: int) -> Any:
        return numpy.zeros(num_bytes, numpy.uint8)

    monkeypatch.setattr(CudaStreams, "pinned_bytes", pinned)
    return found


def test_a_copy_to_the_host_waits_for_computing_and_the_sender_for_the_copy(
    cuda: PlayedCuda,
) -> None:
    copies = device_for(GPU).copies()
    assert isinstance(copies, StreamedCopies)
    copy = copies.to_host([played(torch.ones(3), cuda)])
    copy.wait()
    assert copy.tensors[0].eq(1).all()
    assert cuda.log == [
        "compute is marked",
        "leaving waits for compute's mark",
        "leaving copies out",
        "kept for leaving",
        "leaving is marked",
        "the thread waits for leaving's mark",
    ]


def test_computing_waits_for_arriving_tensors_and_no_thread_does(cuda: PlayedCuda) -> None:
    copies = device_for(GPU).copies()
    host = played(torch.ones(3), cuda)
    coming = copies.to_device([host], lambda tensors: Activation(tensors[0]))
    assert cuda.log == ["coming copies in", "coming is marked"]
    del cuda.log[:]
    coming.land()
    assert cuda.log[0] == "compute waits for coming's mark"
    assert set(cuda.log[1:]) == {"kept for compute"}


def test_a_device_that_fails_ends_the_channel_with_the_device_s_error(cuda: PlayedCuda) -> None:
    copy = device_for(GPU).copies().to_host([played(torch.ones(3), cuda)])
    cuda.is_broken = True
    with pytest.raises(ChannelError, match="illegal memory access"):
        copy.wait()
