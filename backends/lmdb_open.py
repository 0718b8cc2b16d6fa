"""Opening an LMDB store: the lock, the marker, what a power loss means, and the index as it is found."""

from __future__ import annotations

import logging
import os
from array import array
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from hicache.backends.base import StoredObject
from hicache.backends.lmdb_env import DATA_NAME, LOCK_NAME, LmdbEnvironment
from hicache.backends.lmdb_layout import decode_record
from hicache.backends.lock import DirectoryLock
from hicache.backends.marker import StoreMarker, current_boot_id, new_marker, read_marker, write_marker
from hicache.errors import BackendError

STORE_KIND = "lmdb"
STORE_VERSION = 1

logger = logging.getLogger(__name__)


class StoreFiles:
    """The files of an open store: held, marked as in use, and given back in order. A forked child has none of them."""

    def __init__(self, directory: Path, lock: DirectoryLock, marker: StoreMarker, env: LmdbEnvironment) -> None:
        self.env = env
        self.marker = marker
        self._directory = directory
        self._lock = lock
        self._pid = os.getpid()

    def mark_in_use(self) -> None:
        """From here on the map changes: only a clean close, or the page cache of this boot, keeps what is in it."""
        in_use = msgspec.structs.replace(self.marker, boot_id=current_boot_id(), is_clean=False)
        if in_use != self.marker:
            write_marker(self._directory, in_use)
            self.marker = in_use

    def abandon(self) -> None:
        """Let go of a store that could not be opened all the way: it is as it was found."""
        self.env.close(sync_budget_s=0)
        self._lock.release()

    def close(self, *, sync_budget_s: float) -> None:
        """Close the map, note whether all of it reached the medium, release the directory."""
        if os.getpid() != self._pid:
            return
        try:
            is_synced = self.env.close(sync_budget_s=sync_budget_s)
            if is_synced:
                write_marker(self._directory, msgspec.structs.replace(self.marker, is_clean=True))
            else:
                logger.warning("%s was not flushed within %s s: a reboot empties it", self._directory, sync_budget_s)
        except OSError as error:
            logger.warning("%s could not be marked as closed, a reboot empties it: %s", self._directory, error)
        finally:
            self._lock.release()


def open_files(directory: Path, *, map_bytes: int, capacity_bytes: int, floor_bytes: int = 0) -> StoreFiles:
    """Take the directory and open its map, emptied first when a power loss has made its content worthless.

    However opening ends, by an error or a kill, a store that could be trusted before can be trusted afterwards: nothing
    in the map or the marker changes before ``StoreFiles.mark_in_use``.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = DirectoryLock(directory)
    try:
        found = read_marker(directory, kind=STORE_KIND, version=STORE_VERSION)
        marker = found if found is not None and _is_trusted(directory, found) else _start_empty(directory)
        env = LmdbEnvironment(directory, map_bytes=map_bytes, capacity_bytes=capacity_bytes, floor_bytes=floor_bytes)
    except BaseException:
        lock.release()
        raise
    return StoreFiles(directory, lock, marker, env)


def _is_trusted(directory: Path, found: StoreMarker) -> bool:
    """Whether the map is what its last writer left.

    LMDB without sync keeps its promises only while the page cache lives: after a power loss any page may be old.
    """
    data = directory / DATA_NAME
    if not data.exists():
        return False
    if not found.survived():
        logger.warning("%s starts empty: the machine went down before it was closed", directory)
        return False
    if not found.is_clean:
        logger.info(
            "%s was not closed: opening it as it was left. If that kills the process, remove %s", directory, data
        )
    return True


def _start_empty(directory: Path) -> StoreMarker:
    for name in (DATA_NAME, LOCK_NAME):
        (directory / name).unlink(missing_ok=True)
    marker = new_marker(STORE_KIND, STORE_VERSION)
    write_marker(directory, marker)  # before the map: a directory without a marker is not ours
    return marker


@dataclass(frozen=True, slots=True)
class LoadedIndex:
    """What the index of a store says when it is opened."""

    stored: list[StoredObject]
    payload_bytes: int
    chunk_ids: NDArray[np.uint32]  # in use, each once


def load_index(files: StoreFiles) -> LoadedIndex:
    """Read the index, the only place that says what is stored, and mark the store as in use; damaged records go.

    Raises BackendError when they cannot be removed.
    """
    loaded, damaged = _read_index(files.env)
    files.mark_in_use()
    if not damaged:
        return loaded
    logger.warning("removed %d damaged index records", len(damaged))
    with files.env.write() as txn:
        for key in damaged:
            txn.delete(key, db=files.env.index)
    loaded, damaged = _read_index(files.env)
    if damaged:
        raise BackendError(f"{len(damaged)} damaged index records cannot be removed")
    return loaded


def _read_index(env: LmdbEnvironment) -> tuple[LoadedIndex, list[bytes]]:
    """What the index says, and the keys of its damaged records."""
    stored: list[StoredObject] = []
    payload_bytes = 0
    ids = array("I")
    damaged: list[bytes] = []
    with env.read() as txn, txn.cursor(env.index) as cursor:
        for raw_key, raw in cursor:
            key = bytes(raw_key)
            record = decode_record(key, bytes(raw))
            if record is None:
                damaged.append(key)
                continue
            stored.append(StoredObject(key, record.size_bytes, record.used_at_s))
            payload_bytes += record.size_bytes
            ids.extend(record.chunk_ids)
    chunk_ids = np.frombuffer(ids, dtype=np.uint32)
    if len(np.unique(chunk_ids)) != len(chunk_ids):
        damaged += _overlapping(env)
    return LoadedIndex(stored, payload_bytes, chunk_ids), damaged


def _overlapping(env: LmdbEnvironment) -> list[bytes]:
    """Keys whose chunks an earlier record claims too."""
    seen: set[int] = set()
    overlapping: list[bytes] = []
    with env.read() as txn, txn.cursor(env.index) as cursor:
        for raw_key, raw in cursor:
            key = bytes(raw_key)
            record = decode_record(key, bytes(raw))
            if record is None:
                continue
            if seen.isdisjoint(record.chunk_ids):
                seen.update(record.chunk_ids)
            else:
                overlapping.append(key)
    return overlapping
