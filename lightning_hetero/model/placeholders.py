"""What stands for hidden states that are on a worker, in the code between two layers there.

    layer 4 ─▶ hidden states behind layer 4 ─▶ layer 5
    away       handed on, never computed with  away

A model may hand them from layer to layer and look at their form. Whatever else it does with them,
now or after the forward, would give numbers that are not theirs, and is refused.

Parameters and buffers of layers on workers: their form is here, and their content is not.

Torch itself lets much pass that has no effect: `average.add_(parameter)` adds nothing, and
`parameter.data.clamp_(...)` changes nothing, if the parameter is on ``meta``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from typing_extensions import Self

from ..errors import ModelError
from .layers import EMBEDDING_LAYER

_CASTS = {
    Tensor.float: torch.float32,
    Tensor.double: torch.float64,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}


def _getters(*names: str) -> set[Callable[..., Any]]:
    """What torch calls where a property of a tensor is read, if it has it in this version."""
    return {getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)}


# These are answered by a tensor on `meta`.
_OF_FORM: dict[str, set[Callable[..., Any]]] = {
    "shape": {
        *_getters("shape", "ndim"),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, torch.numel),
    },
    "dtype": {
        *_getters("dtype", "itemsize"),
        *(Tensor.element_size, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed),
        *(torch.is_floating_point, torch.is_complex, torch.is_signed),
    },
    "requires_grad": _getters("requires_grad"),
}
# These are answered by an empty tensor on the device.
_OF_PLACE = {
    *_getters("device", "is_cuda", "is_cpu", "is_xpu", "is_mps", "is_meta", "layout", "is_sparse"),
    *_getters("is_nested", "is_quantized"),
    *(Tensor.get_device, Tensor.is_inference),
}


@dataclass(frozen=True)
class Form:
    """What is known of hidden states that are not here.

    Args:
        on_meta: A tensor with their shape, dtype and ``requires_grad``.
        uncertain: Which of ``"shape"`` and ``"dtype"`` may be others.
    """

    on_meta: Tensor
    uncertain: frozenset[str] = frozenset()


class Assumptions:
    """What the model was told of hidden states of one forward without being certain.

    It is checked with the hidden states that come back: if layers change neither shape nor dtype,
    both are the same everywhere.
    """

    def __init__(self) -> None:
        self._made: list[tuple[str, int, Any]] = []
        self._returned: Tensor | None = None

    def make(self, what: str, number: int, value: Any) -> None:
        """The model was told the shape or dtype behind a layer.

        Raises:
            ModelError: If what has come back has another.
        """
        self._made.append((what, number, value))
        self._check()

    def settle(self, returned: Tensor) -> None:
        """The hidden states have come back.

        Raises:
            ModelError: If they are others than the model was told.
        """
        self._returned = torch.empty_like(returned, device="meta")
        self._check()

    def _check(self) -> None:
        for what, number, value in self._made if self._returned is not None else ():
            found = getattr(self._returned, what)
            if found != value:
                raise ModelError(
                    f"The model looked at the {what} of the hidden states behind layer {number} "
                    f"and was told {value}, but it cannot be known here, and {found} came back "
                    f"from the workers; {_remedy(number)}."
                )


class HiddenStatesAway(Tensor):
    """Hidden states behind a layer on a worker, without content.

    Args:
        number: The layer's.
        device: Where they would be.
        form: Finds out their form; called when somebody wants to know it.
        assumptions: Are told what is not certain of the form.
    """

    number: int
    _find_form: Callable[[], Form]
    _assumptions: Assumptions
    _place: torch.device

    def __new__(
        cls,
        number: int,
        device: torch.device,
        form: Callable[[], Form],
        assumptions: Assumptions,
    ) -> Self:
        # Not one without storage: `other.data = it` would leave that one without any.
        nothing = torch.empty(0, device="meta")
        made: Self = Tensor._make_subclass(cls, nothing)
        made.number, made._find_form, made._assumptions = number, cache(form), assumptions
        made._place = device
        return made

    def on_its_device(self) -> Tensor:
        """Nothing, where they would be."""
        return torch.empty(0, device=self._place)

    def form(self) -> Form:
        """Their form, for whoever does not rely on it."""
        return self._find_form()

    def told(self, what: str) -> Tensor:
        """A tensor on ``meta`` with their shape, their dtype or both, as the model is told them."""
        form = self.form()
        if what in form.uncertain:
            self._assumptions.make(what, self.number, getattr(form.on_meta, what))
        return form.on_meta

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        states, *others = args or (None,)
        if isinstance(states, HiddenStatesAway):
            for what, functions in _OF_FORM.items():
                if function in functions:
                    return function(states.told(what), *others, **kwargs)
            if function in _OF_PLACE:
                return function(states.on_its_device(), *others, **kwargs)
            if function is Tensor.__hash__:
                return id(states)
            if _changes_nothing(function, states, others, kwargs):
                return states
        return _refuse(_name_of(function), (args, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        operation: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        # What is written in C++ comes here past `__torch_function__`.
        _refuse(f"`{operation}`", (args, kwargs))


def _changes_nothing(
    function: Callable[..., Any],
    states: HiddenStatesAway,
    others: list[Any],
    kwargs: Mapping[str, Any],
) -> bool:
    """Whether torch would return the very same tensor, or one that differs in its strides only."""
    if function is Tensor.to:
        return _is_there(states, others, kwargs)
    if function in (dropout, torch.dropout):
        given = inspect.signature(dropout).bind(states, *others, **kwargs)
        given.apply_defaults()
        return not given.arguments["training"] or given.arguments["p"] == 0
    if others or kwargs:
        return False
    if function in _CASTS:
        return states.told("dtype").dtype == _CASTS[function]
    others_that_may = {Tensor.contiguous: True, Tensor.cpu: states.device.type == "cpu"}
    return others_that_may.get(function, False)


def _is_there(states: HiddenStatesAway, others: list[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `Tensor.to` with these arguments would have nothing to do."""
    given = (*others, *kwargs.values())
    if kwargs.get("copy") or len(others) > 3 or any(isinstance(value, Tensor) for value in given):
        return False
    named = {name: value for name, value in kwargs.items() if name != "copy"}
    parsed: tuple[Any, ...] = torch._C._nn._parse_to(*others, **named)
    device, dtype, _, memory_format = parsed
    # "cuda" is the current one of several.
    moves = device is not None and torch.empty(0, device=device).device != states.device
    is_same_dtype = dtype in (None, states.told("dtype").dtype)
    return is_same_dtype and not moves and memory_format is None


