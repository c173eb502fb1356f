"""The trials of whole batches: do pieces have the results that the batch has?

Layers that mix samples would compute something else for pieces, and so would layers with an
argument that has by chance as many rows as the batch has samples. So the first two pieces of the
first hand-over of each kind also run as one, and both results are compared. Two pieces take as much
memory as two micro-batches in flight.

The first hand-over does not show everything: a layer may mix samples behind a parameter of zero, or
after a change of its attributes, and arguments with equal rows, such as zeros, fit each cut. So the
10th, 100th, ... hand-over of a kind is compared too, and the first one in which such rows differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from ..errors import BatchError, StageFailed
from ..model.layers import has_own_code
from ..pipeline.boundary import Activation, Collected
from ..pipeline.handover import Request, Rows, dim_of_samples, listed_arguments
from ..pipeline.microbatch import BatchOptions
from ..pipeline.tolerance import (
    GO_ON,
    HIDDEN_STATES,
    Compared,
    Rounding,
    end_or_warn,
    norm_error,
)
from ..pipeline.trial_backward import (
    TRIED,
    TriedBackward,
    backwards_in,
    difference_of_backwards,
    other_gradients,
)
from ..plan import Plan
from ..protocol.tensor_bytes import DTYPES
from .handover import Cuts, HandOvers, Trial, WholeBatches, as_leaves

# A hand-over with gradients, in training mode, how its arguments are cut, and the number of samples
# in a piece if other tensors go along with the hidden states: a tensor without samples, of as many
# rows, is joined as if these were samples.
_Kind = tuple[bool, bool, Cuts, int]


class TriedBatches(WholeBatches):
    """Cuts the hand-overs of whole batches into pieces, and compares the first ones with the whole.

    Args:
        layers: The layers on workers by their numbers.
        plan: Says the number of pieces.
        options: The user's options.
        trial: Runs pieces on the stages and leaves no trace.
    """

    def __init__(
        self, layers: Mapping[int, nn.Module], plan: Plan, options: BatchOptions, trial: Trial
    ) -> None:
        super().__init__(layers, plan, options)
        self._dtypes = [DTYPES[stage.dtype] for stage in plan.stages if stage.dtype is not None]
        self._check = options.check
        self._has_own_code = any(map(has_own_code, layers.values()))
        self._trial = trial
        # For each kind, the number of its hand-overs, and the places of arguments whose rows were
        # equal in all comparisons: no cut of them shows.
        self._numbers: Counter[_Kind] = Counter()
        self._unshown: dict[_Kind, Set[int]] = {}
        # How arguments are cut where pieces have shown to be wrong in an evaluation.
        self._wrong: set[Cuts] = set()

    @override
    def pieces(self, request: Request) -> tuple[list[Request], int]:
        """The pieces of a hand-over, and the dimension for joining them again.

        Raises:
            BatchError: If the first pieces give another result than the whole in training, and the
                check is to stop the run. In an evaluation the batches stay whole then.
        """
        pieces, dim, cuts = self._cut(request)
        if self._check != "off" and len(pieces) > 1 and not self._stays_whole(request, cuts):
            turn = self._turn(request, dim, cuts, pieces[0].hidden.shape[dim])
            if turn and self._compare(request, dim, cuts, is_later=turn == "later"):
                pieces, dim, cuts = self._cut(request)
        return ([request], 0) if self._stays_whole(request, cuts) else (pieces, dim)

    def _stays_whole(self, request: Request, cuts: Cuts) -> bool:
        """Whether pieces of an evaluation have shown to be wrong."""
        return cuts in self._wrong and not _is_training(request)

    def _turn(
        self, request: Request, dim: int, cuts: Cuts, size_of_piece: int
    ) -> Literal["", "first", "later"]:
        """Whether a hand-over is compared, as the first one that shows how its arguments are cut,
        or as a later one."""
        around = request.surroundings
        last = around.calls[-1]
        go_along = around.carried or last.others or last.comes_back
        kind = (
            around.grad_enabled,
            _is_training(request),
            cuts,
            size_of_piece if go_along else 0,
        )
        self._numbers[kind] += 1
        known, values = self._unshown.get(kind), _values_in(request)
        if known is None:
            names = self._ambiguous(request, dim)
            places: Set[int] = {place for place, (name, _) in enumerate(values) if name in names}
        else:
            places = known
        size = request.hidden.shape[dim]
        # Layers share tensors; look at each one once.
        looked_at = {id(value): value for n, (_, value) in enumerate(values) if n in places}
        are_equal = {each: _is_equal(value, size, dim) for each, value in looked_at.items()}
        equal = {n for n in places if n >= len(values) or are_equal[id(values[n][1])]}
        self._unshown[kind] = equal
        if equal != known:
            return "first"
        is_power_of_ten = str(self._numbers[kind]).strip("0") == "1"
        return "later" if is_power_of_ten else ""

    def _compare(self, request: Request, dim: int, cuts: Cuts, *, is_later: bool) -> bool:
        """Compare pieces with the whole; returns whether the request is to be cut in another way. A
        difference in a later turn or in an evaluation never ends the run."""
        pieces, whole = self._compared(request, dim, self._rows)
        expected = self._run([whole], dim)
        found = self._run(pieces, dim)
        difference = self._difference(request, found, expected)
        if not difference.is_other:
            has_backward = request.surroundings.grad_enabled and _is_training(request)
            if has_backward and self._has_own_code:
                made = self._difference_of_backwards(pieces, whole, difference.allowed)
                if made.is_other:
                    which = "present" if is_later else "first"
                    end_or_warn(other_gradients(which, made), self._check, ends=not is_later)
            return False
        again = self._difference(request, self._run([whole], dim), expected)
        if difference.found <= 2 * again.found:
            if not is_later:
                rank_zero_info(
                    "whether layers on workers mix the samples of a batch was not checked: they "
                    "draw random numbers in evaluation mode too, so that every forward gives "
                    "another result"
                )
            return False
        if self._finds_rows(request, dim):
            return True
        apart = (
            "other hidden states for a batch than for its micro-batches: the difference is "
            f"{difference} of their norm"
        )
        for whole_one, joined in zip(expected.tensors, found.tensors, strict=True):
            if whole_one.shape != joined.shape:
                apart = (
                    f"a tensor of shape {tuple(whole_one.shape)} for a batch, and of shape "
                    f"{tuple(joined.shape)} for its micro-batches together"
                )
        text = (
            f"The layers on workers compute {apart}. They mix the samples of a batch, or another "
            "dimension than the one that is cut counts them."
        )
        if listed := listed_arguments(request, dim):
            text = (
                f"{text} Or the argument {listed[0]} is a list with an entry for each sample: it "
                "goes whole to each micro-batch, and a tensor would be cut. Pass a tensor then."
            )
        if not _is_training(request):
            self._wrong.add(cuts)
            rank_zero_warn(
                f"{text} So the batches of evaluations stay whole, and the stages work one after "
                "the other."
            )
            return False
        if self._check == "stop" and difference.is_large and not is_later:
            remedies = self._remedies(request, dim)
            raise BatchError(f"{text} This repairs it: {remedies}. {GO_ON}")
        rank_zero_warn(f"{text} With `micro_batches=1` the batch stays whole.")
        return False

    def _ambiguous(self, request: Request, dim: int) -> Set[str]:
        """The arguments and carried tensors that layers may take cut in another way, by shapes."""
        fits = self._fits(request, dim)
        names = {name for name, rows in self._other_rows(request, dim) if fits(rows)}
        return names.union(listed_arguments(request, dim), request.surroundings.carried)

    def _finds_rows(self, request: Request, dim: int) -> bool:
        """Find an argument with zero or several rows for each sample, such as a table of positions,
        if this makes the results of pieces right; returns whether there is one."""
        fits = self._fits(request, dim)
        for name, rows in self._other_rows(request, dim):
            # A worker forgets the present step after an error in its layer.
            if fits(rows) and self._is_right(request, dim, rows):
                self._take_rows(name, rows)
                return True
        return False

    def _difference_of_backwards(
        self, pieces: Sequence[Request], whole: Request, rounding: float
    ) -> Compared:
        """The difference of the layers' answers to made-up gradients."""
        expected, *cut = (_with_backwards(each, self._trial)[0] for each in (whole, *pieces))
        return difference_of_backwards(expected, cut, rounding)

    def _remedies(self, request: Request, dim: int) -> str:
        """A remedy tried with success, or remedies that always help."""
        other = 1 - dim
        if other < request.hidden.ndim - 1 and self._is_right(request, other, self._rows):
            return f"`batch_dim={other}`, or `micro_batches=1`"
        return "`micro_batches=1`, or these layers on the coordinator"

    def _is_right(self, request: Request, dim: int, rows: Rows) -> bool:
        """Whether pieces give the result of the whole, cut along a dimension, with so many rows for
        each sample in some arguments."""
        try:
            pieces, whole = self._compared(request, dim, rows)
            found, expected = self._run(pieces, dim), self._run([whole], dim)
        except (BatchError, StageFailed):
            return False
        is_like = [t.shape for t in found.tensors] == [t.shape for t in expected.tensors]
        if len(pieces) < 2 or not is_like:
            return False
        return not self._difference(request, found, expected).is_other

    def _run(self, pieces: Sequence[Request], dim: int) -> Activation:
        return self._trial([_tried(piece) for piece in pieces], dim)

    def _difference(self, request: Request, found: Activation, expected: Activation) -> Compared:
        """The difference of two results of a request."""
        parameters = [p for layer in self.layers.values() for p in layer.parameters()]
        # Weights stored in 4 bits are taken to be multiplied in half precision.
        packed = [torch.bfloat16 for p in parameters if not p.is_floating_point()]
        autocast = request.surroundings.autocast_dtype or torch.float32
        dtypes = [*self._dtypes, request.hidden.dtype, autocast, *packed]
        rounding = Rounding.of(parameters, dtypes).of_hidden(len(self.layers))
        pairs = zip(found.tensors, expected.tensors, strict=True)
        error = max(norm_error(mine, other) for mine, other in pairs)
        return HIDDEN_STATES.compare(error, rounding)


