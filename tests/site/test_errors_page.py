"""The page of errors: every error of the package is on it, each sentence with its own anchor."""

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
    "self._alone",
    "rest",
    "traceback",
}


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    return [*package().calls()]


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
