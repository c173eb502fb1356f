from __future__ import annotations

from pathlib import Path

import pytest

from lightning_hetero.errors import TokenError
from lightning_hetero.pairing.exchange import Receipt
from lightning_hetero.pairing.token_file import keep_token, pairing_file, token_here
from lightning_hetero.transport.token import FILE_VARIABLE, Token, read_token_file


@pytest.mark.follows("unset the variable, or name a file with `--token-file`.")
def test_a_switched_off_token_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(FILE_VARIABLE, "")
    with pytest.raises(TokenError, match=f"variable {FILE_VARIABLE} is empty"):
        pairing_file(None)
    assert pairing_file(tmp_path / "named") == tmp_path / "named"
    monkeypatch.delenv(FILE_VARIABLE)
    assert pairing_file(None) == tmp_path / ".config" / "lightning-hetero" / "token"
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "other"))
    assert pairing_file(None) == tmp_path / "other"


def test_a_token_is_made_once(tmp_path: Path) -> None:
    made = token_here(tmp_path / "token")
    assert token_here(tmp_path / "token") == made == read_token_file(tmp_path / "token")


def test_a_token_that_is_there_stays(tmp_path: Path) -> None:
    path, token = tmp_path / "token", Token.new()
    assert keep_token(path, token) == Receipt.KEPT
    assert keep_token(path, token) == Receipt.SAME
    assert keep_token(path, Token.new()) == Receipt.OTHER_TOKEN
    assert read_token_file(path) == token


def test_a_file_that_is_open_to_others_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "token"
    keep_token(path, Token.new())
    path.chmod(0o644)
    with pytest.raises(TokenError, match="mode 0644"):
        keep_token(path, Token.new())
    with pytest.raises(TokenError, match="mode 0644"):
        token_here(path)
