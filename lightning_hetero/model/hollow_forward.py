"""Records of a forward through hollow layers, and where runs of these layers begin and end.

Each thread records for itself. Tensors carried with the hidden states get their names here.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError
from .argument_changes import GivenTensors, Modes
from .carried_tensors import ENTERED, Arithmetic, Carried, Wanted, computed, entering
from .layer_call import LayerCall
from .layers import DecoderLayer, is_end
from .partial_layers import is_second_half
from .placeholders import (
    Assumptions,
    Form,
    HiddenStatesAway,
    Once,
    PlaceholderContent,
    mapped,
    refuse_away,
)
from .tensors import may_have_gradient


class Records(threading.local):
    """The records of a run of hollow layers, by the forward in the present thread.

    Attributes:
        calls: The calls of the layers so far; None outside of the run.
        sent: The hidden states before the first layer.
        entering: The other tensors that enter the first layer, by name.
        along: A function for the form of each carried tensor, by name.
        assumptions: Uncertain answers to the model about placeholders.
        away: The contents of this forward's placeholders, as far as the model still has them.
    """

    calls: Any = None
    sent: Any = None
    entering: Mapping[str, Tensor] = MappingProxyType({})
    along: Mapping[str, Callable[[], Form]] = MappingProxyType({})
    assumptions: Any = None
    away: Sequence[weakref.ref[PlaceholderContent]] = ()
    # The model's own tensors for workers.
    _given: GivenTensors = GivenTensors()
    _modes: Any = None

    def begin(self, sent: Tensor) -> None:
        """Begin a run with these hidden states."""
        self.calls, self.sent = [], sent
        self.entering, self.along = {}, {ENTERED: lambda: Form(sent)}
        self.away, self._given = (), GivenTensors()
        self._modes = Modes.here(sent.device.type)
        self.assumptions = Assumptions(self.compute)

    def forget(self) -> None:
        """Drop the records."""
        self.calls = self.sent = None
        self.entering, self.along = MappingProxyType({}), MappingProxyType({})
        self.away, self._given = (), GivenTensors()

    def is_behind(self, number: int, value: Any) -> bool:
        """Whether a value is a placeholder for the output of a layer of this run."""
        return self.is_ours(value) and value.number == number

    def is_ours(self, value: Any) -> bool:
        """Whether a value is a placeholder of this forward."""
        return isinstance(value, HiddenStatesAway) and value.is_of(self.assumptions)

    def note(self, states: HiddenStatesAway) -> HiddenStatesAway:
        """Note a placeholder for the model."""
        self.away = (*self.away, weakref.ref(states.content))
        self.along = {**self.along, states.name: states.form}
        return states

    def still_there(self, given: Sequence[Tensor]) -> list[PlaceholderContent]:
        """The tensors that the model may compute with after the last layer: hidden states given to
        layers and results of arithmetic, as far as the model still has them.

        Args:
            given: The inputs of the last layer. Nearly every model still has them; it uses them
                again only if it has done so with inputs of earlier layers, or still has more.
        """
        calls: list[LayerCall] = self.calls
        results = {step.name for call in calls for step in call.arithmetic}
        states = {ENTERED, *results, *(call.name_behind for call in calls)}
        found = (reference() for reference in self.away)
        there = [each for each in found if each is not None and each.name in states]
        if any(name in states - call.made for call in calls for name in call.operands):
            return there
        passed = [each.content for each in given if isinstance(each, HiddenStatesAway)]
        return there if any(content not in passed for content in there) else []

    def compute(self, wanted: Wanted) -> HiddenStatesAway:
        """Have arithmetic done after the layer called last.

        Raises:
            ModelError: If it cannot be done there.
        """
        if not self.calls or not all(map(self._is_known, wanted.operands)):
            refuse_away(f"`{wanted.function}`", wanted.operands)
        if torch.is_grad_enabled() != self._modes.gradients:
            raise ModelError(
                f"`{wanted.function}` is called under another grad mode than the layers around it, "
                "which are on workers. Take `torch.no_grad()` away, or keep the layers with the "
                "coordinator."
            )
        call: LayerCall = self.calls[-1]
        if wanted.is_in_place and not self.is_behind(call.layer_index, wanted.operands[0]):
            raise ModelError(
                f"`{wanted.function}` changes a tensor in place, with hidden states that are on a "
                f"worker. Only what layer {call.layer_index} has returned can be changed so there; "
                "write `x = x + y` for `x += y`, or keep the layers with the coordinator."
            )
        name = computed(call.layer_index, len(call.arithmetic))
        operands = tuple(self._operand(each, wanted) for each in wanted.operands)
        step = Arithmetic(name, wanted.function, operands, wanted.is_in_place)
        self.calls[-1] = replace(call, arithmetic=(*call.arithmetic, step))
        forms = {str(each): self.along[each] for each in operands if isinstance(each, Carried)}
        find = Once(partial(_form_of_result, step, forms, torch.is_grad_enabled()))
        device = self.sent.device
        made = HiddenStatesAway(call.layer_index, device, find, self.assumptions)
        made.content.name = name
        return self.note(made)

    def name_of(self, hidden: Tensor) -> str | None:
        """The name of hidden states, if they are carried."""
        if hidden is self.sent:
            return ENTERED
        return hidden.name if self.is_ours(hidden) else None  # type: ignore[attr-defined]

    def note_call(
        self, number: int, tensors: Sequence[Tensor], parameters: Iterable[Tensor]
    ) -> None:
        """Note the tensors of a layer's call, and whether its parameters train.

        Raises:
            ModelError: If it is called in another mode of torch than the layers before it.
        """
        Modes.here(self.sent.device.type).check(self._modes, number)
        self._given.note(tensors, number)
        self._given.note_flags(number, parameters)

    def check_given(self) -> None:
        """Refuse a change of tensors given to layers, or used in arithmetic.

        Raises:
            ModelError: With the form of the tensor.
        """
        self._given.check()

    def _is_known(self, operand: Any) -> bool:
        if isinstance(operand, HiddenStatesAway):
            return self.is_ours(operand)
        return not isinstance(operand, Tensor) or not operand.is_meta

    def _operand(self, operand: Any, wanted: Wanted) -> Any:
        """An operand as it goes to a worker."""
        if isinstance(operand, HiddenStatesAway):
            return Carried(operand.name)
        if operand is self.sent:
            return Carried(ENTERED)
        if not isinstance(operand, Tensor):
            return operand
        self._given.note([operand], None)
        if operand.ndim and operand.ndim != self.sent.ndim:
            # Its dimensions meet the last ones of the others.
            away = next(each for each in wanted.operands if isinstance(each, HiddenStatesAway))
            missing = away.told("shape").ndim - operand.ndim
            operand = operand.reshape((1,) * missing + tuple(operand.shape))
        return self._carried(operand)

    def carry(self, tree: Any) -> Any:
        """A call's arguments with `Carried` in the place of carried tensors."""
        return mapped(tree, Tensor, self._carried)

    def goes_along(self, tensor: Tensor) -> bool:
        """Whether a tensor among a call's arguments goes along with the hidden states."""
        if isinstance(tensor, HiddenStatesAway):
            return tensor.is_of(self.assumptions)
        return torch.is_grad_enabled() and tensor.requires_grad

    def _carried(self, tensor: Tensor) -> Tensor | Carried:
        if not self.goes_along(tensor):
            return tensor
        if isinstance(tensor, HiddenStatesAway):
            return Carried(tensor.name)
        for name, other in ((ENTERED, self.sent), *self.entering.items()):
            if other is tensor:
                return Carried(name)
        if tensor.is_meta:
            raise ModelError(
                "A layer on a worker gets a parameter of another one as an argument, and the "
                "content of that is not here. Keep both layers with the coordinator."
            )
        name = entering(1 + len(self.entering))
        self.entering = {**self.entering, name: tensor}
        self.along = {**self.along, name: lambda: Form(tensor)}
        return Carried(name)

    def forms(self, call: LayerCall) -> Callable[[], dict[str, Tensor]]:
        """A function that finds the forms of a layer's carried tensors on demand."""
        found = {name: self.along[name] for name in call.carried}
        return lambda: {name: form().on_meta for name, form in found.items()}


