"""The gRPC service: finds the session of each call, checks the request, and hands it to who does the work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc

from hicache.daemon.batches import read_keys
from hicache.daemon.calls import CallContext, Calls
from hicache.daemon.config import DaemonConfig
from hicache.daemon.control import Control, Space
from hicache.daemon.first_messages import FirstMessages
from hicache.daemon.hello import Hellos
from hicache.daemon.metrics import Metrics
from hicache.daemon.recorder import Recorders
from hicache.daemon.refusals import Refusal
from hicache.daemon.sessions import Session as OpenSession
from hicache.daemon.sessions import Sessions
from hicache.daemon.tier_fills import read_fills
from hicache.daemon.turns import Turns
from hicache.daemon.watch import Watches
from hicache.wire import hicached_pb2 as pb
from hicache.wire.protocol import RefusalCode

SERVED_TO_THE_END = ("Lease", "Stats", "Delete")  # while the daemon drains; and what is leased, on the bulk socket
UNRATED_METHODS = ("Lease", "Stats", "Report")  # a tenant above its rate can still say that it lives, and let go


class HiCachedService:
    """Implements hicached.v1.HiCached on grpc.aio. Event loop only."""

    def __init__(
        self,
        config: DaemonConfig,
        *,
        hellos: Hellos,
        sessions: Sessions,
        control: Control,
        watches: Watches,
        metrics: Metrics,
        recorders: Recorders,
    ) -> None:
        self._config = config
        self._hellos = hellos
        self._sessions = sessions
        self._control = control
        self._watches = watches
        self._metrics = metrics
        self._recorders = recorders
        self._calls = Calls(metrics, call_timeout_s_max=config.call_timeout_s_max)
        self._turns = Turns()
        self._first_hellos = FirstMessages()

    @property
    def busy_count(self) -> int:
        """Calls that run; those that last as long as a session do not count."""
        return self._calls.active_count

    async def Session(self, _: object, context: CallContext) -> None:
        """Hello, Welcome, and then silence until either side ends the session."""
        async with self._calls.frame("Session", context):
            hello = await self._read_hello(context)
            names = [name.decode(errors="replace") for name in context.auth_context().get("peer_uri", ())]
            with self._hellos.welcomed(hello, peer=context.peer(), certified_names=names) as (session, welcome):
                await context.write(pb.SessionEvent(welcome=welcome))
                await self._until_end(context, session)

    async def Lookup(self, request: pb.LookupRequest, context: CallContext) -> pb.LookupReply:
        """OK or ABSENT for each key, with a lease on those that are OK if the client wants one."""
        async with self._session_call("Lookup", request.session_secret, context) as (session, deadline):
            keys = self._keys(request, session)
            self._recorders.lookup(session.tenant.name, keys)
            with self._metrics.tally.keys("Lookup", len(keys)) as items:
                async with self._turns.one_of(session, len(keys), deadline=deadline):
                    outcomes, lease_id = await self._control.lookup(
                        session, keys, lease_ms=request.lease_ms, deadline=deadline
                    )
                items.outcomes = outcomes
            return pb.LookupReply(outcomes=bytes(outcomes), lease_id=lease_id)

    async def Delete(self, request: pb.KeysRequest, context: CallContext) -> pb.OutcomesReply:
        """Drops objects of the session's tenant."""
        async with self._session_call("Delete", request.session_secret, context) as (session, deadline):
            keys = self._keys(request, session)
            with self._metrics.tally.keys("Delete", len(keys)) as items:
                items.outcomes = outcomes = await self._control.delete(keys, deadline=deadline)
            return pb.OutcomesReply(outcomes=bytes(outcomes))

    async def Lease(self, request: pb.LeaseRequest, context: CallContext) -> pb.LeaseReply:
        """Renews or releases a lease. Another session's lease is answered like one that has expired."""
        async with self._session_call("Lease", request.session_secret, context) as (session, deadline):
            held = await self._control.change_lease(
                session, request.lease_id, lease_ms=request.lease_ms, deadline=deadline
            )
            return pb.LeaseReply(held=held)

    async def Pin(self, request: pb.PinRequest, context: CallContext) -> pb.OutcomesReply:
        """Keeps objects of the session's tenant for a time, also when the session ends; or ends that."""
        async with self._session_call("Pin", request.session_secret, context) as (session, deadline):
            keys = self._keys(request, session)
            with self._metrics.tally.keys("Pin", len(keys)) as items:
                items.outcomes = outcomes = await self._control.pin(keys, pin_ms=request.pin_ms, deadline=deadline)
            return pb.OutcomesReply(outcomes=bytes(outcomes))

    async def Watch(self, request: pb.WatchRequest, context: CallContext) -> None:
        """What comes and goes of the session's tenant, until the session or the call ends."""
        async with self._session_call("Watch", request.session_secret, context) as (session, _):
            await self._watches.serve(session, context.write, wants_snapshot=request.snapshot)

    async def Stats(self, request: pb.StatsRequest, context: CallContext) -> pb.StatsReply:
        """Space of the store and of the session's tenant; of the tenant alone where there are others."""
        async with self._session_call("Stats", request.session_secret, context) as (session, deadline):
            space = await self._control.space(session.tenant.digest, deadline=deadline)
            if space is None:
                raise TimeoutError
            return self._stats(space, session)

    async def Report(self, request: pb.ReportRequest, context: CallContext) -> pb.ReportReply:
        """Remembers how full the tiers of the client are, until it says something else or its session ends."""
        async with self._session_call("Report", request.session_secret, context) as (session, _):
            session.tier_fills = read_fills(request.tiers)
            return pb.ReportReply()

    def _stats(self, space: Space, session: OpenSession) -> pb.StatsReply:
        """With several tenants every number is the asking one's own: what others do shows in none of them."""
        shared = self._hellos.tenant_count > 1
        own_sessions = [other for other in self._sessions if other.tenant == session.tenant]
        return pb.StatsReply(
            capacity_bytes=space.usage.capacity_bytes,
            used_bytes=space.tenant.payload_bytes if shared else space.usage.stored_bytes,
            objects=space.tenant.objects if shared else space.usage.objects,
            tenant_used_bytes=space.tenant.payload_bytes,
            tenant_objects=space.tenant.objects,
            backend=self._config.backend,
            sessions=len(own_sessions),
        )

    @asynccontextmanager
    async def _session_call(
        self, method: str, secret: bytes, context: CallContext
    ) -> AsyncIterator[tuple[OpenSession, float]]:
        async with self._calls.frame(method, context) as deadline:
            session = self._sessions.find(secret)
            if method not in SERVED_TO_THE_END:
                self._sessions.check_takes_work()
            with session.call(is_rated=method not in UNRATED_METHODS):
                yield session, deadline

    async def _read_hello(self, context: CallContext) -> pb.Hello:
        self._sessions.check_open()
        message = await self._first_hellos.next(context)
        if not isinstance(message, pb.SessionRequest) or not message.HasField("hello"):
            raise Refusal(RefusalCode.MALFORMED, "the first message of a session must be a hello")
        return message.hello

    async def _until_end(self, context: CallContext, session: OpenSession) -> None:
        """Returns when the client half-closes.

        Raises Refusal when it says anything else, when it may not stay, or when the daemon stops.
        """
        reading = asyncio.ensure_future(context.read())
        ends = [asyncio.ensure_future(event.wait()) for event in (self._sessions.closing, session.revoking)]
        try:
            await asyncio.wait((reading, *ends), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in (reading, *ends):
                waiting.cancel()
        self._sessions.check_open()
        if session.revoked is not None:
            raise session.revoked
        if reading.done() and reading.result() is not grpc.aio.EOF:
            raise Refusal(RefusalCode.MALFORMED, "a session has one hello")

    def _keys(
        self, request: pb.LookupRequest | pb.KeysRequest | pb.PinRequest, session: OpenSession
    ) -> Sequence[bytes]:
        return read_keys(request.keys, request.key_bytes, session, self._config)
