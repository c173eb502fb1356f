"""The exchange of two pairing machines: bytes in, bytes out, without sockets and clocks.

    coordinator                     worker
    Hello    X  ───────────────────▶
             ◀───────────────────  Y  Answer
    Proof    ──────────────────────▶            a wrong proof costs a try
             ◀──────────────────────  Proof
    Token    sealed ───────────────▶
             ◀───────────────────  sealed  Receipt

X and Y are of SPAKE2: each end mixes the code into its message, and both get the same key only if
their codes are equal. A listener cannot test a code, and an active peer tests one code with one
exchange. The coordinator proves its code first, so the worker counts all codes tested
there by strangers. Proofs and sealing keys depend on SPAKE2's key, on both messages, on the two
roles and on the purpose: a message of another exchange, or of the other end, fits nowhere.

A message is a prefix, a kind, and a content of a fixed size. Anything else is a fault of the peer.
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from spake2 import SPAKE2_A, SPAKE2_B, SPAKEError  # type: ignore[import-untyped]
from spake2.ed25519_basic import NotOnCurve  # type: ignore[import-untyped]

from ..errors import RemoteProtocolError
from ..transport.token import SECRET_BYTES, Token

VERSION = 1
_MAGIC = b"lhp"
_PURPOSE = b"lightning-hetero: pairing, version 1: "
_ROLES = {"idA": _PURPOSE + b"coordinator", "idB": _PURPOSE + b"worker"}

# The longest read that an end needs: one message and a byte too many.
MOST_BYTES = 64
_KEY_BYTES = 32
_SEAL_BYTES = 16
# Each key seals one message, so the nonce may be fixed.
_NONCE = bytes(12)


class Kind(enum.IntEnum):
    """The kinds of messages."""

    HELLO = 1
    ANSWER = 2
    PROOF = 3
    TOKEN = 4
    RECEIPT = 5
    REFUSAL = 6


class Receipt(enum.IntEnum):
    """The worker's last word: whether it has the token now."""

    KEPT = 1
    SAME = 2
    OTHER_TOKEN = 3
    NOT_WRITTEN = 4


class Reason(enum.IntEnum):
    """Why a worker ends an exchange. A number follows it: for a wrong code, the tries left."""

    WRONG_CODE = 1
    BUSY = 2


_SIZES = {
    Kind.HELLO: 1 + _KEY_BYTES,
    Kind.ANSWER: 1 + _KEY_BYTES,
    Kind.PROOF: _KEY_BYTES,
    Kind.TOKEN: SECRET_BYTES + _SEAL_BYTES,
    Kind.RECEIPT: 1 + _SEAL_BYTES,
    Kind.REFUSAL: 2,
}
_HEAD_BYTES = len(_MAGIC) + 2


class OtherVersion(RemoteProtocolError):
    """The peer pairs by another version of this exchange."""


class WrongCode(RemoteProtocolError):
    """The peer's proof does not fit: it has another code."""


@dataclass(frozen=True)
class Refusal:
    """A worker's refusal.

    Args:
        reason: Why it ends the exchange.
        number: For a wrong code, how many tries are left.
    """

    reason: Reason
    number: int = 0

    def to_bytes(self) -> bytes:
        """The refusal as a message."""
        return message(Kind.REFUSAL, bytes([self.reason, self.number]))


def message(kind: Kind, content: bytes) -> bytes:
    """The bytes of a message."""
    return _MAGIC + bytes([VERSION, kind]) + content


class MessageReader:
    """Puts messages together. The peer sends one, and then waits for an answer."""

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes, *expected: Kind) -> tuple[Kind, bytes] | None:
        """Take some bytes of the next message.

        Args:
            data: The bytes, at most `MOST_BYTES`.
            expected: The kinds that fit now.

        Returns:
            The kind and the content of a whole message; None while some of it is missing.

        Raises:
            RemoteProtocolError: If the bytes are another message, or more than one.
            OtherVersion: If the peer speaks another version.
        """
        self._data += data
        said = self._data
        if not said.startswith(_MAGIC[: len(said)]):
            raise RemoteProtocolError("The peer does not pair.")
        if len(said) > len(_MAGIC) and said[len(_MAGIC)] != VERSION:
            raise OtherVersion(
                f"The peer pairs by version {said[len(_MAGIC)]}, and this end by {VERSION}."
            )
        if len(said) < _HEAD_BYTES:
            return None
        if (number := said[_HEAD_BYTES - 1]) not in expected:
            raise RemoteProtocolError(f"A message of kind {number} does not fit here.")
        kind, missing_bytes = Kind(number), _HEAD_BYTES + _SIZES[Kind(number)] - len(said)
        if missing_bytes < 0:
            raise RemoteProtocolError(f"The peer said {-missing_bytes} bytes more than a message.")
        if missing_bytes:
            return None
        self._data = b""
        return kind, said[_HEAD_BYTES:]


