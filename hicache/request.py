"""What the directory knows of one request: its pages, its slots in L1, and what it keeps from eviction."""

from __future__ import annotations

from dataclasses import dataclass, field

from hicache.node import Keep
from hicache.prefetch import Prefetch


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Made by ``Directory.open``, finished by ``Directory.release``. Page tables hold handles of L1 slots.

    tokens   [0, loaded) restored | [loaded, computed) by the engine | [computed, token_count) to come
    """

    keys: list[bytes]  # of all full pages
    token_count: int
    prompt_pages: int  # pages that may be restored: at least the last token is left to compute
    tables: list[list[int | None]]  # by group; empty for state groups
    live: dict[int, int]  # the live state slot by group
    keep: Keep = field(default_factory=Keep)  # what it keeps from eviction
    prefetch: Prefetch | None = None
    lost: set[tuple[int, int]] = field(default_factory=set)  # (page, group) whose load failed for this request
    local_tokens: dict[str, int] = field(default_factory=dict)  # what match found, by tier
    by_source: dict[str, int] = field(default_factory=dict)  # tokens by source, once loaded
    loaded_pages: int | None = None  # None until a load has succeeded
    loading: bool = False
    reset_failed: bool = False  # the last load could not even empty the live state
    cut_reason: str = "not_usable"  # why the load took less than the prefetch promised, if it did
    published_pages: int = 0
    touched_pages: int = 0  # pages that the write policy has been told of
    written_pages: int = 0  # pages that need no more looking at by the writer
    released: bool = False

    @property
    def is_loaded(self) -> bool:
        """Whether the page tables cover a restored (maybe empty) prefix."""
        return self.loaded_pages is not None
