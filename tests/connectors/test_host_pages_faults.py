"""Pages and an L3 that is late, silent, wrong, full or gone: no call hangs, and nobody writes to a free page."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache.connectors.host_pages import HostPages, PageItem
from hicache.connectors.host_pages_staging import SLOT_COUNT, Staging
from hicache.outcome import Outcome
from tests.client.hicached import HicachedProcess
from tests.client.small_daemon import SmallDaemon
from tests.client.support import QUICK, wait_until
from tests.connectors.engine_memory import PAGE_BYTES, PAGES, SPEC, EngineMemory, host_pages
from tests.connectors.host_pool import HostPool

SENTINEL = b"\xa5"
DEADLINE_S = 0.3


@pytest.fixture
def pool() -> HostPool:
    return HostPool(EngineMemory())


def stored(pages: HostPages, pool: HostPool, *, prefix: str = "") -> list[PageItem]:
    """All pages of the pool, stored and then wiped."""
    pool.memory.randomise()
    items = pool.memory.items("whole", prefix=prefix)
    assert pages.put(items) == [Outcome.OK] * PAGES
    pool.memory.fill(SENTINEL)
    return items


def assert_in_time(started_s: float, *, deadline_s: float = DEADLINE_S) -> None:
    assert time.monotonic() - started_s < deadline_s + 2, "the call held its caller beyond the deadline"


def test_a_page_of_a_late_get_is_nobodys_until_hicached_lets_go(daemon: SmallDaemon, pool: HostPool) -> None:
    with host_pages(daemon.address, pool.memory) as pages:
        items = stored(pages, pool)
        indices = pool.alloc(2 * pool.page_size)
        page_numbers = [int(index) // pool.page_size for index in indices[:: pool.page_size]]
        release = daemon.faults.hang(where="before_bytes", operation="get")
        started_s = time.monotonic()
        late = [items[number] for number in page_numbers]
        assert pages.get(late, deadline_s=DEADLINE_S) == [Outcome.DEADLINE] * 2
        assert_in_time(started_s)
        assert pool.holds.held_count == 2

        pool.free(indices)
        assert pool.holds.set_aside_count == 2
        others = pool.alloc(pool.available_size())
        assert not set(others.tolist()) & set(indices.tolist()), "a page that may still be written to was handed out"

        release.set()
        wait_until(lambda: not pool.holds.held_count, what="hicached's letting go")
        assert pool.available_size() == len(indices)
        again = pool.alloc(len(indices))
        assert sorted(again.tolist()) == sorted(indices.tolist())
        pool.memory.fill(SENTINEL)
        assert pages.contains([items[0].key]) == [True]
    assert pool.memory.bytes[:] == SENTINEL * pool.memory.size_bytes


def test_a_page_of_a_late_put_keeps_its_bytes_until_hicached_has_read_them(daemon: SmallDaemon, pool: HostPool) -> None:
    with host_pages(daemon.address, pool.memory) as pages:
        pool.memory.randomise()
        [item, *_] = pool.memory.items("whole")
        right = pool.memory.read(item)
        release = daemon.faults.hang(where="before_bytes", operation="put")
        assert pages.put([item], deadline_s=DEADLINE_S) == [Outcome.DEADLINE]
        pool.alloc(pool.size)
        pool.free(np.arange(pool.size))
        assert pool.available_size() == pool.size - pool.page_size
        for index in pool.alloc(pool.available_size())[:: pool.page_size]:  # what an engine does with free pages
            number = int(index) // pool.page_size
            pool.memory.bytes[number * PAGE_BYTES : (number + 1) * PAGE_BYTES] = SENTINEL * PAGE_BYTES
        release.set()
        wait_until(lambda: pool.available_size() == pool.page_size)
        assert pages.get([item]) == [Outcome.OK]
        assert pool.memory.read(item) == right, "bytes of another page were stored under this key"


@pytest.mark.parametrize("operation", ["get", "put"])
def test_a_late_call_through_staging_never_touches_a_page(daemon: SmallDaemon, operation: str) -> None:
    memory = EngineMemory(is_memfd=False)
    with host_pages(daemon.address, memory) as pages:
        items = stored(pages, HostPool(memory))
        release = daemon.faults.hang(where="before_bytes", operation=operation)
        started_s = time.monotonic()
        if operation == "get":
            outcomes = pages.get(items, deadline_s=DEADLINE_S)
        else:
            outcomes = pages.put(memory.items("whole", prefix="new."), deadline_s=DEADLINE_S)
        assert outcomes == [Outcome.DEADLINE] * PAGES
        assert_in_time(started_s)
        memory.fill(SENTINEL)
        assert pages.slots_in_doubt
        release.set()
        wait_until(lambda: not pages.slots_in_doubt, what="hicached's letting go")
        assert memory.bytes[:] == SENTINEL * memory.size_bytes, "somebody wrote to pages after the call had ended"
        assert pages.get(items) == [Outcome.OK] * PAGES


def test_with_all_of_staging_in_doubt_nobody_waits_for_a_slot() -> None:
    staging = Staging(slot_bytes=1, slot_count=2)
    slots = [staging.take(deadline_s=0), staging.take(deadline_s=0)]
    assert None not in slots
    assert staging.take(deadline_s=0) is None, "there is none now"
    staging.doubt()
    staging.doubt()
    started_s = time.monotonic()
    assert staging.take(deadline_s=started_s + 60) is None
    assert_in_time(started_s, deadline_s=0)
    assert slots[0] is not None
    staging.give_back(slots[0], was_in_doubt=True)
    assert staging.take(deadline_s=0) == slots[0]
    assert staging.slots_in_doubt == 1
    staging.close()


def test_one_get_after_another_that_hangs_leaves_the_others_served(daemon: SmallDaemon) -> None:
    memory = EngineMemory(is_memfd=False)
    with host_pages(daemon.address, memory) as pages:
        [item, *_] = stored(pages, HostPool(memory))
        release = daemon.faults.hang(where="before_bytes", operation="get", times=SLOT_COUNT)
        outcomes = [pages.get([item], deadline_s=0.1)[0] for _ in range(3 * SLOT_COUNT)]
        assert Outcome.DEADLINE in outcomes
        assert 0 < pages.slots_in_doubt < SLOT_COUNT
        # memory may just have been registered again, for one hang more: with no deadline of its own, that get would be
        # waited for as long as this is
        wait_until(
            lambda: pages.get([item], deadline_s=0.1) == [Outcome.OK], what="streams in place of memory that drains"
        )
        release.set()
        wait_until(lambda: not pages.slots_in_doubt)


def test_wrong_bytes_are_never_a_page(folder: Path) -> None:
    daemon = SmallDaemon(folder, tcp=True).start()
    memory = EngineMemory(is_memfd=False)
    with host_pages(daemon.address, memory) as pages:
        items = stored(pages, HostPool(memory))
        daemon.faults.objects = lambda objects: [bytes([objects[0][0] ^ 1]) + objects[0][1:], *objects[1:]]
        outcomes = pages.get(items)
        assert not outcomes[0].is_ok
        assert memory.read(items[0]) == SENTINEL * PAGE_BYTES
        daemon.faults.objects = lambda objects: objects
        assert pages.get(items) == [Outcome.OK] * PAGES
    daemon.stop()


@pytest.mark.parametrize("is_memfd", [True, False])
def test_a_full_store_is_told_of_each_page(daemon: SmallDaemon, is_memfd: bool) -> None:
    memory = EngineMemory(is_memfd=is_memfd)
    with host_pages(daemon.address, memory) as pages:
        daemon.faults.outcomes = lambda outcomes: outcomes[:1] + bytes([Outcome.NO_SPACE]) * (len(outcomes) - 1)
        outcomes = pages.put(memory.items("whole"))
        assert outcomes == [Outcome.OK] + [Outcome.NO_SPACE] * (PAGES - 1)
        assert not pages.slots_in_doubt
        assert not memory.holds.held_count


def test_without_hicached_calls_end_at_once_and_it_is_found_when_it_comes(folder: Path) -> None:
    memory = EngineMemory()
    memory.randomise()
    items = memory.items("whole")
    pages = HostPages(f"unix://{folder}/hicached.sock", spec=SPEC, pools=[memory.pool], settings=QUICK)
    try:
        started_s = time.monotonic()
        assert pages.get(items, deadline_s=60) == [Outcome.UNAVAILABLE] * PAGES
        assert pages.put(items, deadline_s=60) == [Outcome.UNAVAILABLE] * PAGES
        assert pages.contains([items[0].key], deadline_s=60) == [False]
        assert not pages.clear(deadline_s=0.1)
        assert_in_time(started_s, deadline_s=0.1)
        daemon = SmallDaemon(folder).start()
        assert pages.wait_ready(timeout_s=20)
        assert pages.shares(memory.address)
        assert pages.put(items) == [Outcome.OK] * PAGES
        daemon.stop()
    finally:
        pages.close()


@pytest.fixture
def hicached(folder: Path) -> Iterator[HicachedProcess]:
    process = HicachedProcess(folder)
    process.start()
    yield process
    process.end()


@pytest.mark.parametrize("is_memfd", [True, False])
def test_br_039_a_stopped_hicached_keeps_what_it_may_touch_and_a_killed_one_nothing(
    hicached: HicachedProcess, is_memfd: bool
) -> None:
    pool = HostPool(EngineMemory(is_memfd=is_memfd))
    with host_pages(hicached.address, pool.memory) as pages:
        items = stored(pages, pool)
        hicached.signal(signal.SIGSTOP)
        started_s = time.monotonic()
        assert set(pages.get(items, deadline_s=DEADLINE_S)) <= {Outcome.DEADLINE, Outcome.UNAVAILABLE}
        assert_in_time(started_s)
        pool.alloc(pool.size)
        pool.free(np.arange(pool.size))
        assert pool.available_size() == (0 if is_memfd else pool.size)
        assert bool(pages.slots_in_doubt) != is_memfd
        hicached.signal(signal.SIGKILL)
        wait_until(lambda: pool.available_size() == pool.size and not pages.slots_in_doubt, what="the end of doubt")
        assert pool.memory.bytes[:] == SENTINEL * pool.memory.size_bytes
        hicached.start()
        assert pages.wait_ready(timeout_s=20)
        wait_until(lambda: pages.get(items) == [Outcome.OK] * PAGES, what="the return of hicached")


def test_closing_with_pages_in_doubt_ends_in_time_and_they_are_freed_later(daemon: SmallDaemon, pool: HostPool) -> None:
    with host_pages(daemon.address, pool.memory) as pages:
        items = stored(pages, pool)
        release = daemon.faults.hang(where="before_bytes", operation="get")
        assert pages.get(items[:1], deadline_s=DEADLINE_S) == [Outcome.DEADLINE]
    assert pool.holds.held_count == 1, "closing says nothing about memory"
    release.set()
    wait_until(lambda: not pool.holds.held_count)
