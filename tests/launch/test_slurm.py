"""Workers that srun starts. No SLURM runs here: a stand-in on PATH starts the tasks."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil
import pytest

from lightning_hetero import HeteroPipelineStrategy, Recovery, SlurmWorkers
from lightning_hetero.errors import JoinError, PlanError, WorkerError
from lightning_hetero.launch import launcher as launcher_module
from lightning_hetero.launch.slurm import tasks_of
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.token import Token, write_token_file

from ..equality import differing
from ..models import TinyModule, fit
from .configs import strategy_of_config
from .srun import stand_in_srun
from .sshd import COMMAND


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    program = stand_in_srun(folder)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return program


def processes_of(name: str) -> list[psutil.Process]:
    """Those of the worker of this name."""
    found = psutil.process_iter(["cmdline"])
    return [each for each in found if name in (each.info["cmdline"] or ())]


@pytest.mark.usefixtures("srun")
def test_the_tasks_of_two_components_train_with_the_numbers_of_listed_workers(
    workers: list[str], tmp_path: Path
) -> None:
    expected = fit(TinyModule(), HeteroPipelineStrategy(workers[:2], "even", micro_batches=4))
    token = tmp_path / "token"
    write_token_file(token, Token.new())
    launcher = SlurmWorkers(
        ["--gres=gpu:a100:1 -n1", "--gres=gpu:v100:1 -n 1"],
        COMMAND,
        ["--threads", "1", "--token-file", str(token)],
        listen="127.0.0.1:0",
    )
    strategy = HeteroPipelineStrategy(launcher, "even", micro_batches=4, token_file=token)
    found = fit(TinyModule(), strategy)
    assert found.losses == expected.losses
    assert not differing(found, expected)
    assert not processes_of("slurm-1")


@pytest.mark.usefixtures("srun")
def test_a_worker_that_is_killed_starts_again_in_its_task(
    workers: list[str], tmp_path: Path
) -> None:
    """The run has the bits of the undisturbed one."""
    expected = fit(TinyModule(), HeteroPipelineStrategy(workers[:1], "even", micro_batches=4))

    class Killing(TinyModule):
        def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
            if batch_idx == 1:
                for process in processes_of("slurm-0"):
                    process.kill()

    token = tmp_path / "token"
    write_token_file(token, Token.new())
    options = ["--threads", "1", "--token-file", str(token)]
    launcher = SlurmWorkers(["-n1"], COMMAND, options, listen="127.0.0.1:0")
    recovery = Recovery(folder=tmp_path / "recovery", every_seconds=3600.0, wait_seconds=60.0)
    strategy = HeteroPipelineStrategy(
        launcher, "even", micro_batches=4, token_file=token, recovery=recovery
    )
    found = fit(Killing(), strategy)
    assert found.losses == expected.losses
    assert not differing(found, expected)
    assert not processes_of("slurm-0")


@pytest.mark.usefixtures("srun")
def test_workers_whose_srun_ends_come_back_by_another_one(
    workers: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a lost node: srun and all its tasks are killed at once. The run has the bits of the
    undisturbed one."""
    expected = fit(TinyModule(), HeteroPipelineStrategy(workers[:2], "even", micro_batches=4))

    class Killing(TinyModule):
        def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
            if batch_idx == 1:
                assert launcher._srun is not None
                srun = psutil.Process(launcher._srun.process.pid)
                for process in [srun, *srun.children(recursive=True)]:
                    process.kill()

    token = tmp_path / "token"
    write_token_file(token, Token.new())
    options = ["--threads", "1", "--token-file", str(token)]
    launcher = SlurmWorkers(["-n1", "-n1"], COMMAND, options, listen="127.0.0.1:0")
    recovery = Recovery(folder=tmp_path / "recovery", every_seconds=3600.0, wait_seconds=60.0)
    strategy = HeteroPipelineStrategy(
        launcher, "even", micro_batches=4, token_file=token, recovery=recovery
    )
    with caplog.at_level(logging.INFO):
        found = fit(Killing(), strategy)
    assert found.losses == expected.losses
    assert not differing(found, expected)
    assert caplog.text.count("It is started once more, for the worker slurm-") == 1
    assert not processes_of("slurm-0")


