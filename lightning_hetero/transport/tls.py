"""Mutual TLS 1.3: the credentials of a process, the handshake, and the connection after it.

    token ── HKDF-SHA256 ──▶ Ed25519 key ── signs ──▶ certificate of a process

The token derives the key of an authority. The authority signs short-lived certificates. A
certificate says only that its owner has the token; it has no name, host or role.

    send ──▶ encrypt ─▶ outgoing ──▶ the connection below ──▶ incoming ─▶ decrypt ──▶ receive
             └──────── lock ──────┘                          └──────── lock ───────┘

One thread sends while another receives, but OpenSSL lets only one thread at a time use its object,
and only the latest Pythons lock it in `ssl.SSLSocket`. So the object works on memory, under a lock;
a thread releases the lock before it waits for the peer. OpenSSL also produces records while
receiving, such as the answer to a key update. They leave with the next data: only one thread sends,
so records leave in their order.

This module alone creates TLS contexts.
"""

from __future__ import annotations

import contextlib
import datetime
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import ChannelError, TrustError
from ..protocol.frames import TLS_RECORD_TYPES
from .connection import Connection
from .token import Token, read_token_file

_SALT = b"lightning-hetero"
_PURPOSE = b"authority of mutual TLS, version 1"
_KEY_BYTES = 32

# Every process creates the same certificate of the authority, so its dates are fixed, and so far
# apart that it is valid by every clock.
_FIRST_DAY = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_LAST_DAY = datetime.datetime(2199, 12, 31, tzinfo=datetime.timezone.utc)

# How far the clocks of two machines may be apart.
CLOCK_SKEW = datetime.timedelta(days=2)
# Age at which a process replaces its certificate.
RENEWAL = datetime.timedelta(days=1)

_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


@dataclass(frozen=True)
class Certificate:
    """A certificate from the authority, and its key, both as PEM; the key does not print."""

    public: bytes
    key: bytes = field(repr=False)


