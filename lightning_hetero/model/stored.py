"""Weights stored in another way than as plain tensors: the seam of formats such as 4 bits.

A format is a module with the functions of `WeightFormat`. The core calls them through this module.
Without a format in the package, all weights are plain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..optional import has_wing

# The parts of a stored weight beside its tensor; in a checkpoint their names follow its own.
State = dict[str, Tensor]

_FORMATS = ("four_bit",)


@dataclass(frozen=True)
class FourBit:
    """How one tensor is stored in 4 bits, as plain data.

    Args:
        shape: The shape of the unpacked tensor; ``[out_features, in_features]`` in a linear layer.
        quant_type: The code book.
        compress_statistics: Whether the scales of the blocks are quantised too.
        storage: The dtype of the packed bytes.
        compute_dtype: The dtype of a linear layer's products; None for the dtype of its first
            input.
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
        """Shape of the packed bytes, two values to a byte."""
        num_bytes = (torch.Size(self.shape).numel() + 1) // 2
        return [num_bytes // getattr(torch, self.storage).itemsize, 1]

    @property
    def stored_bytes(self) -> int:
        """Bytes of the packed values and of the state, with a scale for each 64 values.

        Quantised scales have a scale for each 256 of them.
        """
        num_elements = torch.Size(self.shape).numel()
        num_scales = -(-num_elements // 64)
        state_bytes = 16 * 4 + num_scales * (1 if self.compress_statistics else 4)
        if self.compress_statistics:
            state_bytes += 256 * 4 + -(-num_scales // 256) * 4 + 4
        return (num_elements + 1) // 2 + state_bytes


class WeightFormat(Protocol):
    """The functions of a format. An owner and a leaf are a module and its parameter's name."""

    def is_stored(self, owner: nn.Module, leaf: str) -> bool:
        """Whether the parameter is stored in this format."""

    def state_of(self, owner: nn.Module, leaf: str) -> State:
        """The state of a stored parameter; empty without content."""

    def read_state(self, state: State, packed: Tensor, described: FourBit) -> Any:
        """The library's form of a state; a `ModelError` if it does not fit."""

    def with_state(self, owner: nn.Module, leaf: str, packed: Tensor, state: State) -> nn.Parameter:
        """A parameter with this content for the place of a stored one."""

    def state_tensors(self, owner: nn.Module, leaf: str) -> list[Tensor]:
        """The tensors of a stored parameter's state, in an order of the format's own."""

    def set_state_tensors(self, owner: nn.Module, leaf: str, tensors: Sequence[Tensor]) -> None:
        """Put other tensors into the places of `state_tensors`."""

    def pack(self, owner: nn.Module, leaf: str, content: Tensor) -> tuple[Tensor, State]:
        """Pack a plain tensor for the place of a stored parameter."""

    def describe(self, owner: nn.Module, leaf: str) -> FourBit:
        """How the parameter is stored."""

    def describe_all(self, module: nn.Module) -> dict[str, FourBit]:
        """Every stored tensor inside a module, by path; a `ModelError` if one cannot travel."""

    def apply_all(self, model: nn.Module, described: Mapping[str, FourBit]) -> None:
        """Store tensors of a model on ``meta`` as described, without content."""

    def described_linear(self, module: nn.Module, name: str) -> FourBit | None:
        """How a linear layer is stored; None for any other module."""

    def empty_linear(self, four_bit: FourBit, name: str) -> nn.Module:
        """A stored linear layer without content."""

    def pack_linears(self, model: nn.Module) -> None:
        """Give the weights of stored linear layers on ``meta`` their packed shape."""

    def is_cache_hook(self, hook: object) -> bool:
        """Whether the library put this hook on a module."""

    def multiply_in(self, root: nn.Module, dtype: torch.dtype) -> None:
        """Let stored linear layers multiply in a dtype."""

    def keep_layout(self, root: nn.Module) -> None:
        """Keep the library from repacking weights in place."""

    def accepting_states(self, root: nn.Module) -> AbstractContextManager[None]:
        """Let ``load_state_dict`` read states within the block."""

    def unpacked_on_meta(self, model: nn.Module) -> AbstractContextManager[None]:
        """Give stored linear layers on ``meta`` their unpacked shape within the block."""

    def shapes_only(self, layer: nn.Module) -> AbstractContextManager[None]:
        """Let stored linear layers on ``meta`` return the right shapes within the block."""


@cache
def formats() -> tuple[WeightFormat, ...]:
    """The formats in the package."""
    there = [name for name in _FORMATS if has_wing(f"model.{name}")]
    return tuple(cast(WeightFormat, import_module(f".{name}", __package__)) for name in there)


def format_of(owner: nn.Module, leaf: str) -> WeightFormat | None:
    """The format of a module's own parameter; None for a plain one."""
    return next((each for each in formats() if each.is_stored(owner, leaf)), None)


def state_of(owner: nn.Module, leaf: str) -> State:
    """The state of a stored parameter; empty for a plain one, and without content."""
    found = format_of(owner, leaf)
    return {} if found is None else found.state_of(owner, leaf)


def describe_stored(module: nn.Module) -> dict[str, FourBit]:
    """Every stored tensor inside a module, by path.

    Raises:
        ModelError: If one is stored in a way that cannot travel.
    """
    return {path: form for each in formats() for path, form in each.describe_all(module).items()}


def format_here() -> WeightFormat:
    """The format of 4 bits.

    Raises:
        ModelError: If this package lacks it.
    """
    if not formats():
        raise ModelError(
            "The model has weights in 4 bits, and this package has no format for them; install "
            "the whole package on this machine."
        )
    return formats()[0]


def shapes_only(layer: nn.Module) -> AbstractContextManager[None]:
    """Let stored linear layers on ``meta`` return tensors of the right shape within the block."""
    return _within(each.shapes_only(layer) for each in formats())


def unpacked_on_meta(model: nn.Module) -> AbstractContextManager[None]:
    """Give stored linear layers on ``meta`` their unpacked shape within the block.

    Some adapters read the shape of a weight when they are created.
    """
    return _within(each.unpacked_on_meta(model) for each in formats())


def accepting_states(root: nn.Module) -> AbstractContextManager[None]:
    """Let ``load_state_dict`` read the states of stored tensors within the block."""
    return _within(each.accepting_states(root) for each in formats())


@contextmanager
def _within(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


def multiply_in(root: nn.Module, dtype: torch.dtype) -> None:
    """Let stored linear layers multiply in a dtype of the stage's choice."""
    for each in formats():
        each.multiply_in(root, dtype)


def keep_layout(root: nn.Module) -> None:
    """Keep libraries from repacking stored weights in place."""
    for each in formats():
        each.keep_layout(root)


def is_cache_hook(hook: object) -> bool:
    """Whether the library of a format put this hook on a module."""
    return any(each.is_cache_hook(hook) for each in formats())
