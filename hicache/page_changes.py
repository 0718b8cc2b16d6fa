"""What of pages comes to L2 and L3 and leaves them, for whoever tells routers where a prefix lies."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import NamedTuple

UNTAKEN_MAX = 100_000


class Place(StrEnum):
    """Where pages outlive the engine's own memory."""

    L2 = "l2"
    L3 = "l3"


class PageChange(NamedTuple):
    """One step of the picture of one page."""

    key: bytes
    place: Place
    groups: int  # as a mask: with ``is_there`` all that are there by now, else those that have left
    is_there: bool


class PageChanges:
    """Changes that nobody has taken yet, in order. When nobody takes them, the oldest go, and ``dropped`` counts."""

    def __init__(self) -> None:
        self.dropped = 0
        self._changes: deque[PageChange] = deque(maxlen=UNTAKEN_MAX)

    def add(self, change: PageChange) -> None:
        """O(1)."""
        self.dropped += len(self._changes) == UNTAKEN_MAX
        self._changes.append(change)

    def take(self) -> list[PageChange]:
        """Those since the last call."""
        taken = list(self._changes)
        self._changes.clear()
        return taken
