"""Bounds on the payload that is being moved: of one session, of one tenant, and of all together."""

from __future__ import annotations

import asyncio
from collections import deque

from hicache.daemon.tenants import Tenant


class InflightBudgets:
    """The budgets of all sessions, each within that of its tenant, each within the one of the daemon."""

    def __init__(self, *, total_bytes: int, tenant_bytes: int, session_bytes: int) -> None:
        self.total = ByteBudget(total_bytes)
        self._tenant_bytes = tenant_bytes
        self.session_bytes = min(session_bytes, tenant_bytes)
        self._by_tenant: dict[Tenant, ByteBudget] = {}  # at most one for each line of the tenants file

    def of_session(self, tenant: Tenant) -> ByteBudget:
        """A new session's budget."""
        if tenant not in self._by_tenant:
            self._by_tenant[tenant] = ByteBudget(self._tenant_bytes, parent=self.total)
        return ByteBudget(self.session_bytes, parent=self._by_tenant[tenant])

    @property
    def waiting_count(self) -> int:
        """How many wait for room of the daemon or of a tenant."""
        return self.total.waiting_count + sum(budget.waiting_count for budget in self._by_tenant.values())


class ByteBudget:
    """Hands out bytes first come first served; who asks for more than is free waits. Event loop only.

    A share of a ``parent`` budget is taken with each acquisition: first the own bytes, then the parent's.
    """

    def __init__(self, limit_bytes: int, *, parent: ByteBudget | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._parent = parent
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def try_acquire(self, size_bytes: int, *, spare_bytes: int = 0) -> Ticket | None:
        """A ticket if the bytes are free now, here and in every parent, with ``spare_bytes`` to spare, and nobody waits
        for some; else None.
        """
        if not self._fits(size_bytes + spare_bytes):
            return None
        if self._parent is None:
            self.used_bytes += size_bytes
            return Ticket(self, size_bytes)
        ticket = self._parent.try_acquire(size_bytes, spare_bytes=spare_bytes)
        if ticket is None:
            return None
        self.used_bytes += size_bytes
        return Ticket(self, size_bytes, ticket)

    async def acquire(self, size_bytes: int, *, deadline: float) -> Ticket:
        """Waits for the bytes until ``deadline`` (of the event loop's clock), then raises TimeoutError."""
        assert size_bytes <= self.limit_bytes, "checked against the configuration before"
        async with asyncio.timeout_at(deadline):
            await self._take(size_bytes)
            if self._parent is None:
                return Ticket(self, size_bytes)
            try:
                ticket = await self._parent.acquire(size_bytes, deadline=deadline)
            except BaseException:
                self.give_back(size_bytes)
                raise
            return Ticket(self, size_bytes, ticket)

    @property
    def waiting_count(self) -> int:
        """How many wait for bytes of this budget."""
        return len(self._waiting)

    def give_back(self, size_bytes: int) -> None:
        """Frees bytes for those who wait. Called by tickets."""
        self.used_bytes -= size_bytes
        assert self.used_bytes >= 0
        self._wake()

    def _fits(self, size_bytes: int) -> bool:
        return not self._waiting and self.used_bytes + size_bytes <= self.limit_bytes

    async def _take(self, size_bytes: int) -> None:
        if self._fits(size_bytes):
            self.used_bytes += size_bytes
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (size_bytes, granted)
        self._waiting.append(entry)
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                self.give_back(size_bytes)
            elif entry in self._waiting:
                self._waiting.remove(entry)
                self._wake()
            raise

    def _wake(self) -> None:
        while self._waiting:
            size_bytes, granted = self._waiting[0]
            if not granted.cancelled():
                if self.used_bytes + size_bytes > self.limit_bytes:
                    return
                self.used_bytes += size_bytes
                granted.set_result(None)
            self._waiting.popleft()


class Ticket:
    """Bytes taken from a budget, with one or more holders; they go back when the last holder drops it."""

    def __init__(self, budget: ByteBudget, size_bytes: int, parent: Ticket | None = None) -> None:
        self._budget = budget
        self._size_bytes = size_bytes
        self._parent = parent
        self._holders = 1

    def share(self) -> None:
        """Adds a holder."""
        assert self._holders > 0
        self._holders += 1

    def absorb(self, other: Ticket) -> None:
        """Makes one ticket of two of the same budget; ``other``, which nobody else holds, is no more."""
        assert other._budget is self._budget
        assert self._holders > 0
        assert other._holders == 1
        other._holders = 0
        self._size_bytes += other._size_bytes
        if self._parent is not None and other._parent is not None:
            self._parent.absorb(other._parent)

    def drop(self) -> None:
        """Removes a holder; the last one gives the bytes back."""
        assert self._holders > 0
        self._holders -= 1
        if self._holders == 0:
            if self._parent is not None:
                self._parent.drop()
            self._budget.give_back(self._size_bytes)
