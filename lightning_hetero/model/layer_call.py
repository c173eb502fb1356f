"""One call of a decoder layer as a value, and the form of its result.

Hidden states go from layer to layer. Other tensors may go along with them, and carry gradients. In
the arguments of a call `Carried` stands for such a tensor, by its name; see `carried_tensors.py`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import compress, repeat
from operator import itemgetter
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import Cache, PretrainedConfig

from ..errors import ModelError
from .attributes import unchanged
from .carried_tensors import Arithmetic, Carried, returned
from .placeholders import instances_in, is_away, mapped, tensors_in
from .tensors import narrowed

logger = logging.getLogger(__name__)

# An argument's position, or its name.
Place = int | str

SLICES = 0
"""The number of the cache with the keys and values of a sequence in slices along its tokens. Each
visit has its own; caches of evaluations have other numbers."""


@dataclass(frozen=True)
class CacheUse:
    """A key-value cache of a stage, in one call of a layer.

    Args:
        number: The number of the cache.
        place: The argument in which the layer gets the cache.
        length: Positions in the cache before the call.
        window: The number of positions in a layer's sliding window; None for all.
        rows: The samples to select from the cache first, in this order; None for all.
        num_tokens: The length of the sequence of a slice; None for other caches.
    """

    number: int
    place: Place
    length: int
    window: int | None = None
    rows: Tensor | None = None
    num_tokens: int | None = None

    @property
    def is_of_slices(self) -> bool:
        """Whether the call is of a slice of a sequence, with gradients of keys and values."""
        return self.number == SLICES


@dataclass(frozen=True)
class LayerCall:
    """One call of one layer, without its hidden states.

    In ``args`` and ``kwargs``, `Carried` stands for tensors carried with them.

    Args:
        layer_index: The number of the layer.
        training: The mode of the layer.
        args: The positional arguments, without the hidden states and the cache.
        kwargs: The named arguments, likewise.
        tuple_length: The length of the expected tuple; 0 for a tensor alone.
        cache: The key-value cache among the arguments, if the stage keeps it.
        other_mode: Names of the modules in the other mode inside the layer, such as a frozen
            BatchNorm.
        place: The argument in which the layer gets the hidden states.
        hidden_at: The position of the hidden states in the tuple.
        others: The positions of other tensors in it.
        arithmetic: The arithmetic after the layer, in this order.
        handed_on: The name of the next layer's hidden states; empty for the result of this layer.
        comes_back: The names of tensors that the model gets besides the result; last layer only.
    """

    layer_index: int
    training: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tuple_length: int = 0
    cache: CacheUse | None = None
    other_mode: tuple[str, ...] = ()
    place: Place = 0
    hidden_at: int = 0
    others: tuple[int, ...] = ()
    arithmetic: tuple[Arithmetic, ...] = ()
    handed_on: str = ""
    comes_back: tuple[str, ...] = ()

    def set_modes(self, inside: Mapping[str, nn.Module]) -> None:
        """Put a layer and the modules inside it, given by name, into their modes at the time of the
        call."""
        others = {inside[name] for name in self.other_mode}
        mode = self.training
        # Setting an attribute of a module takes ten times as long as reading it.
        for module in [m for m in inside.values() if m.training == (mode == (m in others))]:
            module.training = not module.training

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor among the arguments, with the position or name of its argument."""
        for place, value in _by_place(self.args, self.kwargs):
            yield from ((str(place), tensor) for tensor in tensors_in(value))

    def named_lists(self) -> Iterator[tuple[str, Sequence[Any]]]:
        """Every list of numbers among the arguments, with the position or name of its argument."""
        for place, value in _by_place(self.args, self.kwargs):
            if isinstance(value, (list, tuple)) and all(isinstance(n, (int, float)) for n in value):
                yield str(place), value

    # These two are asked for several times in a step, and a walk through the arguments takes long.
    @cached_property
    def carried(self) -> list[str]:
        """The names of the carried tensors among the layer's arguments, each once."""
        return _names_in((self.args, self.kwargs))

    @property
    def made(self) -> set[str]:
        """The names of the layer's outputs and of the results of arithmetic after it."""
        positions = (self.hidden_at, *self.others)
        of_layer = {returned(self.layer_index, position) for position in positions}
        return of_layer | {step.name for step in self.arithmetic}

    @property
    def operands(self) -> list[str]:
        """The names of the carried operands of the arithmetic after the layer, each once."""
        return _names_in(self.arithmetic) if self.arithmetic else []

    @cached_property
    def wanted(self) -> list[str]:
        """The names of tensors that must have come along for this call, each once."""
        made = self.made
        names = [*self.carried, *self.operands, self.handed_on, *self.comes_back]
        return [name for name in dict.fromkeys(names) if name and name not in made]

    @property
    def name_behind(self) -> str:
        """The name of the next layer's hidden states."""
        return self.handed_on or returned(self.layer_index, self.hidden_at)

    def compute(self, tensors: dict[str, Tensor]) -> None:
        """Do the arithmetic after the layer, and add the results to the carried tensors, by
        name."""
        for step in self.arithmetic:
            tensors[step.name] = step.run(tensors)

    def with_carried(self, tensors: Mapping[str, Tensor]) -> LayerCall:
        """This call with tensors in the places of their names."""
        if not self.carried:
            return self
        put = tensors.__getitem__
        args, kwargs = mapped((self.args, self.kwargs), Carried, put)
        return replace(self, args=args, kwargs=kwargs)

    def in_dtype(self, old: torch.dtype, new: torch.dtype) -> LayerCall:
        """This call with its tensors of one dtype converted to another."""

        def convert(tensor: Tensor) -> Tensor:
            return narrowed(tensor, new) if tensor.dtype == old else tensor

        return self.with_tensors(convert)

    def with_tensors(
        self,
        change: Callable[[Tensor], Tensor],
        change_operand: Callable[[Tensor], Tensor] | None = None,
    ) -> LayerCall:
        """This call with a function applied to every tensor, also to operands of arithmetic unless
        there is another function for them."""
        args, kwargs = mapped((self.args, self.kwargs), Tensor, change)
        arithmetic = mapped(self.arithmetic, Tensor, change_operand or change)
        return replace(self, args=args, kwargs=kwargs, arithmetic=arithmetic)


