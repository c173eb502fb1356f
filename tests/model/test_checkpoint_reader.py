"""Reading a model's weights from disk, tensor by tensor, under the model's own names."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

from lightning_hetero.errors import CheckpointError
from lightning_hetero.model import checkpoint_reader
from lightning_hetero.model.checkpoint_reader import Checkpoint

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Twelve: in the order of text, expert 10 comes before expert 2.
EXPERTS = {"num_experts": 12, "num_local_experts": 12, "moe_intermediate_size": 8}
TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", UNTIED),
    "llama tied": ("LlamaConfig", TIED),
    "mistral": ("MistralConfig", {"num_key_value_heads": 1}),
    "phi": ("PhiConfig", {}),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 1, "head_dim": 8}),
    "gemma2": ("Gemma2Config", {"num_key_value_heads": 1, "head_dim": 8}),
    "gemma3": ("Gemma3TextConfig", {"num_key_value_heads": 1, "head_dim": 8}),
    "gpt2": ("GPT2Config", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "opt": ("OPTConfig", {"ffn_dim": 24, "word_embed_proj_dim": 16}),
    "falcon": ("FalconConfig", {}),
    "falcon old": ("FalconConfig", {"alibi": True, "bias": True, **UNTIED}),
    "mixtral": ("MixtralConfig", {"num_key_value_heads": 1, **EXPERTS}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_key_value_heads": 1, "head_dim": 8, **EXPERTS}),
}


def build(family: str, **options: Any) -> PreTrainedModel:
    """A tiny model with random weights, biases and norms too."""
    name, more = FAMILIES[family]
    sizes = {k: v for k, v in SIZES.items() if family != "gpt2" or "_token_id" in k or "vocab" in k}
    config = getattr(transformers, name)(**{**sizes, **more, **options})
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def on_meta(model: PreTrainedModel) -> PreTrainedModel:
    """The same model without weights."""
    with torch.device("meta"):
        return type(model)(model.config)


def open_saved(model: PreTrainedModel, folder: Path, **options: Any) -> Checkpoint:
    model.save_pretrained(folder, **options)
    return Checkpoint.open(folder, on_meta(model))


def rewrite(folder: Path, change: Any) -> None:
    """Change what the folder's only file holds."""
    file = folder / "model.safetensors"
    # Copies: what `load_file` returns looks into the file that is about to change.
    state = {key: tensor.clone() for key, tensor in load_file(file).items()}
    save_file(change(state), file, metadata={"format": "pt"})


def assert_equal_to(opened: Checkpoint, model: PreTrainedModel) -> None:
    """Every parameter and buffer is read as the model has it."""
    expected = model.state_dict()
    assert expected.keys() >= dict(model.named_parameters(remove_duplicate=False)).keys()
    for name, tensor in expected.items():
        found = opened.read(name)
        assert list(found) == [""], name
        assert found[""].dtype == tensor.dtype, name
        assert torch.equal(found[""], tensor), name


@pytest.fixture
def llama(tmp_path: Path) -> PreTrainedModel:
    """A model that has been saved into the test's folder."""
    model = build("llama")
    model.save_pretrained(tmp_path)
    return model


# Names.


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_read_under_its_name(tmp_path: Path, family: str) -> None:
    model = build(family)
    assert_equal_to(open_saved(model, tmp_path), model)


