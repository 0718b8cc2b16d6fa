"""The objects of a store: how large each is, whose, when it was used last, and which are to go first."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hicache.backends.base import PHYSICAL_KEY_BYTES_MAX, StoredBatch, is_storable_key
from hicache.backends.columns import Column, each_of_few
from hicache.backends.held import HeldBytes
from hicache.backends.key_index import ONE_BY_ONE_MAX, KeyIndex
from hicache.backends.key_table import NO_SLOT, Slots, first_of_each
from hicache.backends.tenant_usage import Owners, TenantUsage
from hicache.backends.victims import NEVER, SCAN_SLOTS, VictimQueue
from hicache.tenancy import TENANT_BYTES

EXAMINED_MAX = 1024  # by one take_victims, which runs under the lock of the store
TICK_S = 2.0**-21  # between two uses: until 2106 a float64 of seconds since the epoch can tell them apart

_IS_ASIDE = 1  # met by take_victims and not to go
_IS_TOUCHED = 2  # used since its time was written to the medium


class Residents:
    """An index from keys to objects. Not thread-safe.

    Times are seconds of the wall clock. Each use gets a time of its own, later than all before, also where the clock
    stands still or goes back; of a batch the first key counts as the most recently used. Memory follows the most
    objects that there ever were: see docs/decisions/0014-residents-in-arrays.md for what one takes.
    """

    def __init__(
        self,
        scanned: Iterable[StoredBatch] = (),
        *,
        stored_bytes: Callable[[int], int],
        now_s: float = math.inf,
    ) -> None:
        """Takes what ``Backend.scan`` tells, in any order; uses later than ``now_s`` count as ``now_s``.

        ``stored_bytes`` is what an object of so many bytes takes of the capacity.
        """
        self._stored_bytes = stored_bytes
        self._keys = KeyIndex()
        self._sizes = Column(np.int64)
        self._used = Column(np.float64)  # NEVER: free, or aside
        self._owners = Column(np.uint32)
        self._flags = Column(np.uint8)
        self._holds = Column(np.uint32, is_sparse=True)
        self._used.cells[NO_SLOT] = NEVER
        self._slot_end = NO_SLOT + 1  # slots from here on were never taken
        self._free = array("I")
        self._gone: dict[bytes, int] = {}  # discarded while held: these keep their slots
        self._held_count = 0
        self._held = HeldBytes()
        self._tenants = Owners()
        self._count = self._aside_count = 0
        self.payload_bytes = 0  # of all that is there
        self._newest_s = -math.inf
        self._queues: dict[int | None, VictimQueue] = {}  # by owner; 16 bytes for a 256th or 1,024 of its objects
        for batch in scanned:
            self.load(batch.keys, batch.sizes_bytes, batch.used_at_s, now_s=now_s)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self._keys.find_one(key) != NO_SLOT

    def __len__(self) -> int:
        return self._count

    def find(self, keys: Sequence[bytes], *, used_since_s: float = -math.inf) -> list[bool]:
        """Which keys are there, without those that were last used before ``used_since_s`` and are not held."""
        found: list[bool] = (self.slots(keys, used_since_s=used_since_s) != NO_SLOT).tolist()
        return found

    def slots(self, keys: Sequence[bytes], *, used_since_s: float = -math.inf) -> Slots:
        """``find``, as the slots of those that are there and NO_SLOT for the others.

        A slot means its key until that is discarded.
        """
        slots = self._keys.find(keys)
        if used_since_s > -math.inf:
            slots[(self._used.array[slots] < used_since_s) & (self._holds.array[slots] == 0)] = NO_SLOT
        return slots

    def use(self, keys: Sequence[bytes], *, now_s: float, used_since_s: float = -math.inf) -> Slots:
        """``slots``, and counts those that it returns as used now."""
        slots = self.slots(keys, used_since_s=used_since_s)
        self._restamp(slots[slots != NO_SLOT], now_s)
        return slots

    def size_bytes(self, key: bytes) -> int | None:
        """The payload size; None when it is not there."""
        slot = self._keys.find_one(key)
        return None if slot == NO_SLOT else self._sizes.cells[slot]

    def add(self, key: bytes, size_bytes: int, *, now_s: float, is_expired: bool = False) -> None:
        """Add as the most recently used, or replace; one that ``is_expired`` as never used, so that it goes first.

        Raises ValueError for a key that no backend stores.
        """
        if not is_storable_key(key):
            raise ValueError(f"a key has 1 to {PHYSICAL_KEY_BYTES_MAX} bytes, not {len(key)}")
        self.discard(key)
        slot = self._slot_for(key, size_bytes)
        tenant = self._tenants.of(key[:TENANT_BYTES])
        self._keys.insert_one(key, slot)
        if is_expired:
            for owner in (None, tenant.number):
                self._queues.pop(owner, None)  # it belongs before what they have found
        else:
            self._newest_s = self._next_time(now_s)
        self._sizes.cells[slot] = size_bytes
        self._used.cells[slot] = -math.inf if is_expired else self._newest_s
        self._owners.cells[slot] = tenant.number
        self._flags.cells[slot] = 0
        self._count += 1
        self.payload_bytes += size_bytes
        tenant.change(objects=1, payload_bytes=size_bytes, stored_bytes=self._stored_bytes(size_bytes))

    def add_many(self, keys: Sequence[bytes], sizes_bytes: Sequence[int], *, now_s: float) -> None:
        """``add`` each, the first one as the last, and so as the most recently used."""
        if len(keys) <= ONE_BY_ONE_MAX or self._gone or len(self._keys.places_of_new(keys)) < len(keys):
            for key, size_bytes in zip(reversed(keys), reversed(sizes_bytes), strict=True):
                self.add(key, size_bytes, now_s=now_s)
            return
        if not all(map(is_storable_key, keys)):
            raise ValueError(f"a key has 1 to {PHYSICAL_KEY_BYTES_MAX} bytes")
        recycled = self._free[-len(keys) :]
        del self._free[-len(keys) :]
        first = self._new_slots(len(keys) - len(recycled))
        slots = np.concatenate([np.array(recycled, dtype=np.int64), np.arange(first, self._slot_end)])
        self._fill(slots, keys, np.array(sizes_bytes, dtype=np.int64))
        self._restamp(slots, now_s)
        self._flags.array[slots] = 0

    def discard(self, key: bytes) -> int | None:
        """Remove; returns the payload size, None when it was not there."""
        slot = self._keys.remove_one(key)
        if slot == NO_SLOT:
            return None
        digest = key[:TENANT_BYTES]
        tenant = self._tenants.of(digest)
        size_bytes: int = self._sizes.cells[slot]
        if self._flags.cells[slot] & _IS_ASIDE:
            self._aside_count -= 1
            tenant.aside -= 1
        self._used.cells[slot] = NEVER
        self._flags.cells[slot] = 0
        if self._holds.cells[slot]:
            self._gone[key] = slot
        else:
            self._free.append(slot)
        self._count -= 1
        self.payload_bytes -= size_bytes
        tenant.change(objects=-1, payload_bytes=-size_bytes, stored_bytes=-self._stored_bytes(size_bytes))
        self._forget_if_empty(digest)
        return size_bytes

    def load(
        self, keys: Sequence[bytes], sizes_bytes: ArrayLike, used_at_s: ArrayLike, *, now_s: float = math.inf
    ) -> None:
        """Add many objects at once, before anything is used: one time and one size for each key.

        Keys that are there are passed over; times later than ``now_s`` count as ``now_s``.
        """
        sizes = np.asarray(sizes_bytes, dtype=np.int64)
        times = np.minimum(np.nan_to_num(np.asarray(used_at_s, dtype=np.float64), posinf=0.0, neginf=0.0), now_s)
        fresh = self._keys.places_of_new(keys)
        if len(fresh) < len(keys):
            keys, sizes, times = [keys[place] for place in fresh.tolist()], sizes[fresh], times[fresh]
        if not keys:
            return
        slots = np.arange(self._new_slots(len(keys)), self._slot_end)
        self._fill(slots, keys, sizes)
        self._used.array[slots] = times
        self._newest_s = max(self._newest_s, float(times.max()))

    def _fill(self, slots: Slots, keys: Sequence[bytes], sizes: NDArray[np.int64]) -> None:
        """Put new keys into free slots; their times are still missing."""
        self._keys.insert(keys, slots)
        self._sizes.array[slots] = sizes
        digests = [key[:TENANT_BYTES] for key in keys]
        numbers = {digest: self._tenants.of(digest).number for digest in set(digests)}
        self._owners.array[slots] = [numbers[digest] for digest in digests]
        self._count_owned(numbers, slots, sign=1)

    def _count_owned(self, digests: Iterable[bytes], slots: Slots, *, sign: int) -> None:
        """Objects in these slots, each of one of these tenants, have come (``sign`` 1) or gone (-1)."""
        owners, sizes = self._owners.array[slots], self._sizes.array[slots]
        self._count += sign * len(slots)
        self.payload_bytes += sign * int(sizes.sum())
        stored = self._stored(sizes)
        for digest in digests:
            tenant = self._tenants.of(digest)
            is_own = owners == tenant.number
            tenant.change(
                objects=sign * int(is_own.sum()),
                payload_bytes=sign * int(sizes[is_own].sum()),
                stored_bytes=sign * int(stored[is_own].sum()),
            )
            self._forget_if_empty(digest)

    def take_victims(
        self,
        enough_bytes: float,
        *,
        count_max: int,
        is_kept: Callable[[bytes], bool],
        tenant: bytes | None = None,
        used_before_s: float = math.inf,
    ) -> list[tuple[bytes, int]] | None:
        """Remove the least recently used that together store ``enough_bytes``, ``count_max`` at most.

        Only those of ``tenant`` where one is given, and only those last used before ``used_before_s``. Those that are
        kept or held are set aside until ``put_back``, the end of the hold or their next use: they are met once and
        not by every call.

        Returns keys and payload sizes. A call looks at a bounded part: while that is not enough, ask again, also after
        None, which means that this part had none; an empty list means that there is none.
        """
        owned = self._tenants.get(tenant) if tenant is not None else None
        if tenant is not None and owned is None:
            return []
        candidates = self._count - self._aside_count if owned is None else owned.objects - owned.aside
        if candidates == 0 or count_max <= 0 or enough_bytes <= 0 or used_before_s == -math.inf:
            return []
        number = None if owned is None else owned.number
        queue = self._queues.setdefault(number, VictimQueue(number))
        if not queue.is_ready():
            taken = slice(self._slot_end)
            is_complete = queue.scan(
                self._used.array[taken], self._owners.array[taken], newest_s=self._newest_s, count=candidates
            )
            if not is_complete or not queue.is_ready():
                return None
        victims: list[tuple[bytes, int]] = []
        victim_slots: list[int] = []
        holds, sizes = self._holds.cells, self._sizes.cells
        freed_bytes, is_last = 0, False
        slots, times, ends, entries = queue.head(self._used.array, EXAMINED_MAX)
        for slot, used_at_s, end in zip(slots.tolist(), times.tolist(), ends.tolist(), strict=True):
            if is_last := used_at_s >= used_before_s:
                entries = end - 1
                break
            key = self._keys.key(slot)
            if holds[slot] or is_kept(key):
                self._set_aside(slot)
                continue
            victims.append((key, sizes[slot]))
            victim_slots.append(slot)
            freed_bytes += self._stored_bytes(sizes[slot])
            if is_last := freed_bytes >= enough_bytes or len(victims) >= count_max:
                entries = end
                break
        queue.drop(entries)
        self._discard_victims(victims, victim_slots)
        return victims if victims or is_last else None

    def _discard_victims(self, victims: list[tuple[bytes, int]], slots: list[int]) -> None:
        """``discard`` each; none is held or aside."""
        if len(victims) <= ONE_BY_ONE_MAX:
            for key, _ in victims:
                self.discard(key)
            return
        taken = np.array(slots, dtype=np.int64)
        self._keys.remove(taken)
        self._used.array[taken] = NEVER
        self._flags.array[taken] = 0
        self._free.extend(slots)
        self._count_owned({key[:TENANT_BYTES] for key, _ in victims}, taken, sign=-1)

    def _forget_if_empty(self, digest: bytes) -> None:
        tenant = self._tenants.of(digest)
        if tenant.objects == 0:
            self._tenants.drop(digest)
            self._queues.pop(tenant.number, None)

    def put_back(self, keys: Sequence[bytes]) -> None:
        """What kept these has ended: those set aside are now the most recently used, the first as the last."""
        if self._aside_count:
            slots = self._keys.find(keys)
            self._restamp(slots[(self._flags.array[slots] & _IS_ASIDE) != 0], self._newest_s)

    def take_touched(self, start: int, *, count_max: int) -> tuple[list[tuple[bytes, float]], int | None]:
        """Keys used since they were taken here last, with their times, ``count_max`` at most.

        Looks from ``start`` on, 0 at first, and at SCAN_SLOTS slots. Returns where to go on, None at the end.
        """
        flags = self._flags.array[start : min(start + SCAN_SLOTS, self._slot_end)]
        touched = np.flatnonzero(flags & _IS_TOUCHED)[:count_max]
        flags[touched] &= ~np.uint8(_IS_TOUCHED)
        slots = (touched + start).tolist()
        taken = [(self._keys.key(slot), min(self._used.cells[slot], self._newest_s)) for slot in slots]
        end = slots[-1] + 1 if len(slots) == count_max else start + len(flags)
        return taken, end if end < self._slot_end else None

    @property
    def held_count(self) -> int:
        """Objects that are held, those included that were discarded meanwhile."""
        return self._held_count

    def hold(self, slots: Slots, *, bytes_max: int, tenant_bytes_max: int) -> Slots:
        """Keep objects of one tenant from eviction and expiry until ``release`` gets what this returns: those held,
        each once.

        All that is held stores at most ``bytes_max``, and of the tenant ``tenant_bytes_max``: the first ones are held,
        and those that were already. A hold outlives a ``discard``: what is stored again under its key is held.
        """
        slots = first_of_each(slots[slots != NO_SLOT])
        if not len(slots):
            return slots
        tenant = self._tenant_of(slots[0])
        left_bytes = self._held.left(tenant, bytes_max=bytes_max, tenant_bytes_max=tenant_bytes_max)
        is_new = self._holds.array[slots] == 0
        stored = np.where(is_new, self._stored(self._sizes.array[slots]), 0)
        fits = ~is_new | (stored.cumsum() <= left_bytes)
        held: Slots = slots[fits]
        self._holds.array[held] += 1
        self._held_count += int(is_new[fits].sum())
        self._held.change(tenant, int(stored[fits].sum()))
        return held

    def release(self, held: Slots) -> None:
        """End a hold. What was set aside and is not held otherwise is now the most recently used, as ``put_back``."""
        self._holds.array[held] -= 1
        free = held[self._holds.array[held] == 0]
        self._held_count -= len(free)
        owners, stored = self._owners.array[free], self._stored(self._sizes.array[free])
        for owner in owners[:1] if (owners[1:] == owners[:-1]).all() else np.unique(owners):  # almost always one
            is_own = owners == owner
            self._held.change(self._tenant_of(free[is_own.argmax()]), -int(stored[is_own].sum()))
        self._restamp(free[(self._flags.array[free] & _IS_ASIDE) != 0], self._newest_s)
        if self._gone:
            for slot in free[self._used.array[free] == NEVER].tolist():
                del self._gone[self._keys.key(slot)]
                self._free.append(slot)

    def tenant_usage(self, tenant: bytes) -> TenantUsage:
        """What one tenant has."""
        return owned.usage() if (owned := self._tenants.get(tenant)) else TenantUsage()

    def tenants(self) -> list[bytes]:
        """Tenants that have objects."""
        return self._tenants.tenants()

    @property
    def tenants_version(self) -> tuple[int, int]:
        """Another one when ``tenants`` are others."""
        return self._tenants.version

    def _new_slots(self, count: int) -> int:
        """The first of so many that follow each other and were never taken."""
        first, self._slot_end = self._slot_end, self._slot_end + count
        for column in (self._sizes, self._used, self._owners, self._flags, self._holds):
            column.reserve(self._slot_end)
        return first

    def _slot_for(self, key: bytes, size_bytes: int) -> int:
        """One to take: that which the key had when it was discarded while it was held, so that it is held still."""
        slot = self._gone.pop(key, None)
        if slot is None:
            return self._free.pop() if self._free else self._new_slots(1)
        grown_bytes = self._stored_bytes(size_bytes) - self._stored_bytes(self._sizes.cells[slot])
        self._held.change(key[:TENANT_BYTES], grown_bytes)
        return slot

    def _tenant_of(self, slot: int) -> bytes:
        """Of the key that was put into a slot last."""
        return self._keys.key(slot)[:TENANT_BYTES]

    def _stored(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """What objects of these sizes take of the capacity."""
        return each_of_few(sizes, self._stored_bytes)

    def _next_time(self, now_s: float) -> float:
        return max(self._newest_s + TICK_S, math.floor(now_s / TICK_S) * TICK_S)

    def _restamp(self, slots: Slots, now_s: float) -> None:
        if not len(slots):
            return
        flags = self._flags.array[slots]
        for slot in set(slots[(flags & _IS_ASIDE) != 0].tolist()):
            self._aside_count -= 1
            self._tenants[self._owners.cells[slot]].aside -= 1
        self._flags.array[slots] = _IS_TOUCHED
        times = self._next_time(now_s) + TICK_S * np.arange(len(slots))
        self._used.array[slots[::-1]] = times  # of a slot that is there twice the first one, assigned last, counts
        self._newest_s = float(times[-1])

    def _set_aside(self, slot: int) -> None:
        self._flags.cells[slot] |= _IS_ASIDE
        self._used.cells[slot] = NEVER
        self._aside_count += 1
        self._tenants[self._owners.cells[slot]].aside += 1
