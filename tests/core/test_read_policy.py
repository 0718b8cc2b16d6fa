"""Read policies, what they learn from, and an engine in virtual time whose store is slow, fast, noisy and changing."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from hicache.costs.measured import MeasuredCosts, tell_prefill
from hicache.errors import ConfigError
from hicache.outcome import Outcome
from hicache.policies.read import (
    Always,
    GpuBreakEven,
    LatencyBreakEven,
    LoadFacts,
    Never,
    ReadPolicy,
    read_policy_of,
)
from hicache.read_admission import LOOKUP, PROBE_REST, PROBE_REST_S_MAX, Offer, ReadAdmission

PAGE_BYTES = 1000
FACTS = LoadFacts(
    now_s=0.0, tier="L3", held_tokens=0, usable_tokens=100, prompt_tokens=120, bytes=100_000, page_tokens=10
)


class Given:
    """Costs that are what they are: a second for each ``bytes_per_s`` and ``tokens_per_s``."""

    def __init__(self, *, bytes_per_s: float, tokens_per_s: float, latency_s: float = 0.0) -> None:
        self._bytes_per_s, self._tokens_per_s, self._latency_s = bytes_per_s, tokens_per_s, latency_s

    def prefill_s(self, start_tokens: int, end_tokens: int) -> float:
        return (end_tokens - start_tokens) / self._tokens_per_s

    def transfer_s(self, tier: str, size_bytes: int) -> float:
        return self._latency_s + size_bytes / self._bytes_per_s


# -- policies --------------------------------------------------------------------------------------------------------


def test_what_comes_sooner_than_it_is_computed_is_loaded_and_nothing_else() -> None:
    assert LatencyBreakEven(Given(bytes_per_s=120_000, tokens_per_s=100)).tokens(FACTS) == 100
    assert LatencyBreakEven(Given(bytes_per_s=90_000, tokens_per_s=100)).tokens(FACTS) == 0


def test_a_queue_at_the_tier_counts() -> None:
    policy = LatencyBreakEven(Given(bytes_per_s=200_000, tokens_per_s=100))
    assert policy.tokens(FACTS) == 100
    assert policy.tokens(replace(FACTS, queue_s=0.45)) == 0


def test_the_margin_is_what_a_load_has_to_win_by() -> None:
    costs = Given(bytes_per_s=105_000, tokens_per_s=100)
    assert LatencyBreakEven(costs, margin_share=0.0).tokens(FACTS) == 100
    assert LatencyBreakEven(costs, margin_share=0.1).tokens(FACTS) == 0


def test_a_request_that_would_not_wait_for_the_whole_loads_what_comes_in_time() -> None:
    policy = LatencyBreakEven(Given(bytes_per_s=200_000, tokens_per_s=100, latency_s=0.01))
    assert policy.tokens(replace(FACTS, patience_s=0.3)) == 50
    assert policy.tokens(replace(FACTS, patience_s=0.05)) == 0
    assert policy.patience_s(FACTS) == 1.0


def test_for_throughput_a_load_may_take_longer_than_computing() -> None:
    costs = Given(bytes_per_s=10_000, tokens_per_s=100)
    assert LatencyBreakEven(costs).tokens(FACTS) == 0
    assert GpuBreakEven(costs, interference_share=0.05).tokens(FACTS) == 100
    assert GpuBreakEven(costs, interference_share=0.5).tokens(FACTS) == 0


def test_what_is_not_known_is_loaded_and_that_teaches() -> None:
    for kind in (LatencyBreakEven, GpuBreakEven):
        assert kind(MeasuredCosts()).tokens(FACTS) == 100
        assert kind(MeasuredCosts()).patience_s(FACTS) == math.inf


def test_always_and_never_ask_for_no_costs() -> None:
    assert Always().tokens(FACTS) == 100
    assert (Never().tokens(FACTS), Never().patience_s(FACTS)) == (0, 0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda costs: read_policy_of("sometimes", costs),
        lambda costs: LatencyBreakEven(costs, margin_share=1.0),
        lambda costs: GpuBreakEven(costs, interference_share=-0.1),
    ],
)
def test_a_policy_that_there_is_not_is_refused_with_its_value(wrong: Callable[[MeasuredCosts], ReadPolicy]) -> None:
    with pytest.raises(ConfigError, match=r"sometimes|1\.0|-0\.1"):
        wrong(MeasuredCosts())


def test_a_policy_of_ones_own_is_made_with_the_measured_costs() -> None:
    policy = read_policy_of(partial(LatencyBreakEven, margin_share=0.5), MeasuredCosts())
    assert isinstance(policy, LatencyBreakEven)


# -- an engine in virtual time ---------------------------------------------------------------------------------------


class Engine:
    """One request after another, each with a prefix in L3, and computing that takes a second for each 100 pages."""

    def __init__(self, policy: str, *, seed: int = 0, noise: float = 0.0) -> None:
        self.now_s = 0.0
        self.costs = MeasuredCosts()
        self.admission = ReadAdmission(
            read_policy_of(policy, self.costs), self.costs, page_tokens=1, now_s=lambda: self.now_s
        )
        self.rng, self.noise = random.Random(seed), noise
        self.loaded = 0
        self.lookups = 0
        self.lookup_s = 0.0005
        self.probe_s = 0.0

    def serve(self, pages: int, *, bytes_per_s: float) -> float:
        """The time that a request takes; all of a probe that it has set off ends before the next one begins."""
        started_s = self.now_s
        hoped = Offer(0, [pages], pages + 1, lambda stop: stop * PAGE_BYTES, math.inf, lookup_objects=pages)
        offer = replace(hoped, lookup_objects=0)
        is_asked = self.admission.reason_to_decline(hoped) is None
        if is_asked:
            self._look_up(pages)
        if is_asked and self.admission.worth(offer):
            self.loaded += 1
            patience_s = self.admission.patience_s(offer)
            fetching = self.admission.begin(pages * PAGE_BYTES)
            load_s = self._noisy(0.001 + fetching.size_bytes / bytes_per_s)
            fetched_s = self.now_s + load_s
            self.now_s += min(load_s, patience_s)
            if load_s > patience_s:
                self.admission.give_up(fetching, gain_tokens=(0, pages))
                self._compute(pages)
            taken_s = self.now_s - started_s
            self.now_s = max(self.now_s, fetched_s)
            self._end(fetching, pages)
            return taken_s + self._compute(2)
        declined_s = self.now_s
        if self.admission.begin_probe(offer if is_asked else hoped):
            self._probe(offer, bytes_per_s)
            self.probe_s += self.now_s - declined_s
        probed_until_s, self.now_s = self.now_s, declined_s
        self._compute(pages)
        self._compute(2)
        taken_s = self.now_s - started_s
        self.now_s = max(self.now_s, probed_until_s)
        return taken_s

    def _look_up(self, pages: int) -> None:
        asked_s = self.now_s
        self.lookups += 1
        self.now_s += self._noisy(self.lookup_s)
        self.admission.answered(pages, asked_s, {Outcome.OK})

    def _probe(self, offer: Offer, bytes_per_s: float) -> None:
        self._look_up(offer.stops[-1])
        probed = self.admission.probe_pages(offer)
        fetching = self.admission.begin(probed * PAGE_BYTES)
        self.now_s += self._noisy(0.001 + fetching.size_bytes / bytes_per_s)
        self._end(fetching, probed)
        self.admission.end_probe()

    def _compute(self, pages: int) -> float:
        seconds = self._noisy(pages / 100)
        self.now_s += seconds
        self.costs.computed(0, pages, seconds)
        return seconds

    def _end(self, fetching: object, pages: int) -> None:
        self.admission.arrived(pages * PAGE_BYTES)
        self.admission.end(fetching, {Outcome.OK})  # type: ignore[arg-type]

    def _noisy(self, seconds: float) -> float:
        return seconds * self.rng.uniform(1 - self.noise, 1 + self.noise)


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("bytes_per_s", [1e3, 1e4, 5e4, 9e4, 1.1e5, 2e5, 1e6, 1e8])
def test_at_no_bandwidth_is_reading_slower_than_computing_and_it_is_as_fast_as_the_better_of_both(
    bytes_per_s: float, noise: float
) -> None:
    """Computing is as fast as 100 KB/s. Always to load is slower below that: the positive control."""
    lengths = random.Random(7).choices([20, 50, 100], k=150)
    totals = {}
    for policy in ("latency", "always", "never"):
        engine = Engine(policy, noise=noise)
        engine.serve(100, bytes_per_s=bytes_per_s)
        totals[policy] = sum(engine.serve(pages, bytes_per_s=bytes_per_s) for pages in lengths)
    assert totals["latency"] < 1.05 * totals["never"]
    assert totals["latency"] < 1.35 * min(totals["never"], totals["always"])
    assert (totals["always"] > totals["never"]) == (bytes_per_s < 1e5)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_a_store_that_becomes_slow_is_left_soon_and_found_again_when_it_is_fast(noise: float) -> None:
    engine = Engine("latency", noise=noise)
    tell_prefill(engine.costs, [(0, 100)], 1.0)
    for _ in range(30):
        engine.serve(100, bytes_per_s=1e6)
    assert engine.loaded == 29, "all but the first"
    slow_s = sum(engine.serve(100, bytes_per_s=1e4) for _ in range(100))
    left_after = engine.loaded - 29
    assert left_after <= 5
    assert slow_s < 100 * (1 + noise / 10) + 8, "a load that is given up costs what computing does"
    before = engine.loaded
    for _ in range(60):
        engine.serve(100, bytes_per_s=1e6)
    assert engine.loaded - before >= 40


def test_probing_takes_a_small_part_of_the_time_and_stops_where_nothing_is_ever_read() -> None:
    engine = Engine("latency")
    tell_prefill(engine.costs, [(0, 100)], 1.0)
    for _ in range(300):
        engine.serve(100, bytes_per_s=1e4)
    assert 0 < engine.probe_s < 2 * engine.now_s / PROBE_REST + 10.1, "the first one takes all, and as long as it takes"
    engine = Engine("never")
    for _ in range(50):
        engine.serve(100, bytes_per_s=1e6)
    assert engine.probe_s == 0


def test_no_request_waits_for_a_store_of_which_nobody_knows_how_fast_it_is() -> None:
    engine = Engine("latency")
    tell_prefill(engine.costs, [(0, 100)], 1.0)
    assert engine.serve(100, bytes_per_s=1e3) == pytest.approx(1.02), "no wait at all"
    assert (engine.loaded, engine.lookups) == (0, 1)
    assert engine.costs.transfer_s("L3", 100 * PAGE_BYTES) == pytest.approx(100.0, rel=0.01), "all of it was fetched"


def test_what_is_far_larger_than_all_before_is_fetched_and_not_waited_for() -> None:
    costs = MeasuredCosts()
    tell_prefill(costs, [(0, 100)], 1.0)
    costs.moved("L3", PAGE_BYTES, 1e-6)
    admission = ReadAdmission(LatencyBreakEven(costs), costs, page_tokens=1, now_s=lambda: 0.0)
    offer = Offer(0, [100], 100, lambda stop: stop * PAGE_BYTES, math.inf)
    assert admission.worth(offer) == [100]
    assert admission.patience_s(offer) == 0.0
    admission.begin(100 * PAGE_BYTES)
    assert admission.worth(offer) == [], "what is under way will tell"


def test_a_store_that_is_too_slow_is_not_even_asked() -> None:
    engine = Engine("latency")
    tell_prefill(engine.costs, [(0, 100)], 1.0)
    for _ in range(100):
        engine.serve(100, bytes_per_s=1e3)
    assert engine.lookups <= 1 + engine.now_s / min(PROBE_REST_S_MAX, PROBE_REST)
    control = Engine("latency")
    tell_prefill(control.costs, [(0, 100)], 1.0)
    for _ in range(100):
        control.serve(100, bytes_per_s=1e6)
    assert control.lookups >= 99


def test_a_store_whose_answers_come_late_is_not_asked_though_its_bytes_come_fast() -> None:
    engine = Engine("latency")
    tell_prefill(engine.costs, [(0, 100)], 1.0)
    engine.lookup_s = 2.0
    taken_s = [engine.serve(100, bytes_per_s=1e8) for _ in range(50)]
    assert sum(taken_s) == pytest.approx(50 * 1.02)
    engine.lookup_s = 0.01
    for _ in range(200):
        engine.serve(100, bytes_per_s=1e8)
    assert engine.loaded > 100, "it is found again"


def test_an_answer_that_a_request_did_not_wait_for_counts_as_late_as_it_was() -> None:
    costs, now_s = MeasuredCosts(), [0.0]
    admission = ReadAdmission(LatencyBreakEven(costs), costs, page_tokens=1, now_s=lambda: now_s[0])
    for _ in range(3):
        admission.answered(10, now_s[0] - 0.001, {Outcome.OK, Outcome.ABSENT})
    admission.answered(10, now_s[0] - 99.0, {Outcome.UNAVAILABLE})
    assert costs.transfer_s(LOOKUP, 10) == pytest.approx(0.001), "what could not be asked tells nothing"
    now_s[0] = 1.0
    admission.give_up_lookup(10, 0.9995)
    for _ in range(2):
        admission.give_up_lookup(10, 0.5)
    assert costs.transfer_s(LOOKUP, 10) == pytest.approx(0.5)


def test_where_only_the_state_is_missing_it_is_fetched_though_what_follows_is_not_worth_it() -> None:
    """[0, 50) lacks a state of one page's size, [50, 100) lacks all; L3 takes three times as long as computing."""
    costs = MeasuredCosts()
    tell_prefill(costs, [(0, 100)], 1.0)
    costs.moved("L3", 100 * PAGE_BYTES, 3.0)
    admission = ReadAdmission(LatencyBreakEven(costs), costs, page_tokens=1, now_s=lambda: 0.0)

    def bytes_until(stop: int) -> int:
        return PAGE_BYTES * (1 + max(0, stop - 50))

    hoped = Offer(0, [50, 100], 100, bytes_until, math.inf, here_pages=50, lookup_objects=51)
    assert admission.reason_to_decline(hoped) is None
    assert admission.worth(replace(hoped, stops=[20, 40, 90], lookup_objects=0)) == [20, 40]
    assert admission.reason_to_decline(replace(hoped, stops=[100])) == "faster_computed"
