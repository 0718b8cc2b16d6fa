"""An engine's metrics: every scrape adds up whatever happens, every metric moves, and all of them are documented."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing
from functools import cache
from random import Random

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from hicache.job_times import JobTimes
from hicache.jobs import FetchJob, TransferItem
from hicache.metrics import PREFIX, EngineCollector
from hicache.outcome import Outcome
from hicache.policies.read import LoadFacts, ReadCosts
from hicache.spec import CacheSpec
from tests.core.slot_engine import SlotEngine
from tests.core.small_engine import ATTENTION, HYBRID, PAGE, STATE, SmallEngine, fill, prompt
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.rig import wait_until
from tests.observability.conservation import (
    Scrape,
    check_engine,
    check_every_scrape_of,
    read_scrape,
    total,
)
from tests.observability.documented import documented_metrics

FAULTS = (Outcome.IO_ERROR, Outcome.CORRUPT, Outcome.DEADLINE, Outcome.UNAVAILABLE, Outcome.ABSENT)


def scraper(engine: SmallEngine | SlotEngine) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine.cache))  # type: ignore[arg-type]  # the protocol's attributes are not read-only
    return registry


def look(registry: CollectorRegistry) -> Scrape:
    return read_scrape(generate_latest(registry).decode())


class Life:
    """A thread of an engine: requests that are served, given up at any point, or aborted while L3 fails."""

    def __init__(self, engine: SmallEngine, rng: Random) -> None:
        self.engine, self.rng = engine, rng

    def run(self) -> None:
        for _ in range(25):
            self.step()

    def step(self) -> None:
        tokens = prompt(self.rng.randrange(1, 6), seed=self.rng.randrange(12))
        cache = self.engine.cache
        request = cache.match(tokens)
        stop = self.rng.randrange(5)
        if stop > 0:
            cache.prefetch(request, mode=self.rng.choice(["best_effort", "wait_complete"]))
        if stop > 1 and self.rng.random() < 0.7:
            cache.wait(request)
        if stop > 2 and (restored := cache.load(request)) is not None:
            self.engine.check(request, tokens, restored.tokens)
            for end in range(restored.tokens + PAGE, len(tokens) + 1, PAGE) if stop > 3 else ():
                if not cache.extend(request, tokens=end, timeout_s=1.0):
                    break
                self.engine.write_page(request, tokens, end)
                cache.store(request, computed=end, state_at=end)
        cache.release(request)


@pytest.mark.parametrize("seed", range(3))
def test_every_scrape_adds_up_while_l3_fails_and_requests_are_given_up(seed: int) -> None:
    rng = Random(seed)
    with closing(SmallEngine(HYBRID, l1=40, l2=10, objects={})) as engine:
        assert engine.l3 is not None
        fill(engine, *(prompt(5, seed=number) for number in range(12)))
        engine.l3.fault = lambda operation, key: rng.choice(FAULTS) if rng.random() < 0.05 else None
        registry = scraper(engine)
        lives = [Life(engine, Random(rng.random())).run for _ in range(2)]
        check_every_scrape_of(lives, look=lambda: look(registry), check=check_engine)
        engine.settle()
        last = look(registry)
        check_engine(last)
        assert total(last, "hicache_engine_open_objects") == 0
        assert total(last, "hicache_engine_prefetch_in_flight_tokens") == 0
        assert total(last, "hicache_engine_requests_total") == 50
        assert total(last, "hicache_engine_tokens_total", source="l3") > 0, "nothing happened"


def test_what_is_in_flight_is_in_the_sum() -> None:
    with closing(SmallEngine(HYBRID, objects={})) as engine:
        assert engine.l3 is not None
        fill(engine, prompt(4))
        engine.l3.gates["get"].clear()
        registry = scraper(engine)
        request = engine.cache.match(prompt(4))
        engine.cache.prefetch(request)
        engine.l3.arrived.acquire()
        engine.l3.arrived.acquire()
        now = look(registry)
        check_engine(now)
        assert total(now, "hicache_engine_prefetch_in_flight_tokens") == 4 * PAGE
        assert total(now, "hicache_engine_open_objects", leg="fetch") > 0
        engine.cache.release(request)
        engine.l3.gates["get"].set()
        engine.settle()
        check_engine(look(registry))


def test_a_slot_cache_adds_up_too() -> None:
    with closing(SlotEngine(HYBRID, objects={})) as engine:
        registry = scraper(engine)
        for seed in range(3):
            engine.restore(prompt(4, seed=seed))
            engine.store(prompt(4, seed=seed))
            engine.restore(prompt(4, seed=seed), own=1)
            check_engine(look(registry))
        now = look(registry)
        assert total(now, "hicache_engine_tokens_total", source="l2") == 3 * 3 * PAGE
        window = {kind: total(now, "hicache_engine_window_pages", kind=kind) for kind in ("asked", "found", "new")}
        assert window == {"asked": 24, "found": 12, "new": 12}


def test_jobs_end_with_the_rank_that_had_them() -> None:
    times = JobTimes(CacheSpec("m", "r", HYBRID, page_tokens=PAGE))
    times.begin(FetchJob(7, (TransferItem(0, b"k", 0), TransferItem(2, b"k", 0))), 1.0)
    times.end_all(lambda job_id: True, 2.0)
    assert times.read().open == {("fetch", "attention"): 1, ("fetch", "state"): 1}
    times.end_all(lambda job_id: False, 3.0)
    numbers = times.read()
    assert set(numbers.open.values()) == {0}
    assert numbers.seconds["fetch", "state"].sum == 2.0
    times.end(7, 9.0)
    assert times.read().seconds["fetch", "state"].count == 1


def look_at(engine: SmallEngine) -> Scrape:
    return look(scraper(engine))


def moved(engine: SmallEngine, act: Callable[[Callable[[], None]], object]) -> set[str]:
    """Metrics of which ``act`` has changed a sample; it may have intermediate looks."""
    registry = scraper(engine)
    seen = [look(registry)]
    act(lambda: seen.append(look(registry)))
    seen.append(look(registry))
    engine.close()
    return {
        PREFIX + name.removeprefix(PREFIX).removesuffix("_count")
        for before, after in itertools.pairwise(seen)
        for name, samples in after.items()
        if any(before.get(name, {}).get(labels, 0.0) != value for labels, value in samples.items())
    }


def of_a_request_from_l3() -> set[str]:
    engine = SmallEngine(HYBRID, objects={})
    fill(engine, prompt(4))
    return moved(engine, lambda look: (engine.serve(prompt(4)), engine.settle()))


def of_a_fetch_that_is_held_up() -> set[str]:
    engine = SmallEngine(HYBRID, objects={})
    l3 = engine.l3
    assert l3 is not None
    fill(engine, prompt(4))
    l3.gates["get"].clear()

    def act(look: Callable[[], None]) -> None:
        request = engine.cache.match(prompt(4))
        engine.cache.prefetch(request)
        for _ in range(2):
            l3.arrived.acquire()
        look()
        l3.gates["get"].set()
        engine.cache.release(request)

    return moved(engine, act)


def of_attention_without_its_state() -> set[str]:
    engine = SmallEngine((ATTENTION, STATE))
    return moved(engine, lambda look: [engine.serve(prompt(4), snapshot=False) for _ in range(2)])


def of_a_cache_without_l3() -> set[str]:
    engine = SmallEngine()
    return moved(engine, lambda look: engine.serve(prompt(4)))


class ReadsInTime:
    """Loads everything, and waits for it as long as one does for what was measured."""

    def __init__(self, costs: ReadCosts) -> None:
        """Whatever it costs."""

    def tokens(self, facts: LoadFacts) -> int:
        return facts.usable_tokens - facts.held_tokens

    def patience_s(self, facts: LoadFacts) -> float:
        return 30.0


def of_an_l3_that_nobody_has_measured() -> set[str]:
    engine = SmallEngine((ATTENTION,), objects={}, read_policy=ReadsInTime)
    fill(engine, prompt(4))
    return moved(engine, lambda look: engine.serve(prompt(4)))


def of_a_write_policy_that_waits_for_the_second_use() -> set[str]:
    engine = SmallEngine(write_policy="write_through_selective")
    return moved(engine, lambda look: engine.serve(prompt(4)))


def of_an_l1_that_is_too_small() -> set[str]:
    engine = SmallEngine((ATTENTION,), l1=6, l2=6, write_policy="write_through_selective")
    return moved(engine, lambda look: [engine.serve(prompt(4, seed=seed)) for seed in range(3)])


def of_a_lost_rank() -> set[str]:
    engine = SmallEngine()
    return moved(engine, lambda look: engine.cache._pump.lose(0, "it died"))


MOVERS: dict[str, Callable[[], set[str]]] = {
    "requests_total": of_a_request_from_l3,
    "requested_tokens_total": of_a_request_from_l3,
    "tokens_total": of_a_request_from_l3,
    "prefetch_found_tokens_total": of_a_request_from_l3,
    "prefetch_tokens_total": of_a_request_from_l3,
    "objects_total": of_a_request_from_l3,
    "bytes_total": of_a_request_from_l3,
    "begun_objects_total": of_a_request_from_l3,
    "object_seconds": of_a_request_from_l3,
    "used_slots": of_a_request_from_l3,
    "window_pages": of_a_request_from_l3,
    "prefetch_in_flight_tokens": of_a_fetch_that_is_held_up,
    "open_objects": of_a_fetch_that_is_held_up,
    "tokens_without_state_total": of_attention_without_its_state,
    "prefetch_declined_total": of_a_cache_without_l3,
    "prefetch_probes_total": of_an_l3_that_nobody_has_measured,
    "skipped_total": of_a_write_policy_that_waits_for_the_second_use,
    "lost_tokens_total": of_an_l1_that_is_too_small,
    "ranks_lost": of_a_lost_rank,
}
STILL = {"slots"}


@cache
def moved_by(mover: Callable[[], set[str]]) -> set[str]:
    return mover()


OF_A_DAEMON = {
    "l3_objects_total",
    "l3_bytes_total",
    "l3_ready",
    "l3_refusals_total",
    "tls_certificate_expiration_timestamp_seconds",  # moves in tests/security/test_tls.py
}


@pytest.mark.parametrize("name", MOVERS)
def test_br_111_every_metric_of_an_engine_moves(name: str) -> None:
    assert PREFIX + name in moved_by(MOVERS[name])


def test_br_111_every_metric_of_an_engine_has_its_mover() -> None:
    assert {PREFIX + name for name in {*MOVERS, *STILL, *OF_A_DAEMON}} == set(documented_metrics("Engines"))


def test_br_111_what_is_counted_of_hicached_moves(daemon: ThreadedDaemon) -> None:
    engine = SmallEngine((ATTENTION,), address=f"unix://{daemon.config.socket}")

    def act(look: Callable[[], None]) -> None:
        wait_until(lambda: not engine.cache.l3.status().is_degraded, what="it is connected")  # type: ignore[union-attr]
        look()
        engine.serve(prompt(4))
        engine.settle()

        assert total(look_at(engine), PREFIX + "l3_ready", rank="0") == 1

    assert {PREFIX + "l3_objects_total", PREFIX + "l3_bytes_total"} <= moved(engine, act)


def test_br_111_what_hicached_refuses_moves(start_thread: Callable[..., ThreadedDaemon], two_tenants: str) -> None:
    daemon = start_thread(tenants_file=two_tenants)
    with closing(SmallEngine((ATTENTION,), address=f"unix://{daemon.config.socket}")) as engine:  # without a token
        wait_until(lambda: bool(engine.cache.l3.status().refusals), what="it is refused")  # type: ignore[union-attr]
        assert total(look(scraper(engine)), PREFIX + "l3_refusals_total", code="BAD_TOKEN") >= 1


def test_every_metric_of_an_engine_is_documented() -> None:
    with closing(SmallEngine(objects={})) as engine:
        families = {
            metric.name + "_total" if metric.type == "counter" else metric.name for metric in scraper(engine).collect()
        }
    assert families == set(documented_metrics("Engines"))