def _form_of_result(
    step: Arithmetic, forms: Mapping[str, Callable[[], Form]], grad_enabled: bool
) -> Form:
    """Find the form of the result of arithmetic by trying it on ``meta``."""
    found = {name: form() for name, form in forms.items()}
    on_meta = {name: form.on_meta.detach().to("meta") for name, form in found.items()}
    there = step._replace(operands=mapped(step.operands, Tensor, _to_meta))
    result = there.run(on_meta)
    trains = grad_enabled and any(form.on_meta.requires_grad for form in found.values())
    result = torch.empty_like(result, requires_grad=trains and may_have_gradient(result))
    return Form(result, frozenset().union(*(form.uncertain for form in found.values())))


def _to_meta(tensor: Tensor) -> Tensor:
    return tensor.detach().to("meta")


@dataclass(frozen=True)
class HollowSpan:
    """The layers hollow at present, in runs: the first layers of runs, the last ones, and the first
    ones with a cache."""

    firsts: frozenset[int]
    lasts: frozenset[int]
    firsts_with_cache: frozenset[int]

    @classmethod
    def of(cls, layers: Mapping[int, nn.Module], begins: Collection[int]) -> HollowSpan:
        """The span of layers; a run ends before each layer in ``begins``."""
        runs: list[list[int]] = []
        for number in sorted(layers):
            if not runs or number in begins:
                runs.append([])
            runs[-1].append(number)
        with_cache = (
            next((n for n in run if not is_end(n) and not is_second_half(layers[n])), None)
            for run in runs
        )
        return cls(
            frozenset(run[0] for run in runs),
            frozenset(run[-1] for run in runs),
            frozenset(number for number in with_cache if number is not None),
        )

    def last_of(self, number: int) -> int:
        """The last layer of the run of a layer."""
        return min(last for last in self.lasts if last >= number)


def list_begins(layers: Mapping[int, DecoderLayer]) -> set[int]:
    """The numbers of layers in another list than the layer before them."""
    pairs = zip(layers.items(), list(layers.items())[1:], strict=False)
    return {n for (_, before), (n, layer) in pairs if layer.list_index != before.list_index}
