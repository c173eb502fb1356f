"""The kinds of layers of a model, and one sample layer of each kind to measure.

Layers of one kind cost the same. The fingerprint of a model tells it from other models.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..model.allowed_imports import ImportedHere
from ..model.captured_outputs import SilencedHooks
from ..model.custom_layers import BlocksRecipe
from ..model.four_bit import describe_four_bit
from ..model.half_layers import absent_in, is_second_half
from ..model.hf_config import experts_kind
from ..model.layer_call import LayerCall
from ..model.layers import DecoderLayer
from ..model.recipe import Recipe, write_recipe
from ..pipeline.bench import Bench, LayerTrial
from ..pipeline.handover import surroundings_here
from ..pipeline.stage_layers import build_for_values, describe_parameters
from ..plan import Dtype
from ..protocol import messages as m
from ..protocol.frames import Content


class LayerJob(NamedTuple):
    """One forward and backward of one kind of layer, to be measured."""

    dtype: Dtype
    micro_batch_size: int
    kind: str
    recompute: bool


@dataclass(frozen=True)
class Blueprint:
    """Builds sample layers, here and on workers.

    Args:
        kinds: The kind of each layer of the model.
        layers: The sample layer of each kind, by its number.
        recipe: Builds the sample layers.
        buffers: The values of their buffers that are in this process.
    """

    kinds: list[str]
    layers: Mapping[int, nn.Module]
    recipe: Recipe | BlocksRecipe
    buffers: Mapping[str, Tensor]

    @classmethod
    def draw(cls, root: nn.Module, layers: Sequence[DecoderLayer], kinds: list[str]) -> Blueprint:
        """The blueprint of a model. The sample of a kind is its last layer, whose input is like
        that of most others.

        Raises:
            ModelError: If a layer cannot be rebuilt elsewhere.
        """
        numbers = sorted({kind: number for number, kind in enumerate(kinds)}.values())
        chosen = [(number, layers[number]) for number in numbers]
        modules = {number: layer.module for number, layer in chosen}
        buffers = {
            f"{number}.{name}": buffer
            for number, module in modules.items()
            for name, buffer in module.named_buffers(remove_duplicate=False)
            if not buffer.is_meta
        }
        return cls(kinds, modules, write_recipe(root, chosen), buffers)

    def number_of(self, kind: str) -> int:
        """The number of a kind's sample layer."""
        return next(number for number in self.layers if self.kinds[number] == kind)

    def build(self) -> nn.ModuleDict:
        """The layers without content."""
        specs = describe_parameters(self.layers)
        return build_for_values(self.recipe.to_json(), specs, ImportedHere())

    def on_meta(self) -> dict[int, nn.Module]:
        """For each layer of the model, the sample layer of its kind, without content."""
        built = self.build()
        for layer in built.values():
            SilencedHooks(layer)  # Their outputs must not be collected.
        return {n: built[str(self.number_of(kind))] for n, kind in enumerate(self.kinds)}

    def bench(self, device: torch.device) -> Bench:
        """The bench that measures the layers in this process."""
        return Bench(device, self.build, self.buffers, allowed=ImportedHere())

    def for_workers(self) -> Content:
        """The message from which a worker builds the layers."""
        specs = describe_parameters(self.layers)
        message = m.PrepareLayers(self.recipe.to_json(), specs, list(self.buffers))
        return message, list(self.buffers.values())


@dataclass
class MadeUpOutputs:
    """Makes up the outputs that layers add to those that a model collects.

    Args:
        blueprint: The sample layers.
        bench: Runs them.
    """

    blueprint: Blueprint
    bench: Bench
    _known: dict[Hashable, list[tuple[str, Tensor]]] = field(default_factory=dict)

    def __call__(
        self, hidden: Tensor, call: LayerCall, kinds: Sequence[str]
    ) -> Iterable[tuple[str, Tensor]]:
        number = self.blueprint.number_of(self.blueprint.kinds[call.layer_index])
        key = number, len(hidden), tuple(kinds)
        if key not in self._known:
            around = surroundings_here(hidden, [replace(call, layer_index=number)], kinds)
            trial = LayerTrial(
                number=number,
                hidden_shape=tuple(hidden.shape),
                hidden_dtype=hidden.dtype,
                wants_gradient=False,
                surroundings=around,
                recompute=False,
                dtype=None,
                converts_weights=True,
                patience_seconds=0.0,
            )
            self._known[key] = list(self.bench.collected(trial))
        return [(kind, _leaf(tensor)) for kind, tensor in self._known[key]]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


# These attributes change no cost: a stage recomputes as a whole, and modes come with each call.
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
    """Whether the hidden states before each layer have a backward; ``first`` is the answer for the
    first layer."""
    trains = (_trains(layer.module) for layer in layers)
    found = itertools.accumulate(trains, lambda wanted, trained: wanted or trained, initial=first)
    return list(found)[: len(layers)]


def fingerprint(root: nn.Module, layers: Sequence[DecoderLayer]) -> str:
    """A digest of everything a model's speed and sizes depend on: classes, shapes, trained
    parameters, storage and kernels."""
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
