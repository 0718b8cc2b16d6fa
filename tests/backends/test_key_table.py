"""How keys are hashed and found, and the columns under that: collisions, batches, growth."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.backends import key_table
from hicache.backends.columns import Column
from hicache.backends.key_rows import KeyHash, PackedKeys, by_length, key_of, row_of
from hicache.backends.key_table import NO_SLOT, KeyTable
from hicache.tenancy import TENANT_BYTES
from tests.backends.test_residents import KEYS, TENANTS


def test_a_flood_of_colliding_keys_is_found_and_costs_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a client knew the secret of the hash: all its keys belong to the same two buckets and have one tag."""
    table = KeyTable(0)
    monkeypatch.setattr(KeyHash, "of_row", lambda hasher, row: 5)
    monkeypatch.setattr(KeyHash, "of_rows", lambda hasher, rows: np.full(len(rows), 5, dtype=np.uint64))
    flood = [b"flood %03d" % number for number in range(500)]
    for slot, key in enumerate(flood, start=1):
        table.insert_one(row_of(key), slot)
    assert [table.find_one(row_of(key)) for key in flood] == list(range(1, 501))
    assert table.overflow_count >= 500 - 2 * key_table.BUCKET_WAYS, (
        "what fits nowhere is in a dict: no bucket is longer"
    )
    assert table.find(by_length(flood)[0][1].rows()).tolist() == list(range(1, 501))
    assert not table.find(by_length([b"other %03d" % number for number in range(500)])[0][1].rows()).any()
    for key in flood[:100]:
        assert table.remove_one(row_of(key)) != NO_SLOT
    table.remove(np.arange(101, 301))
    assert [table.find_one(row_of(key)) for key in flood[:301]] == [NO_SLOT] * 300 + [301]
    table.remove(np.arange(301, 501))
    assert table.overflow_count == 0


@pytest.mark.parametrize("width", [0, 1])
def test_a_row_alone_and_in_a_batch_has_the_same_hash_under_one_secret_only(width: int) -> None:
    keys = [key for key in KEYS if len(row_of(key)) == len(row_of(b"l" * (100 * width + 1)))]
    rows = np.array([np.frombuffer(row_of(key), dtype=np.uint64) for key in keys])
    one, other = KeyHash(rows.shape[1]), KeyHash(rows.shape[1])
    hashes = one.of_rows(rows).tolist()
    assert hashes == [one.of_row(row_of(key)) for key in keys]
    assert len(set(hashes)) == len(keys)
    assert not set(hashes) & set(other.of_rows(rows).tolist())
    assert [key_of(row_of(key)) for key in keys] == keys


def test_packed_keys_read_like_the_list_that_they_stand_for() -> None:
    listed = [TENANTS[0] + bytes([number]) * 36 for number in range(20)]
    packed = PackedKeys(b"".join(key[TENANT_BYTES:] for key in listed), 36, prefix=TENANTS[0])
    assert (list(packed), len(packed), packed[3], packed[-1]) == (listed, 20, listed[3], listed[-1])
    assert list(packed[2:7]) == listed[2:7]
    [(_, from_list)] = by_length(listed)
    assert (packed.rows() == from_list.rows()).all()


def test_a_column_keeps_what_is_in_it_when_it_grows_even_while_somebody_looks_at_it() -> None:
    column = Column(np.int64)
    column.array[:] = np.arange(len(column.array))
    count = len(column.array)
    column.reserve(4 * count)
    seen = column.array[:count]
    column.reserve(20 * count)
    assert (column.array[:count] == np.arange(count)).all()
    assert not column.array[count:].any()
    assert (seen == np.arange(count)).all()
