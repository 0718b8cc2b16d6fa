"""The file backend over a folder that several daemons use at a time, on one machine or on a shared file system."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from hicache.backends.base import GetItem, Number, PutItem, StoredBatch, Usage, WalkedObject, is_storable_key
from hicache.backends.file_accounts import Accounts, Counts
from hicache.backends.file_calls import FileCalls
from hicache.backends.file_layout import stored_bytes_of
from hicache.backends.file_objects import payload_bytes_of
from hicache.backends.file_peers import Peers
from hicache.backends.file_settings import FileSettings
from hicache.backends.file_store import FileBackend
from hicache.backends.file_writer import orphan_number, remove_dead_writers
from hicache.backends.marker import MARKER_NAME
from hicache.backends.space import require_floor
from hicache.errors import ConfigError
from hicache.notices import Notices
from hicache.outcome import Outcome
from hicache.workers import QueueFull, Workers

PROTECTED_S = 10.0  # from eviction by anybody, after a lookup
TOUCH_AFTER_S = 10.0  # a get writes the time of use when the one on the medium is older
UPKEEP_INTERVAL_S = 10.0
SETTLE_INTERVAL_S = 600.0  # programs that clean up tell nobody what they have removed
SETTLE_REST = 10  # times as long as the last walk took, until one that is not because of a lost writer
UPKEEP_CLOSE_S = 5.0  # what a close waits for a walk
SAMPLE_FILES = 1024  # among which the least recently used are looked for; all files, when there are fewer
SAMPLE_SHARE = 4  # one part in so many of a sample may go
EVICTION_LOCK = "eviction.lock"


class SharedFileBackend:
    """Implements ``SharedBackend``: asked for everything, since others store and remove, and evicting by itself.

    ``capacity_bytes`` is that of the folder, whoever fills it: give all daemons the same. Each tells what it has added
    and removed, and believes what the others tell; a walk over the files settles it when the store is opened, and again
    after a writer has gone. What all are writing at a time may exceed the capacity. One that must make room removes the
    least recently used of a sample, by the times of use on the medium: the modification time of a file. Its access time
    is until when nobody evicts it; clocks of machines must agree within seconds for that.
    """

    name = "file"

    def __init__(
        self,
        files: FileBackend,
        *,
        watermarks: tuple[float, float],
        floor_bytes: int,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._unfinished = files.directory / "unfinished"
        self._peers = Peers(self._unfinished, files.writer, clock=clock)
        self._accounts = Accounts(files.accounts.capacity_bytes, others=self._peers.others)
        files.accounts = self._accounts
        self._watermarks = watermarks
        self._set_marks()
        self._floor_bytes = floor_bytes
        self._wall_clock = wall_clock
        self._clock = clock
        self._notices = Notices(logging.getLogger(__name__))
        self._random = random.Random(os.getpid())
        self._evicting = threading.Lock()
        self._upkeep = Workers("hicache-file-upkeep", threads=1, queue_max=1)
        self._pid = os.getpid()
        self._is_closed = False
        self._is_settled = False
        self._settle()
        self._kept_up_at_s = clock()
        self.orphans_removed = files.orphans_removed
        self.store_id = files.store_id

    def _set_marks(self) -> None:
        self._low_bytes, self._high_bytes = (int(self._accounts.capacity_bytes * mark) for mark in self._watermarks)

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        capacity_bytes: int,
        settings: FileSettings,
        watermarks: tuple[float, float] = (0.90, 0.95),
        floor_bytes: int = 0,
        calls: FileCalls | None = None,
    ) -> Self:
        """Open the folder beside others; ``watermarks``: low, high. Raises what ``FileBackend.open`` raises."""
        low, high = watermarks
        if not 0 < low < high <= 1:
            raise ConfigError("low_watermark", low, f"more than 0 and less than high_watermark = {high}, at most 1")
        files = FileBackend.open(directory, capacity_bytes=capacity_bytes, settings=settings, calls=calls)
        try:
            _require_links(directory)
            require_floor(directory, floor_bytes)
            return cls(files, watermarks=watermarks, floor_bytes=floor_bytes)
        except BaseException:
            files.close()
            raise

    def resize(self, capacity_bytes: int, *, floor_bytes: int) -> None:
        """See ``Backend.resize``. Evicts for a smaller one; the other daemons have to be told, too."""
        low_bytes = int(capacity_bytes * self._watermarks[0])
        if self._above(capacity_bytes, 0) > 0:
            self._evict(lambda: self._above(low_bytes, 0))
        self._files.resize(capacity_bytes, floor_bytes=floor_bytes)
        self._set_marks()

    def numbers(self) -> Iterator[Number]:
        """See ``Backend.numbers``."""
        yield orphan_number(self.orphans_removed)

    # -- what is asked ------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> list[Outcome]:
        """See ``SharedBackend.find``: protected for PROTECTED_S. One stat a key, and a small write now and then."""
        return [self._find_one(key) for key in keys]

    def _find_one(self, key: bytes) -> Outcome:
        if not is_storable_key(key):
            return Outcome.ABSENT
        path = self._files.tree.path_of(key)
        now_s = self._wall_clock()
        try:
            if os.stat(path).st_atime < now_s + PROTECTED_S / 2:
                os.utime(path, (now_s + PROTECTED_S, now_s))
        except FileNotFoundError:
            return Outcome.ABSENT
        except OSError as error:
            self._notices.warning("find", "a lookup failed: %s", error)
            return Outcome.UNAVAILABLE
        return Outcome.OK

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See ``Backend.contains``."""
        return self._files.contains(keys)

    def get_into(self, items: Sequence[GetItem]) -> list[Outcome]:
        """See ``Backend.get_into``. Counts as use."""
        outcomes = self._files.get_into(items)
        now_s = self._wall_clock()
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome is Outcome.OK:
                self._note_use(self._files.tree.path_of(item.key), now_s)
        if Outcome.CORRUPT in outcomes:
            self._report()
        return outcomes

    def _note_use(self, path: str, now_s: float) -> None:
        with contextlib.suppress(OSError):  # gone, or on a medium that is read-only
            stat = os.stat(path)
            if stat.st_mtime < now_s - TOUCH_AFTER_S:
                os.utime(path, (max(stat.st_atime, now_s), now_s))

    def scan(self) -> Iterator[StoredBatch]:
        """See ``Backend.scan``."""
        return self._files.scan()

    def forget(self, gone: Sequence[tuple[bytes, int]]) -> None:
        """Nothing: who keeps no index has nothing to be wrong about."""

    def touch(self, used: Sequence[tuple[bytes, float]]) -> None:
        """See ``Backend.touch``."""
        self._files.touch(used)

    def walk(self, *, after: bytes = b"", tenant: bytes = b"") -> Iterator[list[WalkedObject]]:
        """See ``Backend.walk``."""
        return self._files.walk(after=after, tenant=tenant)

    def usage(self) -> Usage:
        """Of the whole folder, by what all writers have told."""
        self._keep_up_when_due()
        return self._accounts.usage()

    def problem(self) -> str:
        """See ``Backend.problem``."""
        return self._files.problem()

    def stored_bytes(self, size_bytes: int) -> int:
        """See ``Backend.stored_bytes``."""
        return stored_bytes_of(size_bytes)

    def free_bytes(self) -> int | None:
        """See ``Backend.free_bytes``."""
        return self._files.free_bytes()

    # -- what changes the folder --------------------------------------------------------------------------------------

    def put(self, items: Sequence[PutItem]) -> list[Outcome]:
        """See ``Backend.put``. Evicts at the high watermark down to the low one."""
        outcomes: list[Outcome] = []
        for group in self._groups(items):
            if self._make_room(group):
                outcomes += self._put_group(group)
            else:
                outcomes += [Outcome.NO_SPACE] * len(group)
        self._report()
        self._keep_up_when_due()
        return outcomes

    def _groups(self, items: Sequence[PutItem]) -> Iterator[list[PutItem]]:
        """Consecutive items that fit between the watermarks together, or one larger one."""
        bytes_max = max(self._accounts.capacity_bytes - self._low_bytes, self._accounts.capacity_bytes // 20)
        group: list[PutItem] = []
        total_bytes = 0
        for item in items:
            stored_bytes = stored_bytes_of(item.payload.nbytes)
            if group and total_bytes + stored_bytes > bytes_max:
                yield group
                group, total_bytes = [], 0
            group.append(item)
            total_bytes += stored_bytes
        if group:
            yield group

    def _put_group(self, group: list[PutItem]) -> list[Outcome]:
        """Once more for what did not fit, after more eviction."""
        outcomes = self._files.put(group)
        full = [position for position, outcome in enumerate(outcomes) if outcome is Outcome.NO_SPACE]
        short_bytes = sum(stored_bytes_of(group[position].payload.nbytes) for position in full)
        if 0 < short_bytes <= self._accounts.capacity_bytes and self._evict(lambda: short_bytes) > 0:
            for position, outcome in zip(full, self._files.put([group[at] for at in full]), strict=True):
                outcomes[position] = outcome
        return outcomes

    def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        """See ``Backend.delete``."""
        outcomes = self._files.delete(keys)
        self._report()
        return outcomes

    def close(self) -> None:
        """See ``Backend.close``. Nothing in a forked child."""
        if os.getpid() != self._pid or self._is_closed:
            return
        self._is_closed = True
        if self._upkeep.close(timeout_s=UPKEEP_CLOSE_S):
            self._report()
        self._files.close()

    # -- room ---------------------------------------------------------------------------------------------------------

    def _make_room(self, group: list[PutItem]) -> bool:
        """False when the free space floor forbids the put. When nothing may go, the put says what fits."""
        need_bytes = sum(stored_bytes_of(item.payload.nbytes) for item in group)
        if self._above(self._high_bytes, need_bytes) > 0:  # room is made for what is not there only
            present = self._files.contains([item.key for item in group])
            missing = [item for item, is_present in zip(group, present, strict=True) if not is_present]
            need_bytes = sum(stored_bytes_of(item.payload.nbytes) for item in missing)
        if not 0 < need_bytes <= self._accounts.capacity_bytes:
            return True
        if self._above(self._high_bytes, need_bytes) > 0:
            self._evict(lambda: self._above(max(self._low_bytes, need_bytes), need_bytes))
        if self._below_floor(need_bytes) > 0:
            self._evict(lambda: self._below_floor(need_bytes))
        return self._below_floor(need_bytes) <= 0

    def _above(self, limit_bytes: int, need_bytes: int) -> int:
        return self._accounts.total().stored_bytes + need_bytes - limit_bytes

    def _below_floor(self, need_bytes: int) -> int:
        if self._floor_bytes == 0:
            return 0
        return self._floor_bytes + need_bytes - (self._files.free_bytes() or 0)

    def _evict(self, shortfall: Callable[[], int]) -> int:
        """Remove the least recently used, sample by sample, until as many bytes are free as ``shortfall()`` says when
        its turn comes. Returns how many that were."""
        freed_bytes = 0
        with self._evicting, self._evicting_here():
            enough_bytes = shortfall()
            folders = self._files.tree.folders()
            self._random.shuffle(folders)
            while freed_bytes < enough_bytes and folders:
                freed_bytes += self._evict_from(self._sample(folders), enough_bytes - freed_bytes)
            self._report()
        return freed_bytes

    @contextlib.contextmanager
    def _evicting_here(self) -> Iterator[None]:
        """Not while another process evicts, so that two do not free the same shortfall; unless that one is stuck."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                fd = os.open(self._unfinished / EVICTION_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, fd)
                if not _lock_within(fd, timeout_s=1.0):
                    self._notices.warning("evict", "another process holds the eviction lock: going on without it")
            self._peers.refreshed()
            yield

    def _sample(self, folders: list[str]) -> list[tuple[float, int, bytes]]:
        """Time of use, size and key of SAMPLE_FILES or more that may go, from folders that are taken off the list."""
        now_s = self._wall_clock()
        sample: list[tuple[float, int, bytes]] = []
        while folders and len(sample) < SAMPLE_FILES:
            for key, stat in self._files.tree.in_folder(folders.pop()):
                if stat.st_atime <= now_s or stat.st_atime > now_s + 2 * PROTECTED_S:  # or a clock that is far off
                    sample.append((stat.st_mtime, payload_bytes_of(stat.st_size), key))
        if folders:
            sample.sort()
            del sample[max(1, len(sample) // SAMPLE_SHARE) :]
        return sorted(sample)

    def _evict_from(self, sample: list[tuple[float, int, bytes]], enough_bytes: int) -> int:
        freed_bytes = 0
        for _, size_bytes, key in sample:
            if freed_bytes >= enough_bytes:
                break
            if self._files.delete([key]) == [Outcome.OK]:
                freed_bytes += stored_bytes_of(size_bytes)
        return freed_bytes

    # -- upkeep -------------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: the others hear it with the next one
            self._files.writer.report(self._accounts.own, self._files.spares.total_bytes)

    def _keep_up_when_due(self) -> None:
        if self._clock() - self._kept_up_at_s >= UPKEEP_INTERVAL_S:
            self._kept_up_at_s = self._clock()
            with contextlib.suppress(QueueFull):
                self._upkeep.submit(self.keep_up)

    def keep_up(self) -> None:
        """Remove what dead writers left and spare files that others have no room for; count again after one has gone.

        A thread of the backend does it, every UPKEEP_INTERVAL_S in which there are puts or questions for the usage.
        """
        self.orphans_removed += remove_dead_writers(self._unfinished)
        self._peers.refreshed()
        is_old = self._clock() - self._settled_at_s >= SETTLE_INTERVAL_S
        is_due = (is_old or not self._is_settled) and self._clock() >= self._settle_again_at_s
        if self._peers.take_lost() or is_due:
            self._settle()
        self._files.fit_spares()
        self._report()

    def _settle(self) -> None:
        """Count everything. What changes meanwhile makes it inexact, and then it is done again, after a rest: in a
        folder that is never quiet it is never exact."""
        self._settled_at_s = self._clock()
        before = self._changes()
        found = self._files.count()
        after = self._changes()
        self._accounts.settle(found, after)
        self._is_settled = before == after
        ended_s = self._clock()
        self._settle_again_at_s = ended_s + SETTLE_REST * (ended_s - self._settled_at_s) - UPKEEP_INTERVAL_S

    def _changes(self) -> Counts:
        return self._accounts.own.plus(self._peers.refreshed()[0])


def _lock_within(fd: int, *, timeout_s: float) -> bool:
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end_s:
                return False
            time.sleep(0.002)
        else:
            return True


def _require_links(directory: Path) -> None:
    """Raise ConfigError on a file system without hard links: they make one of two puts of a key the first."""
    second = directory / f"hicache.link.{secrets.token_hex(4)}"
    try:
        os.link(directory / MARKER_NAME, second)
    except OSError as error:
        raise ConfigError("file_shared", True, f"a file system with hard links ({error})") from error
    second.unlink(missing_ok=True)
