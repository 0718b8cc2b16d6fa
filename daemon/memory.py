"""Memory of clients, mapped into the daemon: checked so that it can never fault, held while a transfer touches it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog

ALLOCATED_SHARE_MIN = 0.95  # of a memfd must have pages: a little may be missing, such as a tail nobody has touched

_UNMAP_STEP_BYTES = 256 * 1024 * 1024

# Linux fcntl numbers; the fcntl module has them by name, but not on every platform that type checkers look at.
_F_GET_SEALS = 1034
_F_SEAL_SHRINK = 0x0002

log = structlog.get_logger("hicache.daemon.memory")


class RegionRefused(Exception):
    """The memory that a client offered cannot be used safely; the text says why."""


class Region:
    """One mapped memfd. Made and detached in the event loop; ``hold``, ``release`` and slices of ``view`` are for any
    thread.

    Closing rule: ``detach`` refuses new transfers at once; the mapping goes, and ``gone`` is set, only when the last
    transfer that holds the region has ended.
    """

    def __init__(self, region_id: int, mapping: mmap.mmap, *, unmap: Callable[[Callable[[], None]], None]) -> None:
        self.region_id = region_id
        self.size_bytes = len(mapping)
        self.view = memoryview(mapping)
        self.detaching = asyncio.Event()
        self.gone = asyncio.Event()
        self._mapping = mapping
        self._unmap = unmap
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # between ``hold`` and ``detach``
        self._holds = 0

    def hold(self) -> bool:
        """Keeps the mapping until ``release``. False when the region is being detached: do not touch it."""
        with self._lock:
            if self.detaching.is_set():
                return False
            self._holds += 1
            return True

    def release(self) -> None:
        """Ends one hold."""
        with self._lock:
            assert self._holds > 0
            self._holds -= 1
            is_last = self._holds == 0 and self.detaching.is_set()
        if is_last:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends, and its mappings with it
                self._loop.call_soon_threadsafe(self._finish_if_unheld)

    def detach(self) -> None:
        """No new transfers from now on; unmapped when the running ones have ended. Idempotent."""
        with self._lock:
            self.detaching.set()
        self._finish_if_unheld()

    def _finish_if_unheld(self) -> None:
        if self.detaching.is_set() and self._holds == 0 and not self.gone.is_set():
            self.gone.set()
            self._unmap(self._close_mapping)

    def _close_mapping(self) -> None:
        """Blocking: dropping the page tables of a big mapping takes long, and in one call it would hold the GIL."""
        try:
            self.view.release()
            for start in range(0, self.size_bytes, _UNMAP_STEP_BYTES):
                length = min(_UNMAP_STEP_BYTES, self.size_bytes - start)
                self._mapping.madvise(mmap.MADV_DONTNEED, start, length)
            self._mapping.close()
        except (BufferError, OSError) as error:
            # A slice outlived its transfer: nobody touches it any more, and it is unmapped with its last reference.
            log.warning("region not unmapped at once", region=self.region_id, reason=str(error))


@dataclass(frozen=True, slots=True)
class OfferedMemory:
    """A memfd that passed the checks, and how much of it is to be mapped. The descriptor stays its caller's."""

    descriptor: int
    size_bytes: int
    memfd: tuple[int, int]  # which one it is: device and inode


def seals_of(descriptor: int) -> int | None:
    """The seals of a memfd; None for anything else.

    The only question that is safe to ask of a stranger's descriptor: the kernel answers it by itself. Asked for its
    status, or closed, a file of a file system that a client serves (FUSE) holds the caller for as long as it likes.
    """
    try:
        return fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError:
        return None


def check_memory(descriptor: int, size_bytes: int) -> OfferedMemory:
    """Whether ``size_bytes`` of a client's memfd can be mapped safely. Raises RegionRefused.

    Only memory that can never shrink is taken: otherwise its owner could take pages away under a running transfer, and
    the kernel would kill the daemon with SIGBUS. F_SEAL_SHRINK leaves one way open, punching holes: ordinary pages come
    back, at the daemon's cost, but hugetlbfs has none to give when its pool is empty, and faults. So those are refused.
    So is memory without pages: whoever touches a page first pays for it, and that would be the daemon.
    """
    seals = seals_of(descriptor)
    if seals is None:
        raise RegionRefused("the descriptor is not a memfd")
    if not seals & _F_SEAL_SHRINK:
        raise RegionRefused("the memfd is not sealed against shrinking (F_SEAL_SHRINK)")
    # st_blksize would be that of huge pages for ordinary memfds too, where the kernel may give them transparently.
    if os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:
        raise RegionRefused(
            "the memfd is made of reserved huge pages (MFD_HUGETLB), which its owner can take away in spite of its "
            "seals; make it without that flag, and ask for huge pages with madvise(MADV_HUGEPAGE)"
        )
    # From here on st_size can only grow: read it again, after the seal was seen.
    status = os.fstat(descriptor)
    if not 1 <= size_bytes <= status.st_size:
        raise RegionRefused(f"{size_bytes} bytes were announced, the memfd has {status.st_size}")
    allocated_bytes = status.st_blocks * 512
    if allocated_bytes < status.st_size * ALLOCATED_SHARE_MIN:
        raise RegionRefused(
            f"the memfd has pages for {allocated_bytes} of its {status.st_size} bytes: write to every page of it, or "
            "call posix_fallocate, before offering it"
        )
    return OfferedMemory(descriptor, size_bytes, (status.st_dev, status.st_ino))


def map_memory(offered: OfferedMemory) -> mmap.mmap:
    """Maps checked memory for reading and writing. Raises RegionRefused. The descriptor may be closed afterwards."""
    try:
        return mmap.mmap(offered.descriptor, offered.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError, OverflowError) as error:
        raise RegionRefused(f"the memfd cannot be mapped for reading and writing: {error}") from error
