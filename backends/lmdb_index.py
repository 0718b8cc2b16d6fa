"""The index of an LMDB store: which objects there are, and in which chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import lmdb

from hicache.backends.base import is_storable_key
from hicache.backends.lmdb_env import LmdbEnvironment, Transaction
from hicache.backends.lmdb_layout import IndexRecord, decode_record

KEYS_PER_TRANSACTION = 1024

Found = tuple[bytes, IndexRecord | None]  # a record as it is stored, and what it says: None where it is damaged


class Index:
    """Reads and changes index records, each call in short transactions. Thread-safe. Raises lmdb.Error."""

    def __init__(self, env: LmdbEnvironment) -> None:
        self._env = env

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys have a record."""
        table = self._env.index
        with self._env.read() as txn:
            return [is_storable_key(key) and txn.get(key, db=table) is not None for key in keys]

    def find(self, keys: Sequence[bytes]) -> list[Found | None]:
        """The record of each key."""
        with self._env.read() as txn:
            raws = [self._raw(txn, key) for key in keys]
        return [None if raw is None else (raw, decode_record(key, raw)) for key, raw in zip(keys, raws, strict=True)]

    def _raw(self, txn: Transaction, key: bytes) -> bytes | None:
        raw = txn.get(key, db=self._env.index) if is_storable_key(key) else None
        return None if raw is None else bytes(raw)

    def add(self, records: Sequence[tuple[bytes, IndexRecord]]) -> list[bool]:
        """Add all that are not there yet, in one commit; which were added. When the map is full of pages that were
        freed, waits for them."""
        encoded = [(key, record.encode(key)) for key, record in records]
        try:
            return self._add(encoded)
        except lmdb.MapFullError:
            if not self._env.recycle():
                raise
            return self._add(encoded)

    def _add(self, encoded: Sequence[tuple[bytes, bytes]]) -> list[bool]:
        with self._env.write() as txn:
            return [txn.put(key, raw, overwrite=False, db=self._env.index) for key, raw in encoded]

    def remove(self, keys: Sequence[bytes], *, only: Sequence[bytes | None]) -> list[bytes | None]:
        """Remove records, those with an ``only`` while they are just that; returns what was removed.

        Has room of its own when the map is full.
        """
        return self._env.write_with_reserve(
            lambda txn: [self._pop(txn, key, wanted) for key, wanted in zip(keys, only, strict=True)]
        )

    def _pop(self, txn: Transaction, key: bytes, wanted: bytes | None) -> bytes | None:
        raw = self._raw(txn, key)
        if raw is None or wanted not in (None, raw):
            return None
        txn.delete(key, db=self._env.index)
        return raw

    def is_still(self, key: bytes, found: bytes) -> bool:
        """Whether a record is as it was found."""
        with self._env.read() as txn:
            return self._raw(txn, key) == found

    def replace(self, key: bytes, found: bytes, record: IndexRecord) -> bool:
        """Change a record that is still as it was found."""
        with self._env.write() as txn:
            return self._raw(txn, key) == found and txn.put(key, record.encode(key), db=self._env.index)

    def touch(self, used: Sequence[tuple[bytes, float]]) -> None:
        """Change the time of use of what is there."""
        with self._env.write() as txn:
            for key, used_at_s in used:
                raw = self._raw(txn, key)
                record = None if raw is None else decode_record(key, raw)
                if record is not None:
                    renewed = replace(record, used_at_s=used_at_s)
                    txn.put(key, renewed.encode(key), db=self._env.index)

    def records(self, *, after: bytes = b"", prefix: bytes = b"") -> Iterator[list[tuple[bytes, bytes]]]:
        """All records whose keys begin with ``prefix``, in the order of their keys, from behind ``after`` on, in
        batches of KEYS_PER_TRANSACTION. What changes meanwhile may be missed."""
        start: bytes | None = max(after and after + b"\0", prefix)  # no key is between the first two
        while start is not None:
            batch, start = self._records_from(start, prefix)
            yield batch

    def _records_from(self, start: bytes, prefix: bytes) -> tuple[list[tuple[bytes, bytes]], bytes | None]:
        """Records from a key on, and where to go on; None at the end."""
        batch: list[tuple[bytes, bytes]] = []
        with self._env.read() as txn, txn.cursor(self._env.index) as cursor:
            if not (cursor.set_range(start) if start else cursor.first()):
                return batch, None
            for found, raw in cursor:  # from there on
                key = bytes(found)
                if not key.startswith(prefix):
                    break
                if len(batch) == KEYS_PER_TRANSACTION:
                    return batch, key
                batch.append((key, bytes(raw)))
        return batch, None
