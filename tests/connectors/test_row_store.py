"""A tier's rows go to L3 and come back whole, in time, or not at all."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest

from hicache.connectors.row_store import Finished, RowSettings, RowStore
from hicache.errors import ConfigError
from hicache.l3 import Done, L3Item
from hicache.outcome import Outcome
from tests.core.memory_l3 import MemoryL3

ROWS, ROW_BYTES, STRIDE = 16, 100, 128
WAIT_S = 20.0


class Memory:
    """Rows that cannot be shared, as vLLM's are."""

    fd = None
    size_bytes = ROWS * STRIDE

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(self.size_bytes))

    def fill(self, row: int, byte: int) -> None:
        self.buffer[row * STRIDE : (row + 1) * STRIDE] = bytes([byte]) * STRIDE

    def row(self, row: int) -> bytes:
        return bytes(self.buffer[row * STRIDE : (row + 1) * STRIDE])


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Rig:
    """A store over an L3 whose calls a test can hold up."""

    def __init__(self, **settings: Any) -> None:
        self.memory = Memory()
        self.l3 = MemoryL3(self.memory)
        self.clock = Clock()
        self.store = RowStore(
            self.l3,
            row_bytes=ROW_BYTES,
            row_stride_bytes=STRIDE,
            settings=RowSettings(**{"lookup_timeout_s": 30, "load_timeout_s": 30, "store_timeout_s": 30} | settings),
            clock=self.clock,
        )
        self._numbers = 0

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def put(self, keys: Sequence[bytes], rows: Sequence[int]) -> Finished:
        self.store.store(self.number(), keys, rows)
        return self.wait()

    def get(self, keys: Sequence[bytes], rows: Sequence[int], *, owner: str = "r") -> Finished:
        self.store.load(self.number(), keys, rows, owner=owner)
        return self.wait()

    def wait(self) -> Finished:
        [ended] = self.wait_for(1)
        return ended

    def wait_for(self, count: int) -> list[Finished]:
        ended: list[Finished] = []
        until(lambda: ended.extend(self.store.finished()) or len(ended) >= count)
        assert len(ended) == count
        return ended

    def find(self, key: bytes, *, owner: str = "r") -> bool:
        answers = [self.store.find(key, owner=owner)]
        self.store.flush()
        until(lambda: answers.append(self.store.find(key, owner=owner)) or answers[-1] is not None)
        assert answers[-1] is not None
        return answers[-1]


def until(condition: Callable[[], object]) -> None:
    pause = threading.Event()
    for _ in range(int(WAIT_S * 1000)):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("it never came to be")


@pytest.fixture
def rigs() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**settings: Any) -> Rig:
        made.append(Rig(**settings))
        return made[-1]

    yield make
    for rig in made:
        for gate in rig.l3.gates.values():
            gate.set()
        rig.store.close()


@pytest.fixture
def rig(rigs: Callable[..., Rig]) -> Rig:
    return rigs()


def test_a_row_comes_back_without_what_lies_behind_it(rig: Rig) -> None:
    rig.memory.fill(3, 7)
    assert rig.put([b"a"], [3]).is_ok
    rig.memory.fill(5, 9)
    ended = rig.get([b"a"], [5])
    assert (ended.is_load, ended.is_ok, ended.arrived) == (True, True, (b"a",))
    assert rig.memory.row(5) == b"\x07" * ROW_BYTES + b"\x09" * (STRIDE - ROW_BYTES)
    assert rig.store.counts.bytes_loaded == rig.store.counts.bytes_stored == ROW_BYTES


def test_a_row_that_is_there_already_is_not_copied_again(rig: Rig) -> None:
    assert rig.put([b"a", b"b"], [0, 1]).outcomes == (Outcome.OK, Outcome.OK)
    assert rig.put([b"b", b"c"], [1, 2]).outcomes == (Outcome.EXISTS, Outcome.OK)
    assert rig.put([b"a", b"b", b"c"], [0, 1, 2]).is_ok
    assert rig.l3.calls["put"] == 2
    assert rig.store.counts.stores == Counter(ok=3, exists=4)


def test_a_request_learns_what_is_there_and_keeps_the_answer_until_it_ends(rig: Rig) -> None:
    rig.put([b"a"], [0])
    assert rig.find(b"a")
    assert not rig.find(b"b")
    rig.put([b"b"], [1])
    assert not rig.find(b"b")
    assert rig.find(b"b", owner="another")
    rig.store.forget("r")
    assert rig.find(b"b")
    assert rig.store.counts.lookups == Counter(hit=3, miss=1)


