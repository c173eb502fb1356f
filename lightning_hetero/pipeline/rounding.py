"""How far apart rounding may bring two results of the same computation: rules."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

# Products of half precision are added up in float32 too. The error of a sum of n terms grows as the
# root of n: N. Higham and T. Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM
# J. Sci. Comput. 41 (2019).
_ROUNDING_OF_SUMS = torch.finfo(torch.float32).eps
# By the same rule errors of layers in a row grow as the root of their number. This many times the
# expected error does not come by chance.
_SAFETY = 4.0


def rounding_of_hidden(dtype: torch.dtype, num_layers: int, widest_sum: int) -> float:
    """The largest error of hidden states, relative to their norm, that rounding explains.

    Args:
        dtype: The coarsest that the layers compute in.
        num_layers: How many layers follow each other.
        widest_sum: The terms of the longest sum in a product of matrices.
    """
    return _SAFETY * (_unit(dtype) + _of_sums(widest_sum)) * math.sqrt(num_layers)


def rounding_of_loss(dtype: torch.dtype, widest_sum: int) -> float:
    """The same of a loss. It is a mean over many numbers, whose errors cancel each other."""
    return _unit(dtype) + _SAFETY * _of_sums(widest_sum)


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The floating dtype with the largest rounding errors; float32 if there is none."""
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    return max(floating, key=_unit, default=torch.float32)


def norm_error(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to that of ``expected``. Equal infinite or undefined
    numbers count as no difference; others, and other shapes, are infinitely far apart."""
    if found.shape != expected.shape:
        return math.inf
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    is_equal = (found == expected) | (found.isnan() & expected.isnan())
    difference = (found - expected).masked_fill(is_equal, 0.0)
    scale = float(expected.nan_to_num(0.0, 0.0, 0.0).norm())
    size = float(difference.norm())
    if not math.isfinite(size):
        return math.inf
    return size / scale if scale else math.inf if size else 0.0


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _of_sums(widest_sum: int) -> float:
    return _ROUNDING_OF_SUMS * math.sqrt(widest_sum)
