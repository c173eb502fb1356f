"""Placeholders for tensors on a worker: their form is here, their content is not.

    layer 4 ─▶ hidden states after layer 4 ─▶ layer 5
    away       passed on, never computed with away

`HiddenStatesAway` stands for hidden states between two layers on workers. A model may pass them
from layer to layer, read their shape, dtype and device, and do the arithmetic of
`carried_tensors.py` with them: the result is another placeholder. The model's remaining
placeholders after the last layer come back together with its result.

`TensorAway` and `ParameterAway` are the classes of the parameters and buffers of layers on workers.
torch would ignore much use of them: ``average.add_(parameter)`` and ``parameter.data.clamp_(...)``
have no effect if the parameter is on ``meta``. `GradientAway` stands for the gradient of such a
parameter; a program may drop it.

Every other use would give wrong numbers without an error, so it raises a `ModelError`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import compress, repeat
from operator import attrgetter, not_
from typing import Any, Generic, NoReturn, TypeVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.functional import dropout
from typing_extensions import Self

from ..errors import ModelError
from ..plan import HEAD_LAYERS
from .carried_tensors import Wanted, returned, wanted_arithmetic
from .layers import EMBEDDING_LAYER, LOGITS_LAYER, describe_layer

Kind = TypeVar("Kind")
# The commonest arguments without tensors: to ask whether a value is a mapping takes long.
_PLAIN = frozenset({type(None), bool, int, float, str})
_CASTS = {
    Tensor.float: torch.float32,
    Tensor.double: torch.float64,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}


def _getters(*names: str) -> set[Callable[..., Any]]:
    """The functions by which torch reads properties of a tensor, as far as it has them."""
    return {getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)}


# A tensor on `meta` answers these.
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
_WHOLE = (slice(None), slice(0, None))
_RESHAPING = (Tensor.view, Tensor.reshape, torch.reshape)
# An empty tensor on the device answers these.
_OF_PLACE = {
    *_getters("device", "is_cuda", "is_cpu", "is_xpu", "is_mps", "is_meta", "layout", "is_sparse"),
    *_getters("is_nested", "is_quantized"),
    *(Tensor.get_device, Tensor.is_inference),
}


class Once(Generic[Kind]):
    """Finds something when it is first asked for, and keeps it.

    Each call of a layer makes two of them, and `functools.cache` takes ten times as long.
    """

    __slots__ = ("_find", "_found")

    def __init__(self, find: Callable[[], Kind]) -> None:
        self._find = find

    def __call__(self) -> Kind:
        if not hasattr(self, "_found"):
            self._found = self._find()
        return self._found


@dataclass(frozen=True)
class Form:
    """The known properties of hidden states on a worker.

    Args:
        on_meta: A tensor with their shape, dtype and ``requires_grad``.
        uncertain: The assumed ones of ``"shape"`` and ``"dtype"``.
    """

    on_meta: Tensor
    uncertain: frozenset[str] = frozenset()


class Assumptions:
    """The uncertain shapes and dtypes reported by one forward's placeholders.

    They are checked against the returned hidden states: if layers keep shape and dtype, both are
    the same after every layer.

    Args:
        compute: Has arithmetic with the placeholders done where they are, if anybody can.
    """

    def __init__(self, compute: Callable[[Wanted], HiddenStatesAway] | None = None) -> None:
        self.compute = compute
        self._made: list[tuple[str, int, Any]] = []
        self._returned: Tensor | None = None

    def make(self, what: str, number: int, value: Any) -> None:
        """Note the shape or dtype reported to the model after a layer.

        Raises:
            ModelError: If the returned hidden states have another.
        """
        self._made.append((what, number, value))
        self._check()

    def settle(self, returned: Tensor) -> None:
        """Check the assumptions against the returned hidden states.

        Raises:
            ModelError: If another shape or dtype was reported to the model.
        """
        self._returned = torch.empty_like(returned, device="meta")
        self._check()

    def settle_by_head(self) -> None:
        """Refuse all assumptions: losses and logits do not have the form of hidden states.

        Raises:
            ModelError: If an uncertain shape or dtype was reported to the model.
        """
        for what, number, value in self._made:
            raise ModelError(
                f"The model read the {what} of the hidden states behind {describe_layer(number)}, "
                f"which cannot be known here: it was told {value}. To have the hidden states here, "
                f"{_remedy(max(number, HEAD_LAYERS[0]))}."
            )

    def _check(self) -> None:
        for what, number, value in self._made if self._returned is not None else ():
            found = getattr(self._returned, what)
            if found != value:
                raise ModelError(
                    f"The model read the {what} of the hidden states behind layer {number}, which "
                    f"cannot be known here: it was told {value}, and {found} came back from the "
                    f"workers. To have the hidden states here, {_remedy(number)}."
                )


@dataclass(eq=False)
class PlaceholderContent:
    """The content of a placeholder.

    Args:
        name: Its name as a carried tensor.
        here: The tensor, once it has come back.
    """

    name: str
    here: Tensor | None = None


class HiddenStatesAway(Tensor):
    """A placeholder for the hidden states after a layer on a worker.

    Args:
        number: The number of the layer.
        device: The device where the hidden states would be.
        form: Finds their form; called when the form is first read.
        assumptions: Notes uncertain answers to the model; there is one for each forward.
        position: Their position in the layer's output.

    Attributes:
        number: The number of the layer.
        position: As given.
        content: Where they are found; only the placeholder has it, so it lives as long.
        form: Returns the form to a reader that does not rely on it: no assumption is noted.
    """

    number: int
    position: int
    content: PlaceholderContent
    form: Callable[[], Form]
    _assumptions: Assumptions
    _place: torch.device

    def __new__(
        cls,
        number: int,
        device: torch.device,
        form: Callable[[], Form],
        assumptions: Assumptions,
        position: int = 0,
    ) -> Self:
        # It has a storage, since `other.data = placeholder` would else leave `other` without one.
        nothing = torch.empty(0, device="meta")
        made: Self = Tensor._make_subclass(cls, nothing)
        made.number, made.form, made._assumptions = number, Once(form), assumptions
        made.position, made._place = position, device
        made.content = PlaceholderContent(returned(number, position))
        return made

    def is_of(self, assumptions: Assumptions) -> bool:
        """Whether it was made in the forward with these assumptions."""
        return self._assumptions is assumptions

    def become(self, other: HiddenStatesAway) -> None:
        """Stand for other hidden states from now on, as after a change in place."""
        self.number, self.position, self.form = other.number, other.position, other.form
        self.content.name = other.name

    def __getattr__(self, name: str) -> Any:
        """Called for an attribute that tensors lack."""
        raise AttributeError(
            f"The result of layer {vars(self).get('number')}, on a worker, was taken for a "
            f"tensor, and the model wants its {name!r}. A layer on a worker must return its hidden "
            "states, alone or in a tuple. Keep layers that return anything else with the "
            "coordinator."
        )

    @property
    def name(self) -> str:
        """Their name as carried tensors."""
        return self.content.name

    def told(self, what: str) -> Tensor:
        """A tensor on ``meta``, for the model to read the shape or dtype."""
        form = self.form()
        if what in form.uncertain:
            self._assumptions.make(what, self.number, getattr(form.on_meta, what))
        return form.on_meta

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = (args, kwargs)
        back = come_back(given)
        if back is not given:
            return function(*back[0], **back[1])
        states, *others = args or (None,)
        if isinstance(states, HiddenStatesAway):
            for what, functions in _OF_FORM.items():
                if function in functions:
                    return function(states.told(what), *others, **kwargs)
            if function in _OF_PLACE:
                return function(torch.empty(0, device=states._place), *others, **kwargs)
            if function is Tensor.__hash__:
                return id(states)
            if _changes_nothing(function, states, others, kwargs):
                return states
        wanted = wanted_arithmetic(function, args, kwargs)
        if wanted is not None:
            return _computed(wanted)
        return _refuse(_caller_in_words(function), (args, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        # Functions written in C++ skip `__torch_function__`.
        _refuse(f"`{operation}`", (args, kwargs))


def come_back(tree: Any) -> Any:
    """Nested arguments with hidden states in the place of placeholders, as far as they are here."""
    if not any(map(is_back, tensors_in(tree))):
        return tree
    return mapped(
        tree, HiddenStatesAway, lambda states: states.content.here if is_back(states) else states
    )


def is_back(tensor: Tensor) -> bool:
    """Whether a tensor is a placeholder, and its hidden states are here by now."""
    return isinstance(tensor, HiddenStatesAway) and tensor.content.here is not None


def _computed(wanted: Wanted) -> HiddenStatesAway:
    """The placeholder for the result of arithmetic."""
    away = next(each for each in wanted.operands if isinstance(each, HiddenStatesAway))
    compute = away._assumptions.compute
    if compute is None:
        _refuse(f"`{wanted.function}`", wanted.operands)
    result = compute(wanted)
    if not wanted.is_in_place:
        return result
    changed: HiddenStatesAway = wanted.operands[0]
    changed.become(result)
    return changed


def _changes_nothing(
    function: Any, states: HiddenStatesAway, others: list[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether torch would return the same tensor, or one with other strides only."""
    if function is Tensor.to:
        return _is_there(states, others, kwargs)
    if function in (dropout, torch.dropout):
        given = inspect.signature(dropout).bind(states, *others, **kwargs)
        given.apply_defaults()
        return not given.arguments["training"] or given.arguments["p"] == 0
    if function is Tensor.__getitem__:
        return _is_whole(others[0])
    if function in _RESHAPING and not kwargs:
        form = states.told("shape")
        made = function(form, *others)
        return (made.shape, made.dtype) == (form.shape, form.dtype)
    if others or kwargs:
        return False
    if function in _CASTS:
        return states.told("dtype").dtype == _CASTS[function]
    return function is Tensor.contiguous or (function is Tensor.cpu and states.is_cpu)


