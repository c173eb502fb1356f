"""Other people's projects train over workers as they do on one device."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "foreign_projects"
NAMES = ("main", "projects")
# Only lightning itself is always there.
PROJECTS = ("lightning", "gluonts", "pytorch-forecasting")


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's driver; its modules' plain names are gone afterwards."""
    before = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("main")
    for name in NAMES:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.mark.parametrize("name", PROJECTS)
def test_a_project_trains_as_on_one_device(name: str, main: Any, workers: list[str]) -> None:
    project = {project.name: project for project in main.PROJECTS}[name]
    if not project.is_installed:
        pytest.skip(f"{name} is not installed; `make foreign` installs it")
    # Their layers are torch's own, so that workers need not be allowed anything.
    plain, cut = main.compare(project, workers[:2])
    assert len(plain) == 10
    assert all(map(math.isfinite, plain))
    assert plain[-1] != plain[0]
    assert main.largest_difference(plain, cut) < 1e-6


def test_every_project_is_tested(main: Any) -> None:
    assert tuple(project.name for project in main.PROJECTS) == PROJECTS
