"""Slices along the tokens on one stage: their cuts, their keys and values, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_hetero.errors import BatchError, ModelError, RemoteProtocolError
from lightning_hetero.model.layer_call import LayerCall
from lightning_hetero.pipeline.boundary import Activation, Gradients, Surroundings
from lightning_hetero.pipeline.handover import Exchange, Request, exchange_whole
from lightning_hetero.pipeline.rule import Key
from lightning_hetero.pipeline.slice_cut import Work, cut_by_work
from lightning_hetero.pipeline.stage import Stage
from lightning_hetero.pipeline.token_slices import (
    SequenceKeys,
    Slice,
    SliceCut,
    SlicePass,
    check_form,
    refusal,
    work_of,
)
from lightning_hetero.pipeline.trial_slices import tried_in_slices
from lightning_hetero.plan import Recompute

from ..families import tiny_model
from ..qlora import in_four_bits
from ..remedies import Act, come_and_follow, follows
from ..storages import StorageCount
from .chain import Chain, cut_into_stages

NUM_TOKENS = 10
EVEN = Work(1.0, 0.0)


@pytest.mark.parametrize(
    ("num_tokens", "num_slices", "ends"),
    [(10, 1, [10]), (10, 3, [3, 7, 10]), (8, 4, [2, 4, 6, 8]), (2, 5, [1, 2]), (1, 4, [1])],
)
def test_slices_are_equal_without_growing_work(
    num_tokens: int, num_slices: int, ends: list[int]
) -> None:
    cut = cut_by_work(num_tokens, num_slices, EVEN)
    assert [end for _, end in cut] == ends
    assert [start for start, _ in cut] == [0, *ends[:-1]]


@pytest.mark.parametrize("work", [Work(1.0, 0.001), Work(1.0, 0.1), Work(0.0, 1.0)], ids=str)
def test_slices_have_equal_work(work: Work) -> None:
    cut = cut_by_work(32_000, 8, work)
    shares = [work.of_first(end) - work.of_first(start) for start, end in cut]
    assert max(shares) < 1.01 * min(shares)
    lengths = [end - start for start, end in cut]
    assert lengths == sorted(lengths, reverse=True)


def test_every_slice_has_a_token_however_steep_the_work() -> None:
    assert cut_by_work(4, 4, Work(0.0, 1.0)) == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_the_work_of_a_layer_with_a_window_does_not_grow() -> None:
    assert work_of([tiny_model("mistral").model.layers[0]]).b == 0
    layer = tiny_model("llama").model.layers[0]
    matrices = sum(p.numel() for p in layer.parameters() if p.ndim > 1)
    # 2 heads of 8 numbers: a product for the score, another one for the value.
    assert work_of([layer, layer]) == Work(2.0 * matrices, 2 * 2.0 * 16)


def test_the_work_of_packed_weights_is_that_of_their_numbers(tmp_path: Path) -> None:
    plain, packed = tiny_model("llama"), in_four_bits("llama", tmp_path)
    layer = packed.model.layers[0]
    assert any(parameter.dtype == torch.uint8 for parameter in layer.parameters())
    assert work_of([layer]) == work_of([plain.model.layers[0]])


def layers_of(family: str = "llama", attention: str = "sdpa") -> Any:
    model = tiny_model(family)
    model.set_attn_implementation(attention)
    return model.model


def calls_of(model: Any, mask: Tensor | None = None) -> list[LayerCall]:
    positions = torch.arange(NUM_TOKENS)[None]
    tables = model.rotary_emb(torch.zeros(1), positions)
    kwargs = {
        "attention_mask": mask,
        "position_ids": positions,
        "past_key_values": None,
        "position_embeddings": tables,
    }
    return [LayerCall(number, True, (), dict(kwargs)) for number in range(2)]


def stage_of(model: Any, **options: Any) -> Stage:
    layers = nn.ModuleDict({str(number): model.layers[number] for number in range(2)})
    return Stage(layers, torch.device("cpu"), 1, **options)


def hidden_states() -> Tensor:
    torch.manual_seed(3)
    return torch.randn(2, NUM_TOKENS, 16)


def slices_of(num_slices: int) -> list[Slice]:
    return SliceCut(num_slices, EVEN).slices(NUM_TOKENS)


def forward(stage: Stage, model: Any, calls: list[LayerCall], each: Slice, index: int) -> Tensor:
    cut = [each.cut_call(call, model.layers[call.layer_index]) for call in calls]
    incoming = Activation(each.cut(hidden_states()).clone().requires_grad_())
    return stage.forward(Key(index), incoming, Surroundings(True, None, cut)).hidden


def gradients_of(model: Any) -> dict[str, Tensor]:
    named = model.layers[:2].named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def whole(model: Any, calls: list[LayerCall], gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The result, and the gradient of the hidden states."""
    leaf = hidden_states().requires_grad_()
    out = leaf
    for call in calls:
        out = model.layers[call.layer_index](out, **call.kwargs)
    out.backward(gradient)
    assert leaf.grad is not None
    return out.detach(), leaf.grad