def _is_whole(index: Any) -> bool:
    """Whether an index takes all entries of a tensor, as that of all logits does."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(part, slice) and part in _WHOLE for part in parts)


def _is_there(states: HiddenStatesAway, others: list[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `Tensor.to` with these arguments would return the tensor itself."""
    given = (*others, *kwargs.values())
    if kwargs.get("copy") or len(others) > 3 or any(isinstance(value, Tensor) for value in given):
        return False
    named = {name: value for name, value in kwargs.items() if name != "copy"}
    parsed: tuple[Any, ...] = torch._C._nn._parse_to(*others, **named)
    device, dtype, _, memory_format = parsed
    # "cuda" means the current device, so it is resolved before it is compared.
    moves = device is not None and torch.empty(0, device=device).device != states.device
    is_same_dtype = dtype in (None, states.told("dtype").dtype)
    return is_same_dtype and not moves and memory_format is None


def is_away(value: Any) -> bool:
    """Whether a value is a placeholder for hidden states on a worker."""
    return isinstance(value, HiddenStatesAway)


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists and mappings."""
    return instances_in(tree, Tensor)


def instances_in(tree: Any, kind: type[Kind]) -> list[Kind]:
    """Everything of a type in nested tuples, lists and mappings; in each of them, what is not
    nested further comes first."""
    found: list[Kind] = []
    _gather(tree if type(tree) in (tuple, list) else (tree,), kind, found)
    return found


def _gather(items: Collection[Any], kind: type[Kind], found: list[Kind]) -> None:
    # In C, since this runs for each layer of each micro-batch, and most arguments are plain.
    items = [*compress(items, map(not_, map(_PLAIN.__contains__, map(type, items))))]
    are_found = [*map(isinstance, items, repeat(kind))]
    found += compress(items, are_found)
    for item in compress(items, map(not_, are_found)):
        if isinstance(item, (tuple, list)):
            _gather(item, kind, found)
        elif isinstance(item, (dict, Mapping)):  # most are dictionaries, found sooner
            # It may give its values once alone.
            _gather([*item.values()], kind, found)


def mapped(tree: Any, kind: type[Kind], change: Callable[[Kind], Any]) -> Any:
    """Nested arguments with a function applied to everything of a type."""
    if isinstance(tree, kind):
        return change(tree)
    if type(tree) in _PLAIN:
        return tree
    if type(tree) in (tuple, list):
        return type(tree)([mapped(item, kind, change) for item in tree])
    if type(tree) is dict:
        return {name: mapped(item, kind, change) for name, item in tree.items()}
    # Of the containers of other classes, this one knows how each is made again.
    return apply_to_collection(tree, kind, change)


def refuse_away(what: str, given: Any) -> None:
    """Refuse placeholders for hidden states in nested arguments.

    Raises:
        ModelError: With the caller and the remedy.
    """
    for states in tensors_in(given):
        if isinstance(states, HiddenStatesAway):
            wanted = f"the hidden states behind {describe_layer(states.number)}"
            raise ModelError(
                f"{what} wants {'the logits' if states.number == LOGITS_LAYER else wanted}, which "
                "are on a worker. Only their shape, dtype and device are known here. To have them "
                f"here, {_remedy(states.number)}."
            )


def refuse_moved(number: int, sent: Tensor) -> None:
    """Refuse token ids, or hidden states, that lost their content on the way to a worker.

    Raises:
        ModelError: With the cause and the remedy.
    """
    if sent.is_meta:
        raise ModelError(
            f"{describe_layer(number).capitalize()} gets a tensor on the device `meta`, which has "
            "no content. The weights of layers on workers are on that device here, and the model "
            "or your code moves its input to the device of a weight, as "
            "`.to(embedding.weight.device)` does. Move it to the device of the LightningModule, "
            f"`self.device`, or {_remedy(number)}."
        )


def _remedy(number: int) -> str:
    if number == EMBEDDING_LAYER:
        return "take `embedding: true` out of the plan"
    if number in HEAD_LAYERS:
        return "take `head: true` out of the plan"
    return (
        f"give the coordinator layers 0 to {number}, or all layers from {number + 1} on, in the "
        "plan"
    )


def _refuse(what: str, given: Any) -> NoReturn:
    refuse_away(what, given)
    raise ModelError(f"{what} wants hidden states that are on a worker and not here.")


def _caller_in_words(function: Any) -> str:
    """A function in words, for an error."""
    if torch._C._current_graph_task_id() != -1:
        return "A backward that calls layers again (checkpointing without `use_reentrant=False`)"
    if function is Tensor.view_as:
        # torch calls it when such a function returns its input unchanged.
        return "A custom autograd function (checkpointing without `use_reentrant=False` is one)"
    return f"`{_name_of(function)}`"


def _name_of(function: Any) -> str:
    """A function's name; for a property the name of the property, with ``=`` if it is set."""
    name = str(getattr(function, "__name__", function))
    if name not in ("__get__", "__set__"):
        return name
    attribute = str(getattr(function.__self__, "__name__", name))
    return attribute if name == "__get__" else f"{attribute} ="


