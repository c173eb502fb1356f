from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightning_hetero.errors import PlanError
from lightning_hetero.plan import Plan
from lightning_hetero.yaml_file import check_kind, convert, read_yaml

STAGE: dict[str, Any] = {"workers": ["a:1"], "layers": [0, 3]}


class Numbers(msgspec.Struct, forbid_unknown_fields=True):
    """Numbers by name."""

    by_name: dict[str, int]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: c: d\n", "is not YAML. Line 2, column 5, 'b: c: d': mapping values are not"),
        ("a: [1,\n", "is not YAML. The file ends too early, after line 1, 'a: [1,':"),
        ("a: 2024-13-45\n", "is not YAML. month must be in 1..12."),
        ("a: \t- 1\n", "is not YAML. Line 1, column"),
    ],
)
def test_a_fault_of_yaml_is_shown_with_its_place(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(PlanError) as refused:
        read_yaml(path, PlanError)
    assert f"The file {str(path)!r} {expected}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"^There is no file '.*none'; check the name\.$"):
        read_yaml(tmp_path / "none", PlanError)
    with pytest.raises(PlanError, match="cannot be read: Is a directory; name another file"):
        read_yaml(tmp_path, PlanError)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            {"stages": [], "micro_batches": "four"},
            "micro_batches is 'four'; it must be a whole number.",
        ),
        (
            {"stages": [], "in_flight": [1]},
            "in_flight is [1]; it must be a whole number or left out.",
        ),
        (
            {"stages": [{**STAGE, "layers": [0]}]},
            "stages[0].layers is [0]; it must be a list of length 2.",
        ),
        (
            {"stages": [{**STAGE, "layers": [0, "b"]}]},
            "stages[0].layers[1] is 'b'; it must be a whole number.",
        ),
        (
            {"stages": [{**STAGE, "recompute": 1}]},
            "stages[0].recompute is 1; it must be true or false or 'layers'.",
        ),
        ({"stages": [{"layers": [0, 1]}]}, "The key 'workers' is missing in stages[0]; add it."),
        ({}, "The key 'stages' is missing; add it."),
        ([], "The content is []; it must be a mapping of keys to values."),
    ],
)
def test_a_wrong_value_is_named_with_what_it_must_be(content: object, expected: str) -> None:
    with pytest.raises(PlanError) as refused:
        convert(content, Plan, PlanError)
    assert str(refused.value) == expected


def test_a_value_that_is_not_found_is_not_shown() -> None:
    with pytest.raises(PlanError, match=r"^by_name\[\.\.\.\] must be a whole number\.$"):
        convert({"by_name": {"x": "y"}}, Numbers, PlanError)


def test_another_kind_of_file_is_named() -> None:
    check_kind({"stages": []}, "a plan", PlanError)
    check_kind(None, "a plan", PlanError)
    with pytest.raises(PlanError, match="It is a config of LightningCLI; name a plan, which"):
        check_kind({"trainer": {}}, "a plan", PlanError)
