"""Memory of an engine that hicached shares: pages move between it and L3 without a copy in between."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hicache.client import DaemonL3
from hicache.connectors.host_pages_holds import OwnedPage
from hicache.l3 import L3Item
from hicache.outcome import Outcome

_MAPS = Path("/proc/self/maps")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory of the engine: mapped and of this size for as long as the HostPages lives.

    With its memfd, hicached shares it where it can. Without, its pages go through staging.
    """

    address: int
    size_bytes: int
    fd: int | None = None

    def has(self, address: int, size_bytes: int) -> bool:
        """Whether ``[address, address + size_bytes)`` lies in it."""
        return self.address <= address and address + size_bytes <= self.address + self.size_bytes


class SharedPool:
    """Implements SharedMemory over a pool. Has a descriptor of its own: the engine may close that of the pool."""

    def __init__(self, pool: Pool, fd: int) -> None:
        """``fd`` becomes its own."""
        self.fd: int | None = fd
        self.size_bytes = pool.size_bytes
        self.buffer = memoryview((ctypes.c_ubyte * pool.size_bytes).from_address(pool.address)).cast("B")

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def share(pool: Pool) -> SharedPool | None:
    """The pool as memory that hicached takes; None, and the reason in the log, where it would not."""
    if pool.fd is None:
        return None
    try:
        fd = fcntl.fcntl(pool.fd, fcntl.F_DUPFD_CLOEXEC, 0)
    except OSError as error:
        _log.warning("the memfd of a host pool cannot be shared (%s): its pages go through staging", error)
        return None
    reason = _why_not(fd, pool)
    if not reason:
        return SharedPool(pool, fd)
    os.close(fd)
    _log.warning(
        "hicached cannot share a host pool of %d bytes, whose pages go through staging: %s", pool.size_bytes, reason
    )
    return None


def _why_not(fd: int, pool: Pool) -> str:
    if not _is_mapped(fd, pool):
        return "its descriptor is not the memory that its pages are in"
    with contextlib.suppress(OSError):  # it can no longer be sealed, or is no memfd
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    try:
        is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        return "its descriptor is not a memfd"
    return "" if is_sealed else "its memfd may shrink, and cannot be sealed against that any more"


def _is_mapped(fd: int, pool: Pool) -> bool:
    """Whether the pool is a mapping of ``fd`` from its first byte on."""
    status = os.fstat(fd)
    if status.st_size < pool.size_bytes:
        return False
    mapped_to = pool.address
    for line in _MAPS.read_text().splitlines():  # in the order of their addresses; one mapping may be several lines
        span, _, offset, device, inode, *_ = line.split()
        start, end = (int(part, 16) for part in span.split("-"))
        if not start <= mapped_to < end or mapped_to >= pool.address + pool.size_bytes:
            continue
        major, minor = (int(part, 16) for part in device.split(":"))
        is_same = int(inode) == status.st_ino and os.makedev(major, minor) == status.st_dev
        if not is_same or int(offset, 16) - start != -pool.address:
            return False
        mapped_to = end
    return mapped_to >= pool.address + pool.size_bytes


class SharedMove:
    """One get or put of pages of a shared pool. Without an answer in time, they are held until there is one."""

    def __init__(self, items: Sequence[L3Item], pages: Sequence[OwnedPage]) -> None:
        """``pages``: which one each item is of."""
        self._items = items
        self._pages = pages
        self._lock = threading.Lock()
        self._outcomes: list[Outcome] | None = None
        self._is_held = False

    def run(self, l3: DaemonL3, *, timeout_s: float, is_get: bool) -> list[Outcome] | None:
        """The outcomes; None when hicached may still touch the pages: they are held."""
        transfer = l3.get if is_get else l3.put
        transfer(self._items, timeout_s=timeout_s, done=self._settle)
        with self._lock:
            if self._outcomes is None:
                self._is_held = True
                for owned in self._pages:
                    owned.holder.hold([owned.page])
            return self._outcomes

    def _settle(self, outcomes: list[Outcome]) -> None:
        with self._lock:
            self._outcomes = outcomes
            is_held, self._is_held = self._is_held, False
        if is_held:
            for owned in self._pages:
                owned.holder.release([owned.page])
