"""The coordinator's hand-overs: of a micro-batch in its turn, or of a whole batch, cut here.

Evaluation, manual optimization and ``micro_batching="boundary"`` hand over the hidden states of a
whole batch. They are cut into pieces along the samples, so that all stages work at once. Layers
that mix samples would then compute something else, and so would layers with an argument that has by
chance as many rows as the batch has samples. So the first two pieces of the first hand-over of each
kind also run as one, and both results are compared. Two pieces take as much memory as two
micro-batches in flight.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import TYPE_CHECKING

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import BatchError, ModelError, StageFailed
from ..model.carried_tensors import is_carried
from ..model.layer_call import LayerCall, result_on_meta
from ..model.layers import has_own_code
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
from ..pipeline.turns import current_turn
from ..plan import Plan
from ..protocol.tensor_bytes import DTYPES
from .parts import NoTwins

if TYPE_CHECKING:
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
        trial: Runs pieces on the stages and leaves no trace.

    Attributes:
        num_samples: The number of samples in the present batch; None if it is unknown.
    """

    def __init__(
        self, layers: Mapping[int, nn.Module], plan: Plan, options: BatchOptions, trial: Trial
    ) -> None:
        self._layers = layers
        self._num_pieces = plan.micro_batches
        self._dtypes = [DTYPES[stage.dtype] for stage in plan.stages if stage.dtype is not None]
        is_sequence_first = any(map(takes_sequence_first, layers.values()))
        self._dimension = SampleDimension(options.dim, is_sequence_first)
        self._check = options.check
        self._has_own_code = any(map(has_own_code, layers.values()))
        self._trial = trial
        # The compared kinds: with gradients, in training mode, and how arguments are cut.
        self._checked: set[tuple[bool, bool, Cuts]] = set()
        self._said: set[str] = set()
        # The rows of each sample in arguments with another number than one.
        self._rows: Rows = {}
        # How arguments were cut where these rows were looked for.
        self._forms: set[Cuts] = set()
        self.num_samples: int | None = None

    def pieces(self, request: Request) -> tuple[list[Request], int]:
        """The pieces of a hand-over, and the dimension for joining them again.

        Raises:
            BatchError: If the first pieces give another result than the whole, and the check is
                to stop the run.
        """
        pieces, dim, cuts = self._cut(request)
        if len(pieces) > 1 and self._check_once(request, dim, cuts):
            return self.cut(request)
        return pieces, dim

    def cut(self, request: Request) -> tuple[list[Request], int]:
        """Cut a hand-over as `pieces` does, without the check."""
        return self._cut(request)[:2]

    def first(self, request: Request, count: int, dim: int) -> Request:
        """So many first samples of a hand-over cut by `cut` along this dimension."""
        return first_of_request(request, count, dim, self._rows)

    def _cut(self, request: Request) -> tuple[list[Request], int, Cuts]:
        """The pieces, the dimension for joining them, and how arguments are cut."""
        # A cache holds all samples of a batch. Products of fewer rows may also round differently,
        # and one other bit can make another token.
        if request.surroundings.has_cache or self._num_pieces == 1:
            return [request], 0, ()
        if request.surroundings.has_loss:
            self._say_once(
                "A worker has the head, and returns one loss of all samples. Take `head: true` "
                "out of the plan, or use `micro_batching='step'`."
            )
            return [request], 0, ()
        try:
            self._refuse_batch_statistics()
            dim = self._dimension.find(request.hidden, self.num_samples)
            if dim is not None:
                cuts = self._find_rows_by_form(request, dim)
                return cut_request(request, self._num_pieces, dim, self._rows), dim, cuts
        except BatchError as error:
            self._say_once(str(error))
        return [request], 0, ()

    def _refuse_batch_statistics(self) -> None:
        for number, layer in self._layers.items():
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

    def _check_once(self, request: Request, dim: int, cuts: Cuts) -> bool:
        """Compare pieces with the whole, for the first hand-over of its kind; returns whether the
        request is to be cut in another way."""
        if self._check == "off":
            return False
        around = request.surroundings
        is_training = any(call.training for call in around.calls)
        kind = around.grad_enabled, is_training, cuts
        if kind in self._checked:
            return False
        self._checked.add(kind)
        pieces, whole = self._compared(request, dim, self._rows)
        expected = self._run([whole], dim)
        difference = self._difference(request, self._run(pieces, dim), expected)
        if not difference.is_other:
            if around.grad_enabled and is_training and self._has_own_code:
                self._check_backwards(pieces, whole, difference.allowed)
            return False
        again = self._difference(request, self._run([whole], dim), expected)
        if difference.found <= 2 * again.found:
            rank_zero_info(
                "whether layers on workers mix the samples of a batch was not checked: they draw "
                "random numbers in evaluation mode too, so that every forward gives another result"
            )
            return False
        if self._finds_rows(request, dim):
            return True
        text = (
            "The layers on workers compute other hidden states for a batch than for its "
            f"micro-batches: the difference is {difference} of their norm. They mix "
            "the samples of a batch, or another dimension than the one that is cut counts them."
        )
        if listed := listed_arguments(request, dim):
            text = (
                f"{text} Or the argument {listed[0]} is a list with an entry for each sample: it "
                "goes whole to each micro-batch, and a tensor would be cut. Pass a tensor then."
            )
        if self._check == "stop" and difference.is_large:
            remedies = self._remedies(request, dim)
            raise BatchError(f"{text} This repairs it: {remedies}. {GO_ON}")
        rank_zero_warn(f"{text} With `micro_batches=1` the batch stays whole.")
        return False

    def _find_rows_by_form(self, request: Request, dim: int) -> Cuts:
        """Find an argument with zero or several rows for each sample, if layers cannot compute with
        pieces of it otherwise: a mask for each sample and head, or a bias for each head. Returns
        how all arguments are cut."""
        cuts, known = how_cut(request, dim, self._rows), self._rows
        if cuts in self._forms:
            return cuts
        self._forms.add(cuts)
        fits = self._fits(request, dim)
        for name, rows in self._other_rows(request, dim):
            if not fits(self._rows) and fits(rows):
                self._take_rows(name, rows)
        return cuts if self._rows is known else how_cut(request, dim, self._rows)

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
        form = result_on_meta(self._layers[call.layer_index], call, request.hidden, carried)
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

    def _check_backwards(self, pieces: Sequence[Request], whole: Request, rounding: float) -> None:
        """Compare the layers' answers to made-up gradients.

        Raises:
            BatchError: If they differ, and the check is to stop the run.
        """
        expected, *cut = (self.with_backwards([each], 0)[0] for each in (whole, *pieces))
        difference = difference_of_backwards(expected, cut, rounding)
        if difference.is_other:
            end_or_warn(other_gradients("first", difference), self._check, ends=True)

    def with_backwards(
        self, pieces: Sequence[Request], dim: int
    ) -> tuple[list[TriedBackward], Activation]:
        """Run pieces without gradients, and layers with code of the user's own backwards too."""
        if not self._has_own_code or len(pieces) > 1:
            return [], self._trial(pieces, dim)
        [one] = pieces
        collect = [*one.surroundings.collect, TRIED]
        around = replace(one.surroundings, collect=collect, grad_enabled=False)
        asking = Request(one.hidden.detach(), around)
        found = self._trial([asking], dim)
        tried = [tensor for kind, tensor in found.collected if kind == TRIED]
        others = tuple(each for each in found.collected if each.kind != TRIED)
        return backwards_in(tried), replace(found, collected=others)

    def _compared(self, request: Request, dim: int, rows: Rows) -> tuple[list[Request], Request]:
        """The first pieces of a request, and all of them as one."""
        pieces = cut_request(request, self._num_pieces, dim, rows)[:_NUM_COMPARED]
        num_samples = sum(piece.hidden.shape[dim] for piece in pieces)
        return pieces, first_of_request(request, num_samples, dim, rows)

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
        tried = [
            Request(piece.hidden.detach(), replace(piece.surroundings, grad_enabled=False))
            for piece in pieces
        ]
        return self._trial(tried, dim)

    def _difference(self, request: Request, found: Activation, expected: Activation) -> Compared:
        """The difference of two results of a request."""
        parameters = [p for layer in self._layers.values() for p in layer.parameters()]
        # Weights stored in 4 bits are taken to be multiplied in half precision.
        packed = [torch.bfloat16 for p in parameters if not p.is_floating_point()]
        autocast = request.surroundings.autocast_dtype or torch.float32
        dtypes = [*self._dtypes, request.hidden.dtype, autocast, *packed]
        rounding = Rounding.of(parameters, dtypes).of_hidden(len(self._layers))
        pairs = zip(found.tensors, expected.tensors, strict=True)
        error = max(norm_error(mine, other) for mine, other in pairs)
        return HIDDEN_STATES.compare(error, rounding)


