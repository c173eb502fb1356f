"""Workers that ssh starts: by a real server on loopback where there is one, and by a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from lightning_hetero import HeteroPipelineStrategy, Recovery, SshWorkers
from lightning_hetero.coordinator.fleet import LaunchedWorkers
from lightning_hetero.errors import JoinError, PlanError, WorkerError
from lightning_hetero.launch import launcher as launcher_module
from lightning_hetero.launch.ssh import names_of
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.token import Token

from ..equality import differing
from ..models import TinyModule, fit
from .configs import strategy_of_config
from .sshd import COMMAND, reason_against_sshd, ssh_server, stand_in

REASON = reason_against_sshd()
NEEDS_SSHD = pytest.mark.skipif(REASON is not None, reason=str(REASON))
LOOPBACK = "127.0.0.1:0"


@pytest.fixture(
    scope="module", params=[pytest.param("real", marks=NEEDS_SSHD), pytest.param("stand-in")]
)
def ssh(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[str]]:
    """The words of ssh, for which gpu1 and gpu2 are this machine."""
    folder = tmp_path_factory.mktemp("ssh")
    if request.param == "stand-in":
        yield stand_in(folder)
        return
    with ssh_server(folder) as words:
        yield words


def workers_of(ssh: list[str], *hosts: str, **options: object) -> SshWorkers:
    given = {"command": COMMAND, "options": ["--threads", "1"], "listen": LOOPBACK, **options}
    return SshWorkers(list(hosts), ssh=ssh, **given)  # type: ignore[arg-type]


def remote_workers() -> list[psutil.Process]:
    """The workers on this machine that ssh or its stand-in has started."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if {"--join", "--stop-with-stdin"} <= set(process.info["cmdline"] or ())
    ]


def test_two_machines_train_with_the_numbers_of_local_workers_and_nothing_is_left(
    ssh: list[str], workers: list[str]
) -> None:
    expected = fit(TinyModule(), HeteroPipelineStrategy(workers[:2], "even", micro_batches=4))
    launcher = workers_of(ssh, "gpu1", "gpu2")
    before = remote_workers()
    strategy = HeteroPipelineStrategy(launcher, "even", micro_batches=4)
    found = fit(TinyModule(), strategy)
    assert found.losses == expected.losses
    assert not differing(found, expected)
    _, alive = psutil.wait_procs([p for p in remote_workers() if p not in before], timeout=20)
    assert not alive


def test_an_error_of_the_run_ends_them_too(ssh: list[str]) -> None:
    class Broken(TinyModule):
        def training_step(self, batch: object, batch_idx: int) -> object:
            raise RuntimeError("no")

    launcher, before = workers_of(ssh, "gpu1"), remote_workers()
    with pytest.raises(RuntimeError, match="no"):
        fit(Broken(), HeteroPipelineStrategy(launcher, "even", check_first_batch="off"))
    assert not launcher._commands
    _, alive = psutil.wait_procs([p for p in remote_workers() if p not in before], timeout=20)
    assert not alive


def test_a_machine_without_the_command_is_an_error_with_the_remedy(ssh: list[str]) -> None:
    launcher = workers_of(ssh, "gpu1", command="no-such-command")
    expected = r"still needs one more worker\. `ssh gpu1` ended with status 127\. It printed: .*"
    with pytest.raises(JoinError, match=expected + r"not found.* with `command=`"):
        fit(TinyModule(), HeteroPipelineStrategy(launcher, "even"))
    assert not launcher._commands


def test_a_machine_that_is_not_there_is_an_error_with_the_remedy(ssh: list[str]) -> None:
    launcher = workers_of(ssh, "no-such-machine.invalid")
    expected = r"`ssh no-such-machine.invalid` ended with status 255\. It printed: .*resolve"
    with pytest.raises(JoinError, match=expected):
        fit(TinyModule(), HeteroPipelineStrategy(launcher, "even"))


def test_ctrl_c_during_the_wait_ends_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = SshWorkers(["gpu1"], "sleep 60; :", ssh=stand_in(tmp_path), listen=LOOPBACK)
    started: list[psutil.Process] = []

    def interrupted(is_late: bool) -> list[str]:
        started.extend(psutil.Process(each.process.pid) for each in launcher._commands.values())
        launcher._commands["gpu1"].process.kill()  # a worker ends with its input; this one sleeps
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "faults", interrupted)
    fleet = LaunchedWorkers(launcher, None)
    with pytest.raises(KeyboardInterrupt):
        fleet.find(torch.device("cpu"), Deadlines())
    assert len(started) == 1
    assert not started[0].is_running()
    assert fleet._door is None
    assert not launcher._commands


