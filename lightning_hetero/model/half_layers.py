"""Decoder layers cut in two behind their attention, so that a plan can be finer than whole layers.

    layer 3       h + attention(norm(h))   │   h + mlp(norm(h))
    as halves     6                        │   7

A half is a layer of the same class with the children of the whole layer. The children of the other
half are absent: they return zeros, so that they add nothing to the hidden states. To find the cut,
``forward`` is called with stand-ins for the children: the two halves in a row must give the bits of
the whole layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ..errors import ModelError
from .attributes import own_attributes
from .captured_outputs import has_hooks
from .layer_call import take_hidden, without_cache
from .layers import DecoderLayer, identity_of
from .override import ForwardOverride, overrides_of

# Attributes that a layer and its halves do not share while they are cut or away.
_OF_EACH = frozenset({"_apply", "forward"})

# The kinds of ``*args`` and ``**kwargs``, which may be empty.
_COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

AbsentChildren = Mapping[str, bool]
"""The names of absent children, and whether each returns a tuple, as attention mostly does."""


class Absent(nn.Module):
    """Stands for a child of the other half: it adds nothing to the hidden states."""

    def __init__(self, in_tuple: bool) -> None:
        super().__init__()
        self.in_tuple = in_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, None]:
        # Minus zero: plus zero would change the sign of a minus zero. A scalar costs little.
        zero = _hidden(args, kwargs).new_full((), -0.0)
        return (zero, None) if self.in_tuple else zero


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
        _InHalves(layer.module, halves).put_on()
        made += [replace(layer, module=half) for half in halves]
    return made


def join_layers(root: nn.Module) -> None:
    """Undo `cut_layers`. Layers whose worker was lost stay cut and raise when called."""
    for module in root.modules():
        cut = _cut_of(module)
        if cut is not None and not any(any(overrides_of(half)) for half in cut.halves):
            cut.take_off()


def half_of(layer: nn.Module, absent: AbsentChildren) -> nn.Module:
    """A layer of the same class without some of the children.

    Raises:
        ModelError: If the layer has no such children.
    """
    unknown = sorted(absent.keys() - layer._modules.keys())
    if unknown:
        raise ModelError(f"A {type(layer).__name__} has no children {unknown} to leave out.")
    return _with(layer, {name: Absent(in_tuple) for name, in_tuple in absent.items()})


def absent_in(layer: nn.Module) -> dict[str, bool]:
    """The absent children of a half; empty for a whole layer."""
    children = layer.named_children()
    return {name: child.in_tuple for name, child in children if isinstance(child, Absent)}


def is_second_half(layer: nn.Module) -> bool:
    """Whether a layer is a half without attention."""
    return any(_is_attention(name) for name in absent_in(layer))


def is_half_with_experts(layer: nn.Module) -> bool:
    """Whether a layer is a half without attention that has the experts of a mixture."""
    names = (f"{path} {type(module).__name__}" for path, module in layer.named_modules())
    return is_second_half(layer) and any("experts" in name.lower() for name in names)


def in_tree(layer: nn.Module) -> list[nn.Module]:
    """The modules of the user's tree that a layer stands for: itself, or the children of a half."""
    if not absent_in(layer):
        return [layer]
    return [child for child in layer.children() if not isinstance(child, Absent)]


class _InHalves(ForwardOverride):
    """A layer's ``forward`` that calls its halves."""

    def __init__(self, layer: nn.Module, halves: Sequence[nn.Module]) -> None:
        super().__init__(layer)
        self.halves = halves

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden, args, kwargs, _ = take_hidden(0, args, kwargs)
        first, second = self.halves
        first.training = second.training = self.module.training
        for half in self.halves:
            _follow(half, self.module)
        result = first(hidden, *args, **kwargs)
        # Only the attention uses the cache.
        args, kwargs = without_cache(self.module, args, kwargs)
        if not isinstance(result, tuple):
            return second(result, *args, **kwargs)
        hidden, *others = second(result[0], *args, **kwargs)
        # The first half returns attentions, the second one router logits.
        pairs = zip(result[1:], others, strict=True)
        return (hidden, *(other if mine is None else mine for mine, other in pairs))


def _follow(half: nn.Module, layer: nn.Module) -> None:
    """Copy the current plain attributes of a layer to one of its halves."""
    wanted, own = own_attributes(layer), own_attributes(half)
    for name in (wanted.keys() | own.keys()) - _OF_EACH:
        if name not in wanted:
            del vars(half)[name]
        elif name not in own or own[name] is not wanted[name]:
            vars(half)[name] = wanted[name]


def halves_of(layer: nn.Module) -> Sequence[nn.Module] | None:
    """The halves of a layer that is cut; None for a whole layer."""
    cut = _cut_of(layer)
    return None if cut is None else cut.halves


def _cut_of(layer: nn.Module) -> _InHalves | None:
    return next((each for each in overrides_of(layer) if isinstance(each, _InHalves)), None)


class _StandIn(nn.Module):
    """Computes a known function in the place of a child, and notes that it was called."""

    def __init__(self, name: str, number: int, in_tuple: bool, called: list[str]) -> None:
        super().__init__()
        self.name = name
        self._number = number
        self._in_tuple = in_tuple
        self._called = called

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, None]:
        self._called.append(self.name)
        result = torch.sin(_hidden(args, kwargs) * (2 + self._number) + self._number)
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
    """The absent children of the first half and of the second one; None if there is no cut."""
    for in_tuple in (True, False):
        called: list[str] = []
        stand_ins = {
            name: _StandIn(name, number, in_tuple and _is_attention(name), called)
            for number, (name, _) in enumerate(layer.named_children())
        }
        whole = _with(layer, stand_ins)
        expected = _try(whole)
        order = list(dict.fromkeys(called))
        if expected is None or _leaves_out_some(layer, order):
            continue
        ends = [number for number, name in enumerate(order, start=1) if _is_attention(name)]
        for end in range(max(ends, default=len(order)), len(order)):
            behind = dict.fromkeys(order[end:], False)
            before = {n: in_tuple and _is_attention(n) for n in stand_ins if n not in behind}
            found = _try(half_of(whole, behind), half_of(whole, before))
            if found is not None and torch.equal(expected, found):
                return behind, before
    return None


def _leaves_out_some(layer: nn.Module, called: Sequence[str]) -> bool:
    """Whether a child with weights was not called, so that the trial missed a part of the layer.

    Attention to an encoder does not count.
    """
    return any(
        name not in called and "cross" not in name and any(True for _ in child.parameters())
        for name, child in layer.named_children()
    )


def _try(*layers: nn.Module) -> Tensor | None:
    """Run layers whose children are stand-ins, one after the other; None if one of them raises."""
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


def _with(layer: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    """A layer of the same class and attributes with some children replaced, without hooks."""
    made = type(layer).__new__(type(layer))
    vars(made).update(vars(layer) | vars(nn.Module()))
    vars(made).update(training=layer.training, _modules={**layer._modules, **children})
    for name in ("forward", "_compiled_call_impl"):
        vars(made).pop(name, None)
    return made


def _is_attention(name: str) -> bool:
    """Whether a child of that name is attention, and not a norm or dropout named after it."""
    is_about = "attn" in name or "attention" in name
    return is_about and not any(word in name for word in ("norm", "dropout", "ln_"))


def _hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The hidden states among the arguments of a child."""
    return take_hidden(0, args, dict(kwargs))[0]