_CONTENT = (
    "wants the content of a parameter or buffer of a layer that lives on a worker, which is not "
    "here; "
)
_SENTENCE = (
    f"{_CONTENT}read it with `state_dict()` and write it with `load_state_dict()`, or keep the "
    "layer with the coordinator. If the model calls parts of the layer itself, name these parts as "
    "`layers`."
)
_COPIES = (
    "for an average of weights take `lightning_hetero.callbacks.StageWeightAveraging`, for "
    "Lookahead keep the slow weights in the state of an optimizer of your own"
)
# Readers of properties known here. Each step reads these of every parameter, so they are not
# searched for tensors first.
_READS = frozenset(
    getattr(Tensor, name).__get__ for name in ("dtype", "grad", "is_meta", "requires_grad", "shape")
)
_FLAGS = frozenset({"requires_grad_", "retain_grad"})
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_REFUSED = {f"__i{name}__" for name in _OPERATORS} | {"__setitem__", "data ="}


_JOINING = frozenset({"cat", "concat", "concatenate", "stack", "hstack"})
_DEVICE = Tensor.device.__get__
_ADDRESSES = frozenset({"data_ptr", "storage", "untyped_storage", "numpy", "__array__"})
# Code that reads the device of a tensor, and takes random numbers in the place of one on `meta`.
_INVENTING = frozenset({"torch.utils.tensorboard._convert_np"})


