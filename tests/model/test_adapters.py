"""Adapters are described as plain data and injected again as they were."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from peft import (
    AdaptionPromptConfig,
    IA3Config,
    LoraConfig,
    VeraConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from torch import nn

from lightning_hetero.errors import ModelError
from lightning_hetero.model.adapters import (
    Adapters,
    AdapterSwitches,
    describe_adapters,
    inject_adapters,
    without_wrappers,
)
from lightning_hetero.model.layers import find_decoder_layers
from lightning_hetero.model.recipe import build_layers, write_recipe

from ..families import tiny_model
from ..models import tiny_llama


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **options})


def adapted(config: Any, **options: Any) -> Any:
    """A Hugging Face model with adapters in it."""
    return get_peft_model(tiny_model("qwen2"), config, **options).base_model.model


def layers_of(model: Any) -> list[nn.Module]:
    return list(model.model.layers)


def described(model: Any) -> Adapters:
    found = describe_adapters(model, layers_of(model))
    assert found is not None
    return found


def injected(adapters: Adapters) -> Any:
    """What a worker makes of a description that came as JSON."""
    read = msgspec.json.decode(msgspec.json.encode(adapters), type=Adapters)
    model = tiny_model("qwen2").to("meta")
    inject_adapters(model, read)
    return model


def outline(model: Any) -> list[tuple[str, torch.Size]]:
    return [(name, p.shape) for name, p in model.model.layers.named_parameters()]


CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "rslora": lambda: lora(use_rslora=True, lora_alpha=3),
    "dora": lambda: lora(use_dora=True),
    "all linear": lambda: lora(target_modules="all-linear"),
    "regex": lambda: lora(target_modules=r".*layers\.[13]\..*up_proj"),
    "excluding": lambda: lora(exclude_modules=r".*layers\.0\..*"),
    "feedforward": lambda: IA3Config(
        target_modules=r".*(k|down)_proj", feedforward_modules=r".*down_proj"
    ),
    "patterns": lambda: lora(rank_pattern={"q_proj": 2}, alpha_pattern={r"layers.2.*v_proj": 32}),
    "some layers": lambda: lora(layers_to_transform=[0, 2]),
    "saved": lambda: lora(modules_to_save=["input_layernorm", "lm_head"]),
    "biases": lambda: lora(lora_bias=True, bias="lora_only"),
    "pissa": lambda: lora(init_lora_weights="pissa"),
    "kasa": lambda: lora(kasa_config={}),
    "parameters": lambda: lora(target_modules=[], target_parameters=["mlp.up_proj.weight"]),
    "ia3": lambda: IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_injected_adapters_are_those_described(name: str) -> None:
    model = adapted(CONFIGS[name]())
    found = injected(described(model))
    assert outline(found) == outline(model)
    assert described(found) == described(model)
    adapters = {n for n, p in model.model.layers.named_parameters() if p.requires_grad}
    assert all(p.is_meta for n, p in found.model.layers.named_parameters() if n in adapters)


# "all linear" is for models of transformers alone.
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "all linear"])
def test_adapters_of_a_model_around_are_those_of_the_model(name: str) -> None:
    outer = nn.ModuleDict({"language": tiny_model("qwen2")})
    inject_adapter_in_model(CONFIGS[name](), outer)
    model: Any = outer["language"]
    adapters = describe_adapters(model, layers_of(model), [outer])
    assert adapters is not None
    assert outline(injected(adapters)) == outline(model)


def test_names_from_a_model_around_are_names_in_the_model() -> None:
    outer = nn.ModuleDict({"language": tiny_model("qwen2")})
    names = [f"language.model.layers.{number}.self_attn.q_proj" for number in (0, 2)]
    inject_adapter_in_model(lora(target_modules=names, rank_pattern={names[1]: 2}), outer)
    model: Any = outer["language"]
    adapters = describe_adapters(model, layers_of(model), [outer])
    assert adapters is not None
    assert outline(injected(adapters)) == outline(model)


def test_adapters_are_injected_without_draws_from_the_runs_stream() -> None:
    adapters = described(adapted(CONFIGS["ia3"]()))
    model = tiny_model("qwen2").to("meta")
    before = torch.get_rng_state()
    inject_adapters(model, adapters)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_description_is_plain_data() -> None:
    text = msgspec.json.encode(described(adapted(lora())))
    assert json.loads(text)["configs"]["default"]["peft_type"] == "LORA"


def test_options_for_the_first_weights_of_adapters_are_not_sent() -> None:
    config = described(adapted(lora(init_lora_weights="gaussian"))).configs["default"]
    assert not {"init_lora_weights", "base_model_name_or_path", "megatron_core"} & config.keys()


def test_a_model_without_adapters_has_no_description() -> None:
    model = tiny_model("qwen2")
    assert describe_adapters(model, layers_of(model)) is None


def test_adapters_only_elsewhere_are_not_described() -> None:
    model = adapted(lora(layers_to_transform=[0]))
    assert describe_adapters(model, layers_of(model)[1:]) is None


def test_the_adapters_in_use_are_said() -> None:
    wrapped = get_peft_model(tiny_model("qwen2"), lora())
    wrapped.add_adapter("second", lora(r=2))
    wrapped.set_adapter("second")
    found = described(wrapped.base_model.model)
    assert (list(found.configs), found.active) == (["default", "second"], ["second"])
    assert injected(found).model.layers[0].self_attn.q_proj.active_adapters == ["second"]


def test_adapters_that_are_switched_off_stay_so() -> None:
    wrapped = get_peft_model(tiny_model("qwen2"), lora(modules_to_save=["input_layernorm"]))
    with wrapped.disable_adapter():
        found = injected(described(wrapped.base_model.model))
    assert found.model.layers[0].self_attn.q_proj.disable_adapters
    assert found.model.layers[0].input_layernorm.disable_adapters


def test_a_scale_set_by_hand_is_said() -> None:
    model = adapted(lora())
    model.model.layers[1].self_attn.q_proj.set_scale("default", 5.0)
    found = injected(described(model))
    scales = [found.model.layers[n].self_attn.q_proj.scaling["default"] for n in (0, 1)]
    assert scales == [2.0, 10.0]


@pytest.mark.follows("so they would not train; call `unmerge_adapter()` first")
def test_merged_adapters_are_refused() -> None:
    tuned = get_peft_model(tiny_model("qwen2"), lora())
    model = tuned.base_model.model
    model.model.layers[2].self_attn.q_proj.merge()
    with pytest.raises(ModelError, match=r"merged.*unmerge_adapter\(\)"):
        described(model)
    tuned.unmerge_adapter()
    assert described(model).is_enabled


def test_layers_that_use_different_adapters_are_refused() -> None:
    model = adapted(lora())
    model.model.layers[2].self_attn.q_proj.enable_adapters(False)
    with pytest.raises(ModelError, match="different adapters.*set_adapter"):
        described(model)


def injected_by_hand() -> Any:
    return inject_adapter_in_model(lora(), tiny_llama(2))


@pytest.mark.follows("add adapters with peft.get_peft_model or inject_adapter_in_model")
def test_adapters_without_a_config_are_refused() -> None:
    model = adapted(lora())
    del model.peft_config
    with pytest.raises(ModelError, match="no `peft_config`.*get_peft_model"):
        described(model)
    for made in (get_peft_model(tiny_llama(2), lora()).model, injected_by_hand()):
        assert described(made).configs.keys() == {"default"}


@pytest.mark.follows("cannot live on workers; use one of …, or keep their layers")
def test_adapters_in_the_place_of_attention_are_refused() -> None:
    config = AdaptionPromptConfig(adapter_layers=2, adapter_len=4, task_type="CAUSAL_LM")
    model = get_peft_model(tiny_llama(3), config)
    layers = [*enumerate(find_decoder_layers(model))]
    with pytest.raises(ModelError, match="kind 'ADAPTION_PROMPT' cannot .*LORA.*keep their layers"):
        write_recipe(model, layers)
    assert len(build_layers(write_recipe(model, layers[:1]))) == 1
    assert described(adapted(lora())) is not None


def test_a_first_weight_that_freezes_a_part_of_the_adapter_does_so_on_a_worker() -> None:
    model = adapted(lora(init_lora_weights="mica"))
    found, expected = (
        {n: p.requires_grad for n, p in each.model.layers.named_parameters() if "lora_" in n}
        for each in (injected(described(model)), model)
    )
    assert found == expected
    assert {*found.values()} == {True, False}


def test_kasa_does_not_truncate_weights_again_on_a_worker() -> None:
    model = injected(described(adapted(lora(kasa_config={}))))
    assert not model.model.layers[0].self_attn.q_proj._lora_kasa_truncation_deferred


@pytest.mark.follows("load the weights before you add the adapter, or leave `kasa_config` out")
def test_kasa_before_the_weights_are_there_is_refused() -> None:
    model = tiny_model("qwen2").to("meta")
    inject_adapter_in_model(lora(kasa_config={}), model, low_cpu_mem_usage=True)
    with pytest.raises(ModelError, match="KaSA has not truncated .* `kasa_config` out"):
        described(model)
    described(adapted(lora(kasa_config={})))


@pytest.mark.follows("whose state workers do not get; leave it out, or keep the layers with")
@pytest.mark.parametrize(
    "options",
    [
        {"velora_config": {"num_groups": 4}},
        {"monteclora_config": {"num_samples": 2, "buffer_size": 2}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_adapter_with_a_state_beside_its_parameters_is_refused(options: Any) -> None:
    model = adapted(lora(**options))
    with pytest.raises(ModelError, match=f"option '{next(iter(options))}', whose state"):
        described(model)
    model = adapted(lora(**options, layers_to_transform=[0]))
    assert describe_adapters(model, layers_of(model)[1:]) is None
    described(adapted(lora()))


def test_adapters_that_share_tensors_are_refused() -> None:
    model = adapted(VeraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ModelError, match="'VERA' cannot live on workers; use one of .*LORA"):
        described(model)


@pytest.mark.parametrize("key", ["megatron_core", "runtime_config", "init_lora_weights"])
def test_a_worker_reads_nothing_that_is_never_sent(key: str) -> None:
    found = described(adapted(lora()))
    configs = {"default": {**found.configs["default"], key: "no.such.module"}}
    injected(Adapters(configs, found.active))


def test_an_option_of_another_version_is_refused() -> None:
    found = described(adapted(lora()))
    for value, is_refused in [(None, False), (False, False), (7, True)]:
        configs = {"default": {**found.configs["default"], "use_new_thing": value}}
        if is_refused:
            with pytest.raises(ModelError, match=r"'use_new_thing'.*coordinator's version"):
                injected(Adapters(configs, found.active))
        else:
            injected(Adapters(configs, found.active))


def test_a_missing_library_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = described(adapted(lora()))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"peft is not installed.*pip install"):
        inject_adapters(tiny_model("qwen2").to("meta"), adapters)


def test_without_the_library_there_are_no_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    model = tiny_model("qwen2")
    assert describe_adapters(model, layers_of(model)) is None
    assert not AdapterSwitches(model.model.layers[0]).have_changed()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "switched off": lambda model: model.disable_adapter_layers(),
    "another": lambda model: model.set_adapter("second"),
    "scaled": lambda model: model.model.model.layers[0].self_attn.q_proj.scale_layer(2.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name: str) -> None:
    wrapped = get_peft_model(tiny_model("qwen2"), lora())
    wrapped.add_adapter("second", lora(r=2))
    switches = AdapterSwitches(wrapped.base_model.model.model.layers[0])
    assert not switches.have_changed()
    CHANGES[name](wrapped.base_model)
    assert switches.have_changed()


@pytest.mark.follows(
    "cannot be merged into weights that are not here; merge them after the run",
)
def test_adapters_of_a_layer_elsewhere_cannot_be_merged() -> None:
    model = adapted(lora())
    switches = AdapterSwitches(model.model.layers[0])
    merge = model.model.layers[0].self_attn.q_proj.merge
    with pytest.raises(ModelError, match="merge them after the run"):
        merge()
    switches.release()
    model.model.layers[0].self_attn.q_proj.merge()
    assert switches.have_changed()


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": r"(_?\w+)*X"},
        {"exclude_modules": r"(_?\w+)*X"},
        {"rank_pattern": {r"(_?\w+)*X": 2}},
        {"modules_to_save": [r"(_?\w+)*X"]},
        {"layers_pattern": [r"(_?\w+)*X"]},
        {"layer_replication": [[0, 10**9]]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_worker_runs_no_regular_expression_and_copies_no_layers(options: Any) -> None:
    config = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], **options}
    with pytest.raises(ModelError, match="regular expression|replicates"):
        injected(Adapters({"default": config}, ["default"]))


def test_layers_that_share_an_adapter_let_it_be_merged_again() -> None:
    layer = adapted(lora()).model.layers[0]
    switches = [AdapterSwitches(layer), AdapterSwitches(nn.ModuleList([layer]))]
    for one in switches:
        one.release()
    layer.self_attn.q_proj.merge()


def test_switching_off_and_on_again_is_not_a_change() -> None:
    wrapped = get_peft_model(tiny_model("qwen2"), lora())
    switches = AdapterSwitches(wrapped.base_model.model.model.layers[0])
    with wrapped.disable_adapter():
        assert switches.have_changed()
    assert not switches.have_changed()


def test_a_path_is_the_same_with_and_without_wrappers() -> None:
    assert without_wrappers("self_attn.q_proj.base_layer") == "self_attn.q_proj"
    assert without_wrappers("mlp.experts.base_layer.down_proj") == "mlp.experts.down_proj"
    assert without_wrappers("") == ""