@pytest.mark.parametrize("recompute", [False, True, "layers"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_stage_has_the_gradients_of_the_whole_sequence(
    attention: str, recompute: Recompute
) -> None:
    model = layers_of(attention=attention)
    mask = None
    if attention == "eager":
        mask = torch.full((1, 1, NUM_TOKENS, NUM_TOKENS), torch.finfo(torch.float32).min).triu(1)
    calls, gradient = calls_of(model, mask), torch.randn(2, NUM_TOKENS, 16)
    expected, of_input = whole(model, calls, gradient)
    wanted = gradients_of(model)
    model.zero_grad()
    stage = stage_of(model, recompute=recompute)
    slices = slices_of(3)
    outs = [forward(stage, model, calls, each, index) for index, each in enumerate(slices)]
    torch.testing.assert_close(torch.cat(outs, 1), expected)
    pieces = [each.cut(gradient) for each in slices]
    back = [
        stage.backward(Key(index), Gradients((pieces[index],))).tensors[0] for index in (2, 1, 0)
    ]
    torch.testing.assert_close(torch.cat(back[::-1], 1), of_input)  # type: ignore[arg-type]
    for name, found in gradients_of(model).items():
        torch.testing.assert_close(found, wanted[name], rtol=1e-4, atol=1e-5)
    assert stage._keys == {}


def step_of_chain(processes: list[int] | None, seed: int, recompute: Recompute) -> list[Tensor]:
    """The gradients of four layers in four stages, and of the hidden states."""
    model = layers_of()
    layers = {number: model.layers[number] for number in range(4)}
    chain = Chain(cut_into_stages(layers, 4, recompute), seed, processes)
    calls = [replace(calls_of(model)[0], layer_index=number) for number in layers]
    leaf = hidden_states().requires_grad_()
    around = Surroundings(True, None, calls)
    pieces = [
        Request(
            each.cut(leaf),
            replace(around, calls=[each.cut_call(c, layers[c.layer_index]) for c in calls]),
        )
        for each in slices_of(4)
    ]
    chain.begin_step(4, accumulate=False)
    exchange = Exchange(chain, 0, 4, dim=1, is_along_tokens=True)
    exchange_whole(leaf, exchange, pieces).hidden.square().sum().backward()
    backwards = [str(a) for a in chain.actions if a.kind == "B" and a.stage_index == 4]
    assert backwards == ["4B3", "4B2", "4B1", "4B0"]
    return [p.grad for p in (leaf, *model.parameters()) if p.grad is not None]


@pytest.mark.parametrize("recompute", [False, True, "layers"])
def test_every_plan_and_timing_adds_up_in_one_order(recompute: Recompute) -> None:
    expected = step_of_chain(None, 0, False)
    assert len(expected) > 4
    for processes in (None, [1, 2, 1, 2], [1, 1, 2, 2], [1, 1, 1, 1]):
        for seed in range(4):
            found = step_of_chain(processes, seed, recompute)
            assert all(torch.equal(mine, its) for mine, its in zip(found, expected, strict=True))


def test_backwards_in_another_order_are_refused() -> None:
    model = layers_of()
    stage, calls = stage_of(model), calls_of(model)
    outs = [forward(stage, model, calls, each, n) for n, each in enumerate(slices_of(3))]
    with pytest.raises(RemoteProtocolError, match="up to token 3 came.*up to token 10 is next"):
        stage.backward(Key(0), Gradients((torch.ones_like(outs[0]),)))


def test_a_slice_without_the_one_before_it_is_refused() -> None:
    model = layers_of()
    with pytest.raises(ModelError, match="begins at token 3, and layer 0 has the keys of 0 tokens"):
        forward(stage_of(model), model, calls_of(model), slices_of(3)[1], 1)


def test_an_aborted_step_leaves_no_keys() -> None:
    model = layers_of()
    stage = stage_of(model)
    forward(stage, model, calls_of(model), slices_of(3)[0], 0)
    assert len(stage._keys) == 1
    stage.forget()
    assert stage._keys == {}


def test_another_backward_of_a_slice_is_refused() -> None:
    model = layers_of()
    stage = stage_of(model)
    out = forward(stage, model, calls_of(model), slices_of(1)[0], 0)
    with pytest.raises(ModelError, match="retain_graph=True"):
        stage.backward(Key(0), Gradients((torch.ones_like(out),), keeps_graph=True))


def test_layers_that_do_not_train_pass_gradients_of_keys_on() -> None:
    model = layers_of()
    model.requires_grad_(False)
    calls, gradient = calls_of(model), torch.randn(2, NUM_TOKENS, 16)
    _, of_input = whole(model, calls, gradient)
    stage, slices = stage_of(model), slices_of(2)
    for index, each in enumerate(slices):
        forward(stage, model, calls, each, index)
    back = [
        stage.backward(Key(index), Gradients((slices[index].cut(gradient),))).tensors[0]
        for index in (1, 0)
    ]
    torch.testing.assert_close(torch.cat(back[::-1], 1), of_input)  # type: ignore[arg-type]


def test_a_shared_argument_is_cut_once() -> None:
    model = layers_of()
    mask = torch.ones(2, 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).tril()
    each = slices_of(3)[1]
    first, second = (each.cut_call(c, model.layers[0]) for c in calls_of(model, mask))
    assert first.kwargs["attention_mask"] is second.kwargs["attention_mask"]
    assert first.kwargs["attention_mask"].shape == (2, 1, 4, 7)
    assert first.kwargs["position_ids"].tolist() == [[3, 4, 5, 6]]
    assert first.kwargs["position_embeddings"][0].shape == (1, 4, 8)


def cutting(**kwargs: Any) -> Act:
    """Cuts a call with these arguments."""

    def act() -> None:
        model = layers_of()
        call = calls_of(model)[0]
        call = replace(call, kwargs={**call.kwargs, **kwargs})
        slices_of(3)[1].cut_call(call, model.layers[0])

    return act


def trying(layer: Callable[[], nn.Module]) -> Act:
    """Tries a layer on two slices."""

    def act() -> None:
        made = layer()
        answer = tried_in_slices(made, calls_of(layers_of())[0], hidden_states())
        assert float(answer.max()) < 1e-4

    return act


def running(layer: Callable[[], nn.Module]) -> Act:
    """Runs a layer on the first slice."""

    def act() -> None:
        made = layer()
        each, one = slices_of(3)[0], SlicePass(SequenceKeys())
        call = each.cut_call(calls_of(layers_of())[0], made)
        piece = each.cut(hidden_states())
        args, kwargs = one.arguments(call, made, piece)
        made(piece, *args, **kwargs)
        one.end_forward()

    return act


def llama_layer() -> nn.Module:
    return layers_of().layers[0]  # type: ignore[no-any-return]


def forgetful() -> nn.Module:
    """A layer that leaves its cache as it is."""
    made = llama_layer()
    forward_of_class = made.forward
    made.forward = lambda *args, past_key_values=None, **kwargs: forward_of_class(*args, **kwargs)
    return made


def failing() -> nn.Module:
    """A layer that fails with a cache."""
    made = llama_layer()
    forward_of_class = made.forward

    def forward(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        if past_key_values is not None:
            raise ValueError("not with a cache")
        return forward_of_class(*args, **kwargs)

    made.forward = forward
    return made


def twice_over() -> nn.Module:
    """A layer that runs two times in one forward."""
    made = llama_layer()
    forward_of_class = made.forward

    def forward(hidden: Tensor, **kwargs: Any) -> Any:
        return forward_of_class(hidden, **kwargs) + forward_of_class(hidden, **kwargs)

    made.forward = forward
    return made


def joining(*dtypes: torch.dtype) -> Act:
    """Puts keys of these dtypes into the cache, a token each."""

    def act() -> None:
        keys = SequenceKeys()
        for start, dtype in enumerate(dtypes):
            own = torch.ones(1, 1, 1, 2, dtype=dtype)
            found, _ = keys.cache(0, start, len(dtypes)).update(own, own)
            assert found.shape == (1, 1, start + 1, 2)

    return act


def going_back(*, is_cut: bool) -> Act:
    """Runs two slices back; the keys of the first one may have no graph."""

    def act() -> None:
        model = layers_of()
        stage, calls, outs = stage_of(model), calls_of(model), []
        project = model.layers[0].self_attn.k_proj
        for index, each in enumerate(slices_of(2)):
            cuts = is_cut and index == 0
            handle = project.register_forward_hook(
                lambda _module, _args, out, cuts=cuts: out.detach() if cuts else out
            )
            outs.append(forward(stage, model, calls, each, index))
            handle.remove()
        for index in (1, 0):
            stage.backward(Key(index), Gradients((torch.ones_like(outs[index]),)))

    return act


FULL = torch.ones(1, 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        follows(
            "or an image does, so the layer is not causal. Use `micro_batching='boundary'`",
            cutting(attention_mask=FULL),
            cutting(attention_mask=FULL.tril()),
        ),
        follows(
            "the tokens of a sequence is unknown. Use `micro_batching='boundary'`",
            cutting(bias=torch.zeros(NUM_TOKENS)),
            cutting(bias=1.0),
        ),
        follows(
            "need (samples, tokens, features). Use `micro_batching='boundary'`",
            lambda: check_form(torch.zeros(2, 3, 4, 5), 0),
            lambda: check_form(torch.zeros(2, 3, 4), 0),
        ),
        follows(
            "into its key-value cache, and … have come. Use `micro_batching='boundary'`",
            running(forgetful),
            running(llama_layer),
        ),
        follows(
            "keep one set of keys for each layer. Use `micro_batching='boundary'`",
            running(twice_over),
            running(llama_layer),
        ),
        follows(
            "and those of earlier slices are …. Use `micro_batching='boundary'`",
            joining(torch.float32, torch.bfloat16),
            joining(torch.float32, torch.float32),
        ),
        follows(
            "and later slices have gradients for them. Use `micro_batching='boundary'`",
            going_back(is_cut=True),
            going_back(is_cut=False),
        ),
        follows(
            "cannot run on slices of a sequence: … Use `micro_batching='boundary'`",
            trying(failing),
            trying(llama_layer),
        ),
    ],
)
def test_what_is_refused_goes_right_by_its_remedy(
    request: pytest.FixtureRequest, wrong: Act, right: Act
) -> None:
    come_and_follow(request, wrong, right, None)


@pytest.mark.parametrize(
    "value",
    [list(range(NUM_TOKENS)), torch.zeros(1, NUM_TOKENS), torch.ones(1, 1, 10, 10).long()],
    ids=["list", "table", "whole numbers"],
)
def test_arguments_of_unknown_form_are_refused(value: Any) -> None:
    with pytest.raises(BatchError, match="The argument attention_mask of layer 0"):
        cutting(attention_mask=value)()


def test_the_trial_finds_a_token_that_depends_on_later_ones() -> None:
    layer = llama_layer()
    forward_of_class = layer.forward

    def forward(hidden: Tensor, **kwargs: Any) -> Any:
        return forward_of_class(hidden + hidden.mean(1, keepdim=True), **kwargs)

    layer.forward = forward
    answer = tried_in_slices(layer, calls_of(layers_of())[0], hidden_states())
    assert float(answer[0]) > 0.01


def test_undefined_results_of_slices_alone_are_a_large_difference() -> None:
    layer = llama_layer()
    forward_of_class = layer.forward

    def forward(hidden: Tensor, past_key_values: Any = None, **kwargs: Any) -> Any:
        out = forward_of_class(hidden, past_key_values=past_key_values, **kwargs)
        return out if past_key_values is None else out * float("nan")

    layer.forward = forward
    answer = tried_in_slices(layer, calls_of(layers_of())[0], hidden_states())
    assert answer.isfinite().all()
    assert float(answer.min()) > 1


def test_the_trial_finds_other_gradients() -> None:
    layer = llama_layer()
    forward_of_class = layer.forward

    def forward(hidden: Tensor, **kwargs: Any) -> Any:
        # The same numbers, with a gradient by the length of the sequence.
        out = forward_of_class(hidden, **kwargs)
        scaled = out * hidden.shape[1]
        return out.detach() + scaled - scaled.detach()

    layer.forward = forward
    results, gradients = tried_in_slices(layer, calls_of(layers_of())[0], hidden_states()).tolist()
    assert results < 1e-5
    assert gradients > 0.01


def test_layers_say_by_themselves_why_they_cannot_run_on_slices() -> None:
    assert refusal(llama_layer()) is None
    assert "does not take the keys" in str(refusal(nn.Linear(2, 2)))
    layer = llama_layer()
    layer.self_attn.is_causal = False
    assert "is not causal" in str(refusal(layer))
    layer = llama_layer()
    layer.self_attn.config._attn_implementation = "flash_attention_2"
    assert "'flash_attention_2'" in str(refusal(layer))
    layer = llama_layer()
    layer.self_attn.config.num_kv_shared_layers = 1
    assert "share their keys and values" in str(refusal(layer))


def wide_layers(num_layers: int) -> Any:
    """Layers whose keys and graphs are large beside their weights."""
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).model


def peak_of_step(num_layers: int, num_tokens: int, num_slices: int, recompute: Recompute) -> int:
    """The most bytes of tensors at once, in the step of a stage with gradients of its weights."""
    model = wide_layers(num_layers)
    layers = nn.ModuleDict({str(n): layer for n, layer in enumerate(model.layers)})
    stage = Stage(layers, torch.device("cpu"), 1, recompute=recompute)
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tables = model.rotary_emb(torch.zeros(1), torch.arange(num_tokens)[None])
    kwargs = {"attention_mask": None, "position_embeddings": tables, "past_key_values": None}
    call = LayerCall(0, True, (), {**kwargs, "position_ids": None})
    calls = [replace(call, layer_index=number) for number in range(num_layers)]
    slices = SliceCut(num_slices, EVEN).slices(num_tokens)
    with StorageCount() as count:
        for index, each in enumerate(slices):
            cut = [each.cut_call(one, model.layers[one.layer_index]) for one in calls]
            leaf = torch.ones(1, each.end - each.start, 64, requires_grad=True)
            stage.forward(Key(index), Activation(leaf), Surroundings(True, None, cut))
        for index in reversed(range(num_slices)):
            length = slices[index].end - slices[index].start
            stage.backward(Key(index), Gradients((torch.ones(1, length, 64),)))
    return count.peak_bytes


@pytest.mark.parametrize("num_tokens", [256, 512, 1024])
def test_layers_that_run_again_keep_inputs_keys_and_one_layers_graph(num_tokens: int) -> None:
    num_slices = num_tokens // 64
    # One layer has its weights, inputs, keys and values, and its graph of one slice.
    one = peak_of_step(1, num_tokens, num_slices, True)
    weights = sum(2 * p.nbytes for p in wide_layers(1).layers.parameters())
    of_tokens = 4 * 64 * num_tokens
    # A further layer: its weights and their gradients, input, keys and values with gradients.
    more = weights + of_tokens + 2 * 2 * of_tokens
    found = peak_of_step(6, num_tokens, num_slices, "layers")
    assert found <= 1.1 * (one + 5 * more)


def test_keys_are_kept_once_for_all_slices() -> None:
    short, long = (peak_of_step(2, length, length // 64, False) for length in (512, 1024))
    # The masks of slices grow with the square of the length; keys for each slice would, too.
    masks = 4 * 64 * 64 * (16 * 17 - 2 * 8 * 9) // 2
    assert long - masks < 2.05 * short


class Reader:
    """Notes each layer that has to be read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def enter(self, number: int) -> None:
        if self.read[-1:] != [number]:
            self.read.append(number)

    enter_backward = enter


def test_each_slice_reads_each_layer_for_its_forward_and_for_its_backward() -> None:
    model, reader = layers_of(), Reader()
    stage, calls = stage_of(model, recompute="layers", weights=reader), calls_of(model)
    outs = [forward(stage, model, calls, each, n) for n, each in enumerate(slices_of(3))]
    assert reader.read == [0, 1] * 3
    reader.read.clear()
    for index in (2, 1, 0):
        stage.backward(Key(index), Gradients((torch.ones_like(outs[index]),)))
    assert reader.read == [1, 0] * 3


@pytest.mark.parametrize("recompute", [False, True, "layers"])
def test_a_slice_without_a_gradient_gets_the_gradients_of_later_ones(recompute: Recompute) -> None:
    model = layers_of()
    calls, gradient = calls_of(model), torch.randn(2, NUM_TOKENS, 16)
    slices = slices_of(3)
    slices[0].cut(gradient).zero_()
    _, of_input = whole(model, calls, gradient)
    stage = stage_of(model, recompute=recompute)
    for index, each in enumerate(slices):
        forward(stage, model, calls, each, index)
    given = [None, *(each.cut(gradient) for each in slices[1:])]
    back = [stage.backward(Key(n), Gradients((given[n],))).tensors[0] for n in (2, 1, 0)]
    torch.testing.assert_close(torch.cat(back[::-1], 1), of_input)  # type: ignore[arg-type]


def test_a_frozen_stage_without_gradients_leaves_no_keys() -> None:
    model = layers_of()
    model.requires_grad_(False)
    stage, calls = stage_of(model), calls_of(model)
    for _ in range(2):
        for index, each in enumerate(slices_of(3)):
            cut = [each.cut_call(call, model.layers[call.layer_index]) for call in calls]
            incoming = Activation(each.cut(hidden_states()))
            stage.forward(Key(index), incoming, Surroundings(True, None, cut))
        assert stage._keys == {}


def test_a_change_of_keys_in_place_is_refused() -> None:
    kept = SequenceKeys().cache(0, 0, 4)
    own = torch.ones(1, 1, 4, 2, requires_grad=True)
    keys, _ = kept.update(own * 1, own * 1)
    with pytest.raises(RuntimeError, match="modified inplace"):
        keys.mul_(2)


def test_a_slice_after_the_end_of_its_sequence_is_refused() -> None:
    model = layers_of()
    each, calls = slices_of(1)[0], calls_of(model)
    call = each.cut_call(calls[0], model.layers[0])
    assert call.cache is not None
    call = replace(call, cache=replace(call.cache, num_tokens=9))
    incoming = Activation(hidden_states())
    with pytest.raises(RemoteProtocolError, match="up to token 10 came, of a sequence of 9"):
        stage_of(model).forward(Key(0), incoming, Surroundings(True, None, [call]))
