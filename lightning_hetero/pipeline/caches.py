"""Key-value caches on a stage: its own layers' keys and values, by the caches' numbers.

What the coordinator counts goes along with every call, so that a cache of which one stage has lost
something, or holds a forward that another has not seen, is refused and never read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from ..errors import ModelError
from ..model.kv_cache import cache_index
from ..model.layer_call import CacheUse, LayerCall

# A coordinator that holds more has forgotten to let go of them.
MOST_CACHES = 1024


class StageCaches:
    """The caches that a stage keeps."""

    def __init__(self) -> None:
        self._caches: dict[int, Cache] = {}
        self._elsewhere = _Elsewhere()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self._caches)

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget these; their users are gone."""
        for number in numbers:
            self._caches.pop(number, None)

    def clear(self) -> None:
        """Forget all. Whoever goes on with one is refused."""
        self._caches.clear()

    def arguments(
        self, call: LayerCall, layer: nn.Module, hidden: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the layer is called with besides the hidden states, with the cache in its place.

        Raises:
            ModelError: If the cache is not as the coordinator counts it.
        """
        use = call.cache
        if use is None:
            return call.args, call.kwargs
        cache = self._cache(use)
        self._prepare(cache, use, call.layer_index, layer, hidden)
        if isinstance(use.place, str):
            return call.args, {**call.kwargs, use.place: cache}
        before, after = call.args[: use.place], call.args[use.place + 1 :]
        return (*before, cache, *after), call.kwargs

    def _cache(self, use: CacheUse) -> Cache:
        if use.number not in self._caches:
            if len(self._caches) >= MOST_CACHES:
                raise ModelError(
                    f"{MOST_CACHES} key-value caches are held at once; let go of those that are "
                    "done with, such as the `past_key_values` in what `generate` returned."
                )
            # Its layers are put in one by one.
            cache = DynamicCache()
            cache.layer_class_to_replicate = None
            self._caches[use.number] = cache
        return self._caches[use.number]

    def _prepare(
        self, cache: Cache, use: CacheUse, number: int, layer: nn.Module, hidden: Tensor
    ) -> None:
        """Bring the layer's part of the cache to where the call begins."""
        index = cache_index(layer)
        if index is None:
            raise ModelError(f"Layer {number} has no place in a key-value cache (`layer_idx`).")
        while len(cache.layers) <= index:
            cache.layers.append(self._elsewhere)
        found = cache.layers[index]
        if not isinstance(found, DynamicLayer):
            found = cache.layers[index] = _new_layer(use)
        if found.get_seq_length() != use.length:
            raise ModelError(
                f"The key-value cache holds {found.get_seq_length()} positions of layer {number}, "
                f"and {use.length} have gone through the model: a forward with it failed, or a "
                "step was aborted since. Begin with a new cache."
            )
        if use.rows is not None:
            _check_rows(use.rows, found, hidden)
            found.batch_select_indices(use.rows)


def _new_layer(use: CacheUse) -> DynamicLayer:
    """Of the class that the coordinator's cache has for it, so that both count alike."""
    return DynamicLayer() if use.window is None else DynamicSlidingWindowLayer(use.window)


def _check_rows(rows: Tensor, found: DynamicLayer, hidden: Tensor) -> None:
    """A wrong row must not reach a GPU, whose context it would end, nor take memory of its own."""
    is_index = rows.dtype == torch.int64 and rows.shape == (hidden.shape[0],)
    num_rows = 0 if found.keys is None else found.keys.shape[0]
    if not is_index or not bool(((rows >= 0) & (rows < num_rows)).all()):
        raise ModelError(
            f"The samples {rows.tolist()[:5]} cannot be taken from a key-value cache of {num_rows} "
            f"for a batch of {hidden.shape[0]}."
        )


class _Elsewhere(CacheLayerMixin):
    """Stands in a stage's cache for layers that are not the stage's."""

    def update(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise ModelError(
            "A layer asks for the key-value cache of a layer on another stage; generate with "
            "`use_cache=False`, or put both layers into one stage."
        )

    lazy_initialization = get_seq_length = get_mask_sizes = get_max_length = update
