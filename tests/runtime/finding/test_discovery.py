"""Announcing and finding over real multicast, on loopback only."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_interface
from pathlib import Path

import pytest
import torch

from lightning_hetero import cli
from lightning_hetero.errors import DiscoveryError, TokenError
from lightning_hetero.runtime.coordinator.fleet import Fleet
from lightning_hetero.runtime.finding import discovery, finding
from lightning_hetero.runtime.finding.announcement import Recogniser
from lightning_hetero.runtime.finding.discovery import (
    announced,
    announced_worker,
    hear,
    own_interfaces,
)
from lightning_hetero.runtime.finding.finding import find_workers, speak_with
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.handshake import Identity
from lightning_hetero.transport.tls import Credentials
from lightning_hetero.transport.token import Token, write_token_file

from ...transport.pairs import QUICK, worker_thread

LOOPBACK = ["127.0.0.1"]
# Multicast DNS does not repeat within a second what was just announced (RFC 6762, section 6).
LONG_ENOUGH_SECONDS = 1.5

SOON = replace(QUICK, discovery_seconds=LONG_ENOUGH_SECONDS)


@pytest.fixture(scope="module")
def token() -> Token:
    return Token.new()


@pytest.fixture
def token_file(tmp_path: Path, token: Token) -> Path:
    write_token_file(tmp_path / "token", token)
    return tmp_path / "token"


@pytest.fixture
def only_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose only network is loopback, which counts as one."""

    def interfaces() -> list[object]:
        return [ip_interface("127.0.0.1/8")]

    for module in (discovery, finding):
        monkeypatch.setattr(module, "own_interfaces", interfaces)
        monkeypatch.setattr(module, "multicast_hosts", lambda own: LOOPBACK)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_what_is_announced_is_heard_and_told_from_that_of_another_token(token: Token) -> None:
    ours, theirs = Recogniser(token), Recogniser(Token.new())
    mine, other = ours.announcement(LOOPBACK, 1111), theirs.announcement(LOOPBACK, 2222)
    with announced(mine, LOOPBACK), announced(other, LOOPBACK):
        heard = hear(ours, LOOPBACK, LONG_ENOUGH_SECONDS)
    assert heard.ours == [mine]
    assert heard.num_others == 1
    assert hear(ours, LOOPBACK, 0.2).ours == []


@pytest.mark.usefixtures("only_loopback")
def test_workers_that_answer_are_found_and_others_left_out_with_a_line(
    token: Token, token_file: Path
) -> None:
    """Besides a worker: one that is gone, and one of another token at a place that was ours."""
    recogniser, credentials = Recogniser(token), Credentials(token)
    with (
        worker_thread(credentials) as address,
        worker_thread(Credentials(Token.new())) as forged,
        announced(recogniser.announcement(LOOPBACK, address.port), LOOPBACK),
        announced(recogniser.announcement(LOOPBACK, forged.port), LOOPBACK),
        announced(recogniser.announcement(LOOPBACK, closed_port()), LOOPBACK),
    ):
        search = find_workers(token_file, Identity(credentials=credentials), SOON)
        assert [worker.address for worker in search.workers] == [address]
        again = find_workers(token_file, Identity(credentials=credentials), SOON)
        assert again.workers == search.workers, "the worker is free again"
    gone, foreign = sorted(search.left_out, key=lambda text: "No worker answers" not in text)
    assert "No worker answers at 127.0.0.1" in gone
    assert f"The worker at {forged}" in foreign
    assert "the tokens differ" in foreign
    search.check_not_empty()


def test_an_address_that_leads_nowhere_does_not_hide_one_that_does(token: Token) -> None:
    credentials = Credentials(token)
    with worker_thread(credentials) as address:
        announcement = Recogniser(token).announcement(["127.0.0.1", "127.0.0.99"], address.port)
        own = [ip_interface("127.0.0.99/32")]
        identity = Identity(credentials=credentials)
        (only,) = speak_with([announcement], own, identity, QUICK)
        assert getattr(only, "address", None) == address
        first = Recogniser(token).announcement(["127.0.0.1", "::1"], address.port)
        (only,) = speak_with([first], [ip_interface("::1/64")], identity, QUICK)
        assert getattr(only, "address", None) == address


@pytest.mark.usefixtures("only_loopback")
def test_nobody_found_says_what_to_do(token: Token, token_file: Path) -> None:
    identity = Identity(credentials=Credentials(token))
    stranger = Recogniser(Token.new()).announcement(LOOPBACK, 9999)
    with announced(stranger, LOOPBACK):
        search = find_workers(token_file, identity, SOON)
    with pytest.raises(DiscoveryError) as raised:
        search.check_not_empty()
    text = str(raised.value)
    for part in ("within 1.5 s", "1 of another token", "--listen", "UDP port 5353", "WireGuard"):
        assert part in text


