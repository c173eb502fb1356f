"""What stands in a key-value cache for the keys and values of layers on workers."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from ..errors import ModelError
from .calls import CacheUse, Place

# No decoder has more; a list as long as a number from the network is never made.
_MOST_LAYERS = 8192

OVER = (
    "The key-value cache was kept on workers in a run that has ended, before layers moved, or for "
    "another model; begin with a new one."
)
_NO_WAY_BACK = (
    "A key-value cache on workers does not go back in this version, so assisted decoding does not "
    "work; generate without an assistant model and without `prompt_lookup_num_tokens`."
)


def cache_index(layer: nn.Module) -> int | None:
    """Where in a cache the layer has its keys and values, if it says so and means one place."""
    found = {vars(module).get("layer_idx") for module in layer.modules()} - {None}
    index = found.pop() if len(found) == 1 else None
    return index if isinstance(index, int) and 0 <= index < _MOST_LAYERS else None


class CacheAway:
    """A cache that is kept on workers, as what stands in it for its layers has in common."""

    def __init__(self, owner: object, number: int) -> None:
        self.owner = owner
        self.number = number


class LayerLeftOut(DynamicLayer):
    """Stands for a layer on a worker in a cache that was not kept.

    It takes nothing, so that nobody goes on with such a cache when the run is over.
    """

    def __init__(self, is_sliding: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_sliding = is_sliding

    def update(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise ModelError(
            "The key-value cache lacks the layers that were on workers when it was made, because "
            "the call that made it did not ask for it; begin with a new one."
        )


class LayerAway(CacheLayerMixin):
    """Stands in a cache for the keys and values of a layer on a worker.

    It knows their length, and which samples are wanted of them: beam search selects. Everything
    else that the worker would have to follow is refused.
    """

    is_croppable = False
    supports_early_init = False

    def __init__(self, counted: DynamicLayer, cache: CacheAway) -> None:
        # Not the library's constructor: it would set `keys` and `values`.
        self.cache = cache
        self.is_initialized = True
        self.is_sliding = counted.is_sliding
        self._window: int | None = None
        if isinstance(counted, DynamicSlidingWindowLayer):
            self._window = counted.sliding_window
        # The library's own class does the counting, with tensors that take no memory.
        self._counted = counted
        self._num_rows = 0
        self._rows: Tensor | None = None

    def extend(self, hidden: Tensor, place: Place) -> CacheUse:
        """Note that a call with these hidden states makes it longer."""
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
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(torch.arange(self._num_rows).repeat_interleave(repeats))

    def _select(self, indices: Tensor) -> None:
        """Rows of the rows that were selected before; the next call takes them along."""
        before = torch.arange(self._num_rows) if self._rows is None else self._rows
        self._rows = before.to(indices.device)[indices]
        self._num_rows = len(self._rows)

    @property
    def keys(self) -> NoReturn:  # type: ignore[override]
        raise ModelError("The keys and values of layers on workers are not here to be read.")

    values = keys

    def update(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise ModelError(OVER)

    def lazy_initialization(self, *_args: Any) -> NoReturn:
        raise ModelError(OVER)

    def crop(self, tokens_to_remove: int) -> NoReturn:
        raise ModelError(_NO_WAY_BACK)

    def activate_past_recording(self) -> NoReturn:
        raise ModelError(_NO_WAY_BACK)

    def reset(self) -> NoReturn:
        raise ModelError("A key-value cache on workers cannot be reset; begin with a new one.")

    def offload(self) -> NoReturn:
        raise ModelError("A key-value cache on workers cannot be offloaded; it is not here.")

    def prefetch(self) -> NoReturn:
        raise ModelError("A key-value cache on workers cannot be prefetched; it stays there.")

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise ModelError(
            "A key-value cache on workers cannot be copied or pickled; fill another one with the "
            "same tokens instead."
        )