def is_away(value: Any) -> bool:
    """Whether it stands for hidden states on a worker."""
    return isinstance(value, HiddenStatesAway)


def refuse_away(what: str, given: Any) -> None:
    """Refuse arguments that hold hidden states on a worker, at any depth.

    Raises:
        ModelError: With what wants them, and what to do.
    """
    for number in _numbers(given):
        if number == EMBEDDING_LAYER:
            raise ModelError(
                f"{what} wants what comes from the input embedding, which is on a worker, and of "
                "which only shape, dtype and device are known here; take `embedding: true` out of "
                "the plan."
            )
        raise ModelError(
            f"{what} wants the hidden states behind layer {number}, which are on a worker, and of "
            f"which only shape, dtype and device are known here; {_remedy(number)}."
        )


def _remedy(number: int) -> str:
    return (
        f"to have them here, give the coordinator layers 0 to {number}, or all layers from "
        f"{number + 1} on, in the plan"
    )


def _numbers(tree: Any) -> Iterator[int]:
    if isinstance(tree, HiddenStatesAway):
        yield tree.number
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _numbers(item)
    elif isinstance(tree, Mapping):
        yield from _numbers(list(tree.values()))


def _refuse(what: str, given: Any) -> NoReturn:
    refuse_away(what, given)
    raise ModelError(f"{what} wants hidden states that are on a worker and not here.")


