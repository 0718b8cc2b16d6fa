"""The usable prefix: how many pages may be used, given what is there of each page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from hicache.spec import CacheSpec


class PrefixRule:
    """The rule of one CacheSpec. Masks have bit ``g`` set where the object of group ``g`` is there.

    A prefix of ``n`` pages is legal when every full-attention group has pages ``[0, n)`` and every group of reach ``r``
    has pages ``[max(0, n - r), n)``. A sliding window reaches its window back, a state snapshot exactly one page: both
    are the same rule.

        pages       0   1   2   3   4   5
        attn        x   x   x   x   x   .
        window (2)  .   x   x   .   x   .      legal: 0, 3   (1: page 0 of the window is missing; 4, 5: page 3 is)
        state  (1)  .   .   x   .   x   .
    """

    def __init__(self, spec: CacheSpec) -> None:
        reaches = spec.reach_pages
        self.full_mask = sum(1 << group for group, reach in enumerate(reaches) if reach is None)
        self.all_mask = (1 << len(reaches)) - 1
        self.partial = tuple((1 << group, reach) for group, reach in enumerate(reaches) if reach is not None)
        self._partial_mask = sum(bit for bit, _ in self.partial)
        self._reach_max = max((reach for _, reach in self.partial), default=0)
        self._reaches = reaches

    def legal_stops(self, masks: Iterable[int]) -> list[int]:
        """Every ``n >= 1`` that is legal for pages with these masks, ascending. Linear.

        A page ``p`` that lacks a group of reach ``r`` makes every ``n`` in ``(p, p + r]`` illegal.
        """
        full, partial, all_partial = self.full_mask, self.partial, self._partial_mask
        illegal_up_to = 0
        stops: list[int] = []
        for page, mask in enumerate(masks):
            if mask & full != full:
                break
            if mask & all_partial != all_partial:
                for bit, reach in partial:
                    if not mask & bit and page + reach > illegal_up_to:
                        illegal_up_to = page + reach
            if page >= illegal_up_to:
                stops.append(page + 1)
        return stops

    def longest(self, pages: int, masks_backwards: Iterable[int]) -> int:
        """The longest legal prefix of ``pages`` pages that all have their full-attention objects; 0 when there is none.

        Takes masks from the last page on, no more than the longest reach before the prefix: a page that makes a stop
        illegal makes all stops after itself illegal, so it is the next one to try.
        """
        partial, all_partial = self.partial, self._partial_mask
        stop = page = pages
        for mask in masks_backwards:
            if page <= stop - self._reach_max:
                break
            page -= 1
            if mask & all_partial != all_partial:
                for bit, reach in partial:
                    if not mask & bit and page >= stop - reach:
                        stop = page
                        break
        return stop

    def usable(self, masks: Iterable[int]) -> int:
        """The longest legal prefix, in pages; 0 when there is none."""
        stops = self.legal_stops(masks)
        return stops[-1] if stops else 0

    def needed(self, pages: int) -> list[tuple[int, int]]:
        """``(page, group)`` of every object that a prefix of ``pages`` pages needs, in page order."""
        firsts = [self.first_needed(group, pages) for group in range(len(self._reaches))]
        return [(page, group) for page in range(pages) for group, first in enumerate(firsts) if page >= first]

    def needed_partial(self, pages: int) -> list[tuple[int, int]]:
        """Those of ``needed`` that are not of full-attention groups, by group."""
        partial = [group for group, reach in enumerate(self._reaches) if reach is not None]
        return [(page, group) for group in partial for page in range(self.first_needed(group, pages), pages)]

    def first_needed(self, group: int, pages: int) -> int:
        """The first page that a prefix of ``pages`` pages needs of ``group``."""
        reach = self._reaches[group]
        return 0 if reach is None else max(0, pages - reach)

    def first_page(self, pages: int) -> int:
        """The first page that a prefix of ``pages`` pages needs anything of; ``pages`` when it needs nothing."""
        return min(self.first_needed(group, pages) for group in range(len(self._reaches)))

    def fitting(self, stops: Sequence[int], masks: Sequence[int], room: Sequence[int]) -> list[int]:
        """The stops that lack, of each group, no more objects than ``room[group]``. Linear."""
        missing = [
            list(accumulate((not mask >> group & 1 for mask in masks), initial=0))
            for group in range(len(self._reaches))
        ]
        return [
            stop
            for stop in stops
            if all(
                counts[stop] - counts[self.first_needed(group, stop)] <= limit
                for group, (counts, limit) in enumerate(zip(missing, room, strict=True))
            )
        ]