@pytest.mark.parametrize("family", ["llama tied", "mixtral", "gpt2"])
def test_large_tensors_are_read_some_rows_at_a_time(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(family)
    opened = open_saved(model, tmp_path)
    names = [name for name, _ in model.named_parameters()]
    assert not any(map(opened.rows, names))
    monkeypatch.setattr(checkpoint_reader, "LARGE_BYTES", 0)
    monkeypatch.setattr(checkpoint_reader, "PIECE_BYTES", 300)
    counts = {}
    for name in names:
        if (found := opened.rows(name)) is not None:
            starts, pieces = zip(*found, strict=True)
            lengths = [len(piece) for piece in pieces]
            assert [*starts] == [sum(lengths[:number]) for number in range(len(lengths))]
            assert torch.equal(torch.cat(pieces), opened.read(name)[""])
            counts[name] = len(pieces)
    assert max(counts.values()) > 5
    # Merged experts have no rows of their own on disk.
    assert (len(counts) < len(names)) == (family == "mixtral")


@pytest.mark.parametrize("family", ["llama tied", "mixtral"])
def test_a_sharded_checkpoint_is_read_like_a_single_file(tmp_path: Path, family: str) -> None:
    model = build(family)
    opened = open_saved(model, tmp_path, max_shard_size="6KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert not (tmp_path / "model.safetensors").exists()
    assert_equal_to(opened, model)


@pytest.mark.parametrize("family", ["llama tied", "gpt2", "opt", "falcon"])
def test_a_checkpoint_of_the_base_model_serves_the_whole_model(tmp_path: Path, family: str) -> None:
    model = build(family)
    model.base_model.save_pretrained(tmp_path)
    assert_equal_to(Checkpoint.open(tmp_path, on_meta(model)), model)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_checkpoint_of_the_whole_model_serves_its_base_model(tmp_path: Path, family: str) -> None:
    model = build(family)
    model.save_pretrained(tmp_path)
    assert_equal_to(Checkpoint.open(tmp_path, on_meta(model.base_model)), model.base_model)


def test_old_gpt2_keys_without_prefix_and_with_masks_are_read(tmp_path: Path) -> None:
    model = build("gpt2")
    model.save_pretrained(tmp_path)

    def make_old(state: dict[str, Tensor]) -> dict[str, Tensor]:
        old = {key.removeprefix("transformer."): tensor for key, tensor in state.items()}
        return {**old, "h.0.attn.bias": torch.ones(1, 1, 16, 16)}

    rewrite(tmp_path, make_old)
    opened = Checkpoint.open(tmp_path, on_meta(model))
    assert_equal_to(opened, model)
    assert "transformer.h.0.attn.bias" not in opened


def test_legacy_names_of_norms_are_read(tmp_path: Path) -> None:
    config = transformers.BertConfig(**{**SIZES, "is_decoder": True})
    model = transformers.BertLMHeadModel(config)
    model.save_pretrained(tmp_path)
    rewrite(
        tmp_path,
        lambda state: {
            k.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ): v
            for k, v in state.items()
        },
    )
    assert_equal_to(Checkpoint.open(tmp_path, on_meta(model)), model)


def test_a_tensor_that_holds_several_is_split(
    tmp_path: Path, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, up = ".mlp.gate_proj.weight", ".mlp.up_proj.weight"
    targets = [gate, up, ".mlp.unused.weight"]
    rule = WeightConverter(".mlp.fused.weight", targets, [Chunk(dim=0)])
    monkeypatch.setattr(checkpoint_reader, "get_model_conversion_mapping", lambda _model: [rule])

    def fuse(state: dict[str, Tensor]) -> dict[str, Tensor]:
        for layer in ("model.layers.0", "model.layers.1"):
            parts = [state.pop(layer + gate), state.pop(layer + up)]
            state[f"{layer}.mlp.fused.weight"] = torch.cat([*parts, parts[0]])
        return state

    rewrite(tmp_path, fuse)
    opened = Checkpoint.open(tmp_path, on_meta(llama))
    assert_equal_to(opened, llama)
    part = opened.read("model.layers.1" + gate)[""]
    assert part.untyped_storage().nbytes() == part.nbytes
    assert "model.layers.1.mlp.unused.weight" not in opened


def test_a_key_that_is_right_already_is_not_renamed_away(
    tmp_path: Path, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = WeightRenaming("mlp.gate_proj", "mlp.w1")
    monkeypatch.setattr(checkpoint_reader, "get_model_conversion_mapping", lambda _model: [rule])
    assert_equal_to(Checkpoint.open(tmp_path, on_meta(llama)), llama)


def test_experts_already_merged_on_disk_are_read_as_they_are(tmp_path: Path) -> None:
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda _state: model.state_dict())
    assert_equal_to(Checkpoint.open(tmp_path, on_meta(model)), model)


def test_experts_that_are_on_disk_in_both_ways_are_read_in_one(tmp_path: Path) -> None:
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    merged = {k: v.clone() for k, v in model.state_dict().items() if ".experts." in k}
    rewrite(tmp_path, lambda state: {**state, **merged})
    assert_equal_to(Checkpoint.open(tmp_path, on_meta(model)), model)


def test_layers_that_the_model_does_not_have_need_not_be_whole(tmp_path: Path) -> None:
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    lost = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    rewrite(tmp_path, lambda state: {k: v for k, v in state.items() if k != lost})
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    assert_equal_to(Checkpoint.open(tmp_path, on_meta(model)), model)


def test_a_buffer_of_whole_numbers_is_read(tmp_path: Path) -> None:
    model = build("llama")
    model.register_buffer("num_steps", torch.tensor([3, 4]))
    model.save_pretrained(tmp_path)
    assert_equal_to(Checkpoint.open(tmp_path, model), model)


def test_what_the_model_does_not_have_is_left_out(tmp_path: Path, llama: PreTrainedModel) -> None:
    unused = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path, lambda state: {**state, unused: torch.ones(4)})
    opened = Checkpoint.open(tmp_path, on_meta(llama))
    assert_equal_to(opened, llama)
    assert unused not in opened
    assert all(name in opened for name in llama.state_dict())


def test_tensors_keep_the_type_that_they_have_on_disk(tmp_path: Path) -> None:
    model = build("mixtral").to(torch.bfloat16)
    assert_equal_to(open_saved(model, tmp_path), model)


# Tied weights.


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("stored", [EMBEDDING, HEAD])
def test_a_tied_tensor_is_read_as_the_one_on_disk(tmp_path: Path, stored: str) -> None:
    model = build("llama tied")
    model.save_pretrained(tmp_path)

    def keep_one(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {stored if key == EMBEDDING else key: tensor for key, tensor in state.items()}

    rewrite(tmp_path, keep_one)
    assert_equal_to(Checkpoint.open(tmp_path, on_meta(model)), model)


def test_tied_tensors_may_both_be_on_disk_if_they_are_equal(tmp_path: Path) -> None:
    model = build("llama tied")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda state: {**state, HEAD: state[EMBEDDING].clone()})
    assert_equal_to(Checkpoint.open(tmp_path, on_meta(model)), model)


def test_tied_tensors_that_differ_on_disk_are_refused(tmp_path: Path) -> None:
    model = build("llama tied")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda state: {**state, HEAD: state[EMBEDDING] + 1})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight .*tie_word_embeddings=False"):
        Checkpoint.open(tmp_path, on_meta(model))


