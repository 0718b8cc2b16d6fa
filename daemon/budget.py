"""Bounds on the payload that is being moved: of one session, of one tenant, and of all together. Thread-safe."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from hicache.daemon.tenants import Tenant

Granted = Future[None]


class InflightBudgets:
    """The budgets of all sessions, each within that of its tenant, each within the one of the daemon."""

    def __init__(self, *, total_bytes: int, tenant_bytes: int, session_bytes: int) -> None:
        self.total = ByteBudget(total_bytes)
        self._tenant_bytes = tenant_bytes
        self.session_bytes = min(session_bytes, tenant_bytes)
        self._by_tenant: dict[Tenant, ByteBudget] = {}  # at most one for each line of the tenants file

    def of_session(self, tenant: Tenant) -> ByteBudget:
        """A new session's budget. Event loop only."""
        if tenant not in self._by_tenant:
            self._by_tenant[tenant] = ByteBudget(self._tenant_bytes, parent=self.total)
        return ByteBudget(self.session_bytes, parent=self._by_tenant[tenant])

    def become(self, other: InflightBudgets) -> None:
        """Takes over what tenants and sessions may move from here on; what moves already stays on its account."""
        self._tenant_bytes, self.session_bytes = other._tenant_bytes, other.session_bytes
        self._by_tenant.clear()

    @property
    def waiting_count(self) -> int:
        """How many wait for room of the daemon or of a tenant."""
        return self.total.waiting_count + sum(budget.waiting_count for budget in list(self._by_tenant.values()))


class ByteBudget:
    """Hands out bytes first come first served; who asks for more than is free waits.

    A share of a ``parent`` budget is taken with each acquisition: first the own bytes, then the parent's.
    """

    def __init__(self, limit_bytes: int, *, parent: ByteBudget | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._parent = parent
        self._lock: threading.RLock = threading.RLock() if parent is None else parent._lock
        self._waiting: deque[tuple[int, Granted]] = deque()

    def try_acquire(self, size_bytes: int, *, spare_bytes: int = 0) -> Ticket | None:
        """A ticket if the bytes are free now, here and in every parent, with ``spare_bytes`` to spare, and nobody waits
        for some; else None.
        """
        with self._lock:
            if not self._fits(size_bytes + spare_bytes):
                return None
            parent_ticket = None
            if self._parent is not None:
                parent_ticket = self._parent.try_acquire(size_bytes, spare_bytes=spare_bytes)
                if parent_ticket is None:
                    return None
            self.used_bytes += size_bytes
            return Ticket(self, size_bytes, parent_ticket)

    def acquire(self, size_bytes: int, *, wait: Callable[[Granted], object]) -> Ticket:
        """A ticket, once the bytes are free here and in every parent: level by level ``wait`` gets what is to be waited
        for, and returns when that is done or raises to give up. Raises what ``wait`` raises.
        """
        ticket = self.try_acquire(size_bytes)
        if ticket is not None:
            return ticket
        granted = self._enter(size_bytes)
        try:
            wait(granted)
        except BaseException:
            self._leave(size_bytes, granted)
            raise
        if self._parent is None:
            return Ticket(self, size_bytes)
        try:
            return Ticket(self, size_bytes, self._parent.acquire(size_bytes, wait=wait))
        except BaseException:
            self.give_back(size_bytes)
            raise

    @property
    def waiting_count(self) -> int:
        """How many wait for bytes of this budget."""
        return len(self._waiting)

    def give_back(self, size_bytes: int) -> None:
        """Frees bytes for those who wait. Called by tickets."""
        with self._lock:
            self.used_bytes -= size_bytes
            assert self.used_bytes >= 0
            self._wake()

    def _fits(self, size_bytes: int) -> bool:
        return not self._waiting and self.used_bytes + size_bytes <= self.limit_bytes

    def _enter(self, size_bytes: int) -> Granted:
        """A place in the line of this level alone. Done when the bytes are taken."""
        assert size_bytes <= self.limit_bytes, "checked against the configuration before"
        granted: Granted = Future()
        with self._lock:
            self._waiting.append((size_bytes, granted))
            self._wake()
        return granted

    def _leave(self, size_bytes: int, granted: Granted) -> None:
        """Gives the place up, or what was granted meanwhile."""
        with self._lock:
            if granted.cancel() or granted.cancelled():
                self._waiting = deque(entry for entry in self._waiting if entry[1] is not granted)
                self._wake()
            else:
                self.give_back(size_bytes)

    def _wake(self) -> None:
        while self._waiting:
            size_bytes, granted = self._waiting[0]
            if not granted.cancelled() and self.used_bytes + size_bytes > self.limit_bytes:
                return
            self._waiting.popleft()
            if granted.set_running_or_notify_cancel():
                self.used_bytes += size_bytes
                granted.set_result(None)


class Ticket:
    """Bytes taken from a budget; they go back when it is dropped."""

    def __init__(self, budget: ByteBudget, size_bytes: int, parent: Ticket | None = None) -> None:
        self._budget = budget
        self._size_bytes = size_bytes
        self._parent = parent
        self._is_held = True

    def absorb(self, other: Ticket) -> None:
        """Makes one ticket of two of the same budget; ``other`` is no more."""
        assert other._budget is self._budget
        assert self._is_held
        assert other._is_held
        other._is_held = False
        self._size_bytes += other._size_bytes
        if self._parent is not None and other._parent is not None:
            self._parent.absorb(other._parent)

    def drop(self) -> None:
        """Gives the bytes back. Call once."""
        assert self._is_held
        self._is_held = False
        if self._parent is not None:
            self._parent.drop()
        self._budget.give_back(self._size_bytes)
