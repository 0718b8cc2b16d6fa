"""The default backend: objects as equal chunks in one LMDB map, with their index beside them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import lmdb

from hicache.backends.base import GetItem, PutItem, StoredObject, Usage, is_storable_key
from hicache.backends.chunk_ids import CHUNK_IDS_MAX, ChunkIds
from hicache.backends.lmdb_chunks import Writing, read_chunks, write_chunks
from hicache.backends.lmdb_env import Transaction
from hicache.backends.lmdb_layout import (
    CHUNK_STORED_BYTES,
    IndexRecord,
    Segment,
    chunk_count,
    decode_record,
    map_bytes_for,
    plan_transactions,
)
from hicache.backends.lmdb_open import StoreFiles, load_index, open_files
from hicache.checksum import payload_hasher
from hicache.errors import BackendError, ConfigError
from hicache.notices import Notices
from hicache.outcome import Outcome

PUT_TRANSACTION_BYTES = 4 << 20
READ_TRANSACTION_BYTES = 32 << 20
KEYS_PER_TRANSACTION = 1024
SYNC_BUDGET_S = 3.0


@dataclass(frozen=True, slots=True)
class _Suspect:
    """An object that did not verify, as its index record was when that was seen."""

    key: bytes
    raw_record: bytes


@dataclass(slots=True)
class _Counts:
    """What usage() tells, kept equal to the committed index under its lock."""

    objects: int = 0
    payload_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class LmdbBackend:
    """Implements ``Backend``. Open it with ``LmdbBackend.open``.

    All space is taken when it is opened, so a full disk cannot hurt it later. Chunks of deleted objects are not given
    back to LMDB but written again: a delete changes an index record only, and the map does not fragment. What is
    acknowledged survives a kill of the process at any instruction. It is not synced to the medium: after a power
    loss, or a reboot without a clean close, the store starts empty, with another ``store_id``.
    """

    name = "lmdb"

    def __init__(self, files: StoreFiles, *, capacity_bytes: int, wall_clock: Callable[[], float]) -> None:
        self._files = files
        self._env = files.env
        self._capacity_bytes = capacity_bytes
        self._wall_clock = wall_clock
        self._notices = Notices(logging.getLogger(__name__))
        self._put_lock = threading.Lock()  # one put at a time: LMDB has one writer, and duplicates meet here
        loaded = load_index(files)
        self._ids = ChunkIds(_chunks_max(capacity_bytes), used=loaded.chunk_ids)
        self._counts = _Counts(len(loaded.stored), loaded.payload_bytes)
        self._unchanged: list[StoredObject] | None = loaded.stored  # until somebody takes it, or it is no longer true
        self._pid = os.getpid()
        self._closed = False
        self.store_id = bytes.fromhex(files.marker.store_id)

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        capacity_bytes: int,
        floor_bytes: int = 0,
        wall_clock: Callable[[], float] = time.time,
    ) -> Self:
        """Open the store in ``directory``, or make one there.

        Raises StorageInUse, BackendError, ConfigError (a foreign directory, or no room for ``capacity_bytes`` with
        ``floor_bytes`` left free).
        """
        chunks_max = _chunks_max(capacity_bytes)
        files = open_files(
            directory, map_bytes=map_bytes_for(chunks_max), capacity_bytes=capacity_bytes, floor_bytes=floor_bytes
        )
        try:
            return cls(files, capacity_bytes=capacity_bytes, wall_clock=wall_clock)
        except (lmdb.Error, MemoryError) as error:
            files.abandon()
            raise BackendError(f"LMDB cannot read {directory}: {error!r}; nothing stored was touched") from error
        except BaseException:
            files.abandon()
            raise

    def put(self, items: Sequence[PutItem]) -> list[Outcome]:
        """See ``Backend.put``. A batch is written in transactions of bounded size; each object appears whole."""
        outcomes = [Outcome.REFUSED] * len(items)
        first_of: dict[bytes, int] = {}
        for position, item in enumerate(items):
            if is_storable_key(item.key) and item.payload.nbytes:
                first_of.setdefault(item.key, position)
        self._unchanged = None
        with self._put_lock:
            waiting = list(first_of.values())
            waiting = self._put_pass(items, waiting, outcomes)
            if waiting and self._env.recycle():
                waiting = self._put_pass(items, waiting, outcomes)
        for position in waiting:
            outcomes[position] = Outcome.NO_SPACE
        if len(first_of) < len(items):
            _copy_to_duplicates(items, first_of, outcomes)
        return outcomes

    def _put_pass(self, items: Sequence[PutItem], positions: list[int], outcomes: list[Outcome]) -> list[int]:
        """Write the items at ``positions``; returns those that met a full map."""
        sizes = [(position, items[position].payload.nbytes) for position in positions]
        writing: dict[int, Writing] = {}
        met_full: list[int] = []
        for group in plan_transactions(sizes, chunks_max=PUT_TRANSACTION_BYTES // CHUNK_STORED_BYTES):
            try:
                with self._env.write() as txn:
                    settled = self._write_group(txn, items, group, writing)
                self._account_stored(items, settled, writing)
                for position, outcome in settled:
                    outcomes[position] = outcome
            except lmdb.MapFullError:
                met_full += self._give_up(group, writing)
            except (lmdb.Error, MemoryError) as error:
                self._notices.warning("put", "a put failed: %s", error)
                for position in self._give_up(group, writing):
                    outcomes[position] = Outcome.IO_ERROR
            except BaseException:
                self._give_up(group, writing)
                raise
        return met_full

    def _write_group(
        self, txn: Transaction, items: Sequence[PutItem], group: list[Segment], writing: dict[int, Writing]
    ) -> list[tuple[int, Outcome]]:
        """Write one transaction's segments; returns what is settled once it commits."""
        settled: list[tuple[int, Outcome]] = []
        for segment in group:
            item = items[segment.position]
            if segment.first == 0:
                outcome = self._begin(txn, item, segment.position, writing)
                if outcome is not None:
                    settled.append((segment.position, outcome))
            state = writing.get(segment.position)
            if state is None:  # present, without room, or given up in an earlier transaction
                continue
            write_chunks(self._env, txn, item.payload, segment, state)
            if segment.is_last:
                used_at_s = self._wall_clock() - segment.position * 1e-6  # earlier in a batch: longer kept
                record = IndexRecord(item.payload.nbytes, state.hasher.intdigest(), used_at_s, state.chunk_ids)
                txn.put(item.key, record.encode(item.key), db=self._env.index)
                settled.append((segment.position, Outcome.OK))
        return settled

    def _begin(self, txn: Transaction, item: PutItem, position: int, writing: dict[int, Writing]) -> Outcome | None:
        """Find chunks for an object; an Outcome when there is nothing to write."""
        if txn.get(item.key, db=self._env.index) is not None:
            return Outcome.EXISTS
        with self._counts.lock:
            chunk_ids = self._ids.allocate(chunk_count(item.payload.nbytes))
        if chunk_ids is None:
            return Outcome.NO_SPACE
        writing[position] = Writing(chunk_ids, payload_hasher(item.key))
        return None

    def _account_stored(
        self, items: Sequence[PutItem], settled: list[tuple[int, Outcome]], writing: dict[int, Writing]
    ) -> None:
        with self._counts.lock:
            for position, outcome in settled:
                if outcome is Outcome.OK:
                    self._counts.objects += 1
                    self._counts.payload_bytes += items[position].payload.nbytes
                    del writing[position]

    def _give_up(self, group: list[Segment], writing: dict[int, Writing]) -> list[int]:
        """Free what a rolled back transaction was writing; returns the positions that it leaves unsettled.

        Chunks that an earlier transaction of the same object committed hold bytes that no index record names.
        """
        positions = []
        with self._counts.lock:
            for segment in group:
                state = writing.pop(segment.position, None)
                if state is not None:
                    self._ids.release(state.chunk_ids)
                if state is not None or segment.first == 0:
                    positions.append(segment.position)
        return positions

    def get_into(self, items: Sequence[GetItem]) -> list[Outcome]:
        """See ``Backend.get_into``. Each chunk is hashed in the target, while it is in cache."""
        outcomes: list[Outcome] = []
        suspects: list[_Suspect] = []
        for group in _groups_by_bytes(items, READ_TRANSACTION_BYTES):
            outcomes += self._read_group(group, suspects)
        if suspects:
            self._drop(suspects)
        return outcomes

    def _read_group(self, group: list[GetItem], suspects: list[_Suspect]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        try:
            with self._env.read() as txn:
                for item in group:
                    outcomes.append(self._read(txn, item, suspects))
        except lmdb.Error as error:
            self._notices.warning("get", "a get failed: %s", error)
            outcomes += [Outcome.IO_ERROR] * (len(group) - len(outcomes))
        return outcomes

    def _read(self, txn: Transaction, item: GetItem, suspects: list[_Suspect]) -> Outcome:
        raw = txn.get(item.key, db=self._env.index) if is_storable_key(item.key) else None
        if raw is None:
            return Outcome.ABSENT
        record = decode_record(item.key, bytes(raw))
        if record is None:
            suspects.append(_Suspect(item.key, bytes(raw)))
            return Outcome.CORRUPT
        if record.size_bytes != item.target.nbytes:
            return Outcome.SIZE_MISMATCH
        if not read_chunks(self._env, txn, item, record):
            suspects.append(_Suspect(item.key, bytes(raw)))
            return Outcome.CORRUPT
        return Outcome.OK

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See ``Backend.contains``."""
        try:
            with self._env.read() as txn:
                index = self._env.index
                return [is_storable_key(key) and txn.get(key, db=index) is not None for key in keys]
        except lmdb.Error as error:
            self._notices.warning("contains", "presence could not be read: %s", error)
            return [False] * len(keys)

    def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        """See ``Backend.delete``. Changes index records only, and has room of its own when the map is full."""
        outcomes: list[Outcome] = []
        for start in range(0, len(keys), KEYS_PER_TRANSACTION):
            batch = keys[start : start + KEYS_PER_TRANSACTION]
            outcomes += self._remove([_Suspect(key, b"") for key in batch])
        return outcomes

    def _drop(self, suspects: list[_Suspect]) -> None:
        self._notices.warning("corrupt", "dropped %d objects that did not verify", len(suspects))
        for start in range(0, len(suspects), KEYS_PER_TRANSACTION):
            self._remove(suspects[start : start + KEYS_PER_TRANSACTION])

    def _remove(self, suspects: list[_Suspect]) -> list[Outcome]:
        """Remove index records, those with a ``raw_record`` only while they are the same, and free their chunks."""
        self._unchanged = None
        try:
            removed = self._env.write_with_reserve(lambda txn: self._pop_records(txn, suspects))
        except lmdb.Error as error:
            self._notices.warning("delete", "a delete failed: %s", error)
            return [Outcome.IO_ERROR] * len(suspects)
        with self._counts.lock:
            for suspect, raw in zip(suspects, removed, strict=True):
                self._account_removed(suspect.key, raw)
        return [Outcome.ABSENT if raw is None else Outcome.OK for raw in removed]

    def _pop_records(self, txn: Transaction, suspects: list[_Suspect]) -> list[bytes | None]:
        removed: list[bytes | None] = []
        for suspect in suspects:
            found = txn.get(suspect.key, db=self._env.index) if is_storable_key(suspect.key) else None
            raw = None if found is None else bytes(found)
            if raw is not None and suspect.raw_record in (b"", raw):
                txn.delete(suspect.key, db=self._env.index)
                removed.append(raw)
            else:
                removed.append(None)
        return removed

    def _account_removed(self, key: bytes, raw: bytes | None) -> None:
        record = None if raw is None else decode_record(key, raw)
        if record is not None:
            self._counts.objects -= 1
            self._counts.payload_bytes -= record.size_bytes
            self._ids.release(record.chunk_ids)
        elif raw is not None:
            self._counts.objects -= 1
            self._notices.warning("record", "a damaged index record was dropped; its space is free after a restart")

    def touch(self, used: Sequence[tuple[bytes, float]]) -> None:
        """See ``Backend.touch``."""
        self._unchanged = None
        for start in range(0, len(used), KEYS_PER_TRANSACTION):
            try:
                with self._env.write() as txn:
                    self._touch_records(txn, used[start : start + KEYS_PER_TRANSACTION])
            except lmdb.Error as error:
                self._notices.warning("touch", "times of use could not be written: %s", error)

    def _touch_records(self, txn: Transaction, used: Sequence[tuple[bytes, float]]) -> None:
        for key, used_at_s in used:
            raw = txn.get(key, db=self._env.index) if is_storable_key(key) else None
            record = None if raw is None else decode_record(key, bytes(raw))
            if record is not None:
                renewed = IndexRecord(record.size_bytes, record.checksum, used_at_s, record.chunk_ids)
                txn.put(key, renewed.encode(key), db=self._env.index)

    def scan(self) -> Iterator[StoredObject]:
        """See ``Backend.scan``. Objects that come or go meanwhile may or may not be told.

        The first one of a store that nobody has changed tells what was read when it was opened.
        """
        unchanged, self._unchanged = self._unchanged, None
        if unchanged is not None:
            yield from unchanged
            return
        start = b""
        while True:
            try:
                batch, start = self._scan_batch(start)
            except lmdb.Error as error:
                raise BackendError(f"the index cannot be read: {error}") from error
            yield from batch
            if not start:
                return

    def _scan_batch(self, start: bytes) -> tuple[list[StoredObject], bytes]:
        """Objects from key ``start`` on, and where to go on; nowhere (empty) at the end."""
        batch: list[StoredObject] = []
        with self._env.read() as txn, txn.cursor(self._env.index) as cursor:
            is_positioned = cursor.set_range(start) if start else cursor.first()
            for _ in range(KEYS_PER_TRANSACTION):
                if not is_positioned:
                    return batch, b""
                key = bytes(cursor.key())
                record = decode_record(key, bytes(cursor.value()))
                if record is not None:
                    batch.append(StoredObject(key, record.size_bytes, record.used_at_s))
                is_positioned = cursor.next()
            return batch, bytes(cursor.key()) if is_positioned else b""

    def usage(self) -> Usage:
        """See ``Backend.usage``."""
        with self._counts.lock:
            stored_bytes = self._ids.used_count * CHUNK_STORED_BYTES
            return Usage(self._counts.objects, self._counts.payload_bytes, stored_bytes, self._capacity_bytes)

    def stored_bytes(self, size_bytes: int) -> int:
        """See ``Backend.stored_bytes``."""
        return chunk_count(size_bytes) * CHUNK_STORED_BYTES

    def free_bytes(self) -> int | None:
        """None: the map was given all its blocks when it was opened."""
        return None

    def close(self) -> None:
        """See ``Backend.close``. Takes at most about SYNC_BUDGET_S for what has not reached the medium yet.

        Does nothing in a forked child.
        """
        if os.getpid() != self._pid:
            return
        with self._put_lock:
            if not self._closed:
                self._closed = True
                self._files.close(sync_budget_s=SYNC_BUDGET_S)


def _chunks_max(capacity_bytes: int) -> int:
    chunks_max = capacity_bytes // CHUNK_STORED_BYTES
    if not 1 <= chunks_max <= CHUNK_IDS_MAX:
        expected = f"{CHUNK_STORED_BYTES} (one chunk) to {CHUNK_IDS_MAX * CHUNK_STORED_BYTES}"
        raise ConfigError("capacity_bytes", capacity_bytes, expected)
    return chunks_max


def _groups_by_bytes(items: Sequence[GetItem], bytes_max: int) -> Iterator[list[GetItem]]:
    """Consecutive items of together at most ``bytes_max``, or one larger item."""
    group: list[GetItem] = []
    total = 0
    for item in items:
        if group and total + item.target.nbytes > bytes_max:
            yield group
            group, total = [], 0
        group.append(item)
        total += item.target.nbytes
    if group:
        yield group


def _copy_to_duplicates(items: Sequence[PutItem], first_of: dict[bytes, int], outcomes: list[Outcome]) -> None:
    """Give a key's later occurrences in one batch the outcome that its first one left behind."""
    for position, item in enumerate(items):
        first = first_of.get(item.key, position)
        if first != position and item.payload.nbytes:
            outcomes[position] = Outcome.EXISTS if outcomes[first].is_ok else outcomes[first]
