"""The LMDB environment under a store: its map, the space of the map on disk, and its transactions."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, TypeVar

import lmdb

from hicache.backends.forks import never_free_in_children
from hicache.backends.gate import Gate
from hicache.backends.lmdb_layout import PAGE_BYTES, moving_bytes_for
from hicache.backends.space import OUT_OF_SPACE_ERRNOS, free_bytes, no_room, take_space
from hicache.errors import BackendError

Transaction: TypeAlias = "lmdb.Transaction[memoryview]"
Result = TypeVar("Result")
Snapshot = TypeVar("Snapshot")

logger = logging.getLogger(__name__)

DATA_NAME = "data.mdb"
LOCK_NAME = "lock.mdb"
READER_SLOTS = 512  # far above the threads that read at once; others in the table were left by killed tools
LOCK_FILE_BYTES = (READER_SLOTS + 64) * 64  # a cache line for each, and room for what comes before them
SPARE_READERS = 16
DELETE_RESERVE_BYTES = 8 << 20  # what a delete may add to a map that others have filled
QUIESCE_S = 1.0
CLOSE_WAIT_S = 30.0
_TICKS = 2  # transactions after which LMDB reuses a freed page


class LmdbEnvironment:
    """The index of a store: one table, in a map whose blocks are all allocated.

    Written with ``writemap`` and no sync. A process may be killed at any instruction: the pages are in the page cache,
    copy-on-write never touches what the last committed meta page names, and the new meta page counts only when its
    number has been written. A power loss may leave anything: the marker of the store tells that it happened.
    """

    def __init__(self, directory: Path, *, map_bytes: int, capacity_bytes: int) -> None:
        """Opens or makes the environment. Raises ConfigError when there is no room for it, and BackendError when LMDB
        cannot open what is there."""
        self.path = directory / DATA_NAME
        self._gate = Gate()
        before_bytes = self.path.stat().st_size if self.path.exists() else 0
        _take_lock_file(directory / LOCK_NAME, capacity_bytes=capacity_bytes)
        self._env = _open(directory, map_bytes, capacity_bytes=capacity_bytes)
        never_free_in_children(self._env)
        self._map_bytes = self._env.info()["map_size"]  # larger than asked for when more is in use
        try:
            take_space(self.path, self._map_bytes, capacity_bytes=capacity_bytes, restore_bytes=before_bytes)
            self._env.reader_check()
            self.index = self._env.open_db(b"index")
            self._tick = self._env.open_db(b"tick")
            self._keep_room_to_move(capacity_bytes)
        except BaseException:
            self._env.close()
            raise

    def _keep_room_to_move(self, capacity_bytes: int) -> None:
        """Enlarge a map that is too full to change anything in: its capacity has been lowered since it was filled."""
        with self._env.begin() as txn:
            stat = txn.stat(self.index)
        used_bytes = (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) * PAGE_BYTES
        wanted_bytes = used_bytes + moving_bytes_for(used_bytes)
        if wanted_bytes > self._map_bytes:
            self._enlarge(wanted_bytes, capacity_bytes=capacity_bytes)

    def _enlarge(self, map_bytes: int, *, capacity_bytes: int) -> None:
        """Larger file, then larger map: never a hole under the map."""
        before_bytes = self.path.stat().st_size
        take_space(self.path, map_bytes, capacity_bytes=capacity_bytes, restore_bytes=before_bytes)
        self._env.set_mapsize(map_bytes)
        self._map_bytes = map_bytes

    def grow(self, map_bytes: int, *, capacity_bytes: int) -> None:
        """A map of at least so much, beside transactions of other threads.

        Raises ConfigError when there is no room, and BackendError when transactions do not end in time; then nothing
        has changed.
        """
        if map_bytes <= self._map_bytes:
            return
        with self._gate.exclusive(timeout_s=QUIESCE_S) as is_alone:
            if not is_alone:
                raise BackendError(f"{self.path}: transactions did not end within {QUIESCE_S} s")
            self._enlarge(map_bytes, capacity_bytes=capacity_bytes)

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A snapshot. What it returns is valid inside only. Keep it short: it holds freed pages back."""
        with self._gate.shared(), self._begin_read(lambda: self._env.begin(buffers=True)) as txn:
            yield txn

    @contextmanager
    def read_copies(self) -> Iterator[lmdb.Transaction[bytes]]:
        """A snapshot that returns bytes of its own."""
        with self._gate.shared(), self._begin_read(self._env.begin) as txn:
            yield txn

    def _begin_read(self, begin: Callable[[], Snapshot]) -> Snapshot:
        """A read transaction, also where killed processes have left no slot of the reader table free."""
        try:
            return begin()
        except lmdb.ReadersFullError:
            cleared = self._env.reader_check()
            logger.warning("%s: LMDB's reader table was full; cleared %d slots of killed processes", self.path, cleared)
            return begin()

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """The one write transaction: commits at the end, rolls back when something is raised."""
        with self._gate.shared(), self._env.begin(write=True, buffers=True) as txn:
            yield txn

    def write_with_reserve(self, change: Callable[[Transaction], Result]) -> Result:
        """Run a small change, such as a delete, also when the map is full.

        On MapFullError the map grows by DELETE_RESERVE_BYTES for this one transaction and shrinks again to what is
        used, so that puts can never eat the reserve. Raises lmdb.Error when even that fails.
        """
        try:
            with self.write() as txn:
                return change(txn)
        except lmdb.MapFullError as full:
            with self._gate.exclusive(timeout_s=QUIESCE_S) as is_alone:
                if not is_alone:
                    raise
                self._env.reader_check()
                try:
                    self._lend(self._env.info()["map_size"] + DELETE_RESERVE_BYTES)
                except OSError:
                    raise full from None
                try:
                    with self._env.begin(write=True, buffers=True) as txn:
                        return change(txn)
                finally:
                    self._env.set_mapsize(self._map_bytes)

    def recycle(self) -> bool:
        """Make pages that earlier transactions freed usable now. False when readers did not end in time.

        Waits for the readers of this process, drops those of killed ones, and commits what LMDB counts by.
        """
        with self._gate.exclusive(timeout_s=QUIESCE_S) as is_alone:
            if not is_alone:
                return False
            self._env.reader_check()
            for tick in range(_TICKS):
                try:
                    with self._env.begin(write=True) as txn:
                        txn.put(b"tick", b"%d %d" % (txn.id(), tick), db=self._tick)
                except lmdb.MapFullError:
                    return False
            return True

    def reader_slots(self) -> int:
        """Slots of the reader table that are taken: by reads, by spares for the next ones, and by killed processes."""
        return self._env.info()["num_readers"]

    def used_bytes(self) -> int:
        """How far into the map pages have ever been used."""
        return (self._env.info()["last_pgno"] + 1) * PAGE_BYTES

    def close(self) -> None:
        """Wait for transactions to end and let go of the map. Later ones raise BackendError."""
        with self._gate.exclusive(timeout_s=CLOSE_WAIT_S) as is_alone:
            if not is_alone:
                raise BackendError(f"{self.path}: transactions did not end within {CLOSE_WAIT_S} s")
            self._gate.shut()
            self._env.close()

    def _lend(self, map_bytes: int) -> None:
        """A larger map for one transaction."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, map_bytes)
        finally:
            os.close(fd)
        self._env.set_mapsize(map_bytes)


def _take_lock_file(path: Path, *, capacity_bytes: int) -> None:
    """Give the reader table, which LMDB maps too, all its blocks.

    Only before LMDB opens it: the process loses LMDB's lock on the file (a POSIX lock) with the first descriptor of it
    that it closes, and the next process would take the table for an abandoned one.
    """
    path.touch(mode=0o600)
    take_space(path, LOCK_FILE_BYTES, capacity_bytes=capacity_bytes, restore_bytes=path.stat().st_size)


def _open(directory: Path, map_bytes: int, *, capacity_bytes: int) -> lmdb.Environment:
    try:
        return lmdb.open(
            str(directory),
            map_size=map_bytes,
            mode=0o600,
            writemap=True,
            sync=False,
            metasync=False,
            map_async=True,
            readahead=True,
            meminit=False,
            max_dbs=2,
            max_readers=READER_SLOTS,
            max_spare_txns=SPARE_READERS,
        )
    except lmdb.Error as error:
        if error.code in OUT_OF_SPACE_ERRNOS:
            data = directory / DATA_NAME
            raise no_room(data, capacity_bytes, missing_bytes=map_bytes, free=free_bytes(directory)) from error
        raise BackendError(f"LMDB cannot open {directory}: {error}; {_advice(directory, map_bytes, error)}") from error


def _advice(directory: Path, map_bytes: int, error: lmdb.Error) -> str:
    if isinstance(error, lmdb.MemoryError):
        return f"it needs {map_bytes} bytes of address space (ulimit -v, LimitAS); nothing stored was touched"
    return f"nothing stored was touched; to give it up and start empty, remove {directory / DATA_NAME}"
