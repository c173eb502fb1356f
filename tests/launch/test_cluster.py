"""Cluster files: what is refused; workers that scripts start, ask and end."""

from __future__ import annotations

import os
import shlex
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from lightning_hetero import ClusterFile, HeteroPipelineStrategy, cli
from lightning_hetero.errors import ClusterError, WorkerUnreachable
from lightning_hetero.launch.cluster import Machine, carry_out, read_cluster
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.token import FILE_VARIABLE, Token

from ..equality import differing
from ..models import TinyModule, fit
from .sshd import COMMAND, reason_against_sshd, ssh_server, stand_in

WHERE = Address("127.0.0.1", 9)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of the test's own, in which the workers keep their files."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv(FILE_VARIABLE)
    return folder


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def write_cluster(folder: Path, *machines: str, more: str = "") -> Path:
    path = folder / "cluster.yaml"
    lines = "".join(f"  - {{{machine}}}\n" for machine in machines)
    path.write_text(f"machines:\n{lines}token_file: token\n{more}")
    return path


def said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[str, object]:
    """What a command prints, and with what it exits."""
    monkeypatch.setattr("sys.argv", ["lightning-hetero", *words])
    code: object = 0
    try:
        cli.main()
    except SystemExit as end:
        code = end.code
    return capsys.readouterr().out, code