def test_one_machine_less_is_no_fault_if_enough_are_left(tmp_path: Path) -> None:
    launcher = SshWorkers(["gpu1", "nowhere"], "sleep 60; :", ssh=stand_in(tmp_path), least=1)
    launcher.start(Address("127.0.0.1", 1), Token.new())
    try:
        launcher._commands["nowhere"].process.wait(20)
        assert launcher.faults(is_late=False) == []
        told, other = launcher.faults(is_late=True)
        assert "`ssh nowhere` ended with status 255" in told
        assert "`ssh gpu1` still runs, and its worker was started to join 127.0.0.1:1." in other
        assert "with `join=`" in other
    finally:
        launcher._commands["gpu1"].process.kill()
        launcher.stop()
        launcher.stop()


def test_what_a_late_worker_has_printed_and_where_it_dials_is_in_the_error(tmp_path: Path) -> None:
    """Nobody is told to start by hand what the launcher has started."""
    command = "echo No route to the coordinator; sleep 60; :"
    launcher = SshWorkers(
        ["gpu1"], command, ssh=stand_in(tmp_path), listen=LOOPBACK, wait_seconds=1.0
    )
    expected = (
        r"`ssh gpu1` still runs, and its worker was started to join 127.0.0.1:\d+\. It printed: No "
        r"route to the coordinator .*`join=`\. Take fewer workers with `least`, or wait longer"
    )
    with pytest.raises(JoinError, match=expected) as refused:
        fit(TinyModule(), HeteroPipelineStrategy(launcher, "even"))
    assert "Start `lightning-hetero worker" not in str(refused.value)


def test_a_worker_is_started_again_only_when_its_ssh_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_module, "BETWEEN_STARTS_SECONDS", 0.0)
    launcher = SshWorkers(["gpu1", "gpu1"], "sleep 60; :", ssh=stand_in(tmp_path))
    launcher.start(Address("127.0.0.1", 1), Token.new())
    try:
        first = launcher._commands["gpu1-2"]
        assert launcher.start_again("gpu1-2") == ""
        assert launcher.start_again("somebody's own") == ""
        first.process.kill()
        first.process.wait(20)
        assert launcher.start_again("gpu1") == ""
        said = launcher.start_again("gpu1-2")
        assert said.startswith("`ssh gpu1` has ended with status -9.")
        assert said.endswith("It is started once more, for the worker gpu1-2.")
        second = launcher._commands["gpu1-2"]
        assert second.status is None
        assert second.words == first.words
        second.process.kill()
        second.process.wait(20)
        monkeypatch.setattr(launcher_module, "BETWEEN_STARTS_SECONDS", 3600.0)
        assert launcher.start_again("gpu1-2") == ""  # too early
        monkeypatch.setattr(launcher_module, "BETWEEN_STARTS_SECONDS", 0.0)
        assert launcher.start_again("gpu1-2")
    finally:
        for command in launcher._commands.values():
            command.process.kill()
        launcher.stop()
    assert launcher.start_again("gpu1-2") == ""


def test_a_lost_machine_comes_back_by_ssh(workers: list[str], tmp_path: Path) -> None:
    """Its whole worker is killed, so that ssh ends; the run has the bits of the undisturbed one."""
    expected = fit(TinyModule(), HeteroPipelineStrategy(workers[:1], "even", micro_batches=4))
    before = remote_workers()

    class Killing(TinyModule):
        def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
            if batch_idx == 1:
                for process in remote_workers():
                    if process not in before:
                        process.kill()

    launcher = workers_of(stand_in(tmp_path), "gpu1")
    settings = Recovery(folder=tmp_path / "recovery", every_seconds=3600.0, wait_seconds=60.0)
    strategy = HeteroPipelineStrategy(launcher, "even", micro_batches=4, recovery=settings)
    found = fit(Killing(), strategy)
    assert found.losses == expected.losses
    assert not differing(found, expected)


def test_without_ssh_the_error_names_it() -> None:
    launcher = SshWorkers(["gpu1"], ssh=["/no/such/ssh"])
    with pytest.raises(WorkerError, match="'/no/such/ssh' cannot be started: No such file"):
        launcher.start(Address("127.0.0.1", 1), None)


def test_names_are_those_of_the_machines() -> None:
    assert names_of(["me@gpu1", "gpu1", "10.0.0.7", "gpu1"]) == [
        "gpu1",
        "gpu1-2",
        "10.0.0.7",
        "gpu1-3",
    ]


@pytest.mark.parametrize("hosts", [[], [""], ["-oProxyCommand=sh"], ["two words"]])
def test_what_is_no_machine_is_refused(hosts: list[str]) -> None:
    with pytest.raises(PlanError, match="`hosts` of SshWorkers is empty|is not a machine for ssh"):
        SshWorkers(hosts)


def test_more_workers_than_machines_cannot_be_needed() -> None:
    with pytest.raises(
        PlanError, match="`least` of SshWorkers is 2, and SshWorkers starts 1 at most"
    ):
        SshWorkers(["gpu1"], least=2)


def test_a_config_names_it() -> None:
    made = strategy_of_config("lightning_hetero.SshWorkers", hosts=["gpu1", "gpu2"], least=1)
    assert made._fleet._launcher == SshWorkers(["gpu1", "gpu2"], least=1)
