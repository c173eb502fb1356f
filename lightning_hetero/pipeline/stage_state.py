"""Key-value caches on a stage: its own layers' keys and values, by the caches' numbers.

What the coordinator counts goes along with every call, so that a cache of which one stage has lost
something, or holds a forward that another has not seen, is refused and never read.

What a stage's layers keep from one forward to the next, where each micro-batch is a forward.

A plain attribute that a forward changes is refused. Of buffers it is told which were updated more
often than on one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from ..errors import ModelError
from ..model.attributes import AttributeState
from ..model.kv_cache import cache_index
from ..model.layer_call import CacheUse, LayerCall
from ..model.layers import describe_layer

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


# Their own forwards change no attribute in a way that others compute with.
_TRUSTED = frozenset({"torch", "bitsandbytes", "peft"})

# A buffer, and how often it was changed in place.
_Seen = tuple[Tensor | None, int]


@dataclass(frozen=True)
class Updates:
    """Buffers that were updated by each micro-batch of a step or, with ``is_again``, by a forward
    that ran again."""

    names: tuple[str, ...]
    is_again: bool


@dataclass
class _Step:
    """The forwards of a step so far: of which micro-batches, and what buffers they updated."""

    microbatches: set[int] = field(default_factory=set)
    updated: set[str] = field(default_factory=set)


class LayerState:
    """The attributes and buffers of a stage's layers.

    Args:
        layers: By their numbers, with attributes as on the coordinator.
    """

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        self._layers = layers
        self._attributes = AttributeState(layers, _may_keep_state)
        self._modules = [
            (f"{number}.{path}".rstrip("."), module)
            for number, layer in layers.items()
            for path, module in layer.named_modules()
        ]
        self._step = _Step()
        self._updates: list[Updates] = []
        self._told: set[Updates] = set()

    def begin_step(self) -> None:
        """Forwards from now on are of another batch."""
        self._step = _Step()

    def note_attributes(self) -> None:
        """The coordinator has set some."""
        self._attributes.note()

    @contextmanager
    def watching(self, microbatch: int | None, is_again: bool) -> Iterator[None]:
        """Around a forward of all layers; without a micro-batch it is a trial.

        Raises:
            ModelError: If it has changed an attribute.
        """
        before = self._buffers()
        yield
        self._check_attributes()
        if microbatch is None:
            return
        self._step.microbatches.add(microbatch)
        updated = _updated(before, self._buffers()) | self._statistics()
        self._step.updated |= updated
        if is_again:
            self._note(updated, is_again=True)
        if len(self._step.microbatches) > 1:
            self._note(self._step.updated, is_again=False)

    def take_updates(self) -> list[Updates]:
        """What is to be known of buffers; each set of them is told once."""
        taken, self._updates = self._updates, []
        return taken

    def _check_attributes(self) -> None:
        changes = self._attributes.take_changes()
        if not changes:
            return
        change, layer = changes[0], self._layers[changes[0].layer_index]
        name = ".".join(part for part in (change.path, change.names[0]) if part)
        raise ModelError(
            f"The forward of {describe_layer(change.layer_index)} ({type(layer).__name__}) changed "
            f"its attribute {name!r} on a worker, where neither the model nor another worker would "
            "see it and each micro-batch would find what the one before has left. State of a layer "
            "must be a buffer or come as an argument; or keep the layer with the coordinator."
        )

    def _buffers(self) -> dict[str, _Seen]:
        return {
            f"{place}.{name}": (buffer, 0 if buffer is None else _version(buffer))
            for place, module in self._modules
            for name, buffer in module._buffers.items()
        }

    def _statistics(self) -> set[str]:
        """The running statistics of norms, which torch updates without counting it."""
        return {
            f"{place}.{name}"
            for place, module in self._modules
            if isinstance(module, _NormBase) and module.training and module.track_running_stats
            for name, buffer in module._buffers.items()
            if buffer is not None
        }

    def _note(self, updated: set[str], is_again: bool) -> None:
        updates = Updates(tuple(sorted(updated)), is_again)
        if updated and updates not in self._told:
            self._told.add(updates)
            self._updates.append(updates)


def _may_keep_state(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] not in _TRUSTED


def _updated(before: Mapping[str, _Seen], now: Mapping[str, _Seen]) -> set[str]:
    return {
        name
        for name, (buffer, version) in now.items()
        if name not in before or before[name][0] is not buffer or before[name][1] != version
    }


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version
