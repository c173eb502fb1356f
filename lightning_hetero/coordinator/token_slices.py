"""The coordinator's part in slices along the tokens: what can be cut, and the trial of the layers.

With ``micro_batching="tokens"`` a hand-over with gradients is cut along its tokens. The layers in
this process run slice by slice too, so dropout masks are the same under every plan. Evaluation cuts
along the samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, reduce
from operator import or_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import Cache

from ..devices.device import forked_generators
from ..errors import BatchError, ModelError, PlanError
from ..model.head import HeadLoss
from ..model.kv_cache import cache_index
from ..model.layer_call import LayerCall, caches_among, take_hidden, without_cache
from ..model.layers import (
    EMBEDDING_LAYER,
    LOSS_LAYER,
    NORM_LAYER,
    describe_layer,
    has_own_code,
    is_end,
)
from ..pipeline.boundary import Activation
from ..pipeline.handover import Request
from ..pipeline.layer_runs import on_trial
from ..pipeline.microbatch import CheckFirstBatch
from ..pipeline.sliced_loss import shift_loss
from ..pipeline.token_slices import (
    REMEDY,
    SequenceKeys,
    Slice,
    SliceCut,
    SlicePass,
    check_can_run_on_slices,
    check_form,
    masks_of,
    spread_tokens,
    work_of,
)
from ..pipeline.tolerance import GRADIENTS, HIDDEN_STATES, Rounding, end_or_warn
from ..pipeline.trial_slices import TRIED_SLICES, loss_difference, tried_in_slices
from ..plan import Plan, StagePlan
from ..protocol.tensor_bytes import DTYPES
from .local_layers import run_again_here

# The trial takes the memory of one layer, forward and backward, for so many tokens.
_MOST_TRIED = 2048
# Runs requests on the workers, and leaves no trace.
Trial = Callable[[Sequence[Request], int], Activation]


def check_can_be_sliced(layers: Mapping[int, nn.Module], plan: Plan) -> None:
    """Refuse layers and a plan that cannot run on slices, before any weight travels.

    Raises:
        ModelError: With the layer and the remedy.
        PlanError: With the key of the plan and the remedy.
    """
    for number, layer in layers.items():
        if not is_end(number):
            check_can_run_on_slices(number, layer)
    for stage in plan.stages:
        own = [layers[number] for number in stage.layer_indices] if stage.is_local else []
        if any(getattr(layer, "gradient_checkpointing", False) for layer in own):
            raise ModelError(
                f"The model checkpoints gradients, and layers {list(stage.layers)} are with the "
                "coordinator, where slices along the tokens run again only by the plan. Write "
                "`recompute: true` for them, give them to workers, or switch it off. "
                f"{REMEDY}"
            )
        if (found := _refused_key(stage)) is not None:
            raise PlanError(
                f"The stage with layers {list(stage.layers)} has {found}, which does not work with "
                f"`micro_batching='tokens'`. Take it from the plan. {REMEDY}"
            )


def _refused_key(stage: StagePlan) -> str | None:
    """The key of a stage in a plan that slices do not support."""
    if len(stage.workers) > 1:
        # A slice needs the keys of the slice before, which another replica would have.
        return f"several workers ({', '.join(stage.workers)})"
    if stage.compile:
        return "`compile: true`"
    return None


class TokenSlices:
    """Cuts hand-overs and the layers of this process along the tokens.

    Args:
        layers: All decoder layers by their numbers, and the ends of the model on workers.
        plan: Says the number of slices.
        check: The answer to a difference in the trial.

    Raises:
        ModelError: If a layer cannot run on slices.
        PlanError: If the plan has a key that slices do not support.
    """

    def __init__(self, layers: Mapping[int, nn.Module], plan: Plan, check: CheckFirstBatch) -> None:
        check_can_be_sliced(layers, plan)
        # An end on a worker changes no cut, so dropout masks are the same under every plan.
        work = work_of([layer for number, layer in layers.items() if not is_end(number)])
        self.cut = SliceCut(plan.micro_batches, work)
        self._layers = layers
        self._check = check
        # The layers here that run again in the backward, and whether code of the user's is in them.
        self._run_again = {
            number: has_own_code(layers[number])
            for stage in plan.stages
            if stage.is_local and stage.recompute
            for number in stage.layer_indices
        }
        self._dtypes = [DTYPES[stage.dtype] for stage in plan.stages if stage.dtype is not None]
        # The layers that have passed the trial.
        self._tried: set[int] = set()
        # By cache of the model, the layers here that were called with it.
        self._seen: WeakKeyDictionary[Cache, set[int]] = WeakKeyDictionary()

    def pieces(self, request: Request, trial: Trial) -> list[Request]:
        """The slices of a hand-over.

        Args:
            request: The hand-over.
            trial: Runs another request on the same layers.

        Raises:
            BatchError: If a tensor has an unknown form, or the trial does not agree.
        """
        self._check_request(request)
        slices = self.cut.slices(request.hidden.shape[1])
        shifted = _with_shifted_labels(request)
        pieces = [self._piece(shifted, each) for each in slices]
        if len(slices) > 1 and self._check != "off":
            self._try(request, slices, trial)
        return pieces

    def _try(self, request: Request, slices: Sequence[Slice], trial: Trial) -> None:
        """Try the layers not tried before, and the loss with the labels of the request."""
        last = request.surroundings.calls[-1]
        if isinstance(loss := self._layers[last.layer_index], HeadLoss):
            self._judge_loss(loss_difference(last, loss.function, slices))
        tried = self._to_try(request, slices)
        numbers = [call.layer_index for call in tried.surroundings.calls]
        if self._tried.issuperset(numbers):
            return
        found = trial([tried], 1)
        answers = [tensor for kind, tensor in found.outputs if kind == TRIED_SLICES]
        for number, answer in zip(numbers, answers, strict=True):
            dtypes = [request.hidden.dtype, request.surroundings.autocast_dtype]
            self._judge(number, answer, dtypes)

    def check_counted(self, calls: Sequence[LayerCall], result: Tensor, num_tokens: int) -> None:
        """Refuse a token in the loss that attends to all tokens alike: slices lack later ones.

        Of a loss on a worker the labels show it now. Of another result its gradient shows it, and
        the backward raises the error.

        Args:
            calls: The calls of layers for the sequence.
            result: Their result.
            num_tokens: The length of the sequence.

        Raises:
            BatchError: With the remedies.
        """
        # The last slice has all tokens.
        end = self.cut.slices(num_tokens)[-1].start
        named = [mask for call in calls for mask in masks_of(call, self._layers[call.layer_index])]
        masks = {id(mask): mask for mask in named}.values()
        spread = [spread_tokens(mask[..., :end, :]) for mask in masks]
        spread = [tokens for tokens in spread if bool(tokens.any())]
        if not spread or not result.requires_grad:
            return
        refuse = partial(_refuse_counted, reduce(or_, spread))
        if calls[-1].layer_index == LOSS_LAYER:
            given = shift_loss(calls[-1], num_tokens).kwargs
            refuse(given["shift_labels"] != given["ignore_index"])
        else:
            result.register_hook(lambda gradient: refuse(gradient.nan_to_num(0.0).any(-1)))

    def prefix(self, request: Request) -> Request:
        """The first slice of a hand-over as a sequence of its own."""
        first = self.cut.slices(request.hidden.shape[1])[0]
        return self._piece(_with_shifted_labels(request), first, has_cache=False)

    def _to_try(self, request: Request, slices: Sequence[Slice]) -> Request:
        """The tried part of a hand-over as a sequence of its own, up to the head's norm: its output
        embedding is a `torch.nn.Linear`, and would make many logits."""
        calls = [c for c in request.surroundings.calls if c.layer_index <= NORM_LAYER]
        around = replace(request.surroundings, calls=calls, collect=[TRIED_SLICES])
        tried = Request(request.hidden, around)
        return self._piece(tried, _tried_part(slices), has_cache=False)

    def _piece(self, request: Request, each: Slice, has_cache: bool = True) -> Request:
        calls = [
            each.cut_call(call, self._layers[call.layer_index], has_cache)
            for call in request.surroundings.calls
        ]
        carried = request.surroundings.carried.items()
        beside = {name: each.cut_beside(tensor) for name, tensor in carried}
        around = replace(request.surroundings, calls=calls, carried=beside)
        return Request(each.cut(request.hidden), around)

    def _check_request(self, request: Request) -> None:
        """Refuse a hand-over with more than hidden states.

        Raises:
            BatchError: With the cause.
        """
        around = request.surroundings
        check_form(request.hidden, around.calls[0].layer_index)
        if around.collect:
            raise BatchError(
                f"The model collects the outputs {[*around.collect]} of its layers, which cannot "
                f"be joined from slices along the tokens. Call it without them. {REMEDY}"
            )
        for call in around.calls:
            computes = call.arithmetic and call.layer_index != EMBEDDING_LAYER
            if call.others or call.carried or computes:
                raise BatchError(
                    f"{describe_layer(call.layer_index).capitalize()} passes on more than hidden "
                    "states, or something between the layers computes with them, and slices along "
                    f"the tokens do not support it. {REMEDY}"
                )

    def _judge(self, number: int, answer: Tensor, dtypes: Sequence[torch.dtype | None]) -> None:
        """Compare the answer of a layer's trial with what rounding explains.

        Args:
            number: The layer.
            answer: The differences of its results and of its gradients.
            dtypes: The dtypes of its computation here; None for no other dtype.

        Raises:
            BatchError: If it is more, and the check is to stop the run.
        """
        self._tried.add(number)
        layer = self._layers[number]
        weights = [*layer.parameters()]
        # Weights stored in 4 bits are taken to be multiplied in half precision.
        packed = [torch.bfloat16 for each in weights if not each.is_floating_point()]
        known = [*self._dtypes, *packed, *(dtype for dtype in dtypes if dtype is not None)]
        rounding = Rounding.of(weights, known).of_hidden(1)
        of_results, of_gradients = (float(each) for each in answer.nan_to_num(math.inf))
        results = HIDDEN_STATES.compare(of_results, rounding)
        gradients = GRADIENTS.compare(of_gradients, rounding)
        if not (results.is_other or gradients.is_other):
            return
        what, which = ("results", results) if results.is_other else ("gradients", gradients)
        text = (
            f"{describe_layer(number).capitalize()} ({type(layer).__name__}) computes other {what} "
            f"for slices of a sequence than for the sequence: they differ by {which}. It seems "
            "that a token depends on later tokens, or on more of earlier ones than keys and "
            f"values. {REMEDY}"
        )
        end_or_warn(text, self._check, ends=which.is_large)

    def _judge_loss(self, difference: float) -> None:
        """Refuse a loss that is not the sum of the losses of slices.

        Raises:
            BatchError: If the check is to stop the run.
        """
        compared = GRADIENTS.compare(difference)
        if compared.is_other:
            text = (
                "The loss of the model is not the sum of the losses of slices of a sequence: they "
                f"differ by {compared}. Take `head: true` out of the plan, so that the loss stays "
                "whole with the coordinator."
            )
            end_or_warn(text, self._check, ends=True)

    def run_here(
        self,
        number: int,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seed: Callable[[int], None],
    ) -> Any:
        """Run a layer of this process slice by slice.

        Args:
            number: The number of the layer.
            run: Calls the layer.
            args: The positional arguments of its call.
            kwargs: The named arguments.
            seed: Seeds the random numbers of a slice by its number.

        Raises:
            BatchError: If a tensor has an unknown form, or the trial does not agree.
            ModelError: If the layer runs again in a backward, or gets a cache with content.
        """
        if torch._C._current_graph_task_id() != -1:
            raise ModelError(
                f"The forward of layer {number} runs again in the backward. Under "
                "`micro_batching='tokens'` the coordinator's layers run again only by the plan: "
                "leave out your own checkpointing, and write `recompute: true` for the layer."
            )
        layer = self._layers[number]
        hidden, args, kwargs, place = take_hidden(number, args, kwargs)
        check_form(hidden, number)
        self._check_cache(number, args, kwargs)
        args, kwargs = without_cache(layer, args, kwargs)
        call = LayerCall(number, layer.training, args, kwargs, place=place)
        slices = self.cut.slices(hidden.shape[1])
        if number not in self._tried and len(slices) > 1 and self._check != "off":
            self._try_here(call, hidden, run, slices)
        keys, results = SequenceKeys(is_cut=False), []
        pieces = hidden.split([each.end - each.start for each in slices], 1)
        for index, (each, piece) in enumerate(zip(slices, pieces, strict=True)):
            seed(index)
            one, cut = SlicePass(keys), each.cut_call(call, layer)
            called = one.calling(run, cut, layer)
            if number in self._run_again:
                result = run_again_here(called, (piece,), {}, self._run_again[number])
            else:
                result = called(piece)
            results.append(result)
            one.end_forward()
        keys.cut_graph()
        joined = _joined(results, number)
        hidden = joined[0] if type(joined) is tuple else joined
        self.check_counted([call], hidden, slices[-1].end)
        return joined

    def _check_cache(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a key-value cache with content: slices have their own, and leave this one empty.

        Raises:
            ModelError: With the remedy.
        """
        for _, each in caches_among(args, kwargs):
            seen = self._seen.setdefault(each, set())
            if number in seen or each.get_seq_length(cache_index(self._layers[number]) or 0) > 0:
                raise ModelError(
                    f"Layer {number} got a key-value cache of an earlier call or of a prefix, and "
                    "slices along the tokens have their own. Call the model without the cache."
                )
            seen.add(number)

    def _try_here(
        self, call: LayerCall, hidden: Tensor, run: Callable[..., Any], slices: Sequence[Slice]
    ) -> None:
        layer = self._layers[call.layer_index]
        first = _tried_part(slices)
        with ExitStack() as stack:
            stack.enter_context(forked_generators())
            stack.enter_context(on_trial(layer))
            cut = first.cut_call(call, layer, has_cache=False)
            answer = tried_in_slices(layer, cut, first.cut(hidden), run)
        kind = hidden.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._judge(call.layer_index, answer, [hidden.dtype, autocast])


