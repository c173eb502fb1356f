"""What fits on which cards: python -m examples.fine_tune.cards [--base NAME] [--cards A+B ...].

The planner of lightning-hetero places the layers, as it does after a measurement. Here nothing is
measured: one layer of the model runs on torch's device ``meta``, which has shapes and no numbers,
and the bytes that it keeps for its backward are counted. So the table tells memory and layers, and
no speed. With ``--bytes`` it tells which bytes fill a model and each card.

Where whole sequences do not fit, ``--bytes`` also cuts one sequence into slices along its tokens,
``micro_batching: tokens``: each card has a worker, the last one with head and loss, and the
coordinator is in main memory.

All is counted for ``precision: bf16-true``, in which Lightning makes the adapter bfloat16 too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from msgspec import structs
from peft import get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
)

from lightning_hetero.errors import PlanError
from lightning_hetero.model.layers import find_decoder_layers
from lightning_hetero.plan import COORDINATOR, Plan, Recompute, StagePlan
from lightning_hetero.planner.candidates import Candidate, Costs
from lightning_hetero.planner.cards import find_card
from lightning_hetero.planner.costs import KEPT_FREE, Need
from lightning_hetero.planner.feasibility import candidate_with, shortages
from lightning_hetero.planner.profile import (
    EMBEDDING,
    HEAD,
    VERSION,
    DeviceProfile,
    ModelProfile,
    Part,
    Profile,
    SliceProfile,
    Timing,
    WeightReading,
)
from lightning_hetero.planner.solver import Wishes, solve
from lightning_hetero.planner.token_slices import slice_counts

from .hub import HubError, plain_hub_errors
from .loading import Lora

LLAMA: dict[str, Any] = {"vocab_size": 128256, "num_key_value_heads": 8}
QWEN: dict[str, Any] = {"vocab_size": 151936, "hidden_size": 5120, "num_key_value_heads": 8}
SMALL_LLAMA: dict[str, Any] = {**LLAMA, "intermediate_size": 8192, "tie_word_embeddings": True}
MODELS: dict[str, PretrainedConfig] = {
    "Llama 3.2 1B": LlamaConfig(
        **SMALL_LLAMA, hidden_size=2048, num_hidden_layers=16, num_attention_heads=32
    ),
    "Llama 3.2 3B": LlamaConfig(
        **SMALL_LLAMA, hidden_size=3072, num_hidden_layers=28, num_attention_heads=24
    ),
    "Llama 3.1 8B": LlamaConfig(
        **LLAMA,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
    ),
    "Qwen3 14B": Qwen3Config(
        **QWEN, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40
    ),
    "Qwen3 32B": Qwen3Config(
        **QWEN, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64
    ),
    "Llama 3.3 70B": LlamaConfig(
        **LLAMA,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
    ),
}
CARDS = (
    *("RTX 3060", "RTX 4080", "RTX 3090"),
    *("RTX 3060+RTX 3090", "RTX 3090+RTX 4090", "RTX A6000+RTX 4090"),
)
MICRO_BATCHES = 4
GIB = 2**30
FRAMEWORK_BYTES = GIB
"""What CUDA, its libraries and the allocator take before any layer is there; assumed."""
MAIN_MEMORY = WeightReading(bytes_per_second=12e9, most_bytes=32 * GIB)
"""Beside the card of a worker, over half of the lanes of PCIe 4.0 (8 lanes); assumed."""
ADAPTER_BYTES, GRADIENT_BYTES, STATE_BYTES = 2, 2, 4
"""For each weight of the adapter: itself, its gradient, and AdamW's two averages, in bfloat16."""

# A value for 64 weights in one byte, and one of four bytes for 256 such values.
NF4_BYTES_PER_WEIGHT = 0.5 + 1 / 64 + 4 / (64 * 256)


