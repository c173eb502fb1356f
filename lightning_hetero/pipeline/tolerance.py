"""How far apart two results of one computation are, and how much of that rounding explains.

A check measures a relative difference, and the `Rule` of its kind judges it:

    0 ────── rounding ──────┃ allowed ────── a warning ──────┃ ends ────── the run ends ──────▶
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from ..errors import BatchError, HeteroError
from .microbatch import CheckFirstBatch

GO_ON = "To go on all the same, set `check_first_batch='warn'`."

# The errors of consecutive layers grow as the root of their number, like the errors of a sum. An
# error of so many times the expected one does not come by chance.
_SAFETY = 4.0
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
# A loss below this has no relative error of its own, or below this multiple of the rounding error.
LEAST_LOSS = 1e-3
_LEAST_ROUNDINGS = 10
# Losses may cancel each other to almost nothing, and so may the numbers within each loss. So an
# absolute difference below this part of the relative rounding error is rounding too.
_NOISE_OF_LOSSES = 1 / 30
# A larger difference between a batch and its pieces ends the run: the promise of the documentation.
_ONE_PERCENT = 0.01
# Single precision rounds less than this, and half precision more.
FINE = 1e-3
# A gradient that changes the loss by less than this part of it, when the hidden states change by
# as much as they are, may be what is left of gradients that cancel each other.
NOISE_OF_GRADIENTS = 1e-4
# The gradient of one layer for a made-up loss cancels less.
NOISE_IN_LAYERS = 1e-5
# A small part of a loss, as one that balances experts, may make all gradients of an output.
NOISE_OF_OUTPUTS = 1e-6
# Parameters with zeros as yet, such as adapters' or gates, change by about this much.
_LEAST_CHANGE = 1e-2


@dataclass(frozen=True)
class Compared:
    """A judged difference; as text it is in percent.

    Args:
        found: The relative difference.
        allowed: The one that rounding explains.
        ends: The one that ends a run.
    """

    found: float
    allowed: float
    ends: float

    @property
    def is_large(self) -> bool:
        """Whether a run ends, unless the user says otherwise."""
        return self.found > self.ends

    @property
    def is_other(self) -> bool:
        """Whether rounding does not explain the difference."""
        return self.is_large or self.found > self.allowed

    def __str__(self) -> str:
        return f"{100 * self.found:.3g} %"


class Rule(NamedTuple):
    """When a relative difference of a kind counts.

    Args:
        least: Rounding explains a difference up to it,
        roundings: or up to so many times the rounding error.
        ends: A larger difference ends a run, unless rounding explains it,
        ends_roundings: if it is larger than so many times the rounding error, too.
    """

    least: float = 0.0
    roundings: float = 1.0
    ends: float = math.inf
    ends_roundings: float = 1.0

    def compare(self, found: float, rounding: float = 0.0) -> Compared:
        """Judge a relative difference, given the one that rounding explains."""
        allowed = max(self.least, self.roundings * rounding)
        return Compared(found, allowed, max(allowed, self.ends, self.ends_roundings * rounding))


# The rounding error of a loss has its margin already.
LOSS = Rule(ends=_ONE_PERCENT)
# Both are results of the same operations, so a run ends at a small difference already.
LOSS_ALONE = Rule(ends=1e-4, ends_roundings=10.0)
# One sample that rounding has moved changes an accuracy by about as much.
LOG = Rule(1e-3)
HIDDEN_STATES = Rule(ends=_ONE_PERCENT)
# The numbers within a gradient cancel each other more than those of hidden states do.
GRADIENTS = Rule(1e-4, 4.0, ends=_ONE_PERCENT)
# Gradients of made-up ones show a number of the batch, or rounding: nothing is between.
MADE_UP_GRADIENTS = Rule(_ONE_PERCENT, 4.0, ends=_ONE_PERCENT)
# Whatever makes these is a small part of the loss.
GRADIENTS_OF_OUTPUTS = Rule(_ONE_PERCENT)
# The twin test. Other kernels order sums otherwise; smaller differences are not of other code.
RESULTS_OF_LAYER = Rule(1e-4)
GRADIENTS_OF_LAYER = Rule(4e-4, 4.0)
# `Stepped.difference` leaves rounding out.
OPTIMIZER_STEP = Rule(ends=1e-3)


def likely_change(tensor: Tensor) -> float:
    """The norm by which a tensor may change: its own, or a small one while it is zero."""
    norm = float(tensor.detach().float().norm())
    return max(norm, _LEAST_CHANGE * math.sqrt(tensor.numel()), 1e-6)


def end_or_warn(
    text: str, mode: CheckFirstBatch, *, ends: bool, error: type[HeteroError] = BatchError
) -> None:
    """Answer a difference.

    Args:
        text: The difference and its remedies.
        mode: The user's choice.
        ends: Whether it ends a run in the mode ``"stop"``.
        error: What is raised then.

    Raises:
        HeteroError: The given error.
    """
    if ends and mode == "stop":
        raise error(f"{text} {GO_ON}")
    rank_zero_warn(text)


@dataclass(frozen=True)
class Rounding:
    """How coarse a computation is.

    Args:
        dtype: The coarsest dtype.
        widest_sum: The terms of the longest sum in a product of matrices.
    """

    dtype: torch.dtype
    widest_sum: int

    @classmethod
    def of(
        cls, weights: Iterable[Tensor], dtypes: Iterable[torch.dtype] = (), widest_sum: int = 1
    ) -> Rounding:
        """The rounding of products with weights, and of other dtypes or longer sums."""
        kept = [*weights]
        widths = (max(each.shape, default=1) for each in kept)
        return cls(coarsest([*dtypes, *(each.dtype for each in kept)]), max(widest_sum, 1, *widths))

    def of_hidden(self, num_layers: int) -> float:
        """The largest error of hidden states, relative to their norm, that rounding explains."""
        return _SAFETY * (self._unit + _of_sums(self.widest_sum)) * math.sqrt(num_layers)

    @property
    def of_loss(self) -> float:
        """The largest relative error of a loss that rounding explains.

        A loss is a mean over many numbers, whose errors cancel each other.
        """
        return self._unit + _SAFETY * _of_sums(self.widest_sum)

    def of_numbers(self, num_layers: int) -> float:
        """The largest relative error of any number that rounding explains."""
        of_sums = _of_sums(self.widest_sum, torch.promote_types(self.dtype, torch.float32))
        return _SAFETY * (_ONE_OPERATION[self.dtype] + of_sums) * math.sqrt(num_layers)

    @property
    def _unit(self) -> float:
        return torch.finfo(self.dtype).eps / 2


def _of_sums(widest_sum: int, dtype: torch.dtype = torch.float32) -> float:
    """The error of a sum in a dtype; products of half precision are added up in float32 too.

    The error grows as the root of the number of terms: N. Higham and T. Mary, A New Approach to
    Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41 (2019).
    """
    return torch.finfo(dtype).eps * math.sqrt(widest_sum)


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype with the largest rounding errors; float32 if none is a dtype to compute in."""
    known = [dtype for dtype in dtypes if dtype in _ONE_OPERATION]
    return max(known, key=lambda dtype: _ONE_OPERATION[dtype], default=torch.float32)


