"""What takes long is told at each quarter, and nothing else is."""

from __future__ import annotations

import logging

import pytest

from lightning_hetero.runtime.coordinator.progress import PROGRESS_FROM_BYTES, ProgressInLines


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def test_each_quarter_is_told_once(lines: pytest.LogCaptureFixture) -> None:
    progress = ProgressInLines("Gathering", 4 * 2**30)
    for _ in range(18):
        progress.advance(2**28)
    assert lines.messages == [f"Gathering: {n}.0 of 4.0 GiB" for n in (1, 2, 3, 4)]


def test_what_is_short_is_not_told(lines: pytest.LogCaptureFixture) -> None:
    ProgressInLines("Gathering", PROGRESS_FROM_BYTES - 1).advance(PROGRESS_FROM_BYTES - 1)
    ProgressInLines("Gathering", 0).advance(0)
    assert lines.messages == []
