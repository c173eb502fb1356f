"""What is asked of a CUDA device, and in which order. Its library is played, call by call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from lightning_hetero.errors import ChannelError
from lightning_hetero.pipeline.activation import Activation
from lightning_hetero.pipeline.copies import StreamedCopies, copies_for
from lightning_hetero.pipeline.streams import CudaStreams

GPU = torch.device("cuda", 1)


class PlayedCuda:
    """The part of `torch.cuda` that copies use; it writes down what it is asked for."""

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

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        assert device == GPU
        yield

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
    for name in ("Stream", "current_stream", "stream", "device", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))

    def pinned(streams: CudaStreams, num_bytes: int) -> Any:
        return numpy.zeros(num_bytes, numpy.uint8)

    monkeypatch.setattr(CudaStreams, "pinned_bytes", pinned)
    return found


def test_what_leaves_waits_for_what_was_computed_and_the_sender_for_the_copy(
    cuda: PlayedCuda,
) -> None:
    copies = copies_for(GPU)
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


def test_computing_waits_for_what_comes_and_no_thread_does(cuda: PlayedCuda) -> None:
    copies = copies_for(GPU)
    host = played(torch.ones(3), cuda)
    coming = copies.to_device([host], lambda tensors: Activation(tensors[0]))
    assert cuda.log == ["coming copies in", "coming is marked"]
    del cuda.log[:]
    coming.land()
    assert cuda.log[0] == "compute waits for coming's mark"
    assert set(cuda.log[1:]) == {"kept for compute"}


def test_a_device_that_fails_ends_the_channel_with_its_word(cuda: PlayedCuda) -> None:
    copy = copies_for(GPU).to_host([played(torch.ones(3), cuda)])
    cuda.is_broken = True
    with pytest.raises(ChannelError, match="illegal memory access"):
        copy.wait()
