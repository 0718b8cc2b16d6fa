"""The backend that keeps each object in a file of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import msgspec
import xxhash

from hicache.backends.base import GetItem, PutItem, StoredObject, Usage, is_storable_key
from hicache.backends.file_calls import FileCalls
from hicache.backends.file_layout import key_of_name, object_path, stored_bytes_of
from hicache.backends.file_objects import ObjectFiles, payload_bytes_of
from hicache.backends.file_spares import SpareFiles
from hicache.backends.file_writer import WriterFolder, remove_dead_writers
from hicache.backends.lock import DirectoryLock
from hicache.backends.marker import current_boot_id, new_marker, read_marker, write_marker
from hicache.backends.space import OUT_OF_SPACE_ERRNOS, free_bytes, total_bytes
from hicache.errors import BackendError, ConfigError
from hicache.notices import Notices
from hicache.outcome import Outcome

STORE_KIND = "file"
STORE_VERSION = 2
CAPACITY_BYTES_MIN = 1 << 16
KEY_LOCKS = 256
SPARE_SHARE = 3  # one part in so many of the capacity may lie in files to be written again: more than one eviction frees


class FileBackend:
    """Implements ``Backend``. Open it with ``FileBackend.open``.

    A file is made in the writer's own folder and renamed to its final name when it is whole, so a name means a complete
    object; a kill leaves an unfinished file that the next opener removes. Nothing is synced: after a power loss files
    may be cut short or hold old bytes, which the checksum finds when they are read.
    """

    name = "file"

    def __init__(
        self,
        directory: Path,
        lock: DirectoryLock,
        *,
        capacity_bytes: int,
        calls: FileCalls,
    ) -> None:
        self._directory = directory
        self._pid = os.getpid()
        self._objects = str(directory / "objects")
        self._lock = lock
        self._capacity_bytes = capacity_bytes
        self._notices = Notices(logging.getLogger(__name__))
        self._key_locks = [threading.Lock() for _ in range(KEY_LOCKS)]
        self._counts_lock = threading.Lock()
        self._objects_count = self._payload_bytes = self._stored_bytes = self._reserved_bytes = 0
        self._is_closed = False
        marker = read_marker(directory, kind=STORE_KIND, version=STORE_VERSION)
        marker = marker or new_marker(STORE_KIND, STORE_VERSION)
        write_marker(directory, msgspec.structs.replace(marker, boot_id=current_boot_id(), is_clean=False))
        self.store_id = bytes.fromhex(marker.store_id)
        os.makedirs(self._objects, exist_ok=True)
        self.orphans_removed = remove_dead_writers(directory / "unfinished")
        self._count_everything()
        self._writer = WriterFolder(directory / "unfinished")
        self._spares = SpareFiles(capacity_bytes // SPARE_SHARE)
        self._files = ObjectFiles(calls, self._writer, self._spares)

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        capacity_bytes: int,
        calls: FileCalls | None = None,
    ) -> Self:
        """Open the store in ``directory``, or make one there.

        Raises StorageInUse, ConfigError (a foreign directory, or a capacity that is too small), BackendError.
        """
        if capacity_bytes < CAPACITY_BYTES_MIN:
            raise ConfigError("capacity_bytes", capacity_bytes, f"at least {CAPACITY_BYTES_MIN}")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = DirectoryLock(directory)
        try:
            _require_possible(directory, capacity_bytes)
            return cls(directory, lock, capacity_bytes=capacity_bytes, calls=calls or FileCalls())
        except BaseException:
            lock.release()
            raise

    def _count_everything(self) -> None:
        for _, stat in self._walk():
            self._objects_count += 1
            self._payload_bytes += payload_bytes_of(stat.st_size)
            self._stored_bytes += stored_bytes_of(payload_bytes_of(stat.st_size))

    def _walk(self) -> Iterator[tuple[bytes, os.stat_result]]:
        """Key and stat of every object's file; files that are none of ours are left alone."""
        for folder in _folders_in(self._objects):
            for entry in list(os.scandir(folder)):
                key = key_of_name(entry.name)
                if key is not None:
                    with contextlib.suppress(FileNotFoundError):
                        yield key, entry.stat(follow_symlinks=False)

    def put(self, items: Sequence[PutItem]) -> list[Outcome]:
        """See ``Backend.put``."""
        self._require_open()
        return [self._put_one(item) for item in items]

    def _put_one(self, item: PutItem) -> Outcome:
        size_bytes = item.payload.nbytes
        if not is_storable_key(item.key) or size_bytes == 0:
            return Outcome.REFUSED
        path = object_path(self._objects, item.key)
        stored_bytes = stored_bytes_of(size_bytes)
        with self._key_held(item.key):
            if os.path.exists(path):
                return Outcome.EXISTS
            if not self._reserve(stored_bytes):
                return Outcome.NO_SPACE
            try:
                self._write(path, item)
            except OSError as error:
                self._notices.warning("put", "a put failed: %s", error)
                return Outcome.NO_SPACE if error.errno in OUT_OF_SPACE_ERRNOS else Outcome.IO_ERROR
            else:
                self._account(objects=1, payload_bytes=size_bytes, stored_bytes=stored_bytes)
                return Outcome.OK
            finally:
                self._unreserve(stored_bytes)

    def _write(self, path: str, item: PutItem) -> None:
        """Write a file; once more without the spare ones when the disk is full."""
        try:
            self._files.write(path, item)
        except OSError as error:
            spares = self._spares.give_up()
            if error.errno not in OUT_OF_SPACE_ERRNOS or not spares:
                raise
            self._files.unlink(spares)
            self._files.write(path, item)

    def get_into(self, items: Sequence[GetItem]) -> list[Outcome]:
        """See ``Backend.get_into``. Each segment is hashed in the target, while it is in cache."""
        self._require_open()
        return [self._get_one(item) for item in items]

    def _get_one(self, item: GetItem) -> Outcome:
        if not is_storable_key(item.key):
            return Outcome.ABSENT
        path = object_path(self._objects, item.key)
        try:
            outcome, inode = self._files.read(path, item)
        except FileNotFoundError:
            return Outcome.ABSENT
        except OSError as error:
            self._notices.warning("get", "a get failed: %s", error)
            return Outcome.IO_ERROR
        if outcome is Outcome.CORRUPT:
            self._notices.warning("corrupt", "dropped an object that did not verify")
            with self._key_held(item.key):
                self._remove(path, inode=inode)  # unless another file has taken the name meanwhile
        return outcome

    def _remove(self, path: str, *, inode: int | None = None) -> Outcome:
        """Remove an object's file and give its space back; the caller holds the key."""
        try:
            payload_bytes = self._files.remove(path, inode=inode)
        except OSError as error:
            self._notices.warning("delete", "a delete failed: %s", error)
            return Outcome.IO_ERROR
        if payload_bytes is None:
            return Outcome.ABSENT
        self._account(objects=-1, payload_bytes=-payload_bytes, stored_bytes=-stored_bytes_of(payload_bytes))
        return Outcome.OK

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See ``Backend.contains``."""
        self._require_open()
        return [is_storable_key(key) and os.path.exists(object_path(self._objects, key)) for key in keys]

    def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        """See ``Backend.delete``."""
        self._require_open()
        return [self._delete_one(key) for key in keys]

    def _delete_one(self, key: bytes) -> Outcome:
        if not is_storable_key(key):
            return Outcome.ABSENT
        with self._key_held(key):
            return self._remove(object_path(self._objects, key))

    def touch(self, used: Sequence[tuple[bytes, float]]) -> None:
        """See ``Backend.touch``: the time of use is the file's modification time."""
        self._require_open()
        for key, used_at_s in used:
            if is_storable_key(key):
                with contextlib.suppress(OSError):
                    os.utime(object_path(self._objects, key), (used_at_s, used_at_s))

    def scan(self) -> Iterator[StoredObject]:
        """See ``Backend.scan``. Names and sizes only: what a file holds is verified when it is read."""
        self._require_open()
        for key, stat in self._walk():
            yield StoredObject(key, payload_bytes_of(stat.st_size), stat.st_mtime)

    def usage(self) -> Usage:
        """See ``Backend.usage``."""
        with self._counts_lock:
            return Usage(self._objects_count, self._payload_bytes, self._stored_bytes, self._capacity_bytes)

    def stored_bytes(self, size_bytes: int) -> int:
        """See ``Backend.stored_bytes``."""
        return stored_bytes_of(size_bytes)

    def free_bytes(self) -> int | None:
        """See ``Backend.free_bytes``."""
        return free_bytes(self._directory) + self._spares.total_bytes

    def close(self) -> None:
        """See ``Backend.close``. Waits for puts and deletes in progress. Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with contextlib.ExitStack() as stack:
            for lock in self._key_locks:
                stack.enter_context(lock)
            if not self._is_closed:
                self._is_closed = True
                self._writer.close()
                self._lock.release()

    @contextlib.contextmanager
    def _key_held(self, key: bytes) -> Iterator[None]:
        """Nobody else changes the file of this key, and the store stays open."""
        with self._key_locks[xxhash.xxh3_64_intdigest(key) % KEY_LOCKS]:
            self._require_open()
            yield

    def _require_open(self) -> None:
        if self._is_closed:
            raise BackendError("the backend is closed")

    def _reserve(self, stored_bytes: int) -> bool:
        """Set space aside; spare files give way to it."""
        with self._counts_lock:
            left_bytes = self._capacity_bytes - self._stored_bytes - self._reserved_bytes - stored_bytes
            if left_bytes < 0:
                return False
            self._reserved_bytes += stored_bytes
        if self._spares.total_bytes > left_bytes:
            self._files.unlink(self._spares.give_up(left_bytes))
        return True

    def _unreserve(self, stored_bytes: int) -> None:
        with self._counts_lock:
            self._reserved_bytes -= stored_bytes

    def _account(self, *, objects: int, payload_bytes: int, stored_bytes: int) -> None:
        with self._counts_lock:
            self._objects_count += objects
            self._payload_bytes += payload_bytes
            self._stored_bytes += stored_bytes


def _require_possible(directory: Path, capacity_bytes: int) -> None:
    """Raise ConfigError for more than the file system could ever hold.

    What is free today is no condition: the free space floor of the store looks after that while it runs.
    """
    total = total_bytes(directory)
    if capacity_bytes > total:
        expected = (
            f"at most {total}, the size of the file system of {directory}; lower capacity_bytes, or choose another path"
        )
        raise ConfigError("capacity_bytes", capacity_bytes, expected)


def _folders_in(path: str) -> list[str]:
    with os.scandir(path) as entries:
        return sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
