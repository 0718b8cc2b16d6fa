"""Space on a file system: asked for, and taken before it is used."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from hicache.backends.progress import tell_progress
from hicache.errors import ConfigError

OUT_OF_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_BLOCK_BYTES = 512  # the unit of st_blocks
PIECE_BYTES = 1 << 30  # taken at a time
_SPARE_BYTES = 1 << 20  # left for the small files beside


def free_bytes(path: Path) -> int:
    """What an unprivileged process may still write on the file system of ``path``."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def why_full(path: Path) -> str:
    """What a full file system does not say by itself: that it is not bytes that it has run out of."""
    stat = os.statvfs(path)
    if stat.f_files and stat.f_favail == 0 and stat.f_bavail:
        return f"; there is space, but all of its {stat.f_files} inodes are taken (df -i)"
    return ""


def total_bytes(path: Path) -> int:
    """The size of the file system of ``path``."""
    stat = os.statvfs(path)
    return stat.f_blocks * stat.f_frsize


def require_space(wanted: Mapping[Path, int], *, capacity_bytes: int, floor_bytes: int = 0) -> None:
    """Raise ConfigError unless the files of one directory can have so many bytes and leave the floor free.

    What they have already counts.
    """
    missing = {path: size_bytes - _allocated_bytes(path) for path, size_bytes in wanted.items()}
    missing_bytes = sum(max(0, count) for count in missing.values())
    largest = max(missing, key=lambda path: missing[path])
    free = free_bytes(largest.parent)
    if missing_bytes > 0 and missing_bytes + _SPARE_BYTES > free - floor_bytes:
        needed = missing_bytes + _SPARE_BYTES
        raise no_room(largest, capacity_bytes, missing_bytes=needed, free=free, floor_bytes=floor_bytes)


def _allocated_bytes(path: Path) -> int:
    return os.stat(path).st_blocks * _BLOCK_BYTES if path.exists() else 0


def require_floor(directory: Path, floor_bytes: int) -> None:
    """Raise ConfigError when the file system could not hold a byte beside the floor, so that nothing is ever stored."""
    total = total_bytes(directory)
    if floor_bytes >= total:
        expected = f"less than {total}, the size of the file system of {directory}: nothing could be stored there"
        raise ConfigError("free_space_floor_bytes", floor_bytes, expected)


def take_space(path: Path, size_bytes: int, *, capacity_bytes: int, restore_bytes: int) -> None:
    """Give ``path`` all its blocks up to ``size_bytes``; content stays.

    A map over a file with holes is a SIGBUS on a full disk. Raises ConfigError, and cuts the file back to
    ``restore_bytes``, when the file system (or a quota, or a file size limit) does not give that much.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            for start in range(0, size_bytes, PIECE_BYTES):  # a file system that has to write zeros takes long
                os.posix_fallocate(fd, start, min(PIECE_BYTES, size_bytes - start))
                tell_progress(0)
        except OSError as error:
            if error.errno not in OUT_OF_SPACE_ERRNOS:
                raise
            os.ftruncate(fd, restore_bytes)
            raise no_room(path, capacity_bytes, missing_bytes=size_bytes, free=free_bytes(path.parent)) from error
    finally:
        os.close(fd)


def no_room(path: Path, capacity_bytes: int, *, missing_bytes: int, free: int, floor_bytes: int = 0) -> ConfigError:
    """The error that says what ``path`` needs and what there is."""
    kept = f", of which free_space_floor_bytes keeps {floor_bytes}" if floor_bytes else ""
    return ConfigError(
        "capacity_bytes",
        capacity_bytes,
        f"a capacity that fits: {path} needs {missing_bytes} bytes more and the file system lets it have {free}{kept}; "
        "lower capacity_bytes, free space, or choose another path",
    )


def require_possible(directory: Path, capacity_bytes: int) -> None:
    """Raise ConfigError for more than the file system could ever hold.

    What is free today is no condition: the free space floor of the store looks after that while it runs.
    """
    total = total_bytes(directory)
    if capacity_bytes > total:
        expected = (
            f"at most {total}, the size of the file system of {directory}; lower capacity_bytes, or choose another path"
        )
        raise ConfigError("capacity_bytes", capacity_bytes, expected)
