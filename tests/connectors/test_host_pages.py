"""Pages of an engine's pool through a real hicached, for every shape of a page and every kind of memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from hicache.connectors.host_pages import PageItem, PagesSpec, Pool
from hicache.outcome import Outcome
from tests.client.hicached import HicachedProcess, token_of
from tests.client.support import wait_until
from tests.connectors.engine_memory import PAGE_BYTES, PAGES, EngineMemory, open_descriptors
from tests.connectors.engine_memory import host_pages as connected

host_pages = partial(connected, token=token_of(0))
SHAPES = ("whole", "halves", "by_layer")


@pytest.fixture(scope="module")
def hicached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HicachedProcess]:
    process = HicachedProcess(tmp_path_factory.mktemp("hicached"), tcp=True, has_tenants=True)
    process.start()
    yield process
    process.end()


def memory_of(kind: str) -> EngineMemory:
    return EngineMemory(is_memfd=kind != "anonymous", can_be_sealed=kind == "sealed")


@pytest.mark.parametrize("kind", ["sealed", "unsealable", "anonymous"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_bytes_come_back_whatever_the_shape_and_the_memory(
    hicached: HicachedProcess, shape: str, kind: str
) -> None:
    memory = memory_of(kind)
    memory.randomise()
    items = memory.items(shape, prefix=f"{shape}.{kind}.")
    before = memory.bytes[:]
    with host_pages(hicached.address, memory) as pages:
        assert pages.shares(memory.address) == (kind == "sealed")
        assert pages.contains([item.key for item in items]) == [False] * PAGES
        assert pages.put(items) == [Outcome.OK] * PAGES
        assert pages.contains([item.key for item in items]) == [True] * PAGES
        memory.fill(b"\xee")
        assert pages.get(items) == [Outcome.OK] * PAGES
        assert memory.bytes[:] == before
        assert memory.bytes[: PAGE_BYTES // 2] != b"\xee" * (PAGE_BYTES // 2)


@pytest.mark.parametrize("kind", ["sealed", "anonymous"])
def test_what_is_there_is_neither_copied_nor_changed(hicached: HicachedProcess, kind: str) -> None:
    memory = memory_of(kind)
    memory.randomise()
    [item, *_] = memory.items("whole", prefix=f"twice.{kind}.")
    first = memory.read(item)
    with host_pages(hicached.address, memory) as pages:
        assert pages.put([item]) == [Outcome.OK]
        memory.fill(b"\xee")
        assert pages.put([item]) == [Outcome.EXISTS]
        assert pages.get([item]) == [Outcome.OK]
    assert memory.read(item) == first


def test_shared_and_staged_memory_have_the_same_objects(hicached: HicachedProcess) -> None:
    shared, staged = memory_of("sealed"), memory_of("anonymous")
    shared.randomise()
    with host_pages(hicached.address, shared) as pages:
        assert pages.put(shared.items("halves", prefix="both.")) == [Outcome.OK] * PAGES
    with host_pages(hicached.address, staged) as pages:
        assert pages.get(staged.items("by_layer", prefix="both.")) == [Outcome.OK] * PAGES
    for ours, theirs in zip(shared.items("halves"), staged.items("by_layer"), strict=True):
        assert shared.read(ours) == staged.read(theirs)


def test_another_spec_finds_nothing_and_clears_nothing(hicached: HicachedProcess) -> None:
    memory = memory_of("anonymous")
    items = memory.items("whole", prefix="spec.")
    keys = [item.key for item in items]
    other_spec = PagesSpec((("model", "tiny"), ("layout", "another")), PAGE_BYTES)
    with host_pages(hicached.address, memory) as ours, host_pages(hicached.address, memory, spec=other_spec) as theirs:
        assert ours.put(items) == [Outcome.OK] * PAGES
        assert theirs.contains(keys) == [False] * PAGES
        assert theirs.get(items) == [Outcome.ABSENT] * PAGES
        assert theirs.put(items[:2]) == [Outcome.OK] * 2
        assert theirs.clear()
        assert theirs.contains(keys) == [False] * PAGES
        assert ours.contains(keys) == [True] * PAGES
        assert ours.clear()
        assert ours.contains(keys) == [False] * PAGES
        assert ours.put(items[:1]) == [Outcome.OK]
        assert ours.delete([keys[0], keys[1]]) == [Outcome.OK, Outcome.ABSENT]


def test_an_item_without_bytes_or_with_too_many_is_not_moved(hicached: HicachedProcess) -> None:
    memory = memory_of("anonymous")
    memory.fill(b"\xee")
    with host_pages(hicached.address, memory) as pages:
        bad = [PageItem(b"none", ()), PageItem(b"empty", ((memory.address, 0),))]
        assert pages.put(bad) == pages.get(bad) == [Outcome.BAD_RANGE] * 2
        large = [PageItem(b"large", ((memory.address, PAGE_BYTES + 1),))]
        assert pages.put(large) == pages.get(large) == [Outcome.TOO_LARGE]
        assert pages.put([]) == pages.get([]) == []


def test_memory_that_is_in_no_pool_goes_through_staging(hicached: HicachedProcess) -> None:
    memory = memory_of("sealed")
    memory.randomise()
    before = memory.bytes[:]
    items = memory.items("halves", prefix="no pool.")
    with host_pages(hicached.address) as pages:
        assert not pages.shares(memory.address)
        assert pages.put(items) == [Outcome.OK] * PAGES
        memory.fill(b"\0")
        assert pages.get(items) == [Outcome.OK] * PAGES
    assert memory.bytes[:] == before


def test_a_batch_has_an_outcome_for_each_page(hicached: HicachedProcess) -> None:
    memory = memory_of("sealed")
    memory.randomise()
    items = memory.items("whole", prefix="some.")
    with host_pages(hicached.address, memory) as pages:
        assert pages.put(items[::2]) == [Outcome.OK] * (PAGES // 2)
        memory.fill(b"\xee")
        outcomes = pages.get([*items, PageItem(b"unfit", ())])
    assert outcomes == [Outcome.OK, Outcome.ABSENT] * (PAGES // 2) + [Outcome.BAD_RANGE]
    assert memory.read(items[1]) == b"\xee" * PAGE_BYTES


def test_memory_that_cannot_be_sealed_or_is_not_that_of_its_descriptor_goes_through_staging(
    hicached: HicachedProcess, caplog: pytest.LogCaptureFixture
) -> None:
    unsealable, sealed, other = memory_of("unsealable"), memory_of("sealed"), memory_of("sealed")
    lying = Pool(sealed.address, sealed.size_bytes, other.fd)
    with host_pages(hicached.address) as pages:
        for pool in (unsealable.pool, lying):
            pages.add_pool(pool)
            assert not pages.shares(pool.address)
        assert pages.put([PageItem(b"lying", sealed.whole(0))]) == [Outcome.OK]
    assert "cannot be sealed" in caplog.text
    assert "not the memory" in caplog.text


def test_a_page_that_nobody_can_hold_is_never_touched_by_hicached(hicached: HicachedProcess) -> None:
    memory = memory_of("sealed")
    with host_pages(hicached.address, memory) as pages:
        [item, *_] = [replace(item, page=None) for item in memory.items("whole")]
        assert pages.shares(item.extents[0][0])
        clients = [pages.l3.status().operations, pages._links[0].l3.status().operations]
        assert pages.put([item]) == [Outcome.OK]
        assert pages.l3.status().operations != clients[0]
        assert pages._links[0].l3.status().operations == clients[1]


def test_an_engine_may_close_the_descriptor_of_its_pool(hicached: HicachedProcess) -> None:
    memory = memory_of("sealed")
    memory.randomise()
    before = memory.bytes[:]
    items = memory.items("whole", prefix="closed.")
    with host_pages(hicached.address, memory) as pages:
        memory.close_fd()
        assert pages.shares(memory.address)
        assert pages.put(items) == [Outcome.OK] * PAGES
        memory.fill(b"\0")
        assert pages.get(items) == [Outcome.OK] * PAGES
    assert memory.bytes[:] == before
    closed = EngineMemory()
    pool = closed.pool
    closed.close_fd()
    with host_pages(hicached.address) as pages:
        pages.add_pool(pool)
        assert not pages.shares(pool.address), "a descriptor that is closed when it is registered shares nothing"
        assert pages.get([PageItem(items[0].key, closed.whole(0))]) == [Outcome.OK]


def test_br_076_many_threads_move_the_same_and_other_pages_at_once(hicached: HicachedProcess) -> None:
    memory = memory_of("anonymous")
    memory.randomise()
    before = memory.bytes[:]
    items = memory.items("halves", prefix="threads.")
    answers: list[list[Outcome]] = []
    with host_pages(hicached.address, memory) as pages:
        threads = [threading.Thread(target=lambda: answers.append(pages.put(items))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) == 6
        assert all(outcome.is_ok for outcomes in answers for outcome in outcomes)
        memory.fill(b"\0")
        assert pages.get(items) == [Outcome.OK] * PAGES
    assert memory.bytes[:] == before


def test_over_tcp_pages_are_streamed_through_staging(hicached: HicachedProcess) -> None:
    memory = memory_of("sealed")
    memory.randomise()
    before = memory.bytes[:]
    items = memory.items("by_layer", prefix="tcp.") + memory.items("whole", prefix="tcp.whole.")
    with host_pages(hicached.tcp_address, memory) as pages:
        assert not pages.shares(memory.address)
        assert pages.put(items) == [Outcome.OK] * (2 * PAGES)
        memory.fill(b"\0")
        assert pages.get(items) == [Outcome.OK] * (2 * PAGES)
    assert memory.bytes[:] == before


def test_nothing_is_left_behind(hicached: HicachedProcess) -> None:
    memories = [memory_of(kind) for kind in ("sealed", "unsealable", "anonymous")]

    def use() -> None:
        with host_pages(hicached.address, *memories) as pages:
            for number, memory in enumerate(memories):
                pages.put(memory.items("whole", prefix=f"left.{number}."))
                pages.get(memory.items("whole", prefix=f"left.{number}."))

    use()
    wait_until(lambda: not _hicache_threads())
    descriptors = open_descriptors()
    for _ in range(3):
        use()
    wait_until(lambda: not _hicache_threads(), what="the end of all threads")
    wait_until(lambda: open_descriptors() <= descriptors, what="the end of all descriptors")


def _hicache_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hicache-")]
