"""Whether a module is a library's, or the user's own."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from functools import cache
from importlib import metadata
from pathlib import Path

from .allowed_imports import MAIN, SCRIPT


def package_of(module: str) -> str:
    """The first part of a module's name."""
    return module.partition(".")[0]


@cache
def _installed_folders() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [*map(sysconfig.get_path, names), *site.getsitepackages(), site.getusersitepackages()]
    return tuple(f"{Path(folder).resolve()}{os.sep}" for folder in folders)


@cache
def is_installed(module: str) -> bool:
    """Whether a module belongs to Python or to an installed library, rather than to the user."""
    if module in (MAIN, SCRIPT) or module not in sys.modules:
        return False
    file = getattr(sys.modules[module], "__file__", None)
    if file is None:
        return True
    path = Path(file).resolve()
    depth = module.count(".") + (path.stem == "__init__")
    above = [*path.parents][depth : depth + 1]  # empty if its name is not its place
    return str(path).startswith(_installed_folders()) or any(
        package_of(module) in _libraries_in(folder) for folder in above
    )


@cache
def _libraries_in(folder: Path) -> frozenset[str]:
    """The libraries installed into a folder on the path for another reason, such as `PYTHONPATH`.
    The user's own code may lie beside them."""
    found = metadata.distributions(path=[str(folder)])
    files = (file for each in found for file in each.files or ())
    return frozenset(file.parts[0].removesuffix(".py") for file in files)
