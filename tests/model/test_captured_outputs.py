"""Collecting outputs the way transformers does, for layers that are elsewhere."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from lightning_hetero.errors import ModelError, RemoteProtocolError
from lightning_hetero.model.captured_outputs import (
    CollectingHooks,
    SilencedHooks,
    add_collected,
    collecting,
    install_hooks,
    is_collecting,
    wanted_kinds,
)

from ..families import NUM_LAYERS, SIZES, tiny_model
from ..models import tiny_llama

TOKENS = torch.arange(6).reshape(2, 3)
NAMES = [f"model.layers.{number}" for number in range(NUM_LAYERS)]


def num_hooks(module: nn.Module) -> int:
    return sum(map(is_collecting, (h for m in module.modules() for h in m._forward_hooks.values())))


def inside(model: PreTrainedModel, act: Any, **options: Any) -> Any:
    """Call the model, and act where its first layer is called."""
    layer = model.model.layers[0]
    found: list[Any] = []

    def hook(_layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        found.append(act(args[0]))

    handle = layer.register_forward_pre_hook(hook)
    with torch.no_grad():
        output = model(TOKENS, **options)
    handle.remove()
    return found[0], output


def test_the_wanted_kinds_are_those_that_the_call_asks_for() -> None:
    model = tiny_model("mixtral", output_router_logits=False)
    assert wanted_kinds() == []
    for asked in ([], ["router_logits"], ["router_logits", "hidden_states", "attentions"]):
        options = {f"output_{kind}": True for kind in asked}
        found, _ = inside(model, lambda _: wanted_kinds(), **options)
        assert sorted(found) == sorted(asked)
    assert wanted_kinds() == []


def test_a_selection_of_hidden_states_is_refused() -> None:
    with pytest.raises(ModelError, match="output_hidden_states=True for all of them"):
        inside(tiny_llama(2), lambda _: wanted_kinds(), output_hidden_states=[1])


def test_what_is_added_comes_out_of_the_model_behind_its_own() -> None:
    added = torch.ones(6, 4)
    _, output = inside(
        tiny_model("mixtral"),
        lambda hidden: add_collected(hidden, [("router_logits", added)]),
    )
    assert output.router_logits[0] is added
    assert len(output.router_logits) == 1 + NUM_LAYERS


def test_the_hidden_states_that_went_away_are_the_first_if_there_are_none() -> None:
    went, came = torch.ones(2, 3, 16), torch.zeros(2, 3, 16)

    def add(_hidden: Tensor) -> None:
        add_collected(went, [("hidden_states", came)])
        add_collected(came, [("hidden_states", came)])

    _, output = inside(tiny_llama(2), add, output_hidden_states=True)
    assert [t is went for t in output.hidden_states[:3]] == [True, False, False]
    assert len(output.hidden_states) == 3 + 2


@pytest.mark.parametrize("asked", [[], ["hidden_states"]], ids=str)
def test_a_kind_that_nobody_asked_for_is_refused(asked: list[str]) -> None:
    def add(hidden: Tensor) -> None:
        add_collected(hidden, [("router_logits", hidden)])

    options = {f"output_{kind}": True for kind in asked}
    with pytest.raises(RemoteProtocolError, match=r"'router_logits'; the model asked for \["):
        inside(tiny_llama(2), add, **options)


def test_nothing_is_added_where_nothing_is_collected() -> None:
    add_collected(TOKENS, [])


def test_layers_put_the_wanted_kinds_aside_and_no_more() -> None:
    model = tiny_model("mixtral", output_router_logits=False)
    with torch.no_grad():
        expected = model(TOKENS, output_hidden_states=True, output_router_logits=True)
        with collecting(["router_logits", "hidden_states"]) as collected:
            model.model.layers[0](expected.hidden_states[0], **arguments(model))
        model.model.layers[1](expected.hidden_states[1], **arguments(model))
        with collecting([]) as nothing:
            model.model.layers[0](expected.hidden_states[0], **arguments(model))
    assert [kind for kind, _ in collected()] == ["router_logits", "hidden_states"]
    assert torch.equal(collected()[0][1], expected.router_logits[0])
    assert torch.equal(collected()[1][1], expected.hidden_states[1])
    assert nothing() == []


def arguments(model: PreTrainedModel) -> dict[str, Any]:
    positions = torch.arange(3)[None]
    return {"position_embeddings": model.model.rotary_emb(torch.ones(1, 3, 16), positions)}


def test_collecting_ends_with_the_block_even_if_it_fails() -> None:
    with contextlib.suppress(ZeroDivisionError), collecting(["hidden_states"]):
        assert wanted_kinds() == ["hidden_states"]
        raise ZeroDivisionError
    assert wanted_kinds() == []


@pytest.mark.follows(
    "and only tensors can come back from a worker; call the model without output_…, or keep the"
)
def test_only_tensors_can_be_collected() -> None:
    model = tiny_llama(2)
    model.model.layers[0].register_forward_hook(lambda _m, _args, output: ([output],))
    install_hooks(model, NAMES[:2])
    with collecting(["hidden_states"]) as collected:
        model.model.layers[0](torch.ones(1, 3, 16), **arguments(model))
    with pytest.raises(ModelError, match="hidden_states are a list, and only tensors"):
        collected()
    with collecting([]) as collected:
        model.model.layers[0](torch.ones(1, 3, 16), **arguments(model))
    assert collected() == []


def test_hooks_are_installed_once_wherever_the_model_is() -> None:
    model = tiny_llama(NUM_LAYERS)
    root = nn.ModuleDict({"net": model})
    for _ in range(2):
        install_hooks(root, [f"net.{name}" for name in NAMES])
        with torch.no_grad():
            assert len(model(TOKENS, output_hidden_states=True).hidden_states) == NUM_LAYERS + 1
    assert num_hooks(model) == 2 * NUM_LAYERS  # hidden states and attentions


def test_an_outer_model_that_collects_too_adds_no_second_set_of_hooks() -> None:
    model = tiny_llama(NUM_LAYERS)
    install_hooks(model, NAMES)
    before = num_hooks(model)
    # What the outer model's forward does where its own class collects.
    output_capturing.maybe_install_capturing_hooks(model)
    assert num_hooks(model) == before


def test_without_a_hugging_face_model_nothing_happens() -> None:
    root = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)])})
    install_hooks(root, ["layers.0"])
    CollectingHooks(root, ["layers.0"]).remove()
    assert num_hooks(root) == 0


def state(model: nn.Module) -> list[tuple[str, set[str], list[Any]]]:
    """The attributes and the forward hooks of every module."""
    return [
        (name, set(vars(module)), list(module._forward_hooks.values()))
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("was_used", [False, True])
def test_hooks_that_are_removed_leave_the_model_as_it_was(was_used: bool) -> None:
    model = tiny_model("mixtral", output_router_logits=False)
    if was_used:
        model(TOKENS, output_hidden_states=True)
    before = state(model)
    hooks = CollectingHooks(model, NAMES)
    assert state(model) != before
    hooks.remove()
    assert state(model) == before


def test_silenced_hooks_come_back_and_others_stay() -> None:
    model = tiny_model("mixtral")
    install_hooks(model, NAMES)
    layer = model.model.layers[1]
    layer.mlp.register_forward_hook(print)
    count = num_hooks(layer)
    silenced = SilencedHooks(layer)
    assert count > 0
    assert num_hooks(layer) == 0
    assert list(layer.mlp._forward_hooks.values()) == [print]
    assert num_hooks(model.model.layers[2]) == count
    for _ in range(2):
        silenced.restore()
        assert num_hooks(layer) == count


def gathering(*layers: nn.Module) -> PreTrainedModel:
    """A model that gathers its hidden states by itself."""
    model = tiny_model("falcon").eval()
    for number, layer in enumerate(layers):
        model.transformer.h[number].forward = layer.forward
    return model


class PassingOn(nn.Module):
    """A layer that gives back what it was given, as a hollow one does."""

    def forward(self, hidden: Tensor, **_options: Any) -> tuple[Tensor, None]:
        return hidden, None


@pytest.mark.parametrize("return_dict", [False, True])
def test_a_tensor_gathered_twice_in_a_row_is_refused(return_dict: bool) -> None:
    names = [f"transformer.h.{number}" for number in range(NUM_LAYERS)]
    for model, is_refused in ((gathering(), False), (gathering(PassingOn()), True)):
        hooks = CollectingHooks(model, names)
        options = {"output_hidden_states": True, "return_dict": return_dict}
        if is_refused:
            with pytest.raises(ModelError, match="FalconModel gathers the hidden states"):
                model(TOKENS, **options)
        else:
            model(TOKENS, **options)
        model(TOKENS)
        hooks.remove()
        model(TOKENS, **options)


SWIN: dict[str, Any] = {"image_size": 8, "patch_size": 2, "embed_dim": 8, "window_size": 2}


def swin() -> hf.SwinModel:
    torch.manual_seed(0)
    return hf.SwinModel(hf.SwinConfig(**SWIN, depths=[2], num_heads=[2]))


def test_only_a_layer_that_collects_its_input_makes_it_the_first() -> None:
    hidden = torch.ones(2, 3, 16)
    llama = tiny_llama(2)
    install_hooks(llama, NAMES[:2])
    model = swin()
    # The blocks of a stage collect nothing; the stage around them collects.
    blocks = [f"encoder.layers.0.blocks.{number}" for number in range(2)]
    install_hooks(model, blocks)
    assert SilencedHooks(llama.model.layers[0]).first_collected(hidden) is hidden
    assert SilencedHooks(model.get_submodule(blocks[0])).first_collected(hidden) is None
    assert SilencedHooks(nn.Linear(2, 2)).first_collected(hidden) is None


@pytest.mark.follows(
    "call the model without output_hidden_states, or keep the layer with the coord"
)
def test_hidden_states_inside_of_a_layer_are_refused() -> None:
    model = swin()
    install_hooks(model, ["encoder.layers.0"])
    around = nn.Sequential(model.encoder.layers[0])
    with pytest.raises(ModelError, match="inside of a layer cannot be collected from workers"):
        SilencedHooks(around).first_collected(torch.ones(2, 3, 16))


def test_a_model_inside_that_has_its_hooks_already_gets_no_second_set() -> None:
    backbone = hf.SwinBackbone(hf.SwinConfig(**SWIN, depths=[2], num_heads=[2]))
    count = num_hooks(backbone)
    model = tiny_llama(2)
    model.model.add_module("backbone", backbone)
    install_hooks(model, NAMES[:2])
    assert count > 0
    assert num_hooks(backbone) == count
    assert num_hooks(model) == count + 2 * 2


def test_a_tensor_that_hooks_collect_twice_is_not_one_that_a_model_gathers() -> None:
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if name != "num_attention_heads"}
    config = hf.JetMoeConfig(**sizes, num_local_experts=4, kv_channels=8, output_router_logits=True)
    model = hf.JetMoeForCausalLM(config)
    hooks = CollectingHooks(model, NAMES)
    with torch.no_grad():
        # Each router, and the attention around one of them.
        first, second, *_ = model(TOKENS).router_logits
    hooks.remove()
    assert first is second
