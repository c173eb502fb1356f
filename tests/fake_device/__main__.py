"""Run a command whose processes have the fake device: ``python -m tests.fake_device COMMAND``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from . import build
from .autoload import autoloading


def main() -> None:
    """Compile the device, and end with the command's code."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "package")
        package.mkdir()
        variables = autoloading(str(build(Path(folder))), package)
        sys.exit(subprocess.run(sys.argv[1:], env={**os.environ, **variables}).returncode)


if __name__ == "__main__":
    main()