class _Attention(torch.autograd.Function):
    """Attention with the bytes of the kernels that GPUs use: no table of all pairs is kept."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, result)
        return result


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_mask: Any, **_options: Any
) -> tuple[Tensor, None]:
    result: Any = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return result.transpose(1, 2).contiguous(), None


AttentionInterface.register("counted", _attend)


@dataclass(frozen=True)
class Layer:
    """One decoder layer with its adapter, in bfloat16 and NF4, for one sequence.

    Args:
        frozen_bytes: Its frozen weights.
        trainable: Number of weights that train.
        kept_bytes: What it keeps for its backward.
        largest_bytes: The largest frozen weight when it is unpacked.
        widest_bytes: The widest activation.
        multiplications: Of its forward.
    """

    frozen_bytes: int
    trainable: int
    kept_bytes: int
    largest_bytes: int
    widest_bytes: int
    multiplications: float

    @property
    def peak_bytes(self) -> int:
        """The most that its forward or its backward takes at once, above its weights.

        Beside the kept bytes there are an unpacked weight, or two of the widest activations with
        the mask of a dropout.
        """
        return self.kept_bytes + max(self.largest_bytes, 5 * self.widest_bytes // 2)


def count_layer(config: PretrainedConfig, tokens: int, lora: Lora) -> Layer:
    """Run one layer of a model on ``meta`` and count."""
    one = type(config).from_dict({**config.to_dict(), "num_hidden_layers": 1, "layer_types": None})
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(
            one, dtype=torch.bfloat16, attn_implementation="counted"
        )
        # In bf16-true, Lightning casts the adapter too.
        model: Any = get_peft_model(base, lora.config).to(torch.bfloat16)
        hidden = torch.empty(1, tokens, one.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    (layer,) = [found.module for found in find_decoder_layers(model)]
    kept = Kept(layer)
    with saved_tensors_hooks(kept.add, lambda tensor: tensor):
        model.base_model.model.base_model(inputs_embeds=hidden, use_cache=False)
    matrices = [p for p in layer.parameters() if not p.requires_grad and p.ndim > 1]
    frozen = [matrix.numel() for matrix in matrices]
    trainable = sum(p.numel() for p in layer.parameters() if p.requires_grad)
    return Layer(
        frozen_bytes=int(sum(frozen) * NF4_BYTES_PER_WEIGHT),
        trainable=trainable,
        kept_bytes=kept.num_bytes,
        largest_bytes=2 * max(frozen),
        widest_bytes=2 * tokens * max(size for matrix in matrices for size in matrix.shape),
        multiplications=2.0 * tokens * (sum(frozen) + trainable),
    )


class Kept:
    """The storages that one module keeps for its backward, without its own weights."""

    def __init__(self, module: nn.Module) -> None:
        self.num_bytes = 0
        self._own = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        # Each storage lives on, so that no other one has its address.
        self._storages: dict[int, Any] = {}
        module.register_forward_pre_hook(lambda *_: self._storages.clear())
        module.register_forward_hook(self._end)

    def add(self, tensor: Tensor) -> Tensor:
        """Take note of a tensor that is kept."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own:
            self._storages[storage._cdata] = storage
        return tensor

    def _end(self, *_: Any) -> None:
        self.num_bytes = sum(storage.nbytes() for storage in self._storages.values())


def model_profile(config: PretrainedConfig, tokens: int, layer: Layer) -> ModelProfile:
    """The planner's knowledge of a model in NF4 with an adapter."""
    table = 2 * config.vocab_size * config.hidden_size
    boundary = 2 * tokens * config.hidden_size
    return ModelProfile(
        fingerprint="counted",
        layers=["layer"] * config.num_hidden_layers,
        parts=[
            Part(
                "layer",
                layer.frozen_bytes + ADAPTER_BYTES * layer.trainable,
                layer.trainable,
                gradient_bytes=GRADIENT_BYTES * layer.trainable,
                optimizer_bytes=STATE_BYTES * layer.trainable,
            ),
            Part(EMBEDDING, table),
            Part(HEAD, 0 if config.tie_word_embeddings else table),
        ],
        tokens_per_sample=tokens,
        activation_bytes_per_sample=boundary,
        gradient_bytes_per_sample=boundary,
        dtype="bfloat16",
        # A worker with the first layer may have it, as the profiler finds for these families.
        embedding_may_leave=not config.tie_word_embeddings,
    )


