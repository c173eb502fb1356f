"""The fake device as a package that torch loads by itself, as it does with those of vendors.

Processes that a command starts, such as the workers of `lightning-hetero check`, have it then.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from . import load

_VARIABLE = "FAKE_DEVICE_LIBRARY"
_ENTRY_POINTS = f"[torch.backends]\nfake = {__name__}:load_here\n"
_ROOT = Path(__file__).parents[2]


def load_here() -> None:
    """Load the library that the environment names; torch calls this at the end of its import."""
    load(os.environ[_VARIABLE])


def autoloading(library: str, folder: Path) -> Mapping[str, str]:
    """Variables of processes in which torch loads the fake device.

    Args:
        library: The compiled device.
        folder: An empty folder, for the description of the package.
    """
    described = folder / "fake_device-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-device\nVersion: 1\n")
    (described / "entry_points.txt").write_text(_ENTRY_POINTS)
    path = os.pathsep.join([str(_ROOT), str(folder), os.environ.get("PYTHONPATH", "")])
    return {_VARIABLE: library, "PYTHONPATH": path}
