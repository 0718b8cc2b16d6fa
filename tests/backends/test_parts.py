"""The small parts of the backends: layouts, chunk ids, transactions, leases, the gate."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hicache.backends import leases
from hicache.backends.chunk_ids import ChunkIds
from hicache.backends.gate import Gate
from hicache.backends.leases import NO_LEASE, KeyLeases
from hicache.backends.lmdb_layout import (
    CHUNK_BYTES,
    PAGE_BYTES,
    IndexRecord,
    chunk_count,
    decode_record,
    index_map_bytes,
    moving_bytes_for,
)
from hicache.backends.lmdb_space import ChunkSpace, KeyClaims
from hicache.errors import BackendError
from tests.backends.payloads import key


def test_a_chunk_is_whole_pages_and_common_sizes_waste_nothing() -> None:
    assert CHUNK_BYTES % PAGE_BYTES == 0
    for exponent in range(16, 27):
        assert chunk_count(1 << exponent) * CHUNK_BYTES == 1 << exponent


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
    record = IndexRecord(size, checksum, used_at_s, np.arange(7, 7 + chunk_count(size), dtype=np.uint32))
    raw = record.encode(name)
    read = decode_record(name, raw)
    assert read is not None
    assert (read.size_bytes, read.checksum, read.used_at_s) == (size, checksum, used_at_s)
    assert read.chunk_ids.tolist() == record.chunk_ids.tolist()
    assert decode_record(name + b"x", raw) is None
    position = flip % len(raw)
    assert decode_record(name, raw[:position] + bytes([raw[position] ^ 0x40]) + raw[position + 1 :]) is None
    assert decode_record(name, raw[:-4]) is None
    assert decode_record(name, b"") is None


def test_a_map_has_room_for_its_index_and_what_moves() -> None:
    for chunks_max in (1, 100, 10_000, 1_000_000):
        assert 16 << 20 <= index_map_bytes(chunks_max) <= (257 << 20) + chunks_max * 600
    assert moving_bytes_for(0) == 16 << 20
    assert moving_bytes_for(1 << 50) == 256 << 20


def chunk_array(*ids: int) -> NDArray[np.uint32]:
    return np.array(ids, dtype=np.uint32)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["allocate", "release", "end"]), st.integers(min_value=0, max_value=9)), max_size=60
    )
)
def test_chunk_ids_are_never_out_twice_and_never_beyond_the_limits(steps: list[tuple[str, int]]) -> None:
    ids = ChunkIds(40, end=50, used=chunk_array(3, 5, 11))
    out = [chunk_array(3), chunk_array(5, 11)]
    for step, count in steps:
        if step == "allocate":
            got = ids.allocate(count)
            fits = sum(map(len, out)) + count <= 40
            assert got is None or (fits and (got < ids.end).all())
            out += [] if got is None else [got]
        elif step == "end":
            ids.set_end(20 + 4 * count)
        elif out:
            ids.release(out.pop(count % len(out)))
        flat = [chunk_id for group in out for chunk_id in group.tolist()]
        assert len(set(flat)) == len(flat) == ids.used_count
        assert ids.used_end == max(flat, default=-1) + 1
        assert [ids.is_used_from(end) for end in range(0, 50, 7)] == [ids.used_end > end for end in range(0, 50, 7)]
    for group in out:
        ids.release(group)
    ids.set_end(40)
    everything = ids.allocate(40)
    assert everything is not None
    assert sorted(everything.tolist()) == list(range(40))


def test_chunk_ids_that_were_given_back_last_are_used_first() -> None:
    ids = ChunkIds(10, end=10, used=chunk_array())
    first = ids.allocate(3)
    assert first is not None
    ids.release(first)
    again = ids.allocate(4)
    assert again is not None
    assert again.tolist() == [0, 1, 2, 3]
    assert ids.allocate(7) is None


def test_a_store_with_more_chunks_than_its_limit_gives_none_until_enough_are_back() -> None:
    ids = ChunkIds(2, end=4, used=chunk_array(0, 1, 2, 3))
    assert ids.allocate(1) is None
    ids.release(chunk_array(0, 1, 2))
    assert ids.allocate(1) is not None


def test_chunks_of_what_is_removed_while_it_is_read_are_free_when_the_last_reader_is_done() -> None:
    space = ChunkSpace(ChunkIds(4, end=4, used=chunk_array(0, 1)), capacity_bytes=1, objects=2, payload_bytes=2)
    with space.reading([b"a", b"c"]):
        with space.reading([b"a"]):
            space.removed(
                [(key, IndexRecord(1, 0, 0.0, chunk_array(number))) for number, key in enumerate((b"a", b"b"))]
            )
        assert space.usage().objects == 0
        [other] = space.allocate([3])
        assert other is not None
        assert 0 not in other
        assert space.allocate([1]) == [None]
    [freed] = space.allocate([1])
    assert freed is not None
    assert freed.tolist() == [0]


def test_a_claim_waits_for_another_one_with_a_common_key_only() -> None:
    claims = KeyClaims()
    entered = threading.Event()

    def enter() -> None:
        with claims.of([b"b", b"c"], timeout_s=20.0):
            entered.set()

    with claims.of([b"a", b"b"], timeout_s=20.0):
        with claims.of([b"c"], timeout_s=0.0) as is_claimed:
            assert is_claimed
        with claims.of([b"b", b"c"], timeout_s=0.0) as is_claimed:
            assert not is_claimed
        other = threading.Thread(target=enter)
        other.start()
        assert not entered.wait(0.05)
    other.join()
    assert entered.is_set()


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
