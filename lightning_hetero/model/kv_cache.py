"""Key-value caches as the coordinator counts them; keys and values are in `pipeline/stage.py`.

    cache.layers      0             1        2        3
                   keys, values   length   length   length      1 to 3 are hollow

A model reads the length of its cache for masks and positions, and passes the cache to its layers. A
kept cache gets a number. In the place of each hollow layer's keys and values, it holds a
`LayerAway` that counts their length; the number goes to the stages with the layers' arguments.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from ..errors import ModelError
from .layer_call import CacheUse, Place, caches_among, without_cache
from .layers import models_around

# More layers than any decoder has. It bounds the list that a number from the network can make.
_MOST_LAYERS = 8192

OVER = (
    "The key-value cache was kept on workers in a run that has ended, before layers moved, or for "
    "another model; begin with a new one."
)
_NO_WAY_BACK = (
    "A key-value cache on workers cannot be shortened in this version, so assisted decoding does "
    "not work; generate without an assistant model and without `prompt_lookup_num_tokens`."
)


def cache_index(layer: nn.Module) -> int | None:
    """The index of a layer's keys and values in a cache, if the layer has exactly one index."""
    found = {vars(module).get("layer_idx") for module in layer.modules()} - {None}
    index = found.pop() if len(found) == 1 else None
    return index if isinstance(index, int) and 0 <= index < _MOST_LAYERS else None


def _refusal(text: str) -> Callable[..., NoReturn]:
    """A method that refuses every call with this text."""

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise ModelError(text)

    return refuse


class LayersElsewhere(CacheLayerMixin):
    """Takes the places of other stages' layers in a cache."""

    update = lazy_initialization = get_seq_length = get_mask_sizes = get_max_length = _refusal(
        "A layer asks for the key-value cache of a layer on another stage; generate with "
        "`use_cache=False`, or put both layers into one stage."
    )


def cache_of_one(layer: CacheLayerMixin, index: int) -> DynamicCache:
    """A cache with the keys and values of one layer at an index."""
    made = DynamicCache()
    made.layer_class_to_replicate = None
    elsewhere = [LayersElsewhere()] * index  # type: ignore[no-untyped-call]
    made.layers.extend([*elsewhere, layer])
    return made


class CacheAway:
    """The identity of a cache kept on workers, shared by all its `LayerAway`."""

    def __init__(self, owner: object, number: int) -> None:
        self.owner = owner
        self.number = number


