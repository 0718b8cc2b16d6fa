"""Handing a sequence over: what L3 has acknowledged of it, waited for with a deadline."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from hicache import Request, Stored
from hicache.errors import UsageError
from hicache.outcome import Outcome
from tests.core.small_engine import ATTENTION, PAGE, STATE, Make, SmallEngine, by_source, prompt

DEADLINE_S = 20.0


def begin(engine: SmallEngine, tokens: list[int], *, snapshot: bool = True) -> Request:
    """A request that has computed and stored all its full pages, and goes on."""
    request = engine.cache.match(tokens)
    engine.cache.prefetch(request)
    engine.cache.wait(request)
    restored = engine.cache.load(request)
    assert restored is not None
    engine.compute(request, tokens, restored.tokens, snapshot=snapshot)
    return request


def test_what_is_said_to_be_stored_another_engine_loads(make: Make) -> None:
    first = make(objects={})
    assert first.l3 is not None
    request = begin(first, prompt(5))
    assert first.cache.wait_stored(request, timeout_s=DEADLINE_S) == Stored(5 * PAGE, is_complete=True)
    first.cache.release(request)
    second = make(objects=first.l3.objects)
    assert second.serve(prompt(5)).by_source == by_source(l3=5 * PAGE)
    goes_on = begin(second, [*prompt(5), *range(500, 500 + 2 * PAGE)])
    assert second.cache.wait_stored(goes_on, timeout_s=DEADLINE_S) == Stored(7 * PAGE, is_complete=True)
    second.cache.release(goes_on)
    assert first.serve([*prompt(5), *range(500, 500 + 2 * PAGE)]).by_source == by_source(l1=5 * PAGE, l3=2 * PAGE)


def test_the_deadline_is_kept_while_a_store_hangs_and_the_rest_comes_later(make: Make) -> None:
    engine = make(objects={})
    assert engine.l3 is not None
    engine.l3.gates["put"].clear()
    request = begin(engine, prompt(3))
    assert engine.cache.wait_stored(request, timeout_s=0.01) == Stored(0, is_complete=False)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(engine.cache.wait_stored, request, timeout_s=DEADLINE_S)
        assert not waiting.done()
        engine.l3.gates["put"].set()
        assert waiting.result(DEADLINE_S) == Stored(3 * PAGE, is_complete=True)
    engine.cache.release(request)


def test_a_failed_store_ends_the_wait_at_once_and_is_tried_again_by_the_next_one(make: Make) -> None:
    engine = make(objects={})
    assert engine.l3 is not None
    engine.l3.fault = lambda operation, key: Outcome.UNAVAILABLE if operation == "put" else None
    request = begin(engine, prompt(3))
    assert engine.cache.wait_stored(request, timeout_s=DEADLINE_S) == Stored(0, is_complete=False)
    engine.l3.fault = lambda operation, key: None
    assert engine.cache.wait_stored(request, timeout_s=DEADLINE_S) == Stored(3 * PAGE, is_complete=True)
    engine.cache.release(request)


def test_attention_without_its_state_is_not_stored_and_the_boundary_before_it_is(make: Make) -> None:
    engine = make(objects={})
    assert engine.l3 is not None
    states = engine.spec.groups.index(STATE)
    request = engine.cache.match(prompt(4))
    assert engine.cache.load(request) is not None
    engine.compute(request, prompt(4)[: 2 * PAGE + 1], 0)
    assert engine.cache.wait_stored(request, timeout_s=DEADLINE_S) == Stored(2 * PAGE, is_complete=True)
    engine.l3.fault = lambda operation, key: (
        Outcome.NO_SPACE if operation == "put" and key[-4:-2] == states.to_bytes(2, "big") else None
    )
    engine.compute(request, prompt(4), 2 * PAGE)
    assert engine.cache.wait_stored(request, timeout_s=DEADLINE_S) == Stored(2 * PAGE, is_complete=False)
    engine.cache.release(request)


def test_without_a_snapshot_there_is_nothing_that_another_engine_could_use(make: Make) -> None:
    engine = make(objects={})
    request = begin(engine, prompt(3), snapshot=False)
    assert engine.cache.wait_stored(request, timeout_s=DEADLINE_S) == Stored(0, is_complete=True)
    engine.cache.release(request)


def test_without_l3_nothing_is_ever_stored(make: Make) -> None:
    engine = make()
    request = begin(engine, prompt(3))
    assert engine.cache.wait_stored(request, timeout_s=DEADLINE_S) == Stored(0, is_complete=False)
    engine.cache.release(request)


def test_other_requests_are_not_waited_for(make: Make) -> None:
    engine = make(objects={})
    assert engine.l3 is not None
    request = begin(engine, prompt(3))
    assert engine.cache.wait_stored(request, timeout_s=DEADLINE_S).is_complete
    engine.l3.gates["put"].clear()
    other = begin(engine, prompt(3, seed=1))
    assert engine.cache.wait_stored(request, timeout_s=DEADLINE_S) == Stored(3 * PAGE, is_complete=True)
    assert not engine.cache.flush(timeout_s=0.01), "the other one is still being stored"
    engine.l3.gates["put"].set()
    engine.cache.release(request)
    engine.cache.release(other)


def test_the_end_of_the_cache_ends_the_wait(make: Make) -> None:
    engine = make(objects={})
    assert engine.l3 is not None
    engine.l3.gates["put"].clear()
    request = begin(engine, prompt(3))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(engine.cache.wait_stored, request, timeout_s=DEADLINE_S)
        engine.l3.arrived.acquire(timeout=DEADLINE_S)
        engine.close()
        assert not waiting.result(DEADLINE_S).is_complete


def test_a_request_that_is_not_loaded_or_is_over_has_nothing_to_wait_for(make: Make) -> None:
    engine = make(objects={})
    request = engine.cache.match(prompt(2))
    with pytest.raises(UsageError, match="not loaded"):
        engine.cache.wait_stored(request, timeout_s=1)
    engine.cache.release(request)
    with pytest.raises(UsageError, match="released"):
        engine.cache.wait_stored(request, timeout_s=1)


def test_a_page_that_found_no_room_below_is_written_by_the_wait(make: Make) -> None:
    """L2 has room for one state: the snapshots that came while it was taken go down when the first is stored."""
    engine = make(replace(STATE), l2=1, objects={})
    assert engine.l3 is not None
    engine.l3.gates["put"].clear()
    request = begin(engine, prompt(3))
    assert engine.cache.stats.skipped["backup.no_host_capacity"] > 0
    engine.l3.gates["put"].set()
    engine.settle()
    assert engine.cache.wait_stored(request, timeout_s=DEADLINE_S) == Stored(3 * PAGE, is_complete=True)
    engine.cache.release(request)


def test_what_l3_has_lost_since_is_stored_again_before_it_is_said_to_be_there(make: Make) -> None:
    engine = make(objects={})
    assert engine.l3 is not None
    engine.serve(prompt(4))
    engine.settle()
    engine.l3.objects.clear()
    request = begin(engine, prompt(4))
    assert engine.cache.wait_stored(request, timeout_s=DEADLINE_S) == Stored(4 * PAGE, is_complete=True)
    engine.cache.release(request)
    assert make(objects=engine.l3.objects).serve(prompt(4)).by_source == by_source(l3=4 * PAGE)


def test_an_l3_that_cannot_say_what_it_has_is_believed_what_it_has_acknowledged(make: Make) -> None:
    engine = make(objects={})
    assert engine.l3 is not None
    request = begin(engine, prompt(2))
    assert engine.cache.wait_stored(request, timeout_s=DEADLINE_S).is_complete
    engine.l3.fault = lambda operation, key: Outcome.UNAVAILABLE
    assert engine.cache.wait_stored(request, timeout_s=DEADLINE_S) == Stored(2 * PAGE, is_complete=True)
    engine.l3.gates["lookup"].clear()
    assert engine.cache.wait_stored(request, timeout_s=0.01) == Stored(2 * PAGE, is_complete=False), "it may answer yet"
    engine.l3.gates["lookup"].set()
    engine.cache.release(request)


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_a_wait_that_finds_l2_full_of_what_others_are_storing_goes_on_when_that_is_stored(
    policy: str, make: Make
) -> None:
    engine = make(ATTENTION, l2=4, objects={}, write_policy=policy)
    assert engine.l3 is not None
    engine.l3.gates["put"].clear()
    other = begin(engine, prompt(4))
    assert engine.cache.wait_stored(other, timeout_s=0.01) == Stored(0, is_complete=False)
    request = begin(engine, prompt(3, seed=1))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(engine.cache.wait_stored, request, timeout_s=DEADLINE_S)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        engine.l3.gates["put"].set()
        assert waiting.result(DEADLINE_S) == Stored(3 * PAGE, is_complete=True)
    engine.cache.release(other)
    engine.cache.release(request)
