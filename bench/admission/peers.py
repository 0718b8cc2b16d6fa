"""Rules of other systems, to compare with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from hicache.policies.facts import SuffixFacts


class VllmStoreThreshold:
    """vLLM's ``store_threshold``: a block is stored when it has been offered so often, exactly counted for the
    ``tracker_size`` blocks that were offered last. What is stored is not offered. (``max_tracker_size``, read in code)
    """

    ahead_share = 0.0

    def __init__(self, threshold: int = 2, *, tracker_size: int = 64_000) -> None:
        self._threshold = threshold
        self._tracker_size = tracker_size
        self._offers: OrderedDict[bytes, int] = OrderedDict()

    def touch(self, keys: Sequence[bytes], facts: SuffixFacts) -> bool:
        return False

    def wrote(self, size_bytes: int) -> None:
        pass

    def admits(self, keys: Sequence[bytes], facts: SuffixFacts) -> int:
        """Counts an offer of each of the keys."""
        offers = self._offers
        for key in keys:
            offers[key] = offers.pop(key, 0) + 1
            if len(offers) > self._tracker_size:
                offers.popitem(last=False)
        return next((place for place, key in enumerate(keys) if offers.get(key, 0) < self._threshold), len(keys))
