"""The QLoRA example: what counts as a label, what the pairs say, and a run in miniature."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import PeftModel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

FOLDER = Path(__file__).parents[2] / "examples" / "qlora_alpaca"
ROWS = [
    {"instruction": f"Say {word}.", "input": "", "output": f"It is {word}."}
    for word in ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
]
NUM_LAYERS = 2


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The example's modules, which know each other by plain names that others use as well."""
    names = [path.stem for path in FOLDER.glob("*.py")]
    hidden = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(FOLDER))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(FOLDER))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


@pytest.fixture(scope="module")
def miniature(example: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that is made in a moment."""
    folder = tmp_path_factory.mktemp("made") / "model"
    settings = example.small_model.SmallModel(
        vocabulary_size=320,
        hidden_size=64,
        intermediate_size=64,
        num_layers=NUM_LAYERS,
        block_tokens=16,
        epochs=1,
    )
    texts = [f"{row['instruction']} {row['output']}" for row in ROWS]
    example.small_model.make_small_model(texts, folder, settings)
    return folder


@pytest.fixture(scope="module")
def tokenizer(miniature: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(miniature)


def test_the_template_names_the_input_only_if_there_is_one(example: SimpleNamespace) -> None:
    assert example.data.Pair("Add.", "1, 2", "3").prompt == (
        "Below is an instruction that describes a task, paired with an input that provides "
        "further context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n### Response:\n"
    )
    assert example.data.Pair("Greet {me}.", "", "Hello.").prompt == (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nGreet {me}.\n\n### Response:\n"
    )


def test_only_the_answer_and_its_end_are_labels(
    example: SimpleNamespace, tokenizer: PreTrainedTokenizerBase
) -> None:
    short = example.data.Pair("Say one.", "", "It is one.")
    long = example.data.Pair("Say two.", "in words, please", "It is two.")
    items = example.data.encode_pairs([short, long], tokenizer, max_tokens=512)
    # Padded with the token that ends an answer, as tokenizers without a padding token are.
    batch = example.data.collate(items, tokenizer.eos_token_id)

    for pair, ids, mask, labels in zip(
        (short, long), batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True
    ):
        prompt = tokenizer(pair.prompt).input_ids
        answer = [*tokenizer(pair.output).input_ids, tokenizer.eos_token_id]
        padding = len(ids) - len(prompt) - len(answer)
        assert ids.tolist() == prompt + answer + [tokenizer.eos_token_id] * padding
        assert labels.tolist() == [-100] * len(prompt) + answer + [-100] * padding
        assert mask.tolist() == [1] * (len(prompt) + len(answer)) + [0] * padding
    assert batch["input_ids"].shape[1] == max(len(item.token_ids) for item in items)
    assert (batch["attention_mask"] == 0).any()


def test_a_long_answer_is_cut_and_a_long_prompt_is_left_out(
    example: SimpleNamespace, tokenizer: PreTrainedTokenizerBase
) -> None:
    pair = example.data.Pair("Count.", "", "one two three four five")
    num_prompt_tokens = len(tokenizer(pair.prompt).input_ids)
    (item,) = example.data.encode_pairs([pair], tokenizer, max_tokens=num_prompt_tokens + 1)
    assert len(item.token_ids) == num_prompt_tokens + 1
    assert not example.data.encode_pairs([pair], tokenizer, max_tokens=num_prompt_tokens)


def test_the_split_depends_on_the_seed_alone(
    example: SimpleNamespace, tokenizer: PreTrainedTokenizerBase
) -> None:
    pairs = example.data.check_rows(ROWS, "rows")

    def split(seed: int) -> tuple[list[Any], list[Any]]:
        data = example.data.InstructionData(pairs, tokenizer, 2, 512, seed)
        return data.held_out, data.training

    held_out, training = split(1)
    assert split(1) == (held_out, training)
    assert split(2) != (held_out, training)
    assert len(held_out) == 1
    assert {*held_out, *training} == set(pairs)


def test_too_few_pairs_for_a_batch_are_refused(
    example: SimpleNamespace, tokenizer: PreTrainedTokenizerBase
) -> None:
    pairs = example.data.check_rows(ROWS, "rows")
    data = example.data.InstructionData(pairs, tokenizer, 16, 512, 0)
    with pytest.raises(example.data.DataError, match="9 pairs to train on .* a batch takes 16"):
        data.setup("fit")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"instruction": "Add."}', r"must hold a list of instruction pairs, not \{"),
        ("[]", r"must hold a list of instruction pairs, not \[\]"),
        ('["Add."]', 'Row 0 of .* must be an object with instruction and output, not "Add."'),
        ('[{"instruction": "Add."}]', "Row 0 of .*: output must be text, but it is missing"),
        ('[{"instruction": "Add.", "output": 3}]', "output must be text, but it is 3"),
        ('[{"instruction": "Add.", "input": [1], "output": "1"}]', "input must be text"),
        ("[", "is not JSON"),
    ],
)
def test_a_file_of_another_shape_is_refused(
    example: SimpleNamespace, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "pairs.json"
    path.write_text(text)
    with pytest.raises(example.data.DataError, match=message):
        example.data.load_pairs(str(path))


def test_a_missing_file_and_a_missing_package_are_named(
    example: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(example.data.DataError, match="no file .*pairs.json"):
        example.data.load_pairs(str(tmp_path / "pairs.json"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(example.data.DataError, match="pip install datasets"):
        example.data.load_pairs("tatsu-lab/alpaca")


def test_the_input_may_be_left_out(example: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "pairs.json"
    path.write_text('[{"instruction": "Greet.", "output": "Hello."}]')
    assert example.data.load_pairs(str(path)) == [example.data.Pair("Greet.", "", "Hello.")]


def test_the_instructions_are_distinct_and_about_other_modules_than_the_corpus(
    example: SimpleNamespace, tmp_path: Path
) -> None:
    to_read, to_ask_about = example.documentation.halve(example.documentation.read_documentation())
    path = tmp_path / "made" / "pairs.json"
    example.instructions.write_instructions(to_ask_about, path)
    pairs = example.data.load_pairs(str(path))

    assert len(pairs) > 1000
    assert len({(pair.instruction, pair.input) for pair in pairs}) == len(pairs)
    assert len({pair.instruction for pair in pairs}) > 8
    assert all(pair.input and pair.output for pair in pairs)
    sentences = {example.instructions.first_sentence(thing.opening) for thing in to_ask_about}
    described = [pair for pair in pairs if pair.instruction.startswith("Describe")]
    assert described
    assert all(pair.output in sentences for pair in described)
    packages = [{thing.name.split(".")[0] for thing in half} for half in (to_read, to_ask_about)]
    assert packages[0].isdisjoint(packages[1])


def test_every_question_is_answered_by_the_documentation(example: SimpleNamespace) -> None:
    source = 'class Box:\n def put(self, thing, /, *rest, at=0, **how):\n  "Put it in. Now."'
    (put,) = example.documentation.walk(ast.parse(source), "boxes", "module")
    answers = {row["output"] for row in example.instructions.rows_about(put, "Put it in.")}
    assert answers == {
        "Put it in.",
        "boxes.Box.put",
        "It takes thing and, optionally, at, *rest and **how.",
    }


def test_workers_are_a_number_or_addresses(
    example: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    parse = example.options.parse_arguments
    assert parse([]).workers == 2
    assert parse(["--workers", "0"]).workers == 0
    assert parse(["--workers", "a:1", "b:2"]).workers == ["a:1", "b:2"]
    with pytest.raises(SystemExit):
        parse(["--workers", "2", "a:1"])
    assert "not 2 a:1" in capsys.readouterr().err


def test_validation_leaves_the_gradients_of_the_4_bit_model_alone(
    example: SimpleNamespace, miniature: Path
) -> None:
    torch.manual_seed(0)
    model = example.loading.load_here(
        example.loading.ModelChoice(str(miniature)), torch.device("cpu")
    )
    layers = [layer for layer in model.modules() if isinstance(layer, Linear4bit)]
    assert len(layers) == 7 * NUM_LAYERS
    # Processors without AVX512-BF16 show no harm; the switch is seen on all of them.
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers)
    trained = {name: item for name, item in model.named_parameters() if item.requires_grad}
    assert len(trained) == 2 * 4 * NUM_LAYERS
    assert all("lora_" in name for name in trained)

    token_ids = torch.arange(2, 18).view(2, 8)

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        model(input_ids=token_ids, labels=token_ids).loss.backward()
        return [parameter.grad for parameter in trained.values()]

    before = gradients()
    with torch.no_grad():
        model.eval()(input_ids=token_ids)
    model.train()
    assert all(map(torch.equal, before, gradients()))


def test_a_checkpoint_in_4_bits_keeps_its_own_quantisation(
    example: SimpleNamespace, miniature: Path, tmp_path: Path
) -> None:
    choice = example.loading.ModelChoice(str(miniature))
    example.loading.load_base(choice, torch.device("cpu")).save_pretrained(tmp_path)

    quantized = example.loading.ModelChoice(str(tmp_path))
    assert choice.quantization_config is not None
    assert quantized.quantization_config is None
    model = example.loading.load_here(quantized, torch.device("cpu"))
    assert sum(isinstance(layer, Linear4bit) for layer in model.modules()) == 7 * NUM_LAYERS


def test_no_quantize_keeps_the_weights(example: SimpleNamespace, miniature: Path) -> None:
    choice = example.loading.ModelChoice(str(miniature), quantize=False)
    model = example.loading.load_here(choice, torch.device("cpu"))
    assert not any(isinstance(layer, Linear4bit) for layer in model.modules())


@pytest.mark.parametrize("on_workers", [False, True], ids=["plain", "workers"])
def test_a_run_ends_with_a_sample_and_the_whole_adapter(
    example: SimpleNamespace,
    miniature: Path,
    tmp_path: Path,
    workers: list[str],
    on_workers: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(example.train, "keep_quiet", lambda: None)
    pairs = tmp_path / "pairs.json"
    pairs.write_text(json.dumps(ROWS))
    where = " ".join(workers[:2]) if on_workers else "0"
    words = f"--workers {where} --plan even --max-steps 2 --batch-size 2 --accumulate 2"
    words += f" --output {tmp_path}"
    example.train.main(
        [*words.split(), "--model", str(miniature), "--data", str(pairs), "--max-length", "512"]
    )

    printed = capsys.readouterr().out
    assert "validation   step 0: loss" in printed
    assert "validation   step 2: loss" in printed
    assert "  before   " in printed
    assert "  after    " in printed
    choice = example.loading.ModelChoice(str(miniature))
    model = example.loading.load_trained(choice, tmp_path / "adapter", torch.device("cpu"))
    assert isinstance(model, PeftModel)
    learnt = [weight for name, weight in model.named_parameters() if "lora_B" in name]
    assert len(learnt) == 4 * NUM_LAYERS
    assert all(weight.any() for weight in learnt)
