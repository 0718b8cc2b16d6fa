"""System calls of the file backend that fail, are counted, or stand still."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

from hicache.backends.file_calls import FileCalls


def _half(parts: list[memoryview]) -> list[memoryview]:
    """About half of the bytes, from the start."""
    first = [part[: max(1, len(part) // 2)] for part in parts]
    return first[:1]


class FailingCalls(FileCalls):
    """Fails a certain call of a kind, counted from 0."""

    def __init__(self) -> None:
        self.faults: dict[str, int] = {}
        self.error = errno.EIO
        self.is_short = False  # writes half of what it is asked for, instead of failing
        self.seen: list[str] = []

    def arm(self, call: str, at: int, error: int = errno.EIO, *, is_short: bool = False) -> None:
        self.faults = {call: at}
        self.error, self.is_short = error, is_short
        self.seen.clear()

    def arm_too(self, call: str, at: int) -> None:
        self.faults[call] = at

    def _meet(self, call: str) -> bool:
        is_hit = self.faults.get(call) == self.seen.count(call)
        self.seen.append(call)
        if is_hit and not self.is_short:
            raise OSError(self.error, os.strerror(self.error))
        return is_hit

    def create(self, path: str) -> int:
        self._meet("create")
        return super().create(path)

    def write(self, fd: int, parts: list[memoryview], offset: int) -> int:
        is_hit = self._meet("write")
        return super().write(fd, _half(parts) if is_hit else parts, offset)

    def close(self, fd: int) -> None:
        super().close(fd)
        self._meet("close")

    def rename(self, source: str, target: str) -> None:
        self._meet("rename")
        super().rename(source, target)

    def read(self, fd: int, targets: list[memoryview], offset: int) -> int:
        is_hit = self._meet("read")
        return super().read(fd, _half(targets) if is_hit else targets, offset)

    def open(self, path: str) -> int:
        self._meet("open")
        return super().open(path)

    def remove(self, path: str) -> None:
        self._meet("remove")
        super().remove(path)

    def sync_folder(self, path: str) -> None:
        self._meet("sync_folder")
        super().sync_folder(path)


class CountedCalls(FileCalls):
    """Fails the call number ``at`` of those that a put makes, whichever it is."""

    CALLS = ("claim", "create", "reopen", "write", "sync", "close", "make_folder", "rename", "link", "sync_folder")

    def __init__(self) -> None:
        self.at: int | None = None
        self.error = errno.EIO
        self.made: list[str] = []

    def __getattribute__(self, name: str) -> Any:  # Any: a method of the base class, or a field
        value = super().__getattribute__(name)
        if name not in CountedCalls.CALLS:
            return value

        def call(*arguments: Any) -> Any:
            is_hit = self.at == len(self.made)
            self.made.append(name)
            if is_hit and name != "close":
                raise OSError(self.error, os.strerror(self.error))
            result = value(*arguments)
            if is_hit:
                raise OSError(self.error, os.strerror(self.error))
            return result

        return call


class BlockingCalls(FileCalls):
    """Stops in the second call of a kind until told to go on."""

    def __init__(self, call: str) -> None:
        self.call = call
        self.count = 0
        self.is_midway = threading.Event()
        self.go_on = threading.Event()

    def _meet(self, call: str) -> None:
        self.count += call == self.call
        if call == self.call and self.count == 2:
            self.is_midway.set()
            assert self.go_on.wait(timeout=30)

    def write(self, fd: int, parts: list[memoryview], offset: int) -> int:
        self._meet("write")
        return super().write(fd, parts, offset)

    def read(self, fd: int, targets: list[memoryview], offset: int) -> int:
        self._meet("read")
        return super().read(fd, targets, offset)
