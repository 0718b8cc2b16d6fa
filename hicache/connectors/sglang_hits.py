"""Which prefixes of a prompt SGLang can restore, given which pages of which pools are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class PoolPages:
    """What is stored of one pool: ``present[i]`` for page ``i`` of the prompt.

    ``trailing_pages``: how many pages before a boundary are needed to stop there (1 for a recurrent state, a window for
    sliding attention); None where all are.
    """

    name: str
    present: Sequence[bool]
    trailing_pages: int | None


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """``boundaries`` are all legal prefix lengths in pages, ascending; ``pages_of`` the longest of each pool alone."""

    boundaries: tuple[int, ...]
    pages_of: dict[str, int]


def leading(present: Sequence[bool]) -> int:
    """How many pages from the start are there without a gap."""
    return next((position for position, is_there in enumerate(present) if not is_there), len(present))


def prefix_hits(kv_pages: int, pools: Sequence[PoolPages]) -> PrefixHits:
    """Prefixes of at most ``kv_pages`` pages, the run of attention pages, at which every pool can go on.

    A pool with trailing pages leaves holes: 5 may be legal where 4 is not. Ranks intersect their sets, so all are told.
    """
    legal = set(range(1, kv_pages + 1))
    pages_of: dict[str, int] = {}
    for pool in pools:
        own = _boundaries(pool, kv_pages)
        pages_of[pool.name] = max(own, default=0)
        legal &= own
    return PrefixHits(tuple(sorted(legal)), pages_of)


def _boundaries(pool: PoolPages, kv_pages: int) -> set[int]:
    present = pool.present[:kv_pages]
    if pool.trailing_pages is None:
        return set(range(1, leading(present) + 1))
    runs = accumulate(
        present, lambda run, is_there: run + 1 if is_there else 0, initial=0
    )  # pages in a row, up to each
    return {boundary for boundary, run in enumerate(runs) if boundary > 0 and run >= min(pool.trailing_pages, boundary)}
