"""An engine that owns its slots, with its ranks: what runs beside its steps, what these wait for, and a lost rank.

All ranks and their leader are in one process and made by one thread, as engines do that run their worker themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache.errors import ConfigError, RankLost
from hicache.pools import L1Pool, L2Pool
from hicache.ranks.settings import Ranks
from hicache.ranks.worker import RankWorker
from hicache.slot_cache import SlotCache
from hicache.slot_directory import Step
from hicache.spec import CacheSpec, PagedGroup
from tests.client.support import wait_until

PAGE = 4
GROUP = PagedGroup("attn", (0, 1), heads=2, head_dim=8, dtype="float32")
HASHES = [bytes([page]) * 8 for page in range(1, 9)]
TIMEOUT_S = 20


class Engine:
    """A leader, and a worker for each rank. Page ``n`` of the model's output is full of the number it is given."""

    def __init__(self, folder: Path, *, tp: int = 1, **limits: float) -> None:
        self.spec = CacheSpec("m", "r", (GROUP,), page_tokens=PAGE, tp_size=tp)
        ranks = Ranks(f"unix://{folder}/ranks.sock", **({"start_timeout_s": 30.0} | limits))  # type: ignore[arg-type]
        self.workers = [
            RankWorker(
                self.spec,
                rank=rank,
                leader=ranks,
                l1=L1Pool(self.spec, rank=rank, pages=16),
                l2=L2Pool(self.spec, [16], rank=rank),
                l3=None,
                waits=False,
            )
            for rank in range(tp)
        ]
        self.cache = SlotCache.lead(self.spec, ranks=ranks)

    def compute(self, step: Step, written: dict[int, float]) -> None:
        for worker in self.workers:
            with worker.step(step.number, after=step.after):
                for slot, value in written.items():
                    worker.l1.paged[0][:, slot] = value + worker.rank

    def holds(self, slot: int, value: float) -> bool:
        return all(bool((worker.l1.paged[0][:, slot] == value + worker.rank).all()) for worker in self.workers)

    def save(self, pages: int, *, first_slot: int = 0) -> None:
        """A request computes ``pages`` pages in one step, which is saved before it is computed, and ends."""
        request = self.cache.open(HASHES[:pages], token_count=pages * PAGE)
        step = self.cache.step({0: range(first_slot, first_slot + pages)})
        self.cache.save(request, {0: {page: first_slot + page for page in range(pages)}})
        self.compute(step, {first_slot + page: 100.0 + page for page in range(pages)})
        self.cache.release(request)

    def hold(self, name: str, *, rank: int = 0) -> threading.Event:
        """Copies of one kind wait until the event is set; ``reached`` tells that one does."""
        copies: Any = self.workers[rank]._executor._copies
        original, gate, self.reached = getattr(copies, name), threading.Event(), threading.Event()
        reached = self.reached

        def held(*arguments: Sequence[int]) -> None:
            reached.set()
            assert gate.wait(TIMEOUT_S)
            original(*arguments)

        setattr(copies, name, held)
        return gate

    def close(self) -> None:
        self.cache.close()
        for worker in self.workers:
            worker.close()
            assert worker.wait(TIMEOUT_S) is not None


@pytest.fixture
def made(tmp_path: Path) -> Iterator[list[Engine]]:
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        engine.close()


def make(made: list[Engine], folder: Path, **settings: Any) -> Engine:
    made.append(Engine(folder, **settings))
    return made[-1]


@pytest.mark.parametrize("tp", [1, 2])
def test_pages_saved_before_their_step_is_computed_hold_what_it_computes(
    tp: int, made: list[Engine], tmp_path: Path
) -> None:
    engine = make(made, tmp_path, tp=tp)
    cache = engine.cache
    engine.save(4)
    assert cache.flush(timeout_s=TIMEOUT_S)
    engine.compute(cache.step(), dict.fromkeys(range(16), 7.0))
    request = cache.open(HASHES[:5], token_count=5 * PAGE)
    assert cache.usable(request, beyond=PAGE) == 4 * PAGE
    load = cache.load(request, beyond=PAGE, tokens=4 * PAGE, slots={0: {1: 11, 2: 12, 3: 13}})
    wait_until(lambda: load.done, timeout_s=TIMEOUT_S, what="the load")
    assert not load.failed
    assert load.by_source == {"l2": 3 * PAGE, "l3": 0}
    assert [engine.holds(slot, 90.0 + slot) for slot in (11, 12, 13)] == [True] * 3
    assert engine.holds(10, 7.0)
    cache.release(request)


