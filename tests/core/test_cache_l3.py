"""The facade and its L3: waiting for it, whatever it does, in many threads, and the end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from hicache.cache import HiCache
from hicache.errors import ConfigError, UsageError
from hicache.l3 import Done, L3Item
from hicache.outcome import Outcome
from hicache.policies.prefetch import PrefetchMode, PrefetchPolicy
from hicache.spec import CacheSpec
from tests.core.memory_l3 import MemoryL3, Objects
from tests.core.small_engine import HYBRID, PAGE, Make, by_source, fill, prompt

DEADLINE_S = 20.0  # of what should end at once: a test that waits as long has failed


class Clock:
    """Stands still until it is told the time."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_br_033_wait_complete_waits_for_the_plan_and_for_every_page(make: Make) -> None:
    engine = make(objects={})
    assert engine.l3 is not None
    fill(engine, prompt(6))
    for gate in ("lookup", "get"):
        engine.l3.gates[gate].clear()
    request = engine.cache.match(prompt(6))
    engine.cache.prefetch(request)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(engine.cache.wait, request)
        engine.l3.arrived.acquire(timeout=DEADLINE_S)
        assert not engine.cache.is_ready(request)
        engine.l3.gates["lookup"].set()
        engine.l3.arrived.acquire(timeout=DEADLINE_S)
        assert not engine.cache.is_ready(request)
        assert not waiting.done()
        engine.l3.gates["get"].set()
        assert waiting.result(DEADLINE_S)
    restored = engine.cache.load(request)
    assert restored is not None
    assert restored.by_source == by_source(l3=6 * PAGE)
    engine.check(request, prompt(6), restored.tokens)
    engine.cache.release(request)


@pytest.mark.parametrize(
    ("mode", "patience_s"),
    [("best_effort", 0.0), ("timeout", 1.0 + 0.25 * (6 * PAGE + 1) / 1024), ("wait_complete", 30.0)],
)
@pytest.mark.parametrize("stalled", ["lookup", "get"])
def test_br_034_no_mode_waits_past_its_deadline_whatever_stalls(
    mode: PrefetchMode, patience_s: float, stalled: str, make: Make
) -> None:
    clock = Clock()
    engine = make(objects={}, clock=clock, prefetch=PrefetchPolicy(mode, threshold_tokens=0))
    assert engine.l3 is not None
    fill(engine, prompt(6))
    engine.l3.gates[stalled].clear()
    request = engine.cache.match(prompt(6))
    engine.cache.prefetch(request)
    if patience_s:
        clock.now_s += patience_s - 0.001
        assert not engine.cache.is_ready(request)
        clock.now_s += 0.001
    assert engine.cache.is_ready(request)
    assert engine.cache.wait(request) is False
    restored = engine.cache.load(request)
    assert restored is not None
    assert restored.tokens == 0
    engine.compute(request, prompt(6), 0)
    engine.cache.release(request)
    engine.l3.gates[stalled].set()  # late bytes arrive
    engine.settle()
    assert engine.serve(prompt(6)).tokens == 6 * PAGE


def test_a_request_may_ask_for_another_mode_than_the_cache_has(make: Make) -> None:
    clock = Clock()
    engine = make(objects={}, clock=clock)
    assert engine.l3 is not None
    fill(engine, prompt(6))
    engine.l3.gates["get"].clear()
    request = engine.cache.match(prompt(6))
    engine.cache.prefetch(request, mode="best_effort")
    assert engine.cache.is_ready(request)
    engine.cache.prefetch(request, mode="wait_complete")  # the second time it does nothing
    assert request.prefetch_deadline_s == clock.now_s
    with pytest.raises(ConfigError, match="best_effort, wait_complete, timeout"):
        engine.cache.prefetch(request, mode="eager")  # type: ignore[arg-type]
    engine.cache.release(request)


def test_best_effort_uses_what_has_arrived_when_it_is_asked(make: Make) -> None:
    """Also when it is known what fetches and prefills take: nobody waits, so nothing comes too late."""
    engine = make(objects={}, prefetch=PrefetchPolicy("best_effort", threshold_tokens=0))
    for seed in range(3):
        fill(engine, prompt(6, seed=seed))
        request = engine.cache.match(prompt(6, seed=seed))
        engine.cache.prefetch(request)
        engine.settle()  # the engine schedules it much later
        assert engine.cache.wait(request) is True
        restored = engine.cache.load(request)
        assert restored is not None
        assert restored.by_source == by_source(l3=6 * PAGE)
        engine.cache.release(request)
        engine.cache.tell_prefill(0, 6 * PAGE, seconds=60.0)


