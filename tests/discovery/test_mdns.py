"""Announcing and finding over real multicast, on loopback only."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from ipaddress import ip_address, ip_interface
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hetero import cli
from lightning_hetero.coordinator.fleet import AnnouncedWorkers
from lightning_hetero.discovery import find, mdns
from lightning_hetero.discovery.find import find_workers, speak_with
from lightning_hetero.discovery.mdns import (
    MOST_HOSTS,
    SERVICE,
    Announcement,
    Heard,
    Recogniser,
    addresses_to_try,
    announced,
    announced_worker,
    hear,
    hosts_to_announce,
    multicast_hosts,
    own_interfaces,
)
from lightning_hetero.errors import DiscoveryError, TokenError
from lightning_hetero.transport.address import Address
from lightning_hetero.transport.compatibility import Identity
from lightning_hetero.transport.deadlines import Deadlines
from lightning_hetero.transport.tls import Credentials
from lightning_hetero.transport.token import (
    FILE_VARIABLE,
    Token,
    find_token_file,
    read_token_file,
    write_token_file,
)

from ..transport.pairs import QUICK, worker_thread

HOSTS = ("10.0.0.7", "192.168.1.7")


def heard(announcement: Announcement, **changed: str) -> Announcement | None:
    """As the network hands it on, hosts in another order."""
    properties = {**announcement.properties, **changed}
    encoded = {name.encode(): text.encode() for name, text in properties.items()}
    return Announcement.heard(reversed(announcement.hosts), announcement.port, encoded)


def test_only_the_token_recognises_an_announcement() -> None:
    token = Token.new()
    announcement = heard(Recogniser(token).announcement(HOSTS, 9999))
    assert announcement is not None
    assert Recogniser(token).recognises(announcement)
    assert not Recogniser(Token.new()).recognises(announcement)


@pytest.mark.parametrize(
    "change",
    [
        {"port": 9998},
        {"hosts": ("10.0.0.7",)},
        {"hosts": ("10.0.0.7", "192.168.1.8")},
        {"nonce": "0" * 32},
        {"tag": "0" * 64},
        {"tag": ""},
        {"tag": "ä"},
    ],
    ids=str,
)
def test_a_changed_announcement_is_not_ours(change: dict[str, object]) -> None:
    recogniser = Recogniser(Token.new())
    announcement = recogniser.announcement(HOSTS, 9999)
    assert not recogniser.recognises(replace(announcement, **change))


def test_announcements_hide_the_token_and_which_workers_share_it() -> None:
    token = Token.new()
    one, other = (Recogniser(token).announcement(HOSTS, 9999) for _ in range(2))
    said = " ".join([one.instance, *one.properties.values()])
    assert token.secret.hex() not in said
    assert token.to_text() not in said
    assert one.tag != other.tag
    assert one.instance != other.instance
    assert one.instance in f"worker-{one.nonce}"


@pytest.mark.parametrize("missing", ["nonce", "tag"])
def test_an_announcement_needs_every_field(missing: str) -> None:
    announcement = Recogniser(Token.new()).announcement(HOSTS, 9999)
    assert heard(announcement, **{missing: ""}) is None
    assert heard(replace(announcement, port=0)) is None
    assert heard(replace(announcement, port=70000)) is None


def test_any_bytes_may_come() -> None:
    properties = dict.fromkeys((b"nonce", b"tag"), b"\xff\x00\n")
    announcement = Announcement.heard(["no address", "::1%lo"] * 20, 1, properties)
    assert announcement is not None
    assert len(announcement.hosts) == MOST_HOSTS
    assert not Recogniser(Token.new()).recognises(announcement)
    assert [str(each) for each in addresses_to_try(announcement, [])] == ["[::1%lo]:1"] * 8


def test_the_service_has_a_name_that_dns_allows() -> None:
    assert len(SERVICE.split(".")[0]) <= 16
    many = [f"10.0.0.{number}" for number in range(40)]
    assert Recogniser(Token.new()).announcement(many, 1).hosts == tuple(sorted(many[:MOST_HOSTS]))


OWN = [
    ip_interface(text)
    for text in (
        "127.0.0.1/8",
        "169.254.9.9/16",
        "192.168.1.7/24",
        "172.17.0.1/16",
        "::1/128",
        "fe80::1/64",
        "fd00::7/64",
    )
]


@pytest.mark.parametrize(
    ("listening", "expected"),
    [
        ("0.0.0.0", ["192.168.1.7", "172.17.0.1", "169.254.9.9"]),  # noqa: S104
        ("::", ["fd00::7"]),
        ("192.168.1.7", ["192.168.1.7"]),
        ("fd00:0::7", ["fd00::7"]),
    ],
)
def test_a_worker_announces_reachable_addresses(listening: str, expected: list[str]) -> None:
    assert hosts_to_announce(listening, OWN) == expected


def test_announcements_go_over_ipv4_interfaces_that_lead_out() -> None:
    assert multicast_hosts(OWN) == ["169.254.9.9", "192.168.1.7", "172.17.0.1"]


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        pytest.param(
            ["10.9.0.2", "fd00::8", "192.168.1.8"],
            ["192.168.1.8", "fd00::8", "10.9.0.2"],
            id="in our networks first",
        ),
        pytest.param(["172.17.0.1", "192.168.1.8"], ["192.168.1.8"], id="a bridge as ours"),
        pytest.param(
            ["172.17.0.1", "192.168.1.7"], ["172.17.0.1", "192.168.1.7"], id="on this machine"
        ),
        pytest.param([], [], id="none"),
    ],
)
def test_the_likeliest_way_is_tried_first(hosts: list[str], expected: list[str]) -> None:
    announcement = Recogniser(Token.new()).announcement(hosts, 5)
    assert [each.host for each in addresses_to_try(announcement, OWN)] == expected


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

    for module in (mdns, find):
        monkeypatch.setattr(module, "own_interfaces", interfaces)
        monkeypatch.setattr(module, "multicast_hosts", lambda own: LOOPBACK)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_announcements_of_our_token_are_heard_and_others_are_counted(token: Token) -> None:
    ours, theirs = Recogniser(token), Recogniser(Token.new())
    mine, other = ours.announcement(LOOPBACK, 1111), theirs.announcement(LOOPBACK, 2222)
    with announced(mine, LOOPBACK), announced(other, LOOPBACK):
        heard = hear(ours, LOOPBACK, LONG_ENOUGH_SECONDS)
    assert heard.ours == [mine]
    assert heard.num_others == 1
    assert hear(ours, LOOPBACK, 0.2).ours == []


def test_a_true_announcement_is_found_among_strangers(token: Token) -> None:
    recogniser, stranger = Recogniser(token), Recogniser(Token.new())
    true = recogniser.announcement(HOSTS, 9999)
    strangers = [stranger.announcement(HOSTS, port) for port in range(1, 501)]
    found = Heard.among([*strangers, true], recogniser)
    assert found.ours == [true]
    assert found.num_others == 500


def test_an_announcement_that_is_repeated_counts_once(token: Token) -> None:
    recogniser = Recogniser(token)
    one, other = (recogniser.announcement(HOSTS, port) for port in (1, 2))
    found = Heard.among([one] * 300 + [other], recogniser)
    assert found == Heard([one, other], 0)
    foreign = Recogniser(Token.new()).announcement(HOSTS, 1)
    assert Heard.among([foreign] * 300, recogniser) == Heard([], 1)


def test_announcements_of_a_workers_earlier_starts_count_once(token: Token) -> None:
    recogniser = Recogniser(token)
    earlier = [recogniser.announcement(HOSTS, 9999) for _ in range(300)]
    other = recogniser.announcement(HOSTS, 9998)
    assert [each.port for each in Heard.among([*earlier, other], recogniser).ours] == [9999, 9998]


def test_the_workers_of_a_search_have_a_limit(token: Token) -> None:
    recogniser = Recogniser(token)
    many = [recogniser.announcement(HOSTS, port) for port in range(1, 301)]
    assert Heard.among(many, recogniser).ours == many[:256]


def let_announce(
    monkeypatch: pytest.MonkeyPatch, announcements: Mapping[str, Announcement]
) -> None:
    """A network in memory where services with these names are announced, in their order.

    Others use the loopback of this machine too, and so many announcements would disturb them.
    """
    library = pytest.importorskip("zeroconf")
    network = SimpleNamespace(cache=library.DNSCache())
    # Names that are no names of this service.
    names = ["nonsense", "x._http._tcp.local.", f".{SERVICE}"]
    for name, announcement in announcements.items():
        names.append(f"{name}.{SERVICE}")
        service = library.ServiceInfo(
            SERVICE,
            names[-1],
            port=announcement.port,
            properties=announcement.properties,
            server=f"{name}.local.",
            addresses=[ip_address(host).packed for host in announcement.hosts],
        )
        records = [service.dns_service(), service.dns_text(), *service.dns_addresses()]
        network.cache.async_add_records(records)

    def browse(browsed: object, service: str, handlers: list[Any], **_: Any) -> None:
        assert (browsed, service) == (network, SERVICE)
        for name in names:
            handlers[0](zeroconf=network, service_type=SERVICE, name=name)

    monkeypatch.setattr(library, "ServiceBrowser", browse)
    monkeypatch.setattr(mdns, "_network", lambda hosts: nullcontext(network))


@pytest.mark.parametrize("kind", ["500 strangers", "300 repetitions"])
@pytest.mark.usefixtures("only_loopback")
def test_a_worker_is_found_among_strangers_and_repetitions_and_dialled_once(
    kind: str, token: Token, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recogniser, stranger = Recogniser(token), Recogniser(Token.new())
    credentials, dialled, dial = Credentials(token), [], find.dial

    def counted(address: Address, *rest: Any) -> Any:
        dialled.append(address)
        return dial(address, *rest)

    monkeypatch.setattr(find, "dial", counted)
    with worker_thread(credentials) as address:
        true = recogniser.announcement(LOOPBACK, address.port)
        if kind == "500 strangers":
            said = {f"a{n:03}": stranger.announcement(LOOPBACK, n) for n in range(1, 501)}
        else:
            said = {f"a{n:03}": true for n in range(300)}
        # Strangers are heard first, and their names come first in the alphabet.
        let_announce(monkeypatch, {**said, true.instance: true})
        at_once = replace(QUICK, discovery_seconds=0.0)
        search = find_workers(token_file, Identity(credentials=credentials), at_once)
    assert [worker.address for worker in search.workers] == [address]
    assert dialled == [address]
    assert not search.left_out
    assert search.num_others == (500 if kind == "500 strangers" else 0)


@pytest.mark.usefixtures("only_loopback")
def test_workers_that_answer_are_found_and_others_get_a_sentence(
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


def test_an_unreachable_address_does_not_hide_a_reachable_one(token: Token) -> None:
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
def test_an_empty_search_says_what_to_do(token: Token, token_file: Path) -> None:
    identity = Identity(credentials=Credentials(token))
    stranger = Recogniser(Token.new()).announcement(LOOPBACK, 9999)
    with announced(stranger, LOOPBACK):
        search = find_workers(token_file, identity, SOON)
    with pytest.raises(DiscoveryError) as raised:
        search.check_not_empty()
    text = str(raised.value)
    for part in ("within 1.5 s", "1 of another token", "--listen", "UDP port 5353", "WireGuard"):
        assert part in text


def test_a_search_needs_a_token() -> None:
    with pytest.raises(DiscoveryError, match="this process has no token; make one"):
        find_workers(None, Identity(), SOON)
    with pytest.raises(TokenError, match="no token file"):
        AnnouncedWorkers((), "/nowhere/token", find.Lookout).find(torch.device("cpu"), SOON)


def without_zeroconf(monkeypatch: pytest.MonkeyPatch) -> None:
    # What Python notes of a module that must not be imported.
    monkeypatch.setitem(sys.modules, "zeroconf", None)


def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdns, "own_interfaces", lambda: [ip_interface("127.0.0.1/8")])
    monkeypatch.setattr(find, "own_interfaces", lambda: [ip_interface("127.0.0.1/8")])


@pytest.mark.parametrize(
    ("lack", "expected"),
    [
        (without_zeroconf, r"zeroconf is not installed .* pip install 'lightning-hetero\[disc"),
        (without_network, "no network, or no IPv4 network"),
    ],
)
def test_a_search_says_what_is_missing(
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
def test_a_worker_on_loopback_or_with_no_announce_is_silent(
    monkeypatch: pytest.MonkeyPatch,
    token_file: Path,
    caplog: pytest.LogCaptureFixture,
    wanted: bool | None,
) -> None:
    monkeypatch.setattr(mdns, "announced", pytest.fail)
    caplog.set_level(logging.INFO)
    with announced_worker(wanted, Address("127.0.0.1", 9999), token_file):
        pass
    with announced_worker(False, EVERYWHERE, token_file):
        pass
    # Workers of earlier tests in this process may still log their ends.
    assert [r.getMessage() for r in caplog.records if "discovery" in r.name] == []


def test_announcing_on_loopback_is_refused(token_file: Path) -> None:
    with (
        pytest.raises(DiscoveryError, match=r"127\.0\.0\.1:9999 is not announced, because other"),
        announced_worker(True, Address("127.0.0.1", 9999), token_file),
    ):
        pytest.fail("other machines could not reach it")


@pytest.mark.usefixtures("only_loopback")
def test_the_fleet_looks_once_in_each_run(
    monkeypatch: pytest.MonkeyPatch, token: Token, token_file: Path
) -> None:
    searches: list[str] = []
    hear_once = find.hear

    def counted(*arguments: object) -> object:
        searches.append("one")
        return hear_once(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(find, "hear", counted)
    fleet = AnnouncedWorkers((), token_file, find.Lookout)
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


@pytest.mark.follows(
    "this process has no token; make one with `lightning-hetero token`, and copy it to all machines"
)
@pytest.mark.follows(
    "Start workers with `lightning-hetero worker --listen 0.0.0.0:9999` and the same token file"
)
@pytest.mark.usefixtures("only_loopback")
def test_the_command_lists_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def call(*words: str) -> None:
        monkeypatch.setattr("sys.argv", ["lightning-hetero", *words])
        cli.main()

    monkeypatch.setattr("lightning_hetero.cli.workers.Deadlines", lambda: SOON)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(FILE_VARIABLE)
    with pytest.raises(SystemExit, match="A search finds workers by their common token"):
        call("workers")
    call("token")
    with pytest.raises(SystemExit, match="The search found no usable worker of this token"):
        call("workers")
    token_file = find_token_file(None)
    assert token_file is not None
    token = read_token_file(token_file)
    recogniser, gone = Recogniser(token), closed_port()
    capsys.readouterr()
    with (
        worker_thread(Credentials(token)) as address,
        announced(recogniser.announcement(LOOPBACK, address.port), LOOPBACK),
        announced(recogniser.announcement(LOOPBACK, gone), LOOPBACK),
    ):
        call("workers")
    found, skipped = capsys.readouterr().out.splitlines()
    assert found.startswith(f"{address} (")
    assert skipped.startswith(f"skipped: No worker answers at 127.0.0.1:{gone}")


def test_this_machine_knows_its_loopback() -> None:
    assert ip_interface("127.0.0.1/8") in own_interfaces()
