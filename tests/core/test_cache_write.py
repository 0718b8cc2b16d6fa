"""The facade under each write policy, with a real executor: what reaches a store, what a flush and a close still write,
and what a slow or refusing L3 does to requests."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from hicache.cache import HiCache
from hicache.errors import ConfigError
from hicache.policies.write import WriteBack
from hicache.spec import CacheSpec
from tests.core.memory_l3 import Objects
from tests.core.small_engine import ATTENTION, HYBRID, PAGE, Make, SmallEngine, by_source, prompt

POLICIES = ["write_through", "write_through_selective", "write_back"]
DEADLINE_S = 20.0  # of what should end at once: a test that waits as long has failed


def serve_all(engine: SmallEngine, prompts: Sequence[Sequence[int]]) -> None:
    for tokens in prompts:
        engine.serve(tokens)


def restored_by_another(make: Make, address: str, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Pages that an engine with an empty L1 and L2 restores of each prompt, bytes checked."""
    engine = make(address=address, write_policy=WriteBack())  # writes nothing of its own meanwhile
    pages = [engine.serve(tokens).by_source["l3"] // PAGE for tokens in prompts]
    engine.cache.close(flush_timeout_s=0)
    return pages


@pytest.mark.parametrize("policy", POLICIES)
def test_what_each_policy_has_in_lmdb_when_the_engine_is_killed(policy: str, make: Make, tmp_path: Path) -> None:
    """Nothing is flushed: the store is closed as it is. Prompt 0 was asked for twice, prompt 1 once."""
    address = f"lmdb://{tmp_path}/store"
    engine = make(address=address, write_policy=policy)
    serve_all(engine, [prompt(5), prompt(4, seed=1), prompt(5)])
    if policy != "write_back":
        engine.settle()
    engine.cache.close(flush_timeout_s=0)
    kept = restored_by_another(make, address, [prompt(5), prompt(4, seed=1)])
    assert kept == {"write_through": [5, 4], "write_through_selective": [5, 0], "write_back": [0, 0]}[policy]


def test_write_back_to_lmdb_keeps_everything_through_evictions_and_a_close(make: Make, tmp_path: Path) -> None:
    address = f"lmdb://{tmp_path}/store"
    engine = make(address=address, l1=12, l2=12, write_policy=WriteBack(ahead_share=0.5))
    prompts = [prompt(4, seed=number) for number in range(12)]
    for tokens in prompts:
        engine.serve(tokens)
        wait_for_copies(engine)
    assert engine.cache.stats.tokens_lost == {}
    assert engine.cache.stats.objects["store.ok"] > 0
    engine.cache.close()
    assert restored_by_another(make, address, prompts) == [4] * 12


def wait_for_copies(engine: SmallEngine) -> None:
    """Until nothing is under way, without a flush."""
    with engine.cache._changed:
        assert engine.cache._changed.wait_for(lambda: not engine.cache._directory.open_jobs, DEADLINE_S)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flush_says_whether_everything_that_was_to_be_written_is(policy: str, make: Make) -> None:
    engine = make(objects={}, write_policy=policy)
    assert engine.l3 is not None
    engine.serve(prompt(4))
    assert engine.cache.flush(timeout_s=DEADLINE_S)
    written = {"write_through": 4, "write_through_selective": 0, "write_back": 4}[policy] * len(HYBRID)
    assert len(engine.l3.objects) == written
    assert engine.cache.flush(timeout_s=0)


def test_a_close_writes_what_write_back_has_left_and_the_next_engine_finds_it(make: Make) -> None:
    objects: Objects = {}
    with make(objects=objects, write_policy="write_back").cache as cache:
        SmallEngine.serve(engine_of(cache), prompt(4))
        assert objects == {}
    assert make(objects=objects).serve(prompt(4)).by_source == by_source(l3=4 * PAGE)


def engine_of(cache: HiCache) -> SmallEngine:
    """The engine around a cache that is there already."""
    engine = SmallEngine.__new__(SmallEngine)
    engine.spec, engine.cache = cache.spec, cache
    return engine


def test_requests_that_wait_for_room_get_it_from_pages_that_are_written_down(make: Make) -> None:
    """Four times what L1 has, by one request after the other that would rather wait than lose anything."""
    engine = make(ATTENTION, l1=8, l2=64, write_policy="write_back")
    for turn, number in [(turn, number) for turn in range(2) for number in range(4)]:
        tokens = prompt(7, seed=number)
        request = engine.cache.match(tokens)
        restored = engine.cache.load(request, timeout_s=DEADLINE_S)
        assert restored is not None
        assert restored.tokens == turn * 7 * PAGE
        engine.check(request, tokens, restored.tokens)
        for end in range(restored.tokens + PAGE, 7 * PAGE + 1, PAGE):
            assert engine.cache.extend(request, tokens=end, timeout_s=DEADLINE_S)
            engine.write_page(request, tokens, end)
            engine.cache.store(request, computed=end)
        engine.cache.release(request)
    assert engine.cache.stats.tokens_lost == {}


def test_requests_go_on_when_l3_never_answers_and_l2_is_full(make: Make) -> None:
    """What they do not wait for is lost, and counted; what L3 may still read stays where it is."""
    engine = make(ATTENTION, l1=8, l2=8, objects={}, write_policy="write_back")
    assert engine.l3 is not None
    engine.l3.gates["put"].clear()
    for number in range(12):
        tokens = prompt(6, seed=number)
        request = engine.cache.match(tokens)
        assert engine.cache.load(request, timeout_s=0.01) is not None
        for end in range(PAGE, 6 * PAGE + 1, PAGE):
            assert engine.cache.extend(request, tokens=end, timeout_s=0.01) or engine.cache.extend(
                request, tokens=end, timeout_s=DEADLINE_S
            )
            engine.write_page(request, tokens, end)
            engine.cache.store(request, computed=end)
        engine.cache.release(request)
    assert sum(engine.cache.stats.tokens_lost.values()) > 0
    engine.l3.gates["put"].set()
    wait_for_copies(engine)
    assert engine.serve(prompt(6, seed=11)).tokens == 6 * PAGE
    assert engine.cache.flush(timeout_s=DEADLINE_S)


def test_many_threads_that_wait_for_room_all_get_it(make: Make) -> None:
    engine = make(ATTENTION, l1=16, l2=16, objects={}, write_policy="write_back")
    failures: list[str] = []

    def client(number: int) -> None:
        for turn in range(6):
            tokens = prompt(3, seed=10 * number + turn)
            request = engine.cache.match(tokens)
            if engine.cache.load(request, timeout_s=DEADLINE_S) is None:
                failures.append(f"{number}: no load")
            elif not engine.cache.extend(request, tokens=3 * PAGE, timeout_s=DEADLINE_S):
                failures.append(f"{number}: no room")
            else:
                for end in range(PAGE, 3 * PAGE + 1, PAGE):
                    engine.write_page(request, tokens, end)
                engine.cache.store(request, computed=3 * PAGE)
            engine.cache.release(request)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_S)
    assert failures == []
    assert engine.cache.flush(timeout_s=DEADLINE_S)
    assert sum(engine.serve(prompt(3, seed=10 * n + t)).tokens for n in range(4) for t in range(6)) > 0


