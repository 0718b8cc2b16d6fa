"""The engine's loop: whatever was cached, drafted or refused, the output is that of a full recompute."""

from __future__ import annotations

import random
from itertools import count as counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.tiny_engine import Busy, Generated, ScriptedDrafts, TinyEngine
from bench.tiny_hybrid import TinyConfig
from bench.tiny_reference import Reference, reference_generate, restored_differences
from hicache.errors import ConfigError
from hicache.policies.snapshot import SnapshotPolicy
from tests.model.local_cache import LocalCache, StoreCall
from tests.model.sequences import DEFAULT, SMALL, model_of, prompt_of

PAGE = SMALL.page_tokens


def engine_of(
    config: TinyConfig = SMALL, *, pages: int = 64, chunk_pages: int = 6, interval_pages: int = 3
) -> TinyEngine:
    model = model_of(config)
    return TinyEngine(
        model,
        LocalCache(
            model.spec(),
            pages=pages,
            policy=SnapshotPolicy(state_interval_tokens=interval_pages * config.page_tokens),
        ),
        chunk_tokens=chunk_pages * config.page_tokens,
    )


def local(engine: TinyEngine) -> LocalCache:
    assert isinstance(engine.cache, LocalCache)
    return engine.cache


def served(engine: TinyEngine, prompt: list[int], count: int, **settings: object) -> Generated:
    result = engine.generate(prompt, count, copy_restored_bytes=True, **settings)
    assert isinstance(result, Generated)
    return result


def assert_exact(engine: TinyEngine, result: Generated, prompt: list[int], count: int) -> Reference:
    reference = reference_generate(engine.model, prompt, count)
    assert result.tokens == reference.tokens
    assert result.restored is not None
    assert restored_differences(engine.spec, result.restored, reference) == []
    return reference


def test_a_cold_request_computes_everything_and_a_repeat_all_but_the_rest_of_the_last_page() -> None:
    engine = engine_of(DEFAULT)
    prompt = prompt_of(135, vocab=DEFAULT.vocab)
    for restored in (0, 128):
        result = served(engine, prompt, 20)
        assert result.by_source == {"l1": restored, "l2": 0, "l3": 0, "computed": 135 - restored}
        assert_exact(engine, result, prompt, 20)


def test_a_repeat_of_a_prompt_that_ends_with_a_page_leaves_exactly_that_page_to_compute() -> None:
    engine = engine_of()
    prompt = prompt_of(10 * PAGE, vocab=SMALL.vocab)
    served(engine, prompt, 1)
    assert served(engine, prompt, 1).by_source["computed"] == PAGE


def test_the_next_turn_restores_the_answer_of_the_last_one_too() -> None:
    engine = engine_of(interval_pages=100)
    first = prompt_of(50, vocab=SMALL.vocab)
    answer = served(engine, first, 31).tokens
    second = [*first, *answer, *prompt_of(9, vocab=SMALL.vocab, seed=1)]
    result = served(engine, second, 10)
    assert result.by_source["l1"] == (50 + 31 - 1) // PAGE * PAGE
    assert_exact(engine, result, second, 10)


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_any_conversation_over_any_chunking_gives_what_a_recompute_gives(data: st.DataObject) -> None:
    engine = engine_of(
        chunk_pages=data.draw(st.integers(1, 9), label="chunk_pages"),
        interval_pages=data.draw(st.integers(1, 9), label="interval_pages"),
    )
    prompt: list[int] = []
    for turn in range(data.draw(st.integers(2, 4), label="turns")):
        prompt = prompt + prompt_of(data.draw(st.integers(1, 40), label="new tokens"), vocab=SMALL.vocab, seed=turn)
        count = data.draw(st.integers(1, 20), label="count")
        drafts = None
        if data.draw(st.booleans(), label="drafts"):
            answer = reference_generate(engine.model, prompt, count).tokens
            drafts = ScriptedDrafts(answer, data.draw(st.sampled_from((0.0, 0.3, 1.0))), SMALL.vocab, seed=turn)
        result = served(engine, prompt, count, drafts=drafts)
        assert_exact(engine, result, prompt, count)
        prompt = [*prompt, *result.tokens]
    assert local(engine).free_pages == dict.fromkeys(local(engine).free_pages, 64)


@pytest.mark.parametrize("wrong_share", [0.0, 0.4, 1.0])
def test_drafts_never_change_the_output_nor_what_is_cached(wrong_share: float) -> None:
    prompt = prompt_of(45, vocab=SMALL.vocab)
    plain, speculative = engine_of(), engine_of()
    answer = served(plain, prompt, 40).tokens
    result = served(speculative, prompt, 40, drafts=ScriptedDrafts(answer, wrong_share, SMALL.vocab))
    assert result.tokens == answer
    assert (result.drafts_accepted == result.drafts_offered) == (wrong_share == 0.0)
    assert (result.drafts_accepted > 0) == (wrong_share < 1.0)
    assert local(speculative).snapshots.keys() == local(plain).snapshots.keys()
    extension = [*prompt, *answer, 1, 2, 3]
    assert_exact(speculative, served(speculative, extension, 5), extension, 5)


def test_a_snapshot_is_asked_for_only_with_an_empty_ring_while_pages_are_stored_with_a_filled_one() -> None:
    engine = engine_of(interval_pages=5)
    prompt = prompt_of(30, vocab=SMALL.vocab)
    answer = reference_generate(engine.model, prompt, 60).tokens
    served(engine, prompt, 60, drafts=ScriptedDrafts(answer, 0.3, SMALL.vocab))
    stores = local(engine).stores
    assert all(store.state_pending == 0 for store in stores if store.state_at is not None)
    assert any(store.state_pending > 0 for store in stores)
    assert [store.state_at for store in stores if store.state_at is not None] == [24, 28, 40, 60, 80, 88]


