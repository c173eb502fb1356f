"""Looks at the wheel that `make wheel-check` has built, and trains with what it has installed.

It runs in an environment that has the wheel and its dependencies, and nothing else of this project.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import metadata
from pathlib import Path

from pages import ROOT, script

# Data that the package reads, of each kind.
DATA = (
    "lightning_hetero/py.typed",
    "lightning_hetero/launch/machine.sh",
    "lightning_hetero/pairing/words.txt",
    "lightning_hetero/planner/cards.csv",
    "lightning_hetero/report/page.html",
    "lightning_hetero/report/picture.css",
)


def check_content(wheel: Path) -> None:
    """All modules and their data, and nothing beside the package."""
    names = zipfile.ZipFile(wheel).namelist()
    tracked = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("lightning_hetero/**/*.py")}
    missing = sorted({*tracked, *DATA} - {*names})
    assert not missing, f"The wheel lacks {missing}."
    roots = {name.split("/")[0] for name in names}
    beside = {root for root in roots if root != "lightning_hetero" and "dist-info" not in root}
    assert not beside, f"The wheel has {beside} beside the package."


def check_description() -> None:
    """The text of the package index is the readme, with links that lead somewhere from there."""
    found = metadata("lightning-hetero")
    text = found.get_payload()
    assert text.startswith("# lightning-hetero"), text[:80]
    links = re.findall(r"\]\((?!https?://|#)([^)\s]+)\)", text)
    addresses = found.get_all("Project-URL", [])
    if "LIGHTNING_HETERO_URL" in os.environ:
        assert not links, f"On a package index these links lead nowhere: {links}."
        assert len(addresses) == 5, addresses
    else:
        assert not addresses, f"These addresses come from nowhere: {addresses}."


def check_use() -> None:
    """The command answers, and the first tutorial trains."""
    command = str(Path(sys.executable).with_name("lightning-hetero"))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(script("first-training"), "utf-8")
        for words in (
            [command, "--version"],
            [command, "schema", "plan", "-o", "plan.schema.json"],
            [sys.executable, "-m", "lightning_hetero", "token", "token"],
            [sys.executable, "-c", "import lightning_hetero; print(lightning_hetero.__file__)"],
            [sys.executable, "train.py"],
        ):
            ran = subprocess.run(
                words, cwd=folder, capture_output=True, text=True, timeout=300, check=False
            )
            assert ran.returncode == 0, f"{words} failed:\n{ran.stdout}\n{ran.stderr}"
            assert str(ROOT / "lightning_hetero") not in ran.stdout, "This is not the wheel."
        assert "without workers" in ran.stdout, ran.stdout


if __name__ == "__main__":
    (built,) = Path(sys.argv[1]).glob("*.whl")
    check_content(built)
    check_description()
    check_use()
    print(f"{built.name} is whole, and trains.")
