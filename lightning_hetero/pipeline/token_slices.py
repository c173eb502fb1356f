"""One sequence in slices along its tokens, with the keys and values of earlier slices.

Slice j runs through a layer with the keys and values of the slices before it. They have no graph
there, so the graphs of slices are apart. Backwards run from the last slice to the first; a backward
adds the gradients of all earlier keys and values to those of later slices:

    slice 0   hidden ─▶ layer ─▶ out        keys 0   ──┐            ◀──────┐ gradients
    slice 1   hidden ─▶ layer ─▶ out        keys 1   ──┤ one tensor ◀──┐   │
    slice 2   hidden ─▶ layer ─▶ out        keys 2   ──┘ per layer     │   │
                          ▲ keys 0, 1, 2                  keys 1, 0 ───┴───┘

So weights add up their gradients in one order, from the last slice to the first. The keys and
values of a sequence exist once on their stage, from the forward of its first slice to its backward,
and so does a gradient of them. A layer that runs again writes its keys into the same place.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.cache_utils import DynamicLayer

from ..errors import BatchError, ModelError, RemoteProtocolError
from ..model.kv_cache import cache_index, cache_of_one
from ..model.layer_call import SLICES, CacheUse, LayerCall, Place, put_hidden
from ..model.layers import EMBEDDING_LAYER, LOSS_LAYER, describe_layer, is_end
from ..model.placeholders import instances_in, mapped
from ..model.stored import describe_stored
from .slice_cut import Work, cut_by_work
from .sliced_loss import of_slice

Call = Callable[..., Any]

# The names of a layer's argument for its cache.
_CACHES = ("past_key_values", "past_key_value", "layer_past")
_MASK = "attention_mask"
# Those of the loss go to all layers too.
_FOR_EACH_TOKEN = ("position_ids", "cache_position", "shift_labels")
# Attention that computes with the keys of a cache, and a mask for them.
ATTENTIONS = ("eager", "sdpa")
REMEDY = "Use `micro_batching='boundary'`, which cuts the batch along its samples."


def work_of(layers: Sequence[nn.Module]) -> Work:
    """The multiplications of layers for each token, counted from their weights and heads.

    A layer with a sliding window attends to as many tokens everywhere but at the begin.
    """
    return Work(float(sum(map(_num_weights, layers))), sum(map(_growth_of, layers)))


def _num_weights(layer: nn.Module) -> int:
    """The numbers in the matrices of a layer, also where they are packed."""
    packed = {path: math.prod(form.shape) for path, form in describe_stored(layer).items()}
    matrices = ((name, p.numel()) for name, p in layer.named_parameters() if p.ndim > 1)
    return sum(packed.get(name.removesuffix(".weight"), count) for name, count in matrices)


def config_of(layer: nn.Module) -> Any:
    """The config of the attention in a layer; None without one."""
    return next((m.config for m in layer.modules() if hasattr(m, "config")), None)


def _growth_of(layer: nn.Module) -> float:
    """The multiplications of a layer for each token and each token before it."""
    config = config_of(layer)
    # Where layers have different windows, each attention has its own.
    windows = [m.sliding_window for m in layer.modules() if hasattr(m, "sliding_window")]
    window = next(iter(windows), getattr(config, "sliding_window", None))
    num_heads: int = getattr(config, "num_attention_heads", 0)
    if window is not None or not num_heads:
        return 0.0
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // num_heads
    return 2.0 * num_heads * size


@cache
def _parameters_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a layer's parameters, without ``self``."""
    return tuple(inspect.signature(forward).parameters)[1:]


def cache_place(layer: nn.Module) -> str | None:
    """The name of a layer's argument for a key-value cache, if it has one."""
    names = _parameters_of(type(layer).forward)
    return next((name for name in _CACHES if name in names), None)


