"""Ownership of a directory by one live process, or by several that share it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from hicache.backends.forks import forget, keep_from_children
from hicache.errors import StorageInUse

LOCK_NAME = "hicache.lock"
OPENING_NAME = "hicache.opening"
_HOLDER_BYTES_MAX = 4096


class DirectoryLock:
    """Holds ``<directory>/hicache.lock`` until ``release`` or the death of the process, however it comes.

    The lock is an flock, which belongs to the opened file: a second open is refused in this process too, and by
    whatever path the directory is reached (a symbolic link, a relative path). The file names its holder. A forked child
    holds nothing, and has nothing to release.
    """

    def __init__(self, directory: Path, *, is_shared: bool = False) -> None:
        """Alone, or with others that share it. Raises StorageInUse naming a holder's pid and command."""
        self._mode = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        self._path = directory / LOCK_NAME
        self._pid = os.getpid()
        self._fd: int | None = self._acquire(directory)

    def _acquire(self, directory: Path) -> int:
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, self._mode | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(fd, _HOLDER_BYTES_MAX, 0).decode(errors="replace").strip()
                os.close(fd)
                raise StorageInUse(str(directory), holder or "another process") from error
            except OSError:
                os.close(fd)
                raise
            if names_file(self._path, fd):
                keep_from_children(fd)
                _name_holder(fd)
                return fd
            os.close(fd)  # somebody replaced the file between open and flock

    def problem(self) -> str:
        """Why the directory is not what it was when it was locked, for people; empty: it is."""
        directory = self._path.parent
        try:
            if self._fd is None or not names_file(self._path, self._fd):
                return f"{directory} is gone, or another directory is there: was its disk unmounted or replaced?"
            if not os.access(directory, os.W_OK):
                return f"{directory} cannot be written any more: is its file system read-only?"
        except OSError as error:
            return f"{directory} cannot be read: {error.strerror}"
        return ""

    def release(self) -> None:
        """Let go. Idempotent. The file stays: removing it would let two owners lock two files."""
        if self._fd is not None and os.getpid() == self._pid:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            forget(self._fd)
            os.close(self._fd)
            self._fd = None


@contextlib.contextmanager
def opening_alone(directory: Path) -> Iterator[None]:
    """Of those that share a directory, one at a time; waits for the others."""
    fd = os.open(directory / OPENING_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    keep_from_children(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        forget(fd)
        os.close(fd)


def _name_holder(fd: int) -> None:
    """Write who holds the lock; it is held all the same when the disk has no room for that."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {os.getpid()} ({own_command()})\n".encode()[:_HOLDER_BYTES_MAX], 0)


def names_file(path: Path, fd: int) -> bool:
    """Whether ``path`` still names the file opened as ``fd``."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def own_command() -> str:
    """The command line of this process, for people who look for a holder."""
    try:
        raw = Path("/proc/self/cmdline").read_bytes()
    except OSError:
        return "unknown command"
    return " ".join(part.decode(errors="replace") for part in raw.split(b"\0") if part)
