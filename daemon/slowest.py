"""The slowest objects of the last hour, in bounded memory."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from hicache.tenancy import TENANT_BYTES

KEPT_PER_PERIOD = 16
PERIOD_S = 300.0
PERIODS_MAX = 12  # an hour


@dataclass(frozen=True, slots=True)
class SlowMove:
    """Objects that the store moved together, and the largest of them."""

    at_s: float  # since the epoch
    kind: str  # get, put
    seconds: float
    key: bytes  # physical
    size_bytes: int
    objects: int

    @property
    def tenant_digest(self) -> bytes:
        """Whose it is."""
        return self.key[:TENANT_BYTES]

    @property
    def short_key(self) -> str:
        """A name for the object that tells nothing about what is in it."""
        return blake2b(self.key, digest_size=6).hexdigest()


@dataclass(slots=True)
class _Period:
    begun_s: float
    moves: list[SlowMove] = field(default_factory=list)  # the slowest first


class Slowest:
    """Keeps the slowest KEPT_PER_PERIOD of each of the last periods. Thread-safe."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._periods: deque[_Period] = deque(maxlen=PERIODS_MAX)

    def note(self, kind: str, seconds: float, sizes: Callable[[], list[tuple[int, bytes]]]) -> None:
        """``sizes`` gives size and physical key of each object; only called for what is slow enough to be kept."""
        with self._lock:
            now_s = self._clock()
            if not self._periods or now_s - self._periods[-1].begun_s >= PERIOD_S:
                self._periods.append(_Period(now_s))
            moves = self._periods[-1].moves
            if len(moves) == KEPT_PER_PERIOD and seconds <= moves[-1].seconds:
                return
            objects = sizes()
            size_bytes, key = max(objects)
            moves.append(SlowMove(self._wall_clock(), kind, seconds, key, size_bytes, len(objects)))
            moves.sort(key=lambda move: -move.seconds)
            del moves[KEPT_PER_PERIOD:]

    def slowest(self, count: int) -> list[SlowMove]:
        """The slowest of the last hour, the slowest first."""
        with self._lock:
            since_s = self._clock() - PERIODS_MAX * PERIOD_S
            moves = [move for period in self._periods if period.begun_s > since_s for move in period.moves]
        return sorted(moves, key=lambda move: -move.seconds)[:count]
