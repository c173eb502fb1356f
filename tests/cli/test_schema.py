"""The schemas: what the classes read passes, what they refuse as a key, type or bound does not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_hetero import cli
from lightning_hetero.cli.schema import schema
from lightning_hetero.errors import HeteroError
from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.planner.profile import Profile

from ..pages import DOCS, ROOT, blocks
from ..planner.profiles import device, profile

jsonschema = pytest.importorskip("jsonschema")

EXAMPLES = [
    path
    for path in sorted(ROOT.glob("examples/**/*.yaml"))
    if "stages" in yaml.safe_load(path.read_text("utf-8"))
]


class Editor(yaml.SafeLoader):
    """Reads 1.1e8 as a number, as YAML 1.2 and so editors do."""


Editor.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), [*"0123456789"]
)
SHOWN = [
    yaml.load(block, Editor)  # noqa: S506 - a safe loader
    for page in sorted(DOCS.rglob("*.md"))
    for block in blocks(page, "yaml")
]
FULL = Plan(
    [
        StagePlan(["a", "b"], (0, 2), shares=[2, 1], optimizer="split", compile=True),
        StagePlan(["c"], (2, 3), True, "float16", "int8", "bfloat16"),
        StagePlan(["coordinator"], (3, 4)),
    ],
    in_flight=3,
)
PROFILE = profile(2, [device("a", 1.0, 2.0)])
STAGES = [{"workers": ["a"], "layers": [0, 4]}]


def is_valid(content: Any, kind: Any = "plan") -> bool:
    made = schema(kind)
    validator = jsonschema.Draft7Validator
    validator.check_schema(made)
    return bool(validator(made).is_valid(content))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_plans_of_the_examples_are_valid(path: Path) -> None:
    assert is_valid(yaml.safe_load(path.read_text("utf-8")))


def test_there_are_examples() -> None:
    assert EXAMPLES
    assert sum("stages" in each for each in SHOWN) >= 5
    assert sum("devices" in each for each in SHOWN) >= 1


def test_plans_and_profiles_of_the_pages_are_valid() -> None:
    for content in SHOWN:
        if "stages" in content:
            assert is_valid(content), content
        elif "devices" in content:
            assert is_valid(content, "profile"), content


def test_what_the_classes_write_is_valid() -> None:
    assert is_valid(yaml.safe_load(FULL.as_yaml()))
    assert is_valid(yaml.safe_load(PROFILE.as_yaml()), "profile")


@pytest.mark.parametrize(
    "content",
    [
        {"stages": STAGES, "microbatches": 4},
        {"stages": STAGES, "micro_batches": 0},
        {"stages": STAGES, "micro_batches": "many"},
        {"stages": STAGES, "in_flight": 0},
        {"micro_batches": 4},
        {"stages": [{"workers": "a", "layers": [0, 4]}]},
        {"stages": [{"workers": [], "layers": [0, 4]}]},
        {"stages": [{"workers": ["a", "a"], "layers": [0, 4]}]},
        {"stages": [{"workers": ["a"], "layers": [0]}]},
        {"stages": [{"workers": ["a"], "layers": [0, 2, 4]}]},
        {"stages": [{"workers": ["a"], "layers": [0, 4], "dtype": "int8"}]},
        {"stages": [{"workers": ["a"], "layers": [0, 4], "recompute": "yes"}]},
        {"stages": [{"workers": ["a"], "layers": [0, 4], "shares": [-1]}]},
        {"stages": [{"layers": [0, 4]}]},
    ],
)
def test_what_is_refused_as_a_plan_is_not_valid(content: Any) -> None:
    with pytest.raises(HeteroError):
        Plan.from_dict(content).check(4, ["a"])
    assert not is_valid(content)


def changed(place: list[Any], value: Any) -> Any:
    content = json.loads(json.dumps(yaml.safe_load(PROFILE.as_yaml())))
    *path, key = place
    inner = content
    for step in path:
        inner = inner[step]
    if value is None:
        del inner[key]
    else:
        inner[key] = value
    return content


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (["devices", 0, "memory_bytes"], "16 apples"),
        (["devices", 0, "memory_bytes"], 0),
        (["devices", 0, "memory"], 5),
        (["model", "parts", 0, "gradient_bytes"], None),
        (["model", "dtype"], "int4"),
        (["model", "layers"], []),
        (["devices", 0, "timings", 0, "forward_seconds"], -1.0),
        (["version"], None),
    ],
)
def test_what_is_refused_as_a_profile_is_not_valid(place: list[Any], value: Any) -> None:
    content = changed(place, value)
    with pytest.raises(HeteroError):
        Profile.from_dict(content)
    assert not is_valid(content, "profile")


def test_sizes_may_be_texts() -> None:
    content = changed(["devices", 0, "memory_bytes"], "16 GiB")
    assert Profile.from_dict(content).devices[0].memory_bytes == 16 * 2**30
    assert is_valid(content, "profile")


@pytest.mark.parametrize("kind", ["plan", "profile"])
def test_editors_show_what_almost_every_key_means(kind: Any) -> None:
    keys = [
        (name, key, content)
        for name, its in schema(kind)["$defs"].items()
        for key, content in its["properties"].items()
    ]
    silent = {(name, key) for name, key, content in keys if "description" not in content}
    seconds_and_bytes = {"latency_seconds", "bytes_per_second"}
    assert {key for _, key in silent} <= seconds_and_bytes


def test_the_command_writes_what_an_editor_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*words: str) -> None:
        monkeypatch.setattr("sys.argv", ["lightning-hetero", *words])
        cli.main()

    path = tmp_path / "plan.schema.json"
    command("schema", "plan", "-o", str(path))
    assert f"# yaml-language-server: $schema={path}" in capsys.readouterr().out
    command("schema", "plan")
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text()) == schema("plan")
