"""The imports of a worker to rebuild layers: classes and functions, by name.

The names come from the network. A module is imported only if its name is among the allowed ones,
and an object in it is used only if it was defined there under exactly this name.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn import functional

from ..errors import ModelError

MAIN = "__main__"
# Stands in the qualified name of a function that was made inside another one.
LOCALS = ".<locals>."
# The name of the user's script in a worker. Under the name `__main__` its guarded part would run.
SCRIPT = "__user_main__"

_LAYERS_OF_TORCH = "torch.nn.modules"
# The imports of transformers open to every worker, by the kind of object: the parts of its models
# and their configs. Functions are not among them, and neither are modules that convert checkpoints.
_OF_TRANSFORMERS = {
    "layer class": r"transformers\.(activations|models\.\w+\.modeling_(?!tf_|flax_)\w+)",
    "config class": r"transformers\.models\.\w+\.configuration_\w+",
}
# Whole models read files and load others; their recipe names them and a config.
_WHOLE_MODEL = "PreTrainedModel"
# The only functions of torch itself, so that no name can reach a function that opens files.
_OPERATION_NAMES = (
    *("abs", "add", "cos", "erf", "exp", "log_softmax", "matmul", "mul", "relu", "rsqrt"),
    *("selu", "sigmoid", "sin", "softmax", "square", "tanh"),
)
_OPERATIONS = {name: getattr(torch, name) for name in _OPERATION_NAMES}
_FUNCTIONAL = {
    name: function
    for name, function in vars(functional).items()
    if (inspect.isfunction(function) and function.__module__ == functional.__name__)
    or (inspect.isbuiltin(function) and "torch_function" not in name)
    if not name.startswith("_")
}
_TORCH_FUNCTIONS = {functional.__name__: _FUNCTIONAL, torch.__name__: _OPERATIONS}


class ImportPath(msgspec.Struct, frozen=True):
    """The module that defines a class or function, and its name there."""

    module: str
    qualname: str

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname}"

    @property
    def is_of_torch(self) -> bool:
        """Whether every worker may use it."""
        return self.module in _TORCH_FUNCTIONS or _is_within(self.module, _LAYERS_OF_TORCH)


@dataclass(frozen=True)
class Allowed:
    """The allowed imports besides torch's own layers and functions, and the parts of the models of
    transformers.

    Args:
        packages: Dotted names; each allows the module of this name and all below it.
        script: The coordinator's script and its arguments, if `__main__` may be imported.
    """

    packages: tuple[str, ...] = ()
    script: tuple[str, ...] = ()

    @classmethod
    def just(cls, modules: Iterable[str]) -> Allowed:
        """Allow the modules of these names, for a worker started by this process."""
        names = sorted(set(modules))
        script = getattr(sys.modules[MAIN], "__file__", None) if MAIN in names else None
        return cls(
            tuple(name for name in names if name != MAIN),
            (os.path.abspath(script), *sys.argv[1:]) if script else (),
        )

    def absent(self) -> list[str]:
        """The allowed packages not installed here, found without an import."""
        found = [name for name in self.packages if name != MAIN]
        return [name for name in found if importlib.util.find_spec(name.partition(".")[0]) is None]

    def find(self, path: ImportPath, what: str = "layer class") -> Any:
        """Import the class or function of this name.

        Raises:
            ModelError: If it is not allowed, cannot be imported, or was defined under another name.
        """
        functions = _TORCH_FUNCTIONS.get(path.module)
        if functions is None:
            return _look_up(self._import(path, what), path, what)
        if path.qualname not in functions:
            raise ModelError(f"{path} is not a function of torch that workers call.")
        return functions[path.qualname]

    def names(self, module: str) -> bool:
        """Whether all of a module is allowed."""
        return any(_is_within(module, name) for name in (_LAYERS_OF_TORCH, *self.packages))

    def refusal(self, path: ImportPath, what: str) -> ModelError:
        """The error for an import that is not allowed."""
        package = path.module.partition(".")[0]
        return ModelError(
            f"The {what} {path} is outside of what this worker may import (allowed: "
            f"{', '.join(['torch.nn', *self.packages])}); if its code is to be trusted, start "
            f"the worker with --allow {package}."
        )

    def _import(self, path: ImportPath, what: str) -> ModuleType:
        if path.module == MAIN:
            return self._import_script(path, what)
        package = path.module.partition(".")[0]
        is_part = re.fullmatch(_OF_TRANSFORMERS.get(what, "(?!)"), path.module) is not None
        if not (is_part or self.names(path.module)):
            raise self.refusal(path, what)
        try:
            return importlib.import_module(path.module)
        except (Exception, SystemExit) as error:
            raise ModelError(
                f"The {what} {path} cannot be imported on this worker "
                f"({type(error).__name__}: {error}); install {package!r} here, in the "
                "coordinator's version, or put its folder on PYTHONPATH."
            ) from error

    def _import_script(self, path: ImportPath, what: str) -> ModuleType:
        if not self.script:
            raise ModelError(
                f"The {what} {path} stands in the coordinator's script, which this worker does "
                "not have; move it into a package that can be imported on both machines, and "
                "start the worker with --allow and the package's name."
            )
        if SCRIPT not in sys.modules:
            _run_script(self.script)
        return sys.modules[SCRIPT]


class ImportedHere(Allowed):
    """Allows the modules imported by this process itself, to build its own recipes."""

    def _import(self, path: ImportPath, what: str) -> ModuleType:
        main = sys.modules[MAIN]
        if main.__spec__ is not None and main.__spec__.name == path.module:
            return main
        return sys.modules.get(path.module) or super()._import(path, what)


def find_class(allowed: Allowed, path: ImportPath, base: type, what: str = "layer class") -> Any:
    """Import a class derived from ``base``.

    Raises:
        ModelError: If it is not allowed, cannot be imported, or is another kind of class.
    """
    found = allowed.find(path, what)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ModelError(f"The {what} {path} is not a class that derives from {base.__name__}.")
    is_whole = any(base.__name__ == _WHOLE_MODEL for base in found.__mro__)
    if is_whole and not isinstance(allowed, ImportedHere) and not allowed.names(path.module):
        raise allowed.refusal(path, what)
    if issubclass(found, nn.modules.lazy.LazyModuleMixin):
        raise ModelError(f"The {what} {path} is lazy, and workers build only layers with a shape.")
    return found


def find_function(allowed: Allowed, path: ImportPath) -> Any:
    """Import a function: an operation of torch, or any function of an allowed module.

    Raises:
        ModelError: If it is not allowed, cannot be imported, or is not a function.
    """
    if _is_within(path.module, _LAYERS_OF_TORCH):
        raise ModelError(
            f"{path} is not a function of torch that workers call: they call those of "
            f"{' and '.join(sorted(_TORCH_FUNCTIONS))}."
        )
    found = allowed.find(path, "function")
    if not isinstance(found, (types.FunctionType, types.BuiltinFunctionType)):
        raise ModelError(f"{path} is not a function.")
    return found


def refuse_training_in_worker() -> None:
    """Refuse to train in a worker while it imports a script without a main guard.

    Raises:
        ModelError: In such a worker.
    """
    if SCRIPT in sys.modules:
        raise ModelError(
            f"The script {sys.modules[SCRIPT].__file__!r} starts to train when it is imported, "
            "and workers import it for its layer classes; put what starts the training under "
            '`if __name__ == "__main__":`.'
        )


def path_of(thing: Any, what: str) -> ImportPath:
    """The path for a worker to import a class or function.

    Raises:
        ModelError: If a worker could not import it.
    """
    for module, functions in _TORCH_FUNCTIONS.items():
        for name, function in functions.items():
            if function is thing:
                return ImportPath(module, name)
    if inspect.isbuiltin(thing):
        raise ModelError(
            f"The {what} {thing.__qualname__!r} is built in; call it in a function at the top "
            "level of a module, and use that."
        )
    path = ImportPath(_importable_name(thing), thing.__qualname__)
    if "<" in path.qualname:
        raise ModelError(
            f"The {what} {path} is defined inside a function; move it to the top level of a module."
        )
    if _is_within(path.module, "torch") and not path.is_of_torch:
        raise ModelError(
            f"The {what} {path} is one of torch's that workers do not build. Of torch they build "
            "the layers in torch.nn that are not parametrized, compiled or quantized."
        )
    if inspect.isfunction(thing) and _is_within(path.module, _LAYERS_OF_TORCH):
        raise ModelError(
            f"The {what} {path} is not a function of torch that workers call; call it in a "
            "function at the top level of a module of your own, and use that."
        )
    defining = sys.modules.get(thing.__module__)
    if defining is None or _walk(defining, path) is not thing:
        raise ModelError(
            f"The {what} {path} cannot be found under its own name; define it at the top level of "
            "a module that can be imported."
        )
    return path


def _importable_name(thing: Any) -> str:
    """The name of an object's module; for a module run by `python -m`, its real name.

    Raises:
        ModelError: If the object was defined in an interactive session.
    """
    name: str = thing.__module__ or ""
    if name != MAIN:
        return name
    main = sys.modules[MAIN]
    if main.__spec__ is not None:
        return main.__spec__.name
    if not os.path.isfile(getattr(main, "__file__", None) or ""):
        raise ModelError(
            f"{thing.__qualname__} is defined in a notebook or an interactive session, which a "
            "worker cannot import; move it into a module (a .py file) and import it from there."
        )
    return name


def _is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _walk(module: ModuleType, path: ImportPath) -> Any:
    """Find the object at a path, if it exists, without running any code."""
    found: Any = module
    for name in path.qualname.split("."):
        if not (found is module or isinstance(found, type)):
            return None
        found = vars(found).get(name)
    return found.__func__ if isinstance(found, staticmethod) else found


def _look_up(module: ModuleType, path: ImportPath, what: str) -> Any:
    found = _walk(module, path)
    is_named_so = isinstance(found, (type, types.FunctionType)) and (
        (found.__module__, found.__qualname__) == (module.__name__, path.qualname)
    )
    if not is_named_so:
        raise ModelError(
            f"The module {path.module!r} on this worker defines no {what} {path.qualname!r}; "
            "install the coordinator's version here."
        )
    return found


def _run_script(script: tuple[str, ...]) -> None:
    """Import the user's script without its guarded part, as multiprocessing does."""
    spec = importlib.util.spec_from_file_location(SCRIPT, script[0])
    if spec is None or spec.loader is None:
        raise ModelError(f"The script {script[0]!r} is not a Python file that a worker can import.")
    module = importlib.util.module_from_spec(spec)
    sys.argv = list(script)
    sys.modules[SCRIPT] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[SCRIPT]
        raise ModelError(
            f"The script {script[0]!r} could not be imported on a worker "
            f"({type(error).__name__}: {error})."
        ) from error