def refusal(layer: nn.Module) -> str | None:
    """Why a layer cannot run on slices by what its class and its config say; None if it can."""
    are_causal = [m.is_causal for m in layer.modules() if hasattr(m, "is_causal")]
    if cache_place(layer) is None or cache_index(layer) is None:
        return "it does not take the keys and values of earlier tokens from a key-value cache"
    if not are_causal or not all(are_causal):
        return "its attention is not causal: a token attends to later tokens"
    for module in layer.modules():
        config = getattr(module, "config", None)
        kind = getattr(config, "_attn_implementation", None)
        if kind is not None and kind not in ATTENTIONS:
            return (
                f"its attention is {kind!r}, and {' and '.join(map(repr, ATTENTIONS))} alone take "
                "the keys of earlier slices; load the model with attn_implementation='sdpa'"
            )
        if getattr(config, "num_kv_shared_layers", 0):
            return "layers share their keys and values (`num_kv_shared_layers`)"
    return None


def check_can_run_on_slices(number: int, layer: nn.Module) -> None:
    """Refuse a layer that cannot run on slices.

    Raises:
        ModelError: With the cause and the remedy.
    """
    if (why := refusal(layer)) is not None:
        raise ModelError(
            f"{describe_layer(number).capitalize()} ({type(layer).__name__}) cannot run on "
            f"slices along the tokens: {why}. {REMEDY}"
        )


def _named(call: LayerCall, layer: nn.Module) -> Iterator[tuple[str, Place, Any]]:
    """Every argument of a call besides the hidden states: its name, its place and its value."""
    names = [*_parameters_of(type(layer).forward)]
    if isinstance(call.place, int):
        del names[call.place]
    for place, value in enumerate(call.args):
        yield (names[place] if place < len(names) else str(place)), place, value
    for name, value in call.kwargs.items():
        yield name, name, value


