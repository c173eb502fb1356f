"""What the commands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PlanError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def new_file(name: str) -> Path:
    """The path of that name here.

    Raises:
        PlanError: If something is there already.
    """
    path = Path(name)
    if path.exists():
        raise PlanError(f"{name!r} is there already; name it with --output to replace it.")
    return path
