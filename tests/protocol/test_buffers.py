"""Receive buffers: used again when nothing lives in them any more, and never before."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_hetero.protocol.buffers import MOST_KEPT, SMALLEST_KEPT_BYTES, BufferPool

NUM_BYTES = 2 * SMALLEST_KEPT_BYTES
MARK = b"mark"


def marked_tensor(pool: BufferPool, num_bytes: int = NUM_BYTES) -> Tensor:
    """A tensor in a buffer of the pool that can be told from a fresh one."""
    buffer = pool.take(num_bytes)
    buffer[:4] = MARK
    return torch.frombuffer(buffer, dtype=torch.float32)


def next_is_marked(pool: BufferPool, num_bytes: int = NUM_BYTES) -> bool:
    return pool.take(num_bytes)[:4] == MARK


def saved_by_autograd(tensor: Tensor) -> Tensor:
    """A loss whose graph has saved the tensor."""
    weight = torch.ones(len(tensor), requires_grad=True)
    return (tensor * weight).sum()


HOLDERS: dict[str, Callable[[Tensor], object]] = {
    "the tensor": lambda tensor: tensor,
    "a slice": lambda tensor: tensor[5:7],
    "a view": lambda tensor: tensor.view(2, -1).t(),
    "a view of another dtype": lambda tensor: tensor.view(torch.int32),
    "a view of no elements": lambda tensor: tensor[:0],
    "a detached alias": lambda tensor: tensor.detach(),
    "a parameter": nn.Parameter,
    "a numpy array": lambda tensor: tensor.numpy(),
    "a storage": lambda tensor: tensor.untyped_storage(),
    "a graph that saved it": saved_by_autograd,
    "a graph that saved a view of it": lambda tensor: saved_by_autograd(tensor[1:]),
}


def test_a_buffer_that_nothing_uses_is_handed_out_again() -> None:
    pool = BufferPool()
    tensor = marked_tensor(pool)
    del tensor
    assert next_is_marked(pool)


@pytest.mark.parametrize("holder", sorted(HOLDERS))
def test_a_buffer_is_used_again_only_when_nothing_lives_in_it(holder: str) -> None:
    pool = BufferPool()
    held = [HOLDERS[holder](marked_tensor(pool))]
    assert not next_is_marked(pool)
    held.clear()
    assert next_is_marked(pool)


def test_a_buffer_that_backward_has_used_is_free() -> None:
    pool = BufferPool()
    loss = saved_by_autograd(marked_tensor(pool))
    loss.backward()
    assert next_is_marked(pool)


def test_a_buffer_that_is_still_being_filled_is_not_handed_out() -> None:
    pool = BufferPool()
    rest = memoryview(pool.take(NUM_BYTES))[100:]
    assert rest.obj is not pool.take(NUM_BYTES)


def test_batches_of_slightly_different_length_share_a_buffer() -> None:
    pool = BufferPool()
    tensor = marked_tensor(pool, 1_000_000)
    del tensor
    assert next_is_marked(pool, 1_001_000)
    assert not next_is_marked(pool, 4_000_000)


@given(num_bytes=st.integers(0, 4 * 2**20))
def test_a_buffer_is_long_enough_and_a_long_one_wastes_at_most_an_eighth(num_bytes: int) -> None:
    length = len(BufferPool().take(num_bytes))
    assert length >= num_bytes
    if num_bytes >= 8 * SMALLEST_KEPT_BYTES:
        assert length <= num_bytes * 9 / 8 + 1
    assert length <= num_bytes + max(num_bytes / 8 + 1, SMALLEST_KEPT_BYTES)


def test_tensors_in_more_buffers_than_are_kept_stay_as_they_are() -> None:
    pool = BufferPool()
    tensors = []
    for number in range(2 * MOST_KEPT):
        tensors.append(torch.frombuffer(pool.take(SMALLEST_KEPT_BYTES), dtype=torch.int64))
        tensors[-1].fill_(number)
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))


def test_room_is_made_by_forgetting_a_buffer_that_nothing_uses() -> None:
    pool = BufferPool()
    used = [marked_tensor(pool) for _ in range(MOST_KEPT - 1)]
    pool.take(2 * NUM_BYTES)
    pool.take(4 * NUM_BYTES)
    used.clear()
    kept = [pool.take(NUM_BYTES) for _ in range(MOST_KEPT - 1)]
    assert all(buffer[:4] == MARK for buffer in kept)


def test_a_pool_keeps_a_bounded_number_of_buffers() -> None:
    tracemalloc.start()
    try:
        pool = BufferPool()
        tensors = [marked_tensor(pool, SMALLEST_KEPT_BYTES) for _ in range(2 * MOST_KEPT)]
        assert tracemalloc.get_traced_memory()[0] >= 2 * MOST_KEPT * SMALLEST_KEPT_BYTES
        tensors.clear()
        assert tracemalloc.get_traced_memory()[0] < (MOST_KEPT + 2) * SMALLEST_KEPT_BYTES
    finally:
        tracemalloc.stop()


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_no_two_holders_ever_share_a_buffer(moves: list[tuple[int, bool]]) -> None:
    pool = BufferPool()
    held: list[Tensor] = []
    for size, drops in moves:
        if drops and held:
            held.pop(size % len(held))
        else:
            buffer = pool.take((1 + size) * SMALLEST_KEPT_BYTES)
            held.append(torch.frombuffer(buffer, dtype=torch.uint8))
            del buffer
    assert len({tensor.data_ptr() for tensor in held}) == len(held)
