"""Recipes from a peer that means harm are refused in one sentence, without any connection."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from functools import cache
from queue import SimpleQueue
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled
from torch import nn
from torch.nn.modules import module as torch_modules
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lightning_hetero.errors import ModelError
from lightning_hetero.model import recipe as recipes
from lightning_hetero.model.allowed_imports import path_of
from lightning_hetero.model.custom_layers import describe_blocks
from lightning_hetero.model.hf_config import hubs_shut_off
from lightning_hetero.model.layers import DecoderLayer, find_decoder_layers
from lightning_hetero.model.recipe import Recipe, build_layers, write_recipe
from lightning_hetero.pipeline.stage_layers import describe_parameters, numbered_layers
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import Frame
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.handshake import dial

from ..families import CONFIGS, tiny_model
from ..models import tiny_llama
from ..transport.pairs import PATIENCE_SECONDS, QUICK, worker_thread

HUB = "attacker/repo"
KERNEL = "attacker/kernel"


@cache
def honest_text() -> str:
    model = tiny_llama(2)
    return write_recipe(model, list(enumerate(find_decoder_layers(model)))).to_json()


def honest() -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(honest_text())
    return plain


def changed(**changes: Any) -> str:
    return json.dumps({**honest(), **changes})


def llama(**entries: Any) -> str:
    """A Llama whose config has these entries."""
    plain = honest()
    return json.dumps({**plain, "config": {**plain["config"], **entries}})


def model(name: str, **entries: Any) -> str:
    """A model of that class; the number of its layers is where a worker looks for it."""
    return changed(model_class=name, config={"num_hidden_layers": 1, **entries})


def nested(entries: dict[str, Any], depth: int) -> dict[str, Any]:
    for _ in range(depth):
        entries = {"inner": entries}
    return entries


def block(layer: nn.Module, **attributes: Any) -> str:
    """A described layer whose outermost module has these attributes, as they are on the wire."""
    plain = json.loads(describe_blocks([(0, DecoderLayer("layer", layer))]).to_json())
    node = plain["modules"][-1]
    node["attributes"] = {**node.get("attributes", {}), **attributes}
    return json.dumps(plain)


def function(module: str, qualname: str) -> dict[str, Any]:
    return {"type": "function", "path": {"module": module, "qualname": qualname}}


def config(name: str, attention: str = "eager", **content: Any) -> dict[str, Any]:
    module = f"transformers.models.{name.lower()}.configuration_{name.lower()}"
    path = {"module": module, "qualname": f"{name}Config"}
    return {"type": "config", "path": path, "content": content, "attention": attention}


def adapter(**options: Any) -> str:
    plain = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], **options}
    adapters = {"configs": {"default": plain}, "active": ["default"]}
    return changed(adapters=adapters)


def four_bit(path: str, **options: Any) -> str:
    plain = {"shape": [16, 16], "quant_type": "nf4", "compress_statistics": True, **options}
    return changed(four_bit={path: plain})


GATE = "model.layers.0.mlp.gate_proj"
HOOK = function("torch.nn.modules.module", "register_module_forward_pre_hook")
VISION = {"model_type": "detr", "backbone": HUB, "use_timm_backbone": False}

HOSTILE: dict[str, tuple[str, str]] = {
    # Models of several models, whose parts are of any class.
    "rag": (
        model("RagModel", generator={"model_type": "bart", "attn_implementation": KERNEL}),
        "RagModel is no decoder",
    ),
    "llava": (model("LlavaForConditionalGeneration", vision_config=VISION), "is no decoder"),
    "encoder and decoder": (
        model("EncoderDecoderModel", encoder=VISION, decoder=VISION),
        "is no decoder",
    ),
    "vision and text": (
        model("VisionEncoderDecoderModel", encoder=VISION, decoder={"model_type": "gpt2"}),
        "is no decoder",
    ),
    "speech and text": (
        model("SpeechEncoderDecoderModel", encoder={"model_type": "wav2vec2"}, decoder=VISION),
        "is no decoder",
    ),
    "timm by its own name": (
        model("Gemma3nForConditionalGeneration", vision_config={"architecture": f"hf-hub:{HUB}"}),
        "is no decoder",
    ),
    "a timm model": (model("TimmWrapperModel", architecture=f"hf-hub:{HUB}"), "is no decoder"),
    "a timm backbone": (model("TimmBackbone", backbone=HUB), "no decoder|no model class"),
    "a detector": (model("DetrForObjectDetection", backbone=HUB), "is no decoder"),
    "a detector by default": (model("DetrForObjectDetection"), "is no decoder"),
    "depth": (model("DPTForDepthEstimation", backbone=HUB), "is no decoder"),
    "music": (model("MusicgenForConditionalGeneration", text_encoder=VISION), "is no decoder"),
    "a pretrained class without a config": (model("PreTrainedModel"), "is no decoder"),
    "speech inside a decoder": (
        model("MoshiForConditionalGeneration", audio_encoder_config=VISION),
        "entry 'backbone' with the value 'attacker/repo'",
    ),
    "a detector inside a decoder": (
        model("MoshiForConditionalGeneration", audio_encoder_config={"model_type": "detr"}),
        "cannot be (made|built)",
    ),
    "a pipeline": (changed(model_class="pipeline"), "no model class 'pipeline'"),
    "an automatic class": (changed(model_class="AutoModel"), "no model class"),
    "a dotted class": (changed(model_class="models.llama.LlamaModel"), "no model class"),
    "a dunder class": (changed(model_class="__loader__"), "no model class"),
    # Kernels and code by name.
    "attention": (changed(attention=KERNEL), "attention implementation 'attacker/kernel'"),
    "paged attention": (changed(attention=f"paged|{KERNEL}"), "is not allowed on a worker"),
    "experts": (changed(experts=KERNEL), "experts implementation 'attacker/kernel'"),
    "attention in the config": (llama(attn_implementation=KERNEL), "'attn_implementation'"),
    "attention behind the config": (
        llama(_attn_implementation_internal=KERNEL),
        "'_attn_implementation_internal'",
    ),
    "attention of parts": (llama(attn_implementation={"": KERNEL}), "'attn_implementation'"),
    "attention of a part": (
        llama(text_config={"_attn_implementation": KERNEL}),
        "'_attn_implementation'",
    ),
    "experts of a part": (
        llama(sub={"sub": {"_experts_implementation": KERNEL}}),
        "'_experts_implementation'",
    ),
    "attention in a list": (
        llama(parts=[{"a": 1}, {"b": [{"attn_implementation": KERNEL}]}]),
        "'attn_implementation'",
    ),
    "attention of one layer": (
        llama(per_layer_config={"0": {"_attn_implementation": KERNEL}}),
        "'_attn_implementation'",
    ),
    "a backbone in a list": (llama(encoders=[{"backbone": HUB}]), "'backbone'"),
    "a config of a backbone": (llama(backbone_config=VISION), "'backbone_config'"),
    "timm": (llama(use_timm_backbone=True), "'use_timm_backbone'"),
    "remote code": (llama(auto_map={"AutoModel": f"{HUB}--modeling.Own"}), "'auto_map'"),
    "remote code of a part": (llama(sub={"auto_map": {"AutoConfig": HUB}}), "'auto_map'"),
    "trust": (llama(trust_remote_code=True), "'trust_remote_code'"),
    "another model": (llama(_name_or_path=HUB), "'_name_or_path'"),
    "another model in a part": (llama(decoder={"name_or_path": HUB}), "'name_or_path'"),
    "quantisation": (
        llama(quantization_config={"quant_method": "gptq", "dataset": HUB}),
        "'quantization_config'",
    ),
    "an activation": (llama(hidden_act=KERNEL), "LlamaForCausalLM cannot be built"),
    "a dtype": (llama(dtype="hub"), "cannot be (made|built)"),
    # Attributes of config classes.
    "another map of attributes": (
        llama(attribute_map={"num_hidden_layers": "size"}, size=10**9),
        "entry 'attribute_map'",
    ),
    "another list of parts": (llama(sub_configs={"x": 1}), "entry 'sub_configs'"),
    "a method of a config": (llama(get_text_config=1), "entry 'get_text_config'"),
    "a class of a config": (llama(__class__="x"), "entry '__class__'"),
    "a dunder of a part": (llama(text_config={"__dict__": {}}), "entry '__dict__'"),
    "a config without an end": (llama(a=nested({}, 100)), "nested deeper than 32"),
    "a list without an end": (llama(a=json.loads("[" * 60 + "]" * 60)), "nested deeper than 32"),
    # Counts.
    "many layers": (llama(num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    "layers below zero": (llama(num_hidden_layers=-4), "num_hidden_layers is -4"),
    "layers that are no number": (
        llama(num_hidden_layers={"__float__": "NaN"}),
        "num_hidden_layers is {'__float__': 'NaN'}",
    ),
    "a bare NaN": (llama(num_hidden_layers=float("nan")), "recipe cannot be read"),
    "heads below zero": (llama(num_attention_heads=-2), "num_attention_heads is -2"),
    "heads that are no number": (
        llama(num_attention_heads={"__float__": "NaN"}),
        "num_attention_heads is",
    ),
    "half a head": (llama(num_attention_heads=2.5), "num_attention_heads is 2.5"),
    "no heads": (llama(num_attention_heads=0), "cannot be (made|built)"),
    "many labels": (llama(num_labels=10**9), "num_labels is 1000000000"),
    "many experts by another name": (llama(n_routed_experts=10**9), "n_routed_experts is"),
    "experts in a part": (llama(ffn_config={"moe_num_experts": 10**7}), "moe_num_experts is"),
    "counts in a list": (llama(decoder_layers=[1, 10**9]), "decoder_layers is"),
    "experts in all layers": (
        model("JetMoeForCausalLM", num_hidden_layers=1024, num_local_experts=8192),
        "1024 layers of 8192 experts; at most 1048576",
    ),
    # Described layers.
    "a global hook": (
        block(nn.BatchNorm1d(4), _check_input_dim=HOOK),
        "not a function of torch that workers call|hide a method",
    ),
    "a global hook under a free name": (block(nn.Linear(2, 2), extra=HOOK), "not a function of to"),
    "a method of every module": (
        block(nn.Linear(2, 2), extra=function("torch.nn.modules.module", "Module.compile")),
        "torch.nn.modules.module.Module.compile is not a function of torch",
    ),
    "a method of a layer": (
        block(nn.Conv1d(2, 2, 1), _conv_forward=function("torch.nn.functional", "relu")),
        "gives a torch.nn.modules.conv.Conv1d the attribute '_conv_forward'",
    ),
    "a number for a method": (block(nn.Conv1d(2, 2, 1), _conv_forward=3), "'_conv_forward'"),
    "the shell": (block(nn.Linear(2, 2), extra=function("os", "system")), "os.system is outside"),
    "a file": (block(nn.Linear(2, 2), extra=function("torch", "load")), "torch.load is not a func"),
    "the hub of torch": (
        block(nn.Linear(2, 2), extra=function("torch.hub", "load")),
        "torch.hub.load is outside",
    ),
    "a class in a class": (
        block(nn.Linear(2, 2), extra=function("torch.nn.functional", "relu.__globals__")),
        "is not a function of torch",
    ),
    "a dunder attribute": (block(nn.Linear(2, 2), __class__="x"), "attribute '__class__'"),
    "a forward": (
        block(nn.Linear(2, 2), forward=function("torch.nn.functional", "relu")),
        "attribute 'forward'",
    ),
    "a config with a backbone": (
        block(nn.Linear(2, 2), config=config("Detr", backbone=HUB)),
        "entry 'backbone'",
    ),
    "a config in a list": (
        block(
            nn.Linear(2, 2),
            configs={
                "type": "items",
                "container": "list",
                "items": [config("Rag", generator={"model_type": "bart", "auto_map": {"A": HUB}})],
            },
        ),
        "entry 'auto_map'",
    ),
    "a config with a kernel": (
        block(nn.Linear(2, 2), config=config("Llama", attention=KERNEL)),
        "attention implementation 'attacker/kernel'",
    ),
    "a config of other code": (
        block(
            nn.Linear(2, 2),
            config={**config("Llama"), "path": {"module": "evil.code", "qualname": "LlamaConfig"}},
        ),
        "evil.code.LlamaConfig is outside",
    ),
    # Adapters and tensors in 4 bits.
    "an adapter of the hub": (adapter(peft_type=HUB), "kind 'attacker/repo' cannot live"),
    "an adapter that downloads": (adapter(peft_type="ADAPTION_PROMPT"), "cannot live on workers"),
    "an adapter with a new option": (adapter(repo_id=HUB), "does not know the option 'repo_id'"),
    "an adapter on modules of the hub": (adapter(target_modules=[HUB]), "cannot inject"),
    "an adapter with a pattern": (adapter(target_modules=f"{HUB}.*(a+)+$"), "regular expression"),
    "a rank below zero": (adapter(r=-4), "cannot inject"),
    "4 bits of the hub": (four_bit(HUB), "no 'attacker/repo' to be stored in 4 bits"),
    "4 bits of an attribute": (four_bit("config"), "no 'config' to be stored"),
    "4 bits of a dunder": (four_bit("model.__class__"), "no 'model.__class__' to be stored"),
    "4 bits by the hub": (four_bit(GATE, quant_type=HUB), "recipe cannot be read"),
    "4 bits below zero": (four_bit(GATE, shape=[-16, 16]), "impossible shape"),
    "4 bits of too much": (four_bit(GATE, shape=[2**40, 2**40]), "impossible shape"),
}
IGNORED = {
    "an adapter's model": adapter(base_model_name_or_path=HUB, revision="main"),
    "an adapter's code": adapter(megatron_core=HUB, runtime_config={"x": HUB}),
    "an adapter's first weights": adapter(init_lora_weights="pissa", loftq_config={"a": HUB}),
    "an empty entry": llama(backbone=None, auto_map={}, trust_remote_code=False),
}


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every name that is looked up and every connection that is tried; none succeeds."""
    found: list[Any] = []

    def refuse(*about: Any, **_more: Any) -> None:
        found.append(about)
        raise OSError("There is no network in this test.")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return found


