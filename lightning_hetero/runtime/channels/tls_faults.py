"""What OpenSSL reports, as a sentence that says what to do."""

from __future__ import annotations

import ssl

from ...errors import TrustError

_SAME_FILE = "copy the same token file to both machines"

NO_TLS = (
    "The peer does not speak TLS, so it has no token, and this end has one; give both the same "
    "token file, to a worker by `--token-file` and to the strategy by `token_file=`."
)
_NO_CERTIFICATE = f"The peer showed no certificate, so it has no token; {_SAME_FILE}."
_OTHER_TOKEN = f"The peer's certificate is not of our token: the tokens differ; {_SAME_FILE}."
_OTHER_TOKEN_THERE = f"The peer refused our certificate: the tokens differ; {_SAME_FILE}."
_CLOCKS = (
    "The peer's certificate is not valid by this machine's clock: the clocks of the two machines "
    "are days apart; set them."
)
_CLOCKS_THERE = (
    "The peer says that our certificate is not valid by its clock: the clocks of the two machines "
    "are days apart; set them."
)
_OLD_TLS = "The peer does not speak TLS 1.3, and nothing older is spoken here; is it a worker?"
_NO_CERTIFICATE_HERE = "The peer wants a certificate and got none."

# By OpenSSL's names for what went wrong; "alert" is what the peer says of us.
_SENTENCES = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": _NO_CERTIFICATE,
    "CERTIFICATE_VERIFY_FAILED": _OTHER_TOKEN,
    "TLSV1_ALERT_UNKNOWN_CA": _OTHER_TOKEN_THERE,
    "TLSV1_ALERT_DECRYPT_ERROR": _OTHER_TOKEN_THERE,
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": _OTHER_TOKEN_THERE,
    # What is not valid yet is called bad.
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

# OpenSSL's numbers: a certificate that is not yet valid, or has expired.
_CLOCK_CODES = (9, 10)


def trust_error(error: ssl.SSLError) -> TrustError:
    """The error for people."""
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _CLOCK_CODES:
        return TrustError(_CLOCKS, "clock")
    text = _SENTENCES.get(error.reason or "", f"TLS failed: {error.reason or error}.")
    if text in _ABOUT_TOKENS:
        return TrustError(text, "token")
    return TrustError(text, "clock" if text in _ABOUT_CLOCKS else "TLS")
