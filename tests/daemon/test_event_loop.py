"""What the event loop answers waits for nobody: neither for threads that are busy nor for what is rendered."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client.core import Metric

from hicache.backends.store_stats import Operation, StoreStats
from hicache.daemon import loop_delay
from hicache.daemon.loop_delay import PERIOD_S, PERIODS_MAX, Delay, LoopDelay
from hicache.daemon.readings import LookReadings, store_readings
from hicache.daemon.storage import Storage, Store
from hicache.daemon.store_look import StoreLook, StoreLooks
from hicache.daemon.tenants import Tenants
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import object_key
from tests.daemon.rig import http_get, wait_until


def test_probes_do_not_queue_behind_lookups(daemon: ThreadedDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, asked = threading.Event(), 0
    storage, usage = daemon.daemon._storage, daemon.store.usage
    assert storage is not None

    def counted() -> object:
        nonlocal asked
        asked += 1
        return usage()

    monkeypatch.setattr(daemon.store, "usage", counted)
    try:
        for _ in range(storage.control.thread_count + 1):
            storage.control.submit(lambda: go_on.wait(60))
        wait_until(lambda: len(storage.control.busy_for_s()) == storage.control.thread_count, what="all are busy")
        before = asked
        wait_until(lambda: asked >= before + 3, what="the storage is asked how it is")
        assert http_get(daemon.ready.http, "/healthz") == (200, "ok\n")
    finally:
        go_on.set()


def test_a_scrape_that_takes_long_holds_up_nobody(daemon: ThreadedDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    rendering, go_on = threading.Event(), threading.Event()
    render = daemon.daemon.metrics.render

    def slow() -> bytes:
        rendering.set()
        assert go_on.wait(30)
        return render()

    monkeypatch.setattr(daemon.daemon.metrics, "render", slow)
    told: list[tuple[int, str]] = []
    scrape = threading.Thread(target=lambda: told.append(http_get(daemon.ready.http, "/metrics", timeout_s=60)))
    scrape.start()
    assert rendering.wait(10)
    assert http_get(daemon.ready.http, "/healthz") == (200, "ok\n")
    with Client(daemon.target) as client:
        assert client.present([object_key(1)]) == [False]
    go_on.set()
    scrape.join()
    [(status, body)] = told
    assert status == 200
    assert "hicache_ready 1.0" in body


def test_a_look_that_began_earlier_never_comes_after_a_later_one(
    daemon: ThreadedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache.daemon.store_look.LOOK_TIMEOUT_S", 60.0)
    asked, go_on = threading.Event(), threading.Event()

    def stats() -> StoreStats:
        found = daemon.store.stats()
        if not asked.is_set():
            asked.set()
            assert go_on.wait(30)
        return found

    store = SimpleNamespace(usage=daemon.store.usage, stats=stats, tenant_stats=daemon.store.tenant_stats)
    storage = Storage(cast(Store, store), io_threads=1)

    async def scrape_twice() -> list[int]:
        looks = StoreLooks(storage, Tenants.load(""), StoreLook.at(daemon.store))
        first = asyncio.create_task(looks.refresh())
        assert await asyncio.to_thread(asked.wait, 30)
        daemon.store.lookup([object_key(1)])
        second = asyncio.create_task(looks.refresh())
        told = []
        await asyncio.wait([second], timeout=0.05)  # where it waits for the first, there is nothing to wait for
        for task in (second, first):
            told.append(looks.last.stats.asked.get(Operation.LOOKUP, 0))
            go_on.set()
            await task
        return [*told, looks.last.stats.asked.get(Operation.LOOKUP, 0)]

    told = asyncio.run(scrape_twice())
    assert told == sorted(told), "a counter never falls"
    assert told[-1] == 1
    storage.control.close(timeout_s=30)


def test_one_scrape_is_of_one_look_at_the_store(daemon: ThreadedDaemon) -> None:
    looks = [StoreLook.at(daemon.store)]
    daemon.store.lookup([object_key(1)] * 3)
    looks.append(StoreLook.at(daemon.store))
    told: list[Metric] = []
    readings = LookReadings(lambda: looks[len(told) % 2], lambda last: store_readings(last, is_indexed=True))
    for family in readings.collect():
        told.append(family)
    samples = [sample for family in told for sample in family.samples if sample.labels.get("operation") == "lookup"]
    assert {sample.value for sample in samples} == {0.0}


def clocked(ticks: list[tuple[float, float]]) -> LoopDelay:
    """One that has seen ticks at these times, with these sums of waits for a core."""
    clock, waits = iter([when for when, _ in ticks]), iter([wait for _, wait in ticks])
    delay = LoopDelay(clock=lambda: next(clock), core_wait_s=lambda: next(waits))

    async def steps() -> None:
        delay.start()
        assert delay._task is not None
        await asyncio.wait([delay._task])  # ends where the clock ends

    asyncio.run(steps())
    return delay


def test_a_late_tick_is_told_with_what_the_machine_had_to_do_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_delay, "TICK_S", 0.0)
    delay = clocked([(0.0, 0.0), (0.0, 0.0), (0.5, 0.125), (0.5, 0.125), (0.75, 3.0)])
    assert delay.delays.count == 4
    assert delay.delays.sum == 0.75
    assert delay.core_wait_s == 3.0
    delay._clock = lambda: 1.0
    assert delay.longest == Delay(0.5, 0.125)
    delay._clock = lambda: PERIOD_S * PERIODS_MAX + 1
    assert delay.longest == Delay(0.0, 0.0), "that was more than an hour ago"


def test_each_period_has_its_longest() -> None:
    delay = LoopDelay(clock=lambda: PERIOD_S * PERIODS_MAX)
    for number in range(2 * PERIODS_MAX):
        delay._note(number * PERIOD_S / 2, 1.0 if number == 1 else number / 1000, 0.0)
    assert delay.longest == Delay((2 * PERIODS_MAX - 1) / 1000, 0.0), "the one of a second was in the first period"
    assert len(delay._periods) == PERIODS_MAX


def test_metrics_and_status_tell_it(daemon: ThreadedDaemon) -> None:
    wait_until(lambda: daemon.metric("hicache_loop_delay_seconds_count") > 3, what="some ticks")
    told = json.loads(http_get(daemon.ready.http, "/v1/status")[1])["loop_delay"]
    assert told["longest_s"] >= told["core_wait_s"] >= 0
