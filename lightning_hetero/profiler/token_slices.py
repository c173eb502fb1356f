"""Measures layers for slices along the tokens, on the first slices of a batch's sequences.

In n slices of equal work the first one has 1/n of the work of the sequence, and attends to itself
alone. So layers run on it as on a sequence, and its time stands for each of the n slices. It is the
longest of them, so its bytes are brought to the mean length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from ..errors import ModelError
from ..model.kv_cache import cache_index, cache_of_one
from ..model.layer_call import LayerCall, result_on_meta
from ..model.layers import describe_layer
from ..model.stored import shapes_only
from ..pipeline.token_slices import (
    REMEDY,
    Slice,
    SliceCut,
    check_can_run_on_slices,
    check_form,
    config_of,
    work_of,
)
from ..planner.profile import SliceProfile, Timing
from .embedding_and_head import Example

# The numbers of slices whose first ones are measured; the seconds of others lie between.
_MEASURED = (1, 8, 64)


def slice_examples(
    whole: Example, layers: Sequence[nn.Module], sizes: Sequence[int] | None
) -> tuple[int, dict[int, Example]]:
    """The tokens of a sequence, and examples of first slices by the mean size of such slices.

    Args:
        whole: A batch of sequences.
        layers: All decoder layers.
        sizes: The sizes to measure; by default an eighth of the sequence, a 64th, and all of it.

    Raises:
        ModelError: If a layer cannot run on slices.
        BatchError: If an argument of a layer has an unknown form.
    """
    check_form(whole.hidden, 0)
    for number, layer in enumerate(layers):
        check_can_run_on_slices(number, layer)
    num_tokens, work = whole.hidden.shape[1], work_of(layers)
    wanted = [num_tokens // count for count in _MEASURED] if sizes is None else sizes
    found = {}
    # The whole sequence also says the bytes of a token.
    for size in sorted({num_tokens, *(min(max(1, size), num_tokens) for size in wanted)}):
        first = SliceCut(round(num_tokens / size), work).slices(num_tokens)[0]
        found[size] = replace(
            whole,
            inputs={number: first.cut(hidden) for number, hidden in whole.inputs.items()},
            calls={
                number: first.cut_call(call, layers[number], has_cache=False)
                for number, call in whole.calls.items()
            },
        )
    return num_tokens, found


def of_mean_slices(timings: Sequence[Timing], examples: Mapping[int, Example]) -> list[Timing]:
    """The timings of layers on first slices, with the bytes of slices of mean length.

    A slice takes no longer than a larger one: other programs make work slower, never faster.
    """
    found = []
    for timing in timings:
        larger = [t for t in timings if _is_larger(t, timing)]
        share = timing.micro_batch_size / examples[timing.micro_batch_size].hidden.shape[1]
        changed = structs.replace(
            timing,
            forward_seconds=min(t.forward_seconds for t in (timing, *larger)),
            backward_seconds=min(t.backward_seconds for t in (timing, *larger)),
            saved_bytes=round(share * timing.saved_bytes),
            peak_bytes=round(share * timing.peak_bytes),
        )
        found.append(changed)
    return found


def _is_larger(one: Timing, other: Timing) -> bool:
    """Whether a timing is of the same work as another one, on a larger slice."""
    kinds = [(each.part, each.dtype, each.recompute) for each in (one, other)]
    return kinds[0] == kinds[1] and one.micro_batch_size > other.micro_batch_size


def describe_slices(
    whole: Example, layers: Sequence[nn.Module], on_meta: Sequence[nn.Module]
) -> SliceProfile:
    """The model's part of the profile on slices.

    Args:
        whole: A batch of sequences.
        layers: All decoder layers.
        on_meta: For each of them a layer without content.

    Raises:
        ModelError: If a layer keeps no keys and values.
    """
    work, samples = work_of(layers), whole.hidden.shape[0]
    kept = [
        _keys_and_values(on_meta[number], call, whole.inputs[number])
        for number, call in whole.calls.items()
    ]
    itemsize = whole.hidden.dtype.itemsize
    return SliceProfile(
        weight_work=work.a,
        pair_work=work.b,
        key_value_bytes=max(kept),
        attended_bytes=max(
            _copied_bytes(layers[number], num_bytes, whole.inputs[number])
            for number, num_bytes in zip(whole.calls, kept, strict=True)
        ),
        pair_bytes=samples * max(_pair_bytes(layer, itemsize) for layer in layers),
    )


def _keys_and_values(layer: nn.Module, call: LayerCall, hidden: Tensor) -> int:
    """The bytes of the keys and values of a layer for all sequences.

    Raises:
        ModelError: If its cache stays empty.
    """
    num_tokens, kept = hidden.shape[1], DynamicLayer()
    cut = Slice(0, num_tokens, num_tokens).cut_call(call, layer)
    args, kwargs = [*cut.args], dict(cut.kwargs)
    if cut.cache is not None:
        given: Any = args if isinstance(cut.cache.place, int) else kwargs
        given[cut.cache.place] = cache_of_one(kept, cache_index(layer) or 0)
    whole = replace(cut, args=tuple(args), kwargs=kwargs, cache=None)
    with shapes_only(layer):
        result_on_meta(layer, whole, hidden, {})
    found = [each for each in (kept.keys, kept.values) if each is not None]
    if not found or found[0].shape[-2] != num_tokens:
        raise ModelError(
            f"{describe_layer(call.layer_index).capitalize()} ({type(layer).__name__}) keeps no "
            "keys and values of its tokens in a cache when only shapes are computed, so their "
            f"memory is unknown. Pass a plan of your own. {REMEDY}"
        )
    return sum(each.nbytes for each in found)


def _copied_bytes(layer: nn.Module, kept_bytes: int, hidden: Tensor) -> int:
    """The bytes of attention's copies of all keys and values. With a mask, attention repeats keys
    for all heads that share them; eager attention may copy them too.

    Args:
        layer: The layer.
        kept_bytes: Its keys and values.
        hidden: Its hidden states.
    """
    config = config_of(layer)
    num_heads: int = getattr(config, "num_attention_heads", None) or 1
    features = getattr(config, "head_dim", None) or hidden.shape[-1] // num_heads
    of_heads = 2 * num_heads * features * hidden.shape[:-1].numel() * hidden.dtype.itemsize
    return max(of_heads, kept_bytes) if of_heads > kept_bytes or _is_eager(layer) else 0


def _pair_bytes(layer: nn.Module, itemsize: int) -> int:
    """The bytes of a token and another token under its attention: a mask of truth values and of
    numbers, and in eager attention the weights of each head, also in float32."""
    num_heads: int = getattr(config_of(layer), "num_attention_heads", None) or 1
    return 1 + itemsize + _is_eager(layer) * num_heads * (4 + itemsize)


def _is_eager(layer: nn.Module) -> bool:
    return getattr(config_of(layer), "_attn_implementation", None) == "eager"