class LayerLeftOut(DynamicLayer):
    """Stands for a layer on a worker in a dropped cache.

    It refuses updates: a program cannot continue such a cache after the run.
    """

    def __init__(self, is_sliding: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_sliding = is_sliding

    update = _refusal(
        "The key-value cache lacks the layers that were on workers when it was made, because the "
        "call that made it did not ask for it; begin with a new one."
    )


class LayerAway(CacheLayerMixin):
    """Stands in a cache for the keys and values of a layer on a worker.

    It counts their length, and notes the selected samples of beam search. It refuses all other
    changes: the worker would have to follow them.
    """

    is_croppable = False
    supports_early_init = False

    def __init__(self, counted: DynamicLayer, cache: CacheAway) -> None:
        # Not the library's constructor: it would set `keys` and `values`.
        self.cache = cache
        self.is_initialized = True
        self.is_sliding = counted.is_sliding
        self._window: int | None = getattr(counted, "sliding_window", None)
        # The library's own class counts, with tensors that take no memory.
        self._counted = counted
        self._num_rows = 0
        self._rows: Tensor | None = None

    def extend(self, hidden: Tensor, place: Place) -> CacheUse:
        """Count the positions of a call with these hidden states."""
        use = CacheUse(self.cache.number, place, self.get_seq_length(), self._window, self._rows)
        self._num_rows, self._rows = hidden.shape[0], None
        counting = torch.empty(1, 1, hidden.shape[1], 1, device="meta")
        self._counted.update(counting, counting)
        return use

    def get_seq_length(self) -> int:
        return int(self._counted.get_seq_length())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        sizes: tuple[int, int] = self._counted.get_mask_sizes(query_length)
        return sizes

    def get_max_length(self) -> int:
        return int(self._counted.get_max_length())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select among the samples selected before; the next call sends the selection."""
        before = torch.arange(self._num_rows) if self._rows is None else self._rows
        self._rows = before.to(beam_idx.device)[beam_idx]
        self._num_rows = len(self._rows)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self._num_rows).repeat_interleave(repeats))

    keys = values = property(
        _refusal("The keys and values of layers on workers are not here to be read.")
    )
    update = lazy_initialization = _refusal(OVER)
    crop = activate_past_recording = _refusal(_NO_WAY_BACK)
    reset = _refusal("A key-value cache on workers cannot be reset; begin with a new one.")
    offload = _refusal("A key-value cache on workers cannot be offloaded; it is not here.")
    prefetch = _refusal("A key-value cache on workers cannot be prefetched; it stays there.")
    __reduce_ex__ = _refusal(
        "A key-value cache on workers cannot be copied or pickled; fill another one with the same "
        "tokens instead."
    )


class HollowCaches:
    """Decides whether the stages keep a key-value cache.

    A model makes a cache in every evaluation without being asked, and drops it. Such a cache is
    left out, so the batch can be cut and the stages stay without a cache. A cache is kept if the
    model's caller passed it or ``use_cache=True``, as `generate` does, and gradients are off.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._forgotten: SimpleQueue[int] = SimpleQueue()
        self._dropped: WeakSet[Cache] = WeakSet()
        self._here = threading.local()
        self._hooks: list[RemovableHandle] = []

    def listen(self, root: nn.Module, layer_names: Sequence[str]) -> None:
        """Hook the Hugging Face model with these layers, to see whether its callers want a
        cache."""
        for model in models_around(root, layer_names)[-1:]:
            signature = inspect.signature(type(model).forward)

            def note(model: nn.Module, args: Any, kwargs: Any, at: Any = signature) -> None:
                # Most callers name everything, and to bind takes long.
                named = at.bind_partial(model, *args).arguments if args else {}
                self._here.is_wanted = _is_wanted({**named, **kwargs})

            self._hooks.append(model.register_forward_pre_hook(note, with_kwargs=True))

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def take_forgotten(self) -> list[int]:
        """The numbers of kept caches garbage collected since the last call."""
        return [self._forgotten.get() for _ in range(self._forgotten.qsize())]

    def begin(
        self, number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Decide whether to keep the cache passed by a forward to its first hollow layer.

        Raises:
            ModelError: If its content is needed but was not kept, or if it cannot be kept.
        """
        found = [cache for _, cache in caches_among(args, kwargs)]
        kept = [self._is_kept(cache, number, layer) for cache in found]
        if len(kept) > 1 and any(kept):
            raise ModelError(
                f"Layer {number} gets {len(found)} key-value caches at once, and a worker keeps "
                "one; call the model with `use_cache=False`."
            )
        self._here.is_kept = any(kept)

    def leave_out(
        self, layer: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], CacheUse | None]:
        """A call's arguments without the cache, and the stage's use of the cache if it is kept."""
        found = caches_among(args, kwargs)
        if not found or not getattr(self._here, "is_kept", False):
            return *without_cache(layer, args, kwargs), None
        place, cache = found[0]
        use = self._layer_away(cache, layer).extend(hidden, place)
        args = tuple(None if value is cache else value for value in args)
        return args, {k: None if v is cache else v for k, v in kwargs.items()}, use

    def _is_kept(self, cache: Cache, number: int, layer: nn.Module) -> bool:
        away = _layers_away(cache)
        if away:
            self._check_can_go_on(away[0])
            return True
        index = cache_index(layer)
        self._check_is_new(cache, number if index is None else index)
        if torch.is_grad_enabled() or not getattr(self._here, "is_wanted", False):
            self._drop(cache, index)
            return False
        _check_can_be_kept(cache)
        return True

    def _drop(self, cache: Cache, index: int | None) -> None:
        """Make later reads of a dropped cache raise, in the run and after it."""
        self._dropped.add(cache)
        if index is not None and type(cache) is DynamicCache:
            _reach(cache, index)
            cache.layers[index] = LayerLeftOut(cache.is_sliding[index])

    def _check_can_go_on(self, away: LayerAway) -> None:
        if away.cache.owner is not self:
            raise ModelError(OVER)
        if torch.is_grad_enabled():
            raise ModelError(
                "A key-value cache on workers carries no gradients; call the model under "
                "`torch.no_grad()`, or without the cache."
            )

    def _check_is_new(self, cache: Cache, index: int) -> None:
        """Refuse a cache if its content for the hollow layers is missing or was made elsewhere."""
        if cache in self._dropped and not self._hooks:
            raise ModelError(
                "A key-value cache is kept on workers only for layers that are all inside one "
                "Hugging Face model; call the layers without a cache."
            )
        if cache in self._dropped:
            raise ModelError(
                "The key-value cache was not kept on the workers, because the call that made it "
                "did not ask for it or wanted gradients; pass `use_cache=True` to that call "
                "already, under `torch.no_grad()`."
            )
        if _is_filled(cache, index):
            raise ModelError(
                "A key-value cache that was filled elsewhere (before the run, or by prefix tuning) "
                "cannot go to the workers in this version; begin with an empty one, and tune with "
                "LoRA instead of prefixes."
            )

    def _layer_away(self, cache: Cache, layer: nn.Module) -> LayerAway:
        """The stand-in for a layer in a kept cache."""
        index = cache_index(layer)
        if index is None:
            raise ModelError(
                f"A {type(layer).__name__} does not say where in a key-value cache it belongs "
                "(`layer_idx`); call the model with `use_cache=False`."
            )
        _reach(cache, index)
        found = cache.layers[index] if index < len(cache.layers) else None
        if isinstance(found, LayerAway):
            return found
        away = LayerAway(_counted(found, index), self._cache_away(cache))
        cache.layers[index] = away
        return away

    def _cache_away(self, cache: Cache) -> CacheAway:
        for layer in _layers_away(cache):
            return layer.cache
        away = CacheAway(self, next(self._numbers))
        # Any thread may run the finalizer, so it only queues the number; `take_forgotten` reads it.
        weakref.finalize(away, self._forgotten.put, away.number).atexit = False
        return away


def _is_wanted(arguments: Mapping[str, Any]) -> bool:
    """Whether a model's caller passed a cache or asked for one."""
    has_cache = any(isinstance(value, Cache) for value in arguments.values())
    return has_cache or arguments.get("use_cache") is True


def _is_filled(cache: Cache, index: int) -> bool:
    """Whether a cache has content for a layer: keys and values, or a recurrent state."""
    layers = getattr(cache, "layers", ())
    if index < len(layers) and isinstance(layers[index], LinearAttentionCacheLayerMixin):
        return any(layers[index].has_previous_state.values())
    if index < len(layers) and not hasattr(layers[index], "get_seq_length"):
        return False  # a layer that gets the keys and values of an earlier one
    return bool(cache.get_seq_length(index) > 0)


def _reach(cache: Cache, index: int) -> None:
    """Add layers up to an index to a cache made without a config."""
    while cache.layer_class_to_replicate is not None and len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())


def _layers_away(cache: Cache) -> list[LayerAway]:
    return [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, LayerAway)]


