"""The check of a device, on the processor, which every machine has."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_hetero import cli
from lightning_hetero.errors import ModelError
from lightning_hetero.verify import device_check
from lightning_hetero.verify.device_check import CheckFinding, TrainingBench, check_device

from .small_check import CONFIG, SEQUENCE_LENGTH

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check with a small model."""
    monkeypatch.setattr(device_check, "_CONFIG", CONFIG)
    monkeypatch.setattr(device_check, "_SEQUENCE_LENGTH", SEQUENCE_LENGTH)


@pytest.fixture(autouse=True)
def same_logs() -> Iterator[None]:
    """The command logs less of Lightning, and later tests of this process look at logs."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    yield
    logger.setLevel(before)


def broken(bench: TrainingBench) -> Iterator[CheckFinding]:
    """What breaks."""
    yield CheckFinding("before", "it breaks")
    raise ModelError("It broke.")


def test_a_part_that_fails_is_a_finding_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_check, "CHECKS", [broken, device_check.copies])
    before, failed, copies = check_device(CPU)
    assert before == CheckFinding("before", "it breaks")
    assert failed == CheckFinding("What breaks", "ModelError: It broke.", is_good=False)
    assert "no copy streams" in copies.found


def test_the_report_says_what_is_right_and_ends_with_that(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device_check, "CHECKS", [device_check.bits, device_check.waiting])
    file = tmp_path / "check.md"
    monkeypatch.setattr(sys, "argv", f"x check --device cpu -o {file}".split())
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    report = file.read_text()
    assert report.startswith("## cpu: ")
    assert "| bits of one device, deterministic, 6 steps | all weights equal | ok |" in report


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--device quantum:7", "The device 'quantum:7' cannot be used here; this machine has "),
        ("--device cpu -o /nowhere/check.md", "there is no folder '/nowhere'; make it"),
        ("--device cpu -o /", "cannot be written to '/': it is a folder; name another file"),
    ],
)
def test_what_cannot_be_checked_or_written_is_told_before_the_work(
    monkeypatch: pytest.MonkeyPatch, words: str, told: str
) -> None:
    monkeypatch.setattr(device_check, "CHECKS", [])
    monkeypatch.setattr(sys, "argv", f"x check {words}".split())
    with pytest.raises(SystemExit, match=told):
        cli.main()


def test_wrong_losses_are_told(monkeypatch: pytest.MonkeyPatch, workers: list[str]) -> None:
    train = TrainingBench.train

    def off(
        bench: TrainingBench, here: str, strategy: object = None, *args: object, **options: object
    ):  # type: ignore[no-untyped-def]
        module = train(bench, here, strategy, *args, **options)  # type: ignore[arg-type]
        module.losses[-1] *= 1.01 if strategy is not None else 1
        return module

    monkeypatch.setattr(TrainingBench, "train", off)
    monkeypatch.setattr(TrainingBench, "worker_on", lambda *_: workers[0])
    monkeypatch.setattr(TrainingBench, "_token_file", lambda *_: None)
    monkeypatch.setattr(device_check, "CHECKS", [device_check.losses])
    findings = list(check_device(CPU))
    assert [finding.is_good for finding in findings] == [False, False, False]
    assert "losses within 1.0e-02, allowed 1e-03" in findings[0].found