def test_one_batch_asks_for_a_key_once_however_many_want_it(rig: Rig) -> None:
    for owner in ("r", "s"):
        for key in (b"a", b"b"):
            assert rig.store.find(key, owner=owner) is None
    rig.store.flush()
    until(lambda: rig.store.find(b"b", owner="s") is not None)
    assert rig.l3.calls["lookup"] == 1


def test_br_036_a_request_that_is_not_answered_in_time_has_nothing_even_when_the_answer_comes(rig: Rig) -> None:
    rig.put([b"a"], [0])
    rig.l3.arrived.acquire()
    rig.l3.arrived.acquire()
    rig.l3.gates["lookup"].clear()
    assert rig.store.find(b"a", owner="r") is None
    rig.store.flush()
    assert rig.l3.arrived.acquire(timeout=WAIT_S)
    rig.clock.now_s = 29.9
    assert rig.store.find(b"a", owner="r") is None
    rig.clock.now_s = 30.0
    assert rig.store.find(b"a", owner="r") is False
    rig.l3.gates["lookup"].set()
    assert rig.find(b"a", owner="another")
    assert rig.store.find(b"a", owner="r") is False
    assert rig.store.counts.lookups == Counter(late=1, hit=1)


def test_br_049_a_row_that_fails_to_load_is_not_there_for_that_request_any_more(rig: Rig) -> None:
    rig.put([b"a", b"b"], [0, 1])
    assert rig.find(b"a")
    assert rig.find(b"b")
    assert rig.find(b"b", owner="another")
    rig.l3.fault = lambda operation, key: Outcome.CORRUPT if (operation, key) == ("get", b"b") else None
    ended = rig.get([b"a", b"b"], [2, 3])
    assert (ended.is_ok, ended.arrived) == (False, (b"a",))
    assert rig.store.find(b"a", owner="r")
    assert rig.store.find(b"b", owner="r") is False
    assert rig.store.find(b"b", owner="another")


@pytest.mark.parametrize("outcome", [Outcome.UNAVAILABLE, Outcome.DEADLINE, Outcome.IO_ERROR])
def test_an_l3_that_cannot_say_is_a_miss_and_a_store_that_failed(rig: Rig, outcome: Outcome) -> None:
    rig.l3.fault = lambda operation, key: outcome
    assert not rig.find(b"a")
    assert rig.put([b"a"], [0]).outcomes == (outcome,)
    assert rig.l3.calls["put"] == 0
    assert rig.get([b"a"], [0]).arrived == ()


def test_a_job_in_the_queue_ends_at_its_deadline_and_one_that_runs_when_its_rows_are_let_go(rig: Rig) -> None:
    rig.put([b"a"], [0])
    rig.l3.gates["get"].clear()
    while rig.l3.arrived.acquire(blocking=False):
        pass
    for number in (11, 12, 13):
        rig.store.load(number, [b"a"], [number], owner="r")
    for _ in range(2):  # both lanes
        assert rig.l3.arrived.acquire(timeout=WAIT_S)
    assert rig.store.finished() == []
    rig.clock.now_s = 31.0
    [late] = rig.store.finished()
    assert (late.number, late.outcomes) == (13, (Outcome.DEADLINE,))
    rig.l3.gates["get"].set()
    assert {ended.number for ended in rig.wait_for(2)} == {11, 12}


def test_stores_wait_up_to_a_bound_and_one_more_is_dropped_at_once(rigs: Callable[..., Rig]) -> None:
    rig = rigs(queued_stores_max=2)
    rig.l3.gates["lookup"].clear()
    rig.store.store(1, [b"a"], [0])
    assert rig.l3.arrived.acquire(timeout=WAIT_S)
    for number in (2, 3, 4):
        rig.store.store(number, [bytes([number])], [number])
    [dropped] = rig.store.finished()
    assert (dropped.number, dropped.is_ok) == (4, False)
    rig.l3.gates["lookup"].set()
    assert {ended.number for ended in rig.wait_for(3)} == {1, 2, 3}
    assert rig.store.counts.stores == Counter(ok=3, dropped=1)


def test_a_drain_cancels_what_waits_and_returns_when_nothing_touches_a_row(rig: Rig) -> None:
    rig.l3.gates["lookup"].clear()
    rig.store.store(1, [b"a"], [0])
    assert rig.l3.arrived.acquire(timeout=WAIT_S)
    rig.store.store(2, [b"b"], [1])
    drained = threading.Thread(target=rig.store.drain)
    drained.start()
    until(lambda: not rig.store._open.get(2))  # what waits is cancelled at once
    assert drained.is_alive()
    rig.l3.gates["lookup"].set()
    drained.join(WAIT_S)
    assert not drained.is_alive()
    assert {ended.number: ended.is_ok for ended in rig.store.finished()} == {1: True, 2: False}
    assert rig.put([b"c"], [2]).is_ok


