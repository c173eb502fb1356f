"""The tour of docs/tour.md: each change that it shows makes the named test fail."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from ..pages import ROOT

PAGE = (ROOT / "docs" / "tour.md").read_text()
_STOP = re.compile(
    r"^## \d+\. [^`]*`(?P<file>[^`]+)`\n"
    r".*?^```diff\n(?P<diff>.*?)^```\n\n"
    r"`(?P<test>tests/[^`]+)` fails",
    re.MULTILINE | re.DOTALL,
)


class Stop(NamedTuple):
    """A stop of the tour."""

    file: str
    before: str
    after: str
    test: str


def stops() -> list[Stop]:
    """The stops in their order."""
    found = []
    for match in _STOP.finditer(PAGE):
        lines = match["diff"].splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] == "-")
        after = "".join(line[1:] for line in lines if line[0] == "+")
        found.append(Stop(match["file"], before, after, match["test"]))
    return found


def test_each_stop_has_a_change() -> None:
    assert len(stops()) == len(re.findall(r"^## \d+\.", PAGE, re.MULTILINE)) == 10
    for stop in stops():
        assert (ROOT / "lightning_hetero" / stop.file).read_text().count(stop.before) == 1, stop
        path, name = stop.test.split("::")
        assert f"def {name}(" in (ROOT / path).read_text(), stop


@pytest.mark.exhaustive
@pytest.mark.parametrize("stop", stops(), ids=[each.file for each in stops()])
def test_the_named_test_notices_the_change(stop: Stop, tmp_path: Path) -> None:
    for name in ("lightning_hetero", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    file = tmp_path / "lightning_hetero" / stop.file
    file.write_text(file.read_text().replace(stop.before, stop.after))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", stop.test]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    # 1 is the code of failed tests, others are those of a run that could not begin.
    assert ended.returncode == 1, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert "passed" in ended.stdout or "failed" in ended.stdout
