"""The default backend: payloads in equal chunks of one mapped file, with their index in LMDB beside it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import lmdb

from hicache.backends.base import (
    GetItem,
    Number,
    PutItem,
    StoredBatch,
    Usage,
    WalkedObject,
    is_storable_key,
)
from hicache.backends.chunk_ids import ChunkIds, chunks_in
from hicache.backends.helpers import Helpers
from hicache.backends.lmdb_env import CLOSE_WAIT_S
from hicache.backends.lmdb_index import KEYS_PER_TRANSACTION, Found, Index
from hicache.backends.lmdb_layout import (
    CHUNK_BYTES,
    ChunkIdArray,
    IndexRecord,
    chunk_count,
    decode_record,
    walked_object,
)
from hicache.backends.lmdb_load import LoadedIndex, load_index
from hicache.backends.lmdb_open import StoreFiles, open_files
from hicache.backends.lmdb_resize import Resizing
from hicache.backends.lmdb_space import ChunkSpace, KeyClaims
from hicache.backends.store_keys import open_keys
from hicache.backends.write_health import WriteHealth
from hicache.errors import BackendError
from hicache.notices import Notices
from hicache.outcome import Outcome

if TYPE_CHECKING:
    from hicache.backends.tenant_keys import TenantKeys

SYNC_BUDGET_S = 3.0
CLAIM_WAIT_S = 30.0  # for another put of the same key: one that takes as long is stuck
_ORDER_S = 1e-6  # earlier in a batch: longer kept


class LmdbBackend:
    """Implements ``Backend``. Open it with ``LmdbBackend.open``.

    All space is taken when it is opened, so a full disk cannot hurt it later. Payloads are written to free chunks, by
    as many threads as call; an object is there from the commit of its index record on, and its chunks are free again
    when the removal of that is committed. So the process may be killed at any instruction, and what was acknowledged
    survives. It is not synced to the medium: after a power loss, or a reboot without a clean close, the store starts
    empty, with another ``store_id``.
    """

    name = "lmdb"

    def __init__(
        self,
        files: StoreFiles,
        loaded: LoadedIndex,
        *,
        capacity_bytes: int,
        wall_clock: Callable[[], float],
        keys: TenantKeys | None = None,
    ) -> None:
        self._files = files
        self._slab = files.slab
        self._index = Index(files.env)
        self._wall_clock = wall_clock
        self._notices = Notices(logging.getLogger(__name__))
        self._claims = KeyClaims()
        self._helpers = Helpers("hicache-lmdb")
        self._writes = WriteHealth()
        self._space = ChunkSpace(
            ChunkIds(chunks_in(capacity_bytes), end=files.slab.chunks, used=loaded.chunk_ids),
            capacity_bytes=capacity_bytes,
            objects=sum(len(batch.keys) for batch in loaded.batches),
            payload_bytes=sum(int(batch.sizes_bytes.sum()) for batch in loaded.batches),
        )
        self._resizing = Resizing(files.env, self._slab, self._index, self._space, is_sealed=keys is not None)
        self.keys = keys
        self._sealing = None if keys is None else keys.sealing()
        self._unchanged: list[StoredBatch] | None = loaded.batches  # until it is taken, or no longer true
        self._close_lock = threading.Lock()
        self._is_closed = False
        self._pid = os.getpid()
        self.store_id = bytes.fromhex(files.marker.store_id)

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        capacity_bytes: int,
        floor_bytes: int = 0,
        encryption_keys: str = "",
        wall_clock: Callable[[], float] = time.time,
    ) -> Self:
        """Open the store in ``directory``, or make one there.

        Raises StorageInUse, BackendError, ConfigError (a foreign directory, or no room for ``capacity_bytes`` with
        ``floor_bytes`` left free).
        """
        chunks_max = chunks_in(capacity_bytes)
        files = open_files(directory, chunks_max=chunks_max, floor_bytes=floor_bytes, is_sealed=bool(encryption_keys))
        try:
            loaded = load_index(files)
            keys = open_keys(directory, encryption_keys, is_empty=lambda: not any(it.keys for it in loaded.batches))
            backend = cls(files, loaded, capacity_bytes=capacity_bytes, wall_clock=wall_clock, keys=keys)
            backend._resizing.cut(capacity_bytes)
            return backend
        except (lmdb.Error, MemoryError) as error:
            files.abandon()
            raise BackendError(f"LMDB cannot read {directory}: {error!r}; nothing stored was touched") from error
        except BaseException:
            files.abandon()
            raise

    def put(self, items: Sequence[PutItem]) -> list[Outcome]:
        """See ``Backend.put``. Payloads are hashed and copied under no lock; one commit makes all of them visible."""
        self._unchanged = None
        outcomes = [Outcome.REFUSED] * len(items)
        first_of: dict[bytes, int] = {}
        for position, item in enumerate(items):
            if is_storable_key(item.key) and item.payload.nbytes:
                first_of.setdefault(item.key, position)
        wanted = list(first_of.values())
        for start in range(0, len(wanted), KEYS_PER_TRANSACTION):
            positions = wanted[start : start + KEYS_PER_TRANSACTION]
            with self._claims.of([items[position].key for position in positions], timeout_s=CLAIM_WAIT_S) as is_claimed:
                if is_claimed:
                    self._put_some(items, positions, outcomes)
                else:
                    error = TimeoutError(f"another put of a key did not end in {CLAIM_WAIT_S} s")
                    self._fail_put(error, positions, outcomes)
        if len(first_of) < len(items):
            _copy_to_duplicates(items, first_of, outcomes)
        return outcomes

    def _put_some(self, items: Sequence[PutItem], positions: list[int], outcomes: list[Outcome]) -> None:
        """Store the items at ``positions``, whose keys differ."""
        try:
            present = self._index.present([items[position].key for position in positions])
        except lmdb.Error as error:
            self._fail_put(error, positions, outcomes)
            return
        missing = [position for position, is_there in zip(positions, present, strict=True) if not is_there]
        allocated = self._space.allocate([chunk_count(items[position].payload.nbytes) for position in missing])
        writing = {
            position: chunk_ids for position, chunk_ids in zip(missing, allocated, strict=True) if chunk_ids is not None
        }
        for position in positions:
            outcomes[position] = Outcome.EXISTS
        for position in missing:
            outcomes[position] = Outcome.NO_SPACE
        try:
            self._write(items, writing, outcomes)
        finally:  # what has been stored is no longer in it
            self._space.give_up([self._slab.usable(chunk_ids) for chunk_ids in writing.values()])

    def _write(self, items: Sequence[PutItem], writing: dict[int, ChunkIdArray], outcomes: list[Outcome]) -> None:
        """Write and commit; what is stored leaves ``writing``."""
        if not writing:
            return
        now_s = self._wall_clock()

        def write(position: int) -> tuple[bytes, IndexRecord]:
            item, chunk_ids = items[position], writing[position]
            checksum, seal = self._write_payload(item, chunk_ids)
            used_at_s = now_s - position * _ORDER_S
            return item.key, IndexRecord(item.payload.nbytes, checksum, used_at_s, chunk_ids, item.namespace_tag, seal)

        size_bytes = sum(items[position].payload.nbytes for position in writing)
        try:
            records = self._helpers.map(write, list(writing), size_bytes=size_bytes)
            added = self._index.add(records)
        except lmdb.MapFullError:
            return
        except (lmdb.Error, MemoryError, OSError) as error:  # the last: the key of a new tenant cannot be kept
            self._fail_put(error, list(writing), outcomes)
            return
        stored = [position for position, is_new in zip(writing, added, strict=True) if is_new]
        for position in writing:
            outcomes[position] = Outcome.EXISTS
        for position in stored:
            outcomes[position] = Outcome.OK
            del writing[position]
        self._writes.took()
        self._space.added([items[position].payload.nbytes for position in stored])

    def _write_payload(self, item: PutItem, chunk_ids: ChunkIdArray) -> tuple[int, bytes]:
        """Its checksum, or its seal."""
        if self._sealing is None:
            return self._slab.write(item.key, item.payload, chunk_ids), b""
        sealer = self._sealing.sealer(item.key, item.payload.nbytes)
        self._slab.write_sealed(item.payload, chunk_ids, sealer)
        return 0, sealer.seal()

    def _fail_put(self, error: Exception, positions: list[int], outcomes: list[Outcome]) -> None:
        self._notices.warning("put", "a put failed: %s", error)
        self._writes.failed(error)
        for position in positions:
            outcomes[position] = Outcome.IO_ERROR

    def get_into(self, items: Sequence[GetItem]) -> list[Outcome]:
        """See ``Backend.get_into``. Pieces are hashed in the target, while they are in cache.

        What does not verify there is read once more into memory that no client shares: one that writes to its target
        meanwhile costs nobody an object.
        """
        outcomes: list[Outcome] = []
        suspects: dict[bytes, bytes] = {}
        for start in range(0, len(items), KEYS_PER_TRANSACTION):
            outcomes += self._get_some(items[start : start + KEYS_PER_TRANSACTION], suspects)
        if suspects:
            self._notices.warning("corrupt", "dropped %d objects that did not verify", len(suspects))
            self._remove(list(suspects), list(suspects.values()))
        return outcomes

    def _get_some(self, items: Sequence[GetItem], suspects: dict[bytes, bytes]) -> list[Outcome]:
        keys = [item.key for item in items]
        with self._space.reading(keys):
            try:
                found = self._index.find(keys)
            except lmdb.Error as error:
                self._notices.warning("get", "a get failed: %s", error)
                return [Outcome.IO_ERROR] * len(items)
            return self._helpers.map(
                lambda pair: self._read(*pair, suspects),
                list(zip(items, found, strict=True)),
                size_bytes=sum(item.target.nbytes for item in items),
            )

    def _read(self, item: GetItem, found: Found | None, suspects: dict[bytes, bytes]) -> Outcome:
        if found is None:
            return Outcome.ABSENT
        raw, record = found
        if record is not None:
            if record.size_bytes != item.target.nbytes:
                return Outcome.SIZE_MISMATCH
            if self._is_filled(item.key, item.target, record):
                return Outcome.OK
            own = memoryview(bytearray(record.size_bytes))
            if self._is_filled(item.key, own, record):
                item.target.cast("B")[:] = own
                return Outcome.OK
        suspects[item.key] = raw
        return Outcome.CORRUPT

    def _is_filled(self, key: bytes, target: memoryview, record: IndexRecord) -> bool:
        """Whether ``target`` has just what was stored."""
        try:
            if self._sealing is None:
                return self._slab.read(key, target, record.chunk_ids) == record.checksum
            opener = self._sealing.opener(key, record.size_bytes, record.seal)
            if opener is None:
                return False
            self._slab.read_sealed(target, record.chunk_ids, opener)
            return opener.is_genuine()
        except OSError as error:
            self._notices.warning("get", "a get failed: %s", error)
            return False

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See ``Backend.contains``."""
        try:
            return self._index.present(keys)
        except lmdb.Error as error:
            self._notices.warning("contains", "presence could not be read: %s", error)
            return [False] * len(keys)

    def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        """See ``Backend.delete``. Changes index records only, and has room of its own when the map is full."""
        return self._remove(keys, [None] * len(keys))

    def _remove(self, keys: Sequence[bytes], only: Sequence[bytes | None]) -> list[Outcome]:
        """Remove objects, those with an ``only`` while their record is just that, and free their chunks."""
        self._unchanged = None
        outcomes: list[Outcome] = []
        for start in range(0, len(keys), KEYS_PER_TRANSACTION):
            some = keys[start : start + KEYS_PER_TRANSACTION]
            try:
                removed = self._index.remove(some, only=only[start : start + KEYS_PER_TRANSACTION])
            except lmdb.Error as error:
                self._notices.warning("delete", "a delete failed: %s", error)
                outcomes += [Outcome.IO_ERROR] * len(some)
                continue
            self._account_removed([(key, raw) for key, raw in zip(some, removed, strict=True) if raw is not None])
            outcomes += [Outcome.ABSENT if raw is None else Outcome.OK for raw in removed]
        return outcomes

    def _account_removed(self, removed: Sequence[tuple[bytes, bytes]]) -> None:
        records = [(key, decode_record(key, raw)) for key, raw in removed]
        self._space.removed(records)
        if any(record is None for _, record in records):
            self._notices.warning("record", "a damaged index record was dropped; its space is free after a restart")

    def forget(self, gone: Sequence[tuple[bytes, int]]) -> None:
        """See ``Backend.forget``. What is in the index takes its space, and nothing else does."""

    def touch(self, used: Sequence[tuple[bytes, float]]) -> None:
        """See ``Backend.touch``."""
        self._unchanged = None
        for start in range(0, len(used), KEYS_PER_TRANSACTION):
            try:
                self._index.touch(used[start : start + KEYS_PER_TRANSACTION])
            except lmdb.Error as error:
                self._notices.warning("touch", "times of use could not be written: %s", error)

    def scan(self) -> Iterator[StoredBatch]:
        """See ``Backend.scan``. The first one of a store that nobody has changed tells what was read at the start."""
        unchanged, self._unchanged = self._unchanged, None
        return self._scan() if unchanged is None else iter(unchanged)

    def _scan(self) -> Iterator[StoredBatch]:
        for batch in self.walk():
            yield StoredBatch.of(
                [(found.key, found.size_bytes, found.used_at_s) for found in batch if found.size_bytes]
            )

    def walk(self, *, after: bytes = b"", tenant: bytes = b"") -> Iterator[list[WalkedObject]]:
        """See ``Backend.walk``. In the order of the keys."""
        try:
            for records in self._index.records(after=after, prefix=tenant):
                yield [walked_object(key, raw) for key, raw in records]
        except lmdb.Error as error:
            raise BackendError(f"the index cannot be read: {error}") from error

    def usage(self) -> Usage:
        """See ``Backend.usage``."""
        return self._space.usage()

    def numbers(self) -> Iterator[Number]:
        """See ``Backend.numbers``: none."""
        return iter(())

    def problem(self) -> str:
        """See ``Backend.problem``."""
        return self._files.problem() or self._writes.problem(self._files.directory)

    def stored_bytes(self, size_bytes: int) -> int:
        """See ``Backend.stored_bytes``."""
        return chunk_count(size_bytes) * CHUNK_BYTES

    def free_bytes(self) -> int | None:
        """None: the files were given all their blocks when they were opened."""
        return None

    def reader_slots(self) -> int:
        """Slots of LMDB's reader table that are taken."""
        return self._files.env.reader_slots()

    def map_used_bytes(self) -> int:
        """How much of the index map has ever been used."""
        return self._files.env.used_bytes()

    def resize(self, capacity_bytes: int, *, floor_bytes: int = 0) -> None:
        """See ``Backend.resize``. Space is taken before the store may grow into it, and given back when it shrinks."""
        self._unchanged = None
        chunks_in(capacity_bytes)
        self._resizing.resize(capacity_bytes, floor_bytes=floor_bytes)

    def close(self) -> None:
        """See ``Backend.close``. Takes at most about SYNC_BUDGET_S for what has not reached the medium yet.

        Waits for puts in progress, which would write into the chunks of whoever opens the store next. Raises
        BackendError when one does not end: then the directory stays taken until the process ends. Does nothing in a
        forked child.
        """
        if os.getpid() != self._pid:
            return
        with self._close_lock:
            if not self._is_closed:
                self._is_closed = True
                if not self._claims.shut(timeout_s=CLOSE_WAIT_S):
                    raise BackendError(f"puts did not end within {CLOSE_WAIT_S} s")
                self._helpers.close()
                self._files.close(sync_budget_s=SYNC_BUDGET_S)


def _copy_to_duplicates(items: Sequence[PutItem], first_of: dict[bytes, int], outcomes: list[Outcome]) -> None:
    """Give a key's later occurrences in one batch the outcome that its first one left behind."""
    for position, item in enumerate(items):
        first = first_of.get(item.key, position)
        if first != position and item.payload.nbytes:
            outcomes[position] = Outcome.EXISTS if outcomes[first].is_ok else outcomes[first]