def _refuse_counted(spread: Tensor, counted: Tensor) -> None:
    """Refuse a token in the loss that attends to all tokens alike.

    Args:
        spread: Which of the first tokens attend so, of the shape (samples, tokens).
        counted: Which tokens count in the loss, of such a shape.
    """
    if bool((counted[:, : spread.shape[1]] & spread).any()):
        raise BatchError(
            "The loss counts a token from which the attention mask hides all tokens, as a window "
            "does for padding on the right. Attention then takes the mean of all tokens, and "
            f"slices lack later ones. Set the labels of padding to -100. {REMEDY}"
        )


def _with_shifted_labels(request: Request) -> Request:
    """The hand-over with labels that may be cut, if it ends with the loss."""
    around = request.surroundings
    if not around.has_loss:
        return request
    loss = shift_loss(around.calls[-1], request.hidden.shape[1])
    return Request(request.hidden, replace(around, calls=[*around.calls[:-1], loss]))


def _tried_part(slices: Sequence[Slice]) -> Slice:
    """The first two slices as one, up to a length."""
    return Slice(0, min(slices[1].end, _MOST_TRIED), slices[0].num_tokens)


def _joined(results: Sequence[Any], number: int) -> Any:
    """The result of a layer for all slices.

    Raises:
        BatchError: If it is more than hidden states.
    """
    firsts = [each[0] if type(each) is tuple else each for each in results]
    rest = [item for each in results if type(each) is tuple for item in each[1:]]
    if any(item is not None for item in rest) or not all(isinstance(t, Tensor) for t in firsts):
        raise BatchError(
            f"Layer {number} returns more than hidden states, which slices along the tokens do not "
            f"support: leave out `output_attentions`, or load the model with "
            f"attn_implementation='sdpa'. {REMEDY}"
        )
    hidden = torch.cat(firsts, 1)
    return (hidden, *results[0][1:]) if type(results[0]) is tuple else hidden
