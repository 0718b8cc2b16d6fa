"""Replays: what must hold after each request, whatever the policies are, and what follows from how they are defined."""

from __future__ import annotations

import functools
import math

import pytest

from bench.admission.peers import VllmStoreThreshold
from bench.admission.replay import Result, TierSpec, replay
from bench.admission.traces import Trace, TraceRequest
from hicache.policies.eviction_choice import EVICTION_POLICIES
from hicache.policies.eviction_kinds import Gdsf, Ttl
from hicache.policies.write import WRITE_POLICIES, ByteBudget, WriteThroughSelective
from tests.admission.synthetic import BLOCK, conversations

ADMITTING = sorted(name for name, make in WRITE_POLICIES.items() if not make().ahead_share)


def one(trace: Trace, pages: int | None, eviction: object = "lru", write: object = "write_through") -> Result:
    return replay(trace, [TierSpec("cache", pages, eviction, write)], checked=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("eviction", sorted(EVICTION_POLICIES))
def test_every_eviction_policy_keeps_what_must_hold_and_decides_the_same_again(eviction: str) -> None:
    trace = conversations(1)
    first, again = (one(trace, 40, eviction) for _ in range(2))
    assert first.tiers == again.tiers
    assert first.usable_tokens == again.usable_tokens
    assert 0 < first.usable_tokens <= one(trace, None).usable_tokens


@pytest.mark.parametrize("write", ADMITTING)
@pytest.mark.parametrize("eviction", ["lru", "s3_fifo"])
def test_every_write_policy_keeps_what_must_hold(eviction: str, write: str) -> None:
    result = one(conversations(2), 40, eviction, write)
    everything = one(conversations(2), 40, eviction)
    assert 0 < result.tiers[0].pages_written <= everything.tiers[0].pages_written
    assert result.tiers[0].pages_never_read <= result.tiers[0].pages_written


@pytest.mark.parametrize("lower_write", ["write_through", "write_back", "write_through_selective"])
def test_tiers_together_find_what_any_of_them_holds(lower_write: str) -> None:
    trace = conversations(3)
    tiers = [TierSpec("L1", 15), TierSpec("L2", 40, "lru", lower_write), TierSpec("L3", 90, "lru", lower_write)]
    result = replay(trace, tiers, checked=True)
    assert result.usable_tokens > one(trace, 15).usable_tokens
    assert sum(tier.used_tokens for tier in result.tiers) == result.usable_tokens
    assert all(tier.used_tokens > 0 for tier in result.tiers[1:])
    assert result.tiers[1].bytes_read > 0


def test_tenants_add_up() -> None:
    result = one(conversations(4), 40)
    assert len(result.by_tenant) == 2
    assert sum(tenant.requests for tenant in result.by_tenant.values()) == result.requests == 300
    assert sum(tenant.input_tokens for tenant in result.by_tenant.values()) == result.input_tokens
    assert sum(tenant.usable_tokens for tenant in result.by_tenant.values()) == result.usable_tokens


def test_what_decode_has_made_is_found_by_the_next_turn() -> None:
    turns = [
        TraceRequest(0.0, 2 * BLOCK, 3 * BLOCK, (0, 1), output_blocks=(2, 3, 4)),
        TraceRequest(1.0, 6 * BLOCK, 0, (0, 1, 2, 3, 4, 5)),
    ]
    assert one(Trace("turns", BLOCK, turns, 6), None).usable_tokens == 5 * BLOCK


@pytest.mark.parametrize("eviction", ["lru", "fifo", "lfu", "ttl"])
def test_runs_of_pages_are_evicted_as_single_pages_are(eviction: str) -> None:
    for seed in range(5):
        trace = conversations(seed)
        tier = [TierSpec("cache", 37, eviction)]
        assert replay(trace, tier, run_pages_max=1).usable_tokens == replay(trace, tier).usable_tokens


def test_policies_that_are_the_same_by_definition_decide_the_same() -> None:
    """Check 21: a threshold of 1 is none, a TTL without end is LRU, GDSF of equal costs is LFU with dynamic ageing."""
    trace = conversations(5)
    lru = one(trace, 40)
    for write in (functools.partial(WriteThroughSelective, 1), functools.partial(VllmStoreThreshold, 1)):
        assert one(trace, 40, write=write).tiers == lru.tiers
    assert one(trace, 40, functools.partial(Ttl, ttl_s=math.inf)).tiers == lru.tiers
    equal = functools.partial(Gdsf, prefill=lambda start, end: float(end - start))
    assert one(trace, 40, equal).tiers == one(trace, 40, "lfu_da").tiers


def test_lru_finds_more_the_more_it_holds() -> None:
    """Check 21. Room for one more page never loses a token under LRU."""
    trace = conversations(6)
    found = [one(trace, pages).usable_tokens for pages in (20, 30, 45, 70, 110, 200, 2000)]
    assert found == sorted(found)
    assert found[-1] == one(trace, None).usable_tokens


def test_what_fits_is_written_for_nothing_below() -> None:
    """Check 19: where the first tier holds everything, nothing is ever read from the second one."""
    result = replay(conversations(7), [TierSpec("L1", 10_000), TierSpec("L2", 10_000)])
    l2 = result.tiers[1]
    assert l2.bytes_written > 0
    assert l2.bytes_read == 0
    assert l2.pages_never_read == l2.pages_written


def test_a_budget_bounds_what_is_written() -> None:
    trace = conversations(8)
    page_bytes = BLOCK * 131_072
    budget = functools.partial(ByteBudget, bytes_per_s=0.5 * page_bytes, burst_bytes=10 * page_bytes)
    span_s = trace.requests[-1].at_s
    assert one(trace, None, write=budget).tiers[0].pages_written <= 10 + 0.5 * span_s


def test_requests_that_only_warm_the_cache_do_not_count() -> None:
    trace = conversations(9)
    half = replay(trace, [TierSpec("cache", 40)], warm_share=0.5)
    assert half.requests == 150
    assert half.input_tokens == sum(request.tokens for request in trace.requests[150:])
    assert half.tiers[0].pages_written == one(trace, 40).tiers[0].pages_written
