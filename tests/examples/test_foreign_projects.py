"""Other people's projects train over workers as they do on one device."""

from __future__ import annotations

import importlib
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ..pages import ROOT
from ..pairwise import repeats

FOLDER = ROOT / "examples" / "foreign_projects"
# Only lightning itself is always there.
PROJECTS = (
    *("lightning", "litgpt", "gluonts", "pytorch-forecasting", "darts", "neuralforecast"),
    *("replay-rec", "deeptab", "pina-mathlab", "chemprop", "scvi-tools", "rl4co"),
)
TOLERANCE = 1e-5


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's driver; its modules' plain names are gone afterwards."""
    names = [path.stem for path in FOLDER.glob("*.py")]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("main")
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@repeats(
    "integration/test_manual_optimization.py::test_lightnings_own_example_trains_unchanged",
    "integration/test_conformance.py::test_hooks_and_metrics_are_those_of_one_device",
)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PROJECTS)
def test_a_project_trains_as_on_one_device(name: str, main: Any) -> None:
    project = {project.name: project for project in main.PROJECTS}[name]
    if not project.is_installed:
        pytest.skip(f"{name} is not installed; `make foreign` installs it")
    # A process has one Lightning, and projects use either name.
    command = [sys.executable, str(FOLDER / "main.py"), name]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    said = ended.stdout
    assert ended.returncode == 0, ended.stderr
    one_device = [float(each) for each in re.findall(r"(?m)^ *\d+ +(\S+) +\S+$", said)]
    assert len(one_device) >= 8
    assert all(map(math.isfinite, one_device))
    assert one_device[-1] != one_device[0]
    differences = dict(re.findall(r"largest relative difference of (\w+) +(\S+)", said))
    assert differences.keys() == {"losses", "weights"}
    assert max(map(float, differences.values())) < TOLERANCE


def test_every_project_is_tested(main: Any) -> None:
    assert tuple(project.name for project in main.PROJECTS) == PROJECTS


def test_every_project_has_its_row(main: Any) -> None:
    page = (FOLDER / "README.md").read_text("utf-8")
    assert [name for name in PROJECTS if f"| `{name}` " not in page] == []


def test_what_differs_is_seen(main: Any) -> None:
    one = main.Trained([1.0, 2.0], {"a": torch.tensor([1.0, -4.0]), "b": torch.zeros(1)})
    other = main.Trained([1.0, 2.2], {"a": torch.tensor([1.0, -3.0]), "b": torch.zeros(1)})
    assert main.difference_of_losses(one, other) == pytest.approx(0.1)
    assert main.difference_of_weights(one, other) == pytest.approx(0.25)
    broken = main.Trained([1.0, math.nan], {"a": torch.full((2,), math.nan), "b": torch.zeros(1)})
    for compare in (main.difference_of_losses, main.difference_of_weights):
        assert compare(one, one) == 0.0
        assert math.isnan(compare(one, broken))
