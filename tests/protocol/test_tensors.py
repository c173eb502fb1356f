"""Tensors as bytes: every dtype and shape there and back, and no copy where none is needed."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_hetero.errors import RemoteProtocolError
from lightning_hetero.protocol.tensors import (
    ALIGNMENT_BYTES,
    DTYPES,
    TensorSpec,
    body_layout,
    dtype_name,
    tensor_bytes,
    tensor_from_bytes,
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


@pytest.mark.parametrize("name", ["complex64", "float8_e4m3fn", "qint8", "", "torch.float32"])
def test_an_unknown_dtype_is_refused_with_the_known_ones(name: str) -> None:
    spec = TensorSpec(name, [1])
    with pytest.raises(RemoteProtocolError, match=f"'{name}' cannot be sent.*float32.*bool"):
        body_layout([spec])


@pytest.mark.parametrize("shape", [[-1], [2, -3], [2**40 + 1], [2**70], [1.5], ["2"], [1] * 17, 3])
def test_a_shape_out_of_bounds_is_no_spec(shape: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"dtype": "float32", "shape": shape}, TensorSpec)