def test_a_state_is_stored_at_chunk_ends_last_boundaries_intervals_and_the_end() -> None:
    engine = engine_of(chunk_pages=4, interval_pages=3)
    prompt = prompt_of(40, vocab=SMALL.vocab)
    served(engine, prompt, 20)
    with_state = [store.state_at for store in local(engine).stores if store.state_at is not None]
    assert with_state == [16, 32, 36, 40, 48, 56]
    assert StoreCall(44, None, 0) in local(engine).stores
    assert local(engine).stores[-1] == StoreCall(56, 56, 0, donate=False)  # of 59 tokens


def test_a_model_without_state_decodes_with_drafts_and_asks_for_no_snapshot() -> None:
    config = TinyConfig(layers=("swa", "full"), page_tokens=4, block_tokens=16, context_block_tokens=32)
    engine = engine_of(config)
    prompt = prompt_of(45, vocab=config.vocab)
    answer = reference_generate(engine.model, prompt, 25).tokens
    for _ in range(2):
        result = served(engine, prompt, 25, drafts=ScriptedDrafts(answer, 0.3, config.vocab))
        assert_exact(engine, result, prompt, 25)
    assert result.by_source["computed"] == 1
    assert {store.state_at for store in local(engine).stores} == {None}


def test_another_salt_restores_nothing_and_the_same_salt_does() -> None:
    engine = engine_of()
    prompt = prompt_of(50, vocab=SMALL.vocab)
    hits = [served(engine, prompt, 3, salt=salt).by_source["l1"] for salt in (b"a", b"b", b"a")]
    assert hits == [0, 0, 48]


def test_no_room_for_the_prompt_is_busy_and_gives_everything_back() -> None:
    engine = engine_of(pages=8)
    free = local(engine).free_pages
    assert engine.generate(prompt_of(60, vocab=SMALL.vocab), 3) == Busy(computed_tokens=24, wanted_tokens=48)
    assert local(engine).free_pages == free
    assert not local(engine).live


def test_a_full_l1_in_the_middle_of_decode_is_busy_and_what_was_computed_is_kept() -> None:
    engine = engine_of(pages=8)
    prompt = prompt_of(28, vocab=SMALL.vocab)
    for drafts in (None, ScriptedDrafts(reference_generate(engine.model, prompt, 30).tokens, 0.0, SMALL.vocab)):
        result = engine.generate(prompt, 30, drafts=drafts)
        assert isinstance(result, Busy)
        assert not local(engine).live
    assert served(engine, prompt, 3).by_source["l1"] == 24


def test_no_free_state_slot_is_busy() -> None:
    model = model_of(SMALL)
    engine = TinyEngine(model, LocalCache(model.spec(), state_slots=1), chunk_tokens=PAGE)
    held = local(engine).match([1, 2, 3])
    assert local(engine).load(held) is not None
    assert engine.generate([1, 2, 3], 1) == Busy(computed_tokens=0, wanted_tokens=3)
    local(engine).release(held)
    assert isinstance(engine.generate([1, 2, 3], 1), Generated)


def test_a_request_that_fails_is_released() -> None:
    engine = engine_of()
    with pytest.raises(IndexError):
        engine.generate([SMALL.vocab + 5] * 10, 3)
    assert not local(engine).live


def test_ttft_counts_from_match_to_the_first_token_and_not_the_copies_for_comparing() -> None:
    model = model_of(SMALL)
    ticks = counter()
    engine = TinyEngine(
        model,
        LocalCache(model.spec()),
        chunk_tokens=PAGE,
        clock=lambda: float(next(ticks)),
    )
    # Ticks: 0 start, 1 and 2 around the copies, 3 first token, 4 end.
    result = served(engine, prompt_of(9, vocab=SMALL.vocab), 3)
    assert (result.ttft_s, result.total_s) == (2.0, 3.0)


@pytest.mark.parametrize("value", [0, -4, 6])
def test_a_chunk_that_is_no_multiple_of_the_page_is_refused(value: int) -> None:
    model = model_of(SMALL)
    with pytest.raises(ConfigError, match=f"chunk_tokens = {value}"):
        TinyEngine(model, LocalCache(model.spec()), chunk_tokens=value)


@pytest.mark.parametrize("donate", [False, True])
def test_the_state_of_a_request_that_ends_on_a_boundary_is_donated_if_the_engine_says_so(donate: bool) -> None:
    engine = engine_of()
    engine.donate = donate
    served(engine, prompt_of(40, vocab=SMALL.vocab), 13)  # 52 tokens are computed
    assert local(engine).stores[-1] == StoreCall(52, 52, 0, donate=donate)
    assert not any(store.donate for store in local(engine).stores[:-1])


def test_scripted_drafts_are_right_and_wrong_in_the_same_places_every_time() -> None:
    answer = [random.Random(3).randrange(50) for _ in range(400)]
    drafts = ScriptedDrafts(answer, 0.25, 50, seed=4)
    proposals = [list(drafts.propose(answer[:start], 4)) for start in range(390)]
    assert proposals == [list(drafts.propose(answer[:start], 4)) for start in range(390)]
    wrong = sum(
        token != truth
        for start, tokens in enumerate(proposals)
        for token, truth in zip(tokens, answer[start:], strict=False)
    )
    assert 0.2 < wrong / (4 * 390) < 0.3
    assert list(drafts.propose(answer, 4)) == []
