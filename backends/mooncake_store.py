"""The backend that keeps objects in a Mooncake store, which is shared with other machines and evicts by itself."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Self

from hicache.backends.base import GetItem, Number, PutItem, StoredBatch, Usage, WalkedObject, is_storable_key
from hicache.backends.helpers import Helpers
from hicache.backends.mooncake_client import Connection, connect
from hicache.backends.mooncake_codes import TRANSFER_FAIL, outcome_of
from hicache.backends.mooncake_identity import StoreIdentity
from hicache.backends.mooncake_layout import HEADER_BYTES, key_of_name, object_name
from hicache.backends.mooncake_link import BYTES_PER_S_MIN, Copies, Link
from hicache.backends.mooncake_master import HttpMaster, Master
from hicache.backends.mooncake_numbers import mooncake_numbers
from hicache.backends.mooncake_payloads import fill_extent, take_payload
from hicache.backends.mooncake_pool import PoolUsage
from hicache.backends.mooncake_settings import MooncakeSettings, split_address
from hicache.breaker import BreakerLimits, CircuitBreaker
from hicache.errors import BackendError, ConfigError
from hicache.notices import Notices
from hicache.outcome import Outcome

GROUP_BYTES_MAX = 8 << 20  # in one call of the client, or one larger object; larger ones gain nothing (measured)
ATTEMPTS = 2
SECOND_PUT_WAIT_S = 0.1
READING_AGE_MAX_S = 1.0
SCAN_PAGE_KEYS = 1024
IDENTITY_RETRY_S = 1.0
AGREE_TRIES = 20
PUT_LIMITS = BreakerLimits(consecutive_failures_max=2, open_s=1.0, open_s_max=10.0)
_GET_AGAIN = (Outcome.CORRUPT, Outcome.DEADLINE)
_PUT_AGAIN = (Outcome.NO_SPACE, Outcome.ABSENT)


class MooncakeBackend:
    """Implements ``SharedBackend`` over a Mooncake store. Open it with ``MooncakeBackend.open``.

    Differs from ``Backend`` where a shared store must: others put, delete and evict at the same time; ``usage`` is the
    whole pool's, and a moment old; ``touch`` does nothing, since looking an object up is what makes it recent; ``scan``
    is for administrators, and makes everything recent. Full: the store evicts, and NO_SPACE when it does not keep up.

    Whatever the store does, a call comes back within 4 times ``call_timeout_s`` (and the time that its bytes need at
    BYTES_PER_S_MIN), and what arrives later is thrown away.
    """

    name = "mooncake"

    def __init__(
        self,
        connection: Connection,
        master: Master,
        settings: MooncakeSettings,
        *,
        reading_age_max_s: float = READING_AGE_MAX_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes the client over. Raises BackendError where the store does not answer, ConfigError where it refuses."""
        self._put_config = connection.put_config
        self._id_config = connection.id_config
        self._master = master
        self._settings = settings
        self._clock = clock
        self._notices = Notices(logging.getLogger(__name__))
        self._put_breaker = CircuitBreaker(PUT_LIMITS, clock=clock)
        self._helpers = Helpers("hicache-mooncake")
        self._claims = threading.Condition()
        self._putting: set[bytes] = set()
        self._is_closed = False
        self._identity_due_s: float | None = None  # when to agree on the store's id again
        self._link = Link(connection.client, master, settings, clock=clock)
        self._identity = StoreIdentity(self._link, deadline_s=partial(self._deadline_s, 0))
        self._group_bytes_max = min(GROUP_BYTES_MAX, self._link.staging_bytes // 4)
        try:
            self._pool = PoolUsage(master, settings, age_max_s=reading_age_max_s, clock=clock, notices=self._notices)
            self.store_id = self._identity.agree(self._id_config, tries=AGREE_TRIES)
            self._identity.try_config(self._put_config, soft_pin_s=settings.soft_pin_s)
        except BaseException:
            self._link.close()
            raise

    @classmethod
    def open(cls, settings: MooncakeSettings, *, reading_age_max_s: float = READING_AGE_MAX_S) -> Self:
        """Join the store that ``settings`` name. Raises ConfigError or BackendError."""
        master = HttpMaster(split_address("mooncake_master", settings.master), settings.metrics_address)
        return cls(connect(settings), master, settings, reading_age_max_s=reading_age_max_s)

    @property
    def link(self) -> Link:
        """For what is told about it."""
        return self._link

    def get_into(self, items: Sequence[GetItem]) -> list[Outcome]:
        """See ``Backend.get_into``. What lies on a node that does not answer is UNAVAILABLE, DEADLINE or IO_ERROR."""
        self._begin()
        outcomes = [Outcome.ABSENT] * len(items)
        asked = [position for position, item in enumerate(items) if is_storable_key(item.key)]
        deadline_s = self._deadline_s(sum(item.target.nbytes for item in items))
        is_late = False
        for _ in range(ATTEMPTS):
            is_by_node = is_late
            for group in self._get_groups(items, asked, outcomes, is_by_node=is_by_node):
                if is_late and not is_by_node:
                    got = [Outcome.DEADLINE] * len(group)  # not asked: the same node would keep us again
                else:
                    got = self._get_group([items[position] for position in group], deadline_s, is_one_node=is_by_node)
                _write_down(outcomes, group, got)
                is_late = is_late or Outcome.DEADLINE in got
            # At the second try a lease that ran out is new, bytes that another object has taken are gone, and a node
            # that hangs is found by asking each for itself.
            asked = [position for position in asked if outcomes[position] in _GET_AGAIN]
            if not asked or self._clock() >= deadline_s:
                break
        self._drop([item.key for item, outcome in zip(items, outcomes, strict=True) if outcome is Outcome.CORRUPT])
        return outcomes

    def _get_groups(
        self, items: Sequence[GetItem], asked: Sequence[int], outcomes: list[Outcome], *, is_by_node: bool
    ) -> Iterator[list[int]]:
        """Positions for one call each, of one node each if so wanted.

        What lies only on nodes that did not answer lately is UNAVAILABLE, and in none.
        """
        suspects = self._link.suspects()
        if not suspects and not is_by_node:
            yield from self._groups(asked, [items[position].target.nbytes for position in asked])
            return
        names = {position: object_name(items[position].key) for position in asked}
        found = self._link.locate(list(names.values()))
        by_node: dict[str, list[int]] = {}
        for position, name in names.items():
            copies = found.get(name)
            if _is_lost(copies, suspects):
                outcomes[position] = Outcome.UNAVAILABLE
            else:
                node = min(copies.nodes) if copies is not None and is_by_node else ""
                by_node.setdefault(node, []).append(position)
        for node, positions in by_node.items():
            for group in self._groups(positions, [items[position].target.nbytes for position in positions]):
                if node in self._link.suspects():  # since the group before
                    _write_down(outcomes, group, [Outcome.UNAVAILABLE] * len(group))
                else:
                    yield group

    def _get_group(self, items: Sequence[GetItem], deadline_s: float, *, is_one_node: bool) -> list[Outcome]:
        names = [object_name(item.key) for item in items]
        sizes = [HEADER_BYTES + item.target.nbytes for item in items]
        moved = self._link.move(
            names,
            sizes,
            lambda client, addresses: client.batch_get_into(names, addresses, sizes),
            deadline_s=deadline_s,
        )
        if isinstance(moved, Outcome):
            if moved is Outcome.DEADLINE and is_one_node:
                self._link.suspect(names)
            return [moved] * len(items)
        try:
            self._link.suspect([name for name, code in zip(names, moved.codes, strict=True) if code == TRANSFER_FAIL])
            staged = list(zip(items, moved.codes, moved.extent.views, strict=True))
            return self._helpers.map(lambda row: take_payload(*row), staged, size_bytes=sum(sizes))
        finally:
            moved.extent.release()

    def _drop(self, keys: Sequence[bytes]) -> None:
        if keys:
            self._notices.warning("corrupt", "dropped %d objects that did not verify twice", len(keys))
            self.delete(keys)

    def put(self, items: Sequence[PutItem]) -> list[Outcome]:
        """See ``Backend.put``. OK only for what the store says is there afterwards.

        The store itself answers a put of an existing key, and one behind a writer that died, as it answers a put; so
        it is asked before and after. The question after leases the object: what was put last is not evicted first.
        """
        self._begin()
        outcomes = [Outcome.REFUSED] * len(items)
        first: dict[bytes, int] = {}
        for position, item in enumerate(items):
            if is_storable_key(item.key) and item.payload.nbytes:
                first.setdefault(item.key, position)
        deadline_s = self._deadline_s(sum(item.payload.nbytes for item in items))
        with self._claimed(first.keys(), deadline_s) as is_claimed:
            if is_claimed:
                self._put_missing(items, list(first.values()), outcomes, deadline_s)
            else:
                _write_down(outcomes, first.values(), [Outcome.DEADLINE] * len(first))
        for position, item in enumerate(items):
            if first.get(item.key, position) != position:
                outcome = outcomes[first[item.key]]
                outcomes[position] = Outcome.EXISTS if outcome.is_ok else outcome
        return outcomes

    @contextmanager
    def _claimed(self, keys: Iterable[bytes], deadline_s: float) -> Iterator[bool]:
        """No other thread of this process puts these keys; False when one does, and does not end in time."""
        with self._claims:
            timeout_s = max(0.0, deadline_s - self._clock())
            is_claimed = self._claims.wait_for(lambda: self._putting.isdisjoint(keys), timeout=timeout_s)
            if is_claimed:
                self._putting.update(keys)
        try:
            yield is_claimed
        finally:
            if is_claimed:
                with self._claims:
                    self._putting.difference_update(keys)
                    self._claims.notify_all()

    def _put_missing(
        self, items: Sequence[PutItem], positions: list[int], outcomes: list[Outcome], deadline_s: float
    ) -> None:
        missing = list(positions)
        for attempt in range(ATTEMPTS):
            found = self.find([items[position].key for position in missing])
            _write_down(outcomes, missing, [Outcome.EXISTS if each is Outcome.OK else each for each in found])
            absent = [position for position in missing if outcomes[position] is Outcome.ABSENT]
            for group in self._groups(absent, [items[position].payload.nbytes for position in absent]):
                _write_down(outcomes, group, self._put_group([items[position] for position in group], deadline_s))
            missing = [position for position in missing if outcomes[position] in _PUT_AGAIN]
            if not missing or attempt + 1 == ATTEMPTS or self._clock() + SECOND_PUT_WAIT_S >= deadline_s:
                break
            time.sleep(SECOND_PUT_WAIT_S)  # the master evicts, or another daemon ends its put of the same object
        vanished = [position for position in missing if outcomes[position] is Outcome.ABSENT]
        if vanished:
            self._notices.warning("vanished", "%d objects were put and are not there", len(vanished))
        _write_down(outcomes, vanished, [Outcome.IO_ERROR] * len(vanished))

    def _put_group(self, items: Sequence[PutItem], deadline_s: float) -> list[Outcome]:
        permit = self._put_breaker.acquire()
        if permit is None:
            return [Outcome.UNAVAILABLE] * len(items)
        names = [object_name(item.key) for item in items]
        sizes = [HEADER_BYTES + item.payload.nbytes for item in items]
        moved = self._link.move(
            names,
            sizes,
            lambda client, addresses: client.batch_put_from(names, addresses, sizes, self._put_config),
            deadline_s=deadline_s,
            fill=partial(fill_extent, items=items),
        )
        if isinstance(moved, Outcome):
            if moved is Outcome.DEADLINE:
                self._put_breaker.fail(permit)
            else:
                self._put_breaker.abandon(permit)
            return [moved] * len(items)
        moved.extent.release()
        if TRANSFER_FAIL in moved.codes:
            self._put_breaker.fail(permit)
        else:
            self._put_breaker.succeed(permit)
        return self._confirmed(names, [outcome_of(code) for code in moved.codes])

    def _confirmed(self, names: Sequence[str], outcomes: list[Outcome]) -> list[Outcome]:
        """Outcomes of puts, OK only where the object is there; ABSENT where the store took it and has it not."""
        stored = [position for position, outcome in enumerate(outcomes) if outcome is Outcome.OK]
        _write_down(outcomes, stored, self._exist([names[position] for position in stored]))
        return outcomes

    def _exist(self, names: Sequence[str]) -> list[Outcome]:
        """OK, ABSENT, or why it cannot be told. Leases what is there."""
        codes = self._link.ask(lambda client: client.batch_is_exist(names), len(names)) if names else []
        return [Outcome.ABSENT if code == 0 else outcome_of(code) for code in codes]

    def find(self, keys: Sequence[bytes]) -> list[Outcome]:
        """See ``SharedBackend.find``. What lies on silent nodes only is UNAVAILABLE, though the master knows it."""
        self._begin()
        names = {key: object_name(key) for key in keys if is_storable_key(key)}
        found = dict(zip(names, self._exist(list(names.values())), strict=True))
        suspects = self._link.suspects()
        if suspects:
            copies = self._link.locate([names[key] for key, outcome in found.items() if outcome is Outcome.OK])
            lost = {name for name, each in copies.items() if _is_lost(each, suspects)}
            found |= {key: Outcome.UNAVAILABLE for key, name in names.items() if name in lost}
        return [found.get(key, Outcome.ABSENT) for key in keys]

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See ``Backend.contains``; False also for what cannot be told."""
        return [outcome is Outcome.OK for outcome in self.find(keys)]

    def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        """See ``Backend.delete``. Leases keep objects from eviction, not from their owner.

        Whoever reads such an object at this moment finds bytes that do not verify, and then that it is gone.
        """
        self._begin()
        names = {key: object_name(key) for key in keys if is_storable_key(key)}
        codes = (
            self._link.ask(lambda client: client.batch_remove(list(names.values()), True), len(names)) if names else []
        )
        removed = dict(zip(names, map(outcome_of, codes), strict=True))
        outcomes: list[Outcome] = []
        for key in keys:
            outcome = removed.pop(key, Outcome.ABSENT)  # only the first of equal keys finds it
            outcomes.append(outcome if outcome in (Outcome.OK, Outcome.ABSENT) else Outcome.IO_ERROR)
        return outcomes

    def forget(self, gone: Sequence[tuple[bytes, int]]) -> None:
        """Nothing: the master knows what there is."""

    def touch(self, used: Sequence[tuple[bytes, float]]) -> None:
        """Nothing: the store takes an object that is looked up or read for a used one."""

    def scan(self) -> Iterator[StoredBatch]:
        """See ``Backend.scan``, of all daemons; no object has a time of use. Raises BackendError without a master."""
        self._begin()
        try:
            names = [name for name in self._master.names() if key_of_name(name) is not None]
        except OSError as error:
            raise BackendError(f"the Mooncake master does not list its objects ({error})") from error
        for start in range(0, len(names), SCAN_PAGE_KEYS):
            located = self._link.locate(names[start : start + SCAN_PAGE_KEYS])
            found = [(key_of_name(name), copies.size_bytes - HEADER_BYTES) for name, copies in located.items()]
            yield StoredBatch.of([(key, size, 0.0) for key, size in found if key is not None and size > 0])

    def walk(self, *, after: bytes = b"", tenant: bytes = b"") -> Iterator[list[WalkedObject]]:
        """See ``Backend.walk``: raises BackendError."""
        raise BackendError("a Mooncake store lists its objects in no order, and tells no namespaces")

    def usage(self) -> Usage:
        """Of the whole pool with all its users and all copies; a moment old, or older while no master answers."""
        return self._pool.usage()

    def problem(self) -> str:
        """See ``Backend.problem``: a master that does not answer is told by its metrics."""
        return ""

    def stored_bytes(self, size_bytes: int) -> int:
        """See ``Backend.stored_bytes``; of one copy."""
        return HEADER_BYTES + size_bytes

    def free_bytes(self) -> int | None:
        """See ``Backend.free_bytes``: the nodes took their memory when they started."""
        return None

    def resize(self, capacity_bytes: int, *, floor_bytes: int) -> None:
        """See ``Backend.resize``. Raises ConfigError: the capacity is that of the nodes."""
        raise ConfigError("capacity_bytes", capacity_bytes, "no capacity for mooncake, whose nodes have their own")

    def numbers(self) -> Iterator[Number]:
        """See ``Backend.numbers``."""
        return mooncake_numbers(self._link, self._put_breaker.status())

    def close(self) -> None:
        """See ``Backend.close``. Waits for running calls a while, not for those that hang."""
        self._is_closed = True
        self._helpers.close()
        self._link.close()

    def _begin(self) -> None:
        if self._is_closed:
            raise BackendError("the backend is closed")
        if self._link.take_recovery() or (self._identity_due_s is not None and self._clock() >= self._identity_due_s):
            self._agree_again()

    def _agree_again(self) -> None:
        """The master was away: if it was started anew this is another store now, once its nodes have joined again."""
        self._identity_due_s = self._clock() + IDENTITY_RETRY_S
        try:
            self.store_id = self._identity.agree(self._id_config, tries=1)
        except BackendError as error:
            self._notices.warning("identity", "%s", error)
        else:
            self._identity_due_s = None

    def _deadline_s(self, size_bytes: int) -> float:
        return self._clock() + 2 * ATTEMPTS * self._settings.call_timeout_s + size_bytes / BYTES_PER_S_MIN

    def _groups(self, positions: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
        """Consecutive positions of at most GROUP_BYTES_MAX together, or one larger object."""
        group: list[int] = []
        total = 0
        for position, size_bytes in zip(positions, sizes, strict=True):
            if group and total + size_bytes > self._group_bytes_max:
                yield group
                group, total = [], 0
            group.append(position)
            total += size_bytes + HEADER_BYTES
        if group:
            yield group


def _is_lost(copies: Copies | None, suspects: frozenset[str]) -> bool:
    """Whether all copies lie on nodes that did not answer lately."""
    return copies is not None and copies.nodes <= suspects


def _write_down(outcomes: list[Outcome], positions: Iterable[int], settled: Sequence[Outcome]) -> None:
    for position, outcome in zip(positions, settled, strict=True):
        outcomes[position] = outcome
