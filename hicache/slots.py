"""Slots of a pool: who holds which one, with handles that go stale."""

from __future__ import annotations

from abc import ABC, abstractmethod

from hicache.errors import ConfigError, HandleError

SLOT_BITS = 32
_SLOT_MASK = (1 << SLOT_BITS) - 1


def slot_of(handle: int) -> int:
    """The index into the pool's memory that a handle stands for."""
    return handle & _SLOT_MASK


class Slots(ABC):
    """Reference-counted slots ``[0, capacity)``. Pure bookkeeping: it touches no memory and is not thread-safe.

    A handle is ``generation << 32 | slot``. A slot can be given out again when its last holder has released it; the
    generation then differs, so a second release through an old handle is refused and cannot hit the new owner.
    """

    def __init__(self, capacity: int, *, name: str) -> None:
        if not 0 <= capacity <= _SLOT_MASK:
            raise ConfigError(name, capacity, f"a slot count of 0 to {_SLOT_MASK}")
        self.capacity = capacity
        self.name = name
        self._holders = [0] * capacity
        self._generations = [0] * capacity

    @property
    @abstractmethod
    def free_count(self) -> int:
        """Slots that can be acquired now."""

    @property
    @abstractmethod
    def used_count(self) -> int:
        """Slots with at least one holder."""

    @abstractmethod
    def acquire(self, count: int) -> list[int] | None:
        """``count`` handles with one holder each, or None, and nothing taken, when there are not as many. O(count)."""

    def hold(self, handle: int) -> int:
        """One more holder. Returns the handle. Raises HandleError when it is stale."""
        self._holders[self._checked(handle)] += 1
        return handle

    def release(self, handle: int) -> None:
        """One holder less; the last one frees the slot. Raises HandleError when the handle is stale."""
        slot = self._checked(handle)
        self._holders[slot] -= 1
        if self._holders[slot] == 0:
            self._generations[slot] += 1
            self._freed(slot)

    def holders(self, handle: int) -> int:
        """How many hold it; 0 for a stale handle."""
        slot = handle & _SLOT_MASK
        valid = slot < self.capacity and self._generations[slot] == handle >> SLOT_BITS
        return self._holders[slot] if valid else 0

    @abstractmethod
    def _freed(self, slot: int) -> None:
        """Nobody holds ``slot`` any more."""

    def _checked(self, handle: int) -> int:
        slot = handle & _SLOT_MASK
        if slot >= self.capacity or self._generations[slot] != handle >> SLOT_BITS or not self._holders[slot]:
            raise HandleError(f"{self.name}: handle {handle:#x} is stale: its slot was released or never given out")
        return slot


class SlotPool(Slots):
    """Slots that are all of one pool."""

    def __init__(self, capacity: int, *, name: str = "slots") -> None:
        super().__init__(capacity, name=name)
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def free_count(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Slots with at least one holder."""
        return self.capacity - len(self._free)

    def acquire(self, count: int) -> list[int] | None:
        """See Slots."""
        if count > len(self._free):
            return None
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        for slot in taken:
            self._holders[slot] = 1
        return [self._generations[slot] << SLOT_BITS | slot for slot in taken]

    def _freed(self, slot: int) -> None:
        self._free.append(slot)
