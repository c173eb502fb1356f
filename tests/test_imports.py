"""What tests share lives in modules without tests, and every name that scripts import exists."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from .core_contract import names_in_contract

TESTS = Path(__file__).parent
FROM_TESTS = re.compile(r"^\s*(?:from|import) .*\btest_.*$", re.MULTILINE)


def test_nothing_is_imported_from_a_file_of_tests() -> None:
    files = sorted(TESTS.rglob("*.py"))
    found = {str(file): FROM_TESTS.findall(file.read_text()) for file in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


# What a device is asked for instead of being told by its kind.
KINDS_OF_DEVICES = ("cuda", "mps", "xpu", "hpu", "mtia")


def kinds_named_in(file: Path) -> Iterator[str]:
    """The places of a file that use a module of torch for one kind, or compare a device's kind."""
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, (ast.Attribute, ast.Compare)):
            continue
        text = ast.unparse(node)
        if isinstance(node, ast.Attribute) and text in {f"torch.{k}" for k in KINDS_OF_DEVICES}:
            yield f"{file.name}:{node.lineno}: {text}"
        if isinstance(node, ast.Compare) and re.search(r"\bdevice\.type\b|\.type [!=]= '", text):
            yield f"{file.name}:{node.lineno}: {text}"


def test_only_the_room_of_devices_knows_their_kinds() -> None:
    package = TESTS.parent / "lightning_hetero"
    files = sorted(package.rglob("*.py"))
    inside = [file for file in files if file.parent.name == "devices"]
    assert any(found for file in inside for found in kinds_named_in(file))
    outside = set(files) - set(inside)
    assert [found for file in sorted(outside) for found in kinds_named_in(file)] == []


def imported_names(file: Path) -> Iterator[tuple[str, str]]:
    """The modules of the package that a file imports from, each with a name."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_hetero"):
            yield from ((node.module or "", alias.name) for alias in node.names)


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "tests"])
def test_every_name_that_is_imported_exists(folder: str) -> None:
    imports = {
        found for file in (TESTS.parent / folder).rglob("*.py") for found in imported_names(file)
    }
    assert imports
    missing = [
        f"{module}.{name}"
        for module, name in sorted(imports)
        if not hasattr(import_module(module), name) and find_spec(f"{module}.{name}") is None
    ]
    assert missing == []


def test_the_strategy_is_imported_without_wings_and_connections() -> None:
    """Both come with its workers and its options."""
    script = "import sys, lightning_hetero.strategy.strategy; print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    loaded = {name for name in printed.stdout.decode().split() if "lightning_hetero" in name}
    names = names_in_contract()
    assert loaded & names["forbidden_modules"] == set()
    assert "lightning_hetero.transport.channel" not in loaded


def test_every_module_is_of_the_core_or_of_a_wing() -> None:
    names = names_in_contract()
    core, wings = names["source_modules"], names["forbidden_modules"]
    package = TESTS.parent / "lightning_hetero"
    modules = {
        ".".join(file.relative_to(package.parent).with_suffix("").parts)
        for file in package.rglob("*.py")
        if file.name != "__init__.py"
    }
    entries = {
        "lightning_hetero.__main__",
        "lightning_hetero.pytorch_lightning",
        "lightning_hetero.model.wings",
        "lightning_hetero.pipeline.wings",
        "lightning_hetero.strategy.wings",
        "lightning_hetero.transport.wings",
        "lightning_hetero.worker.wings",
    }
    of_wings = {name for name in modules if {name, name.rpartition(".")[0]} & wings}
    assert core & of_wings == set()
    assert modules - core - of_wings == entries


# An activation is a message, and what it carries.
MEANT_TWICE = {"Activation"}


def test_a_class_name_means_one_thing() -> None:
    package = TESTS.parent / "lightning_hetero"
    names = Counter(
        node.name
        for file in package.rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, number in names.items() if number > 1} == MEANT_TWICE
