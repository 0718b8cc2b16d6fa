"""What the other processes that share a folder have changed, as each tells in the file that it holds its lock on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from hicache.backends.file_accounts import Counts
from hicache.backends.file_writer import ALIVE_SUFFIX, WriterFolder, read_report

POLL_INTERVAL_S = 0.02


class Peers:
    """Thread-safe. What a writer told last still counts when it is gone, since its objects stay."""

    def __init__(self, root: Path, writer: WriterFolder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._writer = writer
        self._clock = clock
        self._lock = threading.Lock()
        self._reports: dict[str, tuple[Counts, int]] = {}
        self._gone = Counts()
        self._has_lost = False
        self._polled_at_s = -POLL_INTERVAL_S

    def others(self) -> tuple[Counts, int]:
        """The changes of all other writers, and the bytes in spare files of those that live. At most as old as
        POLL_INTERVAL_S, and on NFS as the attribute cache of the mount."""
        with self._lock:
            if self._clock() - self._polled_at_s >= POLL_INTERVAL_S:
                self._poll()
            return self._sum()

    def refreshed(self) -> tuple[Counts, int]:
        """The same as of now."""
        with self._lock:
            self._poll()
            return self._sum()

    def take_lost(self) -> bool:
        """Whether a writer went since the last call: its last changes may have been missed."""
        with self._lock:
            has_lost, self._has_lost = self._has_lost, False
            return has_lost

    def _sum(self) -> tuple[Counts, int]:
        changes, spare_bytes = self._gone, 0
        for report, spares in self._reports.values():
            changes = changes.plus(report)
            spare_bytes += spares
        return changes, spare_bytes

    def _poll(self) -> None:
        self._polled_at_s = self._clock()
        present: set[str] = set()
        for alive in self._root.glob(f"*{ALIVE_SUFFIX}"):
            if alive.name == self._writer.alive_name:
                continue
            try:
                self._reports[alive.name] = read_report(alive)
            except FileNotFoundError:
                continue  # gone between the two calls
            except OSError:
                pass  # it lives: what it said last counts until it can be read again
            present.add(alive.name)
        for name in self._reports.keys() - present:
            changes, _ = self._reports.pop(name)
            self._gone = self._gone.plus(changes)
            self._has_lost = True
