from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_interface

import pytest

from lightning_hetero.runtime.finding.announcement import (
    MOST_HOSTS,
    SERVICE,
    Announcement,
    Recogniser,
    addresses_to_try,
    hosts_to_announce,
    multicast_hosts,
)
from lightning_hetero.transport.token import Token

HOSTS = ("10.0.0.7", "192.168.1.7")


def heard(announcement: Announcement, **changed: str) -> Announcement | None:
    """As the network hands it on, hosts in another order."""
    properties = {**announcement.properties, **changed}
    encoded = {name.encode(): text.encode() for name, text in properties.items()}
    return Announcement.heard(reversed(announcement.hosts), announcement.port, encoded)


def test_who_has_the_token_recognises_it_and_nobody_else() -> None:
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
        {"protocol": "0"},
        {"version": "9.9"},
        {"nonce": "0" * 32},
        {"tag": "0" * 64},
        {"tag": ""},
        {"tag": "ä"},
    ],
    ids=str,
)
def test_what_was_changed_on_the_way_is_not_ours(change: dict[str, object]) -> None:
    recogniser = Recogniser(Token.new())
    announcement = recogniser.announcement(HOSTS, 9999)
    assert not recogniser.recognises(replace(announcement, **change))


def test_nothing_of_the_token_is_said_and_workers_of_one_token_look_unlike() -> None:
    token = Token.new()
    one, other = (Recogniser(token).announcement(HOSTS, 9999) for _ in range(2))
    said = " ".join([one.instance, *one.properties.values()])
    assert token.secret.hex() not in said
    assert token.to_text() not in said
    assert one.tag != other.tag
    assert one.instance != other.instance
    assert one.instance in f"worker-{one.nonce}"


@pytest.mark.parametrize("missing", ["protocol", "version", "nonce", "tag"])
def test_what_lacks_something_is_no_announcement(missing: str) -> None:
    announcement = Recogniser(Token.new()).announcement(HOSTS, 9999)
    assert heard(announcement, **{missing: ""}) is None
    assert heard(replace(announcement, port=0)) is None
    assert heard(replace(announcement, port=70000)) is None


def test_any_bytes_may_come() -> None:
    properties = dict.fromkeys((b"protocol", b"version", b"nonce", b"tag"), b"\xff\x00\n")
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
def test_what_is_announced_of_where_a_worker_listens(listening: str, expected: list[str]) -> None:
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
