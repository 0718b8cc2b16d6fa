"""The shared parts of the protocol."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.daemon.calls import STATUS_OF
from hicache.daemon.config import DaemonConfig
from hicache.daemon.refusals import Refusal
from hicache.wire import hicached_pb2 as pb
from hicache.wire.protocol import (
    KEY_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    RefusalCode,
    message_bytes_needed,
    pack_keys,
    parse_refusal,
    split_keys,
)


@given(keys=st.integers(1, KEY_BYTES_MAX).flatmap(lambda n: st.lists(st.binary(min_size=n, max_size=n), max_size=9)))
def test_packed_keys_come_apart_again(keys: list[bytes]) -> None:
    packed, key_bytes = pack_keys(keys)
    assert split_keys(packed, key_bytes) == keys


def test_keys_of_different_lengths_are_not_packed() -> None:
    with pytest.raises(ValueError, match="same length"):
        pack_keys([b"a", b"bc"])


@pytest.mark.parametrize("code", RefusalCode)
def test_every_refusal_has_a_status_and_is_read_back(code: RefusalCode) -> None:
    assert code in STATUS_OF
    assert parse_refusal(str(Refusal(code, "why: because"))) == (code, "why: because")


@pytest.mark.parametrize("details", [None, "", "failed to connect", "NOPE: x", "BAD_TOKEN", "bad_token: x"])
def test_other_errors_are_no_refusals(details: str | None) -> None:
    assert parse_refusal(details) is None


def test_the_fullest_message_within_the_limits_fits() -> None:
    limits = DaemonConfig()
    needed = message_bytes_needed(batch_keys_max=limits.batch_keys_max)
    count = limits.batch_keys_max
    batch = pb.PinRequest(
        session_secret=bytes(32),
        keys=bytes(count * KEY_BYTES_MAX),
        key_bytes=KEY_BYTES_MAX,
        pin_ms=2**64 - 1,
    )
    assert batch.ByteSize() <= needed <= MESSAGE_BYTES_MAX
