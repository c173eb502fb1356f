"""The authority that a token stands for, and the short-lived certificates under it.

    token ── HKDF-SHA256 ──▶ Ed25519 key ── signs ──▶ certificate of a process

Whoever has the token has the authority, so certificates say that their owner has it, and nothing
else: no name, no host, no role.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from .token import Token

_SALT = b"lightning-hetero"
_PURPOSE = b"authority of mutual TLS, version 1"
_KEY_BYTES = 32

# Every process makes the same certificate of the authority, so its dates are fixed, and out of the
# way of every clock.
_FIRST_DAY = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_LAST_DAY = datetime.datetime(2199, 12, 31, tzinfo=datetime.timezone.utc)

# Clocks of two machines may be this far apart, and a certificate still counts.
CLOCK_SKEW = datetime.timedelta(days=2)
# A process that lives longer makes itself another.
RENEWAL = datetime.timedelta(days=1)

_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


@dataclass(frozen=True)
class Certificate:
    """A certificate under the authority and its key, both as PEM; the key does not print."""

    public: bytes
    key: bytes = field(repr=False)


class Authority:
    """Makes certificates that all processes with the same token accept."""

    def __init__(self, token: Token) -> None:
        derivation = HKDF(hashes.SHA256(), _KEY_BYTES, _SALT, _PURPOSE)
        self._key = Ed25519PrivateKey.from_private_bytes(derivation.derive(token.secret))
        self._name = _name("lightning-hetero authority")
        self._key_id = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        self.certificate = _pem(self._certify_itself())

    def issue(self, now: datetime.datetime) -> Certificate:
        """A certificate for this process, with a key that nobody else has."""
        key = Ed25519PrivateKey.generate()
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_name("lightning-hetero"))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + RENEWAL + CLOCK_SKEW)
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
        return Certificate(_pem(certificate), _key_pem(key))

    def _certify_itself(self) -> x509.Certificate:
        return (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(1)
            .not_valid_before(_FIRST_DAY)
            .not_valid_after(_LAST_DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage("key_cert_sign"), critical=True)
            .add_extension(self._key_id, critical=False)
            .sign(self._key, None)
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(only: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{usage: usage == only for usage in _USAGES})


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
