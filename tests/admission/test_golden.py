"""Exact counts of independent simulators, at every capacity of both of Mooncake's traces.

``data/policies.json``: block level from libCacheSim 0.3.5 and a second implementation that agrees, prefix trees from
a replayer that agrees with kvcache-simulator 0.1.3; 512-token blocks, traces of kvcache-ai/Mooncake at 3b5a594.
"""

from __future__ import annotations

import hashlib

import pytest
import zstandard

from bench.admission.__main__ import TRACES
from bench.admission.blocks import replay_blocks
from bench.admission.peers import VllmStoreThreshold
from bench.admission.replay import TierSpec, replay
from tests.admission.traces import CAPACITIES, GOLDEN, NAMES, trace


@pytest.mark.parametrize("name", NAMES)
def test_the_traces_are_those_that_were_counted(name: str) -> None:
    trace(name)
    with (TRACES / NAMES[name]).open("rb") as file:
        raw = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(file).read()
    assert (
        hashlib.sha256(raw).hexdigest() == GOLDEN["sha256"][NAMES[name].removeprefix("mooncake_").removesuffix(".zst")]
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_without_bounds_finds_the_ceiling(name: str) -> None:
    known = GOLDEN["tree_tokens"][name]
    result = replay(trace(name), [TierSpec("cache", None)])
    assert result.requests == known["requests"]
    assert result.input_tokens == known["input_tokens"]
    assert result.usable_tokens == known["infinite_usable_tokens"]
    counts = GOLDEN["block_level_forward_hits"][name]
    assert result.references == counts["accesses"]
    assert result.hit_blocks == counts["accesses"] - counts["unique"]
    assert result.tiers[0].pages_written == counts["unique"]


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("write", "known_as"), [("write_through", "lru"), (VllmStoreThreshold, "lru_store_threshold_2_tracker64k")]
)
def test_lru_trees_with_and_without_a_store_threshold(name: str, capacity: int, write: object, known_as: str) -> None:
    known = GOLDEN["tree_tokens"][name][str(capacity)][known_as]
    result = replay(trace(name), [TierSpec("cache", capacity, "lru", write)])  # type: ignore[arg-type]
    assert round(result.token_hit_share, 6) == known["tok"]
    assert round(result.hit_blocks / result.references, 6) == known["blk"]
    assert result.tiers[0].pages_written == known["writes_blocks"]


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("eviction", "known_as"), [("fifo", "fifo"), ("lru", "lru"), ("lfu", "lfu_tie_lru"), ("sieve", "sieve")]
)
def test_blocks_one_by_one(name: str, capacity: int, eviction: str, known_as: str) -> None:
    known = GOLDEN["block_level_forward_hits"][name][str(capacity)][known_as]
    assert replay_blocks(trace(name), capacity, eviction).hit_blocks == known
