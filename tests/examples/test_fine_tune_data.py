"""The data of the fine-tuning example: rows, labels, packs, and a sentence for what is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import GatedRepoError

from examples.fine_tune.data import FineTuneData, LikeLengths, SeededOrder
from examples.fine_tune.hub import HubError
from examples.fine_tune.labels import Encoder, Sample, encoder_of, form_of, sample_of
from examples.fine_tune.packing import FAMILIES, collate_packs, collate_samples, pack
from examples.fine_tune.rows import DataError, read_rows

from ..families import CONFIGS, tiny_model
from .small_chat import ALPACA, CHATML, MARKED, THINKING, make_model, make_tokenizer

TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Say one."},
    {"role": "assistant", "content": "It is one."},
    {"role": "user", "content": "Say two."},
    {"role": "assistant", "content": "It is two."},
]
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:\n"
)


def write_rows(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return str(path)


def pieces(sample: Sample, tokenizer: Any) -> list[tuple[str, bool]]:
    """The sample's text in pieces, each with whether it is learnt."""
    found: list[tuple[list[int], bool]] = []
    for token, label in zip(sample.token_ids, sample.labels, strict=True):
        assert label in (-100, token)
        if not found or found[-1][1] != (label != -100):
            found.append(([], label != -100))
        found[-1][0].append(token)
    return [(tokenizer.decode(ids), learnt) for ids, learnt in found]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("made") / "model"))


# Labels.


def test_alpaca_learns_the_output_and_its_end() -> None:
    tokenizer = make_tokenizer()
    encoder = encoder_of("alpaca", tokenizer)
    row = {"instruction": "Say one.", "output": "It is one."}
    prompt = WITHOUT_INPUT.format("Say one.")
    assert pieces(encoder.encode(row, "here"), tokenizer) == [
        (prompt, False),
        ("It is one.<end>", True),
    ]
    assert tokenizer.decode(encoder.encode_prompt("Say one.")) == prompt
    asked, learnt = pieces(encoder.encode({**row, "input": "in words"}, "here"), tokenizer)
    assert asked[0] == (
        "Below is an instruction that describes a task, paired with an input that provides "
        "further context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSay one.\n\n### Input:\nin words\n\n### Response:\n"
    )
    assert learnt == ("It is one.<end>", True)


def test_completion_learns_all_but_the_first_token() -> None:
    tokenizer = make_tokenizer()
    sample = encoder_of("completion", tokenizer).encode({"text": "It is one."}, "here")
    token_ids = [*tokenizer("It is one.").input_ids, tokenizer.eos_token_id]
    assert sample == Sample(token_ids, [-100, *token_ids[1:]])


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "marks"])
def test_chat_learns_what_the_assistant_says(template: str) -> None:
    tokenizer = make_tokenizer(template)
    sample = encoder_of("chat", tokenizer).encode({"messages": TALK}, "here")
    begin = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nSay one.<|im_end|>\n"
    assert pieces(sample, tokenizer) == [
        (f"{begin}<|im_start|>assistant\n", False),
        ("It is one.<|im_end|>", True),
        ("\n<|im_start|>user\nSay two.<|im_end|>\n<|im_start|>assistant\n", False),
        ("It is two.<|im_end|>", True),
        ("\n", False),
    ]


@pytest.mark.parametrize("template", [CHATML, MARKED, THINKING], ids=["prefixes", "marks", "think"])
def test_the_last_answer_alone(template: str) -> None:
    tokenizer = make_tokenizer(template)
    encoder = encoder_of("chat", tokenizer, answers="last")
    learnt = [
        text
        for text, is_learnt in pieces(encoder.encode({"messages": TALK}, "here"), tokenizer)
        if is_learnt
    ]
    thoughts = "<think></think>" if template == THINKING else ""
    assert learnt == [f"{thoughts}It is two.<|im_end|>"]


def test_a_template_that_hides_its_answers_is_named() -> None:
    encoder = encoder_of("chat", make_tokenizer(THINKING))
    with pytest.raises(DataError, match=r"my.jsonl, line 3: the chat template of tiny/chat has no"):
        encoder.encode({"messages": TALK}, "my.jsonl, line 3")


def test_a_template_that_marks_nothing_is_named() -> None:
    marks = "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    encoder = encoder_of("chat", make_tokenizer(CHATML + marks))
    with pytest.raises(DataError, match="of tiny/chat marks nothing as the assistant's"):
        encoder.encode({"messages": TALK}, "here")


