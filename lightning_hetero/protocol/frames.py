"""Frames: a message and its tensors as bytes.

    prefix (20 bytes)          header (msgpack)              body
    magic version lengths  |   message, tensor specs   |   tensor 0 . . tensor 1 . . …

The version is that of the protocol. It never changes what a prefix or an opening looks like, so
that every version can tell every other why they do not understand each other.

Lengths, shapes and dtypes are checked before memory is taken. Tensors are neither copied into a
frame nor out of one: `encode_frame` names their memory, `FrameReader` says where bytes belong.

How a conversation's first frame is read: by any version, from anybody, into little memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from torch import Tensor
from typing_extensions import override

from ..errors import LocalProtocolError, RemoteProtocolError, TrustError
from .buffers import Buffer, BufferPool, new_buffer
from .messages import PROTOCOL_VERSION, Failure, Hello, Message, Welcome
from .tensors import ALIGNMENT_BYTES, TensorSpec, body_layout, tensor_bytes, tensor_from_bytes

MAGIC = b"LHET"
_PREFIX = struct.Struct(">4sIIQ")

# What decoding raises of bytes that are no message.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True)
class FrameLimits:
    """The most that a peer may send in one frame."""

    header_bytes: int = 16 * 2**20
    body_bytes: int = 8 * 2**30


@dataclass(frozen=True)
class Frame:
    """One thing said: a message and the tensors that belong to it."""

    message: Message
    tensors: tuple[Tensor, ...] = ()

    def __str__(self) -> str:
        tensors = " ".join(str(TensorSpec.of(tensor)) for tensor in self.tensors)
        return f"{self.message} {tensors}".rstrip()


_LIMITS = FrameLimits()


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a frame says before its body."""

    message: Message
    tensors: Annotated[list[TensorSpec], msgspec.Meta(max_length=2**16)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def encode_frame(frame: Frame, limits: FrameLimits | None = None) -> list[memoryview]:
    """The frame's bytes as buffers to be sent one after the other.

    Raises:
        LocalProtocolError: If the frame is longer than the limits.
    """
    head = encode_head(frame, limits)
    return [head, *encode_body(frame.tensors)]


def encode_head(frame: Frame, limits: FrameLimits | None = None) -> memoryview:
    """What comes before the tensors, whose content is not looked at.

    Raises:
        LocalProtocolError: If the frame is longer than the limits.
    """
    limits = limits or _LIMITS
    specs = [TensorSpec.of(tensor) for tensor in frame.tensors]
    _, body_bytes = body_layout(specs)
    header = _encoder.encode(Header(frame.message, specs))
    if len(header) > limits.header_bytes or body_bytes > limits.body_bytes:
        raise LocalProtocolError(
            f"{type(frame.message).__name__} with {len(header)} + {body_bytes} bytes is over the "
            f"limit of {limits.header_bytes} + {limits.body_bytes} bytes."
        )
    return memoryview(_PREFIX.pack(MAGIC, PROTOCOL_VERSION, len(header), body_bytes) + header)


def encode_body(tensors: Sequence[Tensor]) -> list[memoryview]:
    """The tensors' bytes, with what is between them."""
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

    Fill `buffer()` from the front with what arrived, call `advance()` with the number of bytes,
    and repeat; whenever a frame is complete, `advance()` returns it.
    """

    def __init__(self, limits: FrameLimits | None = None, pool: BufferPool | None = None) -> None:
        self._limits = limits or FrameLimits()
        self._pool = pool or BufferPool()
        self._probes = BufferPool()
        self._probes.keep_at_most(1)
        self._body_bytes: int | None = None
        self._header: Header | None = None
        self._part: Buffer = bytearray(_PREFIX.size)
        self._missing = memoryview(self._part)

    def buffer(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        return self._missing

    def advance(self, num_bytes: int) -> Frame | None:
        """Note that the first ``num_bytes`` of `buffer()` are filled.

        Raises:
            RemoteProtocolError: If the bytes are no frame; the reader is then of no further use.
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
        """Say that no more bytes come.

        Raises:
            RemoteProtocolError: If that is in the middle of a frame.
        """
        if self._body_bytes is not None or len(self._missing) < _PREFIX.size:
            raise RemoteProtocolError(
                f"The connection ended inside a frame, {len(self._missing)} bytes before the end "
                "of its current part."
            )

    def _begin_frame(self) -> None:
        self._body_bytes = None
        self._header = None
        self._part = bytearray(_PREFIX.size)
        self._missing = memoryview(self._part)

    def _begin_header(self) -> None:
        magic, version, header_bytes, body_bytes = _PREFIX.unpack(self._part)
        if magic != MAGIC:
            raise RemoteProtocolError(
                f"The bytes {magic!r} do not start a frame; is the peer lightning-hetero?"
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

    def _decode(self, header: bytearray | memoryview) -> Header:
        try:
            return _decoder.decode(header)
        except UNREADABLE as error:
            raise RemoteProtocolError(f"The frame's header is not a known message: {error}.") from (
                error
            )

    def _begin_body(self, body_bytes: int) -> None:
        self._header = self._decode(self._part)
        _, expected_bytes = body_layout(self._header.tensors)
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
        return new_buffer(body_bytes) if message.is_kept else self._pool.take(body_bytes)

    def _finish_frame(self, header: Header) -> Frame:
        offsets, _ = body_layout(header.tensors)
        tensors = tuple(
            tensor_from_bytes(spec, self._part, offset)
            for spec, offset in zip(header.tensors, offsets, strict=True)
        )
        self._begin_frame()
        return Frame(header.message, tensors)


# A stranger's first frame is small: nobody may make us take memory before we know the role.
OPENING_LIMITS = FrameLimits(header_bytes=64 * 2**10, body_bytes=0)

# First bytes of TLS records; a frame starts with none of them.
TLS_RECORD_TYPES = frozenset({20, 21, 22, 23})


class _Opening(msgspec.Struct, frozen=True):
    message: Hello | Welcome | Failure


_opening_decoder = msgspec.msgpack.Decoder(_Opening)


class OpeningReader(FrameReader):
    """Reads one Hello, or the Welcome or Failure that answers it, of whatever version.

    It takes no byte of what follows, so that an ordinary reader may go on.
    """

    def __init__(self) -> None:
        super().__init__(OPENING_LIMITS)
        self._version = PROTOCOL_VERSION

    @property
    def version(self) -> int:
        """The protocol version of what was read."""
        return self._version

    @override
    def advance(self, num_bytes: int) -> Frame | None:
        if self._body_bytes is None and self._part[0] in TLS_RECORD_TYPES:
            raise TrustError(
                "The peer speaks TLS, so it has a token, and this end has none; give both the same "
                "token file, to a worker by `--token-file` and to the strategy by `token_file=`.",
                about="token",
            )
        return super().advance(num_bytes)

    @override
    def _check_version(self, version: int) -> None:
        self._version = version

    @override
    def _decode(self, header: bytearray | memoryview) -> Header:
        try:
            return Header(_opening_decoder.decode(header).message, [])
        except UNREADABLE as error:
            if self._version != PROTOCOL_VERSION:
                super()._check_version(self._version)
            raise RemoteProtocolError(
                f"The frame's header is no message that opens a conversation: {error}."
            ) from error
