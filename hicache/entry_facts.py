"""What eviction policies are told of the entries of one group."""

from __future__ import annotations

from typing import Protocol

from hicache.node import Entry
from hicache.policies.facts import EvictionFacts
from hicache.spec import CacheSpec, StateGroup

_DEPTH_BITS = 24


class Clock(Protocol):
    """Tells the time."""

    now_s: float


class EntryFacts:
    """See ``Describe``."""

    def __init__(self, spec: CacheSpec, group: int, clock: Clock) -> None:
        self._is_path = spec.reach_pages[group] is None
        self.last_use = last_path_use if self._is_path else last_use
        self._clock = clock
        self._page_tokens = spec.page_tokens
        self._bytes = spec.object_bytes[group]
        self._is_state = isinstance(spec.groups[group], StateGroup)

    def facts(self, entry: Entry) -> EvictionFacts:
        """See ``Describe``. Of a state O(pages since the snapshot before it)."""
        return EvictionFacts(
            entry.node.key,
            self._clock.now_s,
            max(entry.used_s, entry.node.used_s) if self._is_path else entry.used_s,
            self.last_use(entry),
            entry.born_at,
            entry.uses,
            (entry.node.page + 1) * self._page_tokens,
            _pages_since_snapshot(entry) * self._page_tokens if self._is_state else self._page_tokens,
            self._bytes,
            self._is_state,
            entry.last,
        )


def _pages_since_snapshot(entry: Entry) -> int:
    node = entry.node.parent
    while node is not None and node.entries[entry.tier][entry.group] is None:
        node = node.parent
    return entry.node.page - (-1 if node is None else node.page)


def last_use(entry: Entry) -> int:
    """Within one tick the deeper page is the older one, so that children go before parents."""
    return (entry.used_at << _DEPTH_BITS) - entry.node.page


def last_path_use(entry: Entry) -> int:
    """The same for an object that is used whenever a path through its page is."""
    return (entry.node.used_at << _DEPTH_BITS) - entry.node.page
