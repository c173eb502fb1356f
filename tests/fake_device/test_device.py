"""The fake device itself: lazy copies, ordered kernels, memory that is watched, and generators."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ..models import tiny_llama
from . import faults, num_queued, reset, waits, waits_here
from .process import on_fake_device

FAKE = "fake:0"


def current() -> torch.Stream:
    return torch.accelerator.current_stream(FAKE)


def pinned(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).pin_memory()


def refuses(act: Callable[[], object], reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        act()


@on_fake_device
def test_a_copy_runs_when_a_wait_demands_it() -> None:
    host, target = pinned(1, 2), pinned(0, 0)
    there = host.to(FAKE, non_blocking=True)
    host.fill_(5)  # too early: nobody has waited
    doubled = there * 2
    target.copy_(doubled, non_blocking=True)
    assert target.tolist() == [0, 0]
    mark = current().record_event()
    assert not mark.query()
    mark.synchronize()
    assert mark.query()
    assert target.tolist() == [10, 10]
    # Pageable memory is read at once.
    plain = torch.ones(2)
    there = plain.to(FAKE, non_blocking=True)
    plain.fill_(5)
    assert there.tolist() == [1, 1]


@on_fake_device
def test_streams_that_share_memory_must_wait() -> None:
    side = torch.Stream(FAKE)
    made = torch.ones(3, device=FAKE)
    with side:
        refuses(lambda: made + 1, "nobody has waited")
        refuses(lambda: pinned(0, 0, 0).copy_(made, non_blocking=True), "nobody has waited")
    side.wait_stream(current())
    with side:
        other = made + 1
    refuses(lambda: made.add_(1), "nobody has waited")  # `side` may still read it
    refuses(other.sum, "nobody has waited")
    current().wait_stream(side)
    made.add_(other.sum())
    assert made.tolist() == [7, 7, 7]
    with side:
        late = torch.ones(3, device=FAKE)
    side.synchronize()  # a thread that has waited knows the work to be done
    assert (late + made).tolist() == [8, 8, 8]
    other.record_stream(current())


@on_fake_device
def test_memory_that_is_freed_too_early_is_a_fault() -> None:
    side = torch.Stream(FAKE)

    def used_there(is_recorded: bool) -> Tensor:
        made = torch.ones(3, device=FAKE)
        side.wait_stream(current())
        host = pinned(0, 0, 0)
        with side:
            host.copy_(made, non_blocking=True)
        if is_recorded:
            made.record_stream(side)
        return host

    kept = used_there(is_recorded=True)
    side.synchronize()
    assert kept.tolist() == [1, 1, 1]
    assert faults() == []
    lost = used_there(is_recorded=False)
    side.synchronize()
    assert lost.isnan().all()
    assert len(faults()) == 1
    refuses(lambda: torch.ones(1, device=FAKE), "without `record_stream`")
    # torch knows of a copy from its own pinned tensors, but not from views by other libraries.
    reset()
    there = pinned(1, 2).to(FAKE, non_blocking=True)
    assert there.tolist() == [1, 2]
    viewed = torch.from_numpy(pinned(1, 2).numpy())
    there = viewed.to(FAKE, non_blocking=True)
    del viewed
    assert faults() == ["pinned memory was freed while a copy uses it."]
    reset()
    assert there.isnan().all()


@on_fake_device
def test_each_device_has_a_generator_and_draws_what_the_processor_draws() -> None:
    for draw in (
        lambda device: torch.randn(4, device=device),
        lambda device: functional.dropout(torch.ones(8, device=device)),
    ):
        torch.manual_seed(3)
        expected = draw("cpu")
        before = torch.get_rng_state()
        found = [draw(f"fake:{index}").cpu() for index in (0, 1)]
        assert all(torch.equal(each, expected) for each in found)
        assert torch.equal(torch.get_rng_state(), before)
        assert not torch.equal(draw("fake:1").cpu(), expected)
    own = torch.Generator(FAKE).manual_seed(3)
    assert (
        torch.rand(2, device=FAKE, generator=own).tolist()
        == torch.rand(2, generator=torch.Generator().manual_seed(3)).tolist()
    )


@on_fake_device
def test_threads_have_their_own_device_and_stream_and_their_waits_are_counted() -> None:
    torch.accelerator.set_device_index(1)
    torch.accelerator.set_stream(torch.Stream("fake:1"))
    found: list[object] = []

    def look() -> None:
        found.extend([torch.ones(1, device="fake").device, torch.accelerator.current_stream()])
        torch.accelerator.synchronize()
        found.append(waits()["looking"])

    thread = threading.Thread(target=look, name="looking")
    thread.start()
    thread.join()
    assert found[:2] == [torch.device(FAKE), current()]
    assert found[2] == waits_here() + 1
    before = waits_here()
    made = torch.ones(3, device="fake")
    assert made.device.index == 1
    (made + made).to("cpu")
    assert waits_here() == before + 1
    refuses(lambda: made + torch.ones(3, device="fake:0"), "on the same device")
    refuses(lambda: made + torch.ones(3), "on the same device")
    assert (made + torch.ones(())).sum().item() == 6


@on_fake_device
def test_a_model_trains_as_on_the_processor() -> None:
    ids = torch.arange(20).view(2, 10)
    here, there = (
        tiny_llama(2, attention_dropout=0.2),
        tiny_llama(2, attention_dropout=0.2).to(FAKE),
    )
    for model in (here, there):
        optimizer = torch.optim.AdamW(model.parameters(), fused=model is there)
        for step in range(2):
            torch.manual_seed(step)
            where = ids.to(model.device)
            model(input_ids=where, labels=where).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(theirs.cpu(), mine)
    assert torch.accelerator.memory_allocated(FAKE) > 0
    free_bytes, total_bytes = torch.accelerator.get_memory_info(FAKE)
    assert free_bytes < total_bytes
    torch.accelerator.synchronize(FAKE)
    assert num_queued() == 0
    with pytest.raises(torch.OutOfMemoryError, match="fake out of memory"):
        torch.empty(2**40, device=FAKE)
