"""Bounds against golden counts of public traces, and against every way of keeping pages where that can be tried."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from bench.admission.bounds import belady, ceiling, compute_bounds, upper_bound
from bench.admission.traces import Trace, TraceRequest, load_trace

GOLDEN = json.loads((Path(__file__).parent / "data" / "policies.json").read_text())
TRACES = Path(__file__).parents[2] / "bench" / "trace_files"
FILES = {"conv": "mooncake_conversation_trace.jsonl.zst", "synth": "mooncake_synthetic_trace.jsonl.zst"}


@pytest.fixture(scope="module", params=FILES)
def trace(request: pytest.FixtureRequest) -> tuple[str, Trace]:
    return request.param, load_trace(TRACES / FILES[request.param])


def test_belady_and_the_ceiling_are_the_golden_ones_exactly(trace: tuple[str, Trace]) -> None:
    name, requests = trace
    tokens = GOLDEN["tree_tokens"][name]
    assert ceiling(requests).usable_tokens == tokens["infinite_usable_tokens"]
    for capacity in (1000, 5859, 20000) if name == "synth" else (5859,):
        reached, expected = belady(requests, capacity), tokens[str(capacity)]["belady"]
        hits = GOLDEN["block_level_forward_hits"][name][str(capacity)]
        assert reached.hit_blocks == hits["belady_bypass"]
        assert reached.written_blocks == expected["writes_blocks"]
        assert round(reached.token_share, 6) == expected["tok"]
        assert belady(requests, capacity, bypass=False).hit_blocks == hits["belady_no_bypass"]
        program = GOLDEN["lp_certificate"][name].get(str(capacity))
        assert program is None or abs(reached.saved_share - program["belady_flop"]) < 6e-5


def test_the_program_certifies_belady_and_bounds_what_is_saved() -> None:
    requests = load_trace(TRACES / FILES["synth"], limit=800)
    bound, reached = upper_bound(requests, 400), belady(requests, 400)
    relaxed = upper_bound(requests, 400, parents=False)
    assert bound.block_share == pytest.approx(reached.block_share, abs=1e-9)
    assert reached.saved_share < bound.saved_share <= relaxed.saved_share < ceiling(requests).saved_share


def small_trace(seed: int) -> Trace:
    """Prompts over a tree of two branches at each block, three blocks deep."""
    rng = random.Random(seed)
    paths = [(0, 1 + a, 3 + 2 * a + b) for a in range(2) for b in range(2)]
    requests = [
        TraceRequest(float(number), 10 * length, 0, rng.choice(paths)[:length])
        for number, length in enumerate(rng.choices((1, 2, 3), k=7))
    ]
    return Trace("small", 10, requests, 7)


def best_hits(trace: Trace, capacity: int) -> int:
    """By trying all: after each request any set of pages that fits, is closed under parents, and was there or used."""
    parents = {1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 6: 2}
    states = {frozenset[int](): 0}
    for request in trace.requests:
        after: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            found = hits + len(list(itertools.takewhile(held.__contains__, request.blocks)))
            pages = sorted(held | set(request.blocks))
            for size in range(capacity + 1):
                for kept in map(frozenset, itertools.combinations(pages, size)):
                    if all(page == 0 or parents[page] in kept for page in kept):
                        after[kept] = max(after.get(kept, 0), found)
        states = after
    return max(states.values())


@pytest.mark.parametrize("seed", range(6))
def test_belady_is_the_best_of_all_ways_on_small_trees(seed: int) -> None:
    trace = small_trace(seed)
    for capacity in (1, 2, 3):
        assert belady(trace, capacity).hit_blocks == best_hits(trace, capacity), seed


def test_bounds_are_plain_values_for_json() -> None:
    bounds = compute_bounds(small_trace(0), 2, solve=False)
    assert json.loads(json.dumps(bounds)) == bounds
    assert bounds["capacity_tokens"] == 20
