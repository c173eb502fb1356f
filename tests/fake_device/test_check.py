"""`lightning-hetero check` is right on the fake device, row by row.

Rates of copies, and what computing hides of them, are those of the processor; they only have to be
there. `autoload` tells how to run the whole command there.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lightning_hetero.verify import device_check
from lightning_hetero.verify.device_check import CheckFinding, TrainingBench, check_device

from ..verify.small_check import CONFIG, SEQUENCE_LENGTH
from .process import fake_worker, on_fake_device


def findings_of(part: str, addresses: dict[str, str]) -> list[CheckFinding]:
    """The rows of one part, of a smaller model and over workers that run already."""
    device_check._CONFIG, device_check._SEQUENCE_LENGTH = CONFIG, SEQUENCE_LENGTH
    device_check.TIMED_STEPS, device_check.PROFILE_SECONDS = 3, 2.0
    device_check.COPIED_BYTES, device_check.MULTIPLIED_ROWS = 2**20, 64
    device_check.CHECKS = [getattr(device_check, part)]
    TrainingBench.worker_on = lambda _bench, device: addresses[device]  # type: ignore[method-assign]
    TrainingBench._token_file = lambda _bench, device: None  # type: ignore[method-assign, assignment, return-value]
    return list(check_device(torch.device("fake", 0)))


@pytest.mark.parametrize(("part", "num_rows"), [("losses", 5), ("bits", 1)])
@on_fake_device
def test_what_has_a_judgement_is_right(
    part: str, num_rows: int, first_worker: str, workers: list[str]
) -> None:
    found = findings_of(part, {"fake:0": first_worker, "cpu": workers[0]})
    assert len(found) == num_rows, found
    assert [finding for finding in found if finding.is_good is not True] == []


@pytest.fixture
def unused_worker(fake_device: str) -> Iterator[str]:
    """The address of a worker whose process has had no session yet."""
    with fake_worker(fake_device, "fake:0") as address:
        yield address


@on_fake_device
def test_the_planner_counts_the_memory_of_a_worker(unused_worker: str) -> None:
    """The most memory is that since the start of a process, and a worker here has one for all
    sessions."""
    [found] = findings_of("memory", {"fake:0": unused_worker})
    assert found.is_good is True, found


@pytest.mark.parametrize(("part", "num_rows"), [("copies", 5), ("waiting", 1), ("costs", 2)])
@on_fake_device
def test_what_is_measured_is_there(part: str, num_rows: int, first_worker: str) -> None:
    found = findings_of(part, {"fake:0": first_worker})
    assert len(found) == num_rows, found
    assert not [finding for finding in found if "Error" in finding.found]


@pytest.mark.parametrize("part", ["precisions", "four_bits", "rounded_costs"])
@on_fake_device
def test_what_the_device_cannot_do_is_one_short_row(part: str, first_worker: str) -> None:
    """It has no kernels for autocast, nor has bitsandbytes any for it."""
    [found] = findings_of(part, {"fake:0": first_worker})
    assert found.is_good is False
    assert "Error: " in found.found
    assert len(found.found) < 400
