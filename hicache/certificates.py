"""Until when certificates are valid: the one thing of them that OpenSSL, behind ``ssl``, does not tell of one's own."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from datetime import UTC, datetime

_PEM = re.compile(rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----(.*?)-----END", re.DOTALL)
_SEQUENCE, _VERSION, _UTC_TIME, _TIME = 0x30, 0xA0, 0x17, 0x18
_FIELDS_BEFORE_VALIDITY = 3  # serial number, algorithm, issuer


def earliest_expiration_s(pem: bytes) -> float | None:
    """When the first of the certificates in ``pem`` ends, in seconds since 1970; None where there is none.

    What OpenSSL would not take as a certificate counts as none.
    """
    return min(_expirations_s(pem), default=None)


def _expirations_s(pem: bytes) -> Iterator[float]:
    for match in _PEM.finditer(pem):
        try:
            yield _not_after_s(base64.b64decode(match[1]))
        except (ValueError, IndexError, binascii.Error):
            continue


def _not_after_s(der: bytes) -> float:
    """Certificate > TBSCertificate > [version], serial number, algorithm, issuer, validity > from, until (RFC 5280)."""
    place = _enter(der, _enter(der, 0))
    if der[place] == _VERSION:
        place = _behind(der, place)
    for _ in range(_FIELDS_BEFORE_VALIDITY):
        place = _behind(der, place)
    until = _behind(der, _enter(der, place))
    start, end = _content(der, until)
    text = der[start:end].decode("ascii")
    if der[until] == _UTC_TIME:
        text = ("19" if text >= "50" else "20") + text
    elif der[until] != _TIME:
        raise ValueError(f"{der[until]:#x} is no time")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _enter(der: bytes, place: int) -> int:
    """Where the first element of the sequence at ``place`` begins."""
    if der[place] != _SEQUENCE:
        raise ValueError(f"{der[place]:#x} is no sequence")
    return _content(der, place)[0]


def _behind(der: bytes, place: int) -> int:
    return _content(der, place)[1]


def _content(der: bytes, place: int) -> tuple[int, int]:
    """``[start, end)`` of what is in the element at ``place``; ``start > place``. Raises IndexError beyond the end."""
    size, start = der[place + 1], place + 2
    if size & 0x80:  # so many bytes of length follow
        start += size & 0x7F
        size = int.from_bytes(der[place + 2 : start])
    if start + size > len(der):
        raise IndexError(f"an element of {size} bytes at {start} of {len(der)}")
    return start, start + size