# Memory.


class Reads:
    """Stands in for `safe_open`: notes what is opened and read, and how many files are open."""

    def __init__(self) -> None:
        self.files: list[Path] = []
        self.keys: list[str] = []
        self.num_open = 0

    @contextmanager
    def __call__(self, file: Path, framework: str) -> Iterator[Any]:
        self.files.append(file)
        self.num_open += 1
        with safe_open(file, framework=framework) as opened:
            yield SpiedFile(opened, self.keys)
        self.num_open -= 1


@dataclass
class SpiedFile:
    """A file that notes which tensors leave it."""

    file: Any
    read: list[str]

    def keys(self) -> list[str]:
        keys: list[str] = self.file.keys()
        return keys

    def get_slice(self, key: str) -> Any:
        outline = self.file.get_slice(key)
        return SimpleNamespace(get_shape=outline.get_shape, get_dtype=outline.get_dtype)

    def get_tensor(self, key: str) -> Tensor:
        self.read.append(key)
        tensor: Tensor = self.file.get_tensor(key)
        return tensor


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    reads = Reads()
    monkeypatch.setattr(checkpoint_reader, "safe_open", reads)
    return reads


@pytest.mark.parametrize("family", ["llama tied", "mixtral"])
def test_opening_reads_no_weights_and_leaves_no_file_open(
    tmp_path: Path, family: str, reads: Reads
) -> None:
    open_saved(build(family), tmp_path, max_shard_size="6KB")
    assert (reads.keys, reads.num_open) == ([], 0)


def test_only_what_a_tensor_is_made_of_is_read(tmp_path: Path, reads: Reads) -> None:
    opened = open_saved(build("mixtral"), tmp_path)
    reads.files.clear()
    opened.read("model.layers.1.mlp.experts.gate_up_proj")
    assert reads.files == [tmp_path / "model.safetensors"]
    experts = "model.layers.1.block_sparse_moe.experts"
    expected = {f"{experts}.{e}.{w}.weight" for e in range(12) for w in ("w1", "w3")}
    assert set(reads.keys) == expected
    assert len(reads.keys) == len(expected)
    reads.keys.clear()
    opened.read("model.layers.0.input_layernorm.weight")
    assert (reads.keys, reads.num_open) == (["model.layers.0.input_layernorm.weight"], 0)


def test_nothing_that_was_read_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mixtral")
    opened = open_saved(model, tmp_path)
    loaded: list[weakref.ref[Tensor]] = []
    load = checkpoint_reader._load

    def watched(file: Any, key: str) -> Tensor:
        tensor = load(file, key)
        loaded.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(checkpoint_reader, "_load", watched)
    for name in model.state_dict():
        opened.read(name)
        assert [ref for ref in loaded if ref() is not None] == [], name
    assert len(loaded) > len(model.state_dict())