def honest_shapes() -> dict[str, torch.Size]:
    built = build_layers(Recipe.from_json(honest_text()))
    return {name: tensor.shape for name, tensor in built.state_dict().items()}


@pytest.fixture(scope="module", autouse=True)
def shapes_before() -> dict[str, torch.Size]:
    """Of the honest recipe's tensors, before anything hostile was built in this process."""
    return honest_shapes()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_recipe_is_refused_without_a_connection(
    name: str, attempts: list[Any], shapes_before: dict[str, torch.Size]
) -> None:
    text, expected = HOSTILE[name]
    with pytest.raises(ModelError, match=expected) as refusal:
        build_layers(Recipe.from_json(text))
    said = str(refusal.value)
    assert said[0].isupper() or said.startswith(("transformers ", "torch.", "peft "))
    assert said.endswith(".")
    assert "\n" not in said
    assert not attempts
    assert not torch_modules._global_forward_pre_hooks
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    assert honest_shapes() == shapes_before


@pytest.mark.parametrize("name", IGNORED)
def test_a_name_that_nobody_reads_causes_no_connection(
    name: str, attempts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The recipe tells the code of a model without adapters.
    monkeypatch.setattr(recipes, "check_code", lambda *_: None)
    assert build_layers(Recipe.from_json(IGNORED[name]))
    assert not attempts


def test_there_are_many_of_them() -> None:
    assert len(HOSTILE) >= 50


@pytest.mark.parametrize("family", CONFIGS)
def test_no_ordinary_decoder_is_refused(family: str, attempts: list[Any]) -> None:
    model = tiny_model(family)
    numbered = list(enumerate(find_decoder_layers(model)))
    written = write_recipe(model, numbered)
    assert isinstance(written, Recipe)
    built = numbered_layers(build_layers(Recipe.from_json(written.to_json())))
    assert [type(layer) for layer in built.values()] == [type(each.module) for _, each in numbered]
    assert not attempts


def ask_the_hub(*_about: Any, **_more: Any) -> None:
    HfApi().model_info(HUB)


def test_the_hub_is_off_while_layers_are_built(
    attempts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose own code asks the hub, as some do for kernels."""
    text = changed()
    monkeypatch.setattr(LlamaDecoderLayer, "__init__", ask_the_hub)
    with pytest.raises(ModelError, match=r"cannot be built .*OfflineModeIsEnabled"):
        build_layers(Recipe.from_json(text))
    assert not attempts
    with pytest.raises(Exception, match="no network in this test"):
        ask_the_hub()
    assert attempts


def test_the_hub_is_off_while_a_config_is_made(
    attempts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = block(nn.Linear(2, 2), config=config("Llama"))
    monkeypatch.setattr(LlamaConfig, "from_dict", ask_the_hub)
    with pytest.raises(ModelError, match=r"LlamaConfig cannot be made .*OfflineModeIsEnabled"):
        build_layers(Recipe.from_json(text))
    assert not attempts


def test_the_hub_stays_off_until_the_last_block_ends(attempts: list[Any]) -> None:
    """Also if another thread builds layers at the same time."""
    inside, over = threading.Event(), threading.Event()

    def build() -> None:
        with hubs_shut_off():
            inside.set()
            over.wait(PATIENCE_SECONDS)

    other = threading.Thread(target=build)
    with hubs_shut_off():
        other.start()
        assert inside.wait(PATIENCE_SECONDS)
    with pytest.raises(OfflineModeIsEnabled):
        ask_the_hub()
    over.set()
    other.join(PATIENCE_SECONDS)
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    assert not attempts


def test_the_attention_is_set_in_every_part_of_a_config() -> None:
    """`RagConfig` declares no parts, so the setter of transformers does not reach them."""
    parts = {"question_encoder": {"model_type": "dpr"}, "generator": {"model_type": "bart"}}
    text = block(nn.Linear(2, 2), config=config("Rag", attention="sdpa", **parts))
    made: Any = build_layers(Recipe.from_json(text))["0"].config
    found = [made, made.question_encoder, made.generator]
    assert [each._attn_implementation for each in found] == ["sdpa"] * 3


def test_what_building_costs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the code of the model knows what its counts come to."""
    monkeypatch.setattr(recipes, "MOST_CALLS", 5000)
    bomb = changed(
        model_class="SwitchTransformersModel",
        attention="eager",
        config={"num_layers": 500, "num_sparse_encoder_layers": 500, "num_experts": 2000},
    )
    with pytest.raises(ModelError, match="more than 5000 calls of torch to build"):
        build_layers(Recipe.from_json(bomb))
    assert honest_shapes()


def test_a_function_of_a_layer_of_torch_is_refused_at_home_too() -> None:
    with pytest.raises(ModelError, match="is not a function of torch that workers call; call it"):
        path_of(torch_modules.register_module_forward_pre_hook, "function")
    layer = nn.Conv1d(2, 2, 1)
    vars(layer)["_conv_forward"] = nn.functional.relu
    with pytest.raises(ModelError, match=r"layer\._conv_forward stands in for Conv1d\."):
        describe_blocks([(0, DecoderLayer("layer", layer))])


def deploy(address: Address, recipe: str, parameters: list[m.ParameterSpec]) -> m.Message:
    """What a worker answers to a `Deploy`, in a session of its own."""
    channel, _ = dial(address, "coordinator", "session", QUICK, Identity())
    inbox: Any = SimpleQueue()
    channel.start(inbox)
    try:
        stage = m.StageSpec(1, recipe, parameters, recompute=False)
        channel.send(m.Deploy(1, [stage], [], seed=0))
        content = inbox.get(timeout=PATIENCE_SECONDS).content
        assert isinstance(content, Frame), content
        return content.message
    finally:
        channel.close(m.Goodbye())


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    with worker_thread() as found:
        yield found


@cache
def honest_parameters() -> list[m.ParameterSpec]:
    layers = build_layers(Recipe.from_json(honest_text()))
    return describe_parameters(numbered_layers(layers))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_session_after_a_hostile_recipe_works_as_before(name: str, address: Address) -> None:
    text, expected = HOSTILE[name]
    refusal = deploy(address, text, [])
    assert isinstance(refusal, m.Failure)
    with pytest.raises(ModelError, match=expected):
        raise ModelError(refusal.reason)
    answer = deploy(address, honest_text(), honest_parameters())
    assert isinstance(answer, m.Built)
