"""The small parts of the backends: layouts, chunk ids, transactions, leases, the gate."""

from __future__ import annotations

import threading
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.backends import leases
from hicache.backends.chunk_ids import ChunkIds
from hicache.backends.gate import Gate
from hicache.backends.leases import NO_LEASE, KeyLeases
from hicache.backends.lmdb_layout import (
    CHUNK_BYTES,
    CHUNK_PAGES,
    CHUNK_STORED_BYTES,
    LMDB_HEADER_BYTES,
    PAGE_BYTES,
    IndexRecord,
    chunk_count,
    decode_record,
    map_bytes_for,
    moving_bytes_for,
    plan_transactions,
)
from hicache.errors import BackendError
from tests.backends.payloads import key


def test_a_chunk_with_its_header_fills_whole_pages_and_wastes_little_of_common_sizes() -> None:
    assert CHUNK_BYTES + LMDB_HEADER_BYTES == CHUNK_PAGES * 4096
    assert CHUNK_STORED_BYTES % PAGE_BYTES == 0
    for exponent in range(16, 27):
        size = 1 << exponent
        assert chunk_count(size) * CHUNK_STORED_BYTES <= size * 1.07


@given(
    sizes=st.lists(st.integers(min_value=1, max_value=20 * CHUNK_BYTES), max_size=12),
    chunks_max=st.integers(min_value=1, max_value=9),
)
def test_transactions_are_bounded_and_cover_every_chunk_once_in_order(sizes: list[int], chunks_max: int) -> None:
    groups = list(plan_transactions(list(enumerate(sizes)), chunks_max=chunks_max))
    assert all(0 < sum(segment.end - segment.first for segment in group) <= chunks_max for group in groups)
    segments = [segment for group in groups for segment in group]
    covered = [(segment.position, number) for segment in segments for number in range(segment.first, segment.end)]
    assert covered == [(position, number) for position, size in enumerate(sizes) for number in range(chunk_count(size))]
    assert [segment.position for segment in segments if segment.is_last] == list(range(len(sizes)))


@given(
    size=st.integers(min_value=1, max_value=3 * CHUNK_BYTES),
    checksum=st.integers(min_value=0, max_value=2**64 - 1),
    used_at_s=st.floats(min_value=0, max_value=1e10),
    name=st.binary(min_size=1, max_size=128),
    flip=st.integers(min_value=0),
)
def test_an_index_record_is_read_back_and_any_damage_shows(
    size: int, checksum: int, used_at_s: float, name: bytes, flip: int
) -> None:
    record = IndexRecord(size, checksum, used_at_s, array("I", range(7, 7 + chunk_count(size))))
    raw = record.encode(name)
    assert decode_record(name, raw) == record
    assert decode_record(name + b"x", raw) is None
    position = flip % len(raw)
    assert decode_record(name, raw[:position] + bytes([raw[position] ^ 0x40]) + raw[position + 1 :]) is None
    assert decode_record(name, raw[:-4]) is None
    assert decode_record(name, b"") is None


def test_a_map_is_larger_than_its_chunks_by_what_moving_and_indexing_need() -> None:
    for chunks_max in (1, 100, 10_000, 1_000_000):
        spare = map_bytes_for(chunks_max) - chunks_max * CHUNK_STORED_BYTES
        assert 16 << 20 <= spare <= (257 << 20) + chunks_max * 600
    assert moving_bytes_for(0) == 16 << 20
    assert moving_bytes_for(1 << 50) == 256 << 20


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(min_value=0, max_value=9)), max_size=60))
def test_chunk_ids_are_never_out_twice_and_never_beyond_the_limit(steps: list[tuple[bool, int]]) -> None:
    ids = ChunkIds(40, used=np.array([3, 5, 11], dtype=np.uint32))
    out = [array("I", [3]), array("I", [5, 11])]
    for is_allocation, count in steps:
        if is_allocation:
            got = ids.allocate(count)
            assert (got is None) == (sum(map(len, out)) + count > 40)
            out += [] if got is None else [got]
        elif out:
            ids.release(out.pop(count % len(out)))
        flat = [chunk_id for group in out for chunk_id in group]
        assert len(set(flat)) == len(flat) == ids.used_count
        assert all(chunk_id < 40 for chunk_id in flat)


def test_chunk_ids_that_were_given_back_last_are_used_first() -> None:
    ids = ChunkIds(10, used=np.array([], dtype=np.uint32))
    first = ids.allocate(3)
    assert first is not None
    ids.release(first)
    assert ids.allocate(4) == array("I", [0, 1, 2, 3])
    assert ids.allocate(7) is None


def test_a_store_with_more_chunks_than_its_limit_gives_none_until_enough_are_back() -> None:
    ids = ChunkIds(2, used=np.arange(4, dtype=np.uint32))
    assert ids.allocate(1) is None
    ids.release(array("I", [0, 1, 2]))
    assert ids.allocate(1) is not None


def test_leases_of_one_key_are_counted() -> None:
    held = KeyLeases()
    first = held.grant([key(1), key(1), key(2)], expires_at_s=10.0)
    second = held.grant([key(1)], expires_at_s=20.0)
    assert held.key_count == 2
    assert held.release(first, now_s=1.0)
    assert held.keys(first) == ()
    assert (held.keys(second), held.key_count) == ((key(1),), 1)
    held.expire(now_s=20.0)
    assert not held.release(second, now_s=20.0)
    assert (len(held), held.key_count) == (0, 0)


def test_a_lease_can_be_renewed_to_an_earlier_end() -> None:
    held = KeyLeases()
    lease = held.grant([key(1)], expires_at_s=100.0)
    assert held.renew(lease, now_s=0.0, expires_at_s=5.0)
    held.expire(now_s=5.0)
    assert held.keys(lease) == ()


def test_leases_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEASES_MAX", 2)
    held = KeyLeases()
    assert held.grant([key(1)], expires_at_s=9.0) != NO_LEASE
    assert held.grant([key(2)], expires_at_s=9.0) != NO_LEASE
    assert held.grant([key(3)], expires_at_s=9.0) == NO_LEASE
    assert held.key_count == 2


def test_the_gate_lets_one_in_alone_only_when_the_others_have_left() -> None:
    gate = Gate()
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with gate.shared():
            inside.set()
            leave.wait(timeout=30)

    thread = threading.Thread(target=stay)
    thread.start()
    assert inside.wait(timeout=30)
    with gate.exclusive(timeout_s=0.01) as is_alone:
        assert not is_alone
    leave.set()
    thread.join(timeout=30)
    with gate.exclusive(timeout_s=30) as is_alone:
        assert is_alone
        with gate.exclusive(timeout_s=0.01) as is_second:
            assert not is_second
    with gate.shared():
        pass
    gate.shut()
    with pytest.raises(BackendError), gate.shared():
        pass
