"""Addresses: what a person may write, how they print, and which are this machine's own."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.errors import PlanError
from lightning_hetero.transport.address import Address

host_names = st.from_regex(
    r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z0-9]{1,10}){0,3}", fullmatch=True
)
hosts = host_names | st.ip_addresses().map(str)
ports = st.integers(0, 65535)


@given(host=hosts, port=ports)
def test_a_printed_address_is_read_back_equal(host: str, port: int) -> None:
    address = Address(host, port)
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("strix.local:9999", "strix.local", 9999),
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("[::1]:65535", "::1", 65535),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
    ],
)
def test_the_three_forms_are_read_and_printed(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert address == Address(host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "strix.local",
        "strix.local:",
        ":9999",
        "[]:9999",
        "[::1]",
        "strix.local:http",
        "strix.local:-1",
        "strix.local:+1",
        "strix.local: 1",
        "strix.local:1.0",
        "strix.local:65536",
        "strix.local:²",
    ],
)
def test_any_other_text_is_refused_with_an_example(text: str) -> None:
    expected = f"{re.escape(repr(text))} is not an address.*strix.local:9999"
    with pytest.raises(PlanError, match=expected):
        Address.parse(text)


@given(text=st.text(max_size=30))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        address = Address.parse(text)
    except PlanError:
        return
    assert address.host
    assert 0 <= address.port <= 65535


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_is_recognised(host: str) -> None:
    assert Address(host, 1).is_loopback


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",  # noqa: S104
        "::",
        "192.168.0.1",
        "128.0.0.1",
        "fe80::1",
        "strix.local",
        "localhost.example.org",
        "127.0.0.1.example.org",
        "",
    ],
)
def test_a_host_that_others_can_reach_is_not_loopback(host: str) -> None:
    assert not Address(host, 1).is_loopback
