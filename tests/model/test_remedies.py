"""What sentences on models say to do is right.

Each case does what is refused, with the words of its mark, and then what the words say. Where a
model is the result, it computes the bits of the model whose layers are all here.
"""

from __future__ import annotations

import copy
import functools
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_modules
from torch.nn.utils import parametrizations
from transformers import (
    BitsAndBytesConfig,
    DynamicCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama import modeling_llama

from lightning_hetero import from_pretrained
from lightning_hetero.model import attribute_values as values
from lightning_hetero.model import custom_layers
from lightning_hetero.model.adapters import describe_adapters
from lightning_hetero.model.allowed_imports import Allowed, ImportPath, path_of
from lightning_hetero.model.attributes import Change, write_change
from lightning_hetero.model.checkpoint_reader import Checkpoint, find_files
from lightning_hetero.model.custom_layers import describe_blocks
from lightning_hetero.model.four_bit import described_linear
from lightning_hetero.model.half_layers import cut_layers
from lightning_hetero.model.layer_call import LayerCall, ResultForm, tensors_of
from lightning_hetero.model.layer_code import check_code
from lightning_hetero.model.layers import (
    DecoderLayer,
    EmbeddingOptions,
    check_layers_stand_alone,
    check_token_ids,
    find_decoder_layers,
    find_embedding,
)
from lightning_hetero.model.recipe import Recipe, build_layers, write_recipe
from lightning_hetero.model.shared_parts import SharedParts
from lightning_hetero.model.tensors import check_can_be_emptied

from .. import own_layers
from ..families import tiny_model
from ..models import tiny_llama
from ..own_layers import WIDTH, squared_relu
from ..remedies import Act, come_and_follow, follows
from .hollow_model import AWAY, Hollowed, tokens

OWN = Allowed(("tests.own_layers", "tests.loose_layers"))
NF4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
)


def both(*acts: Act) -> Act:
    """What does one thing after the other."""

    def act(folder: Path) -> None:
        for each in acts:
            each(*([folder] if each.__code__.co_argcount else []))

    return act


# Recipes, as they come to a worker.


@functools.cache
def honest_text(is_adapted: bool = False) -> str:
    model: nn.Module = tiny_llama(2)
    model = get_peft_model(model, lora()) if is_adapted else model
    return write_recipe(model, list(enumerate(find_decoder_layers(model)))).to_json()


def recipe(is_adapted: bool = False, **changes: Any) -> Act:
    """What builds a Llama's layers of a recipe with other entries."""
    text = json.dumps({**json.loads(honest_text(is_adapted)), **changes})
    return lambda: build_layers(Recipe.from_json(text), OWN)


def config(**entries: Any) -> Act:
    return recipe(config={**json.loads(honest_text())["config"], **entries})


def adapter(**options: Any) -> Act:
    plain = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], **options}
    return recipe(True, adapters={"configs": {"default": plain}, "active": ["default"]})


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **options})


def with_adapters(change: Callable[[Any], object] = id) -> Act:
    """What describes two adapters, after a change of the model."""

    def act() -> None:
        model = get_peft_model(tiny_model("qwen2"), lora())
        model.add_adapter("second", lora())
        change(model)
        inner = model.base_model.model
        assert describe_adapters(inner, list(inner.model.layers)) is not None

    return act


def of_first_layer(model: Any) -> None:
    model.base_model.model.model.layers[0].self_attn.q_proj.set_adapter("second")


RECIPES = [
    follows(
        "build the model with as many layers as it needs",
        adapter(layer_replication=[[0, 1]]),
        both(adapter(), config(num_hidden_layers=3)),
    ),
    follows(
        "which workers do not run; write the names out",
        adapter(target_modules="(q|k)_proj"),
        adapter(target_modules=["q_proj", "k_proj"]),
    ),
    follows(
        "cannot inject the adapter … here: …. Install the coordinator's version on this worker.",
        adapter(option_of_a_later_version=True),
        adapter(),
    ),
    follows(
        "call `set_adapter` on the model, which switches all of them",
        with_adapters(of_first_layer),
        with_adapters(lambda model: (of_first_layer(model), model.set_adapter("second"))),
    ),
    follows(
        "has no model class …; install the coordinator's version on this worker",
        recipe(model_class="Llama99ForCausalLM"),
        recipe(),
    ),
    follows(
        "install the coordinator's versions of torch and transformers on this worker",
        config(hidden_act="an_activation_of_a_later_version"),
        config(hidden_act="gelu"),
    ),
    follows(
        "install the coordinator's version of transformers on this worker.",
        config(initializer_range="small"),
        recipe(),
    ),
    follows(
        "is no decoder, so workers do not build it; cut the decoder inside it, or keep its layers",
        recipe(model_class="ViTModel"),
        recipe(),
    ),
    follows(
        "by which code or another model could be downloaded; leave it out",
        config(auto_map={"AutoModel": "attacker/repo--model.Model"}),
        recipe(),
    ),
    follows(
        "which would hide an attribute of the class; rename it.",
        config(to_dict=1),
        config(to_my_dict=1),
    ),
    follows(
        "implementation … is not allowed on a worker; use one of …",
        recipe(attention="attacker/kernel"),
        recipe(attention="sdpa"),
    ),
]


# Layers of the user's own, described for a worker.


def described(*modules: nn.Module) -> Any:
    """The layers that a worker builds of their description."""
    layers = [DecoderLayer(f"blocks.{n}", module) for n, module in enumerate(modules)]
    return build_layers(Recipe.from_json(describe_blocks(layers_numbered(layers)).to_json()), OWN)