def profile_of(
    config: PretrainedConfig,
    cards: Sequence[str],
    tokens: int,
    lora: Lora,
    micro_batches: int = MICRO_BATCHES,
) -> Profile:
    """A profile with the published figures of cards; the first one has the coordinator.

    Raises:
        PlanError: If there are no figures of a card, or it does not compute in bfloat16.
    """
    layer = count_layer(config, tokens, lora)
    model = model_profile(config, tokens, layer)
    devices = []
    for index, card in enumerate(map(find_card, cards)):
        speed = card.operations_per_second.get("bfloat16")
        if speed is None:
            raise PlanError(f"{card.name} does not compute in bfloat16; take another card.")
        ends = [] if index else _ends(config, model, speed)
        name = f"{index + 1}: {card.name}" if index else COORDINATOR
        timings = [*layer_timings(layer, model, speed), *ends]
        memory = card.memory_bytes
        reading = {} if name == COORDINATOR else {"host": MAIN_MEMORY}
        made = DeviceProfile(name, card.name, memory, FRAMEWORK_BYTES, timings, weights=reading)
        devices.append(made)
    found = Profile(VERSION, model, devices, batch_size=micro_batches)
    found.check()
    return found


def layer_timings(layer: Layer, model: ModelProfile, speed: float) -> list[Timing]:
    """A layer, without and with a second forward in the backward."""
    seconds = layer.multiplications / speed
    peak, inputs = layer.peak_bytes, model.activation_bytes_per_sample
    return [
        Timing("layer", 1, seconds, seconds, layer.kept_bytes, peak, "bfloat16"),
        Timing("layer", 1, seconds, 2 * seconds, inputs, peak, "bfloat16", recompute=True),
    ]


def _ends(config: PretrainedConfig, model: ModelProfile, speed: float) -> list[Timing]:
    """The embedding, and the head with the loss.

    The head keeps its logits in bfloat16 and in float32; in the backward there are also their
    softmax and its gradient.
    """
    inputs = model.activation_bytes_per_sample
    logits = model.tokens_per_sample * config.vocab_size
    seconds = 2.0 * logits * config.hidden_size / speed
    return [
        Timing(EMBEDDING, 1, 0.0, 0.0, inputs, inputs, "bfloat16"),
        Timing(HEAD, 1, seconds, seconds, 6 * logits, 14 * logits, "bfloat16"),
    ]


