"""What is measured for slices along the tokens, against the slices of a stage."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from lightning_hetero import Plan, StagePlan
from lightning_hetero.coordinator.token_slices import TokenSlices
from lightning_hetero.devices.device import device_for
from lightning_hetero.errors import ModelError
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.bench import Bench, LayerTrial
from lightning_hetero.pipeline.boundary import Activation, Gradients, Surroundings
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.pipeline.slice_cut import cut_by_work
from lightning_hetero.pipeline.stage import Stage
from lightning_hetero.pipeline.token_slices import SliceCut, work_of
from lightning_hetero.planner.profile import DeviceProfile, ModelProfile, Part, Timing
from lightning_hetero.planner.token_slices import SliceHolder
from lightning_hetero.profiler.embedding_and_head import Example
from lightning_hetero.profiler.measured_model import LayerJob
from lightning_hetero.profiler.token_slices import describe_slices, of_mean_slices, slice_examples
from lightning_hetero.profiler.trials import timing_of

NUM_LAYERS, HIDDEN, TOKENS = 2, 128, 256
CPU = torch.device("cpu")
HEADS, KEY_HEADS = 4, 2


def decoder(attention: str = "sdpa") -> list[nn.Module]:
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        vocab_size=16,
    )
    model: Any = LlamaForCausalLM(config)
    model.set_attn_implementation(attention)
    return list(model.model.layers)


def example(layers: list[nn.Module], mask: Tensor | None = None) -> Example:
    config: Any = layers[0].self_attn.config
    tables = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(TOKENS)[None])
    kwargs = {"attention_mask": mask, "position_embeddings": tables, "past_key_values": None}
    calls = {n: LayerCall(n, True, (), dict(kwargs)) for n in range(NUM_LAYERS)}
    inputs = {n: torch.empty(1, TOKENS, HIDDEN, device="meta") for n in calls}
    return Example(inputs, True, Surroundings(True, None, list(calls.values())), calls)


def on_meta(layers: list[nn.Module]) -> list[nn.Module]:
    return [copy.deepcopy(layer).to("meta") for layer in layers]


def test_the_first_slices_of_equal_work_are_measured() -> None:
    layers = decoder()
    num_tokens, found = slice_examples(example(layers), layers, None)
    assert num_tokens == TOKENS
    assert sorted(found) == [TOKENS // 64, TOKENS // 8, TOKENS]
    for size, each in found.items():
        length = cut_by_work(TOKENS, TOKENS // size, work_of(layers))[0][1]
        assert [hidden.shape[1] for hidden in each.inputs.values()] == [length] * NUM_LAYERS
        cos, _ = each.calls[0].kwargs["position_embeddings"]
        assert cos.shape[-2] == length
    chosen = slice_examples(example(layers), layers, [64, 100_000])[1]
    assert sorted(chosen) == [64, TOKENS]


def test_a_slice_takes_no_longer_than_a_larger_one() -> None:
    """So that no line through two noisy timings falls, and ends at 0 seconds."""
    layers = decoder()
    examples = slice_examples(example(layers), layers, None)[1]
    small, middle, whole = sorted(examples)
    noisy = [
        Timing("layer", small, 0.5, 0.1, 8, 8),
        Timing("layer", middle, 0.2, 0.3, 8, 8),
        Timing("layer", whole, 0.9, 0.2, 8, 8),
        Timing("layer", small, 0.1, 0.7, 8, 8, recompute=True),
    ]
    found = of_mean_slices(noisy, examples)
    seconds = [(each.forward_seconds, each.backward_seconds) for each in found]
    assert seconds == [(0.2, 0.1), (0.2, 0.2), (0.9, 0.2), (0.1, 0.7)]
    assert found[2].saved_bytes == 8
    assert found[1].saved_bytes == round(8 * middle / examples[middle].hidden.shape[1])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_keys_and_values_are_counted_without_content(attention: str) -> None:
    layers = decoder(attention)
    found = describe_slices(example(layers), layers, on_meta(layers))
    head_size = HIDDEN // HEADS
    assert found.key_value_bytes == 2 * KEY_HEADS * head_size * TOKENS * 4
    assert found.attended_bytes == 2 * HEADS * head_size * TOKENS * 4
    assert found.pair_bytes == (5 if attention == "sdpa" else 5 + HEADS * 8)
    assert (found.weight_work, found.pair_work) == work_of(layers)


def measured(whole: Example, layers: list[nn.Module], num_slices: int) -> list[Timing]:
    """The timings of a layer, as the profiler writes them."""
    _, examples = slice_examples(whole, layers, [TOKENS // num_slices])
    bench = Bench(CPU, lambda: nn.ModuleDict({"0": copy.deepcopy(layers[0]).to("meta")}), {})
    found = []
    for size, each in examples.items():
        for recompute in (False, True):
            around = replace(each.surroundings, calls=[each.calls[0]])
            shape = tuple(each.hidden.shape)
            trial = LayerTrial(shape, torch.float32, True, around, recompute, None, True, 0.0)
            job = LayerJob("float32", size, "layer", recompute)
            found.append(timing_of(job, bench.measure_layer(trial)))
    return of_mean_slices(found, examples)


@pytest.mark.parametrize("recompute", [False, True, "layers"])
@pytest.mark.parametrize("num_slices", [2, 8])
def test_the_counted_bytes_are_enough_for_the_slices_of_a_stage(
    num_slices: int, recompute: Any
) -> None:
    layers = decoder()
    whole = example(layers)
    slices = describe_slices(whole, layers, on_meta(layers))
    timings = measured(whole, layers, num_slices)
    model = ModelProfile(
        "counted",
        ["layer"] * NUM_LAYERS,
        [Part("layer", 0)],
        tokens_per_sample=1,
        activation_bytes_per_sample=4 * HIDDEN,
        gradient_bytes_per_sample=4 * HIDDEN,
        slices=slices,
    )
    device = DeviceProfile("a", "test", 2**40, timings=timings)
    holder = SliceHolder(device, model, TOKENS // num_slices, slices, TOKENS)
    need = holder.need(holder.option("float32", recompute), 0, NUM_LAYERS, 1)
    held, peak = bytes_of_stage(whole, layers, num_slices, recompute)
    assert held <= float(need.in_flight)
    # The parts of a backward do not reach their peaks together.
    assert peak <= float(need.total) <= 1.7 * peak


def bytes_of_stage(
    whole: Example, layers: list[nn.Module], num_slices: int, recompute: Any
) -> tuple[int, int]:
    """Bytes of a stage between forwards and backwards, and the most of all."""
    stage = Stage(nn.ModuleDict({str(n): e for n, e in enumerate(layers)}), CPU, 1, recompute)
    hidden, outs = torch.randn(1, TOKENS, HIDDEN), []
    for parameter in stage.layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with device_for(CPU).metering() as meter:
        for number, each in enumerate(SliceCut(num_slices, work_of(layers)).slices(TOKENS)):
            calls = [each.cut_call(c, layers[n]) for n, c in whole.calls.items()]
            leaf = each.cut(hidden).clone().requires_grad_()
            around = Surroundings(True, None, calls)
            outs.append(stage.forward(Key(number), Activation(leaf), around).hidden)
        held = meter.taken_bytes()
        for number in reversed(range(num_slices)):
            stage.backward(Key(number), Gradients((torch.ones_like(outs.pop()),)))
        return held, meter.peak_bytes()


class _Hiding(LlamaAttention):
    """Leaves the cache empty where only shapes are computed."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        kept = None if hidden_states.is_meta else kwargs.get("past_key_values")
        return super().forward(hidden_states, **{**kwargs, "past_key_values": kept})


@pytest.mark.follows("Pass a plan of your own. Use `micro_batching='boundary'`")
def test_a_layer_that_hides_its_keys_without_content_runs_by_a_plan_of_its_own() -> None:
    layers = decoder()
    shapes = on_meta(layers)
    for each in (*layers, *shapes):
        each.self_attn.__class__ = _Hiding
    with pytest.raises(ModelError, match="Pass a plan of your own"):
        describe_slices(example(layers), layers, shapes)
    plan = Plan([StagePlan(["a"], (0, NUM_LAYERS))], 4)
    assert len(TokenSlices(dict(enumerate(layers)), plan, "stop").cut.slices(TOKENS)) == 4