_CALL_LATER = (
    "call the model in `training_step`, or in `on_after_backward` with `micro_batching='boundary'`"
)


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


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


def _as_leaf(each: Collected) -> Collected:
    """An output as a leaf with gradients; carried tensors are left as they are."""
    if is_carried(each.kind) or not each.tensor.is_floating_point():
        return each
    return Collected(each.kind, each.tensor.detach().requires_grad_())


def _as_leaves(found: Activation) -> Activation:
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
        layers: The layers on workers by their numbers.
        plan: The deployed plan.
        options: The user's options.
        follow: Brings the stages up to date before hidden states leave; its argument is whether a
            backward follows.
        twins: Compares the layers on workers with the layers here.
        slices: Cuts hand-overs with gradients along their tokens; None to cut along the samples.

    Attributes:
        plan: The deployed plan.
        twins: As given.
    """

    def __init__(
        self,
        stages: RemoteStages,
        recorder: Recorder,
        layers: Mapping[int, nn.Module],
        plan: Plan,
        options: BatchOptions,
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
        self._whole_batches = WholeBatches(layers, plan, options, self._try)
        # Numbers the hand-overs of the present step, inside of a step.
        self._visits: Iterator[int] | None = None
        # Whether a backward of the present step, or of the step before, goes through the stages.
        self._has_graph = False
        self._trials = count(FIRST_TRIAL)
        self._twin_visits = count(_FIRST_TWIN)
        # Whether the present trials are cut into pieces; None outside of trials.
        self._trial_is_cut: bool | None = None
        self._tried: list[TriedHandOver] = []
        self._lone: LoneMicrobatch | None = None
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
        self._whole_batches.num_samples = num_samples
        try:
            yield
        finally:
            self._whole_batches.num_samples = None

    @contextmanager
    def trying(self, *, is_cut: bool) -> Iterator[Sequence[TriedHandOver]]:
        """Inside, forwards leave no trace on the stages, and dropout is off.

        You must begin a step before. The block gets a growing list of the hand-overs with gradients
        on.

        Args:
            is_cut: Whether hand-overs are cut into the plan's pieces, or stay whole.
        """
        self._trial_is_cut = is_cut
        try:
            yield self._tried
        finally:
            self._trial_is_cut = None
            self._tried = []  # A graph holds parameters in place.

    @property
    def are_trials(self) -> bool:
        """Whether the present hand-overs leave no trace."""
        return self._trial_is_cut is not None or self._lone is not None

    @contextmanager
    def alone(self, microbatch: LoneMicrobatch) -> Iterator[None]:
        """Inside, a micro-batch of a begun step runs alone, and leaves no trace."""
        self._lone = microbatch
        try:
            yield
        finally:
            self._lone = None

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
        if self._lone is not None:
            self._follow(False)
            key = Key(self._lone.index, next(self._twin_visits))
            self.twins.compare(key, request, self._lone.stays)
            return _as_leaves(self._lone.exchange(self._stages, request))
        if self._trial_is_cut is not None:
            self._follow(False)
            cut = self._whole_batches.cut(request) if self._trial_is_cut else ([request], 0)
            if not torch.is_grad_enabled():
                return self._try(*cut)
            backwards, found = self._whole_batches.with_backwards(*cut)
            sent = (request.hidden, *request.surroundings.carried.values())
            found = _as_leaves(found)
            self._tried.append(TriedHandOver(sent, found.hidden, found.outputs, backwards))
            return found
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
            pieces, dim = self._whole_batches.pieces(request)
            self._compare_twins(pieces, request)
        else:
            pieces, dim = slices.pieces(request, self._try), 1
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

    def _try(self, pieces: Sequence[Request], dim: int) -> Activation:
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
