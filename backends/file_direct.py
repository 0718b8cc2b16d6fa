"""Reading past the page cache: when that wins, and through which memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hicache.backends.file_calls import FileCalls
from hicache.backends.file_layout import BLOCK_BYTES
from hicache.memory_limits import total_memory_bytes
from hicache.notices import Notices

BOUNCE_BYTES = 1 << 20
PROBE_BYTES = 16 << 20
WIN_MIN = 1.1  # times the speed of a cold read through the page cache


class DirectReader:
    """Fills targets wherever they lie; what is not made of whole blocks passes through aligned memory. Thread-safe."""

    def __init__(self, calls: FileCalls) -> None:
        self._calls = calls
        self._local = threading.local()

    def read_all(self, fd: int, targets: list[memoryview], offset: int) -> bool:
        """As ``file_calls.read_all``, of a file from ``open_direct``. All targets but the last are whole blocks."""
        for target in targets:
            for start in range(0, len(target), BOUNCE_BYTES):
                if not self._read_part(fd, target[start : start + BOUNCE_BYTES], offset + start):
                    return False
            offset += len(target)
        return True

    def _read_part(self, fd: int, part: memoryview, offset: int) -> bool:
        if is_aligned(part):
            return self._fill(fd, part, len(part), offset)
        bounce = self._bounce()
        blocks = bounce[: -(-len(part) // BLOCK_BYTES) * BLOCK_BYTES]
        if not self._fill(fd, blocks, len(part), offset):
            return False
        part[:] = bounce[: len(part)]
        return True

    def _fill(self, fd: int, blocks: memoryview, needed_bytes: int, offset: int) -> bool:
        """Fill ``blocks`` up to ``needed_bytes`` or more; False when the file ends before."""
        filled = 0
        while filled < needed_bytes:
            count = self._calls.read(fd, [blocks[filled:]], offset + filled)
            filled += count
            if count == 0 or (filled < needed_bytes and filled % BLOCK_BYTES):
                return False
        return True

    def _bounce(self) -> memoryview:
        if not hasattr(self._local, "bounce"):
            self._local.bounce = memoryview(mmap.mmap(-1, BOUNCE_BYTES))
        bounce: memoryview = self._local.bounce
        return bounce


def is_aligned(part: memoryview) -> bool:
    """Whether a medium can write there by itself: whole blocks, from the start of one."""
    if len(part) % BLOCK_BYTES:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(part)) % BLOCK_BYTES == 0


def wins(directory: Path, *, setting: str, capacity_bytes: int, notices: Notices) -> bool:
    """Whether objects that are not in memory are to be read past the page cache.

    ``auto``: when the memory of the machine, or of the container, cannot hold the store, so that what one read brings
    into the page cache pushes out what another would find there, and when a cold read is WIN_MIN times as fast in a
    trial here. The trial writes and reads PROBE_BYTES.
    """
    if setting != "auto" or capacity_bytes <= total_memory_bytes():
        return setting == "on"
    try:
        cached_s, direct_s = _probe(directory)
    except OSError as error:
        notices.warning("direct", "direct reads are off: they could not be tried (%s)", error)
        return False
    return cached_s >= WIN_MIN * direct_s


def _probe(directory: Path) -> tuple[float, float]:
    """Seconds for PROBE_BYTES that no cache holds: through the page cache, and past it."""
    path = directory / f"hicache.probe.{secrets.token_hex(4)}"
    block = mmap.mmap(-1, BOUNCE_BYTES)
    try:
        with path.open("xb") as file:
            for _ in range(PROBE_BYTES // BOUNCE_BYTES):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        calls = FileCalls()
        return min(_read_cold(path, calls.open, block) for _ in range(3)), min(
            _read_cold(path, calls.open_direct, block) for _ in range(3)
        )
    finally:
        path.unlink(missing_ok=True)


def _read_cold(path: Path, opener: Callable[[str], int], block: mmap.mmap) -> float:
    fd = opener(str(path))
    with contextlib.closing(os.fdopen(fd, "rb", buffering=0)):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        start_s = time.perf_counter()
        for offset in range(0, PROBE_BYTES, BOUNCE_BYTES):
            os.preadv(fd, [block], offset)
        return time.perf_counter() - start_s
