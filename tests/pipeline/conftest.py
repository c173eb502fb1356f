"""The threads of the drivers of these tests end with each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .chain import threads


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    yield
    threads.close()
