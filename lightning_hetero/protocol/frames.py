"""Frames: a message and its tensors as bytes.

    prefix (20 bytes)          header (msgpack)              body
    magic version lengths  |   message, tensor specs   |   tensor 0 . . tensor 1 . . …

The version is the protocol's. Every version keeps the layout of the prefix and of the opening, so
any two versions can report to each other why they do not work together.

Lengths, shapes and dtypes are checked before memory is taken. Tensors are copied neither into a
frame nor out of it: `encode_frame` refers to their memory, and `FrameReader` names the place for
arriving bytes. `OpeningReader` reads the first frame of a conversation, of any version and from any
sender, into little memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Annotated, Generic, TypeVar

import msgspec
from torch import Tensor
from typing_extensions import override

from ..errors import LocalProtocolError, RemoteProtocolError, TrustError
from .fields import printable
from .messages import KINDS, PROTOCOL_VERSION, Failure, Hello, Message, Welcome
from .tensor_bytes import (
    ALIGNMENT_BYTES,
    Buffer,
    BufferPool,
    TensorSpec,
    body_layout,
    tensor_bytes,
    tensor_from_bytes,
)

MAGIC = b"LHET"
_PREFIX = struct.Struct(">4sIIQ")

# The errors of a decoder for bytes that are not a message.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


Encode = Callable[[], list[memoryview]]
"""Encodes a frame as buffers to send."""

Content = tuple[Message, Sequence[Tensor]]
"""A message and its tensors before they are a frame."""


@dataclass(frozen=True)
class FrameLimits:
    """Bounds of one frame from a peer."""

    header_bytes: int = 16 * 2**20
    body_bytes: int = 8 * 2**30


@dataclass(frozen=True)
class Frame:
    """A message and its tensors."""

    message: Message
    tensors: tuple[Tensor, ...] = ()

    def __str__(self) -> str:
        tensors = " ".join(str(TensorSpec.of(tensor)) for tensor in self.tensors)
        return f"{self.message} {tensors}".rstrip()


_LIMITS = FrameLimits()

Known = TypeVar("Known", bound=Message)


class Header(msgspec.Struct, Generic[Known], frozen=True, forbid_unknown_fields=True):
    """The part of a frame before its body."""

    message: Known
    tensors: Annotated[list[TensorSpec], msgspec.Meta(max_length=2**16)]


def header_decoder(kinds: Sequence[type[Message]]) -> msgspec.msgpack.Decoder[Header[Message]]:
    """Decodes the headers of frames whose message is of one of these classes."""
    return msgspec.msgpack.Decoder(Header[reduce(or_, kinds)])  # type: ignore[misc]


_encoder = msgspec.msgpack.Encoder()
_decoder = header_decoder(KINDS)


def encode_frame(frame: Frame) -> list[memoryview]:
    """Encode a frame as buffers, to be sent one after the other.

    Raises:
        LocalProtocolError: If the frame is longer than the limits.
    """
    specs = [TensorSpec.of(tensor) for tensor in frame.tensors]
    body = encode_body(frame.tensors)
    return [_head(frame.message, specs, sum(map(len, body))), *body]


def encode_head(frame: Frame) -> memoryview:
    """Encode prefix and header, without the content of the tensors.

    Raises:
        LocalProtocolError: If the frame is longer than the limits.
    """
    specs = [TensorSpec.of(tensor) for tensor in frame.tensors]
    return _head(frame.message, specs, body_layout(specs)[1])


def _head(message: Message, specs: list[TensorSpec], body_bytes: int) -> memoryview:
    header = _encoder.encode(Header(message, specs))
    if len(header) > _LIMITS.header_bytes or body_bytes > _LIMITS.body_bytes:
        raise LocalProtocolError(
            f"{type(message).__name__} with {len(header)} + {body_bytes} bytes is over the "
            f"limit of {_LIMITS.header_bytes} + {_LIMITS.body_bytes} bytes."
        )
    return memoryview(_PREFIX.pack(MAGIC, PROTOCOL_VERSION, len(header), body_bytes) + header)


def encode_body(tensors: Sequence[Tensor]) -> list[memoryview]:
    """Encode the tensors, with the padding between them."""
    buffers: list[memoryview] = []
    end = 0
    for tensor in tensors:
        if gap := -end % ALIGNMENT_BYTES:
            buffers.append(memoryview(bytes(gap)))
        buffers.append(tensor_bytes(tensor))
        end += gap + len(buffers[-1])
    return buffers


class FrameReader:
    """Turns bytes into frames without knowing where they come from.

    Fill `buffer()` from the front with arrived bytes, call `advance()` with their number, and
    repeat; `advance()` returns each frame once it is complete.
    """

    def __init__(self, limits: FrameLimits = _LIMITS, pool: BufferPool | None = None) -> None:
        self._limits = limits
        self._pool = pool or BufferPool()
        self._probes = BufferPool()
        self._probes.keep_at_most(1)
        self._begin_frame()

    def _begin_frame(self) -> None:
        self._body_bytes: int | None = None
        self._header: Header[Message] | None = None
        self._offsets: Sequence[int] = ()
        self._part: Buffer = bytearray(_PREFIX.size)
        self._missing = memoryview(self._part)

    def begin_again(self) -> None:
        """Drop the begun part of a frame: its sender sends the frame again."""
        self._begin_frame()

    def buffer(self) -> memoryview:
        """The memory for the next bytes; never empty."""
        return self._missing

    def advance(self, num_bytes: int) -> Frame | None:
        """Note that the first ``num_bytes`` of `buffer()` are filled.

        Raises:
            RemoteProtocolError: If the bytes are not a frame; the reader cannot go on then.
        """
        self._missing = self._missing[num_bytes:]
        while not self._missing:
            if self._header is not None:
                return self._finish_frame(self._header)
            if self._body_bytes is None:
                self._begin_header()
            else:
                self._begin_body(self._body_bytes)
        return None

    def close(self) -> None:
        """Note the end of the bytes.

        Raises:
            RemoteProtocolError: If a frame is incomplete.
        """
        if self._body_bytes is not None or len(self._missing) < _PREFIX.size:
            raise RemoteProtocolError(
                f"The connection ended inside a frame, {len(self._missing)} bytes before the end "
                "of its current part."
            )

    def _begin_header(self) -> None:
        magic, version, header_bytes, body_bytes = _PREFIX.unpack(self._part)
        if magic != MAGIC:
            # Without the bytes: a coordinator may send a worker to any address, and the error goes
            # back to it.
            raise RemoteProtocolError(
                "What came does not start a frame; is the peer lightning-hetero?"
            )
        self._check_version(version)
        limits = self._limits
        if not 0 < header_bytes <= limits.header_bytes or body_bytes > limits.body_bytes:
            raise RemoteProtocolError(
                f"A frame of {header_bytes} + {body_bytes} bytes is over the limit of "
                f"{limits.header_bytes} + {limits.body_bytes} bytes."
            )
        self._body_bytes = body_bytes
        self._part = bytearray(header_bytes)
        self._missing = memoryview(self._part)

    def _check_version(self, version: int) -> None:
        if version != PROTOCOL_VERSION:
            raise RemoteProtocolError(
                f"The peer speaks protocol version {version}, we speak {PROTOCOL_VERSION}; "
                "install the same version of lightning-hetero on both."
            )

    def _decode(self, header: bytearray | memoryview) -> Header[Message]:
        try:
            return _decoder.decode(header)
        except UNREADABLE as error:
            # The decoder quotes what it does not know.
            raise RemoteProtocolError(
                f"The frame's header is not a known message: {printable(str(error))}."
            ) from error

    def _begin_body(self, body_bytes: int) -> None:
        self._header = self._decode(self._part)
        self._offsets, expected_bytes = body_layout(self._header.tensors)
        if expected_bytes != body_bytes:
            specs = ", ".join(map(str, self._header.tensors)) or "no tensors"
            raise RemoteProtocolError(
                f"{type(self._header.message).__name__} announces {specs}, {expected_bytes} bytes, "
                f"and the frame carries {body_bytes}."
            )
        self._part = self._memory_for(self._header.message, body_bytes)
        self._missing = memoryview(self._part)[:body_bytes]

    def _memory_for(self, message: Message, body_bytes: int) -> Buffer:
        if message.is_probe:
            return self._probes.take(body_bytes)
        self._probes.forget()
        return (self._pool.new if message.is_kept else self._pool.take)(body_bytes)

    def _finish_frame(self, header: Header[Message]) -> Frame:
        places = zip(header.tensors, self._offsets, strict=True)
        tensors = tuple(tensor_from_bytes(spec, self._part, offset) for spec, offset in places)
        self._begin_frame()
        return Frame(header.message, tensors)


# The first frame of a conversation is small, as any sender may make us take memory for it.
OPENING_LIMITS = FrameLimits(header_bytes=64 * 2**10, body_bytes=0)

# First bytes of TLS records; no frame starts with one of them.
TLS_RECORD_TYPES = frozenset({20, 21, 22, 23})


class _Opening(msgspec.Struct, frozen=True):
    message: Hello | Welcome | Failure


_opening_decoder = msgspec.msgpack.Decoder(_Opening)


class OpeningReader(FrameReader):
    """Reads one Hello, or its answer (a Welcome or Failure), of any version.

    It leaves every byte of the next frame to an ordinary reader.

    Attributes:
        version: The protocol version of the frame; ours until its prefix has been read.
    """

    def __init__(self) -> None:
        super().__init__(OPENING_LIMITS)
        self.version = PROTOCOL_VERSION

    @override
    def advance(self, num_bytes: int) -> Frame | None:
        if self._body_bytes is None and self._part[0] in TLS_RECORD_TYPES:
            raise TrustError(
                "The peer speaks TLS, so it has a token, and this end has none; give both the same "
                "token file, as `lightning-hetero token` says.",
                about="token",
            )
        return super().advance(num_bytes)

    @override
    def _check_version(self, version: int) -> None:
        self.version = version

    @override
    def _decode(self, header: bytearray | memoryview) -> Header[Message]:
        try:
            return Header(_opening_decoder.decode(header).message, [])
        except UNREADABLE as error:
            if self.version != PROTOCOL_VERSION:
                super()._check_version(self.version)
            raise RemoteProtocolError(
                "The frame's header is no message that opens a conversation: "
                f"{printable(str(error))}."
            ) from error