def take_hidden(
    number: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_from_layer: Callable[[Any], bool] = lambda _: False,
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any], Place]:
    """Split the arguments of a call into the hidden states and the rest.

    The hidden states are the output of the layer before. Without one, they are the first argument
    or ``hidden_states``, and otherwise the first tensor that may have samples and features.

    Args:
        number: The number of the layer.
        args: Its positional arguments.
        kwargs: Its named arguments.
        is_from_layer: Whether a value comes from the layer before.

    Returns:
        The hidden states, the other arguments, and the place of the hidden states.

    Raises:
        ModelError: If the hidden states are missing.
    """
    named = {place: value for place, value in _by_place(args, kwargs) if isinstance(value, Tensor)}
    place = next((place for place, value in named.items() if is_from_layer(value)), None)
    place = _likely_place(named) if place is None else place
    if place is None:
        raise ModelError(
            f"Layer {number} was called without hidden states: one of its arguments must be a "
            "tensor of them, and not a container."
        )
    hidden = named[place]
    if isinstance(place, int):
        return hidden, args[:place] + args[place + 1 :], kwargs, place
    rest = {name: value for name, value in kwargs.items() if name != place}
    # Decoders of transformers have them first, under this name.
    return hidden, args, rest, 0 if place == "hidden_states" and not args else place


def _likely_place(tensors: Mapping[Place, Tensor]) -> Place | None:
    """The place of the hidden states among a layer's tensors."""
    first = next(iter(tensors), None)
    usual = [place for place in tensors if place in (0, "hidden_states")]
    # A layer that is away runs on `meta` before its hidden states can tell a dtype.
    if usual and is_away(tensors[usual[0]]):
        return usual[0]
    numbers = [place for place, tensor in tensors.items() if tensor.is_floating_point()]
    wide = [place for place in numbers if tensors[place].ndim > 1]
    trained = [place for place in wide if tensors[place].requires_grad]
    named = [place for place in usual if place in numbers]
    return next(iter((*named, *trained, *wide, *numbers)), first)


def _names_in(tree: Any) -> list[str]:
    """The names of carried tensors in nested arguments, each once."""
    return list(dict.fromkeys(instances_in(tree, Carried)))


