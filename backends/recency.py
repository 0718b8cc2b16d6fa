"""Times of use on their way to the medium: remembered, and written in batches far from the hot path."""

from __future__ import annotations

from collections.abc import Iterator

TOUCHES_PENDING_MAX = 1 << 16  # keys whose use is remembered until it is written; more are forgotten
TOUCH_INTERVAL_S = 60.0
_ORDER_S = 1e-6  # apart in one batch, so that it keeps its order


class PendingTouches:
    """Keys used since the last batch, in the order of use. Not thread-safe."""

    def __init__(self, *, now_s: float) -> None:
        self._keys: dict[bytes, None] = {}
        self._taken_at_s = now_s

    def add(self, key: bytes) -> None:
        """``key`` was used now."""
        self._keys.pop(key, None)
        if len(self._keys) < TOUCHES_PENDING_MAX:
            self._keys[key] = None

    def discard(self, key: bytes) -> None:
        """``key`` is gone."""
        self._keys.pop(key, None)

    def is_due(self, *, now_s: float) -> bool:
        """Whether it is time to write a batch."""
        return now_s - self._taken_at_s >= TOUCH_INTERVAL_S or len(self._keys) >= TOUCHES_PENDING_MAX

    def take(self, *, now_s: float, wall_s: float) -> Iterator[tuple[bytes, float]]:
        """Everything pending, for ``Backend.touch``, the last used with the latest time.

        O(1) here, so that it can be called under a lock; the pairs are made as they are consumed.
        """
        keys, self._keys = self._keys, {}
        self._taken_at_s = now_s
        return ((key, wall_s - (len(keys) - number) * _ORDER_S) for number, key in enumerate(keys, start=1))
