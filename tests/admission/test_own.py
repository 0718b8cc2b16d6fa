"""Continuation: learns what goes on, keeps it, writes little, and is held to what it reaches on public traces."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from bench.admission.bounds import ceiling
from bench.admission.replay import Result, TierSpec, replay
from bench.admission.traces import Trace, TraceRequest, load_trace
from hicache.policies.own import Continuation
from hicache.policies.own_forecast import AGES_S, Forecast

TRACES = Path(__file__).parents[2] / "bench" / "trace_files"


@lru_cache
def synthetic() -> Trace:
    return load_trace(TRACES / "mooncake_synthetic_trace.jsonl.zst")


def run(trace: Trace, pages: int, *, checked: bool = False) -> Result:
    return replay(trace, [TierSpec("L3", pages, "continuation", "continuation")], checked=checked)


def saved(result: Result) -> float:
    return result.gpu_s_saved / result.gpu_s_total


def test_it_saves_more_gpu_time_than_others_on_a_public_trace() -> None:
    ours = run(synthetic(), 5859)
    for eviction in ("lru", "marconi"):
        other = replay(synthetic(), [TierSpec("L3", 5859, eviction=eviction)])
        assert saved(ours) > saved(other), eviction
        assert ours.tiers[0].pages_written < other.tiers[0].pages_written


def test_it_writes_less_than_half_of_what_admitting_all_does_where_room_is_short() -> None:
    everything = replay(synthetic(), [TierSpec("L3", 1000)])
    assert run(synthetic(), 1000).tiers[0].pages_written < everything.tiers[0].pages_written / 2


def test_where_writing_is_dear_it_writes_less() -> None:
    written = []
    for write_cost in (0.0, 0.125, 1.0):
        policy = Continuation(write_cost=write_cost)
        result = replay(synthetic(), [TierSpec("L3", 5859, policy.eviction, write=lambda policy=policy: policy)])
        written.append(result.tiers[0].pages_written)
    assert written[0] > written[1] > written[2] > 0


def shared_prefixes() -> Trace:
    """Eight long instructions, each used every half a minute by somebody new, who never comes back."""
    requests, block = list[TraceRequest](), 8 * 30
    for number in range(1200):
        start = 30 * (number % 8)
        path = (*range(start, start + 30), *range(block, block + 40))
        block += 40
        requests.append(TraceRequest(number * 4.0, 512 * 70, 10, path))
    return Trace("shared", 512, requests, block)


def test_what_many_share_is_kept_though_none_of_them_goes_on() -> None:
    ours = run(shared_prefixes(), 400, checked=True)
    assert ours.token_hit_share > 0.75 * 30 / 70, "all instructions fit"
    assert ours.tiers[0].pages_written < 0.4 * ours.references


def test_what_is_shared_takes_no_more_memory_the_more_often_it_is_used() -> None:
    policy = Continuation(remembered_pages=2000)
    replay(shared_prefixes(), [TierSpec("L3", 400, eviction=policy.eviction, write=lambda: policy)])
    assert len(policy._life_of) <= 2000 + 70
    assert len(policy._life_by_request) <= 2 * len(policy._lives)
    assert len(policy._shared_by_request) <= 2 * len(policy._lives)


def test_many_tenants_are_told_apart_as_far_as_there_are_values_for_them() -> None:
    trace = scans_and_sessions(10)
    tenants = [replace(each, tenant=f"{each.tenant} {number % 150}") for number, each in enumerate(trace.requests)]
    many = run(Trace("many", 512, tenants, trace.block_count), 300, checked=True)
    lru = replay(trace, [TierSpec("L3", 300)])
    assert many.usable_tokens > lru.usable_tokens


def test_with_room_for_all_it_reaches_the_ceiling() -> None:
    assert run(synthetic(), 50_000).usable_tokens == ceiling(synthetic()).usable_tokens


def test_it_is_deterministic_and_the_tier_stays_sound() -> None:
    part = Trace("part", 512, synthetic().requests[:900], synthetic().block_count)
    first, second = run(part, 700, checked=True), run(part, 700)
    assert first.usable_tokens == second.usable_tokens
    assert first.tiers[0].pages_written == second.tiers[0].pages_written


def scans_and_sessions(seed: int) -> Trace:
    """Sessions that go on after a minute with long prompts, between prompts that nobody asks for again."""
    rng = random.Random(seed)
    return Trace("mixed", 512, sorted(_mixed(rng), key=lambda request: request.at_s), 100_000)


def _mixed(rng: random.Random) -> Iterator[TraceRequest]:
    block = 0
    for _ in range(60):
        at_s, path = rng.uniform(0, 1500), list[int]()
        for _ in range(6):
            path += range(block, block + 4)
            block += 4
            yield TraceRequest(at_s, 512 * len(path), 10, tuple(path), "chat")
            at_s += rng.uniform(40, 80)
    for _ in range(2500):
        path = list(range(block, block + 6))
        block += 6
        yield TraceRequest(rng.uniform(0, 1900), 512 * 6, 10, tuple(path), "scan")


def test_it_learns_which_tenant_comes_back() -> None:
    trace = scans_and_sessions(7)
    ours, lru = run(trace, 300, checked=True), replay(trace, [TierSpec("L3", 300)])
    assert ours.usable_tokens > 1.5 * lru.usable_tokens
    assert ours.tiers[0].pages_written < 0.5 * lru.tiers[0].pages_written


def test_eviction_alone_learns_from_what_it_holds() -> None:
    trace = scans_and_sessions(8)
    alone = replay(trace, [TierSpec("L3", 600, eviction=lambda items: Continuation().eviction(items))])
    assert alone.usable_tokens > replay(trace, [TierSpec("L3", 600)]).usable_tokens


def test_it_forgets_the_oldest_pages_and_goes_on() -> None:
    trace = scans_and_sessions(9)
    policy = Continuation(remembered_pages=500)
    result = replay(trace, [TierSpec("L3", 300, eviction=policy.eviction, write=lambda: policy)])
    assert len(policy._life_of) <= 500 + 24
    assert result.usable_tokens > 0


def test_a_forecast_finds_the_chance_and_the_time_of_each_cell() -> None:
    """One kind is used again after 100 s three times of four, another one never."""
    forecast, rng = Forecast(), random.Random(1)
    open_lives = []
    for number in range(3000):
        now_s = number * 2.0
        for life, end_s in [pair for pair in open_lives if pair[1] <= now_s]:
            forecast.end(life, end_s)
            open_lives.remove((life, end_s))
        kind = "chat" if number % 2 else "scan"
        life = forecast.begin(now_s, tenant="", kind=kind, tokens=4000, new_tokens=1000, turn=0)
        if kind == "chat" and rng.random() < 0.75:
            open_lives.append((life, now_s + 100))
    now_s = 6000.0
    chat = forecast.begin(now_s, tenant="", kind="chat", tokens=4000, new_tokens=1000, turn=0)
    scan = forecast.begin(now_s, tenant="", kind="scan", tokens=4000, new_tokens=1000, turn=0)
    assert 0.5 * 0.75 / 90 < forecast.rate(chat, now_s) < 2 * 0.75 / 90
    assert forecast.rate(chat, now_s) > 50 * forecast.rate(scan, now_s)
    assert forecast.rate(chat, now_s + 70) > forecast.rate(chat, now_s), "it is more likely the nearer the time comes"
    assert forecast.rate(chat, now_s + 300) < 0.1 * forecast.rate(chat, now_s), "and hardly at all thereafter"


def test_ages_rise() -> None:
    assert list(AGES_S) == sorted(set(AGES_S))
    assert AGES_S[0] == 0
