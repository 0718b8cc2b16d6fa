"""An engine that owns its slots under faults of every leg: late, lost and wrong answers cost it what they brought."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from hicache.outcome import Outcome
from hicache.policies.prefetch import PrefetchPolicy
from tests.client.support import wait_until
from tests.core.memory_l3 import Objects
from tests.core.slot_engine import SlotEngine, assert_nothing_leaked, hashes
from tests.core.small_engine import ATTENTION, HYBRID, PAGE, STATE, prompt

Make = Callable[..., SlotEngine]


class Clock:
    """Stands still until a test moves it."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def make() -> Iterator[Make]:
    engines: list[SlotEngine] = []

    def engine(*arguments: object, **settings: object) -> SlotEngine:
        engines.append(SlotEngine(*arguments, **settings))  # type: ignore[arg-type]
        return engines[-1]

    yield engine
    for made in engines:
        if made.l3 is not None:
            for gate in made.l3.gates.values():
                gate.set()
        made.close()


def stored(make: Make, *prompts: list[int]) -> Objects:
    objects: Objects = {}
    engine = make(objects=objects)
    for tokens in prompts:
        engine.store(tokens)
    return objects


@pytest.mark.parametrize("outcome", [Outcome.CORRUPT, Outcome.IO_ERROR, Outcome.DEADLINE, Outcome.UNAVAILABLE])
@pytest.mark.parametrize("operation", ["lookup", "get"])
def test_what_l3_cannot_give_is_computed(operation: str, outcome: Outcome, make: Make) -> None:
    objects = stored(make, prompt(6))
    engine = make(objects=objects)
    assert engine.l3 is not None
    engine.l3.fault = lambda called, key: outcome if called == operation else None
    assert engine.restore(prompt(6)) == 0
    assert_nothing_leaked(engine)
    engine.l3.fault = lambda called, key: None
    assert engine.restore(prompt(6)) == 6 * PAGE, "the control"


def test_a_fetch_that_does_not_come_is_waited_for_until_the_deadline_and_kept_for_the_next_one(make: Make) -> None:
    objects, clock = stored(make, prompt(6)), Clock()
    engine = make(objects=objects, prefetch=PrefetchPolicy("timeout", threshold_tokens=0), clock=clock)
    assert engine.l3 is not None
    engine.l3.gates["get"].clear()
    request = engine.open(prompt(6))
    engine.cache.prefetch(request)
    l3 = engine.l3
    wait_until(lambda: l3.calls["get"] > 0, timeout_s=20, what="the fetch")
    assert not engine.cache.is_ready(request)
    clock.now_s = 5.0
    assert engine.cache.is_ready(request)
    assert engine.cache.usable(request, beyond=0) == 0
    table = engine.table(0, 6, states=[5])
    engine.compute(prompt(6), table)
    engine.cache.save(request, table)  # what it has computed itself comes before what it had asked for
    engine.cache.release(request)
    engine.l3.gates["get"].set()
    engine.settle()
    assert engine.restore(prompt(6)) == 6 * PAGE
    assert engine.cache.stats.prefetch_dropped["late"] == 6 * PAGE
    assert_nothing_leaked(engine)


def test_a_request_that_is_given_up_while_it_fetches_leaves_nothing_behind(make: Make) -> None:
    engine = make(objects=stored(make, prompt(6)))
    assert engine.l3 is not None
    engine.l3.gates["get"].clear()
    request = engine.open(prompt(6))
    engine.cache.prefetch(request)
    engine.cache.release(request)
    engine.l3.gates["get"].set()
    assert_nothing_leaked(engine)
    assert engine.cache.stats.prefetch_found == engine.cache.stats.prefetch_dropped.total()


