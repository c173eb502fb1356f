"""The library of the fake device, compiled once per run of the tests, and workers on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from . import build, compiler
from .process import fake_worker


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give time to the first test of a process, which compiles, and imports what is forked."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def fake_device(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the compiled fake device."""
    if compiler() is None:
        pytest.skip("there is no C++ compiler for the fake device")
    folder = tmp_path_factory.getbasetemp()
    # The processes of one parallel run have one parent folder.
    folder = folder.parent if folder.name.startswith("popen") else folder
    return str(build(folder))


@pytest.fixture(scope="session")
def first_worker(fake_device: str) -> Iterator[str]:
    """The address of a worker on ``fake:0``."""
    with fake_worker(fake_device, "fake:0") as address:
        yield address


@pytest.fixture(scope="session")
def second_worker(fake_device: str) -> Iterator[str]:
    """The address of a worker on ``fake:1``, whose layers use the current device by its kind."""
    before = "from tests.fake_device.process import use_current_device; use_current_device()"
    with fake_worker(fake_device, "fake:1", before) as address:
        yield address


@pytest.fixture(scope="session")
def plain_workers(fake_device: str) -> Iterator[list[str]]:
    """The addresses of two workers on ``fake:0`` that wait for every copy."""
    before = "from tests.fake_device.process import wait_for_copies; wait_for_copies()"
    with (
        fake_worker(fake_device, "fake:0", before) as one,
        fake_worker(fake_device, "fake:0", before) as other,
    ):
        yield [one, other]
