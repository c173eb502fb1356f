"""The measured model: its kinds of layers with a sample of each, and how it calls them.

Layers of one kind cost the same. The fingerprint distinguishes a model from other models. A dry run
shows the calls, and `model_profile` is the model's part of the profile.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast, get_args

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from msgspec import structs
from torch import Tensor, nn
from transformers import PreTrainedModel

from .._lightning import MixedPrecision, pl
from ..coordinator.dry_run import OptimizerSettings, SampleBatch
from ..coordinator.handover import WholeBatches
from ..devices.device import device_for, is_out_of_memory
from ..model.allowed_imports import ImportedHere
from ..model.captured_outputs import SilencedHooks
from ..model.custom_layers import BlocksRecipe
from ..model.hf_config import experts_kind
from ..model.layer_call import LayerCall
from ..model.layers import DecoderLayer
from ..model.partial_layers import absent_in, is_half_with_experts, is_second_half
from ..model.recipe import Recipe, write_recipe
from ..model.stored import describe_stored
from ..model.tensors import ends_of, gradient_bytes, num_trained, stored_bytes, tied_parameters
from ..pipeline.bench import Bench, LayerTrial, OptimizerTrial
from ..pipeline.handover import Request, surroundings_here
from ..pipeline.microbatch import NOTHING_SAID, BatchOptions
from ..pipeline.stage_layers import (
    buffers_of,
    build_for_values,
    describe_parameters,
    preparation,
)
from ..plan import Dtype, Plan
from ..planner.profile import ModelProfile, Part, SliceProfile
from ..protocol import messages as m
from ..protocol.frames import Content
from ..protocol.tensor_bytes import DTYPES, dtype_name
from .embedding_and_head import EndsRunner, Example, embedding_to_leave, parameters_of_ends
from .leaving_head import HeadSample, head_sample
from .token_slices import describe_slices, slice_examples

# These attributes do not change the cost: a stage recomputes as a whole, and modes come with each
# call.
_NO_COST = frozenset({"gradient_checkpointing", "_is_hf_initialized", *vars(nn.Module())})
_MOST_DIGITS = 16
# Whether a batch can be cut does not depend on the number of its pieces.
_FEWEST_PIECES = 2

# All influences on the cost of a layer, by the path of a module and a name in it.
_Outline = Mapping[tuple[str, str], Hashable]


class LayerJob(NamedTuple):
    """One forward and backward of one kind of layer, to be measured."""

    dtype: Dtype
    micro_batch_size: int
    kind: str
    recompute: bool


@dataclass(frozen=True)
class ModelIdentity:
    """The model and the settings of a profile.

    Args:
        model_name: The LightningModule's class.
        fingerprint: Differs between models.
        settings: The other influences on the measured times.
    """

    model_name: str
    fingerprint: str
    settings: Mapping[str, str]


@dataclass(frozen=True)
class Blueprint:
    """Builds sample layers, here and on workers.

    Args:
        kinds: The kind of each layer of the model.
        layers: The sample layer of each kind, by its number.
        recipe: Builds the sample layers.
        buffers: The values of their buffers in this process.
    """

    kinds: list[str]
    layers: Mapping[int, nn.Module]
    recipe: Recipe | BlocksRecipe
    buffers: Mapping[str, Tensor]

    @classmethod
    def draw(cls, root: nn.Module, layers: Sequence[DecoderLayer], kinds: list[str]) -> Blueprint:
        """The blueprint of a model. The sample of a kind is its last layer: its input is the most
        typical.

        Raises:
            ModelError: If a layer cannot be rebuilt elsewhere.
        """
        numbers = sorted({kind: number for number, kind in enumerate(kinds)}.values())
        chosen = [(number, layers[number]) for number in numbers]
        modules = {number: layer.module for number, layer in chosen}
        return cls(kinds, modules, write_recipe(root, chosen), buffers_of(modules))

    def number_of(self, kind: str) -> int:
        """The number of a kind's sample layer."""
        return next(number for number in self.layers if self.kinds[number] == kind)

    def build(self, device: torch.device) -> nn.ModuleDict:
        """The layers without content, to compute on a device."""
        specs = describe_parameters(self.layers)
        return build_for_values(self.recipe.to_json(), specs, ImportedHere(), device)

    def on_meta(self) -> dict[int, nn.Module]:
        """For each layer of the model, the sample layer of its kind, without content."""
        built = self.build(torch.device("meta"))
        for layer in built.values():
            SilencedHooks(layer)  # Their outputs must not be collected.
        return {n: built[str(self.number_of(kind))] for n, kind in enumerate(self.kinds)}

    def bench(self, device: torch.device) -> Bench:
        """The bench for measuring the layers in this process."""
        return Bench(device, partial(self.build, device), self.buffers, allowed=ImportedHere())

    def for_workers(self) -> Content:
        """The message for a worker to build the layers."""
        return preparation(self.recipe, self.layers, self.buffers)


