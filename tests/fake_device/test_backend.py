"""A kind of device without a class of its own: its memory, times, generators and threads."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_hetero.coordinator.dry_run import no_trace
from lightning_hetero.devices.copies import PlainCopies
from lightning_hetero.devices.description import equipment_here
from lightning_hetero.devices.device import Accelerator, check_has_backend, device_for, streams_work
from lightning_hetero.devices.streams import EventMoment
from lightning_hetero.errors import ModelError
from lightning_hetero.pipeline.boundary import Activation, Gradients, Surroundings
from lightning_hetero.pipeline.handover import (
    Exchange,
    Request,
    Returned,
    cut_request,
    exchange_whole,
    surroundings_here,
)
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.pipeline.turns import Finished, HandedOver, Turn, TurnThreads, current_turn

from . import faults, waits_here
from .process import on_fake_device

DEVICE_BYTES = 2**30


@on_fake_device
def test_memory_and_times_are_those_of_the_device() -> None:
    fake = torch.device("fake", 1)
    device = device_for(fake)
    assert isinstance(device, Accelerator)
    check_has_backend(fake)
    with device.metering() as meter:
        kept = torch.ones(1000, device=fake) * 2
        assert meter.taken_bytes() == kept.nbytes
        assert meter.peak_bytes() == 2 * kept.nbytes
    assert device.total_bytes() == equipment_here(fake).memory_bytes == DEVICE_BYTES
    assert device.free_and_base_bytes() == (DEVICE_BYTES, 0)
    assert device.health() == {
        "memory_bytes": float(kept.nbytes),
        "memory_peak_bytes": float(device.peak_bytes()),
    }
    device.moment()  # the first one tries what events can do
    before = waits_here()
    start, end = device.moment(), device.moment()
    assert isinstance(end, EventMoment)
    assert waits_here() == before
    assert end.seconds_after(start) >= 0


@on_fake_device
def test_what_a_backend_cannot_do_is_asked_once_and_replaced_or_refused() -> None:
    fake = torch.device("fake", 0)
    asked: list[int] = []

    def refuse(device: object = None) -> torch.Stream:
        asked.append(1)
        raise RuntimeError("Backend doesn't support streams.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_stream", refuse)
        assert isinstance(device_for(fake).copies(), PlainCopies)
        start = device_for(fake).moment()
        assert device_for(fake).moment().seconds_after(start) >= 0
        assert asked == [1]
    streams_work.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr("torch.fake.manual_seed_all")
        with pytest.raises(ModelError, match=r"torch\.fake has no manual_seed_all"):
            check_has_backend(fake)


class DoublingStages:
    """Stages that double what comes, forward and backward; it notes the threads that wait."""

    def __init__(self) -> None:
        self.waited: list[threading.Thread] = []
        self._coming: deque[Returned] = deque()

    def begin_step(
        self, max_in_flight: int, accumulate: bool, dropout_step: int | None = None
    ) -> None: ...

    def abort_step(self) -> None: ...

    def reduce(self) -> None: ...

    def send_forward(
        self, key: Key, hidden: Tensor, surroundings: Surroundings, is_whole: bool = False
    ) -> None:
        self._coming.append(Returned(key, Activation(hidden.detach() * 2)))

    def send_backward(
        self, key: Key, gradients: Gradients, unsent: Collection[int] | None = None
    ) -> None:
        (gradient,) = gradients.tensors
        assert gradient is not None
        self._coming.append(Returned(key, Gradients((gradient * 2,))))

    def receive(self) -> Returned:
        self.waited.append(threading.current_thread())
        return self._coming.popleft()

    def take_arrived(self) -> list[Returned]:
        return []


@on_fake_device
def test_a_whole_batch_waits_for_its_stages_in_the_caller_s_thread() -> None:
    """Autograd's thread of a device could not be interrupted."""
    device = torch.device("fake", 0)
    stages = DoublingStages()
    hidden = torch.ones(4, 3, 4, device=device, requires_grad=True)
    pieces = cut_request(Request(hidden, surroundings_here(hidden, [])), 2)
    seen: list[threading.Thread] = []
    # The user trains in a stream of their own, and calls `backward` outside of it.
    side = torch.Stream(device)
    side.wait_stream(torch.accelerator.current_stream(device))
    with side:
        output = exchange_whole(hidden, Exchange(stages, 0, 2), pieces).hidden
        output.register_hook(lambda gradient: seen.append(threading.current_thread()))
        loss = output.square().sum()
    torch.accelerator.current_stream(device).wait_stream(side)
    loss.backward()
    assert set(stages.waited) == {threading.main_thread()}
    assert seen != [threading.main_thread()]
    assert hidden.grad is not None
    assert hidden.grad.eq(8).all()


@on_fake_device
def test_user_code_of_a_turn_may_compute_in_streams_of_its_own() -> None:
    device = torch.device("fake", 1)
    torch.accelerator.set_device_index(1)
    torch.accelerator.set_stream(torch.Stream(device))

    def training_step() -> list[float]:
        turn, side = current_turn(), torch.Stream(device)
        assert turn is not None
        with side:
            hidden = torch.ones(3, device="fake")
            answer = turn.hand_over(hidden)
            return (answer + hidden).tolist()  # type: ignore[no-any-return]

    threads = TurnThreads()
    turn = Turn(training_step, "step", threads)
    handed = turn.start()
    assert isinstance(handed, HandedOver)
    assert turn.resume(handed.request * 2) == Finished([3.0, 3.0, 3.0])
    del handed
    threads.close()


class Scaled(pl.LightningModule):
    """Has a scale that goes to a worker besides the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4, device="fake:0"))


@on_fake_device
def test_a_stream_that_uses_a_parameter_does_not_change_it() -> None:
    """torch declares it as a change. A first batch that was checked warned of it."""
    module = Scaled()
    module.trainer = pl.Trainer(logger=False, enable_checkpointing=False)
    with no_trace(module, [], is_timed=False) as runs, torch.no_grad():
        module.scale.record_stream(torch.Stream("fake:0"))
        assert not runs.has_changed(module.scale)
        module.scale.add_(1)
        assert runs.has_changed(module.scale)
    assert module.scale.eq(1).all()


@on_fake_device
def test_copies_are_right_where_the_system_pins_no_more_memory() -> None:
    """WSL 2 pins little."""
    copies = device_for(torch.device("fake")).copies()
    empty = torch.empty

    def refusing(*size: int, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            raise torch.OutOfMemoryError("CUDA error: out of memory")
        return empty(*size, **options)

    pool = copies.receive_pool()
    with pytest.MonkeyPatch.context() as patch, warned("lightning_hetero.devices") as said:
        patch.setattr(torch, "empty", refusing)
        for value in range(3):
            host = torch.frombuffer(pool.take(4 * 2**16), dtype=torch.float32).fill_(value)
            come = copies.to_device([host], lambda tensors: Activation(tensors[0]))
            host.fill_(-1)  # the copy has read it
            come.land()
            left = copies.to_host([come.hidden * 2])
            left.wait()
            assert left.tensors[0].eq(2 * value).all()
    copies.close()
    assert faults() == []
    assert any("does not pin 0.2 MiB of memory for fake" in line for line in said)


@contextmanager
def warned(name: str) -> Iterator[list[str]]:
    """Inside, the messages of a logger go into a list."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
