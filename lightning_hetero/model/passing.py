"""Layers that compute nothing: they pass hidden states on, and note how the model calls them.

    embedding ─▶ layer 0 ─▶ layer 1 ─▶ … ─▶ layer n ─▶ head
                 enter                      leave(hidden) ─▶ what the head gets

Where a layer would change the shape of the hidden states, zeros of the other shape go on. So the
coordinator's own parts can be run, and their time taken, while no layer computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .captured_outputs import CollectingHooks, SilencedHooks, add_collected, wanted_kinds
from .four_bit import shapes_only
from .layer_call import LayerCall, expected_result, take_hidden, without_cache
from .layers import DecoderLayer
from .override import stand_in

# Hidden states, the call and the kinds wanted, to what one layer would add to what is collected.
Outputs = Callable[[Tensor, LayerCall, Sequence[str]], Iterable[tuple[str, Tensor]]]


class PassingLayers:
    """All decoder layers of a model while `passing`.

    Args:
        root: The LightningModule.
        layers: In their order.
        on_meta: A layer without content for each of them, which is asked for the form of its
            result.
        outputs: Makes up what a layer would add to the outputs that the model collects.
        enter: Called with the hidden states before the first layer, and with its call.
        leave: Called with those behind the last layer; the model goes on with what it returns.

    Attributes:
        inputs: The form of the hidden states that came into each layer, on ``meta``.
        calls: How each was called, both at the first time.
    """

    def __init__(
        self,
        root: nn.Module,
        layers: Sequence[DecoderLayer],
        on_meta: Mapping[int, nn.Module],
        outputs: Outputs,
        enter: Callable[[Tensor, LayerCall], None],
        leave: Callable[[Tensor], Tensor],
    ) -> None:
        self._root = root
        self._layers = layers
        self._on_meta = on_meta
        self._outputs = outputs
        self._enter = enter
        self._leave = leave
        self._results: dict[int, tuple[int, Tensor]] = {}
        self.inputs: dict[int, Tensor] = {}
        self.calls: dict[int, LayerCall] = {}

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Inside, the layers compute nothing."""
        collecting = CollectingHooks(self._root, [layer.name for layer in self._layers])
        silenced = [SilencedHooks(layer.module) for layer in self._layers]
        put_back: list[Callable[[], None]] = []
        try:
            put_back = [
                stand_in(layer.module, "forward", _Passing(self, number))
                for number, layer in enumerate(self._layers)
            ]
            yield
        finally:
            for each in reversed(put_back):
                each()
            for taken in silenced:
                taken.restore()
            collecting.remove()

    def call(
        self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | tuple[Tensor | None, ...]:
        """What a layer's ``forward`` does."""
        hidden, args, kwargs = take_hidden(number, args, kwargs)
        args, kwargs = without_cache(args, kwargs)
        length, behind = self._result(number, hidden, args, kwargs)
        call = LayerCall(number, self._layers[number].module.training, args, kwargs, length)
        self.calls.setdefault(number, call)
        self.inputs.setdefault(number, torch.empty_like(hidden, device="meta"))
        if number == 0:
            self._enter(hidden, call)
        kinds = wanted_kinds()
        if kinds:
            add_collected(hidden, self._outputs(hidden, call, kinds))
        if (hidden.shape, hidden.dtype) != (behind.shape, behind.dtype):
            hidden = torch.zeros_like(behind, device=hidden.device)
        if number == len(self._layers) - 1:
            hidden = self._leave(hidden)
        return (hidden, *[None] * (length - 1)) if length else hidden

    def _result(
        self, number: int, hidden: Tensor, args: tuple[Any, ...], kwargs: Any
    ) -> tuple[int, Tensor]:
        if number not in self._results:
            layer = self._on_meta[number].train(self._layers[number].module.training)
            with shapes_only(layer):
                self._results[number] = expected_result(layer, number, hidden, args, kwargs)
        return self._results[number]


class _Passing:
    def __init__(self, layers: PassingLayers, number: int) -> None:
        self._layers = layers
        self._number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor | None, ...]:
        return self._layers.call(self._number, args, kwargs)
