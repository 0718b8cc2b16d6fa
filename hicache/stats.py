"""What the directory counts. Tokens and objects only ever move from one counter to another: sums are conserved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields

from hicache.outcome import Outcome

Served = Callable[[int, Sequence[bytes]], None]  # pages that might have been restored; keys of those that were not

_LEGS_WITHOUT_PAYLOAD = ("lookup", "confirm", "clear")


def _nobody(pages: int, missed: Sequence[bytes]) -> None:
    """Nobody wants to know."""


@dataclass(slots=True)
class DirectoryStats:
    """Counters since start.

    ``tokens_requested == sum(tokens_by_source.values())`` once every request has been loaded, and
    ``prefetch_found == prefetch_used + sum(prefetch_dropped.values()) + prefetch_in_flight`` at every moment (tokens).
    """

    object_bytes: tuple[int, ...]  # payload bytes of one page or snapshot, all its shards together, by group
    requests: int = 0
    tokens_requested: int = 0
    tokens_by_source: Counter[str] = field(default_factory=Counter)  # l1, l2, l3, computed
    tokens_attention_only: int = 0  # resident attention beyond the usable prefix: a window or state was missing there
    prefetch_found: int = 0
    prefetch_used: int = 0
    prefetch_in_flight: int = 0
    prefetch_dropped: Counter[str] = field(default_factory=Counter)  # tokens by reason
    prefetch_declined: Counter[str] = field(default_factory=Counter)  # requests by reason
    prefetch_probes: int = 0  # times that L3 was asked for nobody, to learn whether loading has begun to pay
    objects: Counter[str] = field(default_factory=Counter)  # "<leg>.<outcome>", such as "fetch.corrupt"
    bytes_moved: Counter[str] = field(default_factory=Counter)  # payload bytes of the objects that went well, by leg
    skipped: Counter[str] = field(
        default_factory=Counter
    )  # backups and snapshots not taken, objects of no use, by reason
    tokens_lost: Counter[str] = field(default_factory=Counter)  # evicted unwritten, by "<tier>.<group>"
    snapshots_thinned: int = 0  # boundaries whose snapshot went because its path had too many
    ranks_lost: dict[int, str] = field(default_factory=dict)  # why, by rank
    on_served: Served = field(default=_nobody, repr=False, compare=False)

    def serve(self, keys: Sequence[bytes], restored_pages: int, by_source: Mapping[str, int]) -> None:
        """A request goes on to compute: ``keys`` of the pages that might have been restored, the first
        ``restored_pages`` of them were, and its tokens by source."""
        for source, tokens in by_source.items():  # Counter.update costs 1 us
            self.tokens_by_source[source] += tokens
            self.tokens_requested += tokens
        self.on_served(len(keys), keys[restored_pages:])

    def copy(self) -> DirectoryStats:
        """What has been counted by now."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return DirectoryStats(**{name: copy(value) for name, value in values.items()})

    def count(self, leg: str, groups: Iterable[int], outcomes: Iterable[Outcome]) -> None:
        """Objects that went, or did not go, over ``leg``: backup, store, fetch, load, restore, snapshot, lookup, ..."""
        counts: dict[Outcome, int] = {}
        moved_bytes = 0
        for group, outcome in zip(groups, outcomes, strict=True):
            counts[outcome] = counts.get(outcome, 0) + 1
            if outcome <= Outcome.EXISTS:  # is_ok, which costs as much as all else here
                moved_bytes += self.object_bytes[group]
        for outcome, count in counts.items():
            self.objects[f"{leg}.{outcome.name.lower()}"] += count
        if moved_bytes and leg not in _LEGS_WITHOUT_PAYLOAD:
            self.bytes_moved[leg] += moved_bytes


def pages_by_source(pages: int, farther: Mapping[int, str], *, first: int) -> Counter[str]:
    """How many pages of a prefix came from where: from L1, unless ``farther`` says otherwise. Pages before ``first``,
    of which nothing was needed (before a sliding window, or a state), came from where page ``first`` did."""
    counts = Counter(farther.values())
    if 0 < first < pages:
        counts[farther.get(first, "l1")] += first
    counts["l1"] += pages - counts.total()
    return counts