def layers_numbered(layers: list[DecoderLayer]) -> list[tuple[int, DecoderLayer]]:
    return [*enumerate(layers)]


def with_attribute(name: str, value: Any) -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2))
    setattr(made[0], name, value)
    return made


def run_once(layer: nn.Module) -> nn.Module:
    layer(torch.ones(2, 3))
    return layer


def in_json(node: dict[str, Any], **attributes: Any) -> Act:
    """What builds a linear layer whose description has these attributes."""
    plain = json.loads(describe_blocks([(0, DecoderLayer("b", nn.Linear(2, 2)))]).to_json())
    plain["modules"][-1]["attributes"] = {**plain["modules"][-1]["attributes"], **attributes}
    return lambda: build_layers(Recipe.from_json(json.dumps({**plain, **node})), OWN)


def value_of(value: Any) -> Act:
    """What reads a value as a worker does."""
    text = msgspec.json.encode(value)
    return lambda: values.read_value(msgspec.json.decode(text, type=values.Value), OWN)


def record(fields: dict[str, Any], **others: Any) -> Act:
    return value_of(values.ObjectRecord(ImportPath("tests.own_layers", "Settings"), fields, others))


class OtherParameter(nn.Parameter):
    """A parameter that computes in its own way."""


def with_parameter(kind: type[nn.Parameter]) -> nn.Module:
    made = nn.Linear(2, 2)
    made.weight = kind(torch.ones(2, 2))
    return made


def path(thing: Any) -> Act:
    return lambda: OWN.find(path_of(thing, "function"))


def imported(module: str, name: str, *packages: str) -> Act:
    return lambda: Allowed(packages).find(ImportPath(module, name), "function")


def local_function() -> Any:
    def local(hidden: Tensor) -> Tensor:
        return hidden

    return local


def unnamed() -> type:
    return type("Block", (nn.Module,), {"__module__": own_layers.__name__})


def few_characters(act: Act, most: int = 2000) -> Act:
    """What does a thing while a worker takes few characters."""

    def limited() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(custom_layers, "MOST_CHARACTERS", most)
            act()

    return limited


def linears(first: int, end: int) -> Act:
    layers = [DecoderLayer(f"b.{n}", nn.Linear(2, 2)) for n in range(first, end)]
    return lambda: describe_blocks([*enumerate(layers, first)]).to_json()


OWN_LAYERS = [
    follows(
        "characters, and a worker takes …; give them to more workers",
        few_characters(linears(0, 20)),
        both(few_characters(linears(0, 2)), few_characters(linears(2, 4))),
    ),
    follows(
        "which a worker cannot rebuild; remove the parametrization, or keep the layer",
        lambda: described(nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2)))),
        lambda: described(
            nn.Sequential(
                nn.utils.parametrize.remove_parametrizations(
                    parametrizations.weight_norm(nn.Linear(2, 2)), "weight"
                )
            )
        ),
    ),
    follows(
        "is lazy and has no shape yet; run one batch through the model before `fit`",
        lambda: described(nn.LazyLinear(2)),
        lambda: described(run_once(nn.LazyLinear(2))),
    ),
    follows(
        "and a worker builds ordinary parameters only; keep its layer",
        lambda: described(with_parameter(OtherParameter)),
        lambda: described(with_parameter(nn.Parameter)),
    ),
    follows(
        "which a worker refuses; rename it, or override the method in the class",
        lambda: described(with_attribute("forward", functional.relu)),
        lambda: (
            described(with_attribute("activation", functional.relu)),
            described(own_layers.Ramp()),
        ),
    ),
    follows(
        "which would hide a method or is no ordinary name; rename it",
        in_json({}, forward=1),
        in_json({}, factor=1),
    ),
    follows(
        "which would hide one of its class; rename it",
        record({"heads": 1, "factor": 0.5}, heads=1),
        record({"heads": 1, "factor": 0.5}, other_heads=1),
    ),
    follows(
        "on this worker has the fields … and the coordinator's has …; install the coordinator's",
        record({"heads": 1, "factor": 0.5, "later": 2}),
        record({"heads": 1, "factor": 0.5}),
    ),
    follows(
        "The … cannot be found under its own name; define it at the top level of a module",
        path(unnamed()),
        path(squared_relu),
    ),
    follows(
        "is defined inside a function; move it to the top level of a module",
        path(local_function()),
        path(squared_relu),
    ),
    follows(
        "is built in; call it in a function at the top level of a module, and use that",
        path(abs),
        path(squared_relu),
    ),
    follows(
        "not a function of torch that workers call; call it in a function at the top level of a "
        "module of your own",
        path(nn.modules.utils.consume_prefix_in_state_dict_if_present),
        path(squared_relu),
    ),
    follows(
        "outside of what this worker may import (allowed: …); if its code is to be trusted, start "
        "the worker with --allow …",
        imported("tests.own_layers", "squared_relu", "tests.loose_layers"),
        imported("tests.own_layers", "squared_relu", "tests"),
    ),
    follows(
        "move it into a package that can be imported on both machines, and start the worker with "
        "--allow and the package's name",
        imported("__main__", "squared_relu", "tests"),
        imported("tests.own_layers", "squared_relu", "tests"),
    ),
    follows(
        "on this worker defines no …; install the coordinator's version here",
        imported("tests.own_layers", "function_of_a_later_version", "tests"),
        imported("tests.own_layers", "squared_relu", "tests"),
    ),
    follows(
        "in the coordinator's version, or put its folder on PYTHONPATH",
        imported("no_such_package.blocks", "relu", "no_such_package"),
        imported("tests.own_layers", "squared_relu", "tests"),
    ),
    follows(
        "which cannot be rebuilt on a worker; …, or keep the layer with the coordinator",
        lambda: described(with_attribute("mask", [torch.ones(2)])),
        lambda: described(with_attribute("mask", [1.0, 1.0])),
    ),
    follows(
        "on the coordinator, so this worker would compute other numbers: it has what the text of "
        "the module says. Install the same version of that code on both. What a program sets after "
        "the import belongs into an attribute of the layers.",
        lambda: check_code({"a.SCALE": "= 2.0"}, {"a.SCALE": "= 1.0"}),
        lambda: check_code({"a.SCALE": "= 1.0"}, {"a.SCALE": "= 1.0"}),
    ),
]