def test_an_srun_that_ends_again_is_started_every_few_seconds_and_told(
    srun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_module, "BETWEEN_STARTS_SECONDS", 0.0)
    srun.write_text("#!/bin/sh\necho 'srun: error: Job has expired' >&2; exit 1\n")
    launcher = SlurmWorkers(["-n1"])
    assert launcher.start_again("slurm-0") == ""
    launcher.start(Address("127.0.0.1", 1), None)
    try:
        first = launcher._srun
        first.process.wait(20)
        assert launcher.start_again("somebody's own") == ""
        assert launcher.start_again("slurm-0") == (
            "`srun` has ended with status 1. It printed: srun: error: Job has expired It is "
            "started once more, for the worker slurm-0."
        )
        second = launcher._srun
        assert second.words == first.words
        second.process.wait(20)
        monkeypatch.setattr(launcher_module, "BETWEEN_STARTS_SECONDS", 3600.0)
        assert launcher.start_again("slurm-0") == ""
        assert launcher._srun is second
    finally:
        launcher.stop()
    assert launcher.start_again("slurm-0") == ""


def test_the_command_line_is_one_srun_with_a_colon_between_components() -> None:
    launcher = SlurmWorkers(["--gres=gpu:a100:1 -n4", "-n8"], srun=["srun", "--partition=gpu"])
    assert launcher.least == 12
    words = launcher._words(Address("10.0.0.1", 7070))
    assert words[:5] == ["srun", "--partition=gpu", "--gres=gpu:a100:1", "-n4", "sh"]
    assert words[7:10] == [":", "-n8", "sh"]
    assert words[6] == words[-1]
    assert "do { lightning-hetero worker --join 10.0.0.1:7070 " in words[-1]
    assert '--name "slurm-$SLURM_PROCID"\n} & ' in words[-1]


@pytest.mark.usefixtures("srun")
def test_a_node_without_the_token_is_told() -> None:
    options = ["--token-file", "/nowhere/token"]
    launcher = SlurmWorkers(["-n1"], COMMAND, options, listen="127.0.0.1:0")
    told = r"srun ended with status 1\. It printed: .*There is no token file '/nowhere/token'"
    with pytest.raises(JoinError, match=told):
        fit(TinyModule(), HeteroPipelineStrategy(launcher, "even"))
    assert launcher._srun is None


def test_an_srun_that_fails_is_told_with_what_it_printed(srun: Path) -> None:
    srun.write_text("#!/bin/sh\necho 'srun: error: Invalid gres' >&2; exit 1\n")
    launcher = SlurmWorkers(["--gres=moon:1"], listen="127.0.0.1:0")
    told = r"srun ended with status 1\. It printed: srun: error: Invalid gres Start that command"
    with pytest.raises(JoinError, match=told):
        fit(TinyModule(), HeteroPipelineStrategy(launcher, "even"))
    assert launcher._srun is None


def test_one_that_waits_in_the_queue_too_long_is_told_and_ended(srun: Path) -> None:
    srun.write_text("#!/bin/sh\necho 'srun: job 7 queued' >&2\nexec sleep 60\n")
    launcher = SlurmWorkers(["-n1"], listen="127.0.0.1:0", wait_seconds=0.5)
    told = r"Missing: one more worker\. srun still runs; `squeue` shows .*`wait_seconds`"
    with pytest.raises(JoinError, match=told):
        fit(TinyModule(), HeteroPipelineStrategy(launcher, "even"))
    assert launcher._srun is None


def test_without_srun_the_error_names_it() -> None:
    launcher = SlurmWorkers(["-n1"], srun=["/no/such/srun"])
    with pytest.raises(WorkerError, match="'/no/such/srun' cannot be started"):
        launcher.start(Address("127.0.0.1", 1), None)


@pytest.mark.parametrize(
    ("component", "count"),
    [("", 1), ("-n4", 4), ("-n 4", 4), ("--ntasks=4 -N2", 4), ("--ntasks 12", 12), ("-N2", 1)],
)
def test_tasks_are_counted_as_srun_does(component: str, count: int) -> None:
    assert tasks_of(component) == count


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(PlanError, match="`components` of SlurmWorkers is empty"):
        SlurmWorkers([])
    with pytest.raises(PlanError, match="No closing quotation"):
        SlurmWorkers(["--comment='a"])


def test_a_config_names_it() -> None:
    made = strategy_of_config("lightning_hetero.SlurmWorkers", components=["-n2"])
    assert made._fleet._launcher == SlurmWorkers(["-n2"])
