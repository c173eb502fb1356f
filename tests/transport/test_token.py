"""What a token stands for: one authority, and certificates that say nothing else.

Token files: made once, read by their owner only, and never seen elsewhere.
"""

from __future__ import annotations

import copy
import datetime
import errno
import os
import pickle
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from lightning_hetero.errors import TokenError
from lightning_hetero.transport import token as t
from lightning_hetero.transport.tls import CLOCK_SKEW, RENEWAL, Authority
from lightning_hetero.transport.token import (
    SECRET_BYTES,
    Token,
    find_token_file,
    read_token_file,
    write_token_file,
)

NOW = datetime.datetime(2026, 11, 21, tzinfo=datetime.timezone.utc)
TOKEN = Token(bytes(range(SECRET_BYTES)))


def test_the_same_token_stands_for_the_same_authority_everywhere() -> None:
    assert Authority(TOKEN).certificate == Authority(TOKEN).certificate
    assert Authority(TOKEN).certificate != Authority(Token.new()).certificate


def test_every_certificate_has_a_key_of_its_own() -> None:
    authority = Authority(TOKEN)
    one, other = authority.issue(NOW), authority.issue(NOW)
    assert one.key != other.key
    assert one.public != other.public
    assert "PRIVATE" not in repr(one)


def test_a_certificate_is_signed_by_its_own_authority() -> None:
    certificate = x509.load_pem_x509_certificate(Authority(TOKEN).issue(NOW).public)
    certificate.verify_directly_issued_by(
        x509.load_pem_x509_certificate(Authority(TOKEN).certificate)
    )
    stranger = x509.load_pem_x509_certificate(Authority(Token.new()).certificate)
    with pytest.raises(InvalidSignature):
        certificate.verify_directly_issued_by(stranger)


def test_a_certificate_signs_no_others_and_names_no_host() -> None:
    certificate = x509.load_pem_x509_certificate(Authority(TOKEN).issue(NOW).public)
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not constraints.ca
    assert certificate.subject.rfc4514_string() == "CN=lightning-hetero"
    with pytest.raises(x509.ExtensionNotFound):
        certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)


def test_a_certificate_is_short_lived_and_allows_for_clocks_that_are_days_apart() -> None:
    certificate = x509.load_pem_x509_certificate(Authority(TOKEN).issue(NOW).public)
    assert certificate.not_valid_before_utc == NOW - CLOCK_SKEW
    assert certificate.not_valid_after_utc == NOW + RENEWAL + CLOCK_SKEW
    assert datetime.timedelta(days=1) < CLOCK_SKEW < datetime.timedelta(days=7)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a folder" / "token"


def test_a_token_is_written_for_its_owner_only_and_read_again(path: Path) -> None:
    before = os.umask(0)
    try:
        write_token_file(path, Token.new())
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    token = read_token_file(path)
    assert len(token.secret) == 32
    assert Token.from_text(token.to_text()) == token


def test_no_two_tokens_are_alike() -> None:
    assert Token.new() != Token.new()


def test_a_token_file_is_never_overwritten(path: Path) -> None:
    write_token_file(path, Token.new())
    content = path.read_bytes()
    with pytest.raises(TokenError, match=r"is there already.*remove this one first"):
        write_token_file(path, Token.new())
    assert path.read_bytes() == content


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TokenError, match=r"cannot be written.*file"):
        write_token_file(tmp_path / "file" / "folder" / "token", Token.new())


def test_a_full_disk_leaves_no_half_token(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(_token: Token) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Token, "to_text", no_room)
    with pytest.raises(TokenError, match=r"cannot be written: No space left"):
        write_token_file(path, Token.new())
    assert not path.exists()


def test_a_missing_file_is_named_with_the_remedy(path: Path) -> None:
    with pytest.raises(TokenError, match=r"no token file '.*token'; make one with `lightning-h"):
        read_token_file(path)


def test_a_folder_cannot_be_read_as_a_token_file(tmp_path: Path) -> None:
    with pytest.raises(TokenError, match=r"cannot be read.*directory"):
        read_token_file(tmp_path)


def test_a_named_pipe_is_refused_at_once(path: Path) -> None:
    path.parent.mkdir()
    os.mkfifo(path, 0o600)
    with pytest.raises(
        TokenError, match=r"'.*token' is not a plain file, but a pipe.*lightning-hetero"
    ):
        read_token_file(path)


def test_a_device_is_refused() -> None:
    with pytest.raises(TokenError, match="'/dev/null' is not a plain file"):
        read_token_file(Path("/dev/null"))


@pytest.mark.follows(
    "so that another user may exchange the token; copy the file, or `chown …`",
)
def test_a_file_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_token_file(path, Token.new())
    if os.geteuid() == 0:
        os.chown(path, 1234, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 1234)
    with pytest.raises(TokenError, match=r"belongs to the user with number .*`chown \d+ .*token`"):
        read_token_file(path)
    if os.geteuid() == 0:
        os.chown(path, os.geteuid(), -1)
    else:
        monkeypatch.undo()
    read_token_file(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="a file of root is this user's own")
