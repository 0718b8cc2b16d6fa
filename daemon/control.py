"""The short calls of a session: lookups, leases, pins, deletes and usage, each answered by its deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from hicache.backends.base import Usage
from hicache.backends.tenant_usage import TenantUsage
from hicache.daemon.metrics import Metrics
from hicache.daemon.refusals import Refusal
from hicache.daemon.sessions import Session, Sessions
from hicache.daemon.storage import Storage, Store
from hicache.notices import Notices
from hicache.outcome import Outcome
from hicache.wire.protocol import RefusalCode
from hicache.workers import QueueFull

DELETE_CHUNK_KEYS = 256  # what one storage thread deletes before others get their turn

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Space:
    """The whole store, and one tenant's part of it."""

    usage: Usage
    tenant: TenantUsage


class Control:
    """Asks the store in its control threads. Event loop only."""

    def __init__(
        self, storage: Storage, sessions: Sessions, metrics: Metrics, *, lease_ms_max: int, pin_s_max: float
    ) -> None:
        self._storage = storage
        self._store = storage.store
        self._sessions = sessions
        self._metrics = metrics
        self._lease_ms_max = lease_ms_max
        self._pin_s_max = pin_s_max
        self._notices = Notices(logging.getLogger(__name__))

    async def lookup(
        self, session: Session, keys: Sequence[bytes], *, lease_ms: int, deadline: float
    ) -> tuple[list[Outcome], int]:
        """Outcomes, and the id of a lease on the keys that are OK; 0 where none was asked for or none may be taken."""
        now_s = self._sessions.clock()
        lease_s = self._lease_s(lease_ms) if session.may_lease(now_s) else 0.0
        answer = await self._ask(
            lambda: self._look_up(keys, lease_s=lease_s),
            deadline=deadline,
            too_late=lambda result: _release_if_any(self._store, result[1]),
        )
        if isinstance(answer, Outcome):
            return [answer] * len(keys), 0
        outcomes, lease_id = answer
        if lease_id and session.ended:
            self._sessions.release_leases([lease_id])
        elif lease_id:
            session.note_lease(lease_id, now_s + lease_s)
        return outcomes, lease_id

    def _look_up(self, keys: Sequence[bytes], *, lease_s: float) -> tuple[list[Outcome], int]:
        outcomes, lease_id = self._store.lookup(keys, lease_s=lease_s)
        absent = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.ABSENT]
        self._metrics.ceiling.note(outcomes.count(Outcome.OK) + len(absent), absent)
        return outcomes, lease_id

    async def delete(self, keys: Sequence[bytes], *, deadline: float) -> list[Outcome]:
        """OK or ABSENT for each key. In chunks, between those of transfers: nobody's lookup waits for a long delete.

        At the deadline the keys without a result are DEADLINE; those of a chunk that runs are deleted all the same.
        """
        outcomes: list[Outcome] = []
        for start in range(0, len(keys), DELETE_CHUNK_KEYS):
            chunk = keys[start : start + DELETE_CHUNK_KEYS]
            answer = await self._answer(
                self._storage.ask_bulk(partial(self._store.delete, chunk), timeout_s=_left_s(deadline))
            )
            if answer is Outcome.DEADLINE:
                return outcomes + [answer] * (len(keys) - start)
            outcomes += [answer] * len(chunk) if isinstance(answer, Outcome) else answer
        return outcomes

    async def pin(self, keys: Sequence[bytes], *, pin_ms: int, deadline: float) -> list[Outcome]:
        """Pins, or unpins for ``pin_ms`` 0; a longer request is cut to the longest pin. Raises Refusal(NOT_SUPPORTED).

        OK, ABSENT (unpin: or not pinned), or REFUSED at the limits of the tenant.
        """
        if not self._store.is_indexed:
            raise Refusal(RefusalCode.NOT_SUPPORTED, "this store has objects that come and go without hicached")
        pin_s = min(pin_ms / 1000, self._pin_s_max)
        work = partial(self._store.pin, keys, pin_s=pin_s) if pin_ms else partial(self._store.unpin, keys)
        answer = await self._ask(work, deadline=deadline)
        return [answer] * len(keys) if isinstance(answer, Outcome) else answer

    async def change_lease(self, session: Session, lease_id: int, *, lease_ms: int, deadline: float) -> bool:
        """Renews a lease, or releases it for ``lease_ms`` 0. False: it is gone, or it is another session's.

        False, too, when the store does not answer in time; then the session keeps the lease, and ends it at its end.
        """
        if not session.owns_lease(lease_id):
            return False
        if lease_ms == 0:
            released = await self._ask(lambda: self._store.release(lease_id), deadline=deadline)
            if not isinstance(released, Outcome):
                session.drop_lease(lease_id)
            return released is True
        lease_s = self._lease_s(lease_ms)
        ends_s = self._sessions.clock() + lease_s
        held = await self._ask(lambda: self._store.renew(lease_id, lease_s=lease_s), deadline=deadline)
        if held is False:
            session.drop_lease(lease_id)
        elif not session.ended:
            session.extend_lease(lease_id, ends_s)
        return held is True

    async def space(self, tenant: bytes, *, deadline: float) -> Space | None:
        """Usage; None when the store does not answer in time."""
        answer = await self._ask(
            lambda: Space(self._store.usage(), self._store.tenant_usage(tenant)), deadline=deadline
        )
        return None if isinstance(answer, Outcome) else answer

    async def _ask(
        self, work: Callable[[], T], *, deadline: float, too_late: Callable[[T], None] | None = None
    ) -> T | Outcome:
        """What ``work`` returns in a control thread, or why it did not."""
        return await self._answer(self._storage.ask(work, timeout_s=_left_s(deadline), too_late=too_late))

    async def _answer(self, asking: Awaitable[T]) -> T | Outcome:
        try:
            return await asking
        except TimeoutError:
            return Outcome.DEADLINE
        except QueueFull:
            return Outcome.REFUSED
        except Exception as error:
            self._metrics.storage_errors.inc()
            self._notices.warning("storage", "a storage call failed as a whole: %r", error)
            return Outcome.IO_ERROR

    def _lease_s(self, lease_ms: int) -> float:
        return min(lease_ms, self._lease_ms_max) / 1000


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - asyncio.get_running_loop().time())


def _release_if_any(store: Store, lease_id: int) -> None:
    if lease_id:
        store.release(lease_id)