# Layers that are chosen, cut and called.


class Towers(nn.Module):
    """Two lists of layers, and a table that no Hugging Face model declares."""

    def __init__(self, shares: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        if shares:
            self.blocks[3].weight = self.blocks[0].weight


def chosen(choice: Any) -> Act:
    return lambda: find_decoder_layers(Towers(), choice)


def apart(shares: bool, cut: int) -> Act:
    """What checks a plan that cuts the layers at a number."""

    def act() -> None:
        module = Towers(shares)
        layers = find_decoder_layers(module, "blocks")
        check_layers_stand_alone(module, [layers[:cut], layers[cut:]])

    return act


def halves(change: Callable[[Any], object], model: Any = tiny_llama) -> Act:
    """What cuts the layers of a model after a change of its second one."""

    def act() -> None:
        made = model(2)
        change(made.model.layers[1])
        assert len(cut_layers(find_decoder_layers(made))) == 4

    return act


def hook_and_remove(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda *_: None).remove()


def tensor_inside(layer: Any) -> None:
    layer.mlp.register_buffer("scale", torch.ones(1))


LINEAR = nn.Linear(2, 2)
ROW = torch.ones(1, 2)


def result(value: Any) -> Act:
    return lambda: ResultForm.of(value, LINEAR, 3)


def embedding_of(model: Any) -> Act:
    return lambda: find_embedding(model, find_decoder_layers(model))


def held_parameter(releases: bool) -> Act:
    """What empties a layer of which an old loss is held, or was."""

    def act() -> None:
        layer = nn.Linear(2, 2)
        losses = [layer(torch.ones(1, 2, requires_grad=True)).sum()]
        if releases:
            losses.clear()
        check_can_be_emptied({0: layer})

    return act


class Hidden(nn.Module):
    """Its list of layers has the name of a method."""

    def __init__(self, name: str) -> None:
        super().__init__()
        setattr(self, name, nn.ModuleList(nn.Linear(2, 2) for _ in range(2)))


LAYERS = [
    follows(
        "is hidden by the method `nn.Module.…` of torch. Rename the module.",
        lambda: find_decoder_layers(nn.Sequential(Hidden("double")), "0.double"),
        lambda: find_decoder_layers(nn.Sequential(Hidden("double_blocks")), "0.double_blocks"),
    ),
    follows(
        "return the layers in a list or a ModuleList, or several ModuleLists in a list",
        chosen(lambda module: 4),
        lambda: (
            chosen(lambda module: list(module.blocks))(),
            chosen(lambda module: module.blocks)(),
            chosen(lambda module: [module.blocks])(),
        ),
    ),
    follows(
        "give the dotted path of a ModuleList, a list of paths, or a function from the "
        "LightningModule to its layers",
        chosen(nn.ModuleList()),
        lambda: (
            chosen("blocks")(),
            chosen(["blocks"])(),
            chosen(lambda module: module.blocks)(),
        ),
    ),
    follows(
        "is no layer that is called with hidden states; name the ModuleList of the layers",
        chosen(["blocks", ""]),
        chosen(["blocks"]),
    ),
    follows(
        "and these would live on different workers; …, or keep them with the coordinator",
        apart(shares=True, cut=2),
        both(apart(shares=False, cut=2), apart(shares=True, cut=4)),
    ),
    follows(
        "Remove the hook, or leave out `cut_layers`.",
        halves(lambda layer: layer.register_forward_hook(lambda *_: None)),
        both(halves(hook_and_remove), lambda: find_decoder_layers(tiny_llama(2))),
    ),
    follows(
        "Switch it off, and write `recompute: true` into the plan.",
        halves(lambda layer: setattr(layer, "gradient_checkpointing", True)),
        halves(lambda layer: setattr(layer, "gradient_checkpointing", False)),
    ),
    follows(
        "a layer on a worker must return its hidden states, alone or in a tuple. Keep it with",
        result({"hidden": ROW}),
        both(result(ROW), result((ROW, None))),
    ),
    follows(
        "which cannot come back from a worker; return tensors, or keep the layer",
        result((ROW, 1.0)),
        result((ROW, torch.tensor(1.0))),
    ),
    follows(
        "Delete old losses and outputs of the model first.",
        held_parameter(releases=False),
        held_parameter(releases=True),
    ),
    follows(
        "check that the tokenizer belongs to the model",
        lambda: check_token_ids(nn.Embedding(5, 2), torch.tensor([[4, 5]])),
        lambda: check_token_ids(nn.Embedding(5, 2), torch.tensor([[4, 3]])),
    ),
    follows(
        "on this worker; install the coordinator's version of transformers",
        lambda: EmbeddingOptions.of(nn.Embedding(5, 2)).apply(LINEAR),
        lambda: EmbeddingOptions.of(nn.Embedding(5, 2)).apply(nn.Embedding(5, 2)),
    ),
]


# A model whose layers 1 to 3 are on workers.


def answers(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(tokens()).logits
    return logits


def equals(
    before: Callable[[Any], object] = id,
    during: Callable[[Any], object] = id,
    away: range = AWAY,
    ask: Callable[[Any], Tensor] = answers,
) -> Act:
    """What changes a model before and after its layers have left, and compares what it computes."""

    def act() -> None:
        plain, model = tiny_llama(5).eval(), tiny_llama(5).eval()
        before(plain), before(model)
        Hollowed(model, away=away)
        during(plain), during(model)
        assert torch.equal(ask(model), ask(plain))

    return act


LAST = range(3, 4)


def layer_of(model: Any) -> Any:
    """One that is on a worker, unless only the layer behind it is."""
    return model.model.layers[2]


def other_weight(model: Any) -> None:
    weight = layer_of(model).mlp.up_proj.weight
    layer_of(model).mlp.up_proj.weight = nn.Parameter(torch.ones(weight.shape))


def load_weight(model: Any) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    state = {**model.state_dict()}
    model.load_state_dict({**state, name: torch.ones(state[name].shape)})


def more_buffers(model: Any) -> None:
    layer_of(model).mlp.register_buffer("more", torch.ones(1))


def other_module(model: Any) -> None:
    layer_of(model).mlp.act_fn = nn.GELU()


def twice(module: Any, hidden: Tensor) -> Tensor:
    found: Tensor = 2 * module.down_proj(hidden[..., :1].expand(*hidden.shape[:-1], 24))
    return found


def other_method(*acts: Act) -> Act:
    """What sets a method of a class back afterwards."""

    def act() -> None:
        with pytest.MonkeyPatch.context() as patch:
            for each in acts:
                each(patch)

    return act


def set_method(patch: Any) -> None:
    patch.setattr(modeling_llama.LlamaMLP, "forward", twice)


def during_run(patch: Any) -> None:
    equals(during=lambda _: set_method(patch))()


def hook(model: Any) -> None:
    layer_of(model).mlp.register_forward_hook(lambda module, args, output: 2 * output)


def with_hook_of_all(act: Act) -> Act:
    def hooked() -> None:
        handle = torch_modules.register_module_forward_hook(lambda *_: None)
        try:
            act()
        finally:
            handle.remove()

    return hooked


def own_forward(model: Any) -> None:
    layer_of(model).mlp.forward = functools.partial(twice, layer_of(model).mlp)


def with_shared_weight(model: Any, by_class: bool = True) -> None:
    del by_class


def some_hidden_states(model: Any) -> Tensor:
    return torch.stack(model(tokens(), output_hidden_states=[1]).hidden_states)


def all_hidden_states(model: Any) -> Tensor:
    return torch.stack(model(tokens(), output_hidden_states=True).hidden_states)


def skip(model: Any) -> Tensor:
    """The last layer that is away is left out."""
    inner = model.model
    hidden = inner.embed_tokens(tokens())
    places = torch.arange(tokens().shape[1])[None]
    rotated = inner.rotary_emb(hidden, places)
    for number in (0, 1, 2, 4):
        hidden = inner.layers[number](hidden, position_embeddings=rotated)
    return torch.as_tensor(hidden[..., 0] + 0.0)


class Doubling(torch.overrides.TorchFunctionMode):
    """Doubles what a perceptron makes of its input."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        return 2 * found if function is functional.silu else found


def in_mode(model: Any) -> Tensor:
    with Doubling():
        return answers(model)


CONTENT = "model.layers.2.mlp.up_proj.weight"


def weight_of(model: Any) -> Any:
    return layer_of(model).mlp.up_proj.weight


def read_and_write() -> None:
    """By state dicts alone."""
    model = tiny_llama(5).eval()
    Hollowed(model)
    state = model.state_dict()
    assert float(state[CONTENT].clone().norm()) > 0
    model.load_state_dict({**state, CONTENT: 2 * state[CONTENT].clone()})
    plain = tiny_llama(5).eval()
    assert torch.equal(model.state_dict()[CONTENT].clone(), 2 * plain.state_dict()[CONTENT])


def hollowed(act: Callable[[Any], object]) -> Act:
    """What does a thing with the model while layers are away."""

    def run() -> None:
        model = tiny_llama(5).eval()
        Hollowed(model)
        act(model)

    return run


def around(act: Callable[[Any], object]) -> Act:
    """What does a thing before the layers leave, and when they are back."""

    def run() -> None:
        model = tiny_llama(5).eval()
        act(model)
        run = Hollowed(model)
        run.refill()
        act(model)

    return run


def call_with_weight_of_another(model: Any) -> Tensor:
    """Two layers, of which the second one gets a parameter of the first one."""
    inner = model.model
    hidden = inner.embed_tokens(tokens())
    rotated = inner.rotary_emb(hidden, torch.arange(tokens().shape[1])[None])
    hidden = inner.layers[1](hidden, position_embeddings=rotated)
    other = inner.layers[1].input_layernorm.weight
    found: Tensor = inner.layers[2](hidden, position_embeddings=rotated, other=other)
    return found


AWAY_FROM_HERE = [
    follows(
        "which computes with the old one. Set its content with `load_state_dict()`, or keep the "
        "layer with the coordinator.",
        equals(during=other_weight),
        both(equals(during=load_weight), equals(during=other_weight, away=LAST)),
    ),
    follows(
        "Register parameters and buffers before `fit`, or let the coordinator alone have the layer",
        equals(during=more_buffers),
        both(equals(before=more_buffers), equals(during=more_buffers, away=LAST)),
    ),
    follows(
        "which computes with the modules that it had before. Do it before `fit`, or let the",
        equals(during=other_module),
        both(equals(before=other_module), equals(during=other_module, away=LAST)),
    ),
    follows(
        "Replace it before `fit`, or let the coordinator alone have these layers.",
        other_method(during_run),
        other_method(set_method, lambda _: equals()()),
    ),
    follows(
        "has a hook, which would not fire on a worker. Remove the hook, or let the coordinator "
        "alone have the layer.",
        equals(before=hook),
        both(equals(), equals(before=hook, away=LAST)),
    ),
    follows(
        "(`torch.nn.modules.module.register_module_forward_hook` or one of its kind), which would "
        "not fire on a worker. Remove it, or register it on the modules that stay",
        with_hook_of_all(equals()),
        both(equals(), equals(before=lambda model: hook_and_remove(model.lm_head))),
    ),
    follows(
        "and a worker cannot rebuild it. Remove it, or keep the layer with the coordinator.",
        equals(before=own_forward),
        both(equals(), equals(before=own_forward, away=LAST)),
    ),
    follows(
        "and the content of that is not here. Keep both layers with the coordinator.",
        hollowed(call_with_weight_of_another),
        equals(ask=call_with_weight_of_another, away=LAST),
    ),
    follows(
        "call the model with output_hidden_states=True for all of them",
        equals(ask=some_hidden_states),
        equals(ask=all_hidden_states),
    ),
    follows(
        "Call the layers on workers one after the other, in their order, or",
        equals(ask=skip, away=range(1, 5)),
        equals(ask=skip, away=range(4, 5)),
    ),
    follows(
        "layers up to … live on workers and must all be called. Keep layers that the model may "
        "skip or calls alone with the coordinator.",
        hollowed(lambda model: (leave_early(model), answers(model))),
        equals(ask=lambda model: (leave_early(model), answers(model))[1], away=range(1, 3)),
    ),
    follows(
        "which sees and changes nothing of what the worker computes. If it changes numbers, leave "
        "it before the layers, or let the coordinator alone have them.",
        equals(ask=in_mode),
        both(equals(), equals(ask=in_mode, away=range(0))),
    ),
    follows(
        "read it with `state_dict()` and write it with `load_state_dict()`",
        hollowed(lambda model: float(weight_of(model).norm())),
        read_and_write,
    ),
    follows(
        "lives on a worker cannot be copied or pickled; do it before `fit` or after it, or use "
        "`module.state_dict()`",
        hollowed(lambda model: pickle.dumps(weight_of(model))),
        both(
            around(lambda model: pickle.dumps(weight_of(model))),
            hollowed(lambda model: pickle.dumps(model.state_dict()[CONTENT].clone())),
        ),
    ),
    follows(
        "cannot be cloned or logged; do it before `fit` or after it, use `module.state_dict()`",
        hollowed(lambda model: weight_of(model).clone()),
        both(
            around(lambda model: weight_of(model).clone()),
            hollowed(lambda model: model.state_dict()[CONTENT].clone()),
        ),
    ),
    follows(
        "so the module cannot be copied or pickled; do it before `fit` or after it, or use "
        "`module.state_dict()`",
        hollowed(copy.deepcopy),
        both(around(copy.deepcopy), hollowed(lambda model: copy.deepcopy(model.lm_head))),
    ),
    follows(
        "where it would not fire. Keep the layer with the coordinator.",
        hollowed(lambda model: weight_of(model).register_hook(lambda gradient: gradient)),
        equals(
            during=lambda model: weight_of(model).register_hook(lambda gradient: gradient),
            away=LAST,
        ),
    ),
    follows(
        "would put other parameters in the place of its own; call it without `assign`",
        hollowed(lambda model: model.load_state_dict(tiny_llama(5).state_dict(), assign=True)),
        equals(during=lambda model: model.load_state_dict(tiny_llama(5).state_dict())),
    ),
]


def leave_early(model: Any) -> None:
    """A forward that ends behind layer 2."""
    inner = model.model
    hidden = inner.embed_tokens(tokens())
    rotated = inner.rotary_emb(hidden, torch.arange(tokens().shape[1])[None])
    for number in (0, 1, 2):
        hidden = inner.layers[number](hidden, position_embeddings=rotated)


# Key-value caches of a model whose layers are away.

NEXT = torch.tensor([[5], [7]])


@torch.no_grad()
def decode(model: Any, cache: Any = None, **options: Any) -> Tensor:
    """Two steps with a cache."""
    first = model(tokens(), past_key_values=cache, use_cache=True)
    found: Tensor = model(NEXT, past_key_values=first.past_key_values, **options).logits
    return found


def filled(model: Any, **options: Any) -> Any:
    with torch.no_grad():
        return model(tokens(), **{"use_cache": True, **options}).past_key_values


@torch.no_grad()
def without_cache(model: Any) -> Tensor:
    found: Tensor = model(tokens(), use_cache=False).logits
    return found


def generates(**options: Any) -> Callable[[Any], Tensor]:
    """What generates three tokens of one sequence."""

    def generate(model: Any) -> Tensor:
        given = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, **options}
        found: Tensor = model.generate(tokens()[:1], **given)
        return found

    return generate


def forget_place(model: Any) -> None:
    del layer_of(model).self_attn.layer_idx


def go_on(model: Any, cache: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(NEXT, past_key_values=cache).logits
    return found


CACHES = [
    follows(
        "Generate with `use_cache=False`; a decoder alone may also keep the default cache, so "
        "leave out `cache_implementation`, or pass a `DynamicCache(config=model.config)`.",
        equals(ask=generates(cache_implementation="static")),
        both(
            equals(ask=generates(use_cache=False)),
            equals(ask=generates()),
            equals(ask=lambda model: decode(model, DynamicCache(config=model.config))),
        ),
    ),
    follows(
        "fill another one with the same tokens instead",
        hollowed(lambda model: copy.deepcopy(filled(model))),
        equals(ask=lambda model: go_on(model, filled(model))),
    ),
    follows(
        "A key-value cache on workers cannot be reset; begin with a new one",
        hollowed(lambda model: filled(model).reset()),
        equals(ask=lambda model: decode(model, DynamicCache(config=model.config))),
    ),
    follows(
        "generate without an assistant model and without `prompt_lookup_num_tokens`",
        equals(ask=generates(prompt_lookup_num_tokens=2)),
        equals(ask=generates()),
    ),
    follows(
        "cannot be kept on workers in this version; generate without an assistant model",
        lambda: record_past(),
        equals(ask=generates()),
    ),
    follows(
        "carries no gradients; call the model under `torch.no_grad()`, or without the cache",
        hollowed(lambda model: model(NEXT, past_key_values=filled(model))),
        both(equals(ask=lambda model: go_on(model, filled(model))), equals(ask=without_cache)),
    ),
    follows(
        "begin with an empty one, and tune with LoRA instead of prefixes",
        hollowed(lambda model: go_on(model, filled(tiny_llama(5)))),
        equals(ask=decode),
    ),
    follows(
        "where in a key-value cache it belongs (`layer_idx`); call the model with "
        "`use_cache=False`",
        equals(before=forget_place, ask=decode),
        equals(before=forget_place, ask=without_cache),
    ),
    follows(
        "because the call that made it did not ask for it; begin with a new one",
        lambda: go_on_after_run(use_cache=None),
        equals(ask=decode),
    ),
    follows(
        "in a run that has ended, before layers moved, or for another model; begin with a new one",
        lambda: go_on_after_run(use_cache=True),
        equals(ask=decode),
    ),
    follows(
        "did not ask for it or wanted gradients; pass `use_cache=True` to that call already, under "
        "`torch.no_grad()`",
        hollowed(lambda model: go_on(model, filled(model, use_cache=None))),
        equals(ask=lambda model: go_on(model, filled(model))),
    ),
    follows(
        "key-value caches at once, and a worker keeps one; call the model with `use_cache=False`",
        hollowed(lambda model: two_caches(model)),
        equals(ask=without_cache),
    ),
]


def record_past() -> None:
    model = tiny_model("gemma3").eval()
    Hollowed(model)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    go_on(model, cache)


def go_on_after_run(use_cache: bool | None) -> None:
    model = tiny_llama(5).eval()
    run = Hollowed(model)
    cache = filled(model, use_cache=use_cache)
    run.refill()
    go_on(model, cache)


def two_caches(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1](torch.ones(2, 1, 16), filled(model), filled(model))


# What else a layer is, or has.


def with_tied(model: Any) -> None:
    layer = layer_of(model)
    layer.post_attention_layernorm.weight = layer.input_layernorm.weight


def with_tensor(model: Any) -> None:
    layer_of(model).scale = nn.Parameter(torch.ones(1))


def with_idle_child(model: Any) -> None:
    layer_of(model).other_mlp = nn.Linear(2, 2)


def with_forward(model: Any) -> None:
    layer_of(model).forward = functools.partial(type(layer_of(model)).forward, layer_of(model))


def cut(change: Callable[[Any], object]) -> Act:
    """What cuts the layers of a model after a change of it."""

    def act() -> None:
        model = tiny_llama(3)
        change(model)
        cut_layers(find_decoder_layers(model))

    return act


class SavedHooks:
    """The answer within hooks for saved tensors, which double what a backward reads."""

    def __call__(self, model: Any) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: 2 * t):
            model.lm_head(torch.ones(1, 16))
            found: Tensor = model(tokens()).logits
        return found


def patched_main(act: Act) -> Act:
    """What does a thing as a notebook, which has no file."""

    def changed() -> None:
        main = sys.modules["__main__"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(main, "__spec__", None)
            patch.delattr(main, "__file__", raising=False)
            patch.setattr(main, "Block", InMain, raising=False)
            act()

    return changed


InMain = type("Block", (nn.Module,), {"__module__": "__main__"})


class Table(nn.Module):
    """Frozen, and read by several layers."""

    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.ones(3))


class Reading(nn.Module):
    """Reads the table."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table


def shared_table(change: Callable[[Table], object], *, before: bool) -> Act:
    """What changes a table that layers on workers share."""

    def act() -> None:
        table = Table()
        layers = nn.ModuleList([Reading(table), Reading(table)])
        root = nn.ModuleDict({"table": table, "layers": layers})
        if before:
            change(table)
        numbered = [{n: DecoderLayer(f"layers.{n}", layer)} for n, layer in enumerate(layers)]
        parts = SharedParts(root, numbered)
        if not before:
            change(table)
        parts.check()

    return act


def shared_weight(*, is_named: bool) -> Act:
    """What copies a frozen layer that others share, and that the module may have before them."""

    def act() -> None:
        table = nn.Linear(2, 2).requires_grad_(False)
        layers = nn.ModuleList([Reading(table), Reading(table)])
        root = nn.ModuleDict({"table": table, "layers": layers} if is_named else {"layers": layers})
        numbered = [{n: DecoderLayer(f"layers.{n}", layer)} for n, layer in enumerate(layers)]
        SharedParts(root, numbered).restore()

    return act


class Own4bit:
    """Makes a linear layer of a class of one's own, in 4 bits."""

    def __new__(cls) -> Any:
        library = pytest.importorskip("bitsandbytes").nn
        kind = type("Own4bit", (library.Linear4bit,), {})
        return kind(8, 8).to("cpu")


def closure(way: list[tuple[str, int]]) -> Act:
    path = ImportPath("tests.loose_layers", "scaled")
    return value_of(values.Closure(path, way, {"factor": 2.0, "shift": 0.0}))


def written(note: object) -> Act:
    """What sends a changed config of a layer."""
    here = tiny_llama(1).model.layers[0].self_attn
    here.config.note = note
    return lambda: write_change(Change(0, "", here, ("config",)), "blocks.0")


def changed_name(name: str) -> Act:
    here: Any = nn.Linear(2, 2)
    vars(here)[name] = 1
    return lambda: write_change(Change(0, "", here, (name,)), "blocks.0")


def called(result: Any) -> Act:
    """What a worker's layer returns where the model expects a tensor."""
    return lambda: tensors_of(result, LINEAR, LayerCall(7, False, (), {}))


REST = [
    follows(
        "The attention of … shares a tensor with what follows it. Leave out `cut_layers`.",
        cut(with_tied),
        equals(before=with_tied),
    ),
    follows(
        "which belongs to neither half. Leave out `cut_layers`.",
        cut(with_tensor),
        equals(before=with_tensor),
    ),
    follows(
        "cannot be cut behind its attention: two halves in a row would not compute the same as the "
        "layer, or this cannot be checked. Leave out `cut_layers`.",
        cut(with_idle_child),
        equals(before=with_idle_child),
    ),
    follows(
        "Leave out `cut_layers`, or build the module anew and continue with `ckpt_path`.",
        cut(with_forward),
        both(equals(before=with_forward, away=LAST), cut(id)),
    ),
    follows(
        "`cut_layers` can only cut those. Put two modules in its place in the list of layers.",
        lambda: cut_layers([DecoderLayer("blocks.0", own_layers.Ramp())]),
        lambda: described(nn.LayerNorm(WIDTH), own_layers.Ramp()),
    ),
    follows(
        "If they change numbers, leave them before the layers, or let the coordinator alone have",
        equals(ask=SavedHooks()),
        both(equals(), equals(ask=SavedHooks(), away=range(0))),
    ),
    follows(
        "which a worker cannot import; move it into a module (a .py file) and import it from there",
        patched_main(path(InMain)),
        patched_main(path(squared_relu)),
    ),
    follows(
        "makes no function … of the variables …; install the coordinator's version here",
        closure([("of_a_later_version", 0)]),
        closure([("run", 0)]),
    ),
    follows(
        "and cannot be sent: …. Keep the layer with the coordinator.",
        written(object()),
        written("text"),
    ),
    follows(
        "which must not set it: …. Change it before `fit`, or keep the layer with the coordinator.",
        changed_name("training"),
        changed_name("factor"),
    ),
    follows(
        "and the model was given … in its place. Keep the layer with the coordinator.",
        called((ROW,)),
        called(ROW),
    ),
    follows(
        "Change it before `fit`, or keep the layers that share it with the coordinator.",
        shared_table(lambda table: table.rows.add_(1), before=False),
        shared_table(lambda table: table.rows.add_(1), before=True),
    ),
    follows(
        "Assign its module to the LightningModule too, before the layers, so that the order of",
        shared_weight(is_named=False),
        shared_weight(is_named=True),
    ),
    follows(
        "which a worker cannot rebuild in 4 bits; use bitsandbytes' Linear4bit itself, or keep",
        lambda: described_linear(Own4bit(), "x"),
        lambda: described_linear(
            pytest.importorskip("bitsandbytes").nn.Linear4bit(8, 8).to("cpu"), "x"
        ),
    ),
    follows(
        "is not the same on this worker and on the coordinator, so this worker would compute other "
        "numbers. Install the same version of that code on both.",
        lambda: check_code({"own.scaled": "1"}, {"own.scaled": "2"}),
        lambda: check_code({"own.scaled": "1"}, {"own.scaled": "1"}),
    ),
]


# Models that stay on disk.


def saved(folder: Path, family: str = "llama", **config: Any) -> Path:
    """The family's model on disk, its config with other entries."""
    tiny_model(family).save_pretrained(folder / "model")
    file = folder / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return folder / "model"


def loads(*, family: str = "llama", stored: dict[str, Any] | None = None, **options: Any) -> Act:
    """What opens a saved model."""

    def act(folder: Path) -> None:
        from_pretrained(saved(folder, family, **(stored or {})), **options)

    return act


def loads_whole(folder: Path) -> None:
    transformers.AutoModelForCausalLM.from_pretrained(saved(folder))


def pickled(folder: Path) -> None:
    source = saved(folder)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    from_pretrained(source)


def empty(folder: Path) -> None:
    source = saved(folder)
    (source / "model.safetensors").unlink()
    from_pretrained(source)


def opened(name: str) -> Act:
    def act(folder: Path) -> None:
        model = tiny_model("llama")
        model.save_pretrained(folder)
        with torch.device("meta"):
            Checkpoint.open(folder, type(model)(model.config)).read(name)

    return act


def with_index(text: str, *, is_whole: bool = False) -> Act:
    """What opens a folder with this index of files."""

    def act(folder: Path) -> None:
        source = saved(folder)
        if not is_whole:
            (source / "model.safetensors").unlink()
        (source / "model.safetensors.index.json").write_text(text)
        from_pretrained(source)

    return act


ON_DISK = [
    follows(
        "and they differ on disk; build the model with `tie_word_embeddings=False`",
        loads(stored={"tie_word_embeddings": True}),
        loads(stored={"tie_word_embeddings": False}),
    ),
    follows(
        "or run `hf download …` on a machine with a network, copy the files here and name their "
        "folder",
        lambda: find_files("someone/nothing", {"local_files_only": True}),
        lambda folder: find_files(saved(folder), {}),
    ),
    follows(
        "There is no folder …; name one, or a model on the hub.",
        lambda folder: Checkpoint.open(folder / "lost", tiny_model("llama")),
        opened("lm_head.weight"),
    ),
    follows(
        "gives no config of a model: …. Name a folder that `save_pretrained` wrote",
        lambda folder: from_pretrained(folder),
        loads(),
    ),
    follows(
        "name the folder that `save_pretrained` wrote.",
        empty,
        loads(),
    ),
    follows(
        "load it once with transformers and save it with "
        "`save_pretrained(..., safe_serialization=True)`",
        pickled,
        loads(),
    ),
    follows(
        "is not the index of a checkpoint: …. Download it again.",
        with_index("{}"),
        loads(),
    ),
    follows(
        "has all of its files beside the index; download it from a source that you trust",
        with_index('{"weight_map": {"a": "../x.safetensors"}}'),
        loads(),
    ),
    follows(
        "Check that the config belongs to these weights, and that they were saved from a model of",
        loads(stored={"num_hidden_layers": 9}),
        loads(),
    ),
    follows(
        "made of … tensors on disk, …; check that the config belongs to these weights and that",
        loads(stored={"hidden_size": 32}),
        loads(),
    ),
    follows(
        "give a type of torch such as torch.bfloat16, or leave it out",
        loads(dtype="bf16"),
        both(loads(dtype=torch.bfloat16), loads()),
    ),
    follows(
        "and workers can only hold the 4 bits of bitsandbytes; give "
        "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4')",
        loads(quantization_config="nf4"),
        loads(quantization_config=NF4),
    ),
    follows(
        "is quantised already, as its config says; leave `quantization_config` out",
        loads(stored={"quantization_config": NF4.to_dict()}, quantization_config=NF4),
        loads(quantization_config=NF4),
    ),
    follows(
        "use the checkpoint before its quantisation, with quantization_config="
        "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4')",
        loads(stored={"quantization_config": {"quant_method": "gptq", "bits": 4}}),
        loads(quantization_config=NF4),
    ),
    follows(
        "Workers can hold 4 bits, not 8; set `load_in_4bit=True`.",
        loads(quantization_config=BitsAndBytesConfig(load_in_8bit=True)),
        loads(quantization_config=BitsAndBytesConfig(load_in_4bit=True)),
    ),
    follows(
        "and only those can stay on disk. Load other models with transformers.",
        lambda folder: of_t5(folder, from_pretrained),
        lambda folder: of_t5(folder, T5ForConditionalGeneration.from_pretrained),
    ),
    follows(
        "give one of peft's configs, such as peft.LoraConfig(r=16, task_type='CAUSAL_LM')",
        loads(peft_config={"r": 16}),
        loads(peft_config=lora(r=16, task_type="CAUSAL_LM")),
    ),
    follows(
        "load the model with AutoModelForCausalLM.from_pretrained and peft.get_peft_model",
        loads(peft_config=lora(use_dora=True)),
        lambda folder: get_peft_model(
            transformers.AutoModelForCausalLM.from_pretrained(saved(folder)), lora(use_dora=True)
        ),
    ),
    follows(
        "is still in the checkpoint; run the model with a Trainer whose strategy is "
        "HeteroPipelineStrategy, or load it with AutoModelForCausalLM.from_pretrained",
        lambda folder: answers(from_pretrained(saved(folder))),
        lambda folder: answers(transformers.AutoModelForCausalLM.from_pretrained(saved(folder))),
    ),
    follows(
        "or load the model with AutoModelForCausalLM.from_pretrained.",
        lambda folder: from_pretrained(saved(folder)).load_state_dict(
            tiny_model("llama").state_dict()
        ),
        lambda folder: transformers.AutoModelForCausalLM.from_pretrained(
            saved(folder)
        ).load_state_dict(tiny_model("llama").state_dict()),
    ),
]


def of_t5(folder: Path, load: Callable[[Any], object]) -> None:
    sizes: dict[str, Any] = {"d_model": 8, "d_kv": 4, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(**sizes, d_ff=8, vocab_size=9)).save_pretrained(folder)
    load(folder)


@pytest.mark.parametrize(
    ("wrong", "right"), [*RECIPES, *OWN_LAYERS, *LAYERS, *AWAY_FROM_HERE, *CACHES, *REST, *ON_DISK]
)
def test_the_words_are_said_and_what_they_say_is_right(
    wrong: Act, right: Act, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    come_and_follow(request, wrong, right, tmp_path)