def test_a_load_runs_beside_the_steps_of_others(made: list[Engine], tmp_path: Path) -> None:
    engine = make(made, tmp_path)
    cache = engine.cache
    engine.save(2)
    assert cache.flush(timeout_s=TIMEOUT_S)
    gate = engine.hold("load")
    request = cache.open(HASHES[:3], token_count=3 * PAGE)
    load = cache.load(request, beyond=0, tokens=2 * PAGE, slots={0: {0: 4, 1: 5}})
    for number in range(3):
        engine.compute(cache.step({0: [8]}), {8: float(number)})  # would raise RankLost if it waited
    assert engine.reached.wait(TIMEOUT_S)
    assert not load.done
    assert cache.busy_slots(request) == cache.busy_slots() == {(0, 4), (0, 5)}
    cache.release(request)
    gate.set()
    wait_until(lambda: load.done, timeout_s=TIMEOUT_S, what="the load")
    assert engine.holds(4, 100.0)
    assert engine.holds(5, 101.0)
    assert not cache.busy_slots()


@pytest.mark.parametrize("tells", [True, False])
def test_a_step_that_reuses_a_slot_waits_for_the_save_that_reads_it(
    tells: bool, made: list[Engine], tmp_path: Path
) -> None:
    engine = make(made, tmp_path)
    cache = engine.cache
    gate = engine.hold("backup")
    engine.save(2)
    assert engine.reached.wait(TIMEOUT_S)
    if tells:
        engine.compute(cache.step({0: [8]}), {8: 1.0})  # of another slot: it does not wait
    step = cache.step({0: [1]} if tells else None)
    assert len(step.after) == 1
    step_thread = threading.Thread(target=engine.compute, args=(step, {1: 55.0}))
    step_thread.start()
    step_thread.join(0.05)
    assert engine.holds(1, 101.0), "the step has not waited"
    gate.set()
    step_thread.join(TIMEOUT_S)
    assert engine.holds(1, 55.0)
    request = cache.open(HASHES[:3], token_count=3 * PAGE)
    assert cache.flush(timeout_s=TIMEOUT_S)
    load = cache.load(request, beyond=0, tokens=2 * PAGE, slots={0: {0: 4, 1: 5}})
    wait_until(lambda: load.done, timeout_s=TIMEOUT_S, what="the load")
    assert engine.holds(5, 101.0)
    cache.release(request)


def test_a_load_into_a_slot_waits_for_the_save_that_reads_it(made: list[Engine], tmp_path: Path) -> None:
    engine = make(made, tmp_path)
    cache = engine.cache
    engine.save(2)
    assert cache.flush(timeout_s=TIMEOUT_S)
    gate = engine.hold("backup")
    other = cache.open([b"other"], token_count=PAGE)
    step = cache.step({0: [9]})
    save = cache.save(other, {0: {0: 9}})
    engine.compute(step, {9: 3.0})
    request = cache.open(HASHES[:3], token_count=3 * PAGE)
    load = cache.load(request, beyond=0, tokens=2 * PAGE, slots={0: {0: 9, 1: 10}})
    engine.compute(cache.step({}), {})
    assert engine.holds(9, 3.0)
    assert not save.done
    gate.set()
    wait_until(lambda: load.done, timeout_s=TIMEOUT_S, what="the load")
    assert save.done
    assert engine.holds(9, 100.0)
    cache.release(other)
    cache.release(request)


def test_a_lost_rank_fails_loads_ends_saves_and_the_engine_lives(made: list[Engine], tmp_path: Path) -> None:
    engine = make(made, tmp_path, tp=2)
    cache = engine.cache
    engine.save(2)
    assert cache.flush(timeout_s=TIMEOUT_S)
    gates = [engine.hold("load"), engine.hold("backup")]
    request = cache.open(HASHES[:3], token_count=3 * PAGE)
    load = cache.load(request, beyond=0, tokens=2 * PAGE, slots={0: {0: 4, 1: 5}})
    other = cache.open([b"other"], token_count=PAGE)
    save = cache.save(other, {0: {0: 9}})
    engine.workers[0].close()
    wait_until(lambda: bool(cache.stats.ranks_lost), timeout_s=TIMEOUT_S, what="the leader to notice")
    for gate in gates:
        gate.set()
    wait_until(lambda: load.done and save.done, timeout_s=TIMEOUT_S, what="the copies")
    assert load.failed
    assert cache.usable(request, beyond=PAGE) == PAGE
    assert cache.save(other, {0: {0: 9}}).done
    assert cache.load(request, beyond=0, tokens=2 * PAGE, slots={0: {0: 4, 1: 5}}).failed
    assert cache.step()
    assert not cache.busy_slots()
    cache.release(request)
    cache.release(other)
    with pytest.raises(RankLost), engine.workers[0].step(100):
        pass


