"""One sequence in slices along its tokens, with the keys and values of earlier slices.

Slice j runs through a layer with the keys and values of the slices before it. They are leaves
there, so the graphs of slices are apart. Backwards run from the last slice to the first; a backward
gives the gradients of all earlier keys and values to the slice before:

    slice 0   hidden ─▶ layer ─▶ out        keys 0     ◀──────┐ gradients
    slice 1   hidden ─▶ layer ─▶ out        keys 0, 1  ◀──┐   │
                          ▲ keys 0, leaves ───────────────┼───┘
    slice 2   hidden ─▶ layer ─▶ out                      │
                          ▲ keys 0, 1, leaves ────────────┘

So weights add up their gradients in one order, from the last slice to the first. The keys and
values of a sequence exist on their stage from the forward of its first slice to its backward.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ..errors import BatchError, ModelError, RemoteProtocolError
from ..model.kv_cache import LayersElsewhere, cache_index
from ..model.layer_call import SLICES, CacheUse, LayerCall, Place
from ..model.placeholders import instances_in, mapped
from ..model.stored import describe_stored
from .boundary import leaf_of
from .slice_cut import Work as Work
from .slice_cut import cut_by_work as cut_by_work

# The names of a layer's argument for its cache.
_CACHES = ("past_key_values", "past_key_value", "layer_past")
_MASK = "attention_mask"
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


def _growth_of(layer: nn.Module) -> float:
    """The multiplications of a layer for each token and each token before it."""
    config = next((m.config for m in layer.modules() if hasattr(m, "config")), None)
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
        """The hidden states of the slice, of the shape (samples, tokens, features)."""
        return hidden.narrow(1, self.start, self.end - self.start)

    def cut_call(self, call: LayerCall, layer: nn.Module, has_cache: bool = True) -> LayerCall:
        """The call of a layer for the slice.

        Args:
            call: The call for the whole sequence, without a cache.
            layer: The layer.
            has_cache: Whether the slice goes on from the keys and values of earlier slices;
                otherwise it must be the first one.

        Raises:
            BatchError: If an argument has an unknown form.
        """
        args, kwargs = [*call.args], dict(call.kwargs)
        cache_at: Place = cache_place(layer) or ""
        for name, place, value in _named(call, layer):
            if name == cache_at:
                cache_at = place
            else:
                _put(args, kwargs, place, self._cut_argument(name, value, call.layer_index))
        use = CacheUse(SLICES, cache_at, self.start) if has_cache else None
        return replace(call, args=tuple(args), kwargs=kwargs, cache=use)

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
        if name == _MASK and tensor.ndim == 4 and shape[-2:] == (total, total):
            rows = tensor[..., self.start : self.end, :]
            if bool(_attended(rows[..., self.end :], number).any()):
                raise BatchError(
                    f"The attention mask of layer {number} lets a token attend to later tokens, as "
                    f"a prefix or an image does, so the layer is not causal. {REMEDY}"
                )
            return rows[..., : self.end]
        if name == "position_embeddings" and tensor.ndim in (2, 3) and shape[-2] == total:
            return tensor.narrow(-2, self.start, length)
        is_numbers = name in ("position_ids", "cache_position") and tensor.ndim in (1, 2)
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


def _unknown(name: str, form: str, number: int) -> BatchError:
    return BatchError(
        f"The argument {name} of layer {number} {form}, and how it belongs to the tokens of a "
        f"sequence is unknown. {REMEDY}"
    )


def check_form(hidden: Tensor, number: int) -> None:
    """Refuse hidden states without a dimension of tokens.

    Raises:
        BatchError: With their shape.
    """
    if hidden.ndim != 3 or not hidden.is_floating_point():
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


@dataclass
class _OfLayer:
    """The keys and values of a layer for all slices so far, and their gradients from later slices.

    Where slices are cut apart, the tensors have no graph; ``requires_grad`` marks the ones that
    need a gradient.
    """

    tensors: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...] = (None, None)


@dataclass
class _LayerPass:
    """One slice in one layer: the leaves of earlier keys and values, and the cache after it."""

    past: tuple[Tensor, ...]
    cached: DynamicLayer

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All keys and values so far, with the graph of the slice."""
        return tuple(each for each in (self.cached.keys, self.cached.values) if each is not None)