def test_wait_returns_at_once_for_a_request_that_fetches_nothing(make: Make) -> None:
    engine = make(objects={})
    request = engine.cache.match(prompt(6))
    assert engine.cache.is_ready(request)
    assert engine.cache.wait(request) is True
    engine.cache.release(request)


def test_a_short_prompt_is_not_worth_a_prefetch(make: Make) -> None:
    engine = make(objects={}, prefetch=PrefetchPolicy("wait_complete", threshold_tokens=6 * PAGE + 1))
    assert engine.l3 is not None
    fill(engine, prompt(6))
    assert engine.serve(prompt(6)).tokens == 0
    assert engine.l3.calls["lookup"] == 0
    assert engine.cache.stats.prefetch_declined == {"below_threshold": 1}


@pytest.mark.parametrize("outcome", [Outcome.CORRUPT, Outcome.UNAVAILABLE, Outcome.REFUSED, Outcome.NO_SPACE])
@pytest.mark.parametrize("operation", ["lookup", "get", "put"])
def test_whatever_l3_answers_a_request_is_served(operation: str, outcome: Outcome, make: Make) -> None:
    engine = make(objects={})
    assert engine.l3 is not None
    fill(engine, prompt(6))
    engine.l3.fault = lambda asked, key: outcome if asked == operation else None
    restored = engine.serve(prompt(6))
    engine.settle()
    assert restored.tokens == (6 * PAGE if operation == "put" else 0)
    assert engine.serve(prompt(6)).tokens == 6 * PAGE


def flipped(payload: bytes) -> bytes:
    return bytes([payload[0] ^ 1]) + payload[1:]


@pytest.mark.parametrize("harm", [flipped, lambda payload: payload[:-1], lambda payload: b""])
def test_bytes_that_were_harmed_in_l3_are_never_served(harm: Callable[[bytes], bytes], make: Make) -> None:
    engine = make(objects={})
    assert engine.l3 is not None
    fill(engine, prompt(6))
    for key, (checksum, payload) in engine.l3.objects.items():
        engine.l3.objects[key] = checksum, harm(payload)
    assert engine.serve(prompt(6)).tokens == 0
    assert sum(engine.cache.stats.prefetch_dropped.values()) == 6 * PAGE


class RudeL3(MemoryL3):
    """Breaks every promise that an L3 makes."""

    rudeness = ""

    def lookup(self, keys: object, *, timeout_s: float) -> list[Outcome]:
        if self.rudeness == "lookup raises":
            raise RuntimeError(self.rudeness)
        outcomes = super().lookup(keys, timeout_s=timeout_s)  # type: ignore[arg-type]
        return outcomes[:-1] if self.rudeness == "lookup is short" else outcomes

    def get(self, items: object, *, timeout_s: float, done: Done) -> None:
        batch: list[L3Item] = list(items)  # type: ignore[call-overload]
        match self.rudeness:
            case "get raises":
                raise RuntimeError(self.rudeness)
            case "get answers short":
                done([Outcome.OK])
            case "get answers nonsense":
                done(["fine"] * len(batch))  # type: ignore[list-item]
            case "get answers twice":
                super().get(batch, timeout_s=timeout_s, done=done)
                done([Outcome.IO_ERROR] * len(batch))
            case _:
                super().get(batch, timeout_s=timeout_s, done=done)


