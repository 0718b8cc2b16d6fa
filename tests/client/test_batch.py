"""Batches are cut to the limits and lose nothing; what comes back is one outcome per item."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.client.address import parse_address
from hicache.client.batch import decode_outcomes, item_batches, key_batches, unfit_outcome
from hicache.client.session import SessionLimits
from hicache.errors import ConfigError
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.wire.protocol import RefusalCode


def limits(*, object_bytes: int = 1000, keys: int = 100, batch_bytes: int = 1000) -> SessionLimits:
    return SessionLimits(
        object_bytes_max=object_bytes,
        batch_keys_max=keys,
        batch_bytes_max=batch_bytes,
        lease_ms_max=1000,
        key_bytes_max=36,
    )


@given(sizes=st.lists(st.integers(1, 40), max_size=30), keys_max=st.integers(1, 8), bytes_max=st.integers(40, 200))
def test_item_batches_keep_the_order_and_the_limits_and_are_as_few_as_can_be(
    sizes: list[int], keys_max: int, bytes_max: int
) -> None:
    items = [L3Item(b"k" * 36, 0, size) for size in sizes]
    batches = list(item_batches(items, range(len(items)), limits=limits(keys=keys_max, batch_bytes=bytes_max)))
    assert [position for batch in batches for position in batch] == list(range(len(items)))
    for batch in batches:
        assert len(batch) <= keys_max
        assert sum(sizes[position] for position in batch) <= bytes_max
    for batch, following in pairwise(batches):
        is_full = len(batch) == keys_max
        assert is_full or sum(sizes[position] for position in batch) + sizes[following[0]] > bytes_max


@given(lengths=st.lists(st.sampled_from([20, 36]), max_size=30), keys_max=st.integers(1, 8))
def test_key_batches_keep_the_order_and_never_mix_lengths(lengths: list[int], keys_max: int) -> None:
    keys = [number.to_bytes(length, "little") for number, length in enumerate(lengths)]
    batches = list(key_batches(keys, batch_keys_max=keys_max))
    assert [key for batch in batches for key in batch] == keys
    for batch in batches:
        assert 1 <= len(batch) <= keys_max
        assert len({len(key) for key in batch}) == 1


@given(packed=st.binary(max_size=20), count=st.integers(0, 20))
def test_any_reply_gives_one_outcome_per_item(packed: bytes, count: int) -> None:
    outcomes = decode_outcomes(packed, count=count)
    assert len(outcomes) == count
    known = {outcome.value for outcome in Outcome}
    for number, outcome in zip(packed, outcomes, strict=False):
        if len(packed) == count and number in known:
            assert outcome == number
        else:
            assert outcome is Outcome.IO_ERROR


@pytest.mark.parametrize(
    ("item", "outcome"),
    [
        (L3Item(b"k" * 36, 0, 1000), None),
        (L3Item(b"k" * 36, 1000, 1000), None),
        (L3Item(b"k" * 36, 1001, 1000), Outcome.BAD_RANGE),
        (L3Item(b"k" * 36, -1, 10), Outcome.BAD_RANGE),
        (L3Item(b"k" * 36, 0, 0), Outcome.BAD_RANGE),
        (L3Item(b"k" * 36, 0, 1001), Outcome.TOO_LARGE),
        (L3Item(b"k" * 37, 0, 10), Outcome.REFUSED),
        (L3Item(b"", 0, 10), Outcome.REFUSED),
    ],
)
def test_what_cannot_be_sent_is_sorted_out_before(item: L3Item, outcome: Outcome | None) -> None:
    assert unfit_outcome(item, limits=limits(), memory_bytes=2000) is outcome


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("unix:///run/hicached.sock", "unix:/run/hicached.sock"),
        ("tcp://127.0.0.1:9000", "127.0.0.1:9000"),
        ("tcp://[::1]:9000", "[::1]:9000"),
        ("tcp://store.example:1", "store.example:1"),
    ],
)
def test_addresses_that_grpc_can_use(text: str, target: str) -> None:
    assert parse_address(text).target == target


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/run/hicached.sock",
        "unix:/run/hicached.sock",
        "unix://",
        "unix:///",
        "unix://run/hicached.sock",
        "unix:///" + "x" * 107,
        "tcp://",
        "tcp://host",
        "tcp://:1",
        "tcp://host:0",
        "tcp://host:65536",
        "tcp://host:http",
        "http://host:1",
    ],
)
def test_addresses_that_stop_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match="l3"):
        parse_address(text)


def test_every_refusal_code_is_known_to_the_client() -> None:
    from hicache.client.fault import _BEFORE_ANY_BYTE, _LASTING

    assert set(RefusalCode) - _BEFORE_ANY_BYTE == {RefusalCode.SHUTTING_DOWN}
    assert _LASTING.issubset(RefusalCode)
