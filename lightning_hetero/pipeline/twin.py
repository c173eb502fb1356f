"""The twin test of a layer: does its worker compute the same as the layer in this process?

A worker builds a layer from a description. Its layer, the twin, may differ outside of the
description: an environment variable, an earlier cached value, a patched function of torch. So both
run the same call, forward and backward from a made-up gradient, and numbers are compared:

    worker   input ─▶ twin ─▶ results, gradients ─▶ numbers ─┐
               └─ comes along                                ├▶ difference
    here     input ─▶ layer ─▶ results, gradients ─▶ numbers ┘

The numbers are two random projections with a fixed seed, and the norm: of each row of a result or
of the input's gradient, and of the gradient of each parameter.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RemoteProtocolError
from ..model.captured_outputs import collecting
from ..model.layer_call import LayerCall, put_hidden, tensors_of
from ..model.layers import describe_layer
from ..model.tensors import may_have_gradient
from .tolerance import FINE, GRADIENTS_OF_LAYER, RESULTS_OF_LAYER

logger = logging.getLogger(__name__)

_KIND = "twin of layer"
_NUM_PROJECTIONS = 2
# Numbers travel as bits: a plan may round whatever else crosses a boundary.
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_AS_IT_IS = -1
# A token may take another expert by rounding. This share of the rows may differ by any amount.
_MOST_APART = 1 / 20
# Rows and gradients below this part of the others may be only rounding, such as a key's bias; half
# precision leaves more.
_LEAST_PART = 1e-3
_LEAST_PART_IN_HALF = 0.1


def kind_of(number: int) -> str:
    """The kind of the collected outputs by which the stage of a layer answers for it."""
    return f"{_KIND} {number}"


@dataclass(frozen=True)
class TwinAnswer:
    """A layer's numbers for one call.

    Args:
        given: The hidden states, and the other tensors into the layer.
        results: For each returned tensor three numbers for each row, of the shape (rows, 3).
        gradients: Likewise for the gradient of the hidden states, and three numbers for the
            gradient of each parameter, in the order of names. It is empty without gradients.
        has_failed: Whether the layer has failed in its backward.
    """

    given: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...] = ()
    has_failed: bool = False

    def encoded(self) -> list[Tensor]:
        """The answer as tensors; the first one says how many there are, and their dtypes."""
        parts = (self.given, self.results, self.gradients)
        tensors = [tensor for part in parts for tensor in part]
        codes = [_DTYPES.index(t.dtype) if t.dtype in _DTYPES else _AS_IT_IS for t in tensors]
        head = torch.tensor([*map(len, parts), self.has_failed, *codes])
        return [head, *map(_as_bits, tensors)]

    @classmethod
    def decoded(cls, tensors: Sequence[Tensor]) -> TwinAnswer:
        """The answer of `encoded`.

        Raises:
            RemoteProtocolError: If the tensors are not an answer.
        """
        try:
            head, *rest = tensors
            (*counts, has_failed), codes = head[:4].tolist(), head[4:].tolist()
            dtypes = [None if code == _AS_IT_IS else _DTYPES[code] for code in codes]
            pairs = zip(rest, dtypes, strict=True)
            found = iter([t if dtype is None else t.view(dtype) for t, dtype in pairs])
            given, results, gradients = (tuple(next(found) for _ in range(n)) for n in counts)
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            raise RemoteProtocolError(f"A twin's answer cannot be read: {error}") from error
        if not given or not all(map(_is_table, (*results, *gradients))):
            raise RemoteProtocolError("A twin's answer lacks numbers.")
        return cls(given, results, gradients, bool(has_failed))


def _is_table(tensor: Tensor) -> bool:
    return tensor.ndim == 2 and tensor.shape[1] == _NUM_PROJECTIONS + 1


def _as_bits(tensor: Tensor) -> Tensor:
    if tensor.dtype not in _DTYPES:
        return tensor
    return tensor.contiguous().view(_BITS[tensor.dtype.itemsize])


def answer_of(
    layer: nn.Module,
    forward: Callable[..., Any],
    call: LayerCall,
    hidden: Tensor,
    along: Sequence[Tensor] = (),
) -> tuple[Mapping[int, Tensor], TwinAnswer]:
    """Run a layer forward, and backward if its call is one of training; gradients are not kept.

    Args:
        layer: The layer, with its weights.
        forward: Computes it.
        call: Its call, with its tensors.
        hidden: Its hidden states.
        along: The other tensors into it.

    Returns:
        Its returned tensors by their positions, without their graph, and the answer.
    """
    given = tuple(tensor.detach().clone() for tensor in (hidden, *along))
    with torch.set_grad_enabled(call.training), collecting(()):
        leaf = hidden.detach()
        if call.training and may_have_gradient(leaf):
            leaf.requires_grad_()
        # A layer may change its hidden states in place, and must not change a leaf so.
        args, kwargs = put_hidden(leaf.clone(), call.args, call.kwargs, call.place)
        found = tensors_of(forward(*args, **kwargs), layer, call)
        answer = TwinAnswer(given, tuple(rows_of(found[at]) for at in sorted(found)))
        if call.training:
            answer = _with_gradients(answer, layer, call, leaf, [*found.values()])
    return {at: tensor.detach() for at, tensor in found.items()}, answer


def trained_names(layer: nn.Module) -> list[str]:
    """The names of a layer's training parameters, in the order of their gradients."""
    return sorted(name for name, each in layer.named_parameters() if each.requires_grad)


