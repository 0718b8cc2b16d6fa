"""Write policy: which pages are copied down from L1, and when.

A policy knows block keys only, so that it can be replayed on a trace of requests without a cache around it::

    policy.touch(keys, facts)     once for each page of each request: all that is known of it when its first pages have
                                  been restored or computed, then what it adds
    policy.admits(keys, facts)    how many of these pages go down now; asked again for those that found no room
    policy.wrote(size_bytes)      what of them has gone on its way: less where something is down there already

It decides about prefixes: a page that goes down takes all pages before it along.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from hicache.errors import ConfigError
from hicache.policies.facts import SuffixFacts
from hicache.policies.own import Continuation
from hicache.policies.touches import TouchCounts


class WritePolicy(Protocol):
    """Pages are those of one sequence, in order; one that follows others is named after they have been."""

    @property
    def ahead_share(self) -> float:
        """The share of each pool that is kept free, or written down, by writing what was used least recently.

        0: nothing is written because it would be evicted, and eviction spares nothing that has not been written.
        """
        ...

    def touch(self, keys: Sequence[bytes], facts: SuffixFacts) -> bool:
        """A request uses these pages. Returns whether that can change what ``admits`` says of pages that are here."""
        ...

    def admits(self, keys: Sequence[bytes], facts: SuffixFacts) -> int:
        """How many of these pages, from the first on, are copied down when they are complete; the rest waits."""
        ...

    def wrote(self, size_bytes: int) -> None:
        """So many bytes are on their way down."""
        ...


class Untouched:
    """What policies have in common to which neither uses nor bytes matter."""

    ahead_share = 0.0

    def touch(self, keys: Sequence[bytes], facts: SuffixFacts) -> bool:
        return False

    def wrote(self, size_bytes: int) -> None:
        pass


class WriteThrough(Untouched):
    """Every page, as soon as it is complete."""

    def admits(self, keys: Sequence[bytes], facts: SuffixFacts) -> int:
        return len(keys)


class WriteThroughSelective(Untouched):
    """A page goes down at its ``touches``-th touch: what is used once costs no bandwidth and no room below.

    Touches are counted by block key, wherever the page is: one that was evicted and computed again has been touched
    twice, and so has one that was found in L2 or L3. A touch is remembered for the next ``remembered_pages`` touches,
    and forgotten before twice as many have followed.
    """

    def __init__(self, touches: int = 2, *, remembered_pages: int = 1 << 18) -> None:
        if type(touches) is not int or not 1 <= touches <= 100:
            raise ConfigError("touches", touches, "1 to 100 touches of a page before it is written down")
        if type(remembered_pages) is not int or not 1 <= remembered_pages <= 1 << 28:
            raise ConfigError("remembered_pages", remembered_pages, f"1 to {1 << 28} pages, of 32 bytes of memory each")
        self.touches = touches
        self._counts = TouchCounts(remembered_pages)

    def touch(self, keys: Sequence[bytes], facts: SuffixFacts) -> bool:
        self._counts.touch(keys)
        return True

    def admits(self, keys: Sequence[bytes], facts: SuffixFacts) -> int:
        return self._counts.leading(keys, self.touches)


class WriteBack(Untouched):
    """Nothing is written when it is computed: what would be evicted from L1 is copied to L2 first, and what would be
    evicted from L2, or is left when the cache is flushed or closed, to L3."""

    def __init__(self, *, ahead_share: float = 0.125) -> None:
        if type(ahead_share) not in (int, float) or not 0 < ahead_share <= 0.5:
            raise ConfigError("ahead_share", ahead_share, "a share of each pool above 0 and at most 0.5")
        self.ahead_share = ahead_share

    def admits(self, keys: Sequence[bytes], facts: SuffixFacts) -> int:
        return 0


class TinyLfu(Untouched):
    """A duel: pages go down that were touched at least as often lately as what would be evicted for them below.

    Counts are those of ``WriteThroughSelective``: no page has fewer than those after it, so the pages before the first
    one that loses go down. While there is room below, all do. (Einziger 2017)
    """

    def __init__(self, *, remembered_pages: int = 1 << 18) -> None:
        self._counts = TouchCounts(remembered_pages)

    def touch(self, keys: Sequence[bytes], facts: SuffixFacts) -> bool:
        self._counts.touch(keys)
        return True

    def admits(self, keys: Sequence[bytes], facts: SuffixFacts) -> int:
        victim = facts.victim()
        if victim is None:
            return len(keys)
        assert isinstance(victim.key, bytes), "write policies are told block keys"
        return self._counts.leading(keys, self._counts.count(victim.key))


class ByteBudget(Untouched):
    """At most ``bytes_per_s`` in the long run, as the endurance of a medium allows, and ``burst_bytes`` at a time: what
    is over that stays above, from the end of each suffix on. Paid for is what is written, each time that it is."""

    def __init__(self, *, bytes_per_s: float = 1e9, burst_bytes: float = 8e9) -> None:
        for name, value in (("bytes_per_s", bytes_per_s), ("burst_bytes", burst_bytes)):
            if not 0 < value < math.inf:
                raise ConfigError(name, value, "a finite number of bytes above 0")
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = burst_bytes
        self._left_bytes = burst_bytes
        self._at_s: float | None = None

    def admits(self, keys: Sequence[bytes], facts: SuffixFacts) -> int:
        passed_s = 0.0 if self._at_s is None else max(0.0, facts.now_s - self._at_s)
        self._at_s = facts.now_s
        self._left_bytes = min(self._burst_bytes, self._left_bytes + passed_s * self._bytes_per_s)
        return max(0, min(len(keys), int(self._left_bytes // facts.page_bytes)))

    def wrote(self, size_bytes: int) -> None:
        self._left_bytes -= size_bytes


class DepthCut(Untouched):
    """The first ``depth_tokens`` of each sequence: system prompts and shared documents, not what follows them."""

    def __init__(self, *, depth_tokens: int = 16_384) -> None:
        if type(depth_tokens) is not int or depth_tokens < 1:
            raise ConfigError("depth_tokens", depth_tokens, "at least one token")
        self._depth_tokens = depth_tokens

    def admits(self, keys: Sequence[bytes], facts: SuffixFacts) -> int:
        return max(0, min(len(keys), self._depth_tokens // facts.page_tokens - facts.first_page))


WRITE_POLICIES: dict[str, Callable[[], WritePolicy]] = {
    "write_through": WriteThrough,
    "write_through_selective": WriteThroughSelective,
    "write_back": WriteBack,
    "tiny_lfu": TinyLfu,
    "byte_budget": ByteBudget,
    "depth_cut": DepthCut,
    "continuation": Continuation,
}


def write_policy_of(choice: str | WritePolicy) -> WritePolicy:
    """The policy of that name, with its defaults, or ``choice`` itself. Raises ConfigError for anything else."""
    if isinstance(choice, str) and choice in WRITE_POLICIES:
        return WRITE_POLICIES[choice]()
    is_policy = all(hasattr(choice, name) for name in ("ahead_share", "touch", "admits", "wrote"))
    if isinstance(choice, str | type) or not is_policy:
        raise ConfigError(
            "write_policy", choice, f"{', '.join(WRITE_POLICIES)}, or an object of hicache.policies.write"
        )
    return choice