def test_a_tensor_outlives_its_file(tmp_path: Path, llama: PreTrainedModel) -> None:
    found = Checkpoint.open(tmp_path, on_meta(llama)).read(EMBEDDING)[""]
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as written:
        written.write(bytes(file.stat().st_size))
    assert torch.equal(found, llama.model.embed_tokens.weight)


# Tensors in 4 bits.


def quantize(source: Path, target: Path, **options: Any) -> PreTrainedModel:
    """The model of a folder in 4 bits, saved into another folder, in one file."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, **options
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=config
    )
    model.save_pretrained(target)
    return model


PACKED = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def packed(tmp_path: Path, llama: PreTrainedModel) -> tuple[PreTrainedModel, Path]:
    """A model in 4 bits, and its folder."""
    return quantize(tmp_path, tmp_path / "packed"), tmp_path / "packed"


@pytest.mark.parametrize("storage", ["uint8", "bfloat16"])
def test_a_tensor_in_4_bits_comes_with_what_unpacks_it(
    tmp_path: Path, llama: PreTrainedModel, storage: str
) -> None:
    model = quantize(tmp_path, tmp_path / "packed", bnb_4bit_quant_storage=storage)
    opened = Checkpoint.open(tmp_path / "packed", on_meta(llama))
    read = {
        f"{name}.{suffix}".rstrip("."): tensor
        for name in on_meta(llama).state_dict()
        for suffix, tensor in opened.read(name).items()
    }
    expected = model.state_dict()
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        # Byte by byte: packed weights seen as bfloat16 may be NaN.
        assert torch.equal(read[name].view(torch.uint8), tensor.view(torch.uint8)), name
        assert read[name].dtype == tensor.dtype, name
    assert set(opened.read(PACKED)) == {
        "",
        "absmax",
        "quant_map",
        "nested_absmax",
        "nested_quant_map",
        "quant_state.bitsandbytes__nf4",
    }


def test_what_unpacks_a_tensor_may_be_in_another_shard(
    packed: tuple[PreTrainedModel, Path], llama: PreTrainedModel
) -> None:
    model, folder = packed
    model.save_pretrained(folder / "shards", max_shard_size=300)
    index = json.loads((folder / "shards" / "model.safetensors.index.json").read_text())
    assert len({shard for key, shard in index["weight_map"].items() if PACKED in key}) > 1
    expected = model.state_dict()
    for suffix, tensor in Checkpoint.open(folder / "shards", on_meta(llama)).read(PACKED).items():
        assert torch.equal(tensor, expected[f"{PACKED}.{suffix}".rstrip(".")]), suffix


def test_a_transposed_tensor_in_4_bits_is_read(tmp_path: Path) -> None:
    model = build("gpt2")
    model.save_pretrained(tmp_path)
    quantized = quantize(tmp_path, tmp_path / "packed").state_dict()
    opened = Checkpoint.open(tmp_path / "packed", on_meta(model))
    name = "transformer.h.0.attn.c_attn.weight"
    assert torch.equal(opened.read(name)[""], quantized[name])
    assert len(opened.read(name)) == 6


@pytest.mark.follows(
    "4 bits pack into … bytes, and … has …; check that the config belongs to these weights",
)
def test_4_bits_of_another_size_are_refused(packed: tuple[PreTrainedModel, Path]) -> None:
    other = on_meta(build("llama", intermediate_size=40))
    with pytest.raises(CheckpointError, match=r"\(16, 40\).* 320 bytes, and .* has 192"):
        Checkpoint.open(packed[1], other)
    Checkpoint.open(packed[1], on_meta(build("llama")))


@pytest.mark.follows(
    "so it cannot be unpacked; download the checkpoint again",
)
def test_4_bits_without_their_state_are_refused(
    packed: tuple[PreTrainedModel, Path], llama: PreTrainedModel
) -> None:
    state = f"{PACKED}.quant_state.bitsandbytes__nf4"
    content = (packed[1] / "model.safetensors").read_bytes()
    rewrite(packed[1], lambda found: {k: v for k, v in found.items() if k != state})
    with pytest.raises(CheckpointError, match=rf"{PACKED} .* absmax, .* no quant_state"):
        Checkpoint.open(packed[1], on_meta(llama))
    (packed[1] / "model.safetensors").write_bytes(content)
    Checkpoint.open(packed[1], on_meta(llama))


@pytest.mark.follows(
    "is packed into 4 bits; use the checkpoint before its quantisation",
)
def test_experts_in_4_bits_that_would_be_merged_are_refused(tmp_path: Path) -> None:
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    expert = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    rewrite(tmp_path, lambda state: {**state, f"{expert}.absmax": torch.ones(6)})
    with pytest.raises(CheckpointError, match=rf"{expert} is packed .* before its quantisation"):
        Checkpoint.open(tmp_path, on_meta(model))
    model.save_pretrained(tmp_path)
    Checkpoint.open(tmp_path, on_meta(model))


@pytest.mark.follows(
    "which cannot be read here; use the checkpoint before its quantisation, or bitsandbytes' 4 "
    "bits",
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_other_kinds_of_quantisation_are_refused(
    tmp_path: Path, llama: PreTrainedModel, dtype: torch.dtype
) -> None:
    rewrite(tmp_path, lambda state: {**state, PACKED: state[PACKED].to(dtype)})
    with pytest.raises(CheckpointError, match=rf"{PACKED} .* is quantised to (I8|F8_E4M3)"):
        Checkpoint.open(tmp_path, on_meta(llama))
    llama.save_pretrained(tmp_path)
    Checkpoint.open(tmp_path, on_meta(llama))


# What is missing, damaged or of another model.


def test_a_name_that_the_model_does_not_have_is_refused(
    tmp_path: Path, llama: PreTrainedModel
) -> None:
    opened = Checkpoint.open(tmp_path, on_meta(llama))
    assert "model.layers.9.mlp.up_proj.weight" not in opened
    with pytest.raises(CheckpointError, match=r"'model\.layers\.9\.mlp.*`named_parameters"):
        opened.read("model.layers.9.mlp.up_proj.weight")


def test_a_folder_with_only_pickled_weights_is_refused(
    tmp_path: Path, llama: PreTrainedModel
) -> None:
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.* safe_serialization=True"):
        Checkpoint.open(tmp_path, on_meta(llama))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor .*; name the"):
        Checkpoint.open(tmp_path, on_meta(build("llama")))


def test_missing_tensors_are_named_up_to_five(tmp_path: Path, llama: PreTrainedModel) -> None:
    rewrite(tmp_path, lambda state: {k: v for k, v in state.items() if ".layers.1." not in k})
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path, on_meta(llama))
    assert "lacks 9 of the 21 tensors of LlamaForCausalLM" in str(caught.value)
    assert str(caught.value).count("model.layers.1.") == 5


def test_an_untied_head_that_is_missing_is_named(tmp_path: Path) -> None:
    model = build("llama")
    model.base_model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks 1 .*: lm_head\.weight\. Check"):
        Checkpoint.open(tmp_path, on_meta(model))


def test_a_shape_that_differs_is_named_with_both(tmp_path: Path, llama: PreTrainedModel) -> None:
    other = on_meta(build("llama", vocab_size=33))
    with pytest.raises(CheckpointError, match=r"weight should .* \(33, 16\) and has \(32, 16\)"):
        Checkpoint.open(tmp_path, other)


@pytest.mark.follows(
    "Check that all of them are there and that the config belongs to them.",
)
@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("experts.7.w2", r"down_proj should .* \(12, 16, 24\) and has \(11, 16, 24\), made of 11"),
        ("experts.7.w1", r"gate_up_proj cannot be made of 23 tensors .*experts\.0\.w1.*, …"),
    ],
)
def test_a_missing_expert_is_noticed_at_once(tmp_path: Path, lost: str, message: str) -> None:
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda state: {k: v for k, v in state.items() if lost not in k})
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path, on_meta(model))
    model.save_pretrained(tmp_path)
    Checkpoint.open(tmp_path, on_meta(model))


def shards(model: PreTrainedModel, folder: Path) -> list[Path]:
    model.save_pretrained(folder, max_shard_size="6KB")
    return sorted(folder.glob("model-*.safetensors"))


@pytest.mark.follows(
    "belongs to the checkpoint and is missing; download or copy it again",
)
def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    model = build("llama")
    lost = shards(model, tmp_path)[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=rf"{lost.name} belongs .* missing; download"):
        Checkpoint.open(tmp_path, on_meta(model))
    shards(model, tmp_path)
    Checkpoint.open(tmp_path, on_meta(model))


@pytest.mark.follows(
    "It is cut off or damaged; download or copy it again.",
)
@pytest.mark.parametrize("damage", ["cut", "empty", "noise"])
def test_a_damaged_shard_is_named(tmp_path: Path, damage: str) -> None:
    model = build("llama")
    shard = shards(model, tmp_path)[1]
    content = shard.read_bytes()
    shard.write_bytes({"cut": content[:-5], "empty": b"", "noise": b"\xff" * 64}[damage])
    with pytest.raises(CheckpointError, match=rf"{shard.name} cannot be read: .* download"):
        Checkpoint.open(tmp_path, on_meta(model))
    shard.write_bytes(content)
    Checkpoint.open(tmp_path, on_meta(model))


def test_a_shard_that_is_cut_after_opening_is_named(tmp_path: Path, llama: PreTrainedModel) -> None:
    opened = Checkpoint.open(tmp_path, on_meta(llama))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        opened.read(EMBEDDING)


@pytest.mark.follows(
    "Start the run again; save other weights into a folder of their own.",
)
@pytest.mark.parametrize("is_large", [False, True])
def test_weights_saved_over_an_open_checkpoint_are_refused(
    tmp_path: Path, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    """A lost worker's layers are read again, long after the others."""
    monkeypatch.setattr(checkpoint_reader, "LARGE_BYTES", 1)

    def read(opened: Checkpoint) -> Tensor:
        rows = opened.rows(EMBEDDING) if is_large else None
        return opened.read(EMBEDDING)[""] if rows is None else torch.cat([r for _, r in rows])

    opened = Checkpoint.open(tmp_path, on_meta(llama))
    with torch.no_grad():
        llama.model.embed_tokens.weight.add_(1)
    llama.save_pretrained(tmp_path / "other")
    read(opened)
    llama.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was written after this run"):
        read(opened)
    assert torch.equal(
        read(Checkpoint.open(tmp_path, on_meta(llama))), llama.get_input_embeddings().weight
    )


