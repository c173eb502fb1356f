"""The coordinator's hand-overs: of a micro-batch in its turn, or of a whole batch, cut here.

Evaluation, manual optimization and ``micro_batching="boundary"`` hand over the hidden states of a
whole batch. They are cut into pieces along the samples, so that all stages work at once. An
argument may have a row for each sample, several rows, or by chance as many rows as the batch has
samples: layers are tried on ``meta``, and the cut is a cut that they can compute with. Where
several are, the batch stays whole, unless `batch_trials` compares the results.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import count
from typing import TYPE_CHECKING

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import BatchError, ModelError
from ..model.carried_tensors import is_carried
from ..model.layer_call import LayerCall, result_on_meta
from ..pipeline.boundary import Activation, Collected, join_activations
from ..pipeline.handover import (
    Exchange,
    LoneMicrobatch,
    Request,
    Rows,
    SampleDimension,
    cut_request,
    exchange_whole,
    first_of_request,
    how_cut,
    listed_arguments,
    other_rows,
    takes_sequence_first,
)
from ..pipeline.microbatch import BatchOptions
from ..pipeline.random_numbers import FIRST_TRIAL
from ..pipeline.recorder import Recorder
from ..pipeline.rule import Key
from ..pipeline.turns import current_turn
from ..plan import Plan

if TYPE_CHECKING:
    from .parts import NoTwins
    from .steps import RemoteStages
    from .token_slices import TokenSlices

# Other visits of a step have smaller numbers.
_FIRST_TWIN = 8 * FIRST_TRIAL
_NUM_COMPARED = 2

# For each tensor beside the hidden states, the dimension of the cut.
Cuts = tuple[int | None, ...]
# Runs pieces without gradients, and joins their results along a dimension.
Trial = Callable[[Sequence[Request], int], Activation]


class WholeBatches:
    """Cuts the hand-overs of whole batches into pieces.

    Args:
        layers: The layers on workers by their numbers.
        plan: Says the number of pieces.
        options: The user's options.

    Attributes:
        layers: The layers.
        num_samples: The number of samples in the present batch; None if it is unknown.
    """

    def __init__(self, layers: Mapping[int, nn.Module], plan: Plan, options: BatchOptions) -> None:
        self.layers = layers
        self._num_pieces = plan.micro_batches
        is_sequence_first = any(map(takes_sequence_first, layers.values()))
        self._dimension = SampleDimension(options.dim, is_sequence_first)
        self._said: set[str] = set()
        # By how arguments are cut, the reason to leave the batch whole, or none.
        self._doubts: dict[Cuts, str] = {}
        # The rows of each sample in arguments with another number than one.
        self._rows: Rows = {}
        # Whether layers can compute with pieces, by how arguments are cut.
        self._forms: dict[Cuts, bool] = {}
        self.num_samples: int | None = None

    def pieces(self, request: Request) -> tuple[list[Request], int]:
        """The pieces of a hand-over, and the dimension for joining them again."""
        pieces, dim, cuts = self._cut(request)
        if len(pieces) == 1:
            return pieces, dim
        if cuts not in self._doubts:
            self._doubts[cuts] = self._doubt(request, dim)
        if doubt := self._doubts[cuts]:
            self._say_once(doubt)
            return [request], 0
        return pieces, dim

    def cut(self, request: Request) -> tuple[list[Request], int]:
        """Cut a hand-over as `pieces` does, without the check, and without a word: it may be a
        trial."""
        return self._cut(request, says=False)[:2]

    def first(self, request: Request, count: int, dim: int) -> Request:
        """So many first samples of a hand-over cut by `cut` along this dimension."""
        return first_of_request(request, count, dim, self._rows)

    def _cut(self, request: Request, *, says: bool = True) -> tuple[list[Request], int, Cuts]:
        """The pieces, the dimension for joining them, and how arguments are cut; says why a batch
        stays whole."""
        # A cache holds all samples of a batch. Products of fewer rows may also round differently,
        # and one other bit can make another token.
        if request.surroundings.has_cache or self._num_pieces == 1:
            return [request], 0, ()
        try:
            if request.surroundings.has_loss:
                raise BatchError(
                    "A worker has the head, and returns one loss of all samples. Take `head: true` "
                    "out of the plan, or use `micro_batching='step'`."
                )
            self._refuse_batch_statistics()
            dim = self._dimension.find(request.hidden, self.num_samples)
            # One sample shows nothing about the cuts of others.
            if dim is not None and request.hidden.shape[dim] > 1:
                cuts = self._find_rows_by_form(request, dim)
                return cut_request(request, self._num_pieces, dim, self._rows), dim, cuts
        except BatchError as error:
            if says:
                self._say_once(str(error))
        return [request], 0, ()

    def _refuse_batch_statistics(self) -> None:
        for number, layer in self.layers.items():
            for name, module in layer.named_modules():
                if isinstance(module, _BatchNorm) and module.training:
                    raise BatchError(
                        f"Layer {number} has BatchNorm ({name}), whose statistics are those of the "
                        "whole batch."
                    )

    def _say_once(self, cause: str) -> None:
        if cause not in self._said:
            self._said.add(cause)
            warnings.warn(
                "The batch goes through the stages in one piece, so that they work one after the "
                f"other. {cause}",
                stacklevel=2,
            )

    def _find_rows_by_form(self, request: Request, dim: int) -> Cuts:
        """Find an argument with zero or several rows for each sample, if layers cannot compute with
        pieces of it otherwise: a mask for each sample and head, or a bias for each head. Returns
        how all arguments are cut.

        Raises:
            BatchError: If layers can compute with the batch, and not with pieces of it.
        """
        cuts, known = how_cut(request, dim, self._rows), self._rows
        if cuts not in self._forms:
            fits = self._fits(request, dim)
            for name, rows in self._other_rows(request, dim):
                if not fits(self._rows) and fits(rows):
                    self._take_rows(name, rows)
            self._forms[cuts] = fits(self._rows)
        if not self._forms[cuts]:
            raise BatchError(
                "Layers on workers can compute with the batch, and not with pieces of it: perhaps "
                "an argument counts the samples along another dimension than the hidden states."
            )
        return cuts if self._rows is known else how_cut(request, dim, self._rows)

    def _doubt(self, request: Request, dim: int) -> str:
        """Why the cut may be wrong, as far as shapes show; empty if they show that it is right."""
        fits, others = self._fits(request, dim), other_rows(request, dim)
        names = [name for name, rows in self._other_rows(request, dim) if fits(rows)]
        names += listed_arguments(request, dim)
        if names:
            found = f"the argument {names[0]} of layers on workers"
        elif any(along is not None for along in how_cut(request, dim, dict.fromkeys(others, 0))):
            found = "a tensor that goes along with the hidden states"
        else:
            return ""
        return (
            f"Shapes do not show whether {found} has rows for each sample, and "
            "`coordinator.batch_trials`, which compares results, is missing: install the whole "
            "package."
        )

    def _other_rows(self, request: Request, dim: int) -> Iterator[tuple[str, Rows]]:
        for name, num_rows in other_rows(request, dim).items():
            if name not in self._rows:
                yield name, {**self._rows, name: num_rows}

    def _fits(self, request: Request, dim: int) -> Callable[[Rows], bool]:
        """A function that says of rows whether layers compute with such pieces, by shapes alone.
        Layers that cannot be tried without numbers are taken to do so."""

        def on_meta(one: Request) -> list[bool]:
            size = one.hidden.shape[dim]
            forms = (self._form_of(call, one) for call in one.surroundings.calls)
            return [form is not None and [*form.shape[dim : dim + 1]] == [size] for form in forms]

        @cache
        def whole() -> list[bool]:
            return on_meta(request)

        def fits(rows: Rows) -> bool:
            pieces, joined = self._compared(request, dim, rows)
            found = zip(whole(), on_meta(pieces[0]), on_meta(joined), strict=True)
            return all(one and two or not is_tried for is_tried, one, two in found)

        return fits

    def _form_of(self, call: LayerCall, request: Request) -> Tensor | None:
        """The result of a call with a request's hidden states, on ``meta``, if it succeeds."""
        carried = request.surroundings.carried
        if not carried.keys() >= {*call.carried}:
            return None  # an earlier layer makes its arguments
        form = result_on_meta(self.layers[call.layer_index], call, request.hidden, carried)
        return None if form is None else form.hidden

    def _take_rows(self, name: str, rows: Rows) -> None:
        self._rows = rows
        has = (
            f"{rows[name]} rows for each sample, and is cut so"
            if rows[name]
            else "as many rows as the batch has samples, and belongs to all of them, so each "
            "micro-batch gets it whole"
        )
        rank_zero_info(f"the argument {name} of layers on workers has {has}")

    def _compared(self, request: Request, dim: int, rows: Rows) -> tuple[list[Request], Request]:
        """The first pieces of a request, and all of them as one."""
        pieces = cut_request(request, self._num_pieces, dim, rows)[:_NUM_COMPARED]
        num_samples = sum(piece.hidden.shape[dim] for piece in pieces)
        return pieces, first_of_request(request, num_samples, dim, rows)


