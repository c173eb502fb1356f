from __future__ import annotations

import io
from pathlib import Path

import pytest

from lightning_hetero import cli
from lightning_hetero.model.imports import Allowed
from lightning_hetero.runtime.token import FILE_VARIABLE, Token, read_token_file
from lightning_hetero.runtime.worker import Worker


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """What the command exits with."""
    monkeypatch.setattr("sys.argv", ["lightning-hetero", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_help_lists_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--help") == 0
    assert "worker" in capsys.readouterr().out


def test_without_a_command_the_usage_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch) == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["9999", "host:", "host:99999", ":1"])
def test_a_bad_address_is_refused_with_its_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    assert run(monkeypatch, "worker", "--listen", address) == 2
    assert "--listen" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["./my_package", "my-package", "my_package.", ""])
def test_what_is_no_package_name_cannot_be_allowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str
) -> None:
    assert run(monkeypatch, "worker", "--allow", package) == 2
    assert "is not the name of a package" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], Allowed()),
        (["--allow", "a", "--allow", "b.c"], Allowed(("a", "b.c"))),
        (
            ["--allow=a", "--script", "s.py", "--allow", "x"],
            Allowed(("a",), ("s.py", "--allow", "x")),
        ),
    ],
    ids=["nothing", "packages", "a script with options of its own"],
)
def test_a_worker_allows_what_it_was_told(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: Allowed
) -> None:
    allowed: list[Allowed] = []

    def serve(worker: Worker) -> None:
        worker.stop()
        allowed.append(worker._allowed)

    monkeypatch.setattr(Worker, "serve_forever", serve)
    common = ["lightning-hetero", "worker", "--listen", "127.0.0.1:0", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", [*common, *arguments])
    cli.main()
    assert allowed == [expected]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--listen", "0.0.0.0:9999"], "loopback only"),
        (["--token-file", "/nowhere/token"], "There is no token file '/nowhere/token'"),
        (["--device", "nonsense"], "device 'nonsense' cannot be used"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    assert expected in str(run(monkeypatch, "worker", *arguments))


def test_a_token_is_made_once_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "token"
    monkeypatch.setattr("sys.argv", ["lightning-hetero", "token", str(path)])
    cli.main()
    said = capsys.readouterr()
    assert f"Wrote a new token to {path}." in said.out
    assert f"< {path}" in said.out
    assert read_token_file(path).to_text() not in said.out + said.err
    assert "is there already" in str(run(monkeypatch, "token", str(path)))


def test_a_token_goes_to_the_home_folder_by_itself_and_is_found_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(FILE_VARIABLE)
    monkeypatch.setattr("sys.argv", ["lightning-hetero", "token"])
    cli.main()
    found: list[Worker] = []

    def serve(worker: Worker) -> None:
        worker.stop()
        found.append(worker)

    monkeypatch.setattr(Worker, "serve_forever", serve)
    common = ["lightning-hetero", "worker", "--device", "cpu", "--listen"]
    monkeypatch.setattr("sys.argv", [*common, "0.0.0.0:0"])
    cli.main()
    monkeypatch.setenv(FILE_VARIABLE, "")
    monkeypatch.setattr("sys.argv", [*common, "127.0.0.1:0"])
    cli.main()
    assert [worker._identity.credentials is None for worker in found] == [False, True]


def test_a_pasted_token_is_the_same_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    token, path = Token.new(), tmp_path / "token"
    monkeypatch.setattr("sys.argv", ["lightning-hetero", "token", "--paste", str(path)])
    monkeypatch.setattr("sys.stdin", io.StringIO(f"  {token.to_text()}\n"))
    cli.main()
    assert read_token_file(path) == token
    assert token.to_text() not in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO(token.to_text()[:-3]))
    other = tmp_path / "other"
    said = str(run(monkeypatch, "token", "--paste", str(other)))
    assert "Nothing was written: the token there is damaged" in said
    assert not other.exists()
