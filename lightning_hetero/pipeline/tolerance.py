"""Tolerances: how far apart two results of one computation are, and how much rounding explains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The errors of consecutive layers grow as the root of their number, like the errors of a sum. An
# error of so many times the expected one does not come by chance.
_SAFETY = 4.0


def rounding_of_hidden(dtype: torch.dtype, num_layers: int, widest_sum: int) -> float:
    """The largest error of hidden states, relative to their norm, that rounding explains.

    Args:
        dtype: The coarsest dtype that the layers compute in.
        num_layers: How many layers follow each other.
        widest_sum: The terms of the longest sum in a product of matrices.
    """
    return _SAFETY * (_unit(dtype) + _of_sums(widest_sum)) * math.sqrt(num_layers)


def rounding_of_loss(dtype: torch.dtype, widest_sum: int) -> float:
    """The largest relative error of a loss that rounding explains.

    A loss is a mean over many numbers, whose errors cancel each other.
    """
    return _unit(dtype) + _SAFETY * _of_sums(widest_sum)


def norm_error(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to the norm of ``expected``.

    Infinite or undefined numbers on both sides count as equal. On one side only, or with different
    shapes, the error is infinite.
    """
    if found.shape != expected.shape:
        return math.inf
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    is_equal = (found == expected) | (found.isnan() & expected.isnan())
    difference = (found - expected).masked_fill(is_equal, 0.0)
    return _relative(float(difference.norm()), float(_finite(expected).norm()))


def _relative(size: float, scale: float) -> float:
    if not math.isfinite(size):
        return math.inf
    return size / scale if scale else math.inf if size else 0.0


def _finite(tensor: Tensor) -> Tensor:
    """The tensor with zeros in place of infinite and undefined numbers."""
    return tensor.nan_to_num(0.0, 0.0, 0.0)


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _of_sums(widest_sum: int, dtype: torch.dtype = torch.float32) -> float:
    """The error of a sum in a dtype; products of half precision are added up in float32 too.

    The error grows as the root of the number of terms: N. Higham and T. Mary, A New Approach to
    Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41 (2019).
    """
    return torch.finfo(dtype).eps * math.sqrt(widest_sum)


# Up to these relative differences `torch.testing.assert_close` takes two results of one operation
# for equal; its documentation has the table.
_ONE_OPERATION = {
    torch.float64: 1e-7,
    torch.float32: 1.3e-6,
    torch.bfloat16: 1.6e-2,
    torch.float16: 1e-3,
}

# Some gradients are zero except for rounding, such as those of a key's bias. They have no relative
# error of their own, so their scale is at least this part of the largest gradient in their layer.
_LEAST_PART = 0.1


def tolerance(dtype: torch.dtype, num_layers: int, widest_sum: int) -> float:
    """The largest relative error that rounding explains.

    Args:
        dtype: The coarsest dtype of the computation.
        num_layers: How many layers follow each other.
        widest_sum: The terms of the longest sum in a product of matrices.
    """
    of_sums = _of_sums(widest_sum, torch.promote_types(dtype, torch.float32))
    return _SAFETY * (_ONE_OPERATION[dtype] + of_sums) * math.sqrt(num_layers)


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype with the largest rounding errors; float32 if none is a dtype to compute in."""
    known = [dtype for dtype in dtypes if dtype in _ONE_OPERATION]
    return max(known, key=lambda dtype: _ONE_OPERATION[dtype], default=torch.float32)


def relative_error(found: Tensor, expected: Tensor, least_scale: float = 0.0) -> float:
    """The largest difference, relative to the largest expected number.

    It is infinite if numbers are missing or NaN.
    """
    if found.shape != expected.shape:
        return math.inf
    if expected.numel() == 0:
        return 0.0
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    # Infinite numbers on both sides are equal.
    difference = (found - expected).abs().masked_fill(found == expected, 0.0)
    return _relative(float(difference.max()), max(_largest(expected), least_scale))


@dataclass(frozen=True)
class Worst:
    """The largest of several relative errors, and the name of its tensor."""

    error: float
    name: str


def worst_gradient(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Worst:
    """The gradient of a layer with the largest error, by its parameter's name."""
    missing = sorted(found.keys() ^ expected.keys())
    if missing:
        return Worst(math.inf, missing[0])
    largest = max((_largest(gradient) for gradient in expected.values()), default=0.0)
    errors = [
        Worst(relative_error(found[name], gradient, _LEAST_PART * largest), name)
        for name, gradient in expected.items()
    ]
    return max(errors, key=lambda one: one.error, default=Worst(0.0, ""))


def _largest(gradient: Tensor) -> float:
    return float(_finite(gradient).abs().max()) if gradient.numel() else 0.0


@dataclass(frozen=True)
class Comparison:
    """The relative errors of a step with some layers on workers, against a step on one device.

    Args:
        who: The worker of these layers, or all workers.
        layers: Half-open range of the layers on workers.
        loss: Error of the loss.
        activation: Error of the hidden states behind the last of these layers.
        gradient: Error of the gradient of the first layer's input; None if it has none.
        parameters: The worst error among the gradients of the layers' parameters.
        tolerance: The largest error that rounding explains.
    """

    who: str
    layers: tuple[int, int]
    loss: float
    activation: float
    gradient: float | None
    parameters: Worst
    tolerance: float

    @property
    def largest(self) -> float:
        """The largest of the errors."""
        return max(self.loss, self.activation, self.gradient or 0.0, self.parameters.error)

    @property
    def is_right(self) -> bool:
        """Whether rounding explains everything."""
        return self.largest <= self.tolerance


@dataclass(frozen=True)
class RehearsalVerdict:
    """Comparisons with each stage alone on its worker, then with all of them.

    Args:
        stages: One comparison per stage, in the order of the layers.
        together: The comparison with all layers of the plan on workers.
    """

    stages: Sequence[Comparison]
    together: Comparison

    @property
    def is_right(self) -> bool:
        """Whether rounding explains everything."""
        return not self.wrong and self.together.is_right

    @property
    def wrong(self) -> list[str]:
        """The workers of which a stage has wrong results, each once."""
        return list(dict.fromkeys(stage.who for stage in self.stages if not stage.is_right))

    @property
    def sentence(self) -> str:
        """The verdict in words, with the remedy."""
        if self.wrong:
            return (
                f"{' and '.join(self.wrong)} computed wrongly. Check memory, clock and driver "
                "of that device, and leave it out until it is repaired."
            )
        if not self.together.is_right:
            return (
                "Each stage alone computed right results, but all stages together did not. Check "
                "the links between the workers."
            )
        return "All workers compute what one device computes."
