"""Decoder layers cut in two after their attention, for plans finer than whole layers.

    layer 3       h + attention(norm(h))   │   h + mlp(norm(h))
    as halves     6                        │   7

`partial_layers.py` defines a half. To find the cut, ``forward`` is called with stand-ins for the
children: the two halves in a row must give the bits of the whole layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ..errors import ModelError
from .captured_outputs import has_hooks
from .layers import DecoderLayer, identity_of
from .partial_layers import (
    AbsentChildren,
    InHalves,
    half_of,
    halves_of,
    hidden_in,
    is_attention,
    with_children,
)

# The kinds of ``*args`` and ``**kwargs``, which may be empty.
_COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def cut_layers(layers: Sequence[DecoderLayer]) -> list[DecoderLayer]:
    """Cut each layer in two; the layer calls its halves until `join_layers`.

    A layer that is still cut keeps its halves.

    Returns:
        The halves of all layers, in order.

    Raises:
        ModelError: If a layer cannot be cut.
    """
    found: list[Sequence[nn.Module]] = []
    for layer in layers:
        module = layer.module
        if (left := halves_of(module)) is not None:
            found.append(left)
            continue
        _check_can_be_cut(layer)
        cut = _find_cut(module)
        if cut is None:
            raise ModelError(
                f"{layer.name} ({type(module).__name__}) cannot be cut behind its attention: two "
                "halves in a row would not compute the same as the layer, or this cannot be "
                "checked. Leave out `cut_layers`."
            )
        found.append([half_of(module, absent) for absent in cut])
        _check_nothing_is_shared(layer, found[-1])
    made = []
    for layer, halves in zip(layers, found, strict=True):
        InHalves(layer.module, halves).put_on()
        made += [replace(layer, module=half) for half in halves]
    return made


class _StandIn(nn.Module):
    """Computes a known function in the place of a child, and notes its call."""

    def __init__(self, name: str, number: int, in_tuple: bool, called: list[str]) -> None:
        super().__init__()
        self.name = name
        self._number = number
        self._in_tuple = in_tuple
        self._called = called

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, None]:
        self._called.append(self.name)
        result = torch.sin(hidden_in(args, kwargs) * (2 + self._number) + self._number)
        return (result, None) if self._in_tuple else result


def _check_can_be_cut(layer: DecoderLayer) -> None:
    module, name = layer.module, f"{layer.name} ({type(layer.module).__name__})"
    if type(module).__module__.partition(".")[0] != transformers.__name__:
        raise ModelError(
            f"{name} is not a layer of transformers, and `cut_layers` can only cut those. Put two "
            "modules in its place in the list of layers."
        )
    if "forward" in vars(module):
        raise ModelError(
            f"{name} has a `forward` of its own that hides that of its class. Either it is "
            "patched, and halves would ignore the patch; or its worker was lost in an earlier run. "
            "Leave out `cut_layers`, or build the module anew and continue with `ckpt_path`."
        )
    if has_hooks(module):
        raise ModelError(
            f"{name} has a hook, which would see hidden states that are computed elsewhere. Remove "
            "the hook, or leave out `cut_layers`."
        )
    if getattr(module, "gradient_checkpointing", False):
        raise ModelError(
            f"{name} has gradient checkpointing on, which does not know halves. Switch it off, "
            "and write `recompute: true` into the plan."
        )
    if module._parameters or module._buffers:
        own = next(iter({**module._parameters, **module._buffers}))
        raise ModelError(
            f"{name} has a tensor of its own, {own!r}, which belongs to neither half. Leave out "
            "`cut_layers`."
        )


def _check_nothing_is_shared(layer: DecoderLayer, halves: Sequence[nn.Module]) -> None:
    first, second = (
        {identity_of(tensor) for tensor in (*half.parameters(), *half.buffers())} for half in halves
    )
    if first & second:
        raise ModelError(
            f"The attention of {layer.name} shares a tensor with what follows it. Leave out "
            "`cut_layers`."
        )


def _find_cut(layer: nn.Module) -> tuple[AbsentChildren, AbsentChildren] | None:
    """The absent children of the first half and of the second one, if there is a cut."""
    for in_tuple in (True, False):
        called: list[str] = []
        stand_ins = {
            name: _StandIn(name, number, in_tuple and is_attention(name), called)
            for number, (name, _) in enumerate(layer.named_children())
        }
        whole = with_children(layer, stand_ins)
        expected = _try(whole)
        order = list(dict.fromkeys(called))
        if expected is None or _leaves_out_some(layer, order):
            continue
        ends = [number for number, name in enumerate(order, start=1) if is_attention(name)]
        for end in range(max(ends, default=len(order)), len(order)):
            behind = dict.fromkeys(order[end:], False)
            before = {n: in_tuple and is_attention(n) for n in stand_ins if n not in behind}
            found = _try(half_of(whole, behind), half_of(whole, before))
            if found is not None and torch.equal(expected, found):
                return behind, before
    return None


def _leaves_out_some(layer: nn.Module, called: Sequence[str]) -> bool:
    """Whether a child with weights was not called: then the trial missed a part of the layer.

    Attention to an encoder does not count.
    """
    return any(
        name not in called and "cross" not in name and any(True for _ in child.parameters())
        for name, child in layer.named_children()
    )


def _try(*layers: nn.Module) -> Tensor | None:
    """Run layers of stand-ins, one after the other; None if one of them raises."""
    for layer in layers:
        layer.training = False  # no dropout
    # Five samples: a tensor of two could be unpacked like a tuple of two.
    hidden = torch.linspace(-1, 1, 5 * 3 * 4, dtype=torch.float64).view(5, 3, 4)
    with torch.no_grad():
        for layer in layers:
            try:
                result = type(layer).forward(layer, hidden, **_required(type(layer)))
            except Exception:  # a stand-in lacks the attributes of a real child
                return None
            hidden = result[0] if isinstance(result, tuple) else result
    return hidden


def _required(layer_class: type[nn.Module]) -> dict[str, None]:
    """None for each required argument of the forward besides the hidden states."""
    _self, _hidden_states, *others = inspect.signature(layer_class.forward).parameters.values()
    required = [each for each in others if each.default is inspect.Parameter.empty]
    return {each.name: None for each in required if each.kind not in _COLLECTING}