def _with_gradients(
    answer: TwinAnswer, layer: nn.Module, call: LayerCall, leaf: Tensor, results: Sequence[Tensor]
) -> TwinAnswer:
    trained = [layer.get_parameter(name) for name in trained_names(layer)]
    ends = [tensor for tensor in results if tensor.requires_grad]
    wanted = [tensor for tensor in (leaf, *trained) if tensor.requires_grad]
    if not ends or not wanted:
        return answer
    try:
        found = torch.autograd.grad(
            ends, wanted, [_made_up(end) for end in ends], allow_unused=True
        )
    except Exception as error:
        # The step itself fails in the same way, unless the layer cannot run backwards alone.
        logger.info("%s cannot run backwards: %s", describe_layer(call.layer_index), error)
        return replace(answer, has_failed=True)
    gradients = dict(zip(map(id, wanted), found, strict=True))
    of_input = gradients.get(id(leaf))
    rows = rows_of(torch.zeros_like(leaf) if of_input is None else of_input)
    parameters = [numbers_of(gradients[id(parameter)], leaf.device) for parameter in trained]
    nothing = torch.zeros(0, _NUM_PROJECTIONS + 1, device=leaf.device)
    return replace(answer, gradients=(rows, torch.stack(parameters) if parameters else nothing))


def made_up(tensor: Tensor) -> Tensor:
    """Other numbers of the same sample, as a gradient; a tensor of one dimension has one number for
    each sample."""
    return tensor.detach().roll(1, -1) if tensor.ndim > 1 else tensor.detach()


def _made_up(result: Tensor) -> Tensor:
    """A gradient of about one for each number: half precision can hold it."""
    size = result.detach().float().square().mean().sqrt().clamp(min=1e-6)
    return (made_up(result).float() / size).to(result.dtype)


def rows_of(tensor: Tensor) -> Tensor:
    """Two projections and the norm of each row, without a product of matrices: autocast would round
    it."""
    table = _as_table(tensor)
    projections = [(table * each).sum(-1) for each in _weights(table.shape[1], table.device)]
    return torch.stack([*projections, table.norm(dim=-1)], -1)


def numbers_of(gradient: Tensor | None, device: torch.device) -> Tensor:
    """Two projections and the norm of a parameter's gradient; zeros without one."""
    if gradient is None:
        return torch.zeros(_NUM_PROJECTIONS + 1, device=device)
    table = _as_table(gradient.to_dense() if gradient.is_sparse else gradient)
    pairs = zip(*(_weights(size, table.device) for size in table.shape), strict=True)
    projections = [((table * right).sum(-1) * left).sum() for left, right in pairs]
    return torch.stack([*projections, table.norm()]).to(device)


