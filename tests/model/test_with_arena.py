"""The reference engine over an L1 that pages and states share: with drafts, over a real L3, and pressure on both."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.tiny_engine import Generated, ScriptedDrafts, TinyEngine
from bench.tiny_reference import reference_generate, restored_differences
from hicache.cache import HiCache
from hicache.node import Tier
from hicache.policies.prefetch import PrefetchPolicy
from hicache.policies.snapshot import SnapshotPolicy
from hicache.pools import ArenaPool
from tests.model.sequences import SMALL, model_of, prompt_of

PAGE = SMALL.page_tokens
NAN_BYTE = 0xFF  # four of them are a NaN: what is read of it shows in every token after
L1_BYTES = 160 << 10


def engine_over(l3: Path, *, l1_bytes: int = L1_BYTES) -> TinyEngine:
    model = model_of(SMALL)
    cache = HiCache.open(
        model.spec(),
        l1_bytes=l1_bytes,
        l2_bytes=4 << 20,
        l3=f"lmdb://{l3}",
        l3_capacity_bytes=64 << 20,
        prefetch=PrefetchPolicy("wait_complete", threshold_tokens=0),
        snapshot_policy=SnapshotPolicy(state_interval_tokens=3 * PAGE),
    )
    assert isinstance(cache.l1, ArenaPool)
    cache.l1.memory.fill_(NAN_BYTE)
    return TinyEngine(model, cache, chunk_tokens=6 * PAGE)


def served_exactly(engine: TinyEngine, prompt: list[int], count: int, *, seed: int) -> Generated:
    """With drafts that are wrong at times; the same tokens, and the same restored bytes, as without any cache."""
    reference = reference_generate(engine.model, prompt, count)
    drafts = ScriptedDrafts(reference.tokens, (0.0, 0.3, 1.0)[seed % 3], SMALL.vocab, seed=seed)
    result = engine.generate(prompt, count, drafts=drafts, copy_restored_bytes=True)
    assert isinstance(result, Generated)
    assert result.tokens == reference.tokens
    assert result.restored is not None
    assert restored_differences(engine.spec, result.restored, reference) == []
    return result


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    lengths = (9, 13, 90, 11, 21, 110, 17)
    return [prompt_of(length, vocab=SMALL.vocab, seed=seed) for seed, length in enumerate(lengths)]


def test_drafts_over_a_shared_l1_and_a_real_l3_give_what_a_recompute_gives(
    tmp_path: Path, prompts: list[list[int]]
) -> None:
    rng = random.Random(2)
    engine = engine_over(tmp_path / "l3")
    with engine.cache as cache:
        for turn in range(24):
            result = served_exactly(engine, rng.choice(prompts), rng.choice((5, 14)), seed=turn)
            assert result.by_source["computed"] < 200
        room = cache._directory.index.arena
        assert room is not None
        assert room.units_passed > 0
        assert all(cache._directory.index.evicted[Tier.L1]), "there was pressure on every group"
        assert cache.flush(timeout_s=30)
    with engine_over(tmp_path / "l3").cache as cache:
        again = TinyEngine(engine.model, cache, chunk_tokens=6 * PAGE)
        restored = [served_exactly(again, prompt, 4, seed=seed).by_source["l3"] for seed, prompt in enumerate(prompts)]
        assert sum(restored) > 200