class Authority:
    """Issues certificates. All processes with the same token accept them."""

    def __init__(self, token: Token) -> None:
        derivation = HKDF(hashes.SHA256(), _KEY_BYTES, _SALT, _PURPOSE)
        self._key = Ed25519PrivateKey.from_private_bytes(derivation.derive(token.secret))
        self._name = _name("lightning-hetero authority")
        self._key_id = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        self.certificate = _pem(self._certify_itself())

    def issue(self, now: datetime.datetime) -> Certificate:
        """A certificate for this process, with a new key of its own."""
        key = Ed25519PrivateKey.generate()
        last_moment = now + RENEWAL + CLOCK_SKEW
        certificate = (
            self._unsigned(_name("lightning-hetero"), key, now - CLOCK_SKEW, last_moment)
            .serial_number(x509.random_serial_number())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage("digital_signature"), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                critical=False,
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._key_id),
                critical=False,
            )
            .sign(self._key, None)
        )
        key_text = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return Certificate(_pem(certificate), key_text)

    def _certify_itself(self) -> x509.Certificate:
        return (
            self._unsigned(self._name, self._key, _FIRST_DAY, _LAST_DAY)
            .serial_number(1)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage("key_cert_sign"), critical=True)
            .add_extension(self._key_id, critical=False)
            .sign(self._key, None)
        )

    def _unsigned(
        self,
        subject: x509.Name,
        key: Ed25519PrivateKey,
        first_moment: datetime.datetime,
        last_moment: datetime.datetime,
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .not_valid_before(first_moment)
            .not_valid_after(last_moment)
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(only: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{usage: usage == only for usage in _USAGES})


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def utc_now() -> datetime.datetime:
    """The time by this machine's clock."""
    return datetime.datetime.now(datetime.timezone.utc)


@dataclass(frozen=True)
class _Contexts:
    """TLS contexts with a certificate, and when it was made."""

    made_at: datetime.datetime
    as_client: ssl.SSLContext
    as_server: ssl.SSLContext


class Credentials:
    """Proves to peers that this process has the token, and checks that the peers have it.

    It does not keep the token itself. It cannot be pickled, as its keys must not leave the process.
    """

    def __init__(self, token: Token, now: Callable[[], datetime.datetime] = utc_now) -> None:
        self._authority = Authority(token)
        self._now = now
        self._lock = threading.Lock()
        self._contexts = self._new_contexts()

    def context(self, is_server: bool) -> ssl.SSLContext:
        """The context for one more connection, with a certificate valid for days."""
        with self._lock:
            # In either direction: somebody may have set the clock back.
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
    """The credentials for the token in a file, if there is a file.

    Raises:
        TokenError: If the file is missing, open to others, or does not hold a token.
    """
    return None if token_file is None else Credentials(read_token_file(token_file))


def _context(purpose: int, authority: bytes, certificate: Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(purpose)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # A peer with the token may have any address and any name.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(cadata=authority.decode())
    _load_certificate(context, certificate)
    if purpose == ssl.PROTOCOL_TLS_SERVER:
        # No session is resumed: every connection shows its certificate.
        context.num_tickets = 0
    return context


def _load_certificate(context: ssl.SSLContext, certificate: Certificate) -> None:
    """Load a certificate and its key from a file, because OpenSSL reads only from files.

    The key of this process is in the file for a moment.
    """
    with tempfile.TemporaryDirectory() as folder:  # only this user may enter it
        path = Path(folder, "certificate.pem")
        path.write_bytes(certificate.public + certificate.key)
        context.load_cert_chain(path)


_HANDSHAKE_BYTES = 2**14

# A fatal alert, "unexpected message". OpenSSL does not answer a peer without TLS; the alert reports
# at least that this end speaks TLS.
_ALERT = bytes((21, 3, 3, 0, 2, 2, 10))


def secured(
    below: Connection,
    credentials: Credentials | None,
    is_server: bool,
    patience_seconds: float,
    is_mute: bool = False,
) -> Connection:
    """Put a connection under mutual TLS; without credentials, return it as it is.

    In TLS 1.3 the client finishes before the server has checked its certificate. So a client must
    receive something before it relies on the server's trust.

    Args:
        below: The connection for the encrypted bytes.
        credentials: Prove possession of the token.
        is_server: Whether the peer begins the handshake.
        patience_seconds: The most that the handshake may take.
        is_mute: Whether to send a peer without TLS not even an alert.

    Raises:
        TrustError: If the two ends do not share a token.
        ChannelError: If the peer ends the connection, or takes longer than ``patience_seconds``.
    """
    if credentials is None:
        return below
    context = credentials.context(is_server)
    handshake = _Handshake(below, context, is_server, patience_seconds)
    handshake.says_tls = is_server and not is_mute
    try:
        handshake.run()
    except TrustError:
        with contextlib.suppress(OSError):
            handshake.send_records()  # the alert in which OpenSSL says why
        raise
    except TimeoutError:
        raise ChannelError(f"The TLS handshake took over {patience_seconds} s.") from None
    return TlsConnection(below, handshake)


class _Handshake:
    """One end of a TLS handshake.

    Attributes:
        incoming: Records from the peer, read by ``tls``.
        outgoing: Records for the peer, written by ``tls``.
        tls: OpenSSL's object.
        says_tls: Whether to send a peer without TLS an alert.
    """

    def __init__(
        self, below: Connection, context: ssl.SSLContext, is_server: bool, patience_seconds: float
    ) -> None:
        self._below = below
        self.says_tls = is_server
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
            self._limit_wait()
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
        self._limit_wait()
        num_bytes = self._below.receive_into(buffer)
        if num_bytes == 0:
            raise ChannelError("The peer ended the connection during the TLS handshake.")
        if not self._is_begun and buffer[0] not in TLS_RECORD_TYPES:
            if self.says_tls:
                self.outgoing.write(_ALERT)
            raise TrustError(NO_TLS)
        self._is_begun = True
        self.incoming.write(buffer[:num_bytes])

    def _limit_wait(self) -> None:
        left_seconds = self._end - time.monotonic()
        if left_seconds <= 0:
            raise TimeoutError
        self._below.set_timeout(left_seconds)


# Bytes to encrypt, or to read from below, at once: few enough for a core's cache, and enough to
# hide the cost of the calls around a fast OpenSSL (a quarter of this was a tenth slower).
CHUNK_BYTES = 2**20

# The longest record of TLS 1.3, its header included.
_RECORD_BYTES = 5 + 2**14 + 256


class TlsConnection:
    """TLS over another connection; both close together.

    Args:
        below: The connection for the records.
        handshake: The completed handshake.
    """

    def __init__(self, below: Connection, handshake: _Handshake) -> None:
        self.traffic = below.traffic
        self._below = below
        self._tls = handshake.tls
        # The stub does not know that reading into a buffer returns a number.
        self._read: Callable[[int, memoryview], int] = self._tls.read  # type: ignore[assignment]
        self._incoming = handshake.incoming
        self._outgoing = handshake.outgoing
        self._lock = threading.Lock()
        self._arrived = memoryview(bytearray(CHUNK_BYTES))
        # Records not yet taken by the connection below, and the number of bytes of their data.
        self._unsent = memoryview(b"")
        self._owed_bytes = 0

    def set_timeout(self, seconds: float) -> None:
        self._below.set_timeout(seconds)

    def receive_into(self, buffer: memoryview, sure_bytes: int = 1) -> int:
        while True:
            with self._lock:
                num_bytes = self._decrypt_into(buffer)
                # Of the bytes read from below, at most part of one record is still here, and
                # records are longer than their content.
                sure_below = sure_bytes - self._incoming.pending - _RECORD_BYTES
            if num_bytes is not None:
                return num_bytes
            num_arrived = self._below.receive_into(self._arrived, max(1, sure_below))
            if num_arrived == 0:
                return 0
            with self._lock:
                self._incoming.write(self._arrived[:num_arrived])

    @property
    def has_ahead(self) -> bool:
        with self._lock:
            return self._tls.pending() > 0

    def send(self, buffers: Sequence[memoryview]) -> int:
        if not self._unsent:
            with self._lock:
                self._owed_bytes = self._encrypt(buffers)
                self._unsent = memoryview(self._outgoing.read())
        self._unsent = self._unsent[self._below.send([self._unsent]) :]
        if self._unsent:
            return 0
        sent_bytes, self._owed_bytes = self._owed_bytes, 0
        return sent_bytes

    def has_room(self) -> bool:
        return not self._unsent and self._below.has_room()

    def seconds_since_answer(self) -> float | None:
        return self._below.seconds_since_answer()

    def peer_cpu_seconds(self) -> float | None:
        return self._below.peer_cpu_seconds()

    def finish_sending(self) -> None:
        self._below.finish_sending()

    def shut_down(self) -> None:
        self._below.shut_down()

    def close(self) -> None:
        # Without TLS's own closing alert: a conversation ends with a Goodbye or Failure, and a
        # channel reports an end without one.
        self._below.close()

    def _decrypt_into(self, buffer: memoryview) -> int | None:
        """Decrypt the arrived records into a buffer; 0 at the end, None before the next record."""
        num_bytes = 0
        try:
            while num_bytes < len(buffer):
                num_bytes += self._read(len(buffer) - num_bytes, buffer[num_bytes:])
        except ssl.SSLWantReadError:
            return num_bytes or None
        except ssl.SSLZeroReturnError:
            return num_bytes
        except ssl.SSLError as error:
            raise trust_error(error) from error
        return num_bytes

    def _encrypt(self, buffers: Sequence[memoryview]) -> int:
        """Encrypt the first bytes of the buffers into records; return how many bytes."""
        num_bytes = 0
        for buffer in buffers:
            part = buffer[: CHUNK_BYTES - num_bytes]
            num_bytes += len(part)
            while part:
                part = part[self._tls.write(part) :]
            if num_bytes == CHUNK_BYTES:
                break
        return num_bytes


_SAME_FILE = "copy the same token file to both machines"

NO_TLS = (
    "The peer does not speak TLS, so it has no token, and this end has one; give both the same "
    "token file, as `lightning-hetero token` says."
)
_NO_CERTIFICATE = f"The peer showed no certificate, so it has no token; {_SAME_FILE}."
_OTHER_TOKEN = (
    f"The peer's certificate does not belong to our token: the tokens differ; {_SAME_FILE}."
)
_OTHER_TOKEN_THERE = f"The peer refused our certificate: the tokens differ; {_SAME_FILE}."
_CLOCKS = (
    "The peer's certificate is not valid by this machine's clock: the clocks of the two machines "
    "are days apart; set them."
)
_CLOCKS_THERE = (
    "The peer says that our certificate is not valid by its clock: the clocks of the two machines "
    "are days apart; set them."
)
_OLD_TLS = "The peer does not speak TLS 1.3, and this end speaks it only; is it a worker?"
_NO_CERTIFICATE_HERE = "The peer wants a certificate and did not get one."

# By OpenSSL's names of errors; an "alert" is what the peer reports about us.
_SENTENCES = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": _NO_CERTIFICATE,
    "CERTIFICATE_VERIFY_FAILED": _OTHER_TOKEN,
    "TLSV1_ALERT_UNKNOWN_CA": _OTHER_TOKEN_THERE,
    "TLSV1_ALERT_DECRYPT_ERROR": _OTHER_TOKEN_THERE,
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": _OTHER_TOKEN_THERE,
    # OpenSSL calls a certificate bad that is not valid yet.
    "SSLV3_ALERT_BAD_CERTIFICATE": _CLOCKS_THERE,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": _CLOCKS_THERE,
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": _NO_CERTIFICATE_HERE,
    "UNSUPPORTED_PROTOCOL": _OLD_TLS,
    "WRONG_SSL_VERSION": _OLD_TLS,
    "TLSV1_ALERT_PROTOCOL_VERSION": _OLD_TLS,
    "WRONG_VERSION_NUMBER": NO_TLS,
    "HTTP_REQUEST": NO_TLS,
}

_ABOUT_TOKENS = {_NO_CERTIFICATE, _OTHER_TOKEN, _OTHER_TOKEN_THERE, _NO_CERTIFICATE_HERE}
_ABOUT_CLOCKS = {_CLOCKS, _CLOCKS_THERE}

# OpenSSL's error numbers for a certificate that is not valid yet, or has expired.
_CLOCK_CODES = (9, 10)


def trust_error(error: ssl.SSLError) -> TrustError:
    """OpenSSL's report, as an error with a remedy."""
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _CLOCK_CODES:
        return TrustError(_CLOCKS, "clock")
    text = _SENTENCES.get(error.reason or "", f"TLS failed: {error.reason or error}.")
    if text in _ABOUT_TOKENS:
        return TrustError(text, "token")
    return TrustError(text, "clock" if text in _ABOUT_CLOCKS else "TLS")
