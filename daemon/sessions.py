"""Sessions: what each client holds, and how all of it is freed when its stream ends, however it ends."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Protocol

import structlog

from hicache.backends.base import UNKNOWN_TAG
from hicache.daemon.budget import ByteBudget, InflightBudgets
from hicache.daemon.memory import Region, RegionRefused
from hicache.daemon.rates import TenantRates
from hicache.daemon.refusals import Refusal
from hicache.daemon.region_budget import RegionBudget, RegionCharge
from hicache.daemon.tenants import Tenant
from hicache.tenancy import physical_key
from hicache.wire.bulk import BULK_CONNECTIONS_PER_SESSION_MAX
from hicache.wire.protocol import SECRET_BYTES, RefusalCode

REGIONS_PER_SESSION_MAX = 8
LEASES_PER_SESSION_MAX = 4096
CALLS_PER_SESSION_MAX = 64

log = structlog.get_logger("hicache.daemon.sessions")


class Connection(Protocol):
    """What a session knows of a connection of the bulk socket."""

    is_busy: bool

    def end(self) -> None:
        """Stops whatever moves on it. Thread-safe."""
        ...

    def end_if_overdue(self, now_s: float) -> None:
        """Stops what is late. Thread-safe."""
        ...


class Session:
    """One client between its hello and the end of its stream.

    Event loop only, but for what threads of the bulk socket use: ``region``, ``physical_key``, ``budget``, ``rates``.
    """

    def __init__(
        self, session_id: int, tenant: Tenant, client_name: str, budget: ByteBudget, rates: TenantRates | None = None
    ) -> None:
        self.session_id = session_id
        self.tenant = tenant
        self.client_name = client_name
        self.budget = budget
        self.rates = rates or TenantRates()
        self.namespace_tag = UNKNOWN_TAG
        self.ended = False
        self.authenticate: Callable[[], Tenant] = lambda: tenant  # once more, with what the client came with
        self.revoked: Refusal | None = None
        self.revoking = asyncio.Event()
        self.wakes_at_end: set[asyncio.Event] = set()  # of those who wait for something else, or for the end
        self._regions: dict[int, Region] = {}
        self._lease_ends_s: dict[int, float] = {}
        self.large_batch = asyncio.Lock()  # see turns.py
        self._calls = 0
        self._connections: set[Connection] = set()

    def physical_key(self, key: bytes) -> bytes:
        """The key in the store: nothing that a client sends can leave its tenant."""
        return physical_key(self.tenant.digest, key)

    @contextmanager
    def call(self, *, is_rated: bool = True) -> Iterator[None]:
        """One running call. Raises Refusal(TOO_MANY_CALLS) at the bound, and RATE_LIMITED where it counts as one."""
        if is_rated:
            self.rates.admit_call()
        if self._calls >= CALLS_PER_SESSION_MAX:
            raise Refusal(RefusalCode.TOO_MANY_CALLS, f"a session may have {CALLS_PER_SESSION_MAX} calls at a time")
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    @property
    def regions(self) -> list[Region]:
        """Regions that are attached or still being detached."""
        return list(self._regions.values())

    def check_room_for_region(self) -> None:
        """Raises RegionRefused when the session has ended or may not attach another region."""
        if self.ended:
            raise RegionRefused("the session has ended")
        if len(self._regions) >= REGIONS_PER_SESSION_MAX:
            raise RegionRefused(f"a session may attach {REGIONS_PER_SESSION_MAX} regions")

    def attach(self, region: Region) -> None:
        """Makes a region usable by the calls of this session."""
        self.check_room_for_region()
        self._regions[region.region_id] = region

    def forget(self, region: Region) -> None:
        """Drops a region that is gone."""
        self._regions.pop(region.region_id, None)

    def region(self, region_id: int) -> Region:
        """The region for a transfer. Raises Refusal(UNKNOWN_REGION): never attached here, or detached."""
        region = self._regions.get(region_id)
        if region is None or region.detaching.is_set():
            raise Refusal(RefusalCode.UNKNOWN_REGION, f"this session has no region {region_id}")
        return region

    @property
    def connections(self) -> list[Connection]:
        """Of the bulk socket."""
        return list(self._connections)

    def check_room_for_connection(self) -> None:
        """Raises Refusal when the session has ended or may not have another bulk connection."""
        if self.ended:
            raise Refusal(RefusalCode.UNKNOWN_SESSION, "the session has ended")
        if len(self._connections) >= BULK_CONNECTIONS_PER_SESSION_MAX:
            text = f"a session may have {BULK_CONNECTIONS_PER_SESSION_MAX} bulk connections at a time"
            raise Refusal(RefusalCode.TOO_MANY_CALLS, text)

    def connect(self, connection: Connection) -> None:
        """Ends the connection with the session."""
        self._connections.add(connection)
        if self.ended:
            connection.end()

    def disconnect(self, connection: Connection) -> None:
        """Forgets a connection that is over."""
        self._connections.discard(connection)

    def end_connections(self) -> None:
        """Ends what moves on the bulk socket."""
        for connection in self._connections:
            connection.end()

    def may_lease(self, now_s: float) -> bool:
        """Whether another lease may be taken; forgets those that have run out."""
        if len(self._lease_ends_s) >= LEASES_PER_SESSION_MAX:
            self._lease_ends_s = {lease: end_s for lease, end_s in self._lease_ends_s.items() if end_s > now_s}
        return len(self._lease_ends_s) < LEASES_PER_SESSION_MAX

    def note_lease(self, lease_id: int, ends_s: float) -> None:
        """Remembers a lease, so that it ends with the session."""
        self._lease_ends_s[lease_id] = ends_s

    def extend_lease(self, lease_id: int, ends_s: float) -> None:
        """Notes a renewal that happened, or may have: a lease that was released meanwhile stays forgotten."""
        if lease_id in self._lease_ends_s:
            self._lease_ends_s[lease_id] = max(ends_s, self._lease_ends_s[lease_id])

    def owns_lease(self, lease_id: int) -> bool:
        """Whether the lease was taken by this session."""
        return lease_id in self._lease_ends_s

    def drop_lease(self, lease_id: int) -> None:
        """Forgets a lease."""
        self._lease_ends_s.pop(lease_id, None)

    def lease_count(self, now_s: float) -> int:
        """Leases that have not run out."""
        return sum(1 for end_s in self._lease_ends_s.values() if end_s > now_s)

    def revoke(self, refusal: Refusal) -> None:
        """Has the session end soon, with a word to its client."""
        self.revoked = refusal
        self.revoking.set()

    def end(self) -> list[int]:
        """Detaches all regions, ends all connections; returns the leases, which the caller releases. Idempotent."""
        self.ended = True
        for region in self.regions:
            region.detach()
        self.end_connections()
        for waiting in self.wakes_at_end:
            waiting.set()
        leases = list(self._lease_ends_s)
        self._lease_ends_s.clear()
        return leases


class Sessions:
    """All sessions of the daemon. Event loop only, but for ``check_open``."""

    def __init__(
        self,
        *,
        sessions_max: int,
        tenant_sessions_max: int,
        budgets: InflightBudgets,
        rates: dict[Tenant, TenantRates],
        region_budget: RegionBudget,
        release_leases: Callable[[Sequence[int]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._by_secret: dict[bytes, Session] = {}
        self._ids = itertools.count(1)
        self._sessions_max = sessions_max
        self._tenant_sessions_max = tenant_sessions_max
        self.region_budget = region_budget
        self.release_leases = release_leases
        self.budgets = budgets
        self.rates = rates
        self.clock = clock
        self.opened_count = 0
        self.closing = asyncio.Event()
        # What is mapped, that of ended sessions too while a transfer still touches it, and how it is counted.
        self.mapped: dict[Region, RegionCharge] = {}
        self._admitting = True
        self._draining = False

    def __len__(self) -> int:
        return len(self._by_secret)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_secret.values()))

    def drain(self) -> None:
        """From now on hellos are refused, and calls that begin something new; what is leased can be had."""
        self._draining = True

    def check_takes_work(self) -> None:
        """Raises Refusal(DRAINING) once nothing new is begun. Thread-safe."""
        if self._draining:
            raise Refusal(RefusalCode.DRAINING, "hicached is about to stop, and takes no more work")

    def set_tenant_sessions_max(self, tenant_sessions_max: int) -> None:
        """Another bound for those who come; nobody has to go."""
        self._tenant_sessions_max = tenant_sessions_max

    def stop_admitting(self) -> None:
        """From now on hellos and calls are refused; what runs goes on until ``close``."""
        self._admitting = False

    def close(self) -> None:
        """Ends all sessions."""
        self.stop_admitting()
        self.closing.set()

    def check_open(self) -> None:
        """Raises Refusal(SHUTTING_DOWN) once the daemon is on its way out."""
        if not self._admitting:
            raise Refusal(RefusalCode.SHUTTING_DOWN, "hicached is stopping")

    def open(self, tenant: Tenant, client_name: str) -> tuple[Session, bytes]:
        """A new session and its secret. Raises Refusal(TOO_MANY_SESSIONS, DRAINING or SHUTTING_DOWN)."""
        self.check_open()
        self.check_takes_work()
        if len(self._by_secret) >= self._sessions_max:
            raise Refusal(RefusalCode.TOO_MANY_SESSIONS, f"sessions_max is {self._sessions_max}")
        if sum(1 for session in self if session.tenant == tenant) >= self._tenant_sessions_max:
            raise Refusal(
                RefusalCode.TOO_MANY_SESSIONS,
                f"tenant_sessions_max is {self._tenant_sessions_max}: this tenant has so many sessions",
            )
        secret = secrets.token_bytes(SECRET_BYTES)
        session = Session(next(self._ids), tenant, client_name, self.budgets.of_session(tenant), self.rates[tenant])
        self._by_secret[_hashed(secret)] = session
        self.opened_count += 1
        log.info("session opened", session=session.session_id, tenant=tenant.name, client=client_name)
        return session, secret

    def find(self, secret: bytes) -> Session:
        """The session that a call belongs to. Raises Refusal(UNKNOWN_SESSION or SHUTTING_DOWN)."""
        self.check_open()
        session = self._by_secret.get(_hashed(secret))
        if session is None:
            raise Refusal(RefusalCode.UNKNOWN_SESSION, "no session has this secret; it may have ended")
        return session

    def end(self, session: Session, secret: bytes) -> None:
        """Frees what the session held: new calls are refused, regions go when their transfers end, leases at once."""
        self._by_secret.pop(_hashed(secret), None)
        if leases := session.end():
            self.release_leases(leases)
        log.info("session ended", session=session.session_id, tenant=session.tenant.name, client=session.client_name)

    def unmapped(self, region: Region) -> None:
        """Takes a region off the account: nothing touches it any more."""
        if charge := self.mapped.pop(region, None):
            self.region_budget.give_back(charge)


def _hashed(secret: bytes) -> bytes:
    """Secrets are looked up by hash: how long the lookup takes tells nothing about them."""
    return blake2b(secret, digest_size=32).digest()
