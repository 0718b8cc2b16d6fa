"""Opening an LMDB store: the lock, the marker, what a power loss means, and the index as it is found."""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from hicache.backends.lmdb_env import DATA_NAME, LOCK_NAME, LmdbEnvironment
from hicache.backends.lmdb_layout import decode_record
from hicache.backends.lock import DirectoryLock
from hicache.backends.marker import StoreMarker, current_boot_id, new_marker, read_marker, write_marker
from hicache.errors import ConfigError

STORE_KIND = "lmdb"
STORE_VERSION = 1
OPEN_ATTEMPTS_MAX = 3

logger = logging.getLogger(__name__)


class StoreFiles:
    """The files of an open store: held, marked as in use, and given back in order."""

    def __init__(self, directory: Path, lock: DirectoryLock, marker: StoreMarker, env: LmdbEnvironment) -> None:
        self.env = env
        self.marker = marker
        self._directory = directory
        self._lock = lock

    def mark_opened(self) -> None:
        """The store was opened all the way."""
        self.marker = msgspec.structs.replace(self.marker, open_attempts=0)
        write_marker(self._directory, self.marker)

    def abandon(self) -> None:
        """Let go of a store that could not be opened all the way."""
        self.env.close(sync_budget_s=0)
        self._lock.release()

    def close(self, *, sync_budget_s: float) -> None:
        """Close the map, note whether all of it reached the medium, release the directory."""
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


def open_files(directory: Path, *, map_bytes: int, capacity_bytes: int) -> StoreFiles:
    """Take the directory and open its map, emptied when its content cannot be trusted."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = DirectoryLock(directory)
    try:
        found = read_marker(directory, kind=STORE_KIND, version=STORE_VERSION)
        marker = _trusted_marker(directory, found)
        write_marker(directory, marker)  # from here on it is not clean
        try:
            env = LmdbEnvironment(directory, map_bytes=map_bytes, capacity_bytes=capacity_bytes)
        except ConfigError:
            write_marker(directory, marker if found is None else found)  # not the fault of the content
            raise
    except BaseException:
        lock.release()
        raise
    return StoreFiles(directory, lock, marker, env)


def _trusted_marker(directory: Path, found: StoreMarker | None) -> StoreMarker:
    """The marker to open the store with. Empties a store that lost what it was writing, or that kills its openers.

    LMDB without sync keeps its promises only while the page cache lives: after a power loss any page may be old.
    """
    if found is not None and found.survived() and found.open_attempts < OPEN_ATTEMPTS_MAX:
        return msgspec.structs.replace(
            found, boot_id=current_boot_id(), is_clean=False, open_attempts=found.open_attempts + 1
        )
    if found is not None:
        reason = "the machine went down before it was closed" if not found.survived() else "it could not be opened"
        logger.warning("%s starts empty: %s", directory, reason)
    for name in (DATA_NAME, LOCK_NAME):
        (directory / name).unlink(missing_ok=True)
    return msgspec.structs.replace(new_marker(STORE_KIND, STORE_VERSION), open_attempts=1)


@dataclass(frozen=True, slots=True)
class LoadedIndex:
    """What the index of a store says when it is opened."""

    objects: int
    payload_bytes: int
    chunk_ids: NDArray[np.uint32]  # in use, each once


def load_index(env: LmdbEnvironment) -> LoadedIndex:
    """Count everything by the index, the only place that says what is stored; damaged records are removed."""
    objects = payload_bytes = 0
    ids = array("I")
    bad: list[bytes] = []
    with env.read() as txn, txn.cursor(env.index) as cursor:
        for raw_key, raw in cursor:
            key = bytes(raw_key)
            record = decode_record(key, bytes(raw))
            if record is None:
                bad.append(key)
                continue
            objects += 1
            payload_bytes += record.size_bytes
            ids.extend(record.chunk_ids)
    chunk_ids = np.frombuffer(ids, dtype=np.uint32)
    if len(np.unique(chunk_ids)) != len(chunk_ids):
        bad += _overlapping(env)
    if not bad:
        return LoadedIndex(objects, payload_bytes, chunk_ids)
    logger.warning("removed %d damaged index records", len(bad))
    with env.write() as txn:
        for key in bad:
            txn.delete(key, db=env.index)
    return load_index(env)


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
