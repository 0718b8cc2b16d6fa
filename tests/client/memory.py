"""L2 as a client sees it, small and real: a sealed memfd and its mapping."""

from __future__ import annotations

import fcntl
import mmap
import os


class SmallMemory:
    """Implements SharedMemory. ``is_sealed=False`` makes memory that hicached must not take."""

    def __init__(self, size_bytes: int = 1 << 20, *, is_sealed: bool = True) -> None:
        self.size_bytes = size_bytes
        self.fd: int | None = os.memfd_create("small-l2", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(self.fd, 0, size_bytes)
        if is_sealed:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._mapping = mmap.mmap(self.fd, size_bytes)
        self.buffer = memoryview(self._mapping)

    def close(self) -> None:
        """Unmap; fails with BufferError when a client still holds a slice."""
        self.buffer.release()
        self._mapping.close()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class UnshareableMemory(SmallMemory):
    """Memory whose bytes cannot be handed over: a client has to copy them, or to use streams."""

    def __init__(self, size_bytes: int = 1 << 20) -> None:
        super().__init__(size_bytes)
        assert self.fd is not None
        os.close(self.fd)
        self.fd = None