class _Keys:
    """The proofs and the keys of both ends, from SPAKE2's key and its two messages."""

    def __init__(self, shared: bytes, hello: bytes, answer: bytes) -> None:
        salt = sha256(hello + answer).digest()
        made = HKDF(hashes.SHA256(), 4 * _KEY_BYTES, salt, _PURPOSE + b"keys").derive(shared)
        keys = [made[start : start + _KEY_BYTES] for start in range(0, len(made), _KEY_BYTES)]
        self.coordinator_proof, self.worker_proof, self.token, self.receipt = keys

    @classmethod
    def agree(cls, spake: SPAKE2_A | SPAKE2_B, heard: bytes, hello: bytes, answer: bytes) -> _Keys:
        """The keys of an exchange.

        Raises:
            RemoteProtocolError: If the peer's message is not one of SPAKE2.
        """
        try:
            return cls(spake.finish(heard), hello, answer)
        except (SPAKEError, NotOnCurve, ValueError) as error:
            raise RemoteProtocolError("The peer's message is not one of SPAKE2.") from error


def _sealed(key: bytes, kind: Kind, content: bytes) -> bytes:
    return message(kind, AESGCM(key).encrypt(_NONCE, content, bytes([kind])))


def _unsealed(key: bytes, kind: Kind, content: bytes) -> bytes:
    try:
        return AESGCM(key).decrypt(_NONCE, content, bytes([kind]))
    except InvalidTag:
        raise RemoteProtocolError("A message was changed on its way.") from None


def _check_proof(proof: bytes, heard: bytes) -> None:
    if not hmac.compare_digest(proof, heard):
        raise WrongCode("The peer has another code.")


class WorkerExchange:
    """The worker's end of one exchange.

    Attributes:
        awaited: The kind of the peer's next message.
    """

    def __init__(self, code: str) -> None:
        self._spake = SPAKE2_B(code.encode(), **_ROLES)
        self._reader = MessageReader()
        self.awaited = Kind.HELLO

    def receive(self, data: bytes) -> tuple[Kind, bytes] | None:
        """Take some bytes of the peer.

        Returns:
            The kind and the content of a whole message, for the method of its kind.

        Raises:
            RemoteProtocolError: If the peer says anything else than the awaited message.
        """
        return self._reader.feed(data, self.awaited)

    def answer(self, content: bytes) -> bytes:
        """The answer to a Hello.

        Raises:
            RemoteProtocolError: If the Hello is not a message of SPAKE2.
        """
        answer = self._spake.start()
        self._keys = _Keys.agree(self._spake, content, content, answer)
        self.awaited = Kind.PROOF
        return message(Kind.ANSWER, answer)

    def prove(self, content: bytes) -> bytes:
        """The proof of this end, after the peer's own.

        Raises:
            WrongCode: If the peer has another code.
        """
        _check_proof(self._keys.coordinator_proof, content)
        self.awaited = Kind.TOKEN
        return message(Kind.PROOF, self._keys.worker_proof)

    def token(self, content: bytes) -> Token:
        """The peer's token.

        Raises:
            RemoteProtocolError: If it was changed on its way.
        """
        return Token(_unsealed(self._keys.token, Kind.TOKEN, content))

    def judge(self, receipt: Receipt) -> bytes:
        """The last message."""
        return _sealed(self._keys.receipt, Kind.RECEIPT, bytes([receipt]))


class CoordinatorExchange:
    """The coordinator's end of an exchange.

    Args:
        code: The code, as a person typed it.
        token: Called when the worker has proved the code; it returns the token to send.

    Attributes:
        hello: The first message, for the worker.
    """

    def __init__(self, code: str, token: Callable[[], Token]) -> None:
        self._spake = SPAKE2_A(code.encode(), **_ROLES)
        self._token = token
        self._own: bytes = self._spake.start()
        self._reader = MessageReader()
        self._awaited = Kind.ANSWER
        self.hello = message(Kind.HELLO, self._own)

    def receive(self, data: bytes) -> bytes | Refusal | Receipt:
        """Take some bytes of the worker.

        Returns:
            Bytes for the worker, empty while some of its message is missing; or the worker's last
            word.

        Raises:
            WrongCode: If the peer does not have the code.
            RemoteProtocolError: If the peer says anything else than the awaited message.
        """
        heard = self._reader.feed(data, self._awaited, Kind.REFUSAL)
        if heard is None:
            return b""
        kind, content = heard
        if kind == Kind.REFUSAL:
            return self._refusal(content)
        if kind == Kind.ANSWER:
            self._keys = _Keys.agree(self._spake, content, self._own, content)
            self._awaited = Kind.PROOF
            return message(Kind.PROOF, self._keys.coordinator_proof)
        if kind == Kind.PROOF:
            _check_proof(self._keys.worker_proof, content)
            self._awaited = Kind.RECEIPT
            return _sealed(self._keys.token, Kind.TOKEN, self._token().secret)
        return Receipt(_unsealed(self._keys.receipt, Kind.RECEIPT, content)[0])

    def _refusal(self, content: bytes) -> Refusal:
        try:
            return Refusal(Reason(content[0]), content[1])
        except ValueError:
            raise RemoteProtocolError(f"The refusal {content[0]} is unknown.") from None
