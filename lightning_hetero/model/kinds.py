"""Which layers cost alike, and what tells a model from others."""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from .four_bit import describe_four_bit
from .half_layers import absent_in, is_second_half
from .hf_config import experts_kind
from .layers import DecoderLayer

# A stage recomputes as a whole, and modes come with each call.
_NO_COST = frozenset({"gradient_checkpointing", "_is_hf_initialized", *vars(nn.Module())})
_MOST_DIGITS = 16

# Everything that the cost of a layer depends on, by the path of a module and a name in it.
_Outline = Mapping[tuple[str, str], Hashable]


def kinds_of_layers(layers: Sequence[DecoderLayer], first_wants_gradient: bool) -> list[str]:
    """The kind of each layer, in their order: a name that layers of equal cost share.

    Args:
        layers: All decoder layers of a model.
        first_wants_gradient: Whether the hidden states before the first layer have a backward. A
            layer without one, where everything up to it is frozen, is of a kind of its own.
    """
    wants = wants_gradient(layers, first_wants_gradient)
    outlines = [_outline(layer.module) for layer in layers]
    # Two halves of a layer have its name and its number.
    numbers = {name: number for number, name in enumerate(dict.fromkeys(e.name for e in layers))}
    numbering = _numbering(outlines, [numbers[layer.name] for layer in layers])
    name_of: dict[Hashable, str] = {}
    names = []
    for layer, outline, wanted in zip(layers, outlines, wants, strict=True):
        kept = frozenset((key, value) for key, value in outline.items() if key not in numbering)
        key = kept, wanted or _trains(layer.module)
        names.append(name_of.setdefault(key, _unused(_plain_name(layer.module), name_of.values())))
    return names


def wants_gradient(layers: Sequence[DecoderLayer], first: bool) -> list[bool]:
    """Whether each layer's hidden states have a backward, if those of the first one have."""
    trains = (_trains(layer.module) for layer in layers)
    found = itertools.accumulate(trains, lambda wanted, trained: wanted or trained, initial=first)
    return list(found)[: len(layers)]


def fingerprint(root: nn.Module, layers: Sequence[DecoderLayer]) -> str:
    """A digest of what a model's speed and sizes depend on: classes, shapes, what trains, how it is
    stored, and which kernels it takes."""
    digest = hashlib.sha256()
    inside = {module for layer in layers for module in layer.module.modules()}
    for layer in layers:
        digest.update(repr(sorted(_outline(layer.module).items())).encode())
    for path, module in root.named_modules():
        if module in inside:
            continue
        digest.update(repr((path, type(module).__qualname__, list(_forms(module)))).encode())
        if isinstance(module, PreTrainedModel):
            kernels = (module.config._attn_implementation, experts_kind(module.config))
            digest.update(repr((type(module.config).__qualname__, kernels)).encode())
    return digest.hexdigest()[:_MOST_DIGITS]


def _outline(layer: nn.Module) -> _Outline:
    found: dict[tuple[str, str], Hashable] = {}
    for path, module in layer.named_modules():
        found[path, ""] = type(module).__qualname__
        found |= {(path, name): value for name, value in _settings(module)}
        found |= {(path, f"{leaf} "): form for leaf, form in _forms(module)}
    for path, four_bit in describe_four_bit(layer).items():
        found[path, "4 bits"] = repr(four_bit)
    return found


def _numbering(outlines: Sequence[_Outline], numbers: Sequence[int]) -> set[tuple[str, str]]:
    """Settings that only say which layer it is: they grow with the layers' numbers."""
    offsets: defaultdict[tuple[str, str], list[int | None]] = defaultdict(list)
    for number, outline in zip(numbers, outlines, strict=True):
        for key, value in outline.items():
            is_number = isinstance(value, int) and not isinstance(value, bool)
            offsets[key].append(value - number if is_number else None)  # type: ignore[operator]
    return {
        key
        for key, found in offsets.items()
        if len(found) > 1 and None not in found and len({*found}) == 1
    }


def _settings(module: nn.Module) -> Iterator[tuple[str, Hashable]]:
    """Plain attributes, which may decide what a module computes."""
    for name, value in vars(module).items():
        if (value is None or isinstance(value, (bool, int, str))) and name not in _NO_COST:
            yield name, value


def _forms(module: nn.Module) -> Iterator[tuple[str, Hashable]]:
    own: dict[str, Any] = {**module._parameters, **module._buffers}
    for leaf, tensor in own.items():
        if isinstance(tensor, Tensor):
            yield leaf, (tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)


def _trains(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def _plain_name(layer: nn.Module) -> str:
    """The class, with its kind of attention where it says so, and which half it is."""
    name = type(layer).__name__
    if absent_in(layer):
        name += "-rest" if is_second_half(layer) else "-attention"
    for module, attribute in itertools.product(
        [layer, *layer.children()], ("attention_type", "layer_type")
    ):
        kind = getattr(module, attribute, None)
        if isinstance(kind, str):
            return f"{name}-{kind}"
    return name


def _unused(name: str, taken: Iterable[str]) -> str:
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    names = {*taken}
    return next(found for found in itertools.chain([name], numbered) if found not in names)
