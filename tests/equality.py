"""Whether two runs ended with the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = 1e-5


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def differing(found: nn.Module, expected: nn.Module) -> list[str]:
    """The names of the tensors that differ in any bit."""
    tensors = found.state_dict()
    wanted = expected.state_dict()
    return [
        n for n, tensor in wanted.items() if not torch.equal(tensors[n].to(tensor.device), tensor)
    ]


def assert_close(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    floor: float = 0.0,
    tolerance: float = TOLERANCE,
) -> None:
    """Every tensor is within the tolerance, relative to its norm.

    A norm below ``floor`` times the largest one counts as that: some gradients, such as those of a
    key's bias, are zero except for rounding.
    """
    assert found.keys() == expected.keys()
    norms = {name: float(tensor.float().norm()) for name, tensor in expected.items()}
    least = floor * max(norms.values())
    for name, tensor in expected.items():
        error = float((found[name].to(tensor) - tensor).float().norm())
        assert error <= tolerance * max(norms[name], least), f"{name} is off by {error:.1e}"


def assert_same(found: Any, expected: Any, where: str = "", tolerance: float = TOLERANCE) -> None:
    """Equal structure; tensors and numbers equal within the tolerance, or in all bits for 0."""
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}", tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, item in enumerate(expected):
            assert_same(found[index], item, f"{where}[{index}]", tolerance)
    elif isinstance(expected, (torch.Tensor, float)):
        # Lightning takes a module off its device at the end, and a checkpoint has it on the device.
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance / 10, msg=where, check_device=False
        )
    else:
        assert found == expected, where
