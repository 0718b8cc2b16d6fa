"""Asks the read policy whether L3 is asked and what of it is fetched, and learns from each answer what that takes."""

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
PROBE_REST = 64  # times as long as a probe took nothing is probed: were all of it work of this processor, that is 2 %
PROBE_REST_S_MAX = 30.0  # a store that did not answer is asked again after that
CHECK_SHARE = 1 / 16  # of what loads take: what computing at times in their place may cost
UNCHECKED_AT_START = 0.75  # what is known of computing at first is least certain
TIER = "L3"
LOOKUP = "L3 lookup"  # what it is to ask: objects in place of bytes


@dataclass(slots=True, eq=False)
class Fetching:
    """One fetch under way, as far as it is measured."""

    started_s: float
    size_bytes: int  # its own, and what was under way before it


@dataclass(frozen=True, slots=True)
class Offer:
    """What L3 has, or might have, of a prompt beyond ``base_pages``: usable up to each of ``stops``, of
    ``bytes_until(stop)`` bytes.

    pages    [0, base) usable | [base, here) lack windows and states alone | [here, prompt) lack all
    """

    base_pages: int
    stops: list[int]
    prompt_pages: int
    bytes_until: Callable[[int], int]
    patience_s: float
    here_pages: int = 0
    lookup_objects: int = 0  # that L3 has still to be asked about