@dataclass(frozen=True)
class Slice:
    """A slice of a sequence. It cuts the arguments of all layers, each tensor once.

    Args:
        start: The number of its first token.
        end: The number after its last one.
        num_tokens: The length of the sequence.
    """

    start: int
    end: int
    num_tokens: int
    # By the identity of a tensor, the tensor itself, which keeps its identity, and its cut.
    _cuts: dict[tuple[str, int], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def cut(self, hidden: Tensor) -> Tensor:
        """The hidden states of the slice, of the shape (samples, tokens, features), or its token
        ids."""
        return hidden.narrow(1, self.start, self.end - self.start)

    def cut_call(self, call: LayerCall, layer: nn.Module, has_cache: bool = True) -> LayerCall:
        """The call of a layer for the slice.

        Args:
            call: The call for the whole sequence, without a cache; of a loss with the arguments
                of `shift_loss`.
            layer: The layer.
            has_cache: Whether the slice goes on from the keys and values of earlier slices;
                otherwise it must be the first one.

        Raises:
            BatchError: If an argument has an unknown form.
        """
        if call.layer_index == LOSS_LAYER:
            return replace(call, kwargs=of_slice(call.kwargs, self.start, self.end))
        args, kwargs = [*call.args], dict(call.kwargs)
        cache_at: Place = cache_place(layer) or ""
        for name, place, value in _named(call, layer):
            if name == cache_at:
                cache_at = place
            else:
                _put(args, kwargs, place, self._cut_argument(name, value, call.layer_index))
        has_cache = has_cache and not is_end(call.layer_index)
        use = CacheUse(SLICES, cache_at, self.start, num_tokens=self.num_tokens)
        return replace(
            call,
            args=tuple(args),
            kwargs=kwargs,
            cache=use if has_cache else None,
            arithmetic=mapped(call.arithmetic, Tensor, self.cut_beside),
        )

    def cut_beside(self, tensor: Tensor) -> Tensor:
        """A tensor that the model computes with beside the embedded tokens, such as the embedding
        of their positions.

        Raises:
            BatchError: If it has an unknown form.
        """
        shape = tensor.shape
        if tensor.ndim == 3 and shape[1] == self.num_tokens:
            return tensor.narrow(1, self.start, self.end - self.start)
        if shape[:-1].numel() == 1:  # a number, or one for each feature
            return tensor
        raise _unknown("of arithmetic", f"has the shape {tuple(shape)}", EMBEDDING_LAYER)

    def _cut_argument(self, name: str, value: Any, number: int) -> Any:
        numbers = value if isinstance(value, (list, tuple)) else ()
        if len(numbers) == self.num_tokens > 1 and isinstance(numbers[0], (int, float)):
            raise _unknown(name, f"is a list of {len(numbers)} numbers", number)

        def cut(tensor: Tensor) -> Tensor:
            key = name, id(tensor)
            if key not in self._cuts:
                self._cuts[key] = tensor, self._cut_tensor(name, tensor, number)
            return self._cuts[key][1]

        return mapped(value, Tensor, cut) if instances_in(value, Tensor) else value

    def _cut_tensor(self, name: str, tensor: Tensor, number: int) -> Tensor:
        shape, length = tensor.shape, self.end - self.start
        total = self.num_tokens
        if not shape:
            return tensor
        if name == _MASK and tensor.ndim == 4 and shape[-2:] == (total, total):
            rows = tensor[..., self.start : self.end, :]
            if bool(_attended(rows[..., self.end :], number).any()):
                raise BatchError(
                    f"The attention mask of layer {number} lets a token attend to later tokens, as "
                    f"a prefix or an image does, so the layer is not causal. {REMEDY}"
                )
            # Windows hide all from padding on the right too: `check_counted` looks at its labels.
            if self.end < total and bool(spread_tokens(tensor[..., :1, :]).any()):
                raise BatchError(
                    f"The attention mask of layer {number} hides all tokens from a token, as it "
                    "does for padding on the left. Attention then takes the mean of all tokens, "
                    "and later slices are among them. Load the model with "
                    f"attn_implementation='sdpa', or pad on the right. {REMEDY}"
                )
            return rows[..., : self.end]
        if name == "position_embeddings" and tensor.ndim in (2, 3) and shape[-2] == total:
            return tensor.narrow(-2, self.start, length)
        is_numbers = name in _FOR_EACH_TOKEN and tensor.ndim in (1, 2)
        if is_numbers and shape[-1] == total:
            return tensor.narrow(-1, self.start, length)
        raise _unknown(name, f"has the shape {tuple(shape)}", number)


def _attended(mask: Tensor, number: int) -> Tensor:
    """Where a mask lets a token attend to another.

    Raises:
        BatchError: If the mask has another kind.
    """
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise _unknown(_MASK, f"has the dtype {mask.dtype}", number)
    return mask > torch.finfo(mask.dtype).min / 2


def spread_tokens(mask: Tensor) -> Tensor:
    """Which tokens attend to all tokens alike, since a mask lowers all by the same number.

    Args:
        mask: The mask of a layer, of the shape (samples, heads, tokens, tokens).

    Returns:
        Truth values of the shape (samples, tokens).
    """
    if mask.dtype == torch.bool:  # attention to nothing is 0
        return mask.new_zeros(mask.shape[0], mask.shape[2])
    most = mask.amax(-1)
    return ((most <= torch.finfo(mask.dtype).min / 2) & (most > -math.inf)).any(1)


def masks_of(call: LayerCall, layer: nn.Module) -> list[Tensor]:
    """The masks for each pair of tokens among the arguments of a layer's call."""
    found = (value for name, _, value in _named(call, layer) if name == _MASK)
    return [each for each in found if isinstance(each, Tensor) and each.ndim == 4]


def _unknown(name: str, form: str, number: int) -> BatchError:
    return BatchError(
        f"The argument {name} of {describe_layer(number)} {form}, and how it belongs to the tokens "
        f"of a sequence is unknown. {REMEDY}"
    )


def check_form(hidden: Tensor, number: int) -> None:
    """Refuse hidden states, or token ids, without a dimension of tokens.

    Raises:
        BatchError: With their shape.
    """
    if number == EMBEDDING_LAYER:
        if hidden.ndim != 2:
            raise BatchError(
                f"The input embedding gets token ids of the shape {tuple(hidden.shape)}; slices "
                f"along the tokens need (samples, tokens). {REMEDY}"
            )
    elif hidden.ndim != 3 or not hidden.is_floating_point():
        raise BatchError(
            f"Layer {number} gets hidden states of the shape {tuple(hidden.shape)}; slices along "
            f"the tokens need (samples, tokens, features). {REMEDY}"
        )


@dataclass(frozen=True)
class SliceCut:
    """How sequences are cut, the same under every plan.

    Args:
        num_slices: The most slices.
        work: The work of all layers on a token.
    """

    num_slices: int
    work: Work

    def slices(self, num_tokens: int) -> list[Slice]:
        """The slices of a sequence."""
        cut = cut_by_work(num_tokens, self.num_slices, self.work)
        return [Slice(start, end, num_tokens) for start, end in cut]


class _Joined(torch.autograd.Function):
    """Puts the keys of a slice after those of the slices before, and returns all.

    The backward runs once for each slice, from the last one to the first.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, kept: _Kept, start: int) -> Tensor:
        ctx.layer_tokens, ctx.start = kept, start
        return kept.put(own, start)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.layer_tokens.pass_back(gradient, ctx.start), None, None


@dataclass
class _Kept:
    """The keys of a layer, or its values, for all slices so far, with a gradient from later ones.

    Tensors in it have the shape (tokens, samples, heads, features), so the first tokens lie in
    memory as if there were no others.

    Args:
        is_cut: Whether the graph is cut between slices.
        room: The number of tokens to keep room for.
    """

    is_cut: bool
    room: int
    _tokens: Tensor | None = None
    # Of the tokens before the latest slice with a backward; None if no later slice has one.
    gradient: Tensor | None = None

    def join(self, own: Tensor, start: int) -> Tensor:
        """The tokens up to a slice, of the shape of its own ones: (..., tokens, features).

        Args:
            own: The tokens of the slice.
            start: The number of the first one.
        """
        if self.is_cut:
            joined: Tensor = _Joined.apply(own, self, start)  # type: ignore[no-untyped-call]
            return joined
        known = own.new_empty(0) if self._tokens is None else self._tokens
        total = torch.cat([*([known[:start]] if start else []), own.movedim(-2, 0)])
        if len(known) == start:  # otherwise the layer runs again
            self._tokens = total
        return total.movedim(0, -2)

    def cut_graph(self) -> None:
        """Let the graph go, with all slices in it; a layer may run again."""
        self._tokens = None if self._tokens is None else self._tokens.detach()

    def put(self, own: Tensor, start: int) -> Tensor:
        """Keep the tokens of a slice; returns all up to it, without a copy."""
        first = own.movedim(-2, 0)
        end = start + len(first)
        if self._tokens is None:
            self._tokens = first.new_empty((self.room, *first.shape[1:]))
        if self._tokens.dtype != first.dtype:  # a copy would round without a word
            raise ModelError(
                f"The keys of a slice are {first.dtype}, and those of earlier slices are "
                f"{self._tokens.dtype}. {REMEDY}"
            )
        # Earlier slices have saved tokens from here, which do not change.
        self._tokens.data[start:end] = first
        return self._tokens.data[:end].movedim(0, -2)

    def pass_back(self, gradient: Tensor, start: int) -> Tensor:
        """The gradient of a slice's own tokens, from this slice and from later ones.

        Args:
            gradient: The gradient of the tokens up to the slice, from this slice.
            start: The number of its first token.

        Raises:
            ModelError: If later slices have given a gradient for other tokens.
        """
        total, later = gradient.movedim(-2, 0), self.gradient
        if later is not None:
            if len(later) != len(total):
                raise ModelError(
                    f"A slice of a sequence has a gradient of {len(total)} keys, and later slices "
                    f"have one of {len(later)}."
                )
            total = later.add_(total)
        # A copy, so the gradients of later tokens leave the memory.
        self.gradient = total[:start].clone() if start else None
        return total[start:].movedim(0, -2)


class _LayerCache(DynamicLayer):
    """The cache of one layer in one run on a slice.

    Args:
        kept: The keys and the values of the layer.
        start: The number of the slice's first token.
    """

    def __init__(self, kept: tuple[_Kept, _Kept], start: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._start = start
        self.end = start

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """The keys and values up to the slice.

        Raises:
            ModelError: If the layer has put keys of the slice already.
        """
        if self.end != self._start:
            raise ModelError(
                "A layer puts keys into its key-value cache twice in one forward, and slices along "
                f"the tokens keep one set of keys for each layer. {REMEDY}"
            )
        self.end += key_states.shape[-2]
        keys, values = self._kept
        return keys.join(key_states, self._start), values.join(value_states, self._start)

    def get_seq_length(self) -> int:
        """The number of tokens before the slice."""
        return self._start


@dataclass
class SequenceKeys:
    """The keys and values of one sequence on its way through some layers, slice by slice.

    Args:
        is_cut: Whether the graph is cut between slices.
    """

    is_cut: bool = True
    _layers: dict[int, tuple[_Kept, _Kept]] = field(default_factory=dict)
    # The number of tokens that have come, by layer.
    _come: dict[int, int] = field(default_factory=dict)
    # The end of the slice with the next backward; None before the first one.
    _backward_at: int | None = None

    def cache(self, number: int, start: int, room: int) -> _LayerCache:
        """The cache of a layer for one run on a slice.

        Args:
            number: The number of the layer.
            start: The number of the slice's first token.
            room: The length of the sequence.
        """
        if number not in self._layers:
            self._layers[number] = _Kept(self.is_cut, room), _Kept(self.is_cut, room)
        return _LayerCache(self._layers[number], start)

    def check_next(self, number: int, start: int) -> None:
        """Refuse a slice without the one before it.

        Raises:
            ModelError: With the number of tokens that have come.
        """
        there = self._come.get(number, 0)
        if there != start:
            raise ModelError(
                f"A slice of a sequence begins at token {start}, and layer {number} has the keys "
                f"of {there} tokens: a slice is missing, or came twice."
            )

    def note_come(self, number: int, end: int) -> None:
        """A layer has the keys and values up to a token."""
        self._come[number] = end

    def cut_graph(self) -> None:
        """Let the graph go after the last slice: it may hold functions with these keys, and the
        collector cannot see through a graph."""
        for each in chain.from_iterable(self._layers.values()):
            each.cut_graph()

    @property
    def have_gradients(self) -> bool:
        """Whether later slices have given gradients."""
        return any(each.gradient is not None for pair in self._layers.values() for each in pair)

    def begin_backward(self, end: int) -> None:
        """Refuse a backward out of order.

        Args:
            end: The number after the slice's last token.

        Raises:
            RemoteProtocolError: If another slice is next.
        """
        last = max(self._come.values(), default=end)
        expected = last if self._backward_at is None else self._backward_at
        if end != expected:
            raise RemoteProtocolError(
                f"The backward of the slice up to token {end} came, and the one of the slice up to "
                f"token {expected} is next."
            )

    def end_backward(self, start: int) -> None:
        """Refuse a backward that has left out the gradients of later slices.

        Args:
            start: The number of the slice's first token.

        Raises:
            ModelError: With the layer.
        """
        self._backward_at = start
        for number, pair in self._layers.items():
            if any(k.gradient is not None and len(k.gradient) != start for k in pair):
                raise ModelError(
                    f"The backward of layer {number} has not come to the keys or values of a slice "
                    f"from token {start} on, and later slices have gradients for them. {REMEDY}"
                )


@dataclass
class SlicePass:
    """One slice on its way through some layers.

    Args:
        keys: The keys and values of its sequence.

    Attributes:
        start: The number of its first token.
        end: The number after its last one.
        is_last: Whether it is the last slice.
        is_again: Whether its forward has run, and may run again.
    """

    keys: SequenceKeys
    start: int = 0
    end: int = 0
    is_last: bool = False
    is_again: bool = False
    # The caches of the forward that runs.
    _caches: dict[int, _LayerCache] = field(default_factory=dict)
    _masks: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def calling(self, run: Callable[..., Any], call: LayerCall, layer: nn.Module) -> Call:
        """A function of the hidden states that calls a layer with the cache in its place.

        It may run again: each run has a cache and a mask of its own.

        Args:
            run: Calls the layer.
            call: The call for the slice.
            layer: The layer.

        Raises:
            ModelError: If a slice before this one has not come.
        """
        if call.cache is not None and not self.is_again:
            self.keys.check_next(call.layer_index, call.cache.length)

        def run_with_cache(hidden: Tensor) -> Any:
            args, kwargs = self.arguments(call, layer, hidden)
            args, kwargs = put_hidden(hidden, args, kwargs, call.place)
            return run(*args, **kwargs)

        return run_with_cache

    def arguments(
        self, call: LayerCall, layer: nn.Module, hidden: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The layer's arguments besides the hidden states, with the cache in its place if the call
        has one.

        Raises:
            ModelError: If the layer takes none.
            RemoteProtocolError: If the slice ends after its sequence.
        """
        use, index = call.cache, cache_index(layer)
        if use is None:
            return call.args, call.kwargs
        if index is None:
            raise ModelError(f"Layer {call.layer_index} has no place for keys and values.")
        length, self.end = hidden.shape[1], use.length + hidden.shape[1]
        self.start, num_tokens = use.length, use.num_tokens or 0
        if self.end > num_tokens:
            raise RemoteProtocolError(
                f"A slice up to token {self.end} came, of a sequence of {num_tokens} tokens."
            )
        self.is_last = self.end == num_tokens
        cached = self.keys.cache(call.layer_index, use.length, num_tokens)
        self._caches[call.layer_index] = cached
        args, kwargs = [*call.args], dict(call.kwargs)
        if use.length and _wants_mask(layer):
            place = next((p for name, p, value in _named(call, layer) if name == _MASK), _MASK)
            given = args[place] if isinstance(place, int) else kwargs.get(place)
            # Without a mask, torch would align the first query with the first key.
            mask = self._causal(length, hidden, layer) if given is None else given
            _put(args, kwargs, place, mask)
        _put(args, kwargs, use.place, cache_of_one(cached, index))
        return tuple(args), kwargs

    def _causal(self, length: int, hidden: Tensor, layer: nn.Module) -> Tensor:
        """The mask of the slice, once for all layers of one dtype: True or 0 where a token attends
        to another."""
        dtypes = {each.dtype for each in (hidden, *layer.parameters())}
        is_plain = len(dtypes) == 1 and not torch.is_autocast_enabled(hidden.device.type)
        # From True and False, torch makes such numbers in each layer, and keeps them there.
        dtype = hidden.dtype if is_plain else torch.bool
        if dtype not in self._masks:
            mask = hidden.new_ones(length, self.end, dtype=torch.bool).tril(self.end - length)
            if dtype != torch.bool:
                mask = hidden.new_zeros(mask.shape).masked_fill_(~mask, -math.inf)
            self._masks[dtype] = mask[None, None]
        return self._masks[dtype]

    def end_forward(self) -> None:
        """Note the keys and values up to the slice.

        Raises:
            ModelError: If a layer has not put its keys and values into the cache.
        """
        for number, each in self._caches.items():
            if each.end != self.end:
                raise ModelError(
                    f"Layer {number} has put the keys of {each.end} tokens into its key-value "
                    f"cache, and {self.end} have come. {REMEDY}"
                )
            if not self.is_again:
                self.keys.note_come(number, self.end)
        self.is_again = True
        self._caches.clear()
        # Each slice would keep its own until its backward.
        self._masks.clear()

    def begin_backward(self) -> None:
        """Refuse a backward out of order."""
        self.keys.begin_backward(self.end)

    def end_backward(self) -> None:
        """Refuse a backward that has left out the gradients of later slices."""
        self.keys.end_backward(self.start)


def _put(args: list[Any], kwargs: dict[str, Any], place: Place, value: Any) -> None:
    if isinstance(place, int):
        args[place] = value
    else:
        kwargs[place] = value


@cache
def _takes_mask(forward: Callable[..., Any]) -> bool:
    return _MASK in _parameters_of(forward)


def _wants_mask(layer: nn.Module) -> bool:
    """Whether a layer without a mask relies on torch for a causal one."""
    kinds = {
        getattr(getattr(m, "config", None), "_attn_implementation", None) for m in layer.modules()
    }
    return "sdpa" in kinds and _takes_mask(type(layer).forward)