def test_what_a_template_refuses_is_told() -> None:
    encoder = encoder_of("chat", make_tokenizer("{{ raise_exception('No system, please') }}"))
    with pytest.raises(DataError, match="of tiny/chat refuses the messages: No system, please"):
        encoder.encode({"messages": TALK}, "here")


def test_alpacas_fields_as_a_chat() -> None:
    tokenizer = make_tokenizer()
    row = {"instruction": "Say one.", "input": "in words", "output": "It is one."}
    sample = encoder_of("alpaca_chat", tokenizer).encode(row, "here")
    assert pieces(sample, tokenizer) == [
        ("<|im_start|>user\nSay one.\n\nin words<|im_end|>\n<|im_start|>assistant\n", False),
        ("It is one.<|im_end|>", True),
        ("\n", False),
    ]


def test_templates_of_trl_have_marks() -> None:
    trl = pytest.importorskip("trl")
    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer = make_tokenizer((templates / "qwen3.jinja").read_text())
    with pytest.raises(DataError, match=r"no \{% generation %\} marks"):
        encoder_of("chat", tokenizer).encode({"messages": TALK}, "here")

    from examples.fine_tune.data import template_of_trl

    encoder = encoder_of("chat", tokenizer, template=template_of_trl(tokenizer))
    learnt = [
        t
        for t, is_learnt in pieces(encoder.encode({"messages": TALK}, "x"), tokenizer)
        if is_learnt
    ]
    assert [text.split("</think>")[-1].strip() for text in learnt] == [
        "It is one.<|im_end|>",
        "It is two.<|im_end|>",
    ]
    with pytest.raises(DataError, match="TRL has no chat template with marks for tiny/chat"):
        template_of_trl(make_tokenizer(THINKING))


@pytest.mark.parametrize(
    ("form", "row", "message"),
    [
        ("alpaca", {"instruction": "Add."}, "here has no field output; its fields are instr"),
        ("alpaca", {"instruction": "Add.", "output": 3}, "the field output must be text, not 3"),
        ("alpaca", {"instruction": 1, "output": ""}, "the field instruction must be text, not 1"),
        ("completion", {}, "has no field text; its fields are none"),
        ("chat", {"text": ""}, "has no field messages"),
        ("chat", {"messages": "hello"}, "the field messages is not JSON"),
        ("chat", {"messages": [{"from": "gpt"}]}, "must be a list of objects with role and con"),
        ("chat", {"messages": TALK[:2]}, "the assistant says nothing .* speak: system, user"),
    ],
)
def test_a_row_of_another_form_is_refused(form: Any, row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        encoder_of(form, make_tokenizer()).encode(row, "here")


def test_a_tokenizer_without_a_chat_template_is_named() -> None:
    with pytest.raises(DataError, match="tokenizer of tiny/chat has no chat template"):
        encoder_of("chat", make_tokenizer(None))


def test_the_first_row_shows_the_form() -> None:
    assert form_of({"messages": []}, {}, "here") == "chat"
    assert form_of({"instruction": "", "text": ""}, {}, "here") == "alpaca"
    assert form_of({"question": ""}, {"instruction": "question"}, "here") == "alpaca"
    assert form_of({"text": ""}, {}, "here") == "completion"
    with pytest.raises(DataError, match=r"here has the fields question, and none of messages"):
        form_of({"question": ""}, {}, "here")


# Rows.


def test_each_format_of_files_is_read(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Say, please.", "output": "It is\none."},
        {"instruction": "", "output": "x"},
    ]
    write_rows(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows))
    (tmp_path / "c.csv").write_text('instruction,output\n"Say, please.","It is\none."\n,x\n')
    for name in ("a.jsonl", "b.json", "c.csv"):
        assert [row for _, row in read_rows(str(tmp_path / name))] == rows
    assert read_rows(str(tmp_path / "a.jsonl"))[1][0].endswith("a.jsonl, line 2")