def _is_training(request: Request) -> bool:
    return any(call.training for call in request.surroundings.calls)


def _tried(request: Request, **others: Any) -> Request:
    """A request without gradients, in which code of the user's own computes as in training."""
    around = replace(request.surroundings, grad_enabled=False, keeps_own_modes=True, **others)
    return Request(request.hidden.detach(), around)


def _values_in(request: Request) -> list[tuple[str, Any]]:
    """The tensors and lists beside the hidden states, with their names, in a lasting order."""
    calls = request.surroundings.calls
    tensors = (named for call in calls for named in call.named_tensors())
    lists = (named for call in calls for named in call.named_lists())
    return [*tensors, *request.surroundings.carried.items(), *lists]


def _is_equal(value: Any, size: int, dim: int) -> bool:
    """Whether the rows of a tensor for samples, or the numbers of a list, are all equal.

    Args:
        value: The tensor or list.
        size: How many samples the hidden states have.
        dim: Their dimension of samples.
    """
    if not isinstance(value, Tensor):
        return len({*value}) < 2
    along = dim_of_samples(value, size, dim) or 0
    return not value.ndim or torch.equal(value, value.narrow(along, 0, 1).expand_as(value))


def _with_backwards(one: Request, trial: Trial) -> tuple[list[TriedBackward], Activation]:
    """Run a request without gradients, and layers with code of the user's own backwards too."""
    collect = [*one.surroundings.collect, TRIED]
    found = trial([_tried(one, collect=collect)], 0)
    tried = [tensor for kind, tensor in found.collected if kind == TRIED]
    others = tuple(each for each in found.collected if each.kind != TRIED)
    return backwards_in(tried), replace(found, collected=others)


