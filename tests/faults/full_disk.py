"""A disk that is full from one call on, or at one call: for everything that this process does below one folder."""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest

from hicache.backends.lmdb_env import LmdbEnvironment, Transaction

NEVER = 1 << 60


class FullDisk:
    """Counts the calls that need space; those with a number in ``full`` find none."""

    def __init__(self, folder: Path, full: range = range(NEVER, NEVER)) -> None:
        self._folder = str(folder.resolve())
        self._full = full
        self._has_folders = False
        self.calls = 0

    @contextmanager
    def in_place(self) -> Iterator[FullDisk]:
        """Everything that makes a name, or gives a file more bytes, is counted. Threads included."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("write", "pwrite", "pwritev", "posix_fallocate", "ftruncate"):
                patch.setattr(os, name, self._failing(getattr(os, name), self._is_descriptor_below))
            patch.setattr(os, "mkdir", self._failing(os.mkdir, self._is_counted_folder))
            for name in ("rename", "replace"):
                patch.setattr(os, name, self._failing(getattr(os, name), self._is_below))
            patch.setattr(os, "open", self._failing(os.open, self._is_new_file))
            patch.setattr(builtins, "open", self._failing(builtins.open, self._is_opened_for_writing))
            bind = self._failing(socket.socket.bind, lambda _, address, *rest: self._is_below(address))
            patch.setattr(socket.socket, "bind", bind, raising=False)
            patch.setattr(LmdbEnvironment, "write", self._filling(LmdbEnvironment.write))
            yield self

    def require_space(self) -> bool:
        """Count one call; whether it finds space."""
        self.calls += 1
        return self.calls - 1 not in self._full

    def _failing(self, real: Callable[..., Any], needs_space: Callable[..., bool]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:  # Any: whatever the real one takes and gives
            if needs_space(*arguments, **options) and not self.require_space():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **options)

        return call

    def _is_below(self, path: object, *_: object, **__: object) -> bool:
        return isinstance(path, str | os.PathLike) and os.path.realpath(path).startswith(self._folder)

    def _is_counted_folder(self, path: object, *_: object, **__: object) -> bool:
        """The folders of objects, which are made together, count as the first of them."""
        if not self._is_below(path):
            return False
        is_of_objects = Path(str(path)).parent.name == "objects"
        is_first = not (is_of_objects and self._has_folders)
        self._has_folders |= is_of_objects
        return is_first

    def _is_descriptor_below(self, descriptor: int, *_: object, **__: object) -> bool:
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/self/fd/{descriptor}").startswith(self._folder)
        return False

    def _is_new_file(self, path: object, flags: int, *_: object, **__: object) -> bool:
        return bool(flags & os.O_CREAT) and self._is_below(path) and not os.path.exists(str(path))

    def _is_opened_for_writing(self, path: object, mode: str = "r", *_: object, **__: object) -> bool:
        return mode[0] in "wax" and self._is_below(path)

    def _filling(self, real: Callable[[LmdbEnvironment], Any]) -> Callable[[LmdbEnvironment], Any]:
        """Transactions of LMDB whose puts and deletes find the map full, or whose commit does."""

        @contextmanager
        def write(env: LmdbEnvironment) -> Iterator[Transaction]:
            with real(env) as txn:
                yield _FillingTransaction(txn, self)  # type: ignore[misc]  # it does what the backend calls
                if not self.require_space():
                    raise lmdb.MapFullError("at the commit")

        return write


class _FillingTransaction:
    def __init__(self, txn: Transaction, disk: FullDisk) -> None:
        self._txn = txn
        self._disk = disk

    def put(self, *arguments: Any, **options: Any) -> Any:  # Any: passed on
        self._require()
        return self._txn.put(*arguments, **options)

    def delete(self, *arguments: Any, **options: Any) -> Any:  # Any: passed on
        self._require()
        return self._txn.delete(*arguments, **options)

    def get(self, *arguments: Any, **options: Any) -> Any:  # Any: passed on
        return self._txn.get(*arguments, **options)

    def _require(self) -> None:
        if not self._disk.require_space():
            raise lmdb.MapFullError("no page left")
