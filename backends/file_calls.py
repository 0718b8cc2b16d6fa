"""The system calls that move bytes of the file backend, in one place so that each can be made to fail."""

from __future__ import annotations

import errno
import os


class FileCalls:
    """Plain calls. All raise OSError."""

    def create(self, path: str) -> int:
        """A new file, open for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def reopen(self, path: str) -> int:
        """An existing file, open for writing over."""
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def open(self, path: str) -> int:
        """An existing file, open for reading."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def write(self, fd: int, part: memoryview | bytes, offset: int) -> int:
        """Like pwrite: may write less than asked for."""
        return os.pwrite(fd, part, offset)

    def read(self, fd: int, target: memoryview, offset: int) -> int:
        """Like pread into ``target``: may read less than asked for, 0 at the end."""
        return os.preadv(fd, [target], offset)

    def close(self, fd: int) -> None:
        """Some file systems report a failed write only here."""
        os.close(fd)

    def rename(self, source: str, target: str) -> None:
        """Atomic: ``target`` names the old file or the new one, whole."""
        os.rename(source, target)

    def remove(self, path: str) -> None:
        """Remove a file's name."""
        os.unlink(path)


def write_all(calls: FileCalls, fd: int, part: memoryview | bytes, offset: int) -> None:
    """Write every byte of ``part`` or raise OSError."""
    rest = memoryview(part)
    while rest:
        written = calls.write(fd, rest, offset)
        if written <= 0:
            raise OSError(errno.EIO, f"write returned {written}")
        rest = rest[written:]
        offset += written


def read_all(calls: FileCalls, fd: int, target: memoryview, offset: int) -> bool:
    """Fill ``target``; False when the file ends before."""
    while target:
        count = calls.read(fd, target, offset)
        if count == 0:
            return False
        target = target[count:]
        offset += count
    return True
