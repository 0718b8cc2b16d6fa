"""Agreement with kvcache-simulator (KVCache.AI, Apache-2.0): with its figures, and, where `pip install
kvcache-simulator==0.1.3` has been run, with the program itself on traces that nobody has tuned anything to.

It evicts FIFO without regard to prefixes, which is the mode of ``bench.admission.blocks``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.admission.blocks import replay_blocks
from bench.admission.bounds import belady
from bench.admission.replay import TierSpec, replay
from bench.admission.traces import Trace
from tests.admission.synthetic import BLOCK, conversations
from tests.admission.traces import GOLDEN, trace


def token_share(trace: Trace, policy: str, pages: int | None) -> float:
    """Of the second half of the requests, as it counts."""
    if policy == "optimal":
        assert pages is not None
        return belady(trace, pages, warm_share=0.5).token_share
    if policy == "fifo":
        assert pages is not None
        blocks = replay_blocks(trace, pages, "fifo", warm_share=0.5)
        return blocks.usable_tokens / blocks.input_tokens
    return replay(trace, [TierSpec("cache", pages, policy)], warm_share=0.5).token_hit_share


@pytest.mark.parametrize("policy", ["lru", "fifo", "optimal"])
@pytest.mark.parametrize("pages", [409, 1638, 6553, 13107, 26214])
def test_its_figures_for_conversations(policy: str, pages: int) -> None:
    known = GOLDEN["kvcache_simulator_0.1.3_last50pct"]["conv"]
    assert round(token_share(trace("conv"), policy, pages), 4) == known[policy][str(pages)]


def test_its_ceiling_for_conversations() -> None:
    known = GOLDEN["kvcache_simulator_0.1.3_last50pct"]["conv"]
    assert round(token_share(trace("conv"), "lru", None), 4) == known["ceiling"]


@pytest.mark.parametrize("seed", range(3))
def test_the_program_itself(seed: int, tmp_path: Path) -> None:
    from kvcache_sim import plan, policies
    from kvcache_sim import trace as traces

    drawn = conversations(seed, requests=600, decodes=False)
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for request in drawn.requests:
            fields = {"timestamp": request.at_s, "input_length": request.tokens, "output_length": 1}
            file.write(json.dumps(fields | {"hash_ids": list(request.blocks), "block_size": BLOCK}) + "\n")
    theirs = plan.build_execution_plan(traces.parse_trace_file(path))
    for pages in (30, 60, 120):
        for policy in ("lru", "fifo", "optimal"):
            known = policies.simulate_policy(theirs, policy, pages)
            assert known.measurementMode == "fixed_window", "it is full before the second half"
            assert token_share(drawn, policy, pages) == pytest.approx(known.hitRate, abs=1e-9)
