"""Frames: every frame arrives, in pieces of any size; bytes that are no frame are refused."""

from __future__ import annotations

import struct
import tracemalloc
from itertools import chain, repeat
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.errors import LocalProtocolError, RemoteProtocolError
from lightning_hetero.protocol import frames
from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.frames import (
    Frame,
    FrameLimits,
    FrameReader,
    OpeningReader,
    encode_frame,
)

from .strategies import PACKED_LIST, PING, VERSION, any_frame, feed, is_same, joined, raw_frame

SMALL = FrameLimits(header_bytes=2**12, body_bytes=2**12)


def with_tensors(*specs: tuple[Any, Any], message: object = PING) -> dict[str, object]:
    tensors = [{"dtype": dtype, "shape": shape} for dtype, shape in specs]
    return {"message": message, "tensors": tensors}


def read_all(data: bytes, limits: FrameLimits = SMALL) -> list[Frame]:
    return list(feed(FrameReader(limits), data))


def assert_same(found: list[Frame], expected: list[Frame]) -> None:
    assert [frame.message for frame in found] == [frame.message for frame in expected]
    for one, other in zip(found, expected, strict=True):
        assert len(one.tensors) == len(other.tensors)
        assert all(map(is_same, one.tensors, other.tensors))


@given(
    frames=st.lists(any_frame, min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=10),
)
def test_frames_arrive_when_their_bytes_come_in_any_pieces(
    frames: list[Frame], sizes: list[int]
) -> None:
    reader = FrameReader()
    pieces = chain.from_iterable(repeat(sizes))
    assert_same(list(feed(reader, joined(*frames), pieces)), frames)
    reader.close()


def test_large_tensors_of_earlier_frames_stay_as_they_are() -> None:
    frames = [Frame(m.LoadTensor(str(n)), (torch.full((40_000,), float(n)),)) for n in range(8)]
    reader, kept = FrameReader(), []
    for number, frame in enumerate(feed(reader, joined(*frames))):
        if number % 2:
            kept.append(frame)
        del frame  # its buffer may be used for the next
    assert_same(kept, frames[1::2])


def test_the_buffers_of_probes_are_used_again_and_not_kept() -> None:
    sizes = [2**20, 2**20, 2**22, 2**22]
    probes = [Frame(m.Probe(0), (torch.zeros(size, dtype=torch.uint8),)) for size in sizes]
    content, reader, places = joined(*probes), FrameReader(), []
    tracemalloc.start()
    try:
        for frame in feed(reader, content):
            places.append(frame.tensors[0].data_ptr())
            del frame
        assert tracemalloc.get_traced_memory()[0] > 2**22
        assert tracemalloc.get_traced_memory()[1] < 2**20 + 2**22 + 2**18
        list(feed(reader, joined(Frame(m.Ping()))))
        assert tracemalloc.get_traced_memory()[0] < 2**18
    finally:
        tracemalloc.stop()
    assert places[0] == places[1]
    assert places[2] == places[3]


def test_a_large_tensor_is_sent_from_its_own_memory() -> None:
    tensor = torch.zeros(1000)
    buffers = encode_frame(Frame(m.LoadTensor("weight"), (tensor,)))
    tensor.fill_(1)
    [frame] = read_all(b"".join(buffers), FrameLimits())
    assert frame.tensors[0].tolist() == [1.0] * 1000


def test_a_frame_prints_its_message_and_its_tensors() -> None:
    frame = Frame(
        m.TensorContent("0.weight"), (torch.zeros(2, 3), torch.zeros((), dtype=torch.bool))
    )
    assert str(frame) == "TensorContent name=0.weight state=[] float32[2, 3] bool[]"
    assert str(Frame(m.Ping())) == "Ping"


@given(frame=any_frame, data=st.data())
def test_an_end_at_any_place_inside_a_frame_is_reported(frame: Frame, data: st.DataObject) -> None:
    content = joined(frame)
    for count in {1, len(content) - 1, data.draw(st.integers(1, len(content) - 1))}:
        reader = FrameReader()
        assert list(feed(reader, content[:count])) == []
        with pytest.raises(RemoteProtocolError, match="ended inside a frame"):
            reader.close()


