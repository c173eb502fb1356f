from __future__ import annotations

import pytest

from lightning_hetero import cli


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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--listen", "0.0.0.0:9999"], "loopback only"),
        (["--device", "nonsense"], "device 'nonsense' cannot be used"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    assert expected in str(run(monkeypatch, "worker", *arguments))