def sliced_profile(
    config: PretrainedConfig, cards: Sequence[str], tokens: int, lora: Lora
) -> Profile:
    """A profile for one sequence in slices along its tokens, with a worker on each card.

    Raises:
        PlanError: If there are no figures of a card, or it does not compute in bfloat16.
    """
    whole = profile_of(config, cards, tokens, lora, micro_batches=1)
    layer = count_layer(config, tokens, lora)
    per_token = whole.model.activation_bytes_per_sample // tokens
    model = structs.replace(
        whole.model,
        tokens_per_sample=1,
        activation_bytes_per_sample=per_token,
        gradient_bytes_per_sample=per_token,
        embedding_may_leave=False,
        slices=_slices_of(config, tokens, layer),
    )
    # For a whole sequence, and for a 64th of it.
    sizes = sorted({max(1, tokens // 64), tokens})
    ends = [
        _of_share(timing, size, tokens)
        for timing in whole.devices[0].timings
        if timing.part in (EMBEDDING, HEAD)
        for size in sizes
    ]
    devices = [DeviceProfile(COORDINATOR, "main memory", MAIN_MEMORY.most_bytes, timings=ends)]
    for index, (device, card) in enumerate(zip(whole.devices, cards, strict=True), start=1):
        speed = find_card(card).operations_per_second["bfloat16"]
        timings = [
            structs.replace(timing, micro_batch_size=size)
            for size in sizes
            for timing in layer_timings(_share_of(layer, size / tokens), whole.model, speed)
        ]
        devices.append(
            structs.replace(device, name=f"{index}: {card}", timings=timings, weights={})
        )
    found = Profile(VERSION, model, devices, batch_size=tokens, settings={"cut": "tokens"})
    found.check()
    return found


def _slices_of(config: PretrainedConfig, tokens: int, layer: Layer) -> SliceProfile:
    """The bytes of torch's attention, which repeats keys for all heads where there is a mask."""
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_value_bytes = 2 * 2 * tokens * key_heads * head_size
    num = config.num_hidden_layers
    return SliceProfile(
        weight_work=num * layer.multiplications / (2 * tokens),
        pair_work=num * 2.0 * heads * head_size,
        key_value_bytes=key_value_bytes,
        attended_bytes=key_value_bytes * heads // key_heads if heads > key_heads else 0,
        pair_bytes=1 + 2,
    )


def _share_of(layer: Layer, share: float) -> Layer:
    """A layer on a share of the sequence."""
    return replace(
        layer,
        kept_bytes=round(share * layer.kept_bytes),
        widest_bytes=round(share * layer.widest_bytes),
        multiplications=share * layer.multiplications,
    )


def _of_share(timing: Timing, size: int, tokens: int) -> Timing:
    """The share of an end for so many tokens of a sequence."""
    return structs.replace(
        timing,
        micro_batch_size=size,
        forward_seconds=timing.forward_seconds * size / tokens,
        backward_seconds=timing.backward_seconds * size / tokens,
        saved_bytes=timing.saved_bytes * size // tokens,
        peak_bytes=timing.peak_bytes * size // tokens,
    )


def plan_in_slices(profile: Profile) -> Candidate | None:
    """The plan with the fewest slices that fits: of those, the one with the fastest slowest card.

    Each worker recomputes as a whole, or by layers where that does not fit; the last one has the
    head.
    """
    costs = Costs(profile, {})
    for count in slice_counts(costs.batch_size):
        stages = _split(costs, count)
        if stages is not None:
            found = candidate_with(Plan(stages, count, count), costs)
            if not shortages(found):
                return found
    return None


def _split(costs: Costs, count: int) -> list[StagePlan] | None:
    """The stages with the fastest slowest card; None if the layers do not fit in these slices."""
    names, num = costs.profile.workers, costs.num_layers
    ways: tuple[Recompute, ...] = (True, "layers")
    matrices = []
    for name in names:
        ends = (HEAD,) if name == names[-1] else ()
        holder = costs.holder(name, costs.size(count), ends)
        dtype = costs.profile.model.dtype
        matrices.append([holder.matrix_of(holder.option(dtype, way), count) for way in ways])
    # By the end of a card's layers: the seconds of the slowest card so far, and all first layers.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for of_ways in matrices:
        fastest = np.minimum(*of_ways)
        best = {
            end: min(
                (max(seconds, float(fastest[first, end])), (*firsts, first))
                for first, (seconds, firsts) in best.items()
            )
            for end in range(1, num + 1)
        }
    seconds, firsts = best[num]
    if not np.isfinite(seconds):
        return None
    spans = zip(firsts, (*firsts[1:], num), strict=True)
    return [
        StagePlan(
            [name], span, ways[int(not np.isfinite(of_ways[0][span]))], head=name == names[-1]
        )
        for name, span, of_ways in zip(names, spans, matrices, strict=True)
    ]


def plan_for(profile: Profile) -> Candidate:
    """The plan of the planner, which itself recomputes, moves the embedding, and reads frozen
    weights from main memory, where memory is short.

    Raises:
        PlanError: If there is none.
    """
    return solve(profile, Wishes(micro_batches=profile.batch_size, replicas=False)).chosen


def fits(profile: Profile) -> str:
    """The layers and the memory on each card, or that there is no plan."""
    try:
        chosen = plan_for(profile)
    except PlanError:
        return "no"
    cells = []
    for name in chosen.processes:
        layers = sum(seat.num_layers for seat in chosen.seats_of(name))
        held = [seat.option.recompute for seat in chosen.seats_of(name) if seat.num_layers]
        mark = " again" if any(held) else ""
        mark = " by layers" if "layers" in held else mark
        mark = " read" if any(seat.option.weights for seat in chosen.seats_of(name)) else mark
        cells.append(f"{layers}{mark}: {float(chosen.need(name).total) / GIB:.0f} GiB")
    return ", ".join(cells)


def items(profile: Profile) -> Iterator[tuple[str, float]]:
    """What fills memory on any cards together, in bytes; keys and values are in a layer's graph."""
    model, own = profile.model, profile.device(COORDINATOR)
    layer, num = model.part("layer"), len(model.layers)
    costs = {(timing.part, timing.recompute): timing for timing in own.timings}
    adapter = ADAPTER_BYTES * layer.trainable_parameters
    yield "layers, frozen", num * (layer.parameter_bytes - adapter)
    trained = adapter + layer.gradient_bytes + layer.optimizer_bytes
    yield "adapters, gradients, optimizer state", num * trained
    yield "embedding", model.part(EMBEDDING).parameter_bytes
    yield "head", model.part(HEAD).parameter_bytes
    yield "graphs of all layers, without recomputation", num * costs["layer", False].saved_bytes
    yield "inputs of all layers, with it", num * costs["layer", True].saved_bytes
    yield "one layer, run again", costs["layer", True].peak_bytes
    yield "logits and loss", costs[HEAD, False].peak_bytes
    yield "CUDA, of each card", own.base_bytes


def explained(profile: Profile) -> Iterator[str]:
    """What fills each card by the plan, or the bytes that are short."""
    try:
        chosen = plan_for(profile)
    except PlanError as error:
        yield f"no: {error}"
        return
    yield from _filled(chosen, profile)


def explained_in_slices(profile: Profile) -> Iterator[str]:
    """The number of slices, the plan, and what fills each card."""
    chosen = plan_in_slices(profile)
    if chosen is None:
        most = max(slice_counts(profile.batch_size or 1))
        yield f"in slices along the tokens: no, up to {most} slices."
        return
    plan = chosen.plan()
    stages = ", ".join(
        f"layers {first}:{end} on {stage.workers[0]} (recompute: {str(stage.recompute).lower()})"
        for stage in plan.stages
        for first, end in [stage.layers]
    )
    yield f"in {plan.micro_batches} slices along the tokens: {stages}, head on the last card"
    yield from _filled(chosen, profile)


def _filled(chosen: Candidate, profile: Profile) -> Iterator[str]:
    for name in chosen.processes:
        need, device = chosen.need(name), profile.device(name)
        parts = [(each.name, float(getattr(need, each.name))) for each in fields(Need)]
        parts += [("total", float(need.total)), ("free", KEPT_FREE * device.memory_bytes)]
        told = ", ".join(f"{part.replace('_', ' ')} {size / GIB:.2f}" for part, size in parts)
        yield f"{device.device}, {device.memory_bytes / GIB:g} GiB: {told}"


def table(
    models: dict[str, PretrainedConfig],
    cards: Sequence[str],
    tokens: int,
    lora: Lora,
    micro_batches: int = MICRO_BATCHES,
) -> str:
    """A row for each model and a column for each card or pair of cards."""
    names = [wish.split("+") for wish in cards]
    sizes = [" + ".join(f"{find_card(n).memory_bytes // GIB}" for n in each) for each in names]
    heads = [f"{' + '.join(n)} ({size} GiB)" for n, size in zip(names, sizes, strict=True)]
    lines = [f"| model | {' | '.join(heads)} |", "|---" * (len(names) + 1) + "|"]
    cells = {
        (model, index): fits(profile_of(config, each, tokens, lora, micro_batches))
        for (model, config), (index, each) in product(models.items(), enumerate(names))
    }
    for model in models:
        row = " | ".join(cells[model, index] for index in range(len(names)))
        lines.append(f"| {model} | {row} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What fits on which cards: QLoRA in NF4.")
    parser.add_argument("--base", help="a model of the Hub or a folder; without it, six known ones")
    parser.add_argument("--cards", nargs="+", default=CARDS, metavar="CARD[+CARD]")
    parser.add_argument("--tokens", type=int, default=1024, help="of one sequence")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter, on all linear layers")
    parser.add_argument("--micro-batches", type=int, default=MICRO_BATCHES, metavar="NUMBER")
    parser.add_argument("--model", choices=MODELS, help="only this one of the six")
    parser.add_argument("--bytes", action="store_true", help="what fills memory, in GiB")
    options = parser.parse_args(words)
    models = MODELS
    if options.base:
        with plain_hub_errors("model", options.base):
            models = {options.base: AutoConfig.from_pretrained(options.base)}
    elif options.model:
        models = {options.model: MODELS[options.model]}
    asked = options.tokens, Lora(rank=options.rank), options.micro_batches
    if not options.bytes:
        print(table(models, options.cards, *asked))
        return
    for (model, config), wish in product(models.items(), options.cards):
        profile = profile_of(config, wish.split("+"), *asked)
        print(f"{model} on {wish}, a sequence of {options.tokens} tokens:")
        for what, num_bytes in items(profile):
            print(f"  {what}: {num_bytes / GIB:.2f}")
        lines = [*explained(profile)]
        print(*lines, sep="\n")
        if lines[0].startswith("no: "):
            sliced = sliced_profile(config, wish.split("+"), options.tokens, Lora(options.rank))
            print(*explained_in_slices(sliced), sep="\n")


if __name__ == "__main__":
    try:
        main()
    except (HubError, PlanError) as error:
        sys.exit(str(error))
