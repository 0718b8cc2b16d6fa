"""The LMDB environment under a store: its map, the space of the map on disk, and its transactions."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, TypeVar

import lmdb

from hicache.backends.forks import never_free_in_children
from hicache.backends.gate import Gate
from hicache.backends.lmdb_layout import PAGE_BYTES, moving_bytes_for
from hicache.backends.space import OUT_OF_SPACE_ERRNOS, free_bytes, no_room, require_space, take_space
from hicache.errors import BackendError

Transaction: TypeAlias = "lmdb.Transaction[memoryview]"
Result = TypeVar("Result")

DATA_NAME = "data.mdb"
LOCK_NAME = "lock.mdb"
READER_SLOTS = 512  # far above the threads that read at once; others in the table were left by killed tools
LOCK_FILE_BYTES = (READER_SLOTS + 64) * 64  # a cache line for each, and room for what comes before them
SPARE_READERS = 16
DELETE_RESERVE_BYTES = 8 << 20  # what a delete may add to a map that others have filled
QUIESCE_S = 1.0
CLOSE_WAIT_S = 30.0
_SYNC_PIECE_BYTES = 64 << 20
_TICKS = 2  # transactions after which LMDB reuses a freed page


class LmdbEnvironment:
    """Two tables, ``chunks`` and ``index``, in a map whose blocks are all allocated.

    Written with ``writemap`` and no sync. A process may be killed at any instruction: the pages are in the page cache,
    copy-on-write never touches what the last committed meta page names, and the new meta page counts only when its
    number has been written. A power loss may leave anything: the marker of the store tells that it happened.
    """

    def __init__(self, directory: Path, *, map_bytes: int, capacity_bytes: int, floor_bytes: int = 0) -> None:
        """Opens or makes the environment. Raises ConfigError when there is no room for it, or taking that would leave
        less than ``floor_bytes``, and BackendError when LMDB cannot open what is there."""
        self._data = directory / DATA_NAME
        self._gate = Gate()
        before_bytes = self._data.stat().st_size if self._data.exists() else 0
        require_space(self._data, map_bytes, capacity_bytes=capacity_bytes, floor_bytes=floor_bytes)
        _take_lock_file(directory / LOCK_NAME, capacity_bytes=capacity_bytes)
        self._env = _open(directory, map_bytes, capacity_bytes=capacity_bytes)
        never_free_in_children(self._env)
        self._map_bytes = self._env.info()["map_size"]  # larger than asked for when more is in use
        try:
            take_space(self._data, self._map_bytes, capacity_bytes=capacity_bytes, restore_bytes=before_bytes)
            self._env.reader_check()
            self.chunks = self._env.open_db(b"chunks", integerkey=True)
            self.index = self._env.open_db(b"index")
            self._tick = self._env.open_db(b"tick")
            self._keep_room_to_move(capacity_bytes)
        except BaseException:
            self._env.close()
            raise

    def _keep_room_to_move(self, capacity_bytes: int) -> None:
        """Enlarge a map that is too full to change anything in: its capacity has been lowered since it was filled."""
        with self._env.begin() as txn:
            tables = [txn.stat(table) for table in (self.chunks, self.index)]
        pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in tables)
        used_bytes = pages * PAGE_BYTES
        wanted_bytes = used_bytes + moving_bytes_for(used_bytes)
        if wanted_bytes > self._map_bytes:
            before_bytes = self._map_bytes
            take_space(self._data, wanted_bytes, capacity_bytes=capacity_bytes, restore_bytes=before_bytes)
            self._env.set_mapsize(wanted_bytes)
            self._map_bytes = wanted_bytes

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A snapshot. What it returns is valid inside only. Keep it short: it holds freed pages back."""
        with self._gate.shared(), self._env.begin(buffers=True) as txn:
            yield txn

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
                    self._grow(self._env.info()["map_size"] + DELETE_RESERVE_BYTES)
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

    def close(self, *, sync_budget_s: float) -> bool:
        """Wait for transactions to end and let go of the map. True when all of it reached the medium in time."""
        with self._gate.exclusive(timeout_s=CLOSE_WAIT_S) as is_alone:
            if not is_alone:
                raise BackendError(f"{self._data}: transactions did not end within {CLOSE_WAIT_S} s")
            self._gate.shut()
            self._env.close()
        return _sync(self._data, time.monotonic() + sync_budget_s)

    def _grow(self, map_bytes: int) -> None:
        """Larger file, then larger map: never a hole under the map."""
        fd = os.open(self._data, os.O_RDWR | os.O_CLOEXEC)
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
            max_dbs=3,
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


def _sync(path: Path, deadline_s: float) -> bool:
    """Write dirty pages to the medium, piece by piece until the deadline. True when there are none left."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size_bytes = os.fstat(fd).st_size
        with mmap.mmap(fd, size_bytes) as pages:
            for offset in range(0, size_bytes, _SYNC_PIECE_BYTES):
                if time.monotonic() >= deadline_s:
                    return False
                pages.flush(offset, min(_SYNC_PIECE_BYTES, size_bytes - offset))
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