class ReadAdmission:
    """L3 is not asked for what would not be fetched though it had all of it. A request waits for no store of which
    nobody knows how fast it is. Fetches share L3's bandwidth: each is taken to come after all bytes under way.

    What is declined is looked up and fetched all the same at times, for nobody, to find out when L3 has become faster:
    one such probe at a time, with rests; all of it where nothing like it was ever fetched, else a little, twice as much
    each time as long as that is quick. And what would be loaded is computed at times, the rarer the more loads save, to
    find out what computing takes.
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
        self._probing_since_s: float | None = None
        self._unchecked = UNCHECKED_AT_START

    def reason_to_decline(self, hoped: Offer) -> str | None:
        """Why nothing is fetched of a prompt, whatever L3 has of it; None: it depends on what it has.

        ``hoped``: what L3 has at best, as far as it matters: up to what is here, and all.
        """
        if not self._wants_some(hoped):
            return "faster_computed"
        is_awaited = self._policy.patience_s(self._facts(hoped, hoped.stops[-1])) < math.inf
        return "unmeasured" if is_awaited and not self._is_measured else None

    def _wants_some(self, hoped: Offer) -> bool:
        return any(self._policy.tokens(self._facts(hoped, stop)) for stop in hoped.stops)

    def worth(self, offer: Offer) -> list[int]:
        """The leading ones of the stops that are worth being loaded: all, some, or none."""
        leading = self._leading(offer)
        if leading and self._under_way_bytes and self._is_first(self._facts(offer, leading[-1])):
            return []  # what is under way will tell
        if not leading or leading != offer.stops:
            return leading
        self._probe_pages = 0
        return [] if self._is_check_due(offer, leading[-1]) else leading

    def _leading(self, offer: Offer) -> list[int]:
        """Of all stops, or, where that is none, of those for which L3 need not bring a page of full attention."""
        stops = self._leading_of(offer, offer.stops)
        return stops or self._leading_of(offer, [stop for stop in offer.stops if stop <= offer.here_pages])

    def _leading_of(self, offer: Offer, stops: list[int]) -> list[int]:
        for _ in range(ROUNDS_MAX):
            if not stops:
                break
            wanted = offer.base_pages + self._policy.tokens(self._facts(offer, stops[-1])) // self._page_tokens
            if wanted >= stops[-1]:
                return stops
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

    def patience_s(self, offer: Offer) -> float:
        """How long a request should wait at most for what L3 says, and then for what is fetched of the last stop."""
        facts = self._facts(offer, offer.stops[-1])
        if not offer.lookup_objects and self._is_first(facts):
            return 0.0  # it goes on coming, and tells how long that takes
        return min(offer.patience_s, self._policy.patience_s(facts))

    @property
    def _is_measured(self) -> bool:
        return self._costs.transfer_s(TIER, 1) is not None

    def _is_first(self, facts: LoadFacts) -> bool:
        """Whether nothing as large was fetched so far, and somebody would wait for it in vain if it took long."""
        return self._costs.transfer_s(TIER, facts.bytes) is None and self._policy.patience_s(facts) < math.inf

    def answered(self, objects: int, asked_s: float, outcomes: set[Outcome]) -> None:
        """L3 has said what it has of so many objects, which it was asked at ``asked_s``; or has not, in time."""
        if outcomes <= {Outcome.OK, Outcome.ABSENT, Outcome.DEADLINE}:
            self._costs.moved(LOOKUP, objects, self._now_s() - asked_s)

    def give_up_lookup(self, objects: int, asked_s: float) -> bool:
        """A request has not waited for the answer. If that took longer than answers do, that counts: whether it did."""
        expected_s, seconds = self._costs.transfer_s(LOOKUP, objects), self._now_s() - asked_s
        if expected_s is None or seconds <= expected_s:
            return False
        self._costs.moved(LOOKUP, objects, seconds)
        return True

    def begin(self, size_bytes: int) -> Fetching:
        """So many bytes are asked for now."""
        self._under_way_bytes += size_bytes
        return Fetching(self._now_s(), self._under_way_bytes)

    def arrived(self, size_bytes: int) -> None:
        """So many of the bytes have come, or have failed to."""
        self._under_way_bytes -= size_bytes

    def end(self, fetching: Fetching, outcomes: set[Outcome]) -> None:
        """Everything has been answered. What came, and what did not come in time, tells how fast L3 is."""
        if outcomes <= {Outcome.OK, Outcome.DEADLINE}:
            self._costs.moved(TIER, fetching.size_bytes, self._now_s() - fetching.started_s)

    def give_up(self, fetching: Fetching, *, gain_tokens: tuple[int, int]) -> None:
        """A request has not waited until the end. If that took longer than to compute ``gain_tokens``, that counts."""
        seconds = self._now_s() - fetching.started_s
        expected_s = self._costs.transfer_s(TIER, fetching.size_bytes)
        if expected_s is None:
            expected_s = self._costs.prefill_s(*gain_tokens)
        if expected_s is not None and seconds > expected_s * 0.99:
            self._costs.moved(TIER, fetching.size_bytes, seconds)

    def begin_probe(self, hoped: Offer) -> bool:
        """Whether L3 is to be asked for nobody now, since a request for ``hoped`` was declined. Then ``end_probe``."""
        is_resting = self._probing_since_s is not None or self._now_s() < self._probe_from_s
        if is_resting or self._under_way_bytes or not self._can_change(hoped):
            return False
        self._probing_since_s = self._now_s()
        return True

    def _can_change(self, declined: Offer) -> bool:
        """Whether it was declined for what L3 takes; not measured, and unwanted, it was the policy's principle."""
        return self._is_measured or self._wants_some(declined)

    def probe_pages(self, declined: Offer) -> int:
        """Pages to fetch for nobody, of which L3 has all up to the last stop."""
        pages = declined.stops[-1] - declined.base_pages
        size_bytes = declined.bytes_until(declined.stops[-1])
        if not self._is_measured:
            return pages
        limit_s = PROBE_SHARE * self._declined_s(declined)
        probed = min(pages, max(1, 2 * self._probe_pages))
        while probed > 1 and (self._costs.transfer_s(TIER, size_bytes * probed // pages) or 0.0) > limit_s:
            probed //= 2
        self._probe_pages = probed
        return probed

    def end_probe(self) -> None:
        """What was asked for nobody has been answered, or there was nothing to fetch."""
        assert self._probing_since_s is not None, "one probe at a time"
        rest_s = PROBE_REST * (self._now_s() - self._probing_since_s)
        self._probe_from_s = self._now_s() + min(rest_s, PROBE_REST_S_MAX)
        self._probing_since_s = None

    def _declined_s(self, offer: Offer) -> float:
        tokens = self._page_tokens
        return self._costs.prefill_s(offer.base_pages * tokens, offer.stops[-1] * tokens) or 0.0

    def _facts(self, offer: Offer, stop: int) -> LoadFacts:
        size_bytes = offer.bytes_until(stop)
        whole_s = self._costs.transfer_s(TIER, self._under_way_bytes + size_bytes)
        own_s = self._costs.transfer_s(TIER, size_bytes)
        lookup_s = self._costs.transfer_s(LOOKUP, offer.lookup_objects) if offer.lookup_objects else None
        return LoadFacts(
            now_s=self._now_s(),
            tier=TIER,
            held_tokens=offer.base_pages * self._page_tokens,
            usable_tokens=stop * self._page_tokens,
            prompt_tokens=offer.prompt_pages * self._page_tokens,
            bytes=size_bytes,
            page_tokens=self._page_tokens,
            queue_s=(0.0 if whole_s is None or own_s is None else whole_s - own_s) + (lookup_s or 0.0),
            patience_s=offer.patience_s,
        )
