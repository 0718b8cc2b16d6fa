"""The folder in which one writer makes its files, and the removal of what dead writers left in theirs."""

from __future__ import annotations

import fcntl
import itertools
import os
import secrets
import shutil
import threading
from pathlib import Path

from hicache.backends.forks import forget, keep_from_children
from hicache.backends.lock import names_file

_ALIVE_SUFFIX = ".alive"


class WriterFolder:
    """``<root>/<writer>/`` for unfinished files, and ``<root>/<writer>.alive``, locked as long as the writer lives.

    The kernel drops the lock with the process, however it dies: that proves that nobody will finish its files. The
    lock exists before the folder does, so there is no moment at which a live writer's folder looks dead. A forked child
    keeps neither the lock nor anything else of this folder.
    """

    def __init__(self, root: Path) -> None:
        """Makes nothing yet: a store opens on a full disk too."""
        self._root = root
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._alive = root
        self._folder = root
        self._numbers = itertools.count()

    def new_path(self) -> str:
        """A name that nobody has used. Raises OSError when there is no room for the folder."""
        with self._lock:
            if self._fd is None:
                self._make()
        return f"{self._folder}/{next(self._numbers)}"

    def _make(self) -> None:
        self._root.mkdir(exist_ok=True)
        fd, alive = _claim_name(self._root)
        try:
            alive.with_suffix("").mkdir()
        except OSError:
            alive.unlink(missing_ok=True)
            os.close(fd)
            raise
        keep_from_children(fd)
        self._fd, self._alive, self._folder = fd, alive, alive.with_suffix("")

    def close(self) -> None:
        """Remove the folder with whatever is in it. Idempotent."""
        if self._fd is not None and os.getpid() == self._pid:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._alive.unlink(missing_ok=True)
            forget(self._fd)
            os.close(self._fd)
            self._fd = None


def _claim_name(root: Path) -> tuple[int, Path]:
    while True:
        alive = root / f"{os.getpid()}-{secrets.token_hex(4)}{_ALIVE_SUFFIX}"
        fd = os.open(alive, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if names_file(alive, fd):  # nobody took it for a dead one before it was locked
            return fd, alive
        os.close(fd)


def remove_dead_writers(root: Path) -> int:
    """Remove the folders of writers that are no more; returns how many unfinished files that were."""
    if not root.exists():
        return 0
    removed = 0
    for alive in sorted(root.glob(f"*{_ALIVE_SUFFIX}")):
        fd = os.open(alive, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            removed += _remove_folder(alive.with_suffix(""))
            alive.unlink(missing_ok=True)
        finally:
            os.close(fd)
    return removed


def _remove_folder(folder: Path) -> int:
    if not folder.exists():
        return 0
    count = sum(1 for _ in os.scandir(folder))
    shutil.rmtree(folder)
    return count
