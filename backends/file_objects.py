"""Reading, writing and removing the file of one object."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator

from hicache.backends.base import GetItem, PutItem
from hicache.backends.file_calls import FileCalls, read_all, write_all
from hicache.backends.file_layout import HEADER_BYTES, ObjectHeader, decode_header
from hicache.backends.file_spares import SpareFiles
from hicache.backends.file_writer import WriterFolder
from hicache.checksum import payload_hasher
from hicache.outcome import Outcome

SEGMENT_BYTES = 1 << 20  # hashed while in cache; larger ones leave it, smaller ones cost calls


class ObjectFiles:
    """Thread-safe, except that calls that change one path must not overlap.

    A file is made in the writer's folder and renamed when it is whole. That of a removed object goes back there, unless
    somebody reads it just now, and is written again by the next object of its size.
    """

    def __init__(self, calls: FileCalls, writer: WriterFolder, spares: SpareFiles) -> None:
        self._calls = calls
        self._writer = writer
        self._spares = spares
        self._reading_lock = threading.Lock()
        self._reading: Counter[str] = Counter()

    def write(self, path: str, item: PutItem) -> None:
        """Make the whole file, then give it its name. Raises OSError, and then there is no trace of it."""
        spare = self._spares.take(item.payload.nbytes)
        unfinished = spare or self._writer.new_path()
        fd = self._calls.create(unfinished) if spare is None else self._calls.reopen(unfinished)
        try:
            try:
                self._write_object(fd, item)
            finally:
                self._calls.close(fd)
            self._publish(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._calls.remove(unfinished)
            raise

    def _write_object(self, fd: int, item: PutItem) -> None:
        raw = item.payload.cast("B")
        hasher = payload_hasher(item.key)
        is_one_call = len(raw) <= SEGMENT_BYTES
        for start in range(0, len(raw), SEGMENT_BYTES):
            part = raw[start : start + SEGMENT_BYTES]
            hasher.update(part)
            if not is_one_call:
                write_all(self._calls, fd, [part], HEADER_BYTES + start)
        header = memoryview(ObjectHeader(item.key, len(raw), hasher.intdigest()).encode())
        write_all(self._calls, fd, [header, raw] if is_one_call else [header], 0)

    def _publish(self, unfinished: str, path: str) -> None:
        try:
            self._calls.rename(unfinished, path)
        except FileNotFoundError:  # the first object of its folder
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._calls.rename(unfinished, path)

    def read(self, path: str, item: GetItem) -> tuple[Outcome, int]:
        """Fill the target and verify it; the outcome, and the inode of a file that is CORRUPT. Raises OSError."""
        with self._kept_while_reading(path):
            fd = self._calls.open(path)
            try:
                outcome = self._read_object(fd, item)
                return outcome, os.fstat(fd).st_ino if outcome is Outcome.CORRUPT else 0
            finally:
                with contextlib.suppress(OSError):
                    self._calls.close(fd)

    def _read_object(self, fd: int, item: GetItem) -> Outcome:
        raw = memoryview(bytearray(HEADER_BYTES))
        target = item.target.cast("B")
        is_whole = read_all(self._calls, fd, [raw, target[:SEGMENT_BYTES]], 0)
        header = decode_header(raw)
        if header is None or header.key != item.key:
            return Outcome.CORRUPT
        if header.size_bytes != len(target):
            is_whole = os.fstat(fd).st_size == HEADER_BYTES + header.size_bytes
            return Outcome.SIZE_MISMATCH if is_whole else Outcome.CORRUPT
        hasher = payload_hasher(item.key)
        hasher.update(target[:SEGMENT_BYTES])
        for start in range(SEGMENT_BYTES, len(target), SEGMENT_BYTES):
            part = target[start : start + SEGMENT_BYTES]
            is_whole = is_whole and read_all(self._calls, fd, [part], HEADER_BYTES + start)
            hasher.update(part)
        return Outcome.OK if is_whole and hasher.intdigest() == header.checksum else Outcome.CORRUPT

    @contextlib.contextmanager
    def _kept_while_reading(self, path: str) -> Iterator[None]:
        """Until the end, whoever removes the file leaves its bytes alone."""
        with self._reading_lock:
            self._reading[path] += 1
        try:
            yield
        finally:
            with self._reading_lock:
                self._reading[path] -= 1
                if not self._reading[path]:
                    del self._reading[path]

    def remove(self, path: str, *, inode: int | None = None) -> int | None:
        """Remove the file, if it has this inode; the payload bytes it held, None when it is not there.

        Raises OSError when it can be neither moved aside nor unlinked.
        """
        try:
            stat = os.stat(path)
            if inode is not None and stat.st_ino != inode:
                return None
            if not self._recycle(path, stat.st_size - HEADER_BYTES):
                self._calls.remove(path)
        except FileNotFoundError:
            return None
        return payload_bytes_of(stat.st_size)

    def _recycle(self, path: str, size_bytes: int) -> bool:
        """Move a file aside to be written again; False when it is being read, damaged, or cannot be moved."""
        if size_bytes <= 0:
            return False
        with contextlib.suppress(OSError), self._reading_lock:
            if path in self._reading:
                return False
            spare = self._writer.new_path()
            self._calls.rename(path, spare)
            self.unlink(self._spares.add(spare, size_bytes))
            return True
        return False

    def unlink(self, paths: list[str]) -> None:
        """Remove spare files, as far as that works."""
        for path in paths:
            with contextlib.suppress(OSError):
                self._calls.remove(path)


def payload_bytes_of(file_bytes: int) -> int:
    """The payload in a file of this size; a damaged file has less than a header."""
    return max(file_bytes - HEADER_BYTES, 0)
