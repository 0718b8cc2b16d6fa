"""Least recently used, against a model."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.policies.eviction import Lru

operations = st.lists(
    st.tuples(st.sampled_from(["add", "add", "remove", "pop"]), st.integers(0, 5), st.integers(0, 4)), max_size=80
)


@given(operations=operations)
@settings(max_examples=200)
def test_the_item_of_the_oldest_stamp_goes_first_and_of_equal_ones_the_one_added_first(
    operations: list[tuple[str, int, int]],
) -> None:
    lru: Lru[int] = Lru()
    model: dict[int, tuple[int, int]] = {}
    for order, (operation, item, stamp) in enumerate(operations):
        if operation == "add":
            lru.add(item, stamp)
            model[item] = (stamp, order)
        elif operation == "remove":
            lru.remove(item)
            model.pop(item, None)
        else:
            expected = min(model, key=lambda known: model[known], default=None)
            assert lru.pop() == expected
            if expected is not None:
                del model[expected]
        assert len(lru) == len(model)
    while model:
        expected = min(model, key=lambda known: model[known])
        assert lru.pop() == expected
        del model[expected]
    assert lru.pop() is None


def test_an_item_that_is_used_again_and_again_takes_no_more_room() -> None:
    lru: Lru[str] = Lru()
    for stamp in range(10_000):
        lru.add("hot", stamp)
        lru.add("warm", stamp)
        lru.remove("warm")
    assert len(lru) == 1
    assert len(lru._heap) < 200
    assert lru.pop() == "hot"
    assert lru.pop() is None


def test_items_need_not_be_comparable() -> None:
    lru: Lru[object] = Lru()
    first, second = object(), object()
    lru.add(first, 1)
    lru.add(second, 1)
    assert lru.pop() is first
    assert lru.pop() is second
