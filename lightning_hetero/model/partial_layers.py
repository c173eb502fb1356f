"""Layers without some of their children: a half of a layer has a part of its children.

    layer 3       h + attention(norm(h))   │   h + mlp(norm(h))
    as halves     6                        │   7

A half is a layer of the same class. The children of the other half are absent: they return zeros,
to be added to the hidden states. `half_layers.py` finds where a layer can be cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..errors import ModelError
from .attributes import own_attributes
from .layer_call import take_hidden, without_cache
from .override import ForwardOverride, overrides_of

# Attributes that a layer and its halves do not share while they are cut or away.
_OF_EACH = frozenset({"_apply", "forward"})

AbsentChildren = Mapping[str, bool]
"""The names of absent children, and whether each returns a tuple, as attention mostly does."""


class Absent(nn.Module):
    """Stands for a child of the other half: it adds zeros to the hidden states."""

    def __init__(self, in_tuple: bool) -> None:
        super().__init__()
        self.in_tuple = in_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, None]:
        # Minus zero: plus zero would change the sign of a minus zero. A scalar costs little.
        zero = hidden_in(args, kwargs).new_full((), -0.0)
        return (zero, None) if self.in_tuple else zero


def half_of(layer: nn.Module, absent: AbsentChildren) -> nn.Module:
    """A layer of the same class without some of the children.

    Raises:
        ModelError: If the layer lacks one of these children.
    """
    unknown = sorted(absent.keys() - layer._modules.keys())
    if unknown:
        raise ModelError(f"A {type(layer).__name__} has no children {unknown} to leave out.")
    return with_children(layer, {name: Absent(in_tuple) for name, in_tuple in absent.items()})


def absent_in(layer: nn.Module) -> dict[str, bool]:
    """The absent children of a half; empty for a whole layer."""
    children = layer.named_children()
    return {name: child.in_tuple for name, child in children if isinstance(child, Absent)}


def is_second_half(layer: nn.Module) -> bool:
    """Whether a layer is a half without attention."""
    return any(is_attention(name) for name in absent_in(layer))


def is_half_with_experts(layer: nn.Module) -> bool:
    """Whether a layer is a half without attention, but with the experts of a mixture."""
    names = (f"{path} {type(module).__name__}" for path, module in layer.named_modules())
    return is_second_half(layer) and any("experts" in name.lower() for name in names)


def in_tree(layer: nn.Module) -> list[nn.Module]:
    """The modules of a layer in the user's tree: itself, or the children of a half."""
    if not absent_in(layer):
        return [layer]
    return [child for child in layer.children() if not isinstance(child, Absent)]


class InHalves(ForwardOverride):
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
    """The halves of a cut layer; None for a whole layer."""
    cut = cut_of(layer)
    return None if cut is None else cut.halves


def cut_of(layer: nn.Module) -> InHalves | None:
    """The override of a cut layer's ``forward``; None for a whole layer."""
    return next((each for each in overrides_of(layer) if isinstance(each, InHalves)), None)


def join_layers(root: nn.Module) -> None:
    """Undo `cut_layers`. The layers of a lost worker stay cut and raise when called."""
    for module in root.modules():
        cut = cut_of(module)
        if cut is not None and not any(any(overrides_of(half)) for half in cut.halves):
            cut.take_off()


def with_children(layer: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    """A layer of the same class and attributes with some children replaced, without hooks."""
    made = type(layer).__new__(type(layer))
    vars(made).update(vars(layer) | vars(nn.Module()))
    vars(made).update(training=layer.training, _modules={**layer._modules, **children})
    for name in ("forward", "_compiled_call_impl"):
        vars(made).pop(name, None)
    return made


def is_attention(name: str) -> bool:
    """Whether a child of this name is attention, and not a norm or dropout named after it."""
    is_about = "attn" in name or "attention" in name
    return is_about and not any(word in name for word in ("norm", "dropout", "ln_"))


def hidden_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The hidden states among the arguments of a child."""
    return take_hidden(0, args, dict(kwargs))[0]
