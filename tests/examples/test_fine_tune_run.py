"""The fine-tuning example: runs of its own YAML, resume, and the adapter afterwards."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bitsandbytes.nn import Linear4bit
from huggingface_hub.errors import LocalTokenNotFoundError
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from examples.fine_tune import adapter, cards
from examples.fine_tune.__main__ import FineTuneCLI, main
from examples.fine_tune.loading import Base, Lora, LoraError, load_base, load_trained
from examples.fine_tune.offline.documentation import halve, read_documentation, walk
from examples.fine_tune.offline.instructions import (
    first_sentence,
    rows_about,
    write_instructions,
)
from examples.fine_tune.offline.small_model import SmallModel, make_small_model
from examples.fine_tune.rows import read_rows
from lightning_hetero.errors import HeteroError
from lightning_hetero.model.layers import find_decoder_layers
from lightning_hetero.planner.feasibility import candidate_of, shortages
from lightning_hetero.planner.profile import Profile

from ..equality import assert_close
from ..families import FLOOR
from ..pairwise import repeats
from .small_chat import ALPACA, NUM_LAYERS, make_model

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "fine_tune"
CPU = torch.device("cpu")
LINEARS = 7 * NUM_LAYERS

Fit = Callable[..., FineTuneCLI]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("made") / "model")


@pytest.fixture
def fit(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fit:
    """Trains by the example's own YAML, in a folder of this test."""
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "my.jsonl"
    talks = [
        [
            {"role": "user", "content": row["instruction"]},
            {"role": "assistant", "content": row["output"]},
        ]
        for row in ALPACA
    ]
    data.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks * 3))

    def run(**options: Any) -> FineTuneCLI:
        given = {
            "model.base": model,
            "model.lora.dropout": 0.0,
            "data.path": data,
            "data.max_tokens": 64,
            "data.validation": 0.1,
            "data.batch_size": 3,
            "micro_batches": 3,
            "trainer.max_epochs": 1,
            "trainer.logger": "false",
            "trainer.enable_progress_bar": "false",
            "trainer.enable_model_summary": "false",
            **options,
        }
        words = [f"--{name}={value}" for name, value in given.items()]
        return main(["fit", f"--config={FOLDER / 'tiny.yaml'}", *words])

    return run


def learnt() -> dict[str, Tensor]:
    """The adapter of the latest run."""
    files = Path("output").glob("adapter*/adapter_model.safetensors")
    return load_file(max(files, key=lambda file: file.stat().st_mtime_ns))