def number_error(one: float | None, other: float | None, scale: float = 0.0) -> float:
    """The difference of two numbers, relative to the larger one and to a least scale.

    It is infinite if one alone is missing, infinite or undefined.
    """
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    found = abs(one - other) / max(abs(one), abs(other), scale)
    return found if math.isfinite(found) else math.inf


def loss_error(whole: float | None, together: float, parts: float, rounding: float) -> float:
    """The difference of a loss to a sum of losses, relative to the size of the summands.

    Args:
        whole: The loss; None where ``training_step`` skips the batch.
        together: The sum.
        parts: The sum of absolute values.
        rounding: The relative difference that rounding explains.
    """
    if whole is None or abs(together - whole) <= _NOISE_OF_LOSSES * rounding:
        return 0.0
    least = max(LEAST_LOSS, _LEAST_ROUNDINGS * rounding)
    return number_error(whole, together, max(parts, least))


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


def gradient_error(whole: Tensor, ways: Iterable[Tensor], noise: float) -> float:
    """The least difference of a gradient to what it may be, relative to the larger norm.

    Args:
        whole: The gradient.
        ways: Each may be the same gradient.
        noise: A smaller norm may be what is left of gradients that cancel each other.
    """
    return min((_apart(whole, found, noise) for found in ways), default=0.0)


def _apart(one: Tensor, other: Tensor, noise: float) -> float:
    scale = max(float(one.norm()), float(other.norm()))
    # What is not finite is too large, and a loss scaler would skip the step.
    return float((one - other).norm()) / scale if noise < scale < math.inf else 0.0


def joined(pieces: Sequence[Tensor], dim: int) -> Iterator[Tensor]:
    """Join pieces in each order that they may have in a batch: its samples may be there several
    times, one time behind the other, as chosen and rejected answers in one forward are."""
    most = math.gcd(*(piece.shape[dim] for piece in pieces))
    for num_times in (n for n in range(1, most + 1) if most % n == 0):
        parts = zip(*(piece.chunk(num_times, dim) for piece in pieces), strict=True)
        yield torch.cat([part for row in parts for part in row], dim)


def dim_of_cut(whole: torch.Size, pieces: Sequence[torch.Size]) -> int | None:
    """The dimension along which tensors of these shapes are one of the whole's shape."""
    for dim in range(min(len(whole), 2)):
        others = [[*shape[:dim], *shape[dim + 1 :]] for shape in (whole, *pieces)]
        num_samples = sum(shape[dim] for shape in pieces if len(shape) == len(whole))
        if others == others[:1] * len(others) and num_samples == whole[dim]:
            return dim
    return None


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