def test_a_file_of_root_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = Token.new()
    write_token_file(path, token)
    stat_of = os.fstat
    fields = [*stat_of(0)]

    def roots(descriptor: int) -> os.stat_result:
        fields[:] = stat_of(descriptor)
        return os.stat_result([*fields[:4], 0, *fields[5:10]])

    monkeypatch.setattr(os, "fstat", roots)
    assert read_token_file(path) == token


@pytest.mark.parametrize("depth", [0, 1])
def test_a_folder_in_which_all_may_write_is_refused(path: Path, depth: int) -> None:
    """Another user could put a token of their own in the file's place; not so in /tmp."""
    path = path.parent / "inner" / "token"
    token = Token.new()
    write_token_file(path, token)
    folder = path.parents[depth]
    folder.chmod(0o777)
    with pytest.raises(
        TokenError, match=rf"is in '{folder}', where all .* \(mode 0777\); `chmod o-w"
    ):
        read_token_file(path)
    link = path.parents[1] / "link"
    link.symlink_to(path)
    with pytest.raises(TokenError, match=rf"is in '{folder}', where all"):
        read_token_file(link)
    folder.chmod(0o1777)
    assert read_token_file(path) == token


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named(path: Path) -> None:
    write_token_file(path, Token.new())
    path.chmod(0)
    with pytest.raises(TokenError, match="cannot be read"):
        read_token_file(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o601, 0o777])
def test_a_file_that_is_open_to_others_is_refused(path: Path, mode: int) -> None:
    write_token_file(path, Token.new())
    path.chmod(mode)
    with pytest.raises(TokenError, match=rf"has mode {mode:04o}.*chmod 600"):
        read_token_file(path)


WEAK = {
    "nothing": "",
    "a password": "correct horse battery staple",
    "a key of another kind": "0" * 64,
    "a token cut short": Token.new().to_text()[:-1],
    "two tokens": Token.new().to_text() + " " + Token.new().to_text(),
    "a mark alone": "lht1_",
    "zeros of the right length": "lht1_" + "A" * 48,
    "letters of other languages": "lht1_" + "ä" * 48,
    "a long text": "x" * 10_000,
}


@pytest.mark.parametrize("name", WEAK)
def test_a_text_that_is_no_token_is_refused_and_not_repeated(path: Path, name: str) -> None:
    path.parent.mkdir()
    path.write_text(WEAK[name])
    path.chmod(0o600)
    with pytest.raises(TokenError, match="cannot be used") as refused:
        read_token_file(path)
    words = WEAK[name].split()
    assert not any(len(word) > 3 and word in str(refused.value) for word in words)


@pytest.mark.parametrize("place", range(0, 48, 5))
def test_a_single_wrong_letter_damages_a_token(place: int) -> None:
    text = Token.new().to_text()
    index = len(text) - 48 + place
    wrong = text[:index] + ("A" if text[index] != "A" else "B") + text[index + 1 :]
    with pytest.raises(ValueError, match="damaged"):
        Token.from_text(wrong)


def test_spaces_around_a_token_do_no_harm() -> None:
    token = Token.new()
    assert Token.from_text(f"\n {token.to_text()}\r\n\n") == token


def test_a_token_does_not_print_and_is_not_pickled() -> None:
    token = Token.new()
    assert repr(token) == str(token) == "Token()"
    for leak in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled"):
            leak(token)


def test_a_user_without_a_home_folder_has_no_default_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_home(_path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    monkeypatch.delenv(t.FILE_VARIABLE)
    assert find_token_file(None) is None
    with pytest.raises(TokenError, match="'~/named' cannot be found.*by its whole path, or set"):
        find_token_file("~/named")


def test_a_default_file_that_this_user_may_not_see_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def forbid(_path: object) -> None:
        raise PermissionError

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(t.FILE_VARIABLE)
    monkeypatch.setattr(Path, "stat", forbid)
    monkeypatch.setattr(Path, "exists", forbid)
    assert find_token_file(None) is None


def test_the_named_file_comes_first_then_the_variable_then_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(t.FILE_VARIABLE)
    assert find_token_file(None) is None
    default = t.DEFAULT_FILE.expanduser()
    write_token_file(default, Token.new())
    assert find_token_file(None) == default
    monkeypatch.setenv(t.FILE_VARIABLE, "~/elsewhere")
    assert find_token_file(None) == tmp_path / "elsewhere"
    assert find_token_file("~/named") == tmp_path / "named"
    monkeypatch.setenv(t.FILE_VARIABLE, "")
    assert find_token_file(None) is None
