"""A model on `meta`: what it refuses, and what it reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LNTuningConfig, LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPTQConfig, T5Config

from lightning_hetero import from_pretrained
from lightning_hetero.errors import CheckpointError, ModelError
from lightning_hetero.model.tensors import UnreadWeights, bring_here, weights_in_checkpoint

from ..families import tiny_model

NF4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
)
CPU = torch.device("cpu")


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **options})


def saved(folder: Path, family: str = "llama", **config: Any) -> Path:
    """The family's model on disk, its config with other entries."""
    tiny_model(family).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("llama"))


def weights_of(model: nn.Module) -> UnreadWeights:
    found = weights_in_checkpoint(model)
    assert found is not None
    return found


def brought(model: Any) -> Any:
    """The model with all its weights."""
    names = list(bring_here(model, weights_of(model), {}, CPU))
    assert names
    return model


def answers_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.arange(12).reshape(2, 6)).logits
    return logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt2", "mixtral"])
def test_the_weights_that_are_read_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = from_pretrained(saved(tmp_path, family))
    assert all(parameter.is_meta for parameter in model.parameters())
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(answers_of(brought(model).eval()), answers_of(expected))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_packed_weights_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    saved(tmp_path, family)
    model = brought(from_pretrained(tmp_path, quantization_config=NF4))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=NF4)
    wanted = expected.state_dict()
    names = {name for name, m in expected.named_modules() if isinstance(m, Linear4bit)}
    assert {name for name, m in model.named_modules() if isinstance(m, Linear4bit)} == names
    for name in names:
        weight = model.get_submodule(name).weight
        assert torch.equal(weight, wanted[f"{name}.weight"])
        assert torch.equal(weight.quant_state.absmax, wanted[f"{name}.weight.absmax"])


def test_a_worker_that_packs_gets_unpacked_weights(folder: Path) -> None:
    model = from_pretrained(folder, quantization_config=NF4, quantize_on="worker")
    owner = model.model.layers[0].mlp.up_proj
    content, state = weights_of(model).read(owner, "weight", for_worker=True)
    assert (content.shape, state) == ((24, 16), {})
    packed, state = weights_of(model).read(owner, "weight", for_worker=False)
    assert packed.dtype == torch.uint8
    assert "absmax" in state


def test_weights_are_read_in_the_requested_dtype(folder: Path) -> None:
    model = from_pretrained(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in brought(model).parameters()} == {torch.bfloat16}


def test_moving_the_model_moves_only_the_tensors_that_are_here(folder: Path) -> None:
    model = from_pretrained(folder, peft_config=lora())
    model.to("cpu").to(torch.float64)
    adapters = [p for p in model.parameters() if p.requires_grad]
    assert {(p.device.type, p.dtype) for p in adapters} == {("cpu", torch.float64)}


def test_frozen_weights_are_left_out_of_a_state_dict_and_not_missed(folder: Path) -> None:
    model = from_pretrained(folder, peft_config=lora())
    state = model.state_dict()
    assert state
    assert all("lora_" in name for name in state)
    model.load_state_dict(state)


