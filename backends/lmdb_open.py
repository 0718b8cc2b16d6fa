"""Opening and closing an LMDB store: the lock, the marker, the space, and what a power loss means."""

from __future__ import annotations

import logging
import mmap
import os
import time
from pathlib import Path

import msgspec

from hicache.backends.lmdb_env import DATA_NAME, LOCK_NAME, LmdbEnvironment
from hicache.backends.lmdb_layout import CHUNK_BYTES, index_map_bytes
from hicache.backends.lmdb_slab import SLAB_NAME, Slab
from hicache.backends.lock import DirectoryLock
from hicache.backends.marker import StoreMarker, current_boot_id, new_marker, read_marker, write_marker
from hicache.backends.space import require_space

STORE_KIND = "lmdb"
STORE_VERSION = 3
READABLE_VERSIONS = (2, 3)  # 2 knows no namespaces
_SYNC_PIECE_BYTES = 64 << 20

logger = logging.getLogger(__name__)


class StoreFiles:
    """The files of an open store: held, marked as in use, and given back in order. A forked child has none of them."""

    def __init__(
        self, directory: Path, lock: DirectoryLock, marker: StoreMarker, env: LmdbEnvironment, slab: Slab
    ) -> None:
        self.env = env
        self.slab = slab
        self.marker = marker
        self.directory = directory
        self._lock = lock
        self._pid = os.getpid()

    def mark_in_use(self) -> None:
        """From here on the map changes: only a clean close, or the page cache of this boot, keeps what is in it."""
        in_use = msgspec.structs.replace(self.marker, version=STORE_VERSION, boot_id=current_boot_id(), is_clean=False)
        if in_use != self.marker:
            write_marker(self.directory, in_use)
            self.marker = in_use

    def problem(self) -> str:
        """Why they are not where they were; empty: they are. What is mapped is served all the same."""
        return self._lock.problem()

    def abandon(self) -> None:
        """Let go of a store that could not be opened all the way: it is as it was found."""
        self.env.close()
        self._lock.release()

    def close(self, *, sync_budget_s: float) -> None:
        """Close the map, note whether all content reached the medium, release the directory.

        No payload may be written any more. Those that are being read meanwhile keep the slab mapped until they are
        done. Raises BackendError when a transaction does not end: then the directory stays taken.
        """
        if os.getpid() != self._pid:
            return
        self.env.close()
        self.slab.close()
        try:
            deadline_s = time.monotonic() + sync_budget_s
            if all(_sync(self.directory / name, deadline_s) for name in (DATA_NAME, SLAB_NAME)):
                write_marker(self.directory, msgspec.structs.replace(self.marker, is_clean=True))
            else:
                logger.warning("%s was not flushed within %s s: a reboot empties it", self.directory, sync_budget_s)
        except OSError as error:
            logger.warning("%s could not be marked as closed, a reboot empties it: %s", self.directory, error)
        finally:
            self._lock.release()


def open_files(directory: Path, *, chunks_max: int, floor_bytes: int = 0, is_sealed: bool = False) -> StoreFiles:
    """Take the directory and open its files, emptied first when a power loss has made its content worthless.

    However opening ends, by an error or a kill, a store that could be trusted before can be trusted afterwards: nothing
    that is stored and no marker changes before ``StoreFiles.mark_in_use``.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = DirectoryLock(directory)
    try:
        found = read_marker(directory, kind=STORE_KIND, versions=READABLE_VERSIONS)
        marker = found if found is not None and _is_trusted(directory, found) else _start_empty(directory)
        capacity_bytes = chunks_max * CHUNK_BYTES
        map_bytes = index_map_bytes(chunks_max, is_sealed=is_sealed)
        wanted = {directory / SLAB_NAME: capacity_bytes, directory / DATA_NAME: map_bytes}
        require_space(wanted, capacity_bytes=capacity_bytes, floor_bytes=floor_bytes)
        slab = Slab(directory / SLAB_NAME, chunks=chunks_max, capacity_bytes=capacity_bytes)
        env = LmdbEnvironment(directory, map_bytes=map_bytes, capacity_bytes=capacity_bytes)
    except BaseException:
        lock.release()
        raise
    return StoreFiles(directory, lock, marker, env, slab)


def _is_trusted(directory: Path, found: StoreMarker) -> bool:
    """Whether index and slab are what their last writer left.

    LMDB without sync keeps its promises only while the page cache lives: after a power loss any page may be old.
    """
    data, slab = directory / DATA_NAME, directory / SLAB_NAME
    for file in (data, slab):
        if not file.exists() or not file.stat().st_size:
            logger.warning("%s starts empty: there is no %s, or nothing in it", directory, file.name)
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
    for name in (DATA_NAME, LOCK_NAME, SLAB_NAME):
        (directory / name).unlink(missing_ok=True)
    marker = new_marker(STORE_KIND, STORE_VERSION)
    write_marker(directory, marker)  # before the map: a directory without a marker is not ours
    return marker


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