@dataclass
class SequenceKeys:
    """The keys and values of one sequence on its way through some layers, slice by slice.

    Args:
        is_cut: Whether the graph is cut between slices.
    """

    is_cut: bool = True
    _layers: dict[int, _OfLayer] = field(default_factory=dict)
    # The end of the slice with the next backward; None before the first one.
    _backward_at: int | None = None

    def past(self, number: int, length: int, is_again: bool) -> tuple[Tensor, ...]:
        """The keys and values of a layer for the first tokens, as leaves.

        Raises:
            ModelError: If there are others.
        """
        held = self._layers.get(number)
        there = 0 if held is None else held.tensors[0].shape[-2]
        if there < length or (there > length and not is_again):
            raise ModelError(
                f"A slice of a sequence begins at token {length}, and layer {number} has the keys "
                f"of {there} tokens: a slice is missing, or came twice."
            )
        if held is None or length == 0:
            return ()
        if not self.is_cut:
            return held.tensors
        # A forward that runs again has kept no graph, so whether keys need gradients shows now.
        return tuple(
            each[..., :length, :].detach().requires_grad_(each.requires_grad or is_again)
            for each in held.tensors
        )

    def keep(self, number: int, tensors: tuple[Tensor, ...]) -> None:
        """Keep the keys and values of a layer up to a slice."""
        if self.is_cut:
            tensors = tuple(leaf_of(each) for each in tensors)
        self._layers[number] = _OfLayer(tensors)

    def starts(self, end: int, passes: Mapping[int, _LayerPass]) -> list[tuple[Tensor, Tensor]]:
        """The keys and values of a slice at which its backward starts, with their gradients.

        Args:
            end: The number after its last token.
            passes: The slice in each layer.

        Raises:
            RemoteProtocolError: If another slice comes next.
        """
        last = max(held.tensors[0].shape[-2] for held in self._layers.values())
        expected = last if self._backward_at is None else self._backward_at
        if end != expected:
            raise RemoteProtocolError(
                f"The backward of the slice up to token {end} came, and the one of the slice up to "
                f"token {expected} is next."
            )
        found = []
        for number, each in passes.items():
            pairs = zip(each.tensors, self._layers[number].gradients, strict=True)
            found += [(t, g) for t, g in pairs if g is not None and t.requires_grad]
        return found

    def pass_back(self, start: int, passes: Mapping[int, _LayerPass]) -> None:
        """Keep the gradients of the earlier slices' keys and values, after a slice's backward."""
        self._backward_at = start
        for number, each in passes.items():
            gradients = tuple(leaf.grad for leaf in each.past)
            self._layers[number].gradients = gradients or (None, None)


@dataclass
class SlicePass:
    """One slice on its way through some layers.

    Args:
        keys: The keys and values of its sequence.
        is_again: Whether the forward runs again for its backward.
    """

    keys: SequenceKeys
    is_again: bool = False
    _passes: dict[int, _LayerPass] = field(default_factory=dict)
    _masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    start: int = 0
    end: int = 0

    def arguments(
        self, call: LayerCall, layer: nn.Module, hidden: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The layer's arguments besides the hidden states, with the cache in its place.

        Raises:
            ModelError: If a slice before this one has not come.
        """
        use, index = call.cache, cache_index(layer)
        if use is None or index is None:
            raise ModelError(f"Layer {call.layer_index} has no place for keys and values.")
        length, self.end = hidden.shape[1], use.length + hidden.shape[1]
        self.start = use.length
        past = self.keys.past(call.layer_index, use.length, self.is_again)
        cached = DynamicLayer()
        if past:
            cached.lazy_initialization(*past)
            cached.keys, cached.values = past
        made = DynamicCache()
        made.layer_class_to_replicate = None
        made.layers.extend([LayersElsewhere()] * index)  # type: ignore[no-untyped-call]
        made.layers.append(cached)
        self._passes[call.layer_index] = _LayerPass(past, cached)
        args, kwargs = [*call.args], dict(call.kwargs)
        if use.length and _wants_mask(layer):
            place = next((p for name, p, value in _named(call, layer) if name == _MASK), _MASK)
            given = args[place] if isinstance(place, int) else kwargs.get(place)
            # Without a mask, torch would align the first query with the first key.
            mask = self._causal(length, hidden.device) if given is None else given
            _put(args, kwargs, place, mask)
        _put(args, kwargs, use.place, made)
        return tuple(args), kwargs

    def _causal(self, length: int, device: torch.device) -> Tensor:
        """The mask of the slice: True where a token attends to another."""
        if (length, self.end) not in self._masks:
            ones = torch.ones(length, self.end, dtype=torch.bool, device=device)
            self._masks[length, self.end] = ones.tril(self.end - length)[None, None]
        return self._masks[length, self.end]

    def end_forward(self) -> None:
        """Keep the keys and values up to the slice.

        Raises:
            ModelError: If a layer has not put its keys and values into the cache.
        """
        for number, each in self._passes.items():
            there = each.cached.get_seq_length()
            if there != self.end:
                raise ModelError(
                    f"Layer {number} has put the keys of {there} tokens into its key-value cache, "
                    f"and {self.end} have come. {REMEDY}"
                )
            if not self.is_again:
                self.keys.keep(number, each.tensors)

    def again(self) -> SlicePass:
        """The slice for a forward that runs again."""
        return SlicePass(self.keys, is_again=True)

    @property
    def past(self) -> list[Tensor]:
        """The leaves of the earlier slices' keys and values, over all layers."""
        return [leaf for each in self._passes.values() for leaf in each.past]

    def starts(self) -> list[tuple[Tensor, Tensor]]:
        """The keys and values at which the slice's backward starts, with their gradients."""
        return self.keys.starts(self.end, self._passes)

    def end_backward(self) -> None:
        """Pass the gradients of earlier keys and values to the slice before."""
        self.keys.pass_back(self.start, self._passes)


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