def test_adapters_start_as_peft_starts_them(folder: Path) -> None:
    torch.manual_seed(3)
    found = from_pretrained(folder, peft_config=lora(init_lora_weights="gaussian"))
    for name, parameter in found.named_parameters():
        if "lora_" in name:
            assert not parameter.is_meta
            assert bool(parameter.any()) == ("lora_A" in name)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (lora(use_dora=True), "DoRA starts from"),
        (lora(init_lora_weights="pissa"), "init_lora_weights='pissa' starts from"),
        (lora(init_lora_weights="olora"), "init_lora_weights='olora' starts from"),
        (lora(modules_to_save=["lm_head"]), r"lm_head\.modules_to_save.* starts from"),
        (lora(modules_to_save=["input_layernorm"]), r"modules_to_save.* starts from"),
        (lora(trainable_token_indices=[1]), "trainable_tokens.* starts from"),
        (LNTuningConfig(target_modules=["norm"]), "ln_tuning.* starts from"),
        ("lora", "peft_config is a str"),
        ({"r": 4}, "peft_config is a dict"),
    ],
)
def test_adapters_that_need_weights_are_refused(
    config: Any, expected: str, quantized: bool, folder: Path
) -> None:
    with pytest.raises(ModelError, match=expected):
        from_pretrained(folder, peft_config=config, quantization_config=NF4 if quantized else None)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}, "4 bits, not 8"),
        ({"quantization_config": BitsAndBytesConfig()}, "load_in_4bit=True"),
        ({"quantization_config": GPTQConfig(bits=4)}, "a GPTQConfig.*BitsAndBytesConfig"),
        ({"quantization_config": {"load_in_4bit": True}}, "a dict.*BitsAndBytesConfig"),
        ({"dtype": "auto"}, "dtype is 'auto'.*torch.bfloat16"),
        ({"quantize_on": "nobody"}, "'nobody'; it is 'coordinator' or 'worker'"),
        ({"device_map": "auto"}, "no option 'device_map'.*revision"),
        ({"torch_dtype": torch.float16}, "no option 'torch_dtype'"),
        ({"load_in_4bit": True}, "no option 'load_in_4bit'"),
    ],
)
def test_unusable_options_are_refused(options: dict[str, Any], expected: str, folder: Path) -> None:
    with pytest.raises(ModelError, match=expected):
        from_pretrained(folder, **options)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantised by 'gptq'.*before its quantisation"),
        ({"quant_method": "fp8"}, "quantised by 'fp8'"),
        ({}, "quantised by None"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "4 bits, not 8"),
    ],
)
def test_other_quantisations_are_refused(
    stored: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    saved(tmp_path, quantization_config=stored)
    with pytest.raises(ModelError, match=expected):
        from_pretrained(tmp_path)
    with pytest.raises(ModelError, match="quantised already.*leave `quantization_config` out"):
        from_pretrained(tmp_path, quantization_config=NF4)


def test_a_source_without_a_model_is_refused(folder: Path, tmp_path: Path) -> None:
    for source in (tmp_path / "nothing", tmp_path, folder / "config.json"):
        with pytest.raises(CheckpointError, match=r"save_pretrained|There is no folder"):
            from_pretrained(source)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hidden_size": 32}, r"should have the shape .* 32\) and has .* 16\)"),
        ({"num_hidden_layers": 6}, r"lacks 18 of the .* tensors.*layers\.4"),
    ],
)
def test_a_config_of_other_weights_is_refused(
    config: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=expected):
        from_pretrained(saved(tmp_path, **config))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="8kB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} belongs to the checkpoint"):
        from_pretrained(tmp_path)


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="T5Config is not the config of a causal language model"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("library", ["bitsandbytes", "peft"])
def test_a_missing_library_is_named_with_the_remedy(
    library: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = lora()
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModelError, match=rf"{library} is not installed.*pip install"):
        from_pretrained(folder, quantization_config=NF4, peft_config=config)


def test_calling_a_model_whose_weights_are_on_disk_is_refused(folder: Path) -> None:
    model = from_pretrained(folder)
    with pytest.raises(ModelError, match=r"embed_tokens.* is still in the checkpoint.*Strategy"):
        answers_of(model)


def test_other_models_have_nothing_on_disk() -> None:
    assert weights_in_checkpoint(tiny_model("llama")) is None


def test_other_content_than_the_checkpoints_is_refused_before_a_run(folder: Path) -> None:
    """A tensor on `meta` would lose content that is copied into it."""
    content = tiny_model("llama").state_dict()
    with pytest.raises(ModelError, match="ckpt_path"):
        from_pretrained(folder).load_state_dict(content)


def test_content_can_be_assigned_before_a_run(folder: Path) -> None:
    model, other = from_pretrained(folder), tiny_model("llama", tie_word_embeddings=False)
    model.load_state_dict(other.state_dict(), assign=True)
    torch.testing.assert_close(dict(model.state_dict()), dict(other.state_dict()))
