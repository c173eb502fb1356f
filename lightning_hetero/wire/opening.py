"""How a conversation's first frame is read: by any version, from anybody, into little memory."""

from __future__ import annotations

import msgspec
from typing_extensions import override

from ..errors import RemoteProtocolError, TrustError
from .frames import UNREADABLE, Frame, FrameLimits, FrameReader, Header
from .messages import PROTOCOL_VERSION, Failure, Hello, Welcome

# A stranger's first frame is small: nobody may make us take memory before we know the role.
OPENING_LIMITS = FrameLimits(header_bytes=64 * 2**10, body_bytes=0)

# First bytes of TLS records; a frame starts with none of them.
TLS_RECORD_TYPES = frozenset({20, 21, 22, 23})


class _Opening(msgspec.Struct, frozen=True):
    message: Hello | Welcome | Failure


_decoder = msgspec.msgpack.Decoder(_Opening)


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
            return Header(_decoder.decode(header).message, [])
        except UNREADABLE as error:
            if self._version != PROTOCOL_VERSION:
                super()._check_version(self._version)
            raise RemoteProtocolError(
                f"The frame's header is no message that opens a conversation: {error}."
            ) from error
