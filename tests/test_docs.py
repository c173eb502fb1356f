"""The pages: their links lead to files, their code compiles, and messages they quote exist."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_hetero import (
    HeteroPipelineStrategy,
    Joining,
    PipelineProfiler,
    PipelineTimeline,
    RayWorkers,
    Recovery,
    SlurmWorkers,
    SshWorkers,
    StageMonitor,
    errors,
    from_pretrained,
)
from lightning_hetero.callbacks import StageWeightAveraging
from lightning_hetero.plan import Plan, StagePlan
from lightning_hetero.planner import profile

from .pages import ROOT, blocks

PACKAGE = ROOT / "lightning_hetero"
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "changes" / "README.md",
    *sorted(ROOT.glob("examples/*/README.md")),
    *sorted(ROOT.glob("benchmarks/*/README.md")),
]
PLAN_AND_PROFILE = (
    *(Plan, StagePlan, profile.Profile, profile.ModelProfile, profile.Part, profile.DeviceProfile),
    *(profile.Timing, profile.Link, profile.LinkSpeed),
)
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
SYMPTOMS = ROOT / "docs" / "symptoms.md"


def quotes() -> list[str]:
    """The first cells of the tables of troubleshooting, and what the symptoms quote."""
    rows = re.findall(r"^\| (`+)(.*?) ?\1 \| ", TROUBLESHOOTING.read_text("utf-8"), re.M)
    symptoms = re.findall(r"^\*\*\d+\. (.*?)\*\* ", SYMPTOMS.read_text("utf-8"), re.M)
    found = [quote for symptom in symptoms for quote in re.findall(r'"([^"]+)"', symptom)]
    return [*(quote for _, quote in rows), *(quote.rstrip(" ….") for quote in found)]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def literals(node: ast.AST) -> Iterator[str]:
    """The strings of the code; what an f-string fills in is ``…``, and sums are joined."""
    if isinstance(node, ast.expr):
        text = literal(node)
        if text is not None:
            yield text
            return
    for child in ast.iter_child_nodes(node):
        yield from literals(child)


def literal(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = (literal(node.left), literal(node.right))
        if sides != (None, None):
            return "".join("…" if side is None else side for side in sides)
    return None


@pytest.fixture(scope="module")
def said() -> list[str]:
    """All that the package can print: its strings, and the names of its exceptions."""
    trees = [ast.parse(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))]
    exceptions = [name for name, _ in inspect.getmembers(errors, inspect.isclass)]
    return [*exceptions, *(text for tree in trees for text in literals(tree))]


@pytest.mark.parametrize("quote", quotes())
def test_a_quoted_message_exists(quote: str, said: list[str]) -> None:
    assert any(quote in text for text in said)


def test_troubleshooting_quotes_messages() -> None:
    assert len(quotes()) > 50


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", page.read_text("utf-8")):
        target, _, anchor = "".join(link).partition("#")
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_compiles_and_yaml_parses(page: Path) -> None:
    for code in blocks(page, "python"):
        compile(code, str(page), "exec")
    for content in map(yaml.safe_load, blocks(page, "yaml")):
        if "stages" in content:
            Plan.from_dict(content)
        elif "devices" in content:
            profile.Profile.from_dict(content)


def test_every_page_is_in_the_contents() -> None:
    contents = (ROOT / "docs" / "README.md").read_text("utf-8")
    for page in ROOT.glob("docs/**/*.md"):
        place = page.relative_to(ROOT / "docs").as_posix()
        assert place == "README.md" or f"]({place})" in contents


def test_the_readme_begins_with_two_lines_more_in_a_script() -> None:
    (change,) = blocks(ROOT / "README.md", "diff")
    marks = [line[:1] for line in change.splitlines()]
    assert (marks.count("+"), marks.count("-")) == (2, 0)
    compile("\n".join(line[1:] for line in change.splitlines()), "README.md", "exec")


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1500


def test_every_command_is_in_the_contents() -> None:
    contents = (ROOT / "docs" / "README.md").read_text("utf-8")
    names = re.findall(r"^\| `lightning-hetero (\w+)` \|", contents, re.M)
    assert sorted(names) == sorted(path.stem for path in commands())


def commands() -> list[Path]:
    """The files of the commands."""
    files = sorted((PACKAGE / "cli").glob("*.py"))
    return [path for path in files if re.search(r"^def run\(", path.read_text("utf-8"), re.M)]


@pytest.mark.parametrize(
    ("page", "kind"),
    [("plan-and-profile.md", kind) for kind in PLAN_AND_PROFILE]
    + [("strategy.md", HeteroPipelineStrategy), ("strategy.md", PipelineProfiler)]
    + [("recovery.md", Recovery)]
    + [("watch-a-run.md", PipelineTimeline), ("watch-a-run.md", StageMonitor)]
    + [
        ("joining.md", Joining),
        ("launchers.md", SshWorkers),
        ("launchers.md", RayWorkers),
        ("launchers.md", SlurmWorkers),
    ]
    + [("checkpoints.md", StageWeightAveraging), ("models.md", from_pretrained)],
)
def test_every_key_and_argument_has_its_row(page: str, kind: Any) -> None:
    text = (ROOT / "docs" / page).read_text("utf-8")
    cells = re.findall(r"^\| (`[^|]*`) \|", text, re.M)
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    parameters = inspect.signature(kind).parameters.values()
    assert {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} <= named