def test_a_write_policy_that_is_none_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    spec = CacheSpec("m", "r", (ATTENTION,), page_tokens=PAGE)
    store = tmp_path / "store"
    with pytest.raises(ConfigError, match="write_around"):
        HiCache.open(spec, l1_pages=4, l2_bytes=1 << 20, l3=f"file://{store}", write_policy="write_around")
    assert not store.exists()
    HiCache.open(spec, l1_pages=4, l2_bytes=1 << 20, l3=f"file://{store}").close()
    assert store.exists()


def test_a_request_that_waits_for_a_copy_that_is_refused_at_once_does_not_wait_for_its_deadline(make: Make) -> None:
    engine = make(ATTENTION, l1=8, l2=16, write_policy=WriteBack(ahead_share=0.05))
    engine.serve(prompt(8))
    wait_for_copies(engine)
    engine.cache._replica.executor.close()
    waited: list[float | None] = []
    engine.cache._changed.wait = lambda timeout=None: bool(waited.append(timeout))  # type: ignore[method-assign,func-returns-value]
    request = engine.cache.match(prompt(7, seed=1))
    engine.cache._directory.load(request._record)
    engine.cache._directory.take_jobs()
    assert engine.cache.extend(request, tokens=7 * PAGE, timeout_s=DEADLINE_S)
    assert waited == []
    assert engine.cache.stats.objects["backup.cancelled"] > 0
    engine.cache.release(request)
