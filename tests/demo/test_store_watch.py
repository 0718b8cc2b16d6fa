"""The watch on a worker's stores: only what had begun, had no answer and then failed was cut off."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence

import pytest

from bench.demo.store_watch import OBJECTS_MIN, StoreBegun, StoreWatch
from hicache.l3 import Done, L3Item
from hicache.outcome import Outcome

ITEMS = [L3Item(bytes(32), 0, 16)] * OBJECTS_MIN


class HeldL3:
    """Answers a put when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Done] = []

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float) -> list[Outcome]:
        raise NotImplementedError

    def get(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        raise NotImplementedError

    def put(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        self.waiting.append(done)

    def close(self) -> None:
        pass


def put(l3: HeldL3, answers: list[list[Outcome]], items: Sequence[L3Item] = ITEMS) -> None:
    l3.put(items, timeout_s=1.0, done=answers.append)


def test_the_next_store_is_told_once_and_its_answer_is_passed_on() -> None:
    told, signal = multiprocessing.Pipe(duplex=False)
    l3, watch, answers = HeldL3(), StoreWatch(signal), list[list[Outcome]]()
    watch.watch(l3)
    put(l3, answers)
    assert not told.poll()
    watch.arm()
    put(l3, answers, ITEMS[:1])
    assert not told.poll(), "too small to be met half-way"
    before_s = time.monotonic()
    put(l3, answers)
    put(l3, answers)
    begun: StoreBegun = told.recv()
    assert before_s <= begun.began_at_s <= begun.halfway_s
    assert not told.poll()
    for done in l3.waiting:
        done([Outcome.OK])
    assert answers == [[Outcome.OK]] * 4


@pytest.mark.parametrize(
    ("answered", "begun_after", "outcomes", "expected"),
    [
        ("after", False, [Outcome.UNAVAILABLE] * 3 + [Outcome.OK], 3),
        ("after", False, [Outcome.OK, Outcome.EXISTS], 0),
        ("before", False, [Outcome.UNAVAILABLE] * 4, 0),
        ("after", True, [Outcome.UNAVAILABLE] * 4, 0),
        ("never", False, [], 0),
    ],
)
def test_only_a_store_that_was_under_way_and_failed_counts(
    answered: str, begun_after: bool, outcomes: list[Outcome], expected: int
) -> None:
    _, signal = multiprocessing.Pipe(duplex=False)
    l3, watch = HeldL3(), StoreWatch(signal)
    watch.watch(l3)
    watch.arm()
    moment_s = time.monotonic() if begun_after else 0.0
    put(l3, [])
    if answered == "before":
        l3.waiting.pop()(outcomes)
    moment_s = moment_s or time.monotonic()
    if answered == "after":
        l3.waiting.pop()(outcomes)
    assert watch.cut_off_count(moment_s) == expected
    watch.arm()
    assert watch.cut_off_count(moment_s) == 0
