"""Continuation: learns what goes on, keeps it, writes little, and is held to what it reaches on public traces."""

from __future__ import annotations

import random
from collections.abc import Iterator
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


def test_it_writes_at_most_half_of_what_admitting_all_does_where_room_is_short() -> None:
    for pages in (1000, 5859):
        everything = replay(synthetic(), [TierSpec("L3", pages)])
        assert run(synthetic(), pages).tiers[0].pages_written <= everything.tiers[0].pages_written / 2


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
