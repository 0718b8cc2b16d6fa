"""The reference engine over the real cache, in one process: what L1 and L2 give back is what a recompute makes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.tiny_engine import Busy, Generated, ScriptedDrafts, TinyEngine
from bench.tiny_reference import reference_generate, restored_differences
from hicache.cache import HiCache
from hicache.policies.snapshot import SnapshotPolicy
from tests.model.sequences import SMALL, model_of, prompt_of

PAGE = SMALL.page_tokens


@pytest.fixture(params=[False, True], ids=["copied", "double buffered"])
def engine(request: pytest.FixtureRequest) -> Iterator[TinyEngine]:
    """L1 holds one long request and little more; L2 holds everything."""
    model = model_of(SMALL)
    policy = SnapshotPolicy(state_interval_tokens=3 * PAGE)
    with HiCache.open(
        model.spec(),
        l1_pages=48,
        l1_state_slots=6,
        l2_bytes=16 << 20,
        snapshot_policy=policy,
        double_buffering=request.param,
    ) as cache:
        yield TinyEngine(model, cache, chunk_tokens=6 * PAGE)


def served_exactly(engine: TinyEngine, prompt: list[int], count: int, *, wrong_share: float | None) -> Generated:
    reference = reference_generate(engine.model, prompt, count)
    drafts = None if wrong_share is None else ScriptedDrafts(reference.tokens, wrong_share, SMALL.vocab)
    result = engine.generate(prompt, count, drafts=drafts, copy_restored_bytes=True)
    assert isinstance(result, Generated)
    assert result.tokens == reference.tokens
    assert result.restored is not None
    assert restored_differences(engine.spec, result.restored, reference) == []
    assert engine.cache.flush(timeout_s=30)
    return result


@pytest.mark.parametrize("wrong_share", [None, 0.3], ids=["plain", "drafts"])
def test_conversations_that_push_each_other_out_of_l1_come_back_from_l2_to_the_bit(
    engine: TinyEngine, wrong_share: float | None
) -> None:
    prompts = {user: prompt_of(61 + user, vocab=SMALL.vocab, seed=user) for user in range(4)}
    restored = {"l1": 0, "l2": 0}
    for turn in range(3):
        for user, prompt in prompts.items():
            result = served_exactly(engine, prompt, 15, wrong_share=wrong_share)
            for tier in restored:
                restored[tier] += result.by_source[tier]
            assert result.by_source["computed"] <= (len(prompt) if turn == 0 else 15 + PAGE)
            prompts[user] = [*prompt, *result.tokens, *prompt_of(3, vocab=SMALL.vocab, seed=100 + turn)]
    assert restored["l2"] > 0


def test_a_prompt_served_twice_in_a_row_comes_from_l1(engine: TinyEngine) -> None:
    prompt = prompt_of(61, vocab=SMALL.vocab)
    served_exactly(engine, prompt, 4, wrong_share=None)
    assert served_exactly(engine, prompt, 4, wrong_share=None).by_source["l1"] == 60


def test_a_request_that_ends_with_a_filled_ring_leaves_nothing_of_it_to_the_next_one() -> None:
    model = model_of(SMALL)
    with HiCache.open(model.spec(), l1_pages=20, l1_state_slots=1, l2_bytes=16 << 20) as cache:
        engine = TinyEngine(model, cache, chunk_tokens=6 * PAGE)
        prompt = prompt_of(61, vocab=SMALL.vocab)
        answer = reference_generate(model, prompt, 60).tokens
        broken_off = engine.generate(prompt, 60, drafts=ScriptedDrafts(answer, 0.0, SMALL.vocab))
        assert isinstance(broken_off, Busy)
        assert cache.l1.state[engine.spec.group_index("gdn")]["ring_count"].any(), (
            "the slot was left with a filled ring"
        )
        for seed in range(2):
            served_exactly(engine, prompt_of(30, vocab=SMALL.vocab, seed=seed), 5, wrong_share=0.5)
