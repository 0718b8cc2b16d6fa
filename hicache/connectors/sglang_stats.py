"""How much was moved, and how fast, until SGLang asks."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

TRANSFERS_MAX = 1024  # the oldest are forgotten where SGLang does not ask

GB = 1e9


@dataclass(frozen=True, slots=True)
class Moved:
    """Pages of each transfer, and the GB/s of those that moved any, as SGLang's ``StorageMetrics`` has them."""

    pages: list[int] = field(default_factory=list)
    gb_per_s: list[float] = field(default_factory=list)


class TransferLog:
    """Transfers of one direction. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transfers: deque[tuple[int, float]] = deque(maxlen=TRANSFERS_MAX)

    def note(self, pages: int, *, page_bytes: int, started_at_s: float) -> None:
        """A transfer of ``pages`` that has just ended; one of none is not counted."""
        if pages:
            elapsed_s = max(time.perf_counter() - started_at_s, 1e-9)
            with self._lock:
                self._transfers.append((pages, pages * page_bytes / elapsed_s / GB))

    def drain(self) -> Moved:
        """What ended since the last call."""
        with self._lock:
            transfers, self._transfers = self._transfers, deque(maxlen=TRANSFERS_MAX)
        return Moved([pages for pages, _ in transfers], [speed for _, speed in transfers])