class BrokenL3:
    """Raises from everywhere, as no L3 may; even what ends a thread."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float) -> list[Outcome]:
        raise self.error

    def get(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        raise self.error

    def put(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        raise self.error

    def close(self) -> None:
        pass


@pytest.mark.parametrize("error", [ValueError("a mistake"), SystemExit()])
def test_a_mistake_ends_the_job_and_no_thread(
    rigs: Callable[..., Rig], error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rigs()
    works = rig.store._l3
    rig.store._l3 = BrokenL3(error)
    for _ in range(4):
        assert not rig.find(b"a")
        rig.store.forget("r")
        assert rig.put([b"a"], [0]).outcomes == (Outcome.IO_ERROR,)
        assert rig.get([b"a"], [0]).outcomes == (Outcome.IO_ERROR,)
    assert "failed on this side" in caplog.text
    rig.store._l3 = works
    assert rig.put([b"a"], [0]).is_ok


def test_after_close_nothing_runs_and_every_job_ends(rig: Rig) -> None:
    rig.store.close()
    assert rig.l3.is_closed
    rig.store.load(1, [b"a"], [0], owner="r")
    rig.store.store(2, [b"a"], [0])
    assert [(ended.number, ended.is_ok) for ended in rig.store.finished()] == [(1, False), (2, False)]
    assert rig.store.find(b"a", owner="r") is None
    rig.store.flush()
    rig.store.close()


def always(outcome: Outcome | None, operation: str, key: bytes) -> Outcome | None:
    return outcome


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_each_job_ends_once_and_a_row_holds_what_was_stored(rig: Rig, seed: int) -> None:
    """Random stores, loads, faults, delays and lookups, with the clock running, against a dict."""
    chance = Random(seed)
    keys = [bytes([number]) for number in range(12)]
    faults = [None, None, None, Outcome.CORRUPT, Outcome.UNAVAILABLE, Outcome.DEADLINE, Outcome.ABSENT]
    open_jobs: dict[int, tuple[bool, list[bytes], list[int]]] = {}
    free = set(range(ROWS))

    def end(ended: Finished) -> None:
        is_load, asked, rows = open_jobs.pop(ended.number)
        assert (ended.is_load, list(ended.keys)) == (is_load, asked)
        for key, row, outcome in zip(asked, rows, ended.outcomes, strict=True):
            if is_load and outcome.is_ok:
                assert rig.memory.row(row)[:ROW_BYTES] == key * ROW_BYTES
            free.add(row)

    for step in range(300):
        rig.l3.fault = partial(always, chance.choice(faults))
        for gate in rig.l3.gates.values():
            gate.set() if chance.random() < 0.8 else gate.clear()
        asked = chance.sample(keys, chance.randint(1, 4))
        action = chance.random()
        if action < 0.6 and len(free) >= len(asked):
            rows = [free.pop() for _ in asked]
            number, is_load = rig.number(), action < 0.3
            open_jobs[number] = (is_load, asked, rows)
            if is_load:
                rig.store.load(number, asked, rows, owner=str(step % 5))
            else:
                for key, row in zip(asked, rows, strict=True):
                    rig.memory.fill(row, key[0])
                rig.store.store(number, asked, rows)
        elif action < 0.9:
            for key in asked:
                rig.store.find(key, owner=str(step % 5))
            rig.store.flush()
        elif action < 0.95:
            rig.store.forget(str(step % 5))
        rig.clock.now_s += chance.choice([0.0, 0.1, 20.0])
        for ended in rig.store.finished():
            end(ended)
    for gate in rig.l3.gates.values():
        gate.set()
    rig.store.drain()
    for ended in rig.store.finished():
        end(ended)
    assert not open_jobs
    assert free == set(range(ROWS))


@pytest.mark.parametrize(
    ("name", "value"),
    [("lookup_timeout_s", 0), ("load_timeout_s", -1), ("store_timeout_s", "1"), ("queued_stores_max", 0)],
)
def test_a_bad_setting_is_refused_with_its_name_and_value(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} = {value!r}"):
        RowSettings(**{name: value})  # type: ignore[arg-type]  # as an operator would write it
