"""The strategy and the callbacks for projects that import `pytorch_lightning`.

Lightning is published under two names, and the classes of one are not those of the other. The
modules of this package that use Lightning are loaded a second time here, from the same files, with
the other name in their text:

    lightning.pytorch              ─▶ pytorch_lightning
    lightning.fabric               ─▶ lightning_fabric
    lightning_hetero.strategy.…    ─▶ lightning_hetero.pytorch_lightning.strategy.…

All other modules know no Lightning and are there once. `lightning.pytorch` is not imported.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from . import _MODULES

if TYPE_CHECKING:
    from .callbacks.lost_worker import RecoveryCallback
    from .callbacks.monitor import StageMonitor
    from .callbacks.profiler import PipelineProfiler
    from .callbacks.timeline import PipelineTimeline
    from .callbacks.weight_average import StageWeightAveraging
    from .strategy.strategy import HeteroPipelineStrategy

__all__ = [
    "HeteroPipelineStrategy",
    "PipelineProfiler",
    "PipelineTimeline",
    "RecoveryCallback",
    "StageMonitor",
    "StageWeightAveraging",
]

# A module with a path is a package: its modules can be imported.
__path__: list[str] = []

_ROOT = __name__.rpartition(".")[0]
_FOLDER = Path(__file__).parent
# The rooms that use Lightning, and those above them.
_TWINS = frozenset({"callbacks", "cli", "coordinator", "profiler", "strategy", "verify"})
_OTHER_NAMES = {
    b"lightning.pytorch": b"pytorch_lightning",
    b"lightning.fabric": b"lightning_fabric",
}


class _TwinLoader(SourceFileLoader):
    """Loads a file of this package with the other name of Lightning in its text."""

    def get_code(self, fullname: str) -> CodeType:
        # The cached bytecode of the file has the first name, so it is not read.
        path = self.get_filename(fullname)
        text = self.get_data(path)
        for name, other in _OTHER_NAMES.items():
            text = text.replace(name, other)
        return self.source_to_code(text, path)


class _SharedLoader(Loader):
    """Gives a module of this package a second name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._name)
        # The import system is about to put the spec of the second name in its place.
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _Twins:
    """Finds the modules below this one."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(f"{__name__}."):
            return None
        inner = name.removeprefix(f"{__name__}.")
        if inner.partition(".")[0] not in _TWINS:
            return ModuleSpec(name, _SharedLoader(f"{_ROOT}.{inner}"))
        file = _FOLDER.joinpath(*inner.split("."))
        places = [str(file)] if file.is_dir() else None
        file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        if not file.is_file():
            return None
        loader = _TwinLoader(name, str(file))
        return spec_from_file_location(name, file, loader=loader, submodule_search_locations=places)


def __getattr__(name: str) -> Any:
    if name == "StageWeightAveraging":
        module = "callbacks.weight_average"
    elif name in _MODULES:
        module = _MODULES[name]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = found  # The next look-up does not come here.
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


sys.meta_path.insert(0, _Twins)
