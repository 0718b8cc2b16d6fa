"""Which store nodes did not answer lately."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

COOL_DOWN_S = 10.0  # as long as a master keeps a silent node by default; then it forgets the node's objects
SUSPECTS_MAX = 1024


class SuspectNodes:
    """Endpoints whose objects are not asked for until the cool-down has passed. Thread-safe."""

    def __init__(self, *, cool_down_s: float = COOL_DOWN_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._cool_down_s = cool_down_s
        self._clock = clock
        self._lock = threading.Lock()
        self._until_s: dict[str, float] = {}

    def add(self, endpoints: Iterable[str]) -> None:
        """These did not answer. Beyond SUSPECTS_MAX the newest are not remembered."""
        with self._lock:
            until_s = self._clock() + self._cool_down_s
            for endpoint in endpoints:
                if endpoint in self._until_s or len(self._until_s) < SUSPECTS_MAX:
                    self._until_s[endpoint] = until_s

    def current(self) -> frozenset[str]:
        """Those whose cool-down has not passed."""
        if not self._until_s:
            return frozenset()
        with self._lock:
            now_s = self._clock()
            self._until_s = {endpoint: until_s for endpoint, until_s in self._until_s.items() if until_s > now_s}
            return frozenset(self._until_s)
