"""What a token stands for: one authority, and certificates that say nothing else."""

from __future__ import annotations

import datetime

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from lightning_hetero.runtime.channels.authority import CLOCK_SKEW, RENEWAL, Authority
from lightning_hetero.runtime.channels.token import SECRET_BYTES, Token

NOW = datetime.datetime(2026, 11, 21, tzinfo=datetime.timezone.utc)
TOKEN = Token(bytes(range(SECRET_BYTES)))


def test_the_same_token_stands_for_the_same_authority_everywhere() -> None:
    assert Authority(TOKEN).certificate == Authority(TOKEN).certificate
    assert Authority(TOKEN).certificate != Authority(Token.new()).certificate


def test_every_certificate_has_a_key_of_its_own() -> None:
    authority = Authority(TOKEN)
    one, other = authority.issue(NOW), authority.issue(NOW)
    assert one.key != other.key
    assert one.public != other.public
    assert "PRIVATE" not in repr(one)


def test_a_certificate_is_signed_by_its_own_authority() -> None:
    certificate = x509.load_pem_x509_certificate(Authority(TOKEN).issue(NOW).public)
    certificate.verify_directly_issued_by(
        x509.load_pem_x509_certificate(Authority(TOKEN).certificate)
    )
    stranger = x509.load_pem_x509_certificate(Authority(Token.new()).certificate)
    with pytest.raises(InvalidSignature):
        certificate.verify_directly_issued_by(stranger)


def test_a_certificate_makes_no_others_and_names_nobody() -> None:
    certificate = x509.load_pem_x509_certificate(Authority(TOKEN).issue(NOW).public)
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not constraints.ca
    assert certificate.subject.rfc4514_string() == "CN=lightning-hetero"
    with pytest.raises(x509.ExtensionNotFound):
        certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)


def test_a_certificate_is_short_lived_and_allows_for_clocks_that_are_days_apart() -> None:
    certificate = x509.load_pem_x509_certificate(Authority(TOKEN).issue(NOW).public)
    assert certificate.not_valid_before_utc == NOW - CLOCK_SKEW
    assert certificate.not_valid_after_utc == NOW + RENEWAL + CLOCK_SKEW
    assert datetime.timedelta(days=1) < CLOCK_SKEW < datetime.timedelta(days=7)
