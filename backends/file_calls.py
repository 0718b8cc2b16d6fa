"""The system calls that move bytes of the file backend, in one place so that each can be made to fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping


class FileCalls:
    """Plain calls. All raise OSError."""

    def create(self, path: str) -> int:
        """A new file, open for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def claim(self, path: str) -> int:
        """A new file, to hold a lock on and to write to."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def reopen(self, path: str) -> int:
        """An existing file, open for writing over."""
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def open(self, path: str) -> int:
        """An existing file, open for reading."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def open_direct(self, path: str) -> int:
        """An existing file, to be read past the page cache in whole blocks."""
        return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)

    def write(self, fd: int, parts: list[memoryview], offset: int) -> int:
        """Like pwritev: may write less than asked for."""
        return os.pwritev(fd, parts, offset)

    def read(self, fd: int, targets: list[memoryview], offset: int) -> int:
        """Like preadv: may read less than asked for, 0 at the end."""
        return os.preadv(fd, targets, offset)

    def read_cached(self, fd: int, targets: list[memoryview], offset: int) -> int:
        """Like ``read``, of what is in memory. Raises BlockingIOError when nothing at ``offset`` is."""
        return os.preadv(fd, targets, offset, os.RWF_NOWAIT)

    def sync(self, fd: int) -> None:
        """The content of a file is on the medium when this returns."""
        os.fdatasync(fd)

    def sync_folder(self, path: str) -> None:
        """The names in a folder are on the medium when this returns."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self, fd: int) -> None:
        """Some file systems report a failed write only here."""
        os.close(fd)

    def rename(self, source: str, target: str) -> None:
        """Atomic: ``target`` names the old file or the new one, whole."""
        os.rename(source, target)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name. Raises FileExistsError when that is taken: no two processes get it."""
        os.link(source, target)

    def make_folder(self, path: str) -> None:
        """Make a folder, unless it exists."""
        os.makedirs(path, exist_ok=True)

    def remove(self, path: str) -> None:
        """Remove a file's name."""
        os.unlink(path)


def sync_names(calls: FileCalls, paths: Mapping[int, str]) -> Iterator[tuple[int, OSError]]:
    """Have the names of these files on the medium; tells those for which that failed.

    Each folder once: the first commits all of them, so that the others find little to do.
    """
    changed: dict[str, list[int]] = {}
    for position, path in paths.items():
        changed.setdefault(os.path.dirname(path), []).append(position)
    for folder, positions in changed.items():
        try:
            calls.sync_folder(folder)
        except OSError as error:
            for position in positions:
                yield position, error


def write_all(calls: FileCalls, fd: int, parts: list[memoryview], offset: int) -> None:
    """Write every byte of ``parts``, one behind the other, or raise OSError."""
    while parts:
        written = calls.write(fd, parts, offset)
        if written <= 0:
            raise OSError(errno.EIO, f"write returned {written}")
        parts = _behind(parts, written)
        offset += written


def read_all(calls: FileCalls, fd: int, targets: list[memoryview], offset: int) -> bool:
    """Fill ``targets``, one behind the other; False when the file ends before."""
    while targets:
        count = calls.read(fd, targets, offset)
        if count == 0:
            return False
        targets = _behind(targets, count)
        offset += count
    return True


def _behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of ``parts`` behind their first ``count`` bytes."""
    for position, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[position + 1 :]]
        count -= len(part)
    return []