def test_a_load_that_fails_once_is_not_offered_to_its_request_again(make: Make) -> None:
    """Else an engine that recomputes, asks again and is given the same answer would do so for ever."""
    engine = make((ATTENTION, STATE))
    engine.store(prompt(6), states=[2, 5])
    copies: Any = engine.cache._replica.executor._copies  # type: ignore[union-attr]
    original = copies.load

    def failing(group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        if group == 1:
            copies.load = original
            raise OSError("a copy failed on purpose")
        original(group, sources, targets)

    copies.load = failing
    request = engine.open(prompt(6))
    assert engine.cache.usable(request, beyond=0) == 6 * PAGE
    table = engine.table(0, 6, states=[5])
    assert engine.load(request, own=0, tokens=6 * PAGE, table=table).failed
    assert engine.cache.usable(request, beyond=0) == 3 * PAGE, "up to the state before"
    table = engine.table(0, 3, states=[2])
    assert not engine.load(request, own=0, tokens=3 * PAGE, table=table).failed
    engine.check(prompt(6), table)
    engine.cache.release(request)
    assert_nothing_leaked(engine)


def test_a_page_whose_copy_down_failed_is_saved_when_it_is_offered_again(make: Make) -> None:
    objects: Objects = {}
    engine = make(objects=objects)
    copies: Any = engine.cache._replica.executor._copies  # type: ignore[union-attr]
    original = copies.backup

    def failing(*arguments: object) -> None:
        raise OSError("a copy failed on purpose")

    copies.backup = failing
    engine.store(prompt(4))
    assert engine.cache.stats.objects["backup.io_error"] == 12
    assert not objects
    assert_nothing_leaked(engine)
    copies.backup = original
    engine.store(prompt(4))
    assert engine.restore(prompt(4)) == 4 * PAGE
    assert_nothing_leaked(engine)


def test_what_l2_has_no_room_for_is_left_out_and_nothing_waits(make: Make) -> None:
    engine = make((ATTENTION,), l2=8)
    engine.store(prompt(8))
    keeper = engine.open(prompt(8))
    assert engine.cache.usable(keeper, beyond=0) == 8 * PAGE  # keeps all of L2
    other = engine.open(prompt(3, seed=1))
    table = engine.table(0, 3)
    engine.compute(prompt(3, seed=1), table)
    assert engine.cache.save(other, table).done
    assert engine.cache.stats.skipped["backup.no_host_capacity"] >= 1
    engine.cache.release(keeper)
    engine.cache.save(other, table)
    engine.settle()
    engine.cache.release(other)
    assert engine.restore(prompt(3, seed=1)) == 3 * PAGE
    assert_nothing_leaked(engine)


def test_what_was_promised_stays_for_a_bounded_time(make: Make) -> None:
    clock = Clock()
    engine = make((ATTENTION,), l2=8, clock=clock)
    engine.store(prompt(8))
    waiting = engine.open(prompt(8))
    assert engine.cache.usable(waiting, beyond=0) == 8 * PAGE
    engine.store(prompt(4, seed=1))
    assert engine.cache.usable(waiting, beyond=0) == 8 * PAGE, "the promise was broken"
    clock.now_s = 31.0
    engine.store(prompt(4, seed=1))
    assert engine.cache.stats.skipped["promise.expired"] == 1
    table = engine.table(0, 8)
    gone = engine.cache.load(waiting, beyond=0, tokens=8 * PAGE, slots=table)
    assert gone.done
    assert gone.failed
    assert engine.cache.usable(waiting, beyond=0) == 4 * PAGE
    engine.cache.release(waiting)
    assert_nothing_leaked(engine)


def test_what_went_from_l2_and_never_came_to_l3_is_saved_again_ancestors_first(make: Make) -> None:
    engine = make((ATTENTION,), l2=8)
    request = engine.open(prompt(6))
    table = engine.table(0, 6)
    engine.compute(prompt(6), table)
    engine.cache.save(request, {0: {page: table[0][page] for page in range(4)}})
    engine.settle()
    engine.store(prompt(8, seed=1))  # takes all of L2
    engine.cache.save(request, {0: {page: table[0][page] for page in (4, 5)}})
    assert engine.cache.stats.skipped["backup.unreachable"] == 2
    engine.cache.save(request, table)
    engine.settle()
    engine.cache.release(request)
    assert engine.restore(prompt(6)) == 6 * PAGE
    assert_nothing_leaked(engine)


def test_a_page_follows_what_went_from_l2_after_l3_had_taken_it(make: Make) -> None:
    objects: Objects = {}
    engine = make((ATTENTION,), l2=8, objects=objects)
    request = engine.open(prompt(6))
    table = engine.table(0, 6)
    engine.compute(prompt(6), table)
    engine.cache.save(request, {0: {page: table[0][page] for page in range(4)}})
    engine.settle()
    engine.store(prompt(8, seed=1))  # takes all of L2
    copies = engine.cache.stats.objects["backup.ok"]
    engine.cache.save(request, table)
    engine.settle()
    engine.cache.release(request)
    assert engine.cache.stats.objects["backup.ok"] == copies + 2, "what L3 has was copied again"
    other = make((ATTENTION,), objects=objects)
    assert other.restore(prompt(6)) == 6 * PAGE
    assert_nothing_leaked(engine)


def test_a_page_goes_down_at_its_second_use(make: Make) -> None:
    engine = make(write_policy="write_through_selective")
    engine.store(prompt(4))
    assert engine.cache.stats.skipped["backup.not_admitted"] == 4
    assert engine.restore(prompt(4)) == 0
    engine.store(prompt(4))
    assert engine.restore(prompt(4)) == 4 * PAGE
    assert_nothing_leaked(engine)


def test_many_threads_use_one_cache(make: Make) -> None:
    objects: Objects = {}
    engine = make(HYBRID, l1=256, l2=24, objects=objects)
    failures: list[BaseException] = []

    def serve(seed: int) -> None:
        try:
            for turn in range(6):
                tokens = prompt(4, seed=(seed + turn) % 3)
                request = engine.cache.open(hashes(tokens), token_count=len(tokens))
                engine.cache.prefetch(request)
                engine.wait(request)
                tables = {group: {page: 16 * seed + 4 * group + page for page in range(4)} for group in range(3)}
                if engine.cache.usable(request, beyond=0) == 4 * PAGE:
                    load = engine.load(request, own=0, tokens=4 * PAGE, table=tables)
                    if not load.failed:
                        engine.check(tokens, engine.needed(tables, 0, 4))
                else:
                    engine.compute(tokens, tables)
                    engine.save(request, tables)
                engine.cache.release(request)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert_nothing_leaked(engine)
    assert engine.cache.stats.objects["load.ok"] > 0
