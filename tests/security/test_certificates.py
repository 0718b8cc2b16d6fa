"""Until when a certificate holds is read from its bytes as a library reads it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from bench.certificates import Authority
from hicache.certificates import earliest_expiration_s


def certificate(*, year: int) -> bytes:
    """Signed by itself, and over in ``year``."""
    key = ec.generate_private_key(ec.SECP256R1())
    made = (
        x509.CertificateBuilder(x509.Name([]), x509.Name([]), key.public_key(), x509.random_serial_number())
        .not_valid_before(datetime(1951, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(year, 6, 7, 8, 9, 10, tzinfo=UTC))
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM)


def end_of(pem: bytes) -> float:
    [first, *_] = x509.load_pem_x509_certificates(pem)
    return first.not_valid_after_utc.timestamp()


@pytest.mark.parametrize("year", [1960, 1999, 2000, 2030, 2049, 2050, 9999])  # two digits of a year end with 2049
def test_the_end_is_the_one_that_a_library_reads(year: int) -> None:
    pem = certificate(year=year)
    assert earliest_expiration_s(pem) == end_of(pem) == datetime(year, 6, 7, 8, 9, 10, tzinfo=UTC).timestamp()


def test_the_first_of_several_counts_and_a_key_counts_nothing(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pems = [authority.issue(f"c{days}", ends=timedelta(days=days)).read_bytes() for days in (30, 2, 90)]
    assert earliest_expiration_s(b"".join(pems)) == end_of(pems[1])
    assert earliest_expiration_s(pems[0].split(b"-----END CERTIFICATE-----\n")[1]) is None
    assert earliest_expiration_s(b"") is None
