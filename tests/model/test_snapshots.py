"""States that are shared, handed over and donated under the tiny model: what comes out is what a recompute gives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest

import pytest

from bench.tiny_engine import Busy, Generated, ScriptedDrafts, TinyEngine
from bench.tiny_hybrid import SequenceView
from bench.tiny_reference import reference_generate
from hicache.cache import HiCache
from hicache.node import Tier
from hicache.policies.snapshot import SnapshotPolicy
from hicache.sequence import Request
from tests.model.sequences import SMALL, model_of, prompt_of

PAGE = SMALL.page_tokens
EVERY_PAGE = SnapshotPolicy(prefill_interval_tokens=PAGE, state_interval_tokens=PAGE, cap_per_path=4)


@contextmanager
def tiny(
    *,
    kind: type[TinyEngine] = TinyEngine,
    pages: int = 64,
    slots: int = 16,
    policy: SnapshotPolicy = EVERY_PAGE,
    double_buffering: bool = True,
) -> Iterator[TinyEngine]:
    model = model_of(SMALL)
    with HiCache.open(
        model.spec(),
        l1_pages=pages,
        l1_state_slots=slots,
        snapshot_policy=policy,
        double_buffering=double_buffering,
    ) as cache:
        yield kind(model, cache, chunk_tokens=6 * PAGE)


def slots_used(engine: TinyEngine) -> list[int]:
    """Slots of L1 that somebody holds, but for what could be evicted, by group."""
    index = engine.cache._directory.index
    return [pool.capacity - index.room(Tier.L1, group) for group, pool in enumerate(index.pools[Tier.L1])]


def continuations(count: int) -> list[list[int]]:
    """Prompts that share 40 tokens and go on differently."""
    return [[*prompt_of(40, vocab=SMALL.vocab), *prompt_of(7, vocab=SMALL.vocab, seed=1 + one)] for one in range(count)]


def take_turns(engine: TinyEngine, prompts: list[list[int]], answer_tokens: int) -> list[tuple[int, ...]]:
    """One step of each in turn, until all have ended."""
    answers: dict[int, tuple[int, ...]] = {}

    def answering(number: int) -> Iterator[None]:
        result = yield from engine.steps(prompts[number], answer_tokens)
        assert isinstance(result, Generated)
        answers[number] = result.tokens

    for _ in zip_longest(*map(answering, range(len(prompts)))):
        pass
    return [answers[number] for number in range(len(prompts))]


def references(engine: TinyEngine, prompts: list[list[int]], answer_tokens: int) -> list[tuple[int, ...]]:
    return [reference_generate(engine.model, prompt, answer_tokens).tokens for prompt in prompts]


class InPlaceEngine(TinyEngine):
    """Writes the state where it has read it: into the snapshot that others read, too."""

    def view(self, request: Request) -> SequenceView:
        view = super().view(request)
        return replace(view, slot=view.read_slot)


@pytest.mark.parametrize("double_buffering", [False, True], ids=["copied", "double buffered"])
def test_requests_that_take_turns_on_one_snapshot_do_not_disturb_each_other(double_buffering: bool) -> None:
    prompts = continuations(3)
    with tiny(double_buffering=double_buffering) as engine:
        engine.generate(prompts[0][:40], 1)
        assert take_turns(engine, prompts, 12) == references(engine, prompts, 12)
        assert engine.cache.stats.tokens_by_source["l1"] == 3 * 40
        assert slots_used(engine) == [0] * len(engine.spec.groups)
        assert bool(engine.cache.stats.objects["restore.ok"]) != double_buffering
        assert bool(engine.cache.stats.objects["hand_over.ok"]) == double_buffering


def test_an_engine_that_writes_into_the_snapshot_is_found_out() -> None:
    """The positive control: without the rule the others compute something else."""
    prompts = continuations(3)
    with tiny(kind=InPlaceEngine) as engine:
        TinyEngine(engine.model, engine.cache, chunk_tokens=6 * PAGE).generate(prompts[0][:40], 1)
        assert take_turns(engine, prompts, 12) != references(engine, prompts, 12)


def test_threads_on_one_snapshot_do_not_disturb_each_other() -> None:
    prompts = continuations(4)
    answers: dict[int, object] = {}
    with tiny(slots=32, pages=128) as engine:
        engine.generate(prompts[0][:40], 1)
        start = threading.Barrier(4)

        def serve(number: int) -> None:
            start.wait(20)
            answers[number] = engine.generate(prompts[number], 12)

        threads = [threading.Thread(target=serve, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        expected = references(engine, prompts, 12)
        for number in range(4):
            result = answers[number]
            assert isinstance(result, Generated)
            assert result.tokens == expected[number]
        assert slots_used(engine) == [0] * len(engine.spec.groups)


@pytest.mark.parametrize("wrong_share", [None, 0.3], ids=["plain", "drafts"])
@pytest.mark.parametrize("slots", [3, 4, 16])
def test_with_hardly_any_slots_snapshots_are_given_up_and_outputs_stay(slots: int, wrong_share: float | None) -> None:
    with tiny(slots=slots) as engine:
        for prompt in [*continuations(2), *continuations(2)]:
            expected = reference_generate(engine.model, prompt, 21).tokens
            drafts = None if wrong_share is None else ScriptedDrafts(expected, wrong_share, SMALL.vocab)
            result = engine.generate(prompt, 21, drafts=drafts)
            assert isinstance(result, Generated)
            assert result.tokens == expected
        assert (engine.cache.stats.tokens_by_source["l1"] > 0) == (slots == 16)
        assert slots_used(engine) == [0] * len(engine.spec.groups)


def test_a_request_that_is_given_up_after_any_step_gives_its_slots_back_and_disturbs_nobody() -> None:
    prompts = continuations(2)
    with tiny() as engine:
        engine.generate(prompts[0][:40], 1)
        expected = references(engine, prompts[1:], 9)
        for steps in range(14):
            aborted = engine.steps(prompts[0], 9)
            for _ in range(steps):
                next(aborted, None)
            aborted.close()
            assert slots_used(engine) == [0] * len(engine.spec.groups)
        assert take_turns(engine, prompts[1:], 9) == expected


def test_a_turn_that_ended_on_a_boundary_is_gone_on_from_without_a_copy() -> None:
    policy = SnapshotPolicy(chunk_ends=False, state_interval_tokens=None)
    with tiny(policy=policy) as engine:
        prompt = prompt_of(42, vocab=SMALL.vocab)
        first = engine.generate(prompt, 11)  # 52 tokens are computed
        assert isinstance(first, Generated)
        assert engine.cache.stats.objects["donate.ok"] == 1
        copied = engine.cache.stats.objects["snapshot.ok"]
        second = [*prompt, *first.tokens, 5, 6]
        result = engine.generate(second, 8)
        assert isinstance(result, Generated)
        assert result.by_source["l1"] == 52
        assert result.tokens == reference_generate(engine.model, second, 8).tokens
        assert engine.cache.stats.objects["snapshot.ok"] == copied
        assert engine.cache.stats.objects["restore.ok"] == 0


@pytest.mark.parametrize("double_buffering", [False, True], ids=["copied", "double buffered"])
def test_br_150_a_prompt_that_fits_but_for_its_state_is_refused_once_and_served_when_there_is_room(
    double_buffering: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.tiny_engine.ROOM_TIMEOUT_S", 0.0)
    with tiny(slots=1, pages=16, double_buffering=double_buffering) as engine:
        prompt = prompt_of(30, vocab=SMALL.vocab)
        running = engine.steps(prompt_of(5, vocab=SMALL.vocab, seed=3), 3)
        next(running)
        assert engine.generate(prompt, 10) == Busy(computed_tokens=0, wanted_tokens=30)
        running.close()
        assert isinstance(engine.generate(prompt, 10), Generated)


def test_br_150_a_prompt_that_fits_by_tokens_and_not_by_pages_ends_busy_with_all_slots_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bench.tiny_engine.ROOM_TIMEOUT_S", 0.0)
    with tiny(pages=9, slots=3) as engine:
        prompt = prompt_of(36, vocab=SMALL.vocab)  # nine pages of four tokens, and one more to decode into
        result = engine.generate(prompt, 6)
        assert result == Busy(computed_tokens=36, wanted_tokens=37)
        assert slots_used(engine) == [0] * len(engine.spec.groups)
        assert isinstance(engine.generate(prompt, 1), Generated)
