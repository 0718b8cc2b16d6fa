"""Memory that hicached can map: it refuses what could shrink under it."""

from __future__ import annotations

import fcntl
import mmap
import os

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def sealed_memory(name: str, size_bytes: int) -> tuple[int, mmap.mmap]:
    """A memfd of exactly ``size_bytes``, all of them there, that nobody can resize, and its mapping. The descriptor is
    the caller's. Raises OSError where there is no memory for it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd, mmap.mmap(fd, size_bytes)
    except BaseException:
        os.close(fd)
        raise
