"""The command: a line for each check, JSON, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_hetero import cli
from lightning_hetero.doctor.checks import CHECKS
from lightning_hetero.transport.tls import Credentials
from lightning_hetero.transport.token import Token, write_token_file

from ..transport.pairs import closed_address, worker_thread


def doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[object, str]:
    """The exit code and the output of the command."""
    monkeypatch.setenv("COLUMNS", "160")
    common = ["lightning-hetero", "doctor", "--seconds", "0.02"]
    monkeypatch.setattr("sys.argv", [*common, *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, capsys.readouterr().out


def test_a_line_for_each_check_and_one_verdict_for_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    token, path = Token.new(), tmp_path / "token"
    write_token_file(path, token)
    closed = closed_address()
    with worker_thread(Credentials(token)) as address:
        code, shown = doctor(monkeypatch, capsys, str(address), "--token-file", str(path))
        assert code == 0
        assert f"{address} can be used" in shown
        assert [line.split()[0] for line in shown.splitlines() if " ok " in line] == [*CHECKS[:-1]]
        both = [str(address), str(closed), "--token-file", str(path)]
        code, shown = doctor(monkeypatch, capsys, *both)
    assert code == 1
    assert f"{closed} cannot be used: port" in shown
    assert token.to_text() not in shown


def test_programs_read_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with worker_thread() as address:
        code, shown = doctor(monkeypatch, capsys, str(address), str(closed_address()), "--json")
    found = json.loads(shown)
    assert code == 1
    assert found["usable"] is False
    healthy, closed = found["workers"]
    assert healthy["usable"] is True
    assert closed["failing"] == "port"
    checks = {check["check"]: check for check in healthy["checks"]}
    assert list(checks) == list(CHECKS)
    assert checks["bandwidth"]["figures"]["there_bytes_per_second"] > 0


def test_a_token_file_that_is_not_there_is_the_tokens_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with worker_thread() as address:
        code, shown = doctor(monkeypatch, capsys, str(address), "--token-file", "/nowhere/token")
    assert code == 1
    assert "cannot be used: token" in shown


def test_a_plan_needs_its_profile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = doctor(monkeypatch, capsys, "127.0.0.1:1", "--plan", "plan.yaml")
    assert "name the profile of its model" in str(code)


@pytest.mark.parametrize("option", ["--timeout", "--seconds"])
@pytest.mark.parametrize("value", ["-1", "0", "nan", "long"])
def test_a_time_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-hetero", "doctor", "a:1", f"{option}={value}"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    told = f"{option}: '{value}' is not a number of seconds from 0.01 to 3600"
    assert told in capsys.readouterr().err
