"""Tensors as bytes: every dtype and shape there and back, and no copy where none is needed.

Receive buffers: used again when nothing lives in them any more, and never before.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_hetero.errors import LocalProtocolError, RemoteProtocolError
from lightning_hetero.model.tensors import Content
from lightning_hetero.protocol.tensor_bytes import (
    ALIGNMENT_BYTES,
    DTYPES,
    MOST_KEPT,
    SMALLEST_KEPT_BYTES,
    BufferPool,
    TensorSpec,
    body_layout,
    dtype_name,
    fingerprint_of,
    in_eighths,
    in_frames,
    sums_of_bits,
    tensor_bytes,
    tensor_from_bytes,
    to_power_of_two,
)

from .strategies import any_tensor, is_same, shapes

specs = st.builds(TensorSpec, dtype=st.sampled_from(sorted(DTYPES)), shape=shapes)


@given(tensor=any_tensor(), offset=st.sampled_from([0, 64, 128]))
def test_any_tensor_survives_its_bytes(tensor: Tensor, offset: int) -> None:
    spec = TensorSpec.of(tensor)
    content = tensor_bytes(tensor)
    assert content.nbytes == len(content) == spec.num_bytes
    body = bytearray(b"\xaa" * (offset + spec.num_bytes + 3))
    body[offset : offset + spec.num_bytes] = content
    assert is_same(tensor_from_bytes(spec, body, offset), tensor)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_has_the_name_that_torch_prints(name: str) -> None:
    assert DTYPES[name] == getattr(torch, name)
    assert dtype_name(getattr(torch, name)) == name
    in_full = 6 * getattr(torch, name).itemsize
    assert TensorSpec(name, [2, 3]).num_bytes == (1 if name == "bool" else in_full)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(8.0)[::8],
        torch.arange(8.0)[3:3:2],
        torch.arange(8.0).view(2, 4)[:1, 1::4],
        torch.zeros(1).expand(1, 1),
        torch.arange(12.0).view(3, 4)[:, 2:3][1:2],
    ],
)
def test_a_tensor_of_one_or_no_element_may_have_any_stride(tensor: Tensor) -> None:
    content = tensor_bytes(tensor)
    assert is_same(tensor_from_bytes(TensorSpec.of(tensor), bytearray(content), 0), tensor)


def test_a_sparse_tensor_is_refused_with_what_to_do() -> None:
    with pytest.raises(LocalProtocolError, match=r"layout torch\.sparse_coo .* `sparse=False`"):
        TensorSpec.of(torch.eye(3).to_sparse())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_what_is_conjugate_or_negative_only_when_read_is_sent_as_it_reads(dtype: Any) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j, 0j], dtype=dtype)
    for lazy in (tensor.conj(), tensor.conj().imag, tensor.view(3, 1).mH):
        found = tensor_from_bytes(TensorSpec.of(lazy), bytearray(tensor_bytes(lazy)), 0)
        assert torch.equal(found, lazy)
        assert sums_of_bits([lazy]) == sums_of_bits([found])


def test_a_contiguous_cpu_tensor_is_sent_from_its_own_memory() -> None:
    tensor = torch.nn.Parameter(torch.zeros(4))
    content = tensor_bytes(tensor)
    tensor.data.fill_(1)
    assert bytes(content) == bytes(tensor_bytes(torch.ones(4)))


def test_a_received_tensor_lives_in_its_body_and_keeps_it_alive() -> None:
    body = bytearray(64 + 16)
    tensor = tensor_from_bytes(TensorSpec("int32", [2, 2]), body, 64)
    body[64] = 7
    del body
    assert tensor.tolist() == [[7, 0], [0, 0]]


@given(st.lists(specs, max_size=6))
def test_tensors_lie_in_order_aligned_and_apart(several: list[TensorSpec]) -> None:
    offsets, length = body_layout(several)
    end = 0
    for spec, offset in zip(several, offsets, strict=True):
        assert offset % ALIGNMENT_BYTES == 0
        assert end <= offset < end + ALIGNMENT_BYTES
        end = offset + spec.num_bytes
    assert length == end


def test_a_spec_prints_as_a_person_writes_it() -> None:
    assert str(TensorSpec.of(torch.zeros(2, 0, dtype=torch.bfloat16))) == "bfloat16[2, 0]"


@pytest.mark.parametrize("name", ["complex32", "float8_e8m0fnu", "qint8", "", "torch.float32"])
def test_an_unknown_dtype_is_refused_with_the_known_ones(name: str) -> None:
    spec = TensorSpec(name, [1])
    with pytest.raises(RemoteProtocolError, match=f"'{name}' cannot be sent.*float32.*bool"):
        body_layout([spec])


@pytest.mark.parametrize("shape", [[-1], [2, -3], [2**40 + 1], [2**70], [1.5], ["2"], [1] * 17, 3])
def test_a_shape_out_of_bounds_is_refused(shape: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"dtype": "float32", "shape": shape}, TensorSpec)


NUM_BYTES = 2 * SMALLEST_KEPT_BYTES
MARK = b"mark"


def marked_tensor(pool: BufferPool, num_bytes: int = NUM_BYTES) -> Tensor:
    """A tensor in a buffer of the pool; its mark distinguishes the buffer from a new one."""
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


@given(num_bytes=st.integers(1, 2**40))
def test_rounding_before_torch_rounds_pinned_memory_takes_no_more_of_it(num_bytes: int) -> None:
    size = to_power_of_two(num_bytes)
    assert num_bytes <= size < 2 * num_bytes
    assert size.bit_count() == 1
    assert to_power_of_two(in_eighths(max(num_bytes, SMALLEST_KEPT_BYTES))) == max(
        size, SMALLEST_KEPT_BYTES
    )


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int8])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (4, 4), (0, 2)])
def test_the_sum_of_bits_changes_with_each_element(shape: tuple[int, ...], dtype: Any) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    (before,) = sums_of_bits([tensor])
    for index in range(tensor.numel()):
        changed = tensor.clone()
        changed.view(-1)[index] = 1
        assert sums_of_bits([changed, tensor]) == [sums_of_bits([changed])[0], before]
        assert sums_of_bits([changed]) != [before]


def test_the_sum_of_bits_is_that_of_the_content_wherever_it_lies() -> None:
    table = torch.arange(24, dtype=torch.float32).view(4, 6)
    for view in (table[1:, 1:], table[1], table[1, 1:], table.t()):
        assert sums_of_bits([view]) == sums_of_bits([view.clone().contiguous()])
    assert sums_of_bits([]) == []


def test_named_tensors_are_grouped_into_frames() -> None:
    large = torch.empty(2**23)  # as much as one frame takes
    found = [*in_frames({"a": large, "b": large[:2], "c": large[:2]}.items())]
    assert [([*group], is_last) for group, is_last in found] == [(["a"], False), (["b", "c"], True)]
    assert [*in_frames([])] == [({}, True)]


@pytest.mark.parametrize(
    "other",
    [
        Content(torch.ones(2, 3), {}),
        Content(torch.ones(6, dtype=torch.int32).view(torch.float32), {}),
        Content(torch.ones(6), {"absmax": torch.ones(1)}),
        Content(torch.tensor([1.0, 1, 1, 1, 1, -1]), {}),
    ],
    ids=["shape", "bytes", "state", "one value"],
)
def test_fingerprints_differ(other: Content) -> None:
    content = Content(torch.ones(6), {})
    assert fingerprint_of(content.parts) == fingerprint_of({"": torch.ones(12)[::2]})
    assert fingerprint_of(content.parts) != fingerprint_of(other.parts)