@dataclass
class MadeUpOutputs:
    """Makes up the layers' contributions to the collected outputs of a model.

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
            trial = LayerTrial(tuple(hidden.shape), hidden.dtype, False, around)
            self._known[key] = list(self.bench.collected(trial))
        return [(kind, _leaf(tensor)) for kind, tensor in self._known[key]]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def kinds_of_layers(layers: Sequence[DecoderLayer], first_wants_gradient: bool) -> list[str]:
    """The kind of each layer, in their order: a common name for layers of equal cost.

    Args:
        layers: All decoder layers of a model.
        first_wants_gradient: Whether the hidden states before the first layer have a backward. A
            layer without a backward, after frozen parts only, is of a kind of its own.
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
    """A digest of all influences on a model's speed and sizes: classes, shapes, trained parameters,
    storage and kernels.
    """
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
    for path, four_bit in describe_stored(layer).items():
        found[path, "4 bits"] = repr(four_bit)
    return found


def _numbering(outlines: Sequence[_Outline], numbers: Sequence[int]) -> set[tuple[str, str]]:
    """Settings for the number of a layer only: they grow with the layers' numbers."""
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
    """Plain attributes: they may decide the computation of a module."""
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
    """The class, with its kind of attention if known, and its half of the layer if cut."""
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


@dataclass(frozen=True)
class Subject:
    """A model with all inputs for a measurement on a device.

    Args:
        blueprint: One layer of each kind.
        wants_gradient: For each layer, whether its hidden states have a backward.
        examples: How the model calls its layers, by the size of the micro-batch.
        optimizer: The optimizer's settings, if there is an optimizer.
        dtype: The compute dtype of the user's precision.
        converts_weights: Whether a stage's own dtype applies to its weights too.
        embedding_may_leave: Whether a worker may have the input embedding.
        slices: How the model runs on slices along the tokens, if batches are cut so; then sizes
            are tokens.
        head: The head, if a worker may have it.
    """

    blueprint: Blueprint
    wants_gradient: Sequence[bool]
    examples: Mapping[int, Example]
    optimizer: OptimizerSettings | None
    dtype: Dtype
    converts_weights: bool
    embedding_may_leave: bool = False
    slices: SliceProfile | None = None
    head: HeadSample | None = None

    @property
    def kinds(self) -> list[str]:
        """The kinds of layers, each once."""
        return list(dict.fromkeys(self.blueprint.kinds))

    def layer_trial(self, job: LayerJob, patience_seconds: float) -> LayerTrial:
        """The trial of a layer for a job."""
        example, number = self.examples[job.micro_batch_size], self.blueprint.number_of(job.kind)
        return LayerTrial(
            hidden_shape=tuple(example.inputs[number].shape),
            hidden_dtype=example.inputs[number].dtype,
            wants_gradient=self.wants_gradient[number],
            surroundings=replace(example.surroundings, calls=[example.calls[number]]),
            recompute=job.recompute,
            dtype=None if job.dtype == self.dtype else DTYPES[job.dtype],
            converts_weights=self.converts_weights,
            patience_seconds=patience_seconds,
        )

    def optimizer_trial(self, kind: str, patience_seconds: float) -> OptimizerTrial | None:
        """The trial of the optimizer's step over a layer, if there is an optimizer."""
        used, number = self.optimizer, self.blueprint.number_of(kind)
        if used is None:
            return None
        return OptimizerTrial(
            number, used.class_name, used.defaults, used.options, patience_seconds
        )


def cut_example(
    whole: Example, cutting: Cutting, layers: Mapping[int, nn.Module]
) -> tuple[int, dict[int, Example]]:
    """The number of samples of a batch, cut before the first layer as in its run, and examples of
    micro-batches by their sizes.

    A batch in one piece counts as one sample, so plans do not cut it.

    Args:
        whole: The batch.
        cutting: How training batches become micro-batches.
        layers: The forms of all layers, on ``meta``.
    """
    calls = list(whole.calls.values())
    request = Request(whole.hidden, replace(whole.surroundings, calls=calls))
    batches = WholeBatches(layers, Plan([], _FEWEST_PIECES), cutting.options)
    batches.num_samples = cutting.sample.size
    pieces, dim = batches.cut(request)
    if len(pieces) == 1:
        return 1, {1: whole}
    found, batch_size = {}, whole.hidden.shape[dim]
    for size in _sizes(batch_size, cutting):
        piece = batches.first(request, size, dim)
        found[size] = replace(
            whole,
            inputs={n: hidden.narrow(dim, 0, size) for n, hidden in whole.inputs.items()},
            surroundings=piece.surroundings,
            calls={call.layer_index: call for call in piece.surroundings.calls},
        )
    return batch_size, found


