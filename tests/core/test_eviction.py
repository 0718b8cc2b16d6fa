"""Least recently used, against a model."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.policies.eviction import Lru

operations = st.lists(
    st.tuples(st.sampled_from(["add", "use", "remove", "pop"]), st.integers(0, 5), st.integers(0, 4)), max_size=80
)


@given(operations=operations)
@settings(max_examples=200)
def test_the_item_of_the_oldest_last_use_goes_first(operations: list[tuple[str, int, int]]) -> None:
    last_use = dict.fromkeys(range(6), 0)
    lru: Lru[int] = Lru(last_use.__getitem__)
    model: set[int] = set()

    def pop() -> None:
        item = lru.pop()
        assert (item is None) == (not model)
        if item is not None:
            assert last_use[item] == min(last_use[known] for known in model)
            model.remove(item)

    for operation, item, later in operations:
        if operation == "add":
            lru.add(item)
            model.add(item)
        elif operation == "use":
            last_use[item] += later
        elif operation == "remove":
            lru.remove(item)
            model.discard(item)
        else:
            pop()
        assert len(lru) == len(model)
        assert {known for known in range(6) if known in lru} == model
    for _ in range(len(model) + 1):
        pop()


def test_an_item_that_is_used_again_and_again_takes_no_more_room() -> None:
    last_use = {"hot": 0, "warm": 0}
    lru: Lru[str] = Lru(last_use.__getitem__)
    for stamp in range(10_000):
        last_use |= {"hot": stamp, "warm": stamp}
        lru.add("hot")
        lru.add("warm")
        lru.remove("warm")
    assert len(lru) == 1
    assert len(lru._heap) == 2
    assert lru.pop() == "hot"
    assert lru.pop() is None


def test_items_that_are_gone_for_good_take_no_room() -> None:
    lru: Lru[int] = Lru(lambda item: item)
    for item in range(10_000):
        lru.add(item)
        lru.remove(item)
    assert len(lru._heap) < 100
    assert len(lru._recorded) < 100
    assert lru.pop() is None


def test_items_need_not_be_comparable() -> None:
    lru: Lru[object] = Lru(lambda item: 1)
    first, second = object(), object()
    lru.add(first)
    lru.add(second)
    assert lru.pop() is first
    assert lru.pop() is second
