"""Reading, writing and removing the file of one object."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hicache.backends.base import UNKNOWN_TAG, GetItem, PutItem
from hicache.backends.file_calls import FileCalls, read_all, write_all
from hicache.backends.file_direct import DirectReader
from hicache.backends.file_layout import FAN_OUT, HEADER_BYTES, ObjectHeader, decode_header
from hicache.backends.file_spares import SpareFiles
from hicache.backends.file_writer import WriterFolder
from hicache.checksum import payload_hasher
from hicache.outcome import Outcome

if TYPE_CHECKING:
    from hicache.backends.sealing import Opener, Sealer, Sealing

# Hashed while in cache: larger ones leave it, smaller ones cost calls, and those that write are the dearer ones.
WRITE_SEGMENT_BYTES = 1 << 20
READ_SEGMENT_BYTES = 512 << 10


class ObjectFiles:
    """Thread-safe, except that calls of this process that change one path must not overlap.

    A file is made in the writer's folder and gets its name when it is whole. That of a removed object goes back there,
    unless this process reads it just now, and is written again by the next object of its size. Another process that
    reads it meanwhile finds bytes that do not verify.
    """

    def __init__(
        self,
        calls: FileCalls,
        writer: WriterFolder,
        spares: SpareFiles,
        *,
        is_shared: bool = False,
        is_synced: bool = False,
        is_direct: bool = False,
    ) -> None:
        """``is_shared``: other processes publish, too. ``is_synced``: content is on the medium before it has a name."""
        self._calls = calls
        self._writer = writer
        self._spares = spares
        self.sealing: Sealing | None = None  # set before the first object, where objects are encrypted
        self._is_shared = is_shared
        self._is_synced = is_synced
        self._direct = DirectReader(calls) if is_direct else None
        self._local = threading.local()
        self._reading_lock = threading.Lock()
        self._reading: Counter[str] = Counter()

    def write(self, path: str, item: PutItem) -> None:
        """Make the whole file, then give it its name. Raises OSError, and then there is no trace of it.

        FileExistsError: another process was faster.
        """
        unfinished, fd = self._open_unfinished(item.payload.nbytes)
        try:
            try:
                self._write_object(fd, item)
                if self._is_synced:
                    self._calls.sync(fd)
            finally:
                self._calls.close(fd)
            self._publish(unfinished, path)
        except BaseException:
            self.unlink([unfinished])
            raise

    def _open_unfinished(self, size_bytes: int) -> tuple[str, int]:
        """A file to be written, and its name: a spare one of this size if there is any."""
        while (spare := self._spares.take(size_bytes)) is not None:
            try:
                return spare, self._calls.reopen(spare)
            except FileNotFoundError:  # somebody has cleaned up
                continue
            except OSError:
                self.unlink([spare])
                raise
        unfinished = self._writer.new_path()
        try:
            return unfinished, self._calls.create(unfinished)
        except FileNotFoundError:
            self._writer.restore()
            unfinished = self._writer.new_path()
            return unfinished, self._calls.create(unfinished)

    def _write_object(self, fd: int, item: PutItem) -> None:
        raw = item.payload.cast("B")
        pen = self._pen(item.key, len(raw))
        is_one_call = len(raw) <= WRITE_SEGMENT_BYTES
        part = raw
        for start in range(0, len(raw), WRITE_SEGMENT_BYTES):
            part = pen.stored(raw[start : start + WRITE_SEGMENT_BYTES])
            if not is_one_call:
                write_all(self._calls, fd, [part], HEADER_BYTES + start)
        checksum, seal = pen.end()
        header = memoryview(ObjectHeader(item.key, len(raw), checksum, item.namespace_tag, seal).encode())
        write_all(self._calls, fd, [header, part] if is_one_call else [header], 0)

    def _pen(self, key: bytes, size_bytes: int) -> _Pen | _SealedPen:
        if self.sealing is None:
            return _Pen(key)
        if not hasattr(self._local, "buffer"):  # of each thread: pages that exist cost a fraction of new ones
            self._local.buffer = memoryview(bytearray(WRITE_SEGMENT_BYTES))
        return _SealedPen(self.sealing.sealer(key, size_bytes), self._local.buffer)

    def _publish(self, unfinished: str, path: str) -> None:
        try:
            self._name(unfinished, path)
        except FileNotFoundError:  # the first object of all, or somebody has cleaned up
            folder = os.path.dirname(path)
            self._calls.make_folder(folder)
            self._make_folders(os.path.dirname(folder))
            self._name(unfinished, path)

    def _make_folders(self, root: str) -> None:
        """All of them, so that from then on an object takes no more inodes than the eviction of another gives back."""
        with contextlib.suppress(OSError):
            for number in range(FAN_OUT):
                os.makedirs(f"{root}/{number:02x}", exist_ok=True)

    def _name(self, unfinished: str, path: str) -> None:
        """A rename would replace what another process has put there meanwhile; a link tells."""
        if not self._is_shared:
            self._calls.rename(unfinished, path)
            return
        self._calls.link(unfinished, path)
        self.unlink([unfinished])

    def read(self, path: str, item: GetItem) -> tuple[Outcome, int]:
        """Fill the target and verify it; the outcome, and the inode of a file that is CORRUPT. Raises OSError."""
        with self._kept_while_reading(path):
            fd = self._calls.open(path)
            try:
                outcome = self._read_object(path, fd, item)
                return outcome, os.fstat(fd).st_ino if outcome is Outcome.CORRUPT else 0
            finally:
                self._close(fd)

    def _read_object(self, path: str, fd: int, item: GetItem) -> Outcome:
        raw = memoryview(bytearray(HEADER_BYTES))
        target = item.target.cast("B")
        segments = [target[start : start + READ_SEGMENT_BYTES] for start in range(0, len(target), READ_SEGMENT_BYTES)]
        is_cold = self._direct is not None and not self._is_cached(fd, raw)
        ahead = segments if is_cold else segments[:1]
        is_whole = self._read_cold(path, fd, [raw, *ahead]) if is_cold else read_all(self._calls, fd, [raw, *ahead], 0)
        header = decode_header(raw)
        if header is None or header.key != item.key:
            return Outcome.CORRUPT
        if header.size_bytes != len(target):
            is_whole = os.fstat(fd).st_size == HEADER_BYTES + header.size_bytes
            return Outcome.SIZE_MISMATCH if is_whole else Outcome.CORRUPT
        check = _check(self.sealing, item.key, header)
        if check is None:
            return Outcome.CORRUPT
        for number, segment in enumerate(segments):
            if number >= len(ahead):
                offset = HEADER_BYTES + number * READ_SEGMENT_BYTES
                is_whole = is_whole and read_all(self._calls, fd, [segment], offset)
            check.read(segment)
        return Outcome.OK if is_whole and check.is_right() else Outcome.CORRUPT

    def namespace_tag(self, path: str, key: bytes) -> int | None:
        """What the header says; UNKNOWN_TAG where it cannot be read, or is another key's; None: the file is gone."""
        raw = memoryview(bytearray(HEADER_BYTES))
        try:
            fd = self._calls.open(path)
            try:
                header = decode_header(raw) if read_all(self._calls, fd, [raw], 0) else None
            finally:
                self._close(fd)
        except FileNotFoundError:
            return None
        except OSError:
            return UNKNOWN_TAG
        return header.namespace_tag if header is not None and header.key == key else UNKNOWN_TAG

    def _is_cached(self, fd: int, header: memoryview) -> bool:
        """Whether the page cache has the beginning of the file; file systems that do not tell count as if it had."""
        try:
            self._calls.read_cached(fd, [header], 0)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _read_cold(self, path: str, fd: int, targets: list[memoryview]) -> bool:
        """Past the page cache, or through it where the file system does nothing else."""
        assert self._direct is not None
        try:
            direct = self._calls.open_direct(path)
        except OSError:
            return read_all(self._calls, fd, targets, 0)
        try:
            return self._direct.read_all(direct, targets, 0)
        except OSError as error:
            if error.errno != errno.EINVAL:  # what file systems say that open such a file and then want other blocks
                raise
            return read_all(self._calls, fd, targets, 0)
        finally:
            self._close(direct)

    def _close(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            self._calls.close(fd)

    @contextlib.contextmanager
    def _kept_while_reading(self, path: str) -> Iterator[None]:
        """Until the end, whoever removes the file in this process leaves its bytes alone."""
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
            aside = self._move_aside(path)
            stat = os.stat(aside or path)
            if inode is not None and stat.st_ino != inode:
                self._put_back(aside, path)
                return None
            if aside is None:
                self._calls.remove(path)
        except FileNotFoundError:
            return None
        size_bytes = payload_bytes_of(stat.st_size)
        if aside is not None:
            self.unlink(self._spares.add(aside, size_bytes) if size_bytes else [aside])
        return size_bytes

    def _move_aside(self, path: str) -> str | None:
        """Move a file to where it is written again; None when it is being read, or cannot be moved.

        Of several processes one moves it: the others do not find it any more. Raises FileNotFoundError.
        """
        with self._reading_lock:
            if path in self._reading:
                return None
            try:
                aside = self._writer.new_path()
                self._calls.rename(path, aside)
            except FileNotFoundError:
                if not os.path.exists(path):
                    raise
                return None  # it is the writer's folder that is not there
            except OSError:
                return None
            return aside

    def _put_back(self, aside: str | None, path: str) -> None:
        """It was another file than the one to remove; if there is a third one by now, that one stays."""
        if aside is not None:
            with contextlib.suppress(FileExistsError):
                self._calls.link(aside, path)
            self.unlink([aside])

    def unlink(self, paths: list[str]) -> None:
        """Remove files of the writer's folder, as far as that works."""
        for path in paths:
            with contextlib.suppress(OSError):
                self._calls.remove(path)


class _Pen:
    """What becomes of the parts of one object that is written."""

    def __init__(self, key: bytes) -> None:
        self._hasher = payload_hasher(key)

    def stored(self, part: memoryview) -> memoryview:
        """What is to be written of it."""
        self._hasher.update(part)
        return part

    def end(self) -> tuple[int, bytes]:
        """Checksum and seal, behind the last part."""
        return self._hasher.intdigest(), b""


class _SealedPen:
    """A ``_Pen`` that encrypts."""

    def __init__(self, sealer: Sealer, buffer: memoryview) -> None:
        """Parts are encrypted into ``buffer``, one after another."""
        self._sealer = sealer
        self._buffer = buffer

    def stored(self, part: memoryview) -> memoryview:
        encrypted = self._buffer[: len(part)]
        self._sealer.encrypt_into(part, encrypted)
        return encrypted

    def end(self) -> tuple[int, bytes]:
        return 0, self._sealer.seal()


class _Check:
    """What becomes of the parts of one object that is read."""

    def __init__(self, key: bytes, checksum: int) -> None:
        self._hasher = payload_hasher(key)
        self._checksum = checksum

    def read(self, part: memoryview) -> None:
        """The next part, in its target and in cache."""
        self._hasher.update(part)

    def is_right(self) -> bool:
        """Behind the last part."""
        return self._hasher.intdigest() == self._checksum


class _SealedCheck:
    """A ``_Check`` that decrypts where the part lies."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener

    def read(self, part: memoryview) -> None:
        self._opener.decrypt_into(part, part)

    def is_right(self) -> bool:
        return self._opener.is_genuine()


def _check(sealing: Sealing | None, key: bytes, header: ObjectHeader) -> _Check | _SealedCheck | None:
    """None: the object cannot be read."""
    if sealing is None:
        return None if header.seal else _Check(key, header.checksum)
    opener = sealing.opener(key, header.size_bytes, header.seal)
    return None if opener is None else _SealedCheck(opener)


def payload_bytes_of(file_bytes: int) -> int:
    """The payload in a file of this size; a damaged file has less than a header."""
    return max(file_bytes - HEADER_BYTES, 0)
