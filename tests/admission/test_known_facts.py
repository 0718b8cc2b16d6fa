"""What is known of Mooncake's traces from other work: see the table in docs/policies.md."""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np
import pytest

from bench.admission.blocks import BlockCache, replay_blocks
from bench.admission.bounds import belady
from bench.admission.figures import drive_writes_per_day, fairness
from bench.admission.peers import VllmStoreThreshold
from bench.admission.replay import Result, TenantResult, TierSpec, replay
from bench.admission.traces import load_trace
from hicache.policies.eviction_kinds import Ttl
from tests.admission.random_ranks import RandomRank, replay_without_leaf_rule
from tests.admission.traces import TRACES, trace


def usable(name: str, pages: int | None, eviction: object = "lru", write: object = "write_through") -> float:
    return result(name, pages, eviction, write).token_hit_share


def result(name: str, pages: int | None, eviction: object = "lru", write: object = "write_through") -> Result:
    return replay(trace(name), [TierSpec("cache", pages, eviction, write)])  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "block", "token"), [("conv", 0.3664, 0.3736), ("synth", 0.6396, 0.6512)])
def test_ceilings(name: str, block: float, token: float) -> None:
    """Checks 1 and 2. Mooncake's Table 2 says 40 % and 66 %."""
    ceiling = result(name, None)
    assert round(ceiling.hit_blocks / ceiling.references, 4) == block
    assert round(ceiling.token_hit_share, 4) == token


@pytest.mark.parametrize(("ttl_s", "known"), [(60, 0.1054), (300, 0.2934), (600, 0.3501), (1800, 0.3706)])
def test_the_ttl_curve_of_conversations(ttl_s: float, known: float) -> None:
    """Check 14."""
    assert round(usable("conv", None, functools.partial(Ttl, ttl_s=ttl_s)), 4) == known


@pytest.mark.parametrize("seed", range(2))
def test_blocks_without_the_ones_before_them_are_of_no_use(seed: int) -> None:
    """Check 15: 0.0605 of tokens without the leaf rule, 39.9 % of references to blocks of no use; 0.4290 with it.

    The source draws ranks: so does this. A draw moves its digits by about 0.005, as measured over seeds.
    """
    alone = replay_without_leaf_rule(trace("synth"), 20_000, seed=seed)
    assert alone.usable_tokens / alone.input_tokens == pytest.approx(0.0605, abs=0.006)
    assert alone.orphan_share == pytest.approx(0.399, abs=0.006)
    assert usable("synth", 20_000, functools.partial(RandomRank, seed=seed)) == pytest.approx(0.4290, abs=0.012)


def test_a_victim_drawn_among_all_leaves_more_but_the_trap_is_the_same() -> None:
    """Our own random eviction forgets what was drawn before, so that old pages go too."""
    alone = replay_blocks(trace("synth"), 20_000, "random_leaf")
    leaves = usable("synth", 20_000, "random_leaf")
    assert alone.orphan_share > 0.25
    assert leaves > 2.5 * alone.usable_tokens / alone.input_tokens


def test_a_second_touch_wins_small_and_loses_large() -> None:
    """Check 16: 30 % more at 5,859 blocks, 26 % less at 20,000."""
    gains = [usable("conv", pages, write=VllmStoreThreshold) / usable("conv", pages) for pages in (5859, 20_000)]
    assert [round(gain - 1, 2) for gain in gains] == [0.30, -0.26]
    assert round(usable("conv", 50_000, write=VllmStoreThreshold), 4) == 0.2171


def test_a_frequency_duel_wins_small_and_loses_large() -> None:
    """Check 17: PegaFlow's regimes."""
    small, large = (usable("conv", pages, write="tiny_lfu") / usable("conv", pages) for pages in (1000, 20_000))
    assert small > 1.1
    assert large < 0.9


def test_few_blocks_make_most_reuses() -> None:
    """Check 18: the top 10 % of blocks make 75.1 % of reuses."""
    counts = Counter(block for request in trace("conv").requests for block in request.blocks)
    reuses = sorted((count - 1 for count in counts.values()), reverse=True)
    assert round(sum(reuses[: len(reuses) // 10]) / sum(reuses), 3) == 0.751


def test_all_sessions_of_claude_code_are_read_and_replayed() -> None:
    """96.3 % of blocks were there before, in 519 sessions with their sub-agents."""
    sessions = load_trace(TRACES / "claude_code_sessions_519.jsonl.zst")
    assert len({(request.session or "").split("/")[0] for request in sessions.requests}) == 519
    ceiling = replay(sessions, [TierSpec("cache", None)])
    assert ceiling.hit_blocks / ceiling.references == pytest.approx(0.963, abs=0.001)
    assert ceiling.requests == len(sessions.requests) == 35_002


def test_lru_of_single_objects_is_what_che_has_calculated() -> None:
    """Check 6: Zipf of 1.0 over a million objects, LRU of 10,000 and 100,000: 0.585 and 0.779.

    By Che's approximation, which a replay of a smaller universe then agrees with.
    """
    assert round(che_hit_share(1_000_000, 10_000), 3) == 0.585
    assert round(che_hit_share(1_000_000, 100_000), 3) == 0.779
    objects, requests, warm = 20_000, 120_000, 60_000
    rng = np.random.default_rng(1)
    weights = 1 / np.arange(1, objects + 1)
    drawn = rng.choice(objects, requests, p=weights / weights.sum()).tolist()
    cache = BlockCache(1000, block_tokens=1, eviction="lru")
    hits = [cache.access(block, 0, 0.0) for block in drawn]
    assert sum(hits[warm:]) / (requests - warm) == pytest.approx(che_hit_share(objects, 1000), abs=0.005)


def che_hit_share(objects: int, capacity: int) -> float:
    """An object is there if it was named within the time that it takes to name ``capacity`` other ones."""
    rates = 1 / np.arange(1, objects + 1)
    rates /= rates.sum()
    low, high = 0.0, 1e9
    for _ in range(100):
        time = (low + high) / 2
        low, high = (low, time) if -np.expm1(-rates * time).sum() > capacity else (time, high)
    return float((rates * -np.expm1(-rates * low)).sum())


def test_wear_of_a_drive_by_a_70b_model() -> None:
    """160 MiB a block, 7.68 TB a drive: 41.8 TB and 133 drive writes a day admitting all, 28 with a second touch, 24 by
    Belady's rule. Even that is more than drives are made for."""
    page_bytes, drive_bytes = 160 << 20, 7.68e12
    everything, touched = result("conv", 5859), result("conv", 5859, write=VllmStoreThreshold)
    best = belady(trace("conv"), 5859).written_blocks
    written = [everything.tiers[0].pages_written, touched.tiers[0].pages_written, best]
    days = [drive_writes_per_day(pages * page_bytes, everything.span_s, drive_bytes) for pages in written]
    assert round(written[0] * page_bytes / 1e12, 1) == 41.8
    assert [round(each) for each in days] == [133, 28, 24]


def test_tenants_share_alike_or_not() -> None:
    same, other, none = TenantResult(1, 100, 50), TenantResult(1, 10, 5), TenantResult(1, 100, 0)
    assert fairness([same, other]) == pytest.approx(1)
    assert fairness([same, none, none, none]) == pytest.approx(1 / 4)
    assert fairness([none]) == fairness([]) == 1
