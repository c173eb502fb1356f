"""The twin test: each layer on a worker answers for one micro-batch, and so does the layer here.

The layer here is the hollow one, with its class, its attributes and everything read by its code.
While it answers, it has its weights, sent by one worker, layer by layer: this process need not hold
the model. Its input is the input of the worker's layer, so a difference of an earlier layer does
not add to its own.

Of like layers on one process, one answers for all where their weights are many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from ..devices.device import forked_generators
from ..errors import ModelError, WorkerError
from ..model.attributes import unchanged
from ..model.hollow_checks import warn_of_changes_outside
from ..model.layer_call import LayerCall
from ..model.layer_code import LoadedCode
from ..model.layers import LOGITS_LAYER, LOSS_LAYER, describe_layer
from ..model.outer_state import OuterContent, OuterState
from ..model.override import own_forward
from ..model.tensors import filled, named_tensors, stored_bytes, stored_in_four_bits
from ..pipeline.handover import Request, received
from ..pipeline.layer_runs import on_trial
from ..pipeline.microbatch import CheckFirstBatch
from ..pipeline.random_numbers import FIRST_TRIAL, PythonStreams, seed_action, seed_elsewhere
from ..pipeline.rule import Key
from ..pipeline.tolerance import Rounding, end_or_warn
from ..pipeline.twin import (
    TwinAnswer,
    TwinDifference,
    answer_of,
    difference_of,
    kind_of,
    trained_names,
)
from ..protocol.tensor_bytes import DTYPES
from .member import Member
from .parts import NoTwins

if TYPE_CHECKING:
    from .steps import RemoteStages

# All layers answer as long as their weights and inputs together are fewer bytes. Beyond this size,
# one of each kind on each process answers.
_MOST_BYTES = 2**28
# Attributes that number a layer.
_NUMBERS = ("idx", "index", "layer_id", "number")


class _Place(NamedTuple):
    """A stage on one worker, in training or in evaluation."""

    stage: int
    session: str
    is_training: bool

    def kind_of(self, layer: nn.Module) -> tuple[Any, ...]:
        """Layers of one kind here compute alike, each with its weights."""
        return self.session, self.is_training, _form_of(layer)


class _HandOver(NamedTuple):
    """Hidden states on their way through answering workers.

    Args:
        key: The micro-batch, and a visit of its own in the step.
        request: The hidden states and the calls of the layers.
        is_whole: Whether it is a piece of a whole batch; only workers run the layers then.
        keeps_modes: Whether layers answer in the modes of their calls, or in evaluation mode.
    """

    key: Key
    request: Request
    is_whole: bool
    keeps_modes: bool = True

    def call_of(self, number: int) -> LayerCall:
        """The call of a layer."""
        calls = self.request.surroundings.calls
        return next(call for call in calls if call.layer_index == number)

    @property
    def without_modes(self) -> _HandOver:
        """The hand-over in evaluation mode, as another visit."""
        key = self.key._replace(visit=self.key.visit + FIRST_TRIAL)
        return self._replace(key=key, keeps_modes=False)


class Twins(NoTwins):
    """Compares layers on workers with the layers of this process.

    Args:
        layers: The layers on workers by their numbers, hollow when they are compared.
        kept: The numbers of the layers with their weights here.
        stages: Runs them on the workers.
        seed: Start of all random numbers of the run.
        mode: The answer to a difference.
        told: Whether parameters train, as workers know it: they learn of a step's freezes when it
            hands over with a backward.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        kept: Collection[int],
        stages: RemoteStages,
        seed: int,
        mode: CheckFirstBatch,
        told: Callable[[], Mapping[Tensor, bool]] = dict,
    ) -> None:
        self._layers = layers
        self._kept = frozenset(kept)
        self._remote = stages.layers
        self._stages = stages
        self._seed_of_run = seed
        self._mode = mode
        self._told = told
        self._code = LoadedCode(layers if mode != "off" else {})
        # The stages asked for and the stages compared, by session, in training or evaluation.
        self._asked: set[_Place] = set()
        self._passed: set[_Place] = set()
        self._answered: set[tuple[Any, ...]] = set()
        # The one layer to ask for again, where it was compared before.
        self._again: dict[_Place, int] = {}
        self._is_later = False
        self._num_bytes = 0
        self._problems: list[str] = []

    @override
    def ask_again(self, number: int) -> None:
        stages = self._remote.holdings.stages
        self._is_later = True
        holding = {
            place for place in self._asked | self._passed if number in stages[place.stage].layers
        }
        self._again = dict.fromkeys(holding & self._passed, number)
        self._asked -= holding
        self._passed -= holding

    @override
    def wanted(
        self, num_microbatches: int, stays: Collection[int] = (), request: Request | None = None
    ) -> list[int]:
        if self._mode == "off":
            return []
        found = []
        for index in range(num_microbatches):
            way = {*self._places(index, index in stays, request).values()}
            if not way <= self._asked:
                found.append(index)
                self._asked |= way
        return found

    def _places(self, index: int, is_whole: bool, request: Request | None) -> dict[int, _Place]:
        """The places on a micro-batch's way, by the numbers of stages."""
        holdings = self._remote.holdings
        around = None if request is None else request.surroundings
        is_training = around is None or any(call.training for call in around.calls)
        called = None if around is None else {call.layer_index for call in around.calls}
        return {
            number: _Place(number, worker.session, is_training)
            for number, worker in holdings.way(index, is_whole).items()
            if called is None or not called.isdisjoint(holdings.stages[number].layers)
        }

    @override
    def compare(self, key: Key, request: Request, is_whole: bool) -> None:
        if self._mode == "off" or request.surroundings.has_cache:
            return
        places = self._places(key.microbatch, is_whole, request)
        new = {number: place for number, place in places.items() if place not in self._passed}
        self._passed.update(new.values())
        chosen = self._chosen(new, request)
        if not chosen:
            return
        way = self._remote.holdings.way(key.microbatch, is_whole)
        found = {number: way[stage] for number, stage in chosen.items()}
        # Devices of different kinds draw other random numbers, so layers that draw and differ
        # answer once more in evaluation mode.
        hand_over = _HandOver(key, request, is_whole)
        drawing = self._compared(hand_over, found)
        left = self._compared(hand_over.without_modes, drawing) if drawing else {}
        for number, worker in drawing.items():
            how = (
                "was not checked: it draws random numbers, in evaluation mode too"
                if number in left
                else "was checked in evaluation mode alone: otherwise it draws random numbers, and "
                "gave other results there"
            )
            rank_zero_info(
                f"whether {describe_layer(number)} computes on {worker.name} what it computes here "
                f"{how}"
            )

    def _compared(self, hand_over: _HandOver, chosen: Mapping[int, Member]) -> dict[int, Member]:
        """Compare layers and note differences; returns the differing layers that draw at random."""
        there, drawing = self._answers_there(hand_over, chosen), {}
        for number, worker in chosen.items():
            try:
                here = self._answer_here(hand_over, number, there[number])
                difference = self._apart(hand_over, number, here, there[number])
                if difference is None or self._rounds_as_there(hand_over, number, there[number]):
                    continue
                other = self._answer_here(hand_over, number, there[number], draws=1)
                if self._apart(hand_over, number, here, other) is None:
                    self._problems.append(self._said(number, worker, difference))
                else:
                    drawing[number] = worker
            except WorkerError:
                raise
            except Exception as error:
                # It may need a kernel, or memory, found only on its worker.
                rank_zero_info(
                    f"whether {describe_layer(number)} computes on {worker.name} what it computes "
                    f"here was not checked, since it does not run here: {error}"
                )
        return drawing

    def _chosen(self, places: Mapping[int, _Place], request: Request) -> dict[int, int]:
        """The answering layers, each with the number of its stage."""
        called = {call.layer_index for call in request.surroundings.calls}
        found: dict[int, int] = {}
        num_left_out = 0
        layers = {n: self._remote.holdings.stages[n].layers for n in places}
        again = {stage: self._again.pop(place, None) for stage, place in places.items()}
        # The logits into the loss are many, and its code is compared by its digest.
        called.discard(LOSS_LAYER)
        for stage, number in ((s, n) for s, own in layers.items() for n in own if n in called):
            if again[stage] is not None:
                if number == again[stage]:
                    found[number] = stage
                continue
            num_bytes = stored_bytes({number: self._layers[number]}) + 2 * request.hidden.nbytes
            if number == LOGITS_LAYER and num_bytes + self._logits_bytes(request) > _MOST_BYTES:
                rank_zero_info(
                    "whether the head computes on its worker what it computes here was not "
                    "checked: its weights and logits are too many for that"
                )
                continue
            kind = places[stage].kind_of(self._layers[number])
            if kind in self._answered and self._num_bytes + num_bytes > _MOST_BYTES:
                num_left_out += 1
                continue
            self._answered.add(kind)
            self._num_bytes += num_bytes
            found[number] = stage
        if num_left_out:
            rank_zero_info(
                f"{num_left_out} of {num_left_out + len(found)} layers on workers were not "
                "compared with those here: layers that are like them were"
            )
        return found

    def _logits_bytes(self, request: Request) -> int:
        """The bytes of the logits of a hand-over, and of their gradients."""
        hidden = request.hidden
        shape = hidden.shape[:-1] if hidden.is_floating_point() else hidden.shape
        num_rows = self._layers[LOGITS_LAYER].get_parameter("weight").shape[0]
        return 2 * shape.numel() * num_rows * torch.float32.itemsize

    def _answers_there(
        self, hand_over: _HandOver, chosen: Mapping[int, Member]
    ) -> dict[int, TwinAnswer]:
        """The answers of the workers."""
        key, request, is_whole, keeps_modes = hand_over
        around = replace(
            request.surroundings,
            collect=[kind_of(number) for number in chosen],
            is_trial=True,
            keeps_modes=keeps_modes,
            grad_enabled=False,
        )
        self._stages.send_forward(key, request.hidden.detach(), around, is_whole)
        found = received(self._stages, key)
        found.land()
        answers = {}
        for number, worker in chosen.items():
            sent = [tensor for kind, tensor in found.outputs if kind == kind_of(number)]
            with self._remote.connections.blaming(worker):
                answers[number] = TwinAnswer.decoded(sent)
        return answers

    def _answer_here(
        self,
        hand_over: _HandOver,
        number: int,
        there: TwinAnswer,
        draws: int = 0,
        stage_dtype: torch.dtype | None = None,
    ) -> TwinAnswer:
        """The answer of the layer in this process to the input of the worker's layer.

        Warns of its changes outside of itself: the worker's layer makes them there.

        Args:
            hand_over: Has the call.
            number: The layer.
            there: The worker's answer.
            draws: 0 for the worker's random numbers; another number for others.
            stage_dtype: Compute in the dtype of its stage; None for this process's own.
        """
        request, keeps_modes = hand_over.request, hand_over.keeps_modes
        layer, call = self._layers[number], hand_over.call_of(number)
        device, dtype = request.hidden.device, request.surroundings.autocast_dtype
        given = [tensor.to(device) for tensor in there.given]
        if dtype is None and stage_dtype is not None:
            call = call.in_dtype(request.hidden.dtype, stage_dtype)
        elif dtype is None and request.hidden.is_floating_point():
            # Outside of its stage a layer does not compute in the stage's dtype.
            given = [t.to(request.hidden.dtype) if t.is_floating_point() else t for t in given]
        dtype = stage_dtype or dtype
        hidden, *along = given
        call = call.with_carried(dict(zip(call.carried, along, strict=True)))
        with ExitStack() as stack:
            stack.enter_context(unchanged(layer.modules()))
            outside = OuterContent(OuterState(layer.modules()))
            stack.callback(lambda: warn_of_changes_outside(number, outside.restore()))
            if number not in self._kept:
                contents = self._remote.fetch([name for name, _ in named_tensors({number: layer})])
                trained = self._trained_names(number)
                stack.enter_context(filled({number: layer}, contents, device))
                for name, parameter in layer.named_parameters():
                    if parameter.is_floating_point():
                        parameter.requires_grad_(name in trained)
            call.set_modes(dict(layer.named_modules()))
            stack.enter_context(on_trial(layer, keeps_modes))
            if dtype not in (None, torch.float32):
                # Its cache would keep the weights of all layers.
                stack.enter_context(torch.autocast(device.type, dtype, cache_enabled=False))
            stack.enter_context(PythonStreams())
            stack.enter_context(forked_generators())
            self._seed(hand_over, number, draws)
            return answer_of(layer, own_forward(layer), call, hidden, along)[1]

    def _seed(self, hand_over: _HandOver, number: int, draws: int) -> None:
        """Seed the random numbers of the worker's layer, or others."""
        key, first = hand_over.key, self._stages.first_microbatch
        visit = key.visit % FIRST_TRIAL if hand_over.keeps_modes else key.visit
        place = self._stages.dropout_step, number, key.microbatch - first, visit + draws
        seed_action(self._seed_of_run, *place)
        seed_elsewhere(self._seed_of_run, *place)

    def _apart(
        self, hand_over: _HandOver, number: int, one: TwinAnswer, other: TwinAnswer
    ) -> TwinDifference | None:
        rounding = self._rounding(hand_over.request, number)
        return difference_of(one, other, self._trained_names(number), rounding)

    def _rounds_as_there(self, hand_over: _HandOver, number: int, there: TwinAnswer) -> bool:
        """Whether the layer here has the worker's answer once it computes in its stage's dtype.

        The roundings of a layer's operations may add up to more than that of one.
        """
        dtype = next(iter(self._stage_dtypes(number)), None)
        if dtype is None or not all(rows.isfinite().all() for rows in there.results):
            return False
        with suppress(RuntimeError):  # this device may lack the dtype
            here = self._answer_here(hand_over, number, there, stage_dtype=dtype)
            return self._apart(hand_over, number, here, there) is None
        return False

    def _stage_dtypes(self, number: int) -> list[torch.dtype]:
        """The dtypes of the stages with a layer, if they have their own."""
        stages = self._remote.holdings.stages.values()
        return [DTYPES[s.dtype] for s in stages if number in s.layers and s.dtype is not None]

    def _trained_names(self, number: int) -> list[str]:
        """The names of a layer's parameters trained on its workers."""
        layer = self._layers[number]
        if number in self._kept:
            return trained_names(layer)
        told, named = self._told(), layer.named_parameters()
        return sorted(name for name, each in named if told.get(each, each.requires_grad))

    def _rounding(self, request: Request, number: int) -> float:
        """The relative difference of a layer's results explained by rounding."""
        layer = {number: self._layers[number]}
        dtypes = [request.hidden.dtype, request.surroundings.autocast_dtype or torch.float32]
        dtypes += self._stage_dtypes(number)
        tensors = [*named_tensors(layer)]
        for name, tensor in tensors:
            is_weight = isinstance(tensor, nn.Parameter)
            if is_weight and (stored_in_four_bits(layer, name) or not tensor.is_floating_point()):
                dtypes.append(torch.bfloat16)  # packed weights are multiplied in half precision
        if torch.get_float32_matmul_precision() != "highest":
            dtypes.append(torch.float16)  # about as coarse
        return Rounding.of((tensor for _, tensor in tensors), dtypes).of_hidden(1)

    def _said(self, number: int, worker: Member, difference: TwinDifference) -> str:
        layer = self._layers[number]
        return (
            f"{describe_layer(number).capitalize()} ({type(layer).__name__}) computes something "
            f"else on {worker.name} than here, of the same input with the same weights: "
            f"{difference}. {self._code.why_not_elsewhere(number)} Keep it in an attribute or a "
            "buffer of the layers, set it where the worker starts too, or keep these layers with "
            "the coordinator."
        )

    @override
    def settle(self, is_first: bool = True) -> None:
        problems, self._problems = self._problems, []
        if not problems:
            return
        more = f" So do {len(problems) - 1} other layers." if len(problems) > 1 else ""
        ends = is_first and not self._is_later
        end_or_warn(f"{problems[0]}{more}", self._mode, ends=ends, error=ModelError)


def _form_of(layer: nn.Module) -> tuple[Any, ...]:
    """The common facts of layers of one kind: classes, plain attributes, forms of tensors."""
    modules = layer.named_modules()
    inside = tuple(
        (path, type(module), tuple(_plain_attributes(module))) for path, module in modules
    )
    tensors = named_tensors({0: layer})
    return inside, tuple((n, t.shape, t.dtype, t.requires_grad) for n, t in tensors)


def _plain_attributes(module: nn.Module) -> list[tuple[str, str]]:
    return [
        (name, repr(value) if isinstance(value, (bool, int, float, str)) else "")
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and not name.endswith(_NUMBERS)
    ]
