"""The folder in which one writer makes its files, what it tells the others, and the removal of what the dead left."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import secrets
import shutil
import struct
import threading
from pathlib import Path

from hicache.backends.base import Number
from hicache.backends.file_accounts import Counts
from hicache.backends.file_calls import FileCalls
from hicache.backends.forks import forget, keep_from_children
from hicache.backends.lock import names_file

ALIVE_SUFFIX = ".alive"
_WRITER = re.compile(r"[0-9]+-[0-9a-f]{8}")  # the name of a folder
_REPORT = struct.Struct("<qqqq")  # objects, payload and stored bytes added less removed; bytes in spare files


class WriterFolder:
    """``<root>/<writer>/`` for unfinished files, and ``<root>/<writer>.alive``, locked as long as the writer lives.

    The kernel drops the lock with the process, however it dies: that proves that nobody will finish its files. The
    lock exists before the folder does, so there is no moment at which a live writer's folder looks dead. A forked child
    keeps neither the lock nor anything else of this folder.

    Over NFS the lock works between machines unless the mount has ``nolock`` or ``local_lock``.
    """

    def __init__(self, root: Path, calls: FileCalls) -> None:
        """Makes nothing yet: a store opens on a full disk too."""
        self._calls = calls
        self._root = root
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._alive = root
        self._folder = root
        self._numbers = itertools.count()
        self._told = self._told_before = Counts()  # in all, and under names that are gone, which others still count

    def new_path(self) -> str:
        """A name that nobody has used. Raises OSError when there is no room for the folder."""
        with self._lock:
            if self._fd is None:
                self._make()
            return f"{self._folder}/{next(self._numbers)}"

    def restore(self) -> None:
        """Make the folder again, where somebody has removed it: there are programs that clean up old files. Raises
        OSError."""
        with self._lock:
            if self._fd is not None and names_file(self._alive, self._fd):
                self._calls.make_folder(str(self._folder))
                return
            self._let_go()
            self._told_before = self._told
            self._make()

    @property
    def alive_name(self) -> str:
        """The name of its lock file; empty before it has one."""
        return self._alive.name if self._fd is not None else ""

    def report(self, changes: Counts, spare_bytes: int) -> None:
        """Tell the other writers what this one has changed so far. Raises OSError."""
        with self._lock:
            if self._fd is None:
                self._make()
            assert self._fd is not None
            self._told = changes
            os.pwrite(self._fd, _REPORT.pack(*changes.minus(self._told_before), spare_bytes), 0)

    def _make(self) -> None:
        self._calls.make_folder(str(self._root))
        fd, alive = self._claim_name()
        try:
            self._calls.make_folder(str(alive.with_suffix("")))
        except OSError:
            alive.unlink(missing_ok=True)
            os.close(fd)
            raise
        keep_from_children(fd)
        self._fd, self._alive, self._folder = fd, alive, alive.with_suffix("")

    def _claim_name(self) -> tuple[int, Path]:
        while True:
            alive = self._root / f"{os.getpid()}-{secrets.token_hex(4)}{ALIVE_SUFFIX}"
            fd = self._calls.claim(str(alive))
            fcntl.flock(fd, fcntl.LOCK_EX)
            if names_file(alive, fd):  # nobody took it for a dead one before it was locked
                return fd, alive
            os.close(fd)

    def close(self) -> None:
        """Remove the folder with whatever is in it. Idempotent."""
        if self._fd is not None and os.getpid() == self._pid:
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # on a medium that has become read-only, say: the next opener does it
                self._alive.unlink()
            self._let_go()

    def _let_go(self) -> None:
        if self._fd is not None:
            forget(self._fd)
            os.close(self._fd)
            self._fd = None


def read_report(alive: Path) -> tuple[Counts, int]:
    """What a writer has changed so far, and its spare bytes: nothing, when it has not said. Raises OSError."""
    raw = alive.read_bytes()
    if len(raw) < _REPORT.size:
        return Counts(), 0
    *changes, spare_bytes = _REPORT.unpack_from(raw)
    return Counts(*changes), spare_bytes


def remove_dead_writers(root: Path) -> int:
    """Remove the folders of writers that are no more; returns how many unfinished files that were.

    Several processes may do that at the same time, while others write.
    """
    if not root.exists():
        return 0
    alive = set(root.glob(f"*{ALIVE_SUFFIX}"))
    alive |= {path.with_name(path.name + ALIVE_SUFFIX) for path in root.iterdir() if _WRITER.fullmatch(path.name)}
    return sum(_remove_if_dead(path) for path in sorted(alive))


def orphan_number(removed: int) -> Number:
    """So many files that dead writers had not finished were removed here."""
    description = "Files that killed writers had not finished, removed since start and at it."
    return Number("hicache_file_orphans_removed", description, removed, is_counter=True)


def _remove_if_dead(alive: Path) -> int:
    try:
        fd = os.open(alive, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # somebody has cleaned up; a writer that lives makes another folder
        return _remove_folder(alive.with_suffix(""))
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        removed = _remove_folder(alive.with_suffix(""))
        alive.unlink(missing_ok=True)
    except BlockingIOError:
        return 0
    finally:
        os.close(fd)
    return removed


def _remove_folder(folder: Path) -> int:
    """The files in it are counted as they go: a name may belong to an object, too, whose other name stays."""
    if not folder.exists():
        return 0
    count = sum(1 for _ in os.scandir(folder))
    shutil.rmtree(folder, ignore_errors=True)
    return count
