"""What is published: extras, groups, versions and workflows say the same."""

from __future__ import annotations

import re
import sys
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from lightning_hetero.version import __version__

from .pages import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
GROUPS = PROJECT["dependency-groups"]
CHANGELOG = PROJECT["tool"]["towncrier"]
PINNED = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text("utf-8"), re.M)


def names(requirements: list[str]) -> set[str]:
    return {normal(re.split(r"[\[<>=!; ]", each)[0]) for each in requirements}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_users_get_the_extras_that_the_pages_name() -> None:
    known = ["completion", "discovery", "examples", "fine-tune", "lora", "pictures", "ray"]
    assert sorted(EXTRAS) == known
    install = (ROOT / "docs" / "install.md").read_text("utf-8")
    assert sorted(re.findall(r"^\| `([\w-]+)` \| ", install, re.M)) == sorted(EXTRAS)


def test_every_extra_that_the_package_names_exists() -> None:
    named = {
        extra
        for path in (ROOT / "lightning_hetero").rglob("*.py")
        for extra in re.findall(r"lightning-hetero\[(\w+)\]", path.read_text("utf-8"))
    }
    assert named
    assert named <= {*EXTRAS}


def test_developers_have_what_users_may_install() -> None:
    optional = names([each for name, its in EXTRAS.items() if name != "ray" for each in its])
    assert optional <= names(GROUPS["dev"])


@pytest.mark.parametrize("group", ["bench", "dev", "docs"])
def test_the_versions_of_a_group_are_pinned(group: str) -> None:
    assert names(GROUPS[group]) <= {normal(name) for name in PINNED}


def test_the_changelog_begins_with_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8").partition(CHANGELOG["start_string"])[2]
    assert re.match(rf"\n## {re.escape(__version__)} \(\d{{4}}-\d\d-\d\d\)\n", text)


def test_the_citation_has_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["project"]["license"]


FRAGMENTS = ROOT / "changes"
KINDS = [kind["directory"] for kind in CHANGELOG["type"]]


def fault_of_fragment(name: str, text: str) -> str:
    """Why a line for the changelog is refused; empty if it is right."""
    kinds = "|".join(KINDS)
    if not re.fullmatch(rf"\+[\w-]+\.({kinds})\.md", name):
        return f"{name} is not named +WORD.KIND.md, with a kind of {kinds}."
    if not re.fullmatch(r"[A-Z`](?:(?![.!?] +[A-Z`]).)*\.", " ".join(text.split())):
        return f"{name} is not one sentence with a capital and a full stop."
    return ""


def test_each_line_for_the_changelog_has_a_kind_and_is_a_sentence() -> None:
    """towncrier leaves out a file whose kind it does not know."""
    files = [path for path in sorted(FRAGMENTS.iterdir()) if path.name != "README.md"]
    faults = [fault_of_fragment(path.name, path.read_text("utf-8")) for path in files]
    assert [fault for fault in faults if fault] == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("+pause.added.md", "A worker pauses at `SIGUSR1`, as in 0.1 of\nits plan.\n", ""),
        ("+pause.added.md", "`worker` pauses.", ""),
        ("+pause.new.md", "A worker pauses.", "is not named"),
        ("pause.added.md", "A worker pauses.", "is not named"),
        ("+pause.added.txt", "A worker pauses.", "is not named"),
        ("+pause.added.md", "", "is not one sentence"),
        ("+pause.added.md", "A worker pauses", "is not one sentence"),
        ("+pause.added.md", "- A worker pauses.", "is not one sentence"),
        ("+pause.added.md", "A worker pauses. It goes on.", "is not one sentence"),
    ],
)
def test_a_line_for_the_changelog_is_refused(name: str, text: str, fault: str) -> None:
    found = fault_of_fragment(name, text)
    assert fault in found
    assert bool(fault) == bool(found)


def make_targets(text: str) -> set[str]:
    return {*re.findall(r"\bmake ([a-z-]+)$", text, re.M)}


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name
)
def test_workflows_and_forms_are_yaml_and_call_what_exists(path: Path) -> None:
    text = path.read_text("utf-8")
    assert isinstance(yaml.safe_load(text), dict)
    rules = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert make_targets(text) <= {*rules}


def test_only_the_job_that_publishes_may_prove_who_it_is() -> None:
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8"))
    assert flow["permissions"] == {"contents": "read"}
    assert "permissions" not in flow["jobs"]["build"]
    publish = flow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"] == "pypi"
    assert publish["needs"] == "build"
    assert "secrets." not in str(flow)


@pytest.fixture
def build() -> ModuleType:
    pytest.importorskip("hatchling")
    spec = util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_readme_lead_to_the_repository(build: ModuleType) -> None:
    text = build.with_absolute_links(
        "![p](docs/p.svg) [a](docs/a.md#b) [c](#d) [e](https://f/g)", "https://h/p", "v1"
    )
    assert text == (
        "![p](https://h/p/raw/v1/docs/p.svg) [a](https://h/p/blob/v1/docs/a.md#b) [c](#d) "
        "[e](https://f/g)"
    )


def test_the_readme_has_only_links_that_can_be_led_there(build: ModuleType) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert re.search(r"\]\(docs/", text)
    led = build.with_absolute_links(text, "https://h/p", "main")
    assert re.findall(r"\]\((?!https://)([^)]*)\)", led) == []
    assert "src=" not in text


def test_no_address_comes_from_nowhere(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_HETERO_URL", raising=False)
    metadata: dict[str, object] = {}
    build.ProjectMetadata(str(ROOT), {}).update(metadata)
    assert metadata["urls"] == {}
    monkeypatch.setenv("LIGHTNING_HETERO_URL", "https://h/p")
    build.ProjectMetadata(str(ROOT), {}).update(metadata)
    assert metadata["urls"]["Source"] == "https://h/p"  # type: ignore[index]
