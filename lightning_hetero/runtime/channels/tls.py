"""Mutual TLS 1.3: its contexts are built here and nowhere else, and its handshake is made here."""

from __future__ import annotations

import contextlib
import datetime
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...errors import ChannelError, TrustError
from ...protocol.frames import TLS_RECORD_TYPES
from .authority import RENEWAL, Authority, Certificate
from .connection import Connection
from .tls_connection import TlsConnection
from .tls_faults import NO_TLS, trust_error
from .token import Token, read_token_file

_HANDSHAKE_BYTES = 2**14

# A fatal alert, "unexpected message": OpenSSL says nothing to a peer that does not speak TLS, who
# should learn at least that we do.
_ALERT = bytes((21, 3, 3, 0, 2, 2, 10))


def utc_now() -> datetime.datetime:
    """The time by this machine's clock."""
    return datetime.datetime.now(datetime.timezone.utc)


@dataclass(frozen=True)
class _Contexts:
    """Settings for connections, with a certificate that was made at a certain time."""

    made_at: datetime.datetime
    as_client: ssl.SSLContext
    as_server: ssl.SSLContext


class Credentials:
    """What shows others that we have the token, and recognises those who have it too.

    The token itself is not kept. Cannot be pickled, as its keys must not leave the process.
    """

    def __init__(self, token: Token, now: Callable[[], datetime.datetime] = utc_now) -> None:
        self._authority = Authority(token)
        self._now = now
        self._lock = threading.Lock()
        self._contexts = self._new_contexts()

    def context(self, is_server: bool) -> ssl.SSLContext:
        """Settings for one more connection, with a certificate that is valid for days."""
        with self._lock:
            # Either way: the clock may have been set.
            if abs(self._now() - self._contexts.made_at) > RENEWAL:
                self._contexts = self._new_contexts()
            return self._contexts.as_server if is_server else self._contexts.as_client

    def _new_contexts(self) -> _Contexts:
        now = self._now()
        authority, certificate = self._authority.certificate, self._authority.issue(now)
        return _Contexts(
            now,
            _context(ssl.PROTOCOL_TLS_CLIENT, authority, certificate),
            _context(ssl.PROTOCOL_TLS_SERVER, authority, certificate),
        )


def credentials_of(token_file: Path | None) -> Credentials | None:
    """The credentials of whoever may read that file; None without one.

    Raises:
        TokenError: If it is not there, or should not be used.
    """
    return None if token_file is None else Credentials(read_token_file(token_file))


def _context(purpose: int, authority: bytes, certificate: Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(purpose)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Whoever has the token may be at any address, under any name.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(cadata=authority.decode())
    _load_certificate(context, certificate)
    if purpose == ssl.PROTOCOL_TLS_SERVER:
        # Nobody resumes: every connection shows its certificate.
        context.num_tickets = 0
    return context


def _load_certificate(context: ssl.SSLContext, certificate: Certificate) -> None:
    """OpenSSL reads from files only, so the key of this one process stands in one for a moment."""
    with tempfile.TemporaryDirectory() as folder:  # which only we may enter
        path = Path(folder, "certificate.pem")
        path.write_bytes(certificate.public + certificate.key)
        context.load_cert_chain(path)


def secured(
    below: Connection, credentials: Credentials | None, is_server: bool, patience_seconds: float
) -> Connection:
    """The connection under mutual TLS if there are credentials, or else as it is.

    In TLS 1.3 the client is through before the server has checked its certificate, so it must not
    count itself trusted before it has heard something.

    Raises:
        TrustError: If the two ends have no token in common.
        ChannelError: If the peer ends the connection, or dawdles.
    """
    if credentials is None:
        return below
    context = credentials.context(is_server)
    handshake = _Handshake(below, context, is_server, patience_seconds)
    try:
        handshake.run()
    except TrustError:
        with contextlib.suppress(OSError):
            handshake.send_records()  # in which OpenSSL says why
        raise
    except TimeoutError:
        raise ChannelError(f"The TLS handshake took over {patience_seconds} s.") from None
    return TlsConnection(below, handshake.tls, handshake.incoming, handshake.outgoing)


class _Handshake:
    """One end of a TLS handshake, in memory but for its two ways to the connection below."""

    def __init__(
        self, below: Connection, context: ssl.SSLContext, is_server: bool, patience_seconds: float
    ) -> None:
        self._below = below
        self._is_server = is_server
        self._end = time.monotonic() + patience_seconds
        self._is_begun = False
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=is_server)

    def run(self) -> None:
        while not self._is_over():
            self.send_records()
            self._receive_records()
        self.send_records()

    def send_records(self) -> None:
        unsent = memoryview(self.outgoing.read())
        while unsent:
            self._wait_no_longer_than_allowed()
            unsent = unsent[self._below.send([unsent]) :]

    def _is_over(self) -> bool:
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise trust_error(error) from error
        return True

    def _receive_records(self) -> None:
        buffer = memoryview(bytearray(_HANDSHAKE_BYTES))
        self._wait_no_longer_than_allowed()
        num_bytes = self._below.receive_into(buffer)
        if num_bytes == 0:
            raise ChannelError("The peer ended the connection during the TLS handshake.")
        if not self._is_begun and buffer[0] not in TLS_RECORD_TYPES:
            if self._is_server:
                self.outgoing.write(_ALERT)
            raise TrustError(NO_TLS)
        self._is_begun = True
        self.incoming.write(buffer[:num_bytes])

    def _wait_no_longer_than_allowed(self) -> None:
        left_seconds = self._end - time.monotonic()
        if left_seconds <= 0:
            raise TimeoutError
        self._below.set_timeout(left_seconds)