@dataclass(frozen=True)
class Cutting:
    """How training batches become micro-batches.

    Args:
        sample: A training batch, on its device.
        at_boundary: Whether ``training_step`` sees whole batches, and only hidden states are cut.
        sizes: Samples of the micro-batches to measure; by default 1, 2, 4, … up to the batch.
        options: The user's options for batches.
    """

    sample: SampleBatch
    at_boundary: bool
    sizes: Sequence[int] | None
    options: BatchOptions = NOTHING_SAID

    def batch(self, size: int) -> Any:
        """The argument of ``training_step`` for micro-batches of this size."""
        return self.sample.batch if self.at_boundary else self.sample.first(size)


@dataclass(frozen=True)
class ModelSighting:
    """A model after its dry run.

    Args:
        subject: The model as devices measure it.
        bench: Measures its layers in this process.
        runner: Runs its ends.
        cutting: How its training batches become micro-batches.
        batch_size: Samples in a batch of the loader; 1 if it cannot be cut.
    """

    subject: Subject
    bench: Bench
    runner: EndsRunner
    cutting: Cutting
    batch_size: int

    @property
    def window(self) -> int:
        """How many batches of the loader form one training batch. With ``at_boundary`` it is 1:
        whole batches do not run at once.
        """
        return 1 if self.cutting.at_boundary else self.cutting.sample.window


def sight(
    module: pl.LightningModule,
    layers: Sequence[DecoderLayer],
    cutting: Cutting,
    optimizer: OptimizerSettings | None,
) -> ModelSighting:
    """Run ``training_step`` while the layers are idle, to see how the model calls them.

    Args:
        module: Attached to its Trainer; all modules but its layers are on their device.
        layers: All its decoder layers.
        cutting: How training batches become micro-batches.
        optimizer: The settings of the optimizer of these parameters.
    """
    trainer = module.trainer
    device = trainer.strategy.root_device
    drawn = Blueprint.draw(module, layers, kinds_of_layers(layers, first_wants_gradient=True))
    bench = drawn.bench(device)
    runner = EndsRunner(module, layers, drawn.on_meta(), MadeUpOutputs(drawn, bench))
    batch_size, examples = _examples(runner, cutting)
    first = examples[min(examples)]
    kinds = kinds_of_layers(layers, first.wants_gradient)
    if kinds != drawn.kinds:
        drawn = Blueprint.draw(module, layers, kinds)
        bench = drawn.bench(device)
    embedding = embedding_to_leave(module, layers)
    largest, slices = cutting.batch(max(examples)), None
    if cutting.options.along_tokens:
        modules, on_meta = [layer.module for layer in layers], drawn.on_meta()
        whole = examples[max(examples)]
        slices = describe_slices(whole, modules, [on_meta[n] for n in range(len(modules))])
        embedding = None  # plans by hand may give it to a worker
    subject = Subject(
        blueprint=drawn,
        wants_gradient=wants_gradient(layers, first.wants_gradient),
        examples=examples,
        optimizer=optimizer,
        dtype=_dtype(first),
        converts_weights=not isinstance(trainer.precision_plugin, MixedPrecision),
        embedding_may_leave=embedding is not None and runner.only_layers_read(embedding, largest),
        slices=slices,
        head=(
            None
            if cutting.at_boundary
            else head_sample(runner, {size: cutting.batch(size) for size in examples})
        ),
    )
    return ModelSighting(subject, bench, runner, cutting, batch_size)