def test_an_end_at_every_single_byte_of_the_second_frame_is_reported() -> None:
    tensors = (torch.arange(5.0), torch.zeros(0), torch.tensor(3))
    one = joined(Frame(m.LoadTensor("name"), tensors))
    for count in range(1, len(one)):
        reader = FrameReader()
        assert len(list(feed(reader, one + one[:count]))) == 1
        with pytest.raises(RemoteProtocolError, match="ended inside a frame"):
            reader.close()


def test_an_end_between_frames_is_no_error() -> None:
    reader = FrameReader()
    reader.close()
    assert len(list(feed(reader, joined(Frame(m.Ping()), Frame(m.Goodbye()))))) == 2
    reader.close()


def test_a_frame_exactly_at_the_limits_is_sent_and_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frame = Frame(m.LoadTensor("n" * 100), (torch.zeros(100, dtype=torch.uint8),))
    header, _ = (len(buffer) for buffer in encode_frame(frame))
    limits = FrameLimits(header_bytes=header - 20, body_bytes=100)
    monkeypatch.setattr(frames, "_LIMITS", limits)
    assert_same(read_all(joined(frame), limits), [frame])


@pytest.mark.parametrize("limits", [FrameLimits(50, 2**20), FrameLimits(2**20, 99)])
def test_a_frame_over_a_limit_is_neither_sent_nor_received(
    monkeypatch: pytest.MonkeyPatch, limits: FrameLimits
) -> None:
    frame = Frame(m.LoadTensor("n" * 100), (torch.zeros(100, dtype=torch.uint8),))
    expected = f"limit of {limits.header_bytes} \\+ {limits.body_bytes} bytes"
    with pytest.raises(RemoteProtocolError, match=expected):
        read_all(joined(frame), limits)
    monkeypatch.setattr(frames, "_LIMITS", limits)
    with pytest.raises(LocalProtocolError, match=f"LoadTensor.*{expected}"):
        encode_frame(frame)


def test_a_dtype_that_cannot_be_sent_is_a_local_fault() -> None:
    frame = Frame(m.LoadTensor("phase"), (torch.zeros(2, dtype=torch.complex32),))
    with pytest.raises(LocalProtocolError, match="complex32"):
        encode_frame(frame)


HUGE = [2**40] * 16
NESTED = msgspec.Raw(PACKED_LIST * 10_000 + b"\xc0")
NO_TEXT = msgspec.Raw(b"\xa3\xff\xff\xff")

# What a hostile or mistaken peer sends, and what the refusal must name.
LIES = {
    "another protocol": (b"GET / HTTP/1.1\r\nHost: localhost\r\n", "does not start a frame"),
    "another version": (raw_frame(with_tensors(), version=99), f"version 99, we speak {VERSION}"),
    "a huge header": (struct.pack(">4sIIQ", b"LHET", VERSION, 2**32 - 1, 0), "4294967295"),
    "a huge body": (struct.pack(">4sIIQ", b"LHET", VERSION, 9, 2**64 - 1), "18446744073709551615"),
    "no header": (struct.pack(">4sIIQ", b"LHET", VERSION, 0, 0), "0 \\+ 0 bytes"),
    "an unknown message": (raw_frame(with_tensors(message={"type": "Nonsense"})), "Nonsense"),
    "a message with a new field": (raw_frame(with_tensors(message=PING | {"x": 1})), "`x`"),
    "no tensors": (raw_frame({"message": PING}), "tensors"),
    "no map": (raw_frame([PING, []]), "object"),
    "no msgpack": (struct.pack(">4sIIQ", b"LHET", VERSION, 4, 0) + b"\xc1" * 4, "header"),
    "a header cut short": (struct.pack(">4sIIQ", b"LHET", VERSION, 1, 0) + b"\x82", "header"),
    "text that is no text": (
        raw_frame(with_tensors(message={"type": "Failure", "reason": NO_TEXT})),
        "header",
    ),
    "an unknown dtype": (raw_frame(with_tensors(("complex32", [1])), b"1234"), "complex32"),
    "a dtype that is no text": (raw_frame(with_tensors((7, [1]))), "dtype"),
    "a negative dimension": (raw_frame(with_tensors(("uint8", [-1]))), "shape"),
    "a huge dimension": (raw_frame(with_tensors(("uint8", [2**62]))), "shape"),
    "huge dimensions": (raw_frame(with_tensors(("uint8", HUGE))), "too large"),
    "huge dimensions of nothing": (raw_frame(with_tensors(("uint8", [*HUGE[1:], 0]))), "too large"),
    "too many dimensions": (raw_frame(with_tensors(("uint8", [1] * 17))), "shape"),
    "a body too short": (raw_frame(with_tensors(("int32", [3])), b"12345678"), "12 bytes.* 8"),
    "a body too long": (raw_frame(with_tensors(("uint8", [3])), b"12345678"), "3 bytes.* 8"),
    "a body without tensors": (raw_frame(with_tensors(), b"12345678"), "no tensors, 0 bytes.* 8"),
    "deep nesting": (
        raw_frame(
            with_tensors(message={"type": "OptimizerState", "parameter": "", "state": NESTED})
        ),
        "header",
    ),
    "deep nesting in an unknown field": (
        raw_frame(with_tensors() | {"unknown": NESTED}),
        "header",
    ),
}