def _name_of(function: Any) -> str:
    """A function in words; the property where torch gives the getter of one."""
    if torch._C._current_graph_task_id() != -1:
        return "A backward that calls layers again (checkpointing without `use_reentrant=False`)"
    if function is Tensor.view_as:
        # Torch calls it for what such a function returns as it got it.
        return "A custom autograd function (checkpointing without `use_reentrant=False` is one)"
    name = str(getattr(function, "__name__", function))
    owner = getattr(function, "__self__", None)
    is_property = name in ("__get__", "__set__")
    return f"`{getattr(owner, '__name__', name) if is_property else name}`"


_SENTENCE = (
    "wants the content of a parameter or buffer of a layer that lives on a worker, which is not "
    "here; read it with `state_dict()` and write it with `load_state_dict()`, average weights with "
    "`lightning_hetero.callbacks.StageWeightAveraging`, or keep the layer with the coordinator."
)
_FLAGS = frozenset({"requires_grad_", "retain_grad"})
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_REFUSED = {f"__i{name}__" for name in _OPERATORS} | {"__setitem__", "data ="}


class _Away:
    """What refuses to be computed with together with tensors that are here, and to be changed."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = _name_of_operation(function)
        with torch._C.DisableTorchFunctionSubclass():
            if name == "__reduce_ex__":
                raise ModelError(
                    "A parameter or buffer of a layer that lives on a worker cannot be copied or "
                    "pickled; do it before `fit` or after it, or use `module.state_dict()`."
                )
            if _is_loading(name, args):
                return function(*args, **kwargs)
            if _changes(name, kwargs) or any(not t.is_meta for t in _tensors((args, kwargs))):
                raise ModelError(f"`{name}` {_SENTENCE}")
            try:
                return _marked(function(*args, **kwargs))
            except (RuntimeError, NotImplementedError) as error:
                raise ModelError(f"`{name}` {_SENTENCE}") from error


class TensorAway(_Away, Tensor):
    """A buffer of a layer on a worker, or what a parameter there gave."""


class ParameterAway(_Away, nn.Parameter):
    """A parameter of a layer on a worker."""


_KINDS: dict[type, type] = {Tensor: TensorAway, nn.Parameter: ParameterAway}
_BACK = {away: kind for kind, away in _KINDS.items()}


def mark_as_away(tensors: Iterable[Tensor]) -> None:
    """Let tensors on ``meta`` refuse what would have no effect; each stays the same object."""
    for tensor in tensors:
        if type(tensor) in _KINDS:
            tensor.__class__ = _KINDS[type(tensor)]


def unmark(tensors: Iterable[Tensor]) -> None:
    """The end of `mark_as_away`."""
    for tensor in tensors:
        if type(tensor) in _BACK:
            tensor.__class__ = _BACK[type(tensor)]


def _name_of_operation(function: Any) -> str:
    """A function's name; for a property that is set, the property's and the sign."""
    name = str(getattr(function, "__name__", function))
    return f"{function.__self__.__name__} =" if name == "__set__" else name


def _is_loading(name: str, args: tuple[Any, ...]) -> bool:
    """Whether ``load_state_dict`` copies what stands for content that went to the worker, or what
    stays as it is."""
    if name != "copy_" or len(args) < 2:
        return False
    return args[0] is args[1] or (type(args[1]) is Tensor and args[1].is_meta)


def _changes(name: str, kwargs: Mapping[str, Any]) -> bool:
    is_in_place = name.endswith("_") and not name.endswith("__") and name not in _FLAGS
    return is_in_place or name in _REFUSED or kwargs.get("out") is not None


def _marked(result: Any) -> Any:
    """What a tensor away gives is away too."""
    if isinstance(result, Tensor):
        if result.is_meta:
            mark_as_away([result])
        return result
    if type(result) in (tuple, list):
        return type(result)(_marked(value) for value in result)
    return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, Mapping):
        yield from _tensors(list(tree.values()))