def test_a_read_that_failed_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("mixtral")
    opened = open_saved(model, tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"

    def broken(_file: Any, key: str) -> Tensor:
        raise CheckpointError(f"{key} is broken")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_reader, "_load", broken)
        with pytest.raises(CheckpointError, match=r"w1\.weight is broken"):
            opened.read(name)
    assert torch.equal(opened.read(name)[""], model.state_dict()[name])


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json is not the index .* Download"):
        Checkpoint.open(tmp_path, on_meta(build("llama")))


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/x.safetensors", "in/x.safetensors", ".."]
)
def test_an_index_that_names_files_elsewhere_is_refused(tmp_path: Path, shard: str) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": shard}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"names files outside of its own folder: {shard}"):
        Checkpoint.open(tmp_path, on_meta(build("llama")))


# The hub.


def in_cache(model: PreTrainedModel, cache: Path, **options: Any) -> None:
    """Put a model where a download of `someone/tiny` would have left it, on branch `second`."""
    root = cache / "models--someone--tiny"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "second").write_text("0" * 40)
    model.save_pretrained(root / "snapshots" / ("0" * 40) / "inner", **options)


@pytest.mark.parametrize("size", ["6KB", "6MB"])
def test_a_hub_name_is_read_from_the_cache(tmp_path: Path, size: str) -> None:
    model = build("llama")
    in_cache(model, tmp_path, max_shard_size=size)
    options = {"cache_dir": tmp_path, "revision": "second", "subfolder": "inner"}
    opened = Checkpoint.open(
        "someone/tiny", on_meta(model), local_files_only=True, token=False, **options
    )
    assert_equal_to(opened, model)


def test_a_subfolder_of_a_folder_is_read(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path / "inner")
    assert_equal_to(Checkpoint.open(tmp_path, on_meta(model), subfolder="inner"), model)


def test_a_hub_name_that_cannot_be_reached_is_refused(tmp_path: Path) -> None:
    options = {"cache_dir": tmp_path, "local_files_only": True}
    with pytest.raises(CheckpointError, match=r"'someone/tiny' .*connect.* `hf download someone"):
        Checkpoint.open("someone/tiny", on_meta(build("llama")), **options)


def test_a_missing_folder_is_not_taken_for_a_hub_name(tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    for source in (lost, str(lost), Path("someone/lost")):
        with pytest.raises(CheckpointError, match=r"There is no folder .*lost; name"):
            Checkpoint.open(source, on_meta(build("llama")))