def test_a_parquet_file_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": TALK}, {"messages": TALK}]), path)
    assert [row for _, row in read_rows(str(path))] == [{"messages": TALK}] * 2
    path.write_bytes(b"no table")
    with pytest.raises(DataError, match="a.parquet is not a Parquet file"):
        read_rows(str(path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            '{"text": "a"}\n\n{"text": \n',
            r"a.jsonl, line 3 is not JSON: Expecting value",
        ),
        ("a.jsonl", '["text"]\n', r"a.jsonl, line 1 must be an object with named fields, not '\["),
        ("a.jsonl", "\n", "a.jsonl is empty"),
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.json", '{"text": "a"}\n{"text": "b"}', "a.json is not JSON: Extra data"),
        ("a.json", '{"text": "a"}', "a.json must hold a list of objects.*end with .jsonl"),
        ("a.csv", "text,more\na\n", "a.csv, line 2 has another number of fields .* text, more"),
        ("a.csv", "text\na,b\n", "a.csv, line 2 has another number of fields"),
        ("a.txt", "a", "its name must end with .jsonl, .json, .csv, .parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read_rows(str(tmp_path / name))


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"text": "é"}'.encode("latin-1"))
    with pytest.raises(DataError, match="is not UTF-8 text: invalid continuation byte at byte 10"):
        read_rows(str(tmp_path / "a.jsonl"))


def test_a_missing_file_and_a_missing_package_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="There is no file .*my.jsonl"):
        read_rows(str(tmp_path / "my.jsonl"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"package datasets: pip install 'lightning-hetero\[fine-"):
        read_rows("tatsu-lab/alpaca")


def gated(*_args: Any, **_options: Any) -> None:
    """What transformers and datasets raise for a gated repository."""
    try:
        raise GatedRepoError.__new__(GatedRepoError)
    except GatedRepoError as error:
        raise OSError("You are trying to access a gated repo.") from error


def test_a_gated_model_and_data_set_name_the_login(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", gated)
    path = write_rows(tmp_path / "my.jsonl", ALPACA)
    with pytest.raises(HubError, match=r"model big/one is gated.*/big/one,.*: hf auth login"):
        FineTuneData("big/one", path).setup("fit")

    class Datasets:
        load_dataset = staticmethod(gated)

    monkeypatch.setitem(sys.modules, "datasets", Datasets)  # type: ignore[arg-type]
    with pytest.raises(HubError, match=r"data set big/talk is gated.*datasets/big/talk"):
        read_rows("big/talk")


# The data module.


def test_long_samples_are_cut_or_left_out_and_counted(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = make_tokenizer()
    long = {"instruction": "Say one.", "output": "one " * 40}
    asked = {"instruction": "two " * 60, "output": "It is two."}
    path = write_rows(tmp_path / "my.jsonl", [*ALPACA, long, asked])
    limit = len(encoder_of("alpaca", tokenizer).encode(ALPACA[2], "").token_ids) + 4

    data = FineTuneData(model, path, max_tokens=limit, batch_size=2)
    data.setup("fit")
    samples = [*data.training, *data.held_out]
    assert max(len(sample.token_ids) for sample in samples) == limit
    assert len(samples) == 11
    told = capsys.readouterr().out
    assert f"Longer than {limit} tokens: 1 cut, 0 left out. Left out without a token to " in told
    assert told.endswith("to learn: 1.\n")

    data = FineTuneData(model, path, max_tokens=limit, batch_size=2, too_long="leave_out")
    data.setup("fit")
    assert len(data.training) + len(data.held_out) == 10
    assert f"than {limit} tokens: 0 cut, 2 left out." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 8}, "None of the 10 rows of .* has a token to learn within 8 tokens; 10 r"),
        ({"max_tokens": 4096}, "`data.max_tokens` is 4096, and .* takes sequences of 2 to 512"),
        ({"batch_size": 16}, "gives 9 samples to train on, and a batch takes 16"),
        ({"validation": 1.5}, "`data.validation` is 1.5; give a part between 0 and 1"),
        ({"chat_template": "none.jinja"}, "There is no file none.jinja"),
        ({"form": "chat"}, "my.jsonl, line 1 has no field messages"),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused(
    model: str, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = write_rows(tmp_path / "my.jsonl", ALPACA)
    given: dict[str, Any] = {"max_tokens": 256, **options}
    with pytest.raises(DataError, match=message):
        FineTuneData(model, path, **given).setup("fit")


def test_the_split_depends_on_the_seed_alone(model: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "my.jsonl", ALPACA)

    def split(seed: int) -> tuple[list[Sample], list[Sample]]:
        data = FineTuneData(model, path, validation=0.2, max_tokens=256, batch_size=2, seed=seed)
        data.setup("fit")
        return data.held_out, data.training

    held_out, training = split(1)
    assert split(1) == (held_out, training)
    assert split(2) != (held_out, training)
    assert (len(held_out), len(training)) == (2, 8)


def test_validation_may_have_a_file_of_its_own(model: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "my.jsonl", ALPACA)
    other = write_rows(tmp_path / "held_out.jsonl", ALPACA[:3])
    data = FineTuneData(model, path, validation=other, max_tokens=256, batch_size=2)
    data.setup("fit")
    assert (len(data.held_out), len(data.training)) == (3, 10)


def test_each_epoch_has_its_order() -> None:
    order = SeededOrder(20, seed=3)
    first = list(order)
    assert sorted(first) == list(range(20))
    order.set_epoch(1)
    assert list(order) != first
    order.set_epoch(0)
    assert list(order) == first


def test_a_window_has_samples_of_like_length() -> None:
    lengths = [int(each) for each in torch.randint(1, 500, (1000,))]
    order = LikeLengths(lengths, per_window=8, seed=3)
    first = list(order)
    assert sorted(first) == list(range(1000))
    assert list(order) == first
    order.set_epoch(1)
    assert list(order) != first

    def spread(indices: Sequence[int]) -> float:
        starts = range(0, len(indices), 8)
        found = [[lengths[index] for index in indices[start : start + 8]] for start in starts]
        return sum(max(each) - min(each) for each in found) / len(found)

    assert spread(first) < spread(list(SeededOrder(1000, 3))) / 5


# Packs.


def test_packs_are_full_and_hold_each_sample_once() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 65, (500,), generator=generator).tolist()
    packs = pack(lengths, 64)
    assert sorted(index for each in packs for index in each) == list(range(500))
    sums = [sum(lengths[index] for index in each) for each in packs]
    assert max(sums) <= 64
    assert sum(sums) / (64 * len(sums)) > 0.97
    assert pack([3, 5, 2], 5) == [[1], [0, 2]]


def test_a_pack_begins_positions_anew_and_padding_is_no_sample() -> None:
    one, two = sample_of([5, 6, 7], [False, True, True]), sample_of([8, 9], [True, True])
    batch = collate_packs([[one, two], [two]], padding_id=0)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [8, 9, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9], [-100, 9, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
    assert set(batch) == {"input_ids", "labels", "position_ids"}


def test_padding_with_the_end_is_no_label() -> None:
    one, two = sample_of([5, 6, 1], [False, True, True]), sample_of([8, 1], [False, True])
    batch = collate_samples([one, two], padding_id=1)
    assert batch["input_ids"].tolist() == [[5, 6, 1], [8, 1, 1]]
    assert batch["labels"].tolist() == [[-100, 6, 1], [-100, 1, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_only_families_with_an_equal_packed_loss_are_known(family: str) -> None:
    model = tiny_model(family, use_cache=False, output_router_logits=False).train()
    generator = torch.Generator().manual_seed(1)
    samples = [
        sample_of(torch.randint(3, 20, (length,), generator=generator).tolist(), [True] * length)
        for length in (9, 7, 12, 3, 5)
    ]
    with torch.no_grad():
        packed = model(**collate_packs([samples[:2], samples[2:]], 0)).loss.item()
        alone = model(**collate_samples(samples, 0)).loss.item()
    assert (packed == pytest.approx(alone, rel=1e-6)) == (model.config.model_type in FAMILIES)


def test_packing_is_refused_for_other_families(tmp_path: Path) -> None:
    tiny_model("opt").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    path = write_rows(tmp_path / "my.jsonl", ALPACA)
    with pytest.raises(DataError, match="Models of the type opt are not known to keep packed"):
        FineTuneData(str(tmp_path), path, packing=True).setup("fit")


def test_prompts_of_samples_end_before_the_answer() -> None:
    tokenizer = make_tokenizer()
    encoder: Encoder = encoder_of("chat", tokenizer)
    sample = encoder.encode({"messages": TALK[1:3]}, "here")
    assert sample.prompt == encoder.encode_prompt("Say one.")
    text = encoder_of("completion", tokenizer).encode({"text": "one two three four"}, "here")
    assert sample.prompt == sample.token_ids[: len(sample.prompt)]
    assert len(text.prompt) == len(text.token_ids) // 4