_CALL_LATER = (
    "call the model in `training_step`, or in `on_after_backward` with `micro_batching='boundary'`"
)


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _as_leaf(each: Collected) -> Collected:
    """An output as a leaf with gradients; carried tensors are left as they are."""
    if is_carried(each.kind) or not each.tensor.is_floating_point():
        return each
    return Collected(each.kind, each.tensor.detach().requires_grad_())


def as_leaves(found: Activation) -> Activation:
    """The returned tensors as leaves with gradients, while gradients are on."""
    if not torch.is_grad_enabled():
        return found
    collected = tuple(map(_as_leaf, found.collected))
    return replace(found, hidden=found.hidden.detach().requires_grad_(), collected=collected)


class HandOvers:
    """Gives hidden states to a micro-batch's turn, or exchanges a whole batch's.

    Args:
        stages: Runs the pieces.
        recorder: Records this process's part.
        plan: The deployed plan.
        batches: Makes the cutter of whole batches, of a function that runs pieces without a trace.
        follow: Brings the stages up to date before hidden states leave; its argument is whether a
            backward follows.
        twins: Compares the layers on workers with the layers here.
        slices: Cuts hand-overs with gradients along their tokens; None to cut along the samples.

    Attributes:
        batches: The cutter of whole batches.
        twins: As given.
    """

    def __init__(
        self,
        stages: RemoteStages,
        recorder: Recorder,
        plan: Plan,
        batches: Callable[[Trial], WholeBatches],
        follow: Callable[[bool], None],
        twins: NoTwins,
        slices: TokenSlices | None = None,
    ) -> None:
        self.twins = twins
        self._slices = slices
        self._stages = stages
        self._recorder = recorder
        self._plan = plan
        self._follow = follow
        self.batches = batches(self.without_trace)
        # Numbers the hand-overs of the present step, inside of a step.
        self._visits: Iterator[int] | None = None
        # Whether a backward of the present step, or of the step before, goes through the stages.
        self._has_graph = False
        self._trials = count(FIRST_TRIAL)
        self._twin_visits = count(_FIRST_TWIN)
        # Answers hand-overs inside of `trying`.
        self._answer: Callable[[Request], Activation] | None = None
        self._is_cutting = False

    def share(self, plan: Plan) -> None:
        """Go on with a plan with other shares for replicas."""
        self._plan = plan

    @contextmanager
    def whole_batch_step(
        self, num_pieces: int, accumulate: bool, dropout_step: int | None = None
    ) -> Iterator[None]:
        """Inside, hand-overs of whole batches belong to one step, so that a backward may follow."""
        self._stages.begin_step(num_pieces, accumulate, dropout_step)
        self._visits, self._has_graph = count(), False
        try:
            with self._recorder.span("forward"):
                yield
        finally:
            self._visits = None

    @contextmanager
    def batch_of(self, num_samples: int | None) -> Iterator[None]:
        """Inside, each hand-over is of a batch with so many samples; None if the number is
        unknown."""
        self.batches.num_samples = num_samples
        try:
            yield
        finally:
            self.batches.num_samples = None

    @contextmanager
    def trying(self, answer: Callable[[Request], Activation]) -> Iterator[None]:
        """Inside, a function answers hand-overs, and leaves no trace on the stages.

        You must begin a step before.
        """
        self._answer = answer
        try:
            yield
        finally:
            self._answer = None

    @property
    def are_trials(self) -> bool:
        """Whether the present hand-overs leave no trace."""
        return self._answer is not None

    def alone(self, microbatch: LoneMicrobatch) -> AbstractContextManager[None]:
        """Inside, a micro-batch of a begun step runs alone, and leaves no trace."""
        return self.trying(partial(self._exchange_alone, microbatch))

    def _exchange_alone(self, microbatch: LoneMicrobatch, request: Request) -> Activation:
        key = Key(microbatch.index, next(self._twin_visits))
        self.twins.compare(key, request, microbatch.stays)
        return as_leaves(microbatch.exchange(self._stages, request))

    @contextmanager
    def cut_step(self) -> Iterator[None]:
        """Inside, every hand-over belongs to a micro-batch's turn."""
        self._is_cutting = True
        try:
            yield
        finally:
            self._is_cutting = False

    def exchange(self, request: Request) -> Activation:
        """Send hidden states through the stages; returns the last stage's activation.

        Raises:
            ModelError: If a micro-batch's hand-over comes from outside of its turn.
        """
        turn = current_turn()
        if turn is not None:
            # A freeze by the first micro-batch holds for its whole step.
            self._follow(request.surroundings.grad_enabled)
            returned: Activation = turn.hand_over(request)
            return returned
        return self._exchange_here(request)

    def _exchange_here(self, request: Request) -> Activation:
        """Exchange outside of a micro-batch's turn: for a check, or for a batch in one piece."""
        if self._is_cutting:
            raise ModelError(
                "Layers on workers were called outside of a micro-batch's `training_step` while it "
                "runs. If that is the backward of reentrant checkpointing, give `checkpoint` "
                "`use_reentrant=False`, or use the safe mode, `micro_batching='boundary'`. If it "
                f"is a hook or a thread, {_CALL_LATER}."
            )
        if self._answer is not None:
            self._follow(False)
            return self._answer(request)
        if self._visits is not None:
            return self._exchange_whole(request, self._visits)
        if self._has_graph and _is_in_backward():
            # Another step would drop the activations kept by the stages for the running backward.
            raise ModelError(
                "Layers on workers were called in the backward of a batch that has gone through "
                f"them, as a hook does that calls the model; {_CALL_LATER}."
            )
        # An evaluation, or a user's own call of the model, is a step by itself.
        with self.whole_batch_step(self._plan.micro_batches, accumulate=True):
            return self._exchange_whole(request, count())

    def _exchange_whole(self, request: Request, visits: Iterator[int]) -> Activation:
        grad_enabled = request.surroundings.grad_enabled
        self._follow(grad_enabled)
        slices = self._slices if grad_enabled else None
        if slices is None:
            pieces, dim = self.batches.pieces(request)
            self._compare_twins(pieces, request)
        else:
            pieces, dim = slices.pieces(request, self.without_trace), 1
            self._compare_twins([slices.prefix(request)], request)
        visit = next(visits)
        if not grad_enabled:
            return self._join(pieces, dim, visit)
        # The backward of reentrant checkpointing calls layers after a forward without gradients.
        self._has_graph = self._has_graph or not _is_in_backward()
        under_way = self._plan.max_in_flight
        exchange = Exchange(self._stages, visit, under_way, dim, slices is not None)
        others = [*request.surroundings.carried.values()]
        found = exchange_whole(request.hidden, exchange, pieces, others)
        if slices is not None:
            slices.check_counted(request.surroundings.calls, found.hidden, request.hidden.shape[1])
        return found

    def _compare_twins(self, pieces: Sequence[Request], request: Request) -> None:
        """Compare the layers on workers not compared before, by pieces that reach them."""
        every = range(len(pieces))
        for index in self.twins.wanted(len(pieces), every, request):
            self.twins.compare(Key(index, next(self._twin_visits)), pieces[index], is_whole=True)
        self.twins.settle()

    def without_trace(self, pieces: Sequence[Request], dim: int) -> Activation:
        """Run pieces without a trace on the stages."""
        tried = [
            Request(
                piece.hidden.detach(),
                replace(piece.surroundings, is_trial=True, grad_enabled=False),
            )
            for piece in pieces
        ]
        # The number differs from the numbers of all other visits of the step.
        return self._join(tried, dim, next(self._trials))

    def _join(self, pieces: Sequence[Request], dim: int, visit: int) -> Activation:
        found = Exchange(self._stages, visit, self._plan.max_in_flight).forward(pieces)
        device = pieces[0].hidden.device
        return join_activations(found, dim).map(lambda tensor: tensor.to(device))