@pytest.mark.parametrize(
    ("rudeness", "tokens"),
    [
        ("lookup raises", 0),
        ("lookup is short", 0),
        ("get raises", 0),
        ("get answers short", 0),
        ("get answers nonsense", 0),
        ("get answers twice", 6 * PAGE),
    ],
)
def test_an_l3_that_breaks_its_promises_breaks_no_request(
    rudeness: str, tokens: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.core.small_engine.MemoryL3", RudeL3)
    monkeypatch.setattr(RudeL3, "rudeness", "")
    engine = make(objects={})
    fill(engine, prompt(6))
    monkeypatch.setattr(RudeL3, "rudeness", rudeness)
    assert engine.serve(prompt(6)).tokens == tokens
    engine.settle()
    assert engine.serve(prompt(6)).tokens == 6 * PAGE


def test_late_bytes_never_land_in_slots_that_others_use(make: Make) -> None:
    engine = make(l1=16, l2=12, objects={}, prefetch=PrefetchPolicy("best_effort", threshold_tokens=0))
    assert engine.l3 is not None
    fill(engine, prompt(5), *(prompt(5, seed=seed) for seed in range(1, 8)))
    engine.l3.gates["get"].clear()
    request = engine.cache.match(prompt(5))
    engine.cache.prefetch(request)
    for _ in range(2):  # the lookup, then the fetch, have reached L3
        assert engine.l3.arrived.acquire(timeout=DEADLINE_S)
    engine.cache.release(request)
    for seed in range(1, 8):
        engine.serve(prompt(5, seed=seed))
    engine.l3.gates["get"].set()
    engine.settle()
    for seed in range(8):
        engine.serve(prompt(5, seed=seed))  # checks the bytes


def test_requests_of_many_threads_interleave(make: Make) -> None:
    engine = make(l1=48, l2=24, objects={})
    trunks = [prompt(3, seed=seed) for seed in range(3)]

    def work(seed: int) -> int:
        choice = random.Random(seed)
        tokens = 0
        for _ in range(12):
            trunk = choice.choice(trunks)
            tail = [choice.randrange(3) for _ in range(choice.randrange(2 * PAGE))]
            tokens += engine.serve(trunk[: choice.randrange(1, len(trunk))] + tail).tokens
        return tokens

    with ThreadPoolExecutor(4) as threads:
        served = list(threads.map(work, range(4), timeout=DEADLINE_S))
    engine.settle()
    stats = engine.cache.stats
    assert sum(served) == sum(stats.tokens_by_source[source] for source in ("l1", "l2", "l3"))
    assert stats.tokens_requested == sum(stats.tokens_by_source.values())
    assert stats.requests == 48
    assert stats.prefetch_in_flight == 0
    assert sum(served) > 0


def test_two_engines_share_what_both_compute_at_the_same_time(make: Make) -> None:
    objects: Objects = {}
    engines = [make(objects=objects) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda engine: [engine.serve(prompt(5, seed=s)) for s in range(4)], engines))
    for engine in engines:
        engine.settle()
    assert make(objects=objects).serve(prompt(5)).by_source == by_source(l3=5 * PAGE)


def test_flush_tells_whether_everything_was_written(make: Make) -> None:
    engine = make(objects={})
    assert engine.l3 is not None
    engine.l3.gates["put"].clear()
    engine.serve(prompt(3))
    assert engine.cache.flush(timeout_s=0.0) is False
    assert engine.cache.flush(timeout_s=0.01) is False
    engine.l3.gates["put"].set()
    engine.settle()
    assert len(engine.l3.objects) == 3 * 3


@pytest.mark.parametrize("stalled", ["lookup", "get", "put"])
def test_closing_in_the_middle_of_everything_ends_everything(stalled: str, make: Make) -> None:
    engine = make(objects={})
    assert engine.l3 is not None
    fill(engine, prompt(6))
    engine.l3.gates[stalled].clear()
    started = threading.Barrier(4)

    def work(seed: int) -> str:
        request = engine.cache.match(prompt(6, seed=seed % 2))
        started.wait(DEADLINE_S)
        try:
            engine.cache.prefetch(request)
            engine.cache.wait(request)
            if (restored := engine.cache.load(request)) is not None:
                engine.compute(request, prompt(6, seed=seed % 2), restored.tokens)
        except UsageError as error:
            return str(error)
        finally:
            engine.cache.release(request)
        return "served"

    with ThreadPoolExecutor(3) as threads:
        working = [threads.submit(work, seed) for seed in range(3)]
        started.wait(DEADLINE_S)
        assert engine.l3.arrived.acquire(timeout=DEADLINE_S)
        begun_s = time.monotonic()
        engine.close()
        engine.close()
        assert time.monotonic() - begun_s < 5.0
        assert {future.result(DEADLINE_S) for future in working} <= {"the cache has been closed", "served"}
    assert engine.l3.is_closed
    for refused in (lambda: engine.cache.match([1]), lambda: engine.serve(prompt(1))):
        with pytest.raises(UsageError, match="closed"):
            refused()


def test_a_cache_closes_at_the_end_of_its_block() -> None:
    spec = CacheSpec("m", "r", HYBRID, page_tokens=PAGE)
    with HiCache.open(spec, l1_pages=4, l1_state_slots=2, l2_bytes=1 << 20) as cache:
        request = cache.match([1, 2, 3, 4, 5])
        assert cache.load(request) is not None
    with pytest.raises(UsageError, match="closed"):
        cache.match([1])
    cache.release(request)
    cache.close()
