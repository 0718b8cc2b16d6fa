"""A request and what the engine knows of it."""

from __future__ import annotations

from dataclasses import dataclass

from hicache.handover import Handover
from hicache.node import Keep
from hicache.request import RequestRecord

PAGE = 2  # tokens


@dataclass(eq=False)
class Live:
    """A request and what the engine knows of it."""

    record: RequestRecord
    tokens: list[int]
    computed: int = 0
    moved_to: int = 0  # tokens that the state in the live slots has seen; the loaded ones before any were computed
    found: Keep | None = None  # what keeps what match has found, until the first load chooses
    usable_at_load: int = 0  # pages, when the load last chose its prefix
    is_cut_by_eviction: bool = False  # it may have taken the place of something usable, for its live states
    handover: Handover | None = None  # the last one
    losses_before: int = 0  # objects that L3 had lost when that began
    lookups_failed_before: int = 0

    def state_at(self, page_tokens: int) -> int:
        """Tokens that the state has seen."""
        return max(self.moved_to, (self.record.loaded_pages or 0) * page_tokens)


def stage_of(live: Live) -> str:
    """How far a request has come."""
    record = live.record
    if record.donated:
        return "donated"
    if record.is_loaded:
        return "computed" if live.computed > (record.loaded_pages or 0) * PAGE else "loaded"
    if record.loading:
        return "loading"
    if record.prefetch is not None and not record.prefetch.settled:
        return "prefetching"
    return "opened"