def is_alive(number: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return bool(psutil.Process(number).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def cluster(home: Path, tmp_path: Path) -> Iterator[Path]:
    """A cluster of this machine, and of this machine by a stand-in for ssh."""
    program = shlex.join([*stand_in(tmp_path), "gpu1"])
    first, second = free_ports(2)
    options = f"command: '{COMMAND}', options: [--threads, '1']"
    path = write_cluster(
        tmp_path,
        f"name: here, ssh: local, address: '127.0.0.1:{first}', {options}",
        f"name: there, ssh: {program}, address: '127.0.0.1:{second}', {options}",
    )
    yield path
    for file in (home / ".local/state/lightning-hetero").glob("*.pid"):
        with suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGKILL)


def test_up_train_status_and_down(
    cluster: Path,
    workers: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = fit(TinyModule(), HeteroPipelineStrategy(workers[:2], "even", micro_batches=4))
    capsys.readouterr()
    text, code = said(monkeypatch, capsys, "status", str(cluster))
    assert code == 1
    assert text.count("does not run; `lightning-hetero up` starts it") == 2
    text, code = said(monkeypatch, capsys, "up", str(cluster))
    assert code == 0, text
    assert text.count("runs, and can be used") == 2
    assert f"Wrote a new token to {cluster.parent / 'token'}." in text
    assert f"All can be used: HeteroPipelineStrategy(workers=ClusterFile('{cluster}'))" in text
    strategy = HeteroPipelineStrategy(ClusterFile(str(cluster)), "even", micro_batches=4)
    found = fit(TinyModule(), strategy)
    assert found.losses == expected.losses
    assert not differing(found, expected)
    capsys.readouterr()
    folder = Path.home() / ".local/state/lightning-hetero"
    numbers = [int(file.read_text()) for file in sorted(folder.glob("*.pid"))]
    token = (cluster.parent / "token").read_text().strip()
    assert all(token not in " ".join(psutil.Process(number).cmdline()) for number in numbers)
    text, code = said(monkeypatch, capsys, "up", str(cluster))  # finds them as they are
    assert (text.count("runs, and can be used"), code) == (2, 0)
    assert [int(file.read_text()) for file in sorted(folder.glob("*.pid"))] == numbers
    text, code = said(monkeypatch, capsys, "down", str(cluster))
    assert (text, code) == ("here  has ended\nthere  has ended\n", 0)
    assert not any(is_alive(number) for number in numbers)
    assert not list(folder.glob("*.token"))
    text, code = said(monkeypatch, capsys, "down", "--now", str(cluster))
    assert (text, code) == ("here  did not run\nthere  did not run\n", 0)
    told = f"No worker answers at .* `lightning-hetero up {cluster}` starts what does not run"
    with pytest.raises(WorkerUnreachable, match=told):
        fit(TinyModule(), HeteroPipelineStrategy(ClusterFile(str(cluster)), "even"))


def test_two_files_with_a_machine_of_one_name_have_a_worker_each(cluster: Path) -> None:
    machine = read_cluster(cluster).machines[0]
    first, second = (Address("127.0.0.1", port) for port in free_ports(2))
    token = Token.new()
    assert carry_out(machine, machine.script("up", first, token)).word == "started"
    assert carry_out(machine, machine.script("status", second)).word == "stopped"
    assert carry_out(machine, machine.script("down", second)).word == "stopped"
    started = carry_out(machine, machine.script("up", second, token))
    assert started.word == "started"
    assert carry_out(machine, machine.script("now", first)).word == "ended"
    assert carry_out(machine, machine.script("status", second)).text == started.text


def test_what_is_missing_on_a_machine_is_said(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ssh = stand_in(tmp_path)[0]
    path = write_cluster(
        tmp_path,
        f"name: bare, ssh: {ssh} gpu1, command: no-such-command, address: '127.0.0.1:9'",
        f"name: gone, ssh: {ssh} nowhere",
        "name: odd, ssh: /no/such/ssh gpu1",
    )
    text, code = said(monkeypatch, capsys, "up", str(path))
    assert code == "0 of 3 workers can be used."
    bare, gone, odd = [line for line in text.splitlines() if not line.startswith("Wrote")]
    assert bare.startswith("bare  127.0.0.1:9  The worker did not start; its log says: ")
    assert "no-such-command: not found" in bare
    assert "ended with status 255 and printed: ssh: Could not resolve hostname nowhere" in gone
    assert "must work without a question" in gone
    assert odd == "odd  odd:9999  '/no/such/ssh' cannot be started here: No such file or directory."
    assert home.exists()


@pytest.mark.skipif(reason_against_sshd() is not None, reason=str(reason_against_sshd()))
def test_a_real_server_runs_the_scripts(tmp_path: Path) -> None:
    with ssh_server(tmp_path) as words:
        machine = Machine("gpu1", ssh=shlex.join([*words, "gpu1"]))
        assert carry_out(machine, machine.script("status", WHERE)).word == "stopped"
        assert carry_out(machine, machine.script("down", WHERE)).word == "stopped"


def test_a_worker_ends_at_once_if_that_is_wanted(cluster: Path) -> None:
    content = read_cluster(cluster)
    machine = content.machines[0]
    script = machine.script("up", content.where(machine), Token.new())
    assert carry_out(machine, script).word == "started"
    assert carry_out(machine, machine.script("now", content.where(machine))).word == "ended"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("machines: []", "`machines` is empty"),
        ("machines: [{name: a}, {name: a}]", "Two machines are called 'a'"),
        ("machines: [{name: a b}]", "'a b' is not a name for a machine"),
        ("machines: [{name: a, address: '1'}]", "The key `address` of a: '1' is not an address"),
        ("machines: [{name: a, listen: '1'}]", "The key `listen` of a: '1' is not an address"),
        ('machines: [{name: a, ssh: "\'"}]', "close each quote"),
        ("machines: [{name: a, command: ''}]", "`command` of a is empty"),
        ("machines: [{name: a, user: me}]", "The key 'user' in machines.* is unknown"),
        (
            "machines: [{name: a, address: 'h:1'}, {name: b, address: 'h:1'}]",
            "Two machines have the address h:1",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(text: str, wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ClusterError, match=f"(?s)The cluster file .*cluster.yaml' .*{wrong}"):
        read_cluster(path)


def test_a_machine_is_called_by_its_name_unless_the_file_says_more(tmp_path: Path) -> None:
    cluster = read_cluster(
        write_cluster(tmp_path, "name: a", "name: b, address: 'c:7'", more="port: 8")
    )
    assert cluster.addresses == ["a:8", "c:7"]
    assert cluster.token_file == str(tmp_path / "token")
    assert cluster.machines[0].words()[-2:] == ["a", "sh -s"]
    assert Machine("a", ssh="ssh -p 2 me@a").words()[0] == "ssh"
