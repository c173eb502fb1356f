"""Openings: every version reads every other, and a stranger's first frame takes little memory."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.errors import RemoteProtocolError, TrustError
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import OPENING_LIMITS, Frame, OpeningReader, encode_frame

from .strategies import PACKED_LIST, PING, any_message, feed, raw_frame

HELLO = {"type": "Hello", "protocol": 1, "role": "coordinator", "session": "s"}


def opened(content: object, version: int = m.PROTOCOL_VERSION) -> m.Message:
    [frame] = feed(OpeningReader(), raw_frame(content, version=version))
    assert frame.tensors == ()
    return frame.message


@given(message=any_message)
def test_an_opening_reader_reads_only_openings(message: m.Message) -> None:
    data = b"".join(encode_frame(Frame(message)))
    if isinstance(message, (m.Hello, m.Welcome, m.Failure)):
        assert [frame.message for frame in feed(OpeningReader(), data)] == [message]
    else:
        with pytest.raises(RemoteProtocolError, match="no message that opens a conversation"):
            list(feed(OpeningReader(), data))


def test_unknown_fields_of_a_later_version_are_ignored() -> None:
    later = {
        "message": HELLO
        | {
            "protocol": 7,
            "compression": ["zstd", {"level": 3}],
            "equipment": {"versions": {"torch": "3.1"}, "interconnects": {"nvlink": 4}},
        },
        "tensors": [],
        "trace": "0af7651916cd43dd",
    }
    hello = opened(later, version=7)
    equipment = m.Equipment(versions={"torch": "3.1"})
    assert hello == m.Hello(7, "coordinator", "s", equipment)
    failure = {"type": "Failure", "reason": "no", "advice": "update"}
    assert opened({"message": failure}, version=7) == m.Failure("no")
    assert opened({"message": {"type": "Welcome", "protocol": 7, "mood": 1}}) == m.Welcome(7)


def test_a_machine_may_have_any_memory_and_a_device_any_name() -> None:
    equipment = m.Equipment(device_name="Ä" * 1024, memory_bytes=64 * 2**40)
    [frame] = feed(OpeningReader(), b"".join(encode_frame(Frame(m.Welcome(1, equipment)))))
    assert frame.message == m.Welcome(1, equipment)


def test_fields_that_an_earlier_version_lacks_have_defaults() -> None:
    assert opened({"message": {"type": "Hello", "protocol": 1}}) == m.Hello(1)


@given(version=st.integers(m.PROTOCOL_VERSION + 1, 2**32 - 1))
def test_an_unreadable_opening_of_another_version_is_refused_with_both_versions(
    version: int,
) -> None:
    for content in ({"message": {"type": "Salute"}}, {"message": HELLO | {"protocol": "x"}}, 7):
        with pytest.raises(
            RemoteProtocolError, match=f"version {version}, we speak {m.PROTOCOL_VERSION}"
        ):
            opened(content, version=version)


def test_an_unreadable_opening_of_our_version_is_refused_without_versions() -> None:
    with pytest.raises(RemoteProtocolError, match="no message that opens a conversation"):
        opened({"message": PING})
    with pytest.raises(RemoteProtocolError, match="no message that opens a conversation"):
        opened({"message": HELLO, "deep": msgspec.Raw(PACKED_LIST * 3000 + b"\xc0")})


def test_an_opening_is_small() -> None:
    long = {"message": HELLO, "more": "x" * OPENING_LIMITS.header_bytes}
    with pytest.raises(RemoteProtocolError, match="over the limit"):
        opened(long)
    with pytest.raises(RemoteProtocolError, match="over the limit"):
        list(feed(OpeningReader(), raw_frame({"message": HELLO}, b"x")))


def test_an_opening_reader_takes_no_byte_of_the_next_frame() -> None:
    reader, data = OpeningReader(), raw_frame({"message": HELLO})
    taken = 0
    while True:
        room = reader.buffer()
        count = min(len(room), len(data) - taken)
        assert taken + len(room) <= len(data)
        room[:count] = data[taken : taken + count]
        taken += count
        if reader.advance(count) is not None:
            break
    assert taken == len(data)


@pytest.mark.parametrize("start", [b"\x16", b"\x15\x03\x03\x00\x02\x02\x0a", b"\x16\x03\x01" * 20])
def test_tls_is_recognised_by_its_first_byte(start: bytes) -> None:
    with pytest.raises(TrustError, match="speaks TLS, so it has a token, and this end has none"):
        list(feed(OpeningReader(), start))