def put_hidden(
    hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with the hidden states in their place."""
    if isinstance(place, int):
        return (*args[:place], hidden, *args[place:]), kwargs
    return args, {**kwargs, place: hidden}


def caches_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Place, Cache]]:
    """Every key-value cache among the arguments, with its position or name."""
    placed = _by_place(args, kwargs)
    are_caches = map(isinstance, map(itemgetter(1), placed), repeat(Cache))
    return [*compress(placed, are_caches)]


def _by_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Place, Any]]:
    return [*enumerate(args), *kwargs.items()]


def without_cache(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with None in the place of each key-value cache.

    The argument ``use_cache`` becomes False where it asks for such a cache. A layer of the user's
    own may have another meaning for this name.
    """
    kept = {k: None if isinstance(v, Cache) else v for k, v in kwargs.items()}
    if "use_cache" in kept and (caches_among(args, kwargs) or _asks_for_cache(type(layer).forward)):
        kept["use_cache"] = False
    return tuple(None if isinstance(value, Cache) else value for value in args), kept


@cache
def _asks_for_cache(forward: Callable[..., Any]) -> bool:
    """Whether the argument ``use_cache`` of a layer's forward is the one of transformers."""
    package = getattr(forward, "__module__", "").partition(".")[0]
    return package == transformers.__name__ and "use_cache" in inspect.signature(forward).parameters


@dataclass(frozen=True)
class ResultForm:
    """The form of a layer's result.

    Args:
        length: The length of the tuple; 0 for a tensor alone.
        tensors: The tensors by their positions in it, on ``meta`` where the layer was tried there.
    """

    length: int
    tensors: Mapping[int, Tensor]

    @classmethod
    def of(cls, result: Any, layer: nn.Module, layer_index: int) -> ResultForm:
        """The form of a result.

        Raises:
            ModelError: If it holds more than tensors.
        """
        if isinstance(result, Tensor):
            return cls(0, {0: result})
        what = f"Layer {layer_index} ({type(layer).__name__})"
        items = result if type(result) is tuple else ()
        tensors = {place: item for place, item in enumerate(items) if isinstance(item, Tensor)}
        if not tensors:
            raise ModelError(
                f"{what} returns a {type(result).__name__}; a layer on a worker must return its "
                "hidden states, alone or in a tuple. Keep it with the coordinator."
            )
        more = [type(item).__name__ for item in items if not isinstance(item, Tensor | None)]
        if more:
            raise ModelError(
                f"{what} returns {', '.join(more)} besides its hidden states, which cannot come "
                "back from a worker; return tensors, or keep the layer with the coordinator."
            )
        return cls(len(items), tensors)

    @property
    def hidden_at(self) -> int:
        """The position of the first tensor: as a rule, the hidden states."""
        return min(self.tensors)

    @property
    def hidden(self) -> Tensor:
        """The first tensor."""
        return self.tensors[self.hidden_at]

    def fill(self, make: Callable[[int], Tensor]) -> Any:
        """A result of this form, with tensors made by ``make`` from their positions."""
        if not self.length:
            return make(0)
        return tuple(make(at) if at in self.tensors else None for at in range(self.length))


def tensors_of(result: Any, layer: nn.Module, call: LayerCall) -> Mapping[int, Tensor]:
    """Take the tensors out of a layer's result, by their positions.

    Raises:
        ModelError: If the result has another form than the expected one.
    """
    form = ResultForm.of(result, layer, call.layer_index)
    expected = sorted({call.hidden_at, *call.others})
    if form.length != call.tuple_length or sorted(form.tensors) != expected:
        raise ModelError(
            f"Layer {call.layer_index} ({type(layer).__name__}) returned "
            f"{_in_words(form.length, sorted(form.tensors))} on the worker, and the model was "
            f"given {_in_words(call.tuple_length, expected)} in its place. Keep the layer with the "
            "coordinator."
        )
    return form.tensors


def _in_words(tuple_length: int, positions: Sequence[int]) -> str:
    if not tuple_length:
        return "a tensor"
    plain = "" if [*positions] == [0] else f" with tensors at {', '.join(map(str, positions))}"
    return f"a tuple of {tuple_length}{plain}"


def expected_result(
    layer: nn.Module, call: LayerCall, hidden: Tensor, tensors: Mapping[str, Tensor]
) -> ResultForm:
    """The form of a layer's result.

    If the layer cannot be tried, it is assumed to return a tensor like its input.

    Args:
        layer: The layer.
        call: How it is called; its form of the result does not count.
        hidden: The hidden states.
        tensors: The carried tensors, by name.

    Raises:
        ModelError: If the layer returns more than tensors.
    """
    return result_on_meta(layer, call, hidden, tensors) or ResultForm(0, {0: _to_meta(hidden)})


def result_on_meta(
    layer: nn.Module, call: LayerCall, hidden: Tensor, tensors: Mapping[str, Tensor]
) -> ResultForm | None:
    """Run a layer with its parameters on ``meta``; its attributes are restored afterwards.

    Returns:
        The form of the result; None if the layer cannot be tried.

    Raises:
        ModelError: If the layer returns more than tensors.
    """
    filled = call.with_carried(tensors)
    given = mapped((hidden, filled.args, dict(filled.kwargs)), Tensor, _to_meta)
    hidden_there, args_there, kwargs_there = given
    args, kwargs = put_hidden(hidden_there, args_there, kwargs_there, call.place)
    try:
        # Parameters that are away refuse every computation but this one.
        untouched = torch._C.DisableTorchFunctionSubclass()
        with torch.no_grad(), unchanged(layer.modules()), _experts_on_meta(layer), untouched:
            result = type(layer).forward(layer, *args, **kwargs)
    except Exception as error:
        # A forward that depends on data, such as the choice of experts, cannot run on `meta`. If
        # such a layer returns something else than a tensor, the worker raises.
        logger.debug("layer %d cannot be tried on meta: %s", call.layer_index, error)
        return None
    return ResultForm.of(result, layer, call.layer_index)


@contextmanager
def _experts_on_meta(layer: nn.Module) -> Iterator[None]:
    """Inside, a mixture's experts compute by products available on `meta` in every dtype."""
    found = (getattr(module, "config", None) for module in layer.modules())
    configs = {id(each): each for each in found if isinstance(each, PretrainedConfig)}.values()
    before = [(config, config._experts_implementation) for config in configs]
    try:
        for config in configs:
            config._experts_implementation = "batched_mm"
        yield
    finally:
        for config, kind in before:
            config._experts_implementation = kind


def _to_meta(tensor: Tensor) -> Tensor:
    return tensor.detach().to("meta")
