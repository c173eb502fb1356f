"""What a tensor in 4 bits is made of: its description, its packed bytes and their state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import ModelError
from ..optional import bitsandbytes

# The pieces of a state by the names that they have in a checkpoint, behind the tensor's own.
State = dict[str, Tensor]

# Those that the library's kernels know.
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class FourBit:
    """How one tensor is stored in 4 bits, as plain data.

    Args:
        shape: What it stands for; ``[out_features, in_features]`` for a linear layer.
        quant_type: The code book.
        compress_statistics: Whether the blocks' scales are quantised themselves.
        storage: dtype of the packed bytes.
        compute_dtype: dtype in which a linear layer multiplies; None is decided by its first input.
        has_bias: Whether the linear layer has a bias.
    """

    shape: list[int]
    quant_type: Literal["nf4", "fp4"]
    compress_statistics: bool
    storage: Literal["uint8", "float32", "bfloat16", "float16"] = "uint8"
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    has_bias: bool = False

    @property
    def packed_shape(self) -> list[int]:
        """Shape of the packed bytes, two numbers to a byte."""
        num_bytes = (torch.Size(self.shape).numel() + 1) // 2
        return [num_bytes // getattr(torch, self.storage).itemsize, 1]

    @property
    def stored_bytes(self) -> int:
        """Bytes of the packed numbers and of the state beside them, in blocks of 64 and, where the
        scales are quantised themselves, of 256."""
        num_elements = torch.Size(self.shape).numel()
        num_scales = -(-num_elements // 64)
        state_bytes = 16 * 4 + num_scales * (1 if self.compress_statistics else 4)
        if self.compress_statistics:
            state_bytes += 256 * 4 + -(-num_scales // 256) * 4 + 4
        return (num_elements + 1) // 2 + state_bytes


def read_state(state: State, packed: Tensor, described: FourBit) -> Any:
    """The library's own form of a state; None for none.

    Raises:
        ModelError: If it does not fit; the library's kernels would read beyond its end.
    """
    if not state:
        return None
    try:
        # A copy, since reading takes entries out.
        read = bitsandbytes().functional.QuantState.from_dict(dict(state), device=packed.device)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"The state of a tensor in 4 bits cannot be read: {type(error).__name__}: {error}."
        ) from error
    _check_state(read, packed, described)
    return read


def _check_state(state: Any, packed: Tensor, described: FourBit) -> None:
    """Refuse a state of other lengths than its tensor needs."""
    found, wanted = _lengths(state), _lengths_wanted(state, described)
    found["packed bytes"] = [str(packed.dtype), list(packed.shape)]
    wanted["packed bytes"] = [f"torch.{described.storage}", described.packed_shape]
    for what, value in wanted.items():
        if found.get(what) != value:
            raise ModelError(
                f"The state of a tensor in 4 bits does not fit {described.shape}: its {what} "
                f"should be {value} and is {found.get(what)}."
            )


def _lengths(state: Any) -> dict[str, Any]:
    found = {
        "shape": list(state.shape or ()),
        "code": state.quant_type,
        "dtype is floating": getattr(state.dtype, "is_floating_point", None),
        "code book": _form(state.code),
        "scales": _form(state.absmax),
    }
    if state.nested:
        found["scales' code book"] = _form(state.state2.code)
        found["scales' scales"] = _form(state.state2.absmax)
    return found


def _lengths_wanted(state: Any, described: FourBit) -> dict[str, Any]:
    num_scales = _num_blocks(torch.Size(described.shape).numel(), state.blocksize)
    wanted = {
        "shape": described.shape,
        "code": described.quant_type,
        "dtype is floating": True,
        "code book": ("torch.float32", 16),
        "scales": ("torch.uint8" if state.nested else "torch.float32", num_scales),
    }
    if state.nested:
        num_outer = _num_blocks(num_scales, state.state2.blocksize)
        wanted["scales' code book"] = ("torch.float32", 256)
        wanted["scales' scales"] = ("torch.float32", num_outer)
    return wanted


def _num_blocks(num_elements: int, block_size: Any) -> int:
    if block_size not in _BLOCK_SIZES:
        raise ModelError(
            f"A tensor in 4 bits has blocks of {block_size!r}; they must be one of {_BLOCK_SIZES}."
        )
    return -(-num_elements // int(block_size))


def _form(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.dtype), tensor.numel()
