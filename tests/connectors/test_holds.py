"""Held pages and the frees of an engine, in every order."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hicache.connectors.host_pages_holds import PageHolds, holds_of
from tests.connectors.engine_memory import PAGES, EngineMemory
from tests.connectors.host_pool import BareHostPool, HostPool


@pytest.fixture
def pool() -> HostPool:
    return HostPool(EngineMemory(is_memfd=False))


def test_only_a_pool_whose_free_is_hooked_has_holds() -> None:
    memory = EngineMemory(is_memfd=False)
    assert holds_of(BareHostPool(memory)) is None
    assert holds_of(object()) is None
    pool = HostPool(memory)
    assert holds_of(pool) is memory.holds
    del pool.hicache_holds  # type: ignore[attr-defined]  # as before anybody asked
    holds = holds_of(pool)
    assert isinstance(holds, PageHolds)
    assert holds_of(pool) is holds
    assert pool.available_size() == pool.size, "asking frees nothing"


def test_a_page_held_twice_is_freed_after_the_second_release(pool: HostPool) -> None:
    indices = pool.alloc(pool.page_size)
    page = [0]
    pool.holds.hold(page)
    pool.holds.hold(page)
    assert pool.free(indices) == len(indices)
    pool.holds.release(page)
    assert pool.available_size() == pool.size - pool.page_size
    pool.holds.release(page)
    assert pool.available_size() == pool.size


def test_a_page_released_before_it_is_freed_is_freed_at_once(pool: HostPool) -> None:
    indices = pool.alloc(pool.page_size)
    pool.holds.hold([0])
    pool.holds.release([0])
    pool.free(indices)
    assert pool.available_size() == pool.size
    assert not pool.holds.set_aside_count


def test_a_pool_that_is_cleared_keeps_back_what_is_held(pool: HostPool) -> None:
    indices = pool.alloc(3 * pool.page_size)
    pool.holds.hold([0, 1])
    pool.free(indices[: pool.page_size])
    pool.clear()
    assert pool.available_size() == pool.size - 2 * pool.page_size
    pool.holds.release([0, 1])
    assert sorted(pool.alloc(pool.size).tolist()) == list(range(pool.size))


@pytest.mark.parametrize("seed", range(20))
def test_no_held_page_is_ever_handed_out_and_none_is_lost(seed: int, pool: HostPool) -> None:
    choice = random.Random(seed)
    used: dict[int, bool] = {}  # pages of the engine, and whether L3 has them
    held: list[int] = []
    for _ in range(400):
        match choice.randrange(5):
            case 0 if pool.available_size():
                taken = pool.alloc(pool.page_size * choice.randint(1, pool.available_size() // pool.page_size))
                for page in (taken[:: pool.page_size] // pool.page_size).tolist():
                    assert page not in held, f"seed {seed}: page {page} was handed out while it was held"
                    assert page not in used, f"seed {seed}: page {page} was handed out twice"
                    used[page] = False
            case 1 if used:
                pages = choice.sample(sorted(used), choice.randint(1, len(used)))
                starts = np.array(pages, dtype=np.int64)[:, None] * pool.page_size
                pool.free((starts + np.arange(pool.page_size)).reshape(-1))
                for page in pages:
                    del used[page]
            case 2 if used:
                page = choice.choice(sorted(used))
                held.append(page)
                pool.holds.hold([page])
            case 3 if held:
                page = held.pop(choice.randrange(len(held)))
                pool.holds.release([page])
            case 4 if choice.random() < 0.05:
                pool.clear()
                used.clear()
        free_pages = pool.available_size() // pool.page_size
        away = len(set(held) - used.keys())
        assert free_pages + len(used) + away == PAGES, f"seed {seed}: a page was lost"