@pytest.mark.parametrize("lie", sorted(LIES))
def test_a_false_frame_is_refused_before_memory_is_taken(lie: str) -> None:
    data, expected = LIES[lie]
    reader = FrameReader(FrameLimits(header_bytes=2**20))
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match=expected):
            list(feed(reader, data))
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def assert_only_refused(data: bytes) -> None:
    try:
        read_all(data)
    except RemoteProtocolError as error:
        assert str(error).endswith((".", "?"))  # noqa: PT017


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH_9.6\r\n" * 2, b"+OK secret ready" * 2])
@pytest.mark.parametrize("kind", [FrameReader, OpeningReader])
def test_the_bytes_of_another_service_are_not_told(
    greeting: bytes, kind: type[FrameReader]
) -> None:
    """A coordinator may send a worker to any address, and would hear of what answers there."""
    reader = kind()
    with pytest.raises(RemoteProtocolError) as raised:
        list(feed(reader, greeting))
    for start in range(len(greeting) - 3):
        assert greeting[start : start + 4].decode() not in str(raised.value)


@pytest.mark.parametrize("kind", [FrameReader, OpeningReader])
def test_the_refusal_of_a_header_is_printable(kind: type[FrameReader]) -> None:
    """The decoder quotes what it does not know."""
    hostile = {"message": {"type": "\x1b[2J\nall is well"}, "tensors": []}
    with pytest.raises(RemoteProtocolError, match="all is well") as raised:
        list(feed(kind(), raw_frame(hostile)))
    assert str(raised.value).isprintable()


@given(garbage=st.binary(max_size=200))
def test_garbage_is_read_or_refused_and_raises_nothing_else(garbage: bytes) -> None:
    assert_only_refused(garbage)
    assert_only_refused(b"LHET" + garbage)
    assert_only_refused(struct.pack(">4sIIQ", b"LHET", VERSION, len(garbage), 0) + garbage)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
any_spec = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["uint8", "int64", "bfloat16", "bool"]) | plain,
        "shape": st.lists(st.sampled_from([0, 1, 3, 2**20, 2**40]), max_size=5) | plain,
    }
)


@given(
    header=st.fixed_dictionaries({"message": st.just(PING) | plain, "tensors": st.lists(any_spec)}),
    body=st.binary(max_size=64),
)
def test_a_header_of_any_content_is_refused_or_read(header: object, body: bytes) -> None:
    assert_only_refused(raw_frame(header, body))


@given(frame=any_frame, place=st.integers(0), byte=st.integers(0, 255))
def test_a_frame_with_one_wrong_byte_is_refused_or_read(
    frame: Frame, place: int, byte: int
) -> None:
    content = bytearray(joined(frame))
    content[place % len(content)] = byte
    assert_only_refused(bytes(content))
