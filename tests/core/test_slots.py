"""Slot pools: a released handle is worth nothing any more."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hicache.arena import Arena, ArenaLayout
from hicache.errors import ConfigError, HandleError
from hicache.slots import SlotPool, Slots, slot_of


def test_a_pool_gives_all_that_is_asked_for_or_nothing() -> None:
    pool = SlotPool(3)
    first = pool.acquire(2)
    assert first is not None
    assert pool.acquire(2) is None
    assert pool.free_count == 1
    assert pool.acquire(0) == []
    assert pool.acquire(1) is not None
    assert pool.used_count == 3


def test_a_slot_is_free_when_its_last_holder_lets_go() -> None:
    pool = SlotPool(1)
    (handle,) = pool.acquire(1) or []
    assert pool.hold(handle) == handle
    pool.release(handle)
    assert pool.free_count == 0
    pool.release(handle)
    assert pool.free_count == 1
    with pytest.raises(HandleError):
        pool.release(handle)


@pytest.mark.parametrize("capacity", [-1, 1 << 32])
def test_an_impossible_capacity_is_refused(capacity: int) -> None:
    with pytest.raises(ConfigError, match=f"pool = {capacity}"):
        SlotPool(capacity, name="pool")


def test_an_empty_pool_has_nothing_to_give() -> None:
    pool = SlotPool(0)
    assert pool.acquire(0) == []
    assert pool.acquire(1) is None


class SlotMachine(RuleBasedStateMachine):
    """BR-011: against a dict from handle to holders; no slot ever has two owners. Also where one group has an arena."""

    @initialize(capacity=st.integers(0, 5), per_unit=st.none() | st.integers(1, 3))
    def start(self, capacity: int, per_unit: int | None) -> None:
        self.pool: Slots = SlotPool(capacity)
        if per_unit is not None:
            (self.pool,) = Arena(ArenaLayout(96, capacity, (per_unit,), (False,)), ["slots"]).pools
        self.held: dict[int, int] = {}
        self.stale: list[int] = []

    @rule(count=st.integers(0, 6))
    def acquire(self, count: int) -> None:
        handles = self.pool.acquire(count)
        if count > self.pool.capacity - len(self.held):
            assert handles is None
            return
        assert handles is not None
        assert len(handles) == count
        assert not set(handles) & (set(self.held) | set(self.stale))
        self.held.update(dict.fromkeys(handles, 1))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.hold(handle)
        self.held[handle] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.release(handle)
        self.held[handle] -= 1
        if not self.held[handle]:
            del self.held[handle]
            self.stale.append(handle)

    @precondition(lambda self: self.stale)
    @rule(data=st.data(), hold=st.booleans())
    def use_a_stale_handle(self, data: st.DataObject, hold: bool) -> None:
        handle = data.draw(st.sampled_from(self.stale))
        with pytest.raises(HandleError):
            (self.pool.hold if hold else self.pool.release)(handle)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.used_count == len(self.held)
        assert self.pool.free_count + self.pool.used_count == self.pool.capacity
        assert len({slot_of(handle) for handle in self.held}) == len(self.held)
        assert all(0 <= slot_of(handle) < self.pool.capacity for handle in self.held)
        assert all(self.pool.holders(handle) == count for handle, count in self.held.items())
        assert all(self.pool.holders(handle) == 0 for handle in self.stale)


SlotMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
TestSlotMachine = SlotMachine.TestCase