@dataclass(frozen=True)
class TriedHandOver:
    """A hand-over of a trial with gradients on.

    Args:
        sent: The sent hidden states, and the tensors sent with them.
        back: The returned hidden states, a leaf with gradients.
        outputs: The returned collected outputs, such as router logits, leaves with gradients.
        backwards: The answers of layers to made-up gradients.
    """

    sent: Sequence[Tensor]
    back: Tensor
    outputs: Sequence[Collected] = ()
    backwards: Sequence[TriedBackward] = ()


@contextmanager
def trying(hand_overs: HandOvers, *, is_cut: bool) -> Iterator[Sequence[TriedHandOver]]:
    """Inside, forwards leave no trace on the stages, and dropout is off.

    You must begin a step before. The block gets a growing list of the hand-overs with gradients on.

    Args:
        hand_overs: Of the layers on workers.
        is_cut: Whether hand-overs are cut into the plan's pieces, or stay whole.
    """
    batches, trial = hand_overs.batches, hand_overs.without_trace
    runs_backwards = any(map(has_own_code, batches.layers.values()))
    tried: list[TriedHandOver] = []

    def answer(request: Request) -> Activation:
        pieces, dim = batches.cut(request, says=False) if is_cut else ([request], 0)
        pieces = [_tried(piece) for piece in pieces]
        backwards: list[TriedBackward] = []
        if not torch.is_grad_enabled():
            return trial(pieces, dim)
        if runs_backwards and len(pieces) == 1:
            backwards, found = _with_backwards(request, trial)
        else:
            found = trial(pieces, dim)
        sent = (request.hidden, *request.surroundings.carried.values())
        found = as_leaves(found)
        tried.append(TriedHandOver(sent, found.hidden, found.outputs, backwards))
        return found

    with hand_overs.trying(answer):
        yield tried
