"""Many ways that are each to be refused, in one run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from lightning_hetero.errors import ModelError


def try_all(ways: Mapping[str, Callable[[Any], object]], wanted: str) -> Callable[[Any], None]:
    """What tries all ways in a run, and ends it with the last refusal.

    Args:
        ways: What is done with a module, by its name.
        wanted: A pattern for the text of each refusal.
    """

    def act(module: Any) -> None:
        last: ModelError | None = None
        for name, way in ways.items():
            try:
                way(module)
            except ModelError as refusal:
                last, text = refusal, str(refusal)
            else:
                pytest.fail(f"{name!r} was not refused")
            assert re.search(wanted, text), (name, text)
        assert last is not None
        raise last

    return act
