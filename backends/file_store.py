"""The backend that keeps each object in a file of its own."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec
import xxhash

from hicache.backends.base import (
    GetItem,
    Number,
    PutItem,
    StoredBatch,
    Usage,
    WalkedObject,
    is_storable_key,
)
from hicache.backends.file_accounts import Accounts, Counts, counts_of
from hicache.backends.file_calls import FileCalls, sync_names
from hicache.backends.file_direct import wins
from hicache.backends.file_layout import stored_bytes_of
from hicache.backends.file_objects import ObjectFiles, payload_bytes_of
from hicache.backends.file_settings import FileSettings
from hicache.backends.file_spares import SpareFiles
from hicache.backends.file_tree import FileTree
from hicache.backends.file_writer import WriterFolder, orphan_number, remove_dead_writers
from hicache.backends.helpers import Helpers
from hicache.backends.last_keys import LastKeys
from hicache.backends.lock import DirectoryLock, opening_alone
from hicache.backends.marker import current_boot_id, new_marker, read_marker, write_marker
from hicache.backends.space import OUT_OF_SPACE_ERRNOS, free_bytes, require_possible, why_full
from hicache.backends.store_keys import open_keys
from hicache.backends.write_health import WriteHealth
from hicache.errors import BackendError, ConfigError
from hicache.notices import Notices
from hicache.outcome import Outcome

if TYPE_CHECKING:
    from hicache.backends.tenant_keys import TenantKeys

STORE_KIND = "file"
STORE_VERSION = 2
CAPACITY_BYTES_MIN = 1 << 16
KEY_LOCKS = 256
LAST_KEYS_MAX = 1 << 12
UNREADABLE_ERRNOS = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG})  # of a medium that is damaged at that place
SPARE_SHARE = 3  # one part in so many of the capacity may lie in spare files: more than evictions at a time free


class FileBackend:
    """Implements ``Backend``. Open it with ``FileBackend.open``.

    A file is made in the writer's own folder and gets its final name when it is whole, so a name means a complete
    object; a kill leaves an unfinished file that the next opener removes. Unless ``fsync`` is set nothing is synced:
    after a power loss files may be cut short or hold old bytes, which the checksum finds when they are read.
    """

    name = "file"

    def __init__(
        self, directory: Path, lock: DirectoryLock, *, capacity_bytes: int, settings: FileSettings, calls: FileCalls
    ) -> None:
        self.directory = directory
        self.settings = settings
        self._pid = os.getpid()
        self.tree = FileTree(str(directory / "objects"))
        self._lock = lock
        self._calls = calls
        self._notices = Notices(logging.getLogger(__name__))
        self._key_locks = [threading.Lock() for _ in range(KEY_LOCKS)]
        self._is_closed = False
        self._helpers = Helpers("hicache-file")
        self._writes = WriteHealth()
        self._removed = LastKeys(LAST_KEYS_MAX)  # until they are stored again: others who read or delete them just
        # now find them gone, and may say so when their space has been given back already
        self._unreadable = LastKeys(LAST_KEYS_MAX)  # once: a medium may fail for a moment
        self.keys: TenantKeys | None = None
        self._first_walk: list[StoredBatch] | None = None  # until the first scan, or the first change
        with opening_alone(directory) if settings.shared else contextlib.nullcontext():
            marker = read_marker(directory, kind=STORE_KIND, versions=(STORE_VERSION,))
            marker = marker or new_marker(STORE_KIND, STORE_VERSION)
            write_marker(directory, msgspec.structs.replace(marker, boot_id=current_boot_id(), is_clean=False))
            os.makedirs(self.tree.root, exist_ok=True)
        self.store_id = bytes.fromhex(marker.store_id)
        self.orphans_removed = remove_dead_writers(directory / "unfinished")
        self.writer = WriterFolder(directory / "unfinished", calls)
        self.spares = SpareFiles(capacity_bytes // SPARE_SHARE)
        self.accounts = Accounts(capacity_bytes)
        self._files = ObjectFiles(
            calls,
            self.writer,
            self.spares,
            is_shared=settings.shared,
            is_synced=settings.fsync,
            is_direct=wins(directory, setting=settings.direct, capacity_bytes=capacity_bytes, notices=self._notices),
        )

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        capacity_bytes: int,
        settings: FileSettings | None = None,
        calls: FileCalls | None = None,
        encryption_keys: str = "",
    ) -> Self:
        """Open the store in ``directory``, or make one there. For one with ``shared``, see ``SharedFileBackend``.

        Raises StorageInUse, ConfigError (a foreign directory, or a capacity that is too small), BackendError.
        """
        if capacity_bytes < CAPACITY_BYTES_MIN:
            raise ConfigError("capacity_bytes", capacity_bytes, f"at least {CAPACITY_BYTES_MIN}")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        settings = settings or FileSettings()
        lock = DirectoryLock(directory, is_shared=settings.shared)
        try:
            require_possible(directory, capacity_bytes)
            backend = cls(directory, lock, capacity_bytes=capacity_bytes, settings=settings, calls=calls or FileCalls())
            if not settings.shared:
                backend._first_walk = list(backend.tree.scan())
                backend.accounts.settle(counts_of(backend._first_walk), Counts())
                backend._open_keys(encryption_keys)
            return backend
        except BaseException:
            lock.release()
            raise

    def _open_keys(self, encryption_keys: str) -> None:
        self.keys = open_keys(self.directory, encryption_keys, is_empty=lambda: self.accounts.usage().objects == 0)
        if self.keys is not None:
            self._files.sealing = self.keys.sealing()

    def count(self) -> Counts:
        """What a walk over all files finds; takes seconds for a million."""
        return counts_of(self.tree.scan())

    def put(self, items: Sequence[PutItem]) -> list[Outcome]:
        """See ``Backend.put``."""
        self._require_open()
        self._first_walk = None
        is_one_each = len({item.key for item in items}) == len(items)  # otherwise the first one has to win
        size_bytes = sum(item.payload.nbytes for item in items) if is_one_each else 0
        outcomes = self._helpers.map(self._put_one, items, size_bytes=size_bytes)
        if self.settings.fsync:
            self._sync([item.key for item in items], outcomes, undo=self._delete_one)
        return outcomes

    def _put_one(self, item: PutItem) -> Outcome:
        size_bytes = item.payload.nbytes
        if not is_storable_key(item.key) or size_bytes == 0:
            return Outcome.REFUSED
        path = self.tree.path_of(item.key)
        stored_bytes = stored_bytes_of(size_bytes)
        with self._lock_of(item.key):
            self._require_open()
            if os.path.exists(path):
                return Outcome.EXISTS
            if not self._reserve(stored_bytes):
                return Outcome.NO_SPACE
            try:
                self._write(path, item)
            except FileExistsError:
                return Outcome.EXISTS
            except OSError as error:
                return self._outcome_of_failed_put(error)
            else:
                self._writes.took()
                self._removed.forget(item.key)
                self.accounts.add(Counts(1, size_bytes, stored_bytes))
                return Outcome.OK
            finally:
                self.accounts.unreserve(stored_bytes)

    def _outcome_of_failed_put(self, error: OSError) -> Outcome:
        outcome = _outcome_of(error)
        if outcome is Outcome.NO_SPACE:
            self._writes.took()
            self._notices.warning("put", "a put found no room: %s%s", error, why_full(self.directory))
        else:
            self._writes.failed(error)
            self._notices.warning("put", "a put failed: %s", error)
        return outcome

    def _sync(
        self, keys: Sequence[bytes], outcomes: list[Outcome], *, undo: Callable[[bytes], Outcome] | None = None
    ) -> None:
        """Have the names on the medium; what cannot be is NO_SPACE or IO_ERROR, after ``undo``."""
        changed = {at: self.tree.path_of(key) for at, key in enumerate(keys) if outcomes[at] is Outcome.OK}
        for at, error in sync_names(self._calls, changed):
            self._notices.warning("sync", "a folder could not be synced: %s", error)
            outcomes[at] = _outcome_of(error)
            if undo is not None:
                undo(keys[at])

    def _write(self, path: str, item: PutItem) -> None:
        """Write a file; once more without the spare ones when the disk is full."""
        try:
            self._files.write(path, item)
        except OSError as error:
            spares = self.spares.give_up()
            if error.errno not in OUT_OF_SPACE_ERRNOS or not spares:
                raise
            self._files.unlink(spares)
            self._files.write(path, item)

    def get_into(self, items: Sequence[GetItem]) -> list[Outcome]:
        """See ``Backend.get_into``. Each segment is hashed in the target, while it is in cache."""
        self._require_open()
        return self._helpers.map(self._get_one, items, size_bytes=sum(item.target.nbytes for item in items))

    def _get_one(self, item: GetItem) -> Outcome:
        if not is_storable_key(item.key):
            return Outcome.ABSENT
        path = self.tree.path_of(item.key)
        try:
            outcome, inode = self._files.read(path, item)
            if outcome is Outcome.CORRUPT:
                outcome, inode = self._read_again(path, item)
        except FileNotFoundError:
            return Outcome.ABSENT
        except OSError as error:
            self._notices.warning("get", "a get failed: %s", error)
            is_damage = error.errno in UNREADABLE_ERRNOS and self._unreadable.note(item.key)
            return self._drop_unreadable(item.key) if is_damage else Outcome.IO_ERROR
        if outcome is Outcome.CORRUPT:
            self._notices.warning("corrupt", "dropped an object that did not verify")
            with self._lock_of(item.key):
                self._require_open()
                self._remove(item.key, inode=inode)  # unless another file has taken the name meanwhile
        return outcome

    def _drop_unreadable(self, key: bytes) -> Outcome:
        """Look-ups would promise it for ever. Its file is not kept to be written again: the medium is damaged there."""
        path = self.tree.path_of(key)
        with self._lock_of(key):
            self._require_open()
            try:
                payload_bytes = payload_bytes_of(os.stat(path).st_size)
                self._calls.remove(path)
            except OSError:  # it is more than this object
                return Outcome.IO_ERROR
            self._first_walk = None
            self.accounts.add(Counts(-1, -payload_bytes, -stored_bytes_of(payload_bytes)))
            self._removed.note(key)
            self._unreadable.forget(key)
        return Outcome.CORRUPT

    def _read_again(self, path: str, item: GetItem) -> tuple[Outcome, int]:
        """Into memory that no client shares: whoever wrote to the target meanwhile costs nobody an object. Another
        process may have written the file again while it was read, too.
        """
        own = memoryview(bytearray(item.target.nbytes))
        outcome, inode = self._files.read(path, GetItem(item.key, own))
        if outcome is Outcome.OK:
            item.target.cast("B")[:] = own
        return outcome, inode

    def _remove(self, key: bytes, *, inode: int | None = None) -> Outcome:
        """Remove an object's file and give its space back; the caller holds the key."""
        self._first_walk = None
        try:
            payload_bytes = self._files.remove(self.tree.path_of(key), inode=inode)
        except OSError as error:
            self._notices.warning("delete", "a delete failed: %s", error)
            return Outcome.IO_ERROR
        if payload_bytes is None:
            return Outcome.ABSENT
        self.accounts.add(Counts(-1, -payload_bytes, -stored_bytes_of(payload_bytes)))
        self._removed.note(key)
        return Outcome.OK

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See ``Backend.contains``."""
        self._require_open()
        return [is_storable_key(key) and os.path.exists(self.tree.path_of(key)) for key in keys]

    def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        """See ``Backend.delete``."""
        self._require_open()
        outcomes = [self._delete_one(key) for key in keys]
        if self.settings.fsync:
            self._sync(keys, outcomes)
        return outcomes

    def _delete_one(self, key: bytes) -> Outcome:
        if not is_storable_key(key):
            return Outcome.ABSENT
        with self._lock_of(key):
            self._require_open()
            return self._remove(key)

    def forget(self, gone: Sequence[tuple[bytes, int]]) -> None:
        """See ``Backend.forget``."""
        for key, size_bytes in gone:
            with self._lock_of(key):
                if key not in self._removed:
                    self.accounts.add(Counts(-1, -size_bytes, -stored_bytes_of(size_bytes)))

    def touch(self, used: Sequence[tuple[bytes, float]]) -> None:
        """See ``Backend.touch``: the time of use is the file's modification time."""
        self._require_open()
        self._first_walk = None
        for key, used_at_s in used:
            if is_storable_key(key):
                with contextlib.suppress(OSError):
                    os.utime(self.tree.path_of(key), (used_at_s, used_at_s))

    def scan(self) -> Iterator[StoredBatch]:
        """See ``Backend.scan``. Names and sizes only: what a file holds is verified when it is read."""
        self._require_open()
        found, self._first_walk = self._first_walk, None
        yield from found if found is not None else self.tree.scan()

    def walk(self, *, after: bytes = b"", tenant: bytes = b"") -> Iterator[list[WalkedObject]]:
        """See ``Backend.walk``. In the order of folders and names; opens each file for its namespace."""
        self._require_open()
        return self.tree.walk(after=after, tenant=tenant, tag_of=self._files.namespace_tag)

    def usage(self) -> Usage:
        """See ``Backend.usage``."""
        return self.accounts.usage()

    def numbers(self) -> Iterator[Number]:
        """See ``Backend.numbers``."""
        yield orphan_number(self.orphans_removed)

    def problem(self) -> str:
        """See ``Backend.problem``."""
        return self._lock.problem() or self._writes.problem(self.directory)

    def stored_bytes(self, size_bytes: int) -> int:
        """See ``Backend.stored_bytes``."""
        return stored_bytes_of(size_bytes)

    def free_bytes(self) -> int | None:
        """See ``Backend.free_bytes``."""
        return free_bytes(self.directory) + self.spares.total_bytes

    def resize(self, capacity_bytes: int, *, floor_bytes: int) -> None:
        """See ``Backend.resize``. Files take space as they come, so this is a number."""
        if capacity_bytes < CAPACITY_BYTES_MIN:
            raise ConfigError("capacity_bytes", capacity_bytes, f"at least {CAPACITY_BYTES_MIN}")
        require_possible(self.directory, capacity_bytes)
        if not self.accounts.set_capacity(capacity_bytes):
            raise BackendError("more is stored than the smaller capacity holds: delete first")
        self.spares.bytes_max = capacity_bytes // SPARE_SHARE
        self._give_up_spares(self.spares.bytes_max)

    def fit_spares(self) -> None:
        """Remove the spare files for which the capacity has no room: others may have taken it."""
        self._give_up_spares(self.accounts.reserve(0) or 0)

    def close(self) -> None:
        """See ``Backend.close``. Waits for puts and deletes in progress. Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with contextlib.ExitStack() as stack:
            for lock in self._key_locks:
                stack.enter_context(lock)
            if not self._is_closed:
                self._is_closed = True
                self._helpers.close()
                self.writer.close()
                self._lock.release()

    def _lock_of(self, key: bytes) -> threading.Lock:
        """Whoever holds it is the only one in this process that changes the file of this key; ``close`` takes all."""
        return self._key_locks[xxhash.xxh3_64_intdigest(key) % KEY_LOCKS]

    def _require_open(self) -> None:
        if self._is_closed:
            raise BackendError("the backend is closed")

    def _reserve(self, stored_bytes: int) -> bool:
        """Set space aside; spare files give way to it."""
        left_bytes = self.accounts.reserve(stored_bytes)
        if left_bytes is None:
            return False
        self._give_up_spares(left_bytes)
        return True

    def _give_up_spares(self, bytes_max: int) -> None:
        if self.spares.total_bytes > bytes_max:
            self._files.unlink(self.spares.give_up(bytes_max))


def _outcome_of(error: OSError) -> Outcome:
    return Outcome.NO_SPACE if error.errno in OUT_OF_SPACE_ERRNOS else Outcome.IO_ERROR