def test_a_copy_that_fails_on_one_rank_fails_the_load_and_is_left_out_for_the_request(
    made: list[Engine], tmp_path: Path
) -> None:
    engine = make(made, tmp_path, tp=2)
    cache = engine.cache
    engine.save(3)
    assert cache.flush(timeout_s=TIMEOUT_S)
    copies: Any = engine.workers[1]._executor._copies
    original = copies.load

    def failing(group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        copies.load = original
        raise OSError("a copy failed on purpose")

    copies.load = failing
    request = cache.open(HASHES[:4], token_count=4 * PAGE)
    assert cache.usable(request, beyond=0) == 3 * PAGE
    load = cache.load(request, beyond=0, tokens=3 * PAGE, slots={0: {0: 4, 1: 5, 2: 6}})
    wait_until(lambda: load.done, timeout_s=TIMEOUT_S, what="the load")
    assert load.failed
    assert cache.usable(request, beyond=0) == 0, "what has failed is offered again"
    cache.release(request)
    again = cache.open(HASHES[:4], token_count=4 * PAGE)
    assert cache.usable(again, beyond=0) == 3 * PAGE
    cache.release(again)


def test_a_worker_whose_leader_never_comes_ends_when_it_is_closed(tmp_path: Path) -> None:
    spec = CacheSpec("m", "r", (GROUP,), page_tokens=PAGE)
    nowhere = Ranks(f"unix://{tmp_path}/ranks.sock", start_timeout_s=600.0)
    l2 = L2Pool(spec, [4])
    worker = RankWorker(spec, rank=0, leader=nowhere, l1=L1Pool(spec, pages=4), l2=l2, l3=None, waits=False)
    assert worker.wait(0) is None
    worker.close()
    assert worker.wait(0) is not None
    with pytest.raises(RankLost), worker.step(1):
        pass


def test_a_worker_in_the_background_tells_why_it_was_refused(tmp_path: Path) -> None:
    ranks = Ranks(f"unix://{tmp_path}/ranks.sock", start_timeout_s=2.0)
    spec = CacheSpec("m", "r", (GROUP,), page_tokens=PAGE)
    l2 = L2Pool(spec, [4])
    worker = RankWorker(spec, rank=0, leader=ranks, l1=L1Pool(spec, pages=4), l2=l2, l3=None, waits=False)
    with pytest.raises(ConfigError, match="revision: 'other' != 'r'"):
        SlotCache.lead(CacheSpec("m", "other", (GROUP,), page_tokens=PAGE), ranks=ranks)
    reason = worker.wait(TIMEOUT_S)
    assert reason is not None
    assert "revision: 'other' != 'r'" in reason
    with pytest.raises(RankLost, match="has found no leader"), worker.step(1):
        pass


def test_an_l1_adopted_layer_by_layer_is_served(tmp_path: Path) -> None:
    """As vLLM's is: one tensor for each layer, slots in the first dimension."""
    spec = CacheSpec("m", "r", (GROUP,), page_tokens=PAGE)
    layers = [torch.zeros(8, 2, PAGE, 2, 8) for _ in range(2)]
    with SlotCache(spec, l1=L1Pool.adopt(spec, {0: layers}), l2=L2Pool(spec, [8]), l3=None) as cache:
        request = cache.open(HASHES[:2], token_count=2 * PAGE + 1)
        for layer in layers:
            layer[3], layer[4] = 1.5, 2.5
        cache.save(request, {0: {0: 3, 1: 4}})
        assert cache.flush(timeout_s=TIMEOUT_S)
        assert cache.usable(request, beyond=0) == 2 * PAGE
        load = cache.load(request, beyond=0, tokens=2 * PAGE, slots={0: {0: 6, 1: 7}})
        wait_until(lambda: load.done, timeout_s=TIMEOUT_S, what="the load")
        assert all(bool((layer[6] == 1.5).all() and (layer[7] == 2.5).all()) for layer in layers)
        cache.release(request)
