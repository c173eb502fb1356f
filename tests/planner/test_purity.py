"""The planner needs no torch and no Lightning, and of what is run only the rule."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lightning_hetero

SCRIPT = """
import sys
from importlib import import_module
for name in sys.argv[1:]:
    import_module(f"lightning_hetero.planner.{name}")
print(*sorted({"torch", "lightning", "transformers"} & set(sys.modules)))
print(*sorted(name for name in sys.modules if name.startswith("lightning_hetero.")))
"""


def test_the_planner_imports_no_torch() -> None:
    package = Path(lightning_hetero.__file__).parent
    names = sorted(path.stem for path in (package / "planner").glob("*.py"))
    names.remove("__init__")
    assert "solver" in names
    command = [sys.executable, "-c", SCRIPT, *names]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    foreign, own = ran.stdout.splitlines()
    assert foreign == ""
    parts = {name.removeprefix("lightning_hetero.") for name in own.split()}
    others = {part for part in parts if part.split(".")[0] != "planner"}
    assert others == {
        "errors",
        "plan",
        "units",
        "version",
        "yaml_file",
        "pipeline",
        "pipeline.placement",
        "pipeline.rule",
        "pipeline.slice_cut",
        "protocol",
        "protocol.fields",
    }