def _examples(runner: EndsRunner, cutting: Cutting) -> tuple[int, dict[int, Example]]:
    """The size of a training batch, and examples of micro-batches by their sizes."""
    if cutting.options.along_tokens:
        whole = runner.example(cutting.sample.batch)
        return slice_examples(whole, [layer.module for layer in runner.layers], cutting.sizes)
    if cutting.at_boundary:
        return cut_example(runner.example(cutting.sample.batch), cutting, runner.on_meta)
    if cutting.sample.size is None:
        # A batch in one piece counts as one sample, so plans do not cut it.
        return 1, {1: runner.example(cutting.sample.batch)}
    sizes = _sizes(cutting.sample.size, cutting)
    examples: dict[int, Example] = {}
    for size in sizes:
        try:
            examples[size] = runner.example(cutting.sample.first(size))
        except Exception as error:
            if not examples or not is_out_of_memory(error):
                raise
            rank_zero_info(f"the coordinator has not enough memory for {size} samples at once")
            break
    device_for(runner.device).free_cache()
    return cutting.sample.size, examples


def micro_batch_sizes(batch_size: int) -> list[int]:
    """1, 2, 4, … and the whole batch."""
    powers = [2**exponent for exponent in range(batch_size.bit_length())]
    return sorted({*powers, batch_size})


def _sizes(batch_size: int, cutting: Cutting) -> list[int]:
    if cutting.sizes is None:
        return micro_batch_sizes(batch_size)
    return sorted({min(size, batch_size) for size in cutting.sizes})


def _dtype(example: Example) -> Dtype:
    """The compute dtype of the user's precision; float32 for a dtype unknown to plans."""
    dtype = example.surroundings.autocast_dtype or example.hidden.dtype
    name = dtype_name(dtype)
    return cast(Dtype, name) if name in get_args(Dtype) else "float32"


def model_profile(
    root: nn.Module,
    layers: Sequence[DecoderLayer],
    subject: Subject,
    optimizers: Mapping[str, m.OptimizerMeasured],
    fingerprint: str,
) -> ModelProfile:
    """A model's part of the profile.

    Args:
        root: The LightningModule.
        layers: All its decoder layers.
        subject: The model as devices have measured it.
        optimizers: The optimizer's measured step over one layer of each kind, and over both ends.
        fingerprint: Differs between models.
    """
    # Slices have no equal length, so the whole sequence says the bytes of a token.
    pick = min if subject.slices is None else max
    samples, example = pick(subject.examples.items())
    hidden_bytes = max(hidden.nbytes for hidden in example.inputs.values())
    return ModelProfile(
        fingerprint=fingerprint,
        layers=list(subject.blueprint.kinds),
        parts=[
            *(_layer_part(subject, kind, optimizers) for kind in subject.kinds),
            *_end_parts(root, layers, optimizers),
        ],
        tokens_per_sample=max(1, math.prod(example.hidden.shape[:-1]) // samples),
        activation_bytes_per_sample=hidden_bytes // samples,
        gradient_bytes_per_sample=hidden_bytes // samples,
        dtype=subject.dtype,
        tied_gradient_bytes=gradient_bytes(tied_parameters(root, layers)),
        embedding_may_leave=subject.embedding_may_leave,
        slices=subject.slices,
        head_may_leave=subject.head is not None,
        logits_bytes_per_sample=0 if subject.head is None else subject.head.logits_bytes_per_sample,
    )


def _layer_part(subject: Subject, kind: str, optimizers: Mapping[str, m.OptimizerMeasured]) -> Part:
    number = subject.blueprint.number_of(kind)
    layer = subject.blueprint.layers[number]
    plain = stored_bytes({number: layer})
    inside: dict[Dtype, int] = {
        dtype: num_bytes
        for dtype in get_args(Dtype)
        if subject.converts_weights
        and dtype != subject.dtype
        and (num_bytes := stored_bytes({number: layer}, DTYPES[dtype])) != plain
    }
    part = _part(kind, plain, list(layer.parameters()), optimizers)
    experts = is_half_with_experts(layer)
    return structs.replace(part, parameter_bytes_in=inside, is_experts=experts)


def _end_parts(
    root: nn.Module, layers: Sequence[DecoderLayer], optimizers: Mapping[str, m.OptimizerMeasured]
) -> Iterator[Part]:
    ends = zip(parameters_of_ends(root, layers).items(), ends_of(root, layers), strict=True)
    for (name, parameters), tensors in ends:
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        yield _part(name, num_bytes, parameters, optimizers)


def _part(
    name: str,
    num_bytes: int,
    parameters: Sequence[nn.Parameter],
    optimizers: Mapping[str, m.OptimizerMeasured],
) -> Part:
    return Part(
        name=name,
        parameter_bytes=num_bytes,
        trainable_parameters=num_trained(parameters),
        gradient_bytes=gradient_bytes(parameters),
        optimizer_bytes=optimizers[name].state_bytes if name in optimizers else 0,
    )
