"""Libraries that only some models need: they are an extra of this package."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import ModelError


def bitsandbytes() -> Any:
    """The library of 4-bit weights.

    Raises:
        ModelError: If it is not installed here.
    """
    return _library("bitsandbytes", "4-bit layers need it")


def peft() -> Any:
    """The library of adapters.

    Raises:
        ModelError: If it is not installed here.
    """
    return _library("peft", "adapters need it")


def _library(name: str, need: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModelError(
            f"{name} is not installed here, and {need} ({error}); "
            "pip install 'lightning-hetero[lora]'."
        ) from error