def _reader(function: Any) -> str:
    """The reader of a tensor's device that would invent its content, in words; mostly empty."""
    if function != _DEVICE:
        return ""
    frame = inspect.currentframe()
    while frame is not None and _is_ours(frame.f_globals):  # also a mode that looks at functions
        frame = frame.f_back
    invents = frame is not None and frame.f_globals.get("__name__") in _INVENTING
    return "The `SummaryWriter` of TensorBoard" if invents else ""


def _is_ours(names: Mapping[str, Any]) -> bool:
    """Whether the globals of some code belong to a module of this package."""
    return str(names.get("__name__")).partition(".")[0] == __name__.partition(".")[0]


def _refuse_content(function: Any, name: str, given: list[Tensor]) -> NoReturn:
    """Refuse a computation with tensors that are away, with words for its usual purpose."""
    away = [tensor for tensor in given if isinstance(tensor, _Away)]
    here = {tensor.shape for tensor in given if not tensor.is_meta and tensor.ndim}
    if function is torch.autograd.grad:
        raise ModelError(
            "`torch.autograd.grad` is asked for the gradient of a parameter of a layer that lives "
            "on a worker, as GradNorm does. Run a backward for each loss with "
            "`self.manual_backward(loss, retain_graph=True)` under manual optimization and read "
            "`trainer.strategy.grad_norms()`, or keep the layer with the coordinator."
        )
    if name in _JOINING or any(not each.ndim for each in away):
        raise ModelError(
            f"A penalty on weights, or another number that `{name}` computes of them, {_CONTENT}"
            "let the optimizer's `weight_decay` be the penalty, let the `step` of an optimizer of "
            "your own follow another penalty, such as L1, or keep the layer with the "
            "coordinator."
        )
    if any(each.shape in here for each in away):
        raise ModelError(f"`{name}` {_CONTENT}{_COPIES}, or keep the layer with the coordinator.")
    raise ModelError(f"`{name}` {_SENTENCE}")


