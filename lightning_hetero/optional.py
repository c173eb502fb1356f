"""Parts that may be missing: libraries of an extra, and wings of this package."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from .errors import HeteroError, ModelError


def import_extra(
    module: str, extra: str, need: str, error_class: type[HeteroError] = ModelError
) -> Any:
    """Import a library, or say how to install it.

    Args:
        module: The library's name in an import.
        extra: The extra of this package with the library.
        need: The use of the library, as a clause such as ``"adapters need it"``.
        error_class: The class of the error.

    Raises:
        HeteroError: Of the given class, if the library cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise error_class(
            f"{module} is not installed here, and {need} ({error}); "
            f"pip install 'lightning-hetero[{extra}]'."
        ) from error


def has_wing(module: str) -> bool:
    """Whether a module of this package is installed, such as ``"model.layer_code"``."""
    return find_spec(f"{__package__}.{module}") is not None


def bitsandbytes() -> Any:
    """Import the library of 4-bit weights.

    Raises:
        ModelError: If it is not installed.
    """
    return import_extra("bitsandbytes", "lora", "4-bit layers need it")


def peft() -> Any:
    """Import the library of adapters.

    Raises:
        ModelError: If it is not installed.
    """
    return import_extra("peft", "lora", "adapters need it")
