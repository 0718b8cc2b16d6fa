"""What the directory knows of one request: its pages, its slots in L1, and what it keeps from eviction."""

from __future__ import annotations

from dataclasses import dataclass, field

from hicache.node import Entry, Keep
from hicache.policies.facts import RequestFacts
from hicache.prefetch_record import Prefetch


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Made by ``Directory.open``, finished by ``Directory.release``. Page tables hold handles of L1 slots.

    tokens   [0, loaded) restored | [loaded, computed) by the engine | [computed, token_count) to come
    """

    keys: list[bytes]  # of all full pages
    token_count: int
    prompt_tokens: int  # as it was opened
    prompt_pages: int  # pages that may be restored: at least the last token is left to compute
    tables: list[list[int | None]]  # by group; empty for state groups
    live: dict[int, int]  # the live state slot by group
    sources: dict[int, Entry] = field(default_factory=dict)  # snapshots that live states are still read from, pinned
    sources_at: int = 0  # the boundary of these snapshots, in tokens
    spares: dict[int, int] = field(default_factory=dict)  # slots to go on in, by group; transient fields empty
    preparing: bool = False  # spares are being emptied
    has_surplus: bool = False  # too many snapshots on its path were in use when one more was taken
    keep: Keep = field(default_factory=Keep)  # what it keeps from eviction
    facts: RequestFacts | None = None  # what eviction policies are told of it
    prefetch: Prefetch | None = None
    lost: set[tuple[int, int]] = field(default_factory=set)  # (page, group) whose load failed for this request
    local_tokens: dict[str, int] = field(default_factory=dict)  # what match found, by tier
    by_source: dict[str, int] = field(default_factory=dict)  # tokens by source, once loaded
    loaded_pages: int | None = None  # None until a load has succeeded
    loading: bool = False
    reset_failed: bool = False  # the last load could not even empty the live state
    cut_reason: str = "not_usable"  # why the load took less than the prefetch promised, if it did
    shared_pages: int = 0  # leading pages of the prompt whose attention was known when it was loaded
    claim: bytes | None = None  # the branch point at which it is going to stop, so that others need not
    computed: int = 0  # the most tokens that were said to be computed: the live state is not before them
    published_pages: int = 0
    touched_pages: int = 0  # pages that the write policy has been told of
    written_pages: int = 0  # pages that need no more looking at by the writer
    donated: bool = False  # its live states have become a snapshot
    released: bool = False

    @property
    def is_loaded(self) -> bool:
        """Whether the page tables cover a restored (maybe empty) prefix."""
        return self.loaded_pages is not None

    @property
    def is_over(self) -> bool:
        """Whether it needs no states any more."""
        return self.released or self.donated
