"""Asks the read policy how much of what L3 has is fetched, and learns from each fetch what fetches take."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from hicache.costs.measured import MeasuredCosts
from hicache.outcome import Outcome
from hicache.policies.read import LoadFacts, ReadPolicy

ROUNDS_MAX = 8  # a policy that always wants a little less must not be asked for ever
PROBE_SHARE = 1 / 8  # of computing what was declined: what a probe may take
FIRST_SHARE = 1 / 8  # of computing: what a request waits for a fetch of which nobody knows how long it takes
PROBE_REST = 20  # times as long as a probe took nothing is probed: 5 % of the bandwidth of a store that is not used
CHECK_SHARE = 1 / 16  # of what loads take: what computing at times in their place may cost
UNCHECKED_AT_START = 0.75  # what is known of computing at first is least certain
TIER = "L3"


@dataclass(slots=True, eq=False)
class Fetching:
    """One fetch under way, as far as it is measured."""

    started_s: float
    size_bytes: int  # its own, and what was under way before it
    is_probe: bool


@dataclass(frozen=True, slots=True)
class Offer:
    """What L3 has of a prompt beyond ``base_pages``: usable up to each of ``stops``, of ``bytes_until(stop)`` bytes."""

    base_pages: int
    stops: list[int]
    prompt_pages: int
    bytes_until: Callable[[int], int]
    patience_s: float


class ReadAdmission:
    """Fetches share L3's bandwidth: each is taken to come after all bytes that are under way when it begins.

    While the policy declines, little of what it declines is fetched all the same at times, for nobody, to find out when
    L3 has become faster: one such probe at a time, twice as large each time as long as that is quick, with rests. And
    what would be loaded is computed at times, the rarer the more loads save, to find out what computing takes.
    """

    def __init__(
        self, policy: ReadPolicy, costs: MeasuredCosts, *, page_tokens: int, now_s: Callable[[], float]
    ) -> None:
        self._policy = policy
        self._costs = costs
        self._page_tokens = page_tokens
        self._now_s = now_s
        self._under_way_bytes = 0
        self._probe_pages = 0
        self._probe_from_s = 0.0
        self._is_probing = False
        self._unchecked = UNCHECKED_AT_START

    def worth(self, offer: Offer) -> list[int]:
        """The leading ones of the stops that are worth being loaded: all, some, or none."""
        stops = offer.stops
        if stops and self._under_way_bytes and self._is_first(self._facts(offer, stops[-1])):
            return []  # what is under way will tell
        for _ in range(ROUNDS_MAX):
            if not stops:
                break
            wanted = offer.base_pages + self._policy.tokens(self._facts(offer, stops[-1])) // self._page_tokens
            if wanted >= stops[-1]:
                self._probe_pages = 0
                return [] if self._is_check_due(offer, stops[-1]) else stops
            stops = stops[: bisect_right(stops, wanted)]
        return []

    def _is_check_due(self, offer: Offer, stop: int) -> bool:
        """Whether this shall be computed though a load seems to take less. What is always loaded is never computed, and
        what is believed of that would never be found to be wrong."""
        facts = self._facts(offer, stop)
        load_s = self._costs.transfer_s(facts.tier, facts.bytes)
        prefill_s = self._costs.prefill_s(facts.held_tokens, facts.usable_tokens)
        if not load_s or not prefill_s or self._policy.patience_s(facts) == math.inf:
            return False
        if 2 * self._costs.largest_computed_tokens >= facts.usable_tokens - facts.held_tokens:
            self._costs.largest_computed_tokens = 0
            self._unchecked = 0.0
        self._unchecked += CHECK_SHARE * load_s / prefill_s
        if self._unchecked < 1:
            return False
        self._unchecked = 0.0
        return True

    def _declined_s(self, offer: Offer) -> float:
        tokens = self._page_tokens
        return self._costs.prefill_s(offer.base_pages * tokens, offer.stops[-1] * tokens) or 0.0

    def patience_s(self, offer: Offer) -> float:
        """How long a request should wait at most for what is fetched of the last stop."""
        facts = self._facts(offer, offer.stops[-1])
        share = FIRST_SHARE if self._is_first(facts) else 1.0
        return min(offer.patience_s, share * self._policy.patience_s(facts))

    def _is_first(self, facts: LoadFacts) -> bool:
        """Whether nothing like it was fetched so far, and somebody would wait for it in vain if it took long. What has
        not come by then goes on coming, and tells how long it took."""
        return self._costs.transfer_s(TIER, facts.bytes) is None and self._policy.patience_s(facts) < math.inf

    def begin(self, size_bytes: int, *, is_probe: bool = False) -> Fetching:
        """So many bytes are asked for now."""
        self._is_probing |= is_probe
        self._under_way_bytes += size_bytes
        return Fetching(self._now_s(), self._under_way_bytes, is_probe)

    def arrived(self, size_bytes: int) -> None:
        """So many of the bytes have come, or have failed to."""
        self._under_way_bytes -= size_bytes

    def end(self, fetching: Fetching, outcomes: set[Outcome]) -> None:
        """Everything has been answered. What came, and what did not come in time, tells how fast L3 is."""
        seconds = self._now_s() - fetching.started_s
        if outcomes <= {Outcome.OK, Outcome.DEADLINE}:
            self._costs.moved(TIER, fetching.size_bytes, seconds)
        if fetching.is_probe:
            self._is_probing = False
            self._probe_from_s = self._now_s() + PROBE_REST * seconds

    def give_up(self, fetching: Fetching, *, gain_tokens: tuple[int, int]) -> None:
        """A request has not waited until the end. If that took longer than to compute ``gain_tokens``, that counts."""
        seconds = self._now_s() - fetching.started_s
        expected_s = self._costs.transfer_s(TIER, fetching.size_bytes)
        if expected_s is None:
            expected_s = self._costs.prefill_s(*gain_tokens)
        if expected_s is not None and seconds > expected_s * 0.99:
            self._costs.moved(TIER, fetching.size_bytes, seconds)

    def probe_pages(self, declined: Offer) -> int:
        """Pages to fetch for nobody now, since this has been declined; 0: none."""
        is_due = not self._is_probing and self._under_way_bytes == 0 and self._now_s() >= self._probe_from_s
        if not is_due or self._costs.transfer_s(TIER, 1) is None:  # not measured: it was the policy's principle
            return 0
        page_bytes = declined.bytes_until(declined.stops[-1]) / (declined.stops[-1] - declined.base_pages)
        limit_s = PROBE_SHARE * self._declined_s(declined)
        pages = max(1, 2 * self._probe_pages)
        while pages > 1 and (self._costs.transfer_s(TIER, int(pages * page_bytes)) or 0.0) > limit_s:
            pages //= 2
        self._probe_pages = pages
        return pages

    def _facts(self, offer: Offer, stop: int) -> LoadFacts:
        size_bytes = offer.bytes_until(stop)
        whole_s = self._costs.transfer_s(TIER, self._under_way_bytes + size_bytes)
        own_s = self._costs.transfer_s(TIER, size_bytes)
        return LoadFacts(
            now_s=self._now_s(),
            tier=TIER,
            held_tokens=offer.base_pages * self._page_tokens,
            usable_tokens=stop * self._page_tokens,
            prompt_tokens=offer.prompt_pages * self._page_tokens,
            bytes=size_bytes,
            page_tokens=self._page_tokens,
            queue_s=0.0 if whole_s is None or own_s is None else whole_s - own_s,
            patience_s=offer.patience_s,
        )
