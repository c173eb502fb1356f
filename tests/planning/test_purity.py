"""Planning needs no torch and no Lightning: a plan can be made where neither is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lightning_hetero

SCRIPT = """
import sys, types
from importlib import import_module
# The package without its __init__, which registers the strategy with Lightning.
bare = types.ModuleType("lightning_hetero")
bare.__path__ = [sys.argv[1]]
sys.modules["lightning_hetero"] = bare
for name in sys.argv[2:]:
    import_module(f"lightning_hetero.planning.{name}")
print(sorted({"torch", "lightning", "transformers"} & set(sys.modules)))
"""


def test_no_module_of_planning_imports_torch() -> None:
    package = Path(lightning_hetero.__file__).parent
    names = sorted(path.stem for path in (package / "planning").glob("*.py"))
    names.remove("__init__")
    assert "solver" in names
    command = [sys.executable, "-c", SCRIPT, str(package), *names]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"
