"""The promise of the replay: a cache with the same policies, served the same requests, decides as it did."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from bench.admission.replay import Replayer, TierSpec
from bench.admission.traces import TraceRequest
from hicache.policies.choice import policies_of
from tests.core.small_engine import ATTENTION, PAGE, SmallEngine

L1_PAGES, L2_PAGES = 12, 48


class Decision(NamedTuple):
    """What became of one request, in pages."""

    found: int
    written: int  # into L2


def sessions_and_strangers(seed: int) -> list[TraceRequest]:
    """Sessions that go on after a minute, and prompts that nobody asks for again; each with one token that is over."""
    return sorted(_drawn(random.Random(seed)), key=lambda request: request.at_s)


def _drawn(rng: random.Random) -> Iterator[TraceRequest]:
    block = 0
    for _ in range(28):
        at_s, path = rng.uniform(0, 1000), tuple[int, ...]()
        for _ in range(5):
            path = (*path, block, block + 1)
            block += 2
            yield TraceRequest(at_s, PAGE * len(path) + 1, 1, path)
            at_s += rng.uniform(40, 80)
    for _ in range(100):
        path = tuple(range(block, block + rng.choice([3, 4])))
        block += 4
        yield TraceRequest(rng.uniform(0, 1200), PAGE * len(path) + 1, 1, path)


def tokens_of(request: TraceRequest) -> list[int]:
    return [token for block in request.blocks for token in range(PAGE * block, PAGE * (block + 1))] + [1_000_000]


def by_the_cache(requests: list[TraceRequest], eviction: str, write: str) -> list[Decision]:
    """A real HiCache, which computes page by page, and has written down what it will before the next request comes."""
    now_s = 0.0
    engine = SmallEngine(
        (ATTENTION,), l1=L1_PAGES, l2=L2_PAGES, eviction=eviction, write_policy=write, clock=lambda: now_s
    )
    decisions, written = list[Decision](), 0
    for request in requests:
        now_s = request.at_s
        found = engine.serve(tokens_of(request)).tokens // PAGE
        engine.settle()
        before, written = written, engine.cache.stats.objects["backup.ok"]
        decisions.append(Decision(found, written - before))
    engine.close()
    return decisions


def by_the_replay(requests: list[TraceRequest], eviction: str, write: str) -> list[Decision]:
    factory, policy = policies_of(eviction, write)
    replayer = Replayer(
        PAGE, [TierSpec("L1", L1_PAGES, factory), TierSpec("L2", L2_PAGES, factory, write=lambda: policy)]
    )
    served = [replayer.serve(request) for request in requests]
    return [Decision(each.usable_tokens // PAGE, each.written[1]) for each in served]


@pytest.mark.parametrize("write", ["write_through", "write_through_selective"])
def test_under_lru_each_request_finds_and_writes_what_the_replay_said(write: str) -> None:
    requests = sessions_and_strangers(1)[:120]
    assert by_the_cache(requests, "lru", write) == by_the_replay(requests, "lru", write)


def test_continuation_declines_and_keeps_in_the_cache_what_the_replay_said() -> None:
    """Not each decision is the same: a page of L2 that is in L1 as well may go before those after it, and a prompt is
    written page by page, while there is room for some of it."""
    requests = sessions_and_strangers(2)
    cache = by_the_cache(requests, "continuation", "continuation")
    replay = by_the_replay(requests, "continuation", "continuation")
    everything = by_the_replay(requests, "lru", "write_through")
    assert sum(one == other for one, other in zip(cache, replay, strict=True)) > 0.85 * len(requests)
    for of_all in (lambda decision: decision.found, lambda decision: decision.written):
        assert sum(map(of_all, cache)) == pytest.approx(sum(map(of_all, replay)), rel=0.1)
    assert sum(each.written for each in cache) < 0.5 * sum(each.written for each in everything)
    assert sum(each.found for each in cache) > 1.5 * sum(each.found for each in everything)
