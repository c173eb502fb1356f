"""The page of errors: every error of the package is on it, each sentence with its own anchor, and
a test follows the remedy that it names."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.generate.errors import entries, page_of
from docs.generate.sentences import Call, Module, Package, package
from lightning_hetero import errors

from ..remedies import Remedy, marks, names_a_remedy, remedies

PACKAGE = Path(errors.__file__).parent
NAMES = [name for name, _ in inspect.getmembers(errors, inspect.isclass)]

# What hands on the words of another error, or of another process.
HANDED_ON = {
    "str(error)",
    "str(loss)",
    "str(self.loss)",
    "f'{error} {advice(address)}'",
    "f'{reason} {why_not}'",
    "content.message.reason",
    "*facts",
    "self._alone",
    "opened.reason",
    "rest",
    "traceback",
    "why",
    "worker.row.why",
}


@pytest.fixture(scope="module")
def written() -> Package:
    return package()


@pytest.fixture(scope="module")
def calls(written: Package) -> list[Call]:
    return [*written.calls()]


@pytest.fixture(scope="module")
def said(written: Package) -> list[Remedy]:
    return remedies(written)


@pytest.fixture(scope="module")
def text(calls: list[Call]) -> str:
    return page_of(entries(calls))


def said_in_code() -> Iterator[tuple[str, str]]:
    """The place of every error of `errors.py` that is made of a string, and the string's words
    until the first value is filled in."""
    made = re.compile(rf"\b(?:{'|'.join(NAMES)}|error_class)\($")
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text("utf-8")
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            first = node.args[0]
            if made.search(f"{name}(") and isinstance(first, ast.Constant | ast.JoinedStr):
                start = first if isinstance(first, ast.Constant) else first.values[0]
                if isinstance(start, ast.Constant) and isinstance(start.value, str):
                    yield f"{path.relative_to(PACKAGE)}:{node.lineno}", start.value


def test_every_sentence_of_the_code_is_an_entry(calls: list[Call]) -> None:
    found = [entry.text for entry in entries(calls)]
    said = [*said_in_code()]
    assert len(said) > 300
    missing = [
        (place, start)
        for place, start in said
        if not any(text.startswith(" ".join(start.split())) for text in found)
    ]
    assert missing == []


def test_every_error_has_a_sentence_or_hands_one_on(calls: list[Call]) -> None:
    silent = {call.place: call.argument for call in calls if not call.texts}
    unknown = {place: said for place, said in silent.items() if said not in HANDED_ON}
    assert unknown == {}, "Let the call name its sentence, or add its argument to HANDED_ON."


def test_every_entry_has_one_anchor_on_the_page(calls: list[Call], text: str) -> None:
    anchors = re.findall(r"\{ #([a-z0-9-]+) \}", text)
    assert len(anchors) == len({*anchors})
    assert anchors != []
    assert {*anchors} == {entry.anchor for entry in entries(calls)}


def test_every_class_that_is_raised_has_its_section(calls: list[Call], text: str) -> None:
    sections = re.findall(r"^## (\w+)$", text, re.M)
    assert {call.kind for call in calls if call.texts and call.kind in NAMES} <= {*sections}


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        ("raise PlanError('It is wrong.')", ["It is wrong."]),
        ("raise PlanError(f'It is {value}.')", ["It is …."]),
        ("raise PlanError('One half, ' + 'and the other.')", ["One half, and the other."]),
        ("raise PlanError('It is bad.' if x else 'It is worse.')", ["It is bad.", "It is worse."]),
        ("text = f'Two words {n}.'\nraise PlanError(text)", ["Two words …."]),
        ("def why():\n    return 'It is so.'\nraise PlanError(why())", ["It is so."]),
        (
            "A = {'x': 'It is so.', 'y': 'It is not.'}\nraise PlanError(A[k])",
            ["It is so.", "It is not."],
        ),
        ("raise PlanError(f\"It is {'far' if a else 'near'}.\")", ["It is far.", "It is near."]),
        ("def no(text):\n    raise PlanError(text)\nno('It is so.')", ["It is so."]),
        ("SO = 'it is so.'\ndef no(n):\n    raise PlanError(f'Look: {SO}')", ["Look: it is so."]),
        ("raise PlanError(' '.join(['It is so.', *more]))", ["It is so."]),
        ("raise (PlanError if x else HeteroError)('It is so.')", ["It is so."]),
        ("class _Own(PlanError): ...\nraise _Own('It is so.')", ["It is so."]),
        ("raise PlanError(str(error))", []),
    ],
)
def test_a_sentence_is_found_where_it_is_written(
    code: str, texts: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "some.py"
    file.write_text(f"class PlanError(HeteroError): ...\n{code}\n")
    (call,) = Package([Module(file, tmp_path)]).calls()
    assert [*call.texts] == texts


def test_a_warning_is_found_too(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text("logger.warning('%s waits %.1f s; stop it', name, seconds)\n")
    (call,) = Package([Module(file, tmp_path)]).warnings()
    assert call.texts == ("… waits … s; stop it",)


def test_a_test_follows_every_remedy(said: list[Remedy]) -> None:
    words = [words for words, _ in marks()]
    assert [remedy for remedy in said if not remedy.is_followed(words)] == [], (
        "No test follows the remedies of these sentences. Mark one with pytest.mark.follows, as "
        "tests/remedies.py says."
    )


def test_every_mark_has_words_of_a_remedy(said: list[Remedy]) -> None:
    files = [
        (test, words, {remedy.file for remedy in said if words in remedy.text})
        for words, test in marks()
    ]
    assert [(test, words) for test, words, found in files if not found] == []
    # Words that several files say mark sentences that the test has never seen.
    assert [(test, words, found) for test, words, found in files if len(found) > 1] == []


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("It is wrong; set `lr=1`, or call `stop()`.", ["`lr=1`", "`stop()`"]),
        ("Of `f(x)` came 3; use `g`.", []),
        ("It is new; begin with another one.", []),
        ("The key … is …; write `lr`.", []),
        ("Begin with `--name=x`, or --file ….", ["`--name=x`", "--file"]),
        ("One is missing: `lightning-hetero token` makes one.", ["`lightning-hetero token`"]),
        ("It came as `x`.", None),
        ("The step … was expected, and … came.", None),
        ("Stages have no use for it.", None),
    ],
)
def test_a_remedy_is_an_order_or_code(text: str, code: list[str] | None) -> None:
    assert names_a_remedy(text) == (code is not None)
    assert Remedy("", text).code == (code or [])


def test_marks_follow_a_sentence_if_all_of_its_code_is_in_them() -> None:
    remedy = Remedy("", "It is wrong; set `lr=1`, or call `stop()`.")
    assert not remedy.is_followed([])
    assert not remedy.is_followed(["set `lr=1`"])
    assert not remedy.is_followed(["set `lr=1`", "It is wrong"])
    assert remedy.is_followed(["set `lr=1`", "or call `stop()`"])
    assert remedy.is_followed(["set `lr=1`, or call `stop()`"])
    assert Remedy("", "It is wrong; stop.").is_followed(["It is wrong"])
