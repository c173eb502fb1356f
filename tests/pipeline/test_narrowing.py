"""What crosses a boundary in fewer bits arrives within stated bounds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_hetero.pipeline.narrowing import narrow, widen
from lightning_hetero.plan import INT8_BLOCK

finite = st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    rows, length = draw(st.integers(0, 3)), draw(st.integers(1, 2 * INT8_BLOCK + 3))
    values = draw(st.lists(finite, min_size=rows * length, max_size=rows * length))
    return torch.tensor(values).reshape(rows, length)


@given(tensors())
def test_int8_is_off_by_half_a_step_of_its_block(tensor: Tensor) -> None:
    found = widen(narrow(tensor, "int8"), tensor.dtype)
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    for block, original in zip(
        found.split(INT8_BLOCK, -1), tensor.split(INT8_BLOCK, -1), strict=True
    ):
        greatest = original.abs().amax(-1, keepdim=True).double()
        error = (block.double() - original.double()).abs()
        assert bool((error <= greatest / 127 / 2 * (1 + 1e-5)).all())


@pytest.mark.parametrize(("wire_dtype", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_floats_are_rounded_to_their_mantissa(wire_dtype: str, bits: int) -> None:
    tensor = torch.randn(3, 100)
    found = widen(narrow(tensor, wire_dtype), torch.float32)  # type: ignore[arg-type]
    assert bool(((found - tensor).abs() <= tensor.abs() * 2.0**-bits).all())
    assert not torch.equal(found, tensor)


@pytest.mark.parametrize(
    ("dtype", "wire_dtype"),
    [
        (torch.float32, None),
        (torch.float32, "float32"),
        (torch.bfloat16, "float32"),
        (torch.bfloat16, "bfloat16"),
        (torch.bfloat16, "float16"),
        (torch.int64, "int8"),
        (torch.bool, "bfloat16"),
    ],
)
def test_nothing_is_changed_that_would_not_become_narrower(
    dtype: torch.dtype, wire_dtype: str | None
) -> None:
    tensor = torch.ones(4, 4, dtype=dtype)
    [sent] = narrow(tensor, wire_dtype)  # type: ignore[arg-type]
    assert sent.dtype == dtype
    assert torch.equal(sent, tensor)


def test_int8_takes_a_quarter_and_its_scales() -> None:
    tensor = torch.randn(8, 512)
    sent = sum(part.nbytes for part in narrow(tensor, "int8"))
    assert sent == tensor.nbytes // 4 + tensor.nbytes // INT8_BLOCK


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wire_dtype", ["int8", "bfloat16", "float16"])
def test_what_is_not_finite_does_not_arrive_as_something_finite(
    value: float, wire_dtype: str
) -> None:
    tensor = torch.ones(2, INT8_BLOCK)
    tensor[0, 3] = value
    found = widen(narrow(tensor, wire_dtype), torch.float32)  # type: ignore[arg-type]
    assert not bool(found[0, 3].isfinite())
    assert torch.equal(found[1], tensor[1])


def test_zeros_stay_zeros() -> None:
    assert torch.equal(widen(narrow(torch.zeros(2, 70), "int8"), torch.float32), torch.zeros(2, 70))


def test_parts_that_do_not_belong_together_are_refused() -> None:
    steps, scales = narrow(torch.ones(2, 70), "int8")
    with pytest.raises(ValueError, match="scales"):
        widen([steps, scales[:, :1]], torch.float32)
    with pytest.raises(ValueError, match="float32"):
        widen([steps.float(), scales], torch.float32)