class _Away:
    """Refuses changes, and computations together with tensors here."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function in _READS and args[0].is_meta:
                known = function(*args)
                if not isinstance(known, Tensor):
                    return known
            return _of_forms(function, args, kwargs or {})


def _of_forms(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of a function of tensors that are away; refuses a function that would have no
    effect or wants their content."""
    if reader := _reader(function):
        raise ModelError(f"{reader} {_SENTENCE}")
    name = _name_of(function)
    if name in _ADDRESSES:
        raise ModelError(f"`{name}` {_SENTENCE}")
    if name == "__reduce_ex__":
        raise ModelError(
            "A parameter or buffer of a layer that lives on a worker cannot be copied or "
            "pickled; do it before `fit` or after it, or use `module.state_dict()`."
        )
    # A clone would be used where its origin is unknown. A deep copy asks for a memory format, and
    # ends at the holder of the layers: that refusal says more.
    if name == "clone" and not kwargs:
        raise ModelError(
            "A parameter or buffer of a layer that lives on a worker, or what is computed "
            "from it, cannot be cloned or logged; do it before `fit` or after it, use "
            f"`module.state_dict()`, {_COPIES}."
        )
    if _is_loading(name, args):
        return function(*args, **kwargs)
    given = tensors_in((args, kwargs))
    if _changes(name, kwargs) or any(not tensor.is_meta for tensor in given):
        _refuse_content(function, name, given)
    try:
        # A graph would hold the parameter, which could not get its content back then.
        with torch.no_grad():
            result = function(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        raise ModelError(f"`{name}` {_SENTENCE}") from error
    result = mapped(result, Tensor, _apart)
    mark_as_away(tensor for tensor in tensors_in(result) if tensor.is_meta)
    return result


class TensorAway(_Away, Tensor):
    """A buffer of a layer on a worker, or a tensor computed from a parameter there."""


_GRADIENT: Any = Tensor.grad
_READ, _WRITE = _GRADIENT.__get__, _GRADIENT.__set__
_HOOKS = frozenset({Tensor.register_hook, Tensor.register_post_accumulate_grad_hook})
_OF_GRADIENTS = frozenset({_READ, _WRITE})


class ParameterAway(_Away, nn.Parameter):
    """A parameter of a layer on a worker."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _OF_GRADIENTS and (gradients := vars(args[0]).get(_GRADIENTS)):
            return gradients.read(args[0]) if function == _READ else gradients.write(*args)
        if function in _HOOKS:
            raise ModelError(
                f"`{_name_of(function)}` adds a hook to a parameter of a layer that lives on a "
                "worker, where it would not fire. Keep the layer with the coordinator."
            )
        return super().__torch_function__(function, types, args, kwargs)


_OF_GRADIENT = (
    "wants the gradient of a parameter of a layer that lives on a worker, which is not here. To "
    "clip gradients, clip them with `self.clip_gradients(...)`, with the Trainer's "
    "`gradient_clip_val`, or with `trainer.strategy.clip_grad_norm_(...)`; read their norms with "
    "`trainer.strategy.grad_norms()`; or keep the layer with the coordinator."
)
_MAKE_ZERO = frozenset({"zero_", "_foreach_zero_"})
_OF_FORM_OF_GRADIENTS = frozenset().union(*_OF_FORM.values(), _OF_PLACE)
_KNOWN_OF_GRADIENTS = frozenset({"grad_fn", "is_leaf", "requires_grad_", "detach_", "__hash__"})


class GradientAway(Tensor):
    """A gradient on a worker: it may be dropped or made zero, and its content is not here."""

    parameter: Tensor

    @classmethod
    def of(cls, parameter: Tensor) -> Self:
        """The placeholder for the gradient of a parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            nothing = torch.empty_like(parameter, device="meta", requires_grad=False)
            made: Self = Tensor._make_subclass(cls, nothing)
        made.parameter = parameter
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = _name_of(function)
        given = tensors_in(args) if name in _MAKE_ZERO else []
        gradients = [each for each in given if isinstance(each, GradientAway)]
        if given and len(gradients) == len(given):
            for gradient in gradients:
                if known := vars(gradient.parameter).get(_GRADIENTS):
                    known.zero(gradient.parameter)
            return args[0]
        if reader := _reader(function):
            raise ModelError(f"{reader} {_OF_GRADIENT}")
        if function not in _OF_FORM_OF_GRADIENTS and name not in _KNOWN_OF_GRADIENTS:
            raise ModelError(f"`{name}` {_OF_GRADIENT}")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<the gradient of {tuple(self.shape)} numbers on a worker>"


# The attribute of a parameter that knows of its gradient while a training runs.
_GRADIENTS = "gradients_away"


class GradientsAway:
    """Whether parameters on workers have a gradient there; only the workers know its content.

    Args:
        parameters: Parameters on workers. Their ``grad`` is found here until `detach`.

    Attributes:
        are_hidden: Whether parameters hide their gradients, as during the optimizer step of the
            parameters here.
    """

    are_hidden = False

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [*parameters]
        # By the id of the parameter, since a tensor's own hash takes long: the placeholder for its
        # gradient, the same for parameters with a gradient, and the parameters whose gradient was
        # made zero since the latest backward.
        self._shown = {id(each): GradientAway.of(each) for each in self._parameters}
        self._there: dict[int, GradientAway] = {}
        self._zeroed: dict[int, Tensor] = {}
        self._untold: dict[int, Tensor] = {}
        for parameter in self._parameters:
            vars(parameter)[_GRADIENTS] = self

    def detach(self) -> None:
        """Leave the parameters without gradients."""
        for parameter in self._parameters:
            vars(parameter).pop(_GRADIENTS, None)

    def note_backward(self) -> None:
        """Note a gradient for every parameter that trains. A frozen one keeps its former state."""
        self._there.update(compress(self._shown.items(), training_flags(self._parameters)))
        self._zeroed.clear()
        self._untold.clear()

    def take_dropped(self) -> list[Tensor]:
        """The parameters with gradients dropped here since the last call."""
        return self._take_untold(is_there=False)

    def take_zeroed(self) -> list[Tensor]:
        """The parameters with gradients made zero here since the last call."""
        return self._take_untold(is_there=True)

    def _take_untold(self, *, is_there: bool) -> list[Tensor]:
        found = [p for key, p in self._untold.items() if (key in self._there) == is_there]
        self.note_told(found)
        return found

    def note_told(self, parameters: Iterable[Tensor]) -> None:
        """Note that the workers have dropped the gradients of these parameters, or made them
        zero."""
        for parameter in parameters:
            self._untold.pop(id(parameter), None)

    @property
    def zeroed(self) -> list[Tensor]:
        """The parameters with gradients made zero here since the latest backward."""
        return [*self._zeroed.values()]

    def kept(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """The parameters that train and have kept their gradients since the latest backward: they
        were not dropped or made zero."""
        untouched = self._there.keys() - self._zeroed.keys()
        left = [each for each in parameters if id(each) in untouched] if untouched else []
        return list(compress(left, training_flags(left)))

    def read(self, parameter: Tensor) -> GradientAway | None:
        """The placeholder for the gradient of a parameter, if it has a gradient."""
        return None if self.are_hidden else self._there.get(id(parameter))

    def zero(self, parameter: Tensor) -> None:
        """Make the gradient of a parameter zero, if it has one."""
        key = id(parameter)
        if key in self._there:
            self._zeroed[key] = self._untold[key] = parameter

    def write(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Drop the gradient of a parameter, or undo this.

        Raises:
            ModelError: If it is to get another gradient.
        """
        key = id(parameter)
        if gradient is None and key in self._there:
            del self._there[key]
            self._untold[key] = parameter
            self._zeroed.pop(key, None)
        elif gradient is not None and gradient is self._shown.get(key):
            self._there[key] = self._shown[key]
            self._untold.pop(key, None)
        elif gradient is not None:
            raise ModelError(f"`grad =` {_OF_GRADIENT}")


_KINDS: dict[type, type] = {Tensor: TensorAway, nn.Parameter: ParameterAway}
_BACK = {away: kind for kind, away in _KINDS.items()}


_TRAINS = attrgetter("requires_grad")


def training_flags(tensors: Iterable[Tensor]) -> list[bool]:
    """Whether each tensor trains; tensors that are away answer as quickly."""
    with torch._C.DisableTorchFunction():
        return list(map(_TRAINS, tensors))


def mark_as_away(tensors: Iterable[Tensor]) -> None:
    """Make tensors on ``meta`` refuse operations without effect. Each stays the same object."""
    for tensor in tensors:
        if type(tensor) in _KINDS:
            tensor.__class__ = _KINDS[type(tensor)]


def unmark(tensors: Iterable[Tensor]) -> None:
    """Undo `mark_as_away`."""
    for tensor in tensors:
        if type(tensor) in _BACK:
            tensor.__class__ = _BACK[type(tensor)]


def _apart(tensor: Tensor) -> Tensor:
    """A tensor without a base: a parameter held by a view could not get its content back at the end
    of the run."""
    return torch.empty_like(tensor) if tensor.is_meta and tensor._is_view() else tensor


def _is_loading(name: str, args: tuple[Any, ...]) -> bool:
    """Whether ``load_state_dict`` copies a plain meta tensor (its content went to the worker), or
    copies a tensor onto itself."""
    if name != "copy_" or len(args) < 2:
        return False
    return args[0] is args[1] or (type(args[1]) is Tensor and args[1].is_meta)


def _changes(name: str, kwargs: Mapping[str, Any]) -> bool:
    is_in_place = name.endswith("_") and not name.endswith("__") and name not in _FLAGS
    return is_in_place or name in _REFUSED or kwargs.get("out") is not None