def test_each_run_has_a_folder_of_its_own_for_its_adapter(
    fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        (line,) = re.findall(r"^The adapter is in .*$", capsys.readouterr().out, re.M)
        return str(line)

    options = {"workers": 0, "trainer.default_root_dir": "elsewhere", "trainer.max_epochs": 1}
    fit(**options)
    assert said() == "The adapter is in elsewhere/adapter."
    expected = load_file("elsewhere/adapter/adapter_model.safetensors")
    fit(**options, **{"seed_everything": 3})
    assert said().endswith("elsewhere/adapter-2. elsewhere/adapter has that of an earlier run.")
    assert not equal(load_file("elsewhere/adapter-2/adapter_model.safetensors"), expected)
    assert equal(load_file("elsewhere/adapter/adapter_model.safetensors"), expected)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


def test_two_workers_train_as_one_device(
    fit: Fit, workers: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def answers() -> list[str]:
        return re.findall(r"^answer .*?$", capsys.readouterr().out, re.M)

    alone = fit(workers=0)
    expected = learnt()
    assert len(expected) == 2 * 4 * NUM_LAYERS
    assert all(weight.any() for weight in expected.values())
    written = answers()
    assert len(written) == 2

    spread = fit(workers=json.dumps(workers[:2]))
    assert_close(learnt(), expected, FLOOR)
    loss = float(alone.trainer.callback_metrics["val_loss"])
    assert float(spread.trainer.callback_metrics["val_loss"]) == pytest.approx(loss, rel=1e-5)
    assert answers() == written


def test_windows_over_workers_train_as_accumulation_on_one_device(
    fit: Fit, workers: list[str]
) -> None:
    given = {"data.batch_size": 1, "data.window": 4, "data.packing": "false"}
    alone = fit(workers=0, **given)
    expected = learnt()
    spread = fit(workers=json.dumps(workers[:2]), **given)
    assert_close(learnt(), expected, FLOOR)
    assert alone.trainer.global_step == spread.trainer.global_step > 1


def test_recomputation_changes_no_weight(fit: Fit, workers: list[str]) -> None:
    fit(workers=0)
    expected = learnt()
    fit(**{"workers": 0, "model.recompute": "true"})
    assert_close(learnt(), expected, FLOOR)
    with pytest.raises(HeteroError, match="`model.recompute` is for one device"):
        fit(**{"workers": json.dumps(workers[:2]), "model.recompute": "true"})


@repeats(
    "test_two_workers_train_as_one_device",
    "integration/test_round_trips.py::test_adapters_alone_are_saved_and_resume_anywhere",
)
@pytest.mark.parametrize("on_workers", [False, True], ids=["plain", "workers"])
def test_a_run_resumes_where_it_was(fit: Fit, workers: list[str], on_workers: bool) -> None:
    where = {"workers": json.dumps(workers[:2]) if on_workers else 0, "trainer.max_epochs": 2}
    keep_all = {"trainer.callbacks.save_top_k": -1, "trainer.callbacks.filename": "{epoch}"}
    fit(**where, **keep_all)
    expected = learnt()
    checkpoint = Path("output/checkpoints/epoch=0.ckpt")
    state = torch.load(checkpoint, weights_only=False)["state_dict"]
    assert len(state) == 2 * 4 * NUM_LAYERS
    assert all("lora_" in name for name in state)

    fit(**where, ckpt_path=checkpoint)
    assert_close(learnt(), expected, FLOOR)


def test_samples_go_to_tensorboard(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    told: list[tuple[str, str]] = []

    def add_text(writer: Any, tag: str, text: str, step: int) -> None:
        told.append((tag, text))

    monkeypatch.setattr(tensorboard.SummaryWriter, "add_text", add_text)
    logger = "lightning.pytorch.loggers.TensorBoardLogger"
    fit(**{"workers": 0, "trainer.logger": logger, "trainer.logger.save_dir": "logs"})
    texts = [text for tag, text in told if tag == "samples"]
    assert len(texts) == 1
    assert texts[0].count("**<|im_start|>user") == 2


def test_a_strategy_beside_workers_is_refused(fit: Fit) -> None:
    with pytest.raises(HeteroError, match="`trainer.strategy` is set; leave it out"):
        fit(**{"trainer.strategy": "ddp"})


@pytest.mark.parametrize("name", ["tiny.yaml", "llama_8b.yaml"])
def test_the_configs_are_accepted(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fit", f"--config={FOLDER / name}", "--print_config"])
    assert ended.value.code in (0, None)
    shown = yaml.safe_load(capsys.readouterr().out)
    given = yaml.safe_load((FOLDER / name).read_text())
    assert shown["workers"] == given["workers"]
    assert shown["data"]["packing"] is True
    assert shown["model"]["lora"]["targets"] == given["model"]["lora"]["targets"]


@pytest.mark.parametrize(("value", "ends"), [("auto", 0), ('["a:1","b:2"]', 0), ("0", 0), ("x", 2)])
def test_workers_are_a_number_auto_or_addresses(
    value: str, ends: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fit", f"--config={FOLDER / 'tiny.yaml'}", f"--workers={value}", "--print_config"])
    assert (ended.value.code or 0) == ends


# The model.


def test_targets_are_all_linear_layers_those_of_the_family_or_a_list(model: Path) -> None:
    def adapted(targets: str | list[str]) -> set[str]:
        tuned = Base(str(model), False, lora=Lora(targets=targets)).load_here(CPU)
        names = [name for name, p in tuned.named_parameters() if p.requires_grad]
        return {name.split(".lora_")[0].rpartition(".")[2] for name in names}

    assert adapted("all-linear") == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    assert adapted("family") == {"q_proj", "v_proj"}
    assert adapted(["o_proj"]) == {"o_proj"}
    hollow = Base(str(model), True).load_hollow()
    assert sum("lora_A" in name for name, _ in hollow.named_parameters()) == LINEARS
    for load in (
        lambda base: base.load_here(CPU),
        lambda base: base.load_hollow(),
    ):
        with pytest.raises((LoraError, HeteroError), match="nowhere"):
            load(Base(str(model), False, lora=Lora(targets=["nowhere"])))


def test_validation_leaves_the_gradients_of_the_4_bit_model_alone(model: Path) -> None:
    torch.manual_seed(0)
    tuned = Base(str(model), lora=Lora(dropout=0.0)).load_here(CPU)
    layers = [layer for layer in tuned.modules() if isinstance(layer, Linear4bit)]
    assert len(layers) == LINEARS
    # Processors without AVX512-BF16 show no harm; the switch is seen on all of them.
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers)
    token_ids = torch.arange(4, 20).view(2, 8)

    def gradients() -> list[Tensor | None]:
        tuned.zero_grad()
        tuned(input_ids=token_ids, labels=token_ids).loss.backward()
        return [p.grad for p in tuned.parameters() if p.requires_grad]

    before = gradients()
    with torch.no_grad():
        tuned.eval()(input_ids=token_ids)
    tuned.train()
    assert all(torch.equal(*pair) for pair in zip(before, gradients(), strict=True))


def test_a_checkpoint_in_4_bits_keeps_its_own_quantisation(model: Path, tmp_path: Path) -> None:
    assert Base(str(model)).quantization() is not None
    load_base(Base(str(model)), CPU).save_pretrained(tmp_path)
    assert Base(str(tmp_path)).quantization() is None
    loaded = load_base(Base(str(tmp_path)), CPU)
    assert sum(isinstance(layer, Linear4bit) for layer in loaded.modules()) == LINEARS


# Afterwards.


@pytest.fixture
def trained(model: Path, tmp_path: Path) -> Path:
    """An adapter that changes what the model says."""
    folder = tmp_path / "adapter"
    tuned = Base(str(model), False).load_here(CPU)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=generator)
    tuned.save_pretrained(str(folder))
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def test_a_merged_model_computes_as_base_and_adapter(
    model: Path, trained: Path, tmp_path: Path
) -> None:
    into = tmp_path / "merged"
    adapter.merge(trained, into, torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(into)
    assert not isinstance(merged, PeftModel)
    token_ids = torch.arange(4, 20).view(2, 8)
    with torch.no_grad():
        found = merged(token_ids).logits
        expected = load_trained(Base(str(model), False), trained, CPU)(token_ids).logits
        base = load_base(Base(str(model), False), CPU)(token_ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, base, atol=1e-2)
    with pytest.raises(adapter.AdapterError, match="merged is not empty; name another"):
        adapter.merge(trained, into)


def test_the_commands_answer_and_push(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter.main(["answer", str(trained), "--prompt", "Say one.", "--max-tokens", "3"])
    assert capsys.readouterr().out

    done: list[Any] = []

    class Hub:
        def create_repo(self, name: str, private: bool, exist_ok: bool) -> None:
            done.append((name, private))

        def upload_folder(self, repo_id: str, folder_path: Path) -> None:
            done.append((repo_id, folder_path))

    monkeypatch.setattr(adapter, "HfApi", Hub)
    adapter.main(["push", str(trained), "--to", "me/mine", "--private"])
    assert done == [("me/mine", True), ("me/mine", trained)]
    assert "It is at https://huggingface.co/me/mine." in capsys.readouterr().out

    def refuse(*_args: Any, **_options: Any) -> None:
        raise LocalTokenNotFoundError("Token is required.")

    monkeypatch.setattr(Hub, "create_repo", refuse)
    with pytest.raises(adapter.AdapterError, match="did not take .* as me/mine.*hf auth login"):
        adapter.push(trained, "me/mine", private=False)


def test_a_folder_without_an_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(adapter.AdapterError, match="holds no adapter and no model"):
        adapter.push(tmp_path, "me/mine", private=False)
    with pytest.raises(adapter.AdapterError, match="holds no adapter; give the one that training"):
        adapter.merge(tmp_path, tmp_path / "merged")


# Before.


def test_the_table_of_the_page_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cards, "MODELS", {"Llama 3.1 8B": cards.MODELS["Llama 3.1 8B"]})
    cards.main([])
    page = (FOLDER / "README.md").read_text("utf-8")
    for line in capsys.readouterr().out.splitlines():
        assert line in page


def test_the_table_of_the_first_page_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (FOLDER.parents[1] / "README.md").read_text("utf-8")
    models = [name for name in cards.MODELS if f"\n| {name} |" in page]
    assert len(models) > 1
    monkeypatch.setattr(cards, "MODELS", {name: cards.MODELS[name] for name in models})
    cards.main(["--cards", "RTX 3060+RTX 3090", "RTX 3090+RTX 4090"])
    assert capsys.readouterr().out in page


def test_a_layer_is_counted_as_it_is() -> None:
    config = cards.MODELS["Llama 3.2 1B"]
    layer = cards.count_layer(config, 256, Lora(rank=8))
    shapes = [(2048, 2048)] * 2 + [(512, 2048)] * 2 + [(8192, 2048)] * 3
    weights = sum(rows * columns for rows, columns in shapes)
    assert layer.frozen_bytes == pytest.approx(0.5159 * weights, rel=1e-3)
    assert layer.trainable == sum(8 * (rows + columns) for rows, columns in shapes)
    assert layer.largest_bytes == 2 * 8192 * 2048
    twice = cards.count_layer(config, 512, Lora(rank=8))
    assert twice.kept_bytes == pytest.approx(2 * layer.kept_bytes, rel=1e-3)


def test_a_layer_keeps_the_counted_bytes_in_four_bits(tmp_path: Path) -> None:
    """Of a real layer, in the precision that the table assumes."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    lora, num_tokens = Lora(rank=4), 64
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model: Any = Base(str(tmp_path), dtype=torch.bfloat16, lora=lora).load_here(CPU)
    model = model.to(torch.bfloat16)
    (layer,) = [found.module for found in find_decoder_layers(model)]
    assert isinstance(layer.mlp.up_proj.base_layer, Linear4bit)
    kept = cards.Kept(layer)
    hidden = torch.randn(1, num_tokens, 128, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(kept.add, lambda tensor: tensor):
        model.base_model.model.base_model(inputs_embeds=hidden, use_cache=False)
    counted = cards.count_layer(config, num_tokens, lora)
    assert counted.kept_bytes == pytest.approx(kept.num_bytes, rel=0.01)
    trained = [each for each in layer.parameters() if each.requires_grad]
    assert {each.dtype for each in trained} == {torch.bfloat16}
    assert cards.ADAPTER_BYTES * counted.trainable == sum(each.nbytes for each in trained)
    optimizer = torch.optim.AdamW(trained)
    for each in trained:
        each.grad = torch.zeros_like(each)
    optimizer.step()
    averages = [
        state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")
    ]
    assert cards.STATE_BYTES * counted.trainable == sum(each.nbytes for each in averages)


def profile_of(cards_wanted: str, model: str = "Qwen3 14B", tokens: int = 1024) -> Profile:
    return cards.profile_of(cards.MODELS[model], cards_wanted.split("+"), tokens, Lora())


def test_a_worker_reads_frozen_weights_from_main_memory_where_a_model_does_not_fit() -> None:
    plain = cards.fits(profile_of("RTX 3090+RTX 4090", "Qwen3 32B"))
    assert plain != "no"
    assert " read" not in plain
    assert " read" in cards.fits(profile_of("RTX 3060+RTX 3090", "Llama 3.3 70B"))


def test_the_items_are_those_of_the_plan() -> None:
    profile = profile_of("RTX 3090+RTX 4090", "Llama 3.3 70B", 512)
    found = dict(cards.items(profile))
    chosen = cards.plan_for(profile)
    needs = [chosen.need(name) for name in chosen.processes]
    weights = sum(float(need.weights) for need in needs)
    trained = sum(float(need.gradients + need.optimizer) for need in needs)
    counted = ("layers, frozen", "adapters, gradients, optimizer state", "embedding", "head")
    assert sum(found[each] for each in counted) == pytest.approx(weights + trained)
    lines = [*cards.explained(profile)]
    assert [line.split(",")[0] for line in lines] == ["RTX 3090", "RTX 4090"]
    assert all(
        f"total {float(n.total) / 2**30:.2f}" in line for n, line in zip(needs, lines, strict=True)
    )
    (refused,) = cards.explained(profile_of("RTX 3060", "Llama 3.3 70B"))
    assert refused.startswith("no: The model does not fit")


def test_a_sequence_too_long_as_a_whole_fits_in_slices(capsys: pytest.CaptureFixture[str]) -> None:
    asked = cards.MODELS["Llama 3.1 8B"], ["RTX 3090", "RTX 3060"], 32768, Lora()
    profile = cards.sliced_profile(*asked)
    chosen = cards.plan_in_slices(profile)
    assert chosen is not None
    plan = chosen.plan()
    assert shortages(chosen) == []
    assert [stage.head for stage in plan.stages] == [False, True]
    fewer = candidate_of(dataclasses.replace(plan, micro_batches=plan.micro_batches // 2), profile)
    assert shortages(fewer)
    needs = [float(chosen.need(name).total) / 2**30 for name in plan.workers]
    page = " ".join((ROOT / "docs" / "memory.md").read_text("utf-8").split())
    assert f"in {plan.micro_batches} [slices along the tokens]" in page
    assert "with {:.1f} and {:.1f} GiB of the 22.8 and 11.4".format(*needs) in page
    assert "{} and {} layers".format(*(len(stage.layer_indices) for stage in plan.stages)) in page
    cards.main(["--bytes", "--model", "Llama 3.1 8B", "--cards", "RTX 3060", "--tokens", "32768"])
    assert "in slices along the tokens: no, up to 64 slices." in capsys.readouterr().out


def test_a_slice_is_counted_as_a_share_of_the_sequence() -> None:
    """Keys and values of a group of heads, and the unpacked weight, which is not shared."""
    config, tokens = cards.MODELS["Llama 3.2 1B"], 4096
    profile = cards.sliced_profile(config, ["RTX 3060"], tokens, Lora())
    slices = profile.model.slices
    assert slices is not None
    assert slices.key_value_bytes == 2 * 2 * tokens * 8 * 64
    assert slices.attended_bytes == 4 * slices.key_value_bytes
    assert slices.pair_work == 16 * 2 * 2048
    layer = cards.count_layer(config, tokens, Lora())
    assert slices.weight_work == 16 * layer.multiplications / (2 * tokens)
    found = {t.micro_batch_size: t for t in profile.devices[1].timings if not t.recompute}
    assert sorted(found) == [64, tokens]
    assert found[tokens].peak_bytes == layer.peak_bytes
    assert found[64].saved_bytes == pytest.approx(layer.kept_bytes / 64, abs=1)
    assert found[64].peak_bytes - found[64].saved_bytes == layer.largest_bytes


def test_the_page_on_memory_has_the_printed_items(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs" / "memory.md").read_text("utf-8")
    columns = (
        ("Llama 3.3 70B", "RTX 3090+RTX 4090", "512"),
        ("Qwen3 32B", "RTX 3090", "1024"),
        ("Llama 3.1 8B", "RTX 3090+RTX 3060", "32768"),
    )
    found = []
    for model, wish, tokens in columns:
        cards.main(["--bytes", "--model", model, "--cards", wish, "--tokens", tokens])
        lines = capsys.readouterr().out.splitlines()
        found.append([line.strip().split(": ") for line in lines if line.startswith("  ")])
    for row in zip(*found, strict=True):
        assert f"| {row[0][0]} | {' | '.join(size for _, size in row)} |" in page


# Offline.


def test_the_instructions_are_distinct_and_about_other_modules_than_the_corpus(
    tmp_path: Path,
) -> None:
    to_read, to_ask_about = halve(read_documentation())
    path = tmp_path / "made" / "stdlib.jsonl"
    write_instructions(to_ask_about, path)
    pairs = [row for _, row in read_rows(str(path))]

    assert len(pairs) > 1000
    assert len({(pair["instruction"], pair["input"]) for pair in pairs}) == len(pairs)
    assert len({pair["instruction"] for pair in pairs}) > 8
    assert all(pair["input"] and pair["output"] for pair in pairs)
    sentences = {first_sentence(thing.opening) for thing in to_ask_about}
    described = [pair for pair in pairs if pair["instruction"].startswith("Describe")]
    assert described
    assert all(pair["output"] in sentences for pair in described)
    packages = [{thing.name.split(".")[0] for thing in half} for half in (to_read, to_ask_about)]
    assert packages[0].isdisjoint(packages[1])


def test_every_question_is_answered_by_the_documentation() -> None:
    source = 'class Box:\n def put(self, thing, /, *rest, at=0, **how):\n  "Put it in. Now."'
    (put,) = walk(ast.parse(source), "boxes", "module")
    assert {row["output"] for row in rows_about(put, "Put it in.")} == {
        "Put it in.",
        "boxes.Box.put",
        "It takes thing and, optionally, at, *rest and **how.",
    }


def test_the_small_model_is_made_whole(tmp_path: Path) -> None:
    settings = SmallModel(320, 64, 64, NUM_LAYERS, block_tokens=16, epochs=1)
    make_small_model([row["output"] for row in ALPACA] * 4, tmp_path / "model", settings)
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert made.config.num_hidden_layers == NUM_LAYERS
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token_id == 1