def _check_can_be_kept(cache: Cache) -> None:
    """Refuse other caches than the default of `generate`."""
    is_offloading = getattr(cache, "offloading", False)
    if type(cache) is not DynamicCache or is_offloading:
        raise ModelError(
            f"A key-value cache of the kind {type(cache).__name__}"
            f"{' (offloading)' if is_offloading else ''} cannot be kept on workers in this "
            "version. Generate with `use_cache=False`; a decoder alone may also keep the default "
            "cache, so leave out `cache_implementation`, or pass a "
            "`DynamicCache(config=model.config)`."
        )


def _counted(found: object, index: int) -> DynamicLayer:
    """The part of a cache for a layer, if a stage can have a part that counts the same way.

    Raises:
        ModelError: If a stage cannot.
    """
    if type(found) is DynamicSlidingWindowLayer and found.record_past:
        raise ModelError(
            "A key-value cache that records the past, as assisted decoding needs it, cannot be "
            "kept on workers in this version; generate without an assistant model."
        )
    if isinstance(found, DynamicLayer) and type(found) in (DynamicLayer, DynamicSlidingWindowLayer):
        return found
    raise ModelError(
        f"Layer {index} of the key-value cache is a {type(found).__name__}, which cannot be kept "
        "on workers in this version; generate with `use_cache=False`."
    )