def _as_table(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    real = torch.view_as_real(detached).flatten(-2) if detached.is_complex() else detached.float()
    return real.reshape(-1, real.shape[-1] if real.ndim else 1)


def _weights(size: int, device: torch.device) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(_NUM_PROJECTIONS):
        yield torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(device)


@dataclass(frozen=True)
class TwinDifference:
    """How far two answers are apart.

    Args:
        what: The most different part, in words.
        relative: Its difference, relative to its norm; infinite if the numbers cannot be compared.
    """

    what: str
    relative: float

    def __str__(self) -> str:
        if math.isinf(self.relative):
            return f"{self.what} have another form or are not finite"
        return f"{self.what} differ by {100 * self.relative:.3g} %"


def difference_of(
    here: TwinAnswer, there: TwinAnswer, names: Sequence[str], rounding: float
) -> TwinDifference | None:
    """The largest difference of two answers; None if rounding explains it.

    Args:
        here: The answer of this process.
        there: The answer of the worker to the same call.
        names: The names of the trained parameters.
        rounding: The relative difference of results due to rounding.
    """

    results = _pairs(here.results, there.results)
    allowed = RESULTS_OF_LAYER.compare(0.0, rounding).allowed
    found = [(TwinDifference("its results", _error_of_rows(*pair)), allowed) for pair in results]
    if not (here.has_failed or there.has_failed):
        pairs = _pairs(here.gradients, there.gradients)
        others = [
            TwinDifference("the gradients of its input", _error_of_rows(*pair))
            for pair in pairs[:1]
        ]
        # Where rows take other experts, sums over all rows cannot be compared.
        if all(_are_alike(*pair, allowed) for pair in results):
            others += [_error_of_parameters(*pair, names, rounding) for pair in pairs[1:]]
        found += [(each, GRADIENTS_OF_LAYER.compare(0.0, rounding).allowed) for each in others]
    worst, allowed = max(found, key=lambda each: each[0].relative / each[1])
    return worst if worst.relative > allowed else None


_MISSING = torch.full((1, _NUM_PROJECTIONS + 1), math.nan)


def _pairs(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The pairs of both answers' tensors; a tensor on only one side has a partner of NaN."""
    return [*zip_longest(mine, theirs, fillvalue=_MISSING)]


def _error_of_rows(mine: Tensor, theirs: Tensor) -> float:
    """The relative difference of all rows except the few most different."""
    if mine.shape != theirs.shape:
        return math.inf
    relative = _relative(mine, theirs, _LEAST_PART).sort().values
    kept = relative[: len(relative) - int(len(relative) * _MOST_APART)]
    return float(kept.square().mean().sqrt()) if len(kept) else 0.0


def _are_alike(mine: Tensor, theirs: Tensor, tolerance: float) -> bool:
    """Whether all rows of two results are equal up to rounding."""
    return mine.shape == theirs.shape and bool(
        (_relative(mine, theirs, _LEAST_PART) <= tolerance).all()
    )


def _error_of_parameters(
    mine: Tensor, theirs: Tensor, names: Sequence[str], rounding: float
) -> TwinDifference:
    """The largest relative difference of gradients of parameters."""
    if not mine.shape == theirs.shape == (len(names), _NUM_PROJECTIONS + 1):
        return TwinDifference("its parameters with gradients", math.inf)
    if not names:
        return TwinDifference("its gradients", 0.0)
    least_part = _LEAST_PART if rounding < FINE else _LEAST_PART_IN_HALF
    mine, theirs = mine.cpu(), theirs.cpu()
    norms = torch.maximum(mine[:, -1], theirs[:, -1]).nan_to_num(0.0, 0.0)
    relative = _relative(mine, theirs).where(norms > least_part * norms.max(), 0.0)
    worst = int(relative.argmax())
    return TwinDifference(f"its gradients of {names[worst]}", float(relative[worst]))


def _relative(mine: Tensor, theirs: Tensor, least_part: float = 0.0) -> Tensor:
    """The difference of each row's projections, relative to the row's norm. Numbers not finite on
    both sides are equal."""
    mine, theirs = mine.cpu(), theirs.cpu()
    finite = mine.isfinite().all(-1), theirs.isfinite().all(-1)
    norms = torch.maximum(mine[:, -1], theirs[:, -1]).nan_to_num(0.0, 0.0)
    scale = norms.clamp(min=least_part * float(norms.mean()) if len(norms) else 0.0)
    apart = (mine - theirs)[:, :-1].square().mean(-1).sqrt()
    found = (apart / scale).where(scale > 0, 0.0)
    return found.where(finite[0] & finite[1], 0.0).where(finite[0] == finite[1], math.inf)