def test_without_a_token_nobody_is_looked_for() -> None:
    with pytest.raises(DiscoveryError, match="here is none: make one"):
        find_workers(None, Identity(), SOON)
    with pytest.raises(TokenError, match="no token file"):
        Fleet("auto", "/nowhere/token").find(torch.device("cpu"), SOON)


def without_zeroconf(monkeypatch: pytest.MonkeyPatch) -> None:
    # What Python notes of a module that must not be imported.
    monkeypatch.setitem(sys.modules, "zeroconf", None)


def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "own_interfaces", lambda: [ip_interface("127.0.0.1/8")])
    monkeypatch.setattr(finding, "own_interfaces", lambda: [ip_interface("127.0.0.1/8")])


@pytest.mark.parametrize(
    ("lack", "expected"),
    [
        (without_zeroconf, r"zeroconf is not installed .* pip install 'lightning-hetero\[disc"),
        (without_network, "no network, or none with IPv4"),
    ],
)
def test_looking_says_what_is_lacking(
    monkeypatch: pytest.MonkeyPatch,
    token_file: Path,
    lack: Callable[[pytest.MonkeyPatch], None],
    expected: str,
) -> None:
    lack(monkeypatch)
    with pytest.raises(DiscoveryError, match=expected):
        find_workers(token_file, Identity(), SOON)


EVERYWHERE = Address("0.0.0.0", 9999)  # noqa: S104


def test_a_worker_that_cannot_be_announced_says_so_and_works(
    monkeypatch: pytest.MonkeyPatch, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    without_zeroconf(monkeypatch)
    caplog.set_level(logging.INFO)
    with announced_worker(None, EVERYWHERE, token_file):
        assert "not announced on the local network: zeroconf is not installed" in caplog.text
    with (
        pytest.raises(DiscoveryError, match="zeroconf is not installed"),
        announced_worker(True, EVERYWHERE, token_file),
    ):
        pytest.fail("it was asked for")


@pytest.mark.parametrize("wanted", [None, False])
def test_a_worker_on_loopback_or_one_that_is_told_so_is_silent(
    monkeypatch: pytest.MonkeyPatch,
    token_file: Path,
    caplog: pytest.LogCaptureFixture,
    wanted: bool | None,
) -> None:
    monkeypatch.setattr(discovery, "announced", pytest.fail)
    caplog.set_level(logging.INFO)
    with announced_worker(wanted, Address("127.0.0.1", 9999), token_file):
        pass
    with announced_worker(False, EVERYWHERE, token_file):
        pass
    assert not caplog.text


def test_announcing_on_loopback_is_refused(token_file: Path) -> None:
    with (
        pytest.raises(DiscoveryError, match=r"127\.0\.0\.1:9999 is not announced, since others"),
        announced_worker(True, Address("127.0.0.1", 9999), token_file),
    ):
        pytest.fail("nobody could reach it")


@pytest.mark.usefixtures("only_loopback")
def test_the_fleet_looks_once_in_each_run(
    monkeypatch: pytest.MonkeyPatch, token: Token, token_file: Path
) -> None:
    searches: list[str] = []
    hear_once = finding.hear

    def counted(*arguments: object) -> object:
        searches.append("one")
        return hear_once(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(finding, "hear", counted)
    fleet = Fleet("auto", token_file)
    cpu = torch.device("cpu")
    with (
        worker_thread(Credentials(token)) as address,
        announced(Recogniser(token).announcement(LOOPBACK, address.port), LOOPBACK),
    ):
        patient = replace(Deadlines(), discovery_seconds=LONG_ENOUGH_SECONDS)
        names = fleet.find(cpu, patient)
        assert names == fleet.find(cpu, patient) == [str(address)]
        assert searches == ["one"]
        fleet.connect(names, set(), cpu, patient).close()
        fleet.end(patient)
        assert fleet.find(cpu, patient) == [str(address)]
        assert searches == ["one", "one"]


@pytest.mark.usefixtures("only_loopback")
def test_the_command_lists_them(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    token: Token,
    token_file: Path,
) -> None:
    monkeypatch.setattr("lightning_hetero.cli.workers.Deadlines", lambda: SOON)
    monkeypatch.setattr(
        "sys.argv", ["lightning-hetero", "workers", "--token-file", str(token_file)]
    )
    recogniser, gone = Recogniser(token), closed_port()
    with (
        worker_thread(Credentials(token)) as address,
        announced(recogniser.announcement(LOOPBACK, address.port), LOOPBACK),
        announced(recogniser.announcement(LOOPBACK, gone), LOOPBACK),
    ):
        cli.main()
    found, left_out = capsys.readouterr().out.splitlines()
    assert found.startswith(f"{address} (")
    assert left_out.startswith(f"left out: No worker answers at 127.0.0.1:{gone}")
    with pytest.raises(SystemExit, match="No worker of this token"):
        cli.main()


def test_this_machine_knows_its_loopback() -> None:
    assert ip_interface("127.0.0.1/8") in own_interfaces()
