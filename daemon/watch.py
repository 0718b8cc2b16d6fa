"""Tells clients what comes and goes of their tenant: a snapshot if they want one, and every event after it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import groupby

from hicache.backends.events import Subscription
from hicache.daemon.refusals import Refusal
from hicache.daemon.sessions import Session
from hicache.daemon.storage import Storage
from hicache.tenancy import TENANT_BYTES
from hicache.wire import hicached_pb2 as pb
from hicache.wire.protocol import RefusalCode
from hicache.workers import QueueFull

WATCHES_PER_TENANT_MAX = 16
KEYS_PER_MESSAGE_MAX = 4096

Send = Callable[[pb.WatchEvents], Awaitable[None]]


class Watches:
    """All Watch calls of the daemon. Event loop only."""

    def __init__(self, storage: Storage, *, step_timeout_s: float) -> None:
        """``step_timeout_s`` is what one step of a snapshot may take."""
        self._storage = storage
        self._step_timeout_s = step_timeout_s
        self._counts: Counter[bytes] = Counter()  # by tenant

    async def serve(self, session: Session, send: Send, *, wants_snapshot: bool) -> None:
        """Returns when the session ends. A client that reads slowly holds up nobody: it loses events, and is told.

        Raises Refusal(TOO_MANY_CALLS or NOT_SUPPORTED), and TimeoutError where the storage is too busy.
        """
        tenant = session.tenant.digest
        if not self._storage.store.is_indexed:
            raise Refusal(RefusalCode.NOT_SUPPORTED, "this store has objects that come and go without hicached")
        if self._counts[tenant] >= WATCHES_PER_TENANT_MAX:
            raise Refusal(RefusalCode.TOO_MANY_CALLS, f"a tenant may have {WATCHES_PER_TENANT_MAX} watches at a time")
        self._counts[tenant] += 1
        try:
            await self._serve(session, send, wants_snapshot=wants_snapshot)
        except QueueFull as error:
            raise TimeoutError from error
        finally:
            self._counts[tenant] -= 1

    async def _serve(self, session: Session, send: Send, *, wants_snapshot: bool) -> None:
        store = self._storage.store
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(woken.set)

        subscription = await self._storage.ask(
            partial(store.watch, session.tenant.digest, wake=wake),
            timeout_s=self._step_timeout_s,
            too_late=store.unwatch,
        )
        stream = _Stream(send, subscription)
        session.wakes_at_end.add(woken)
        try:
            if wants_snapshot:
                await self._send_snapshot(session, stream)
            while not session.ended:
                woken.clear()
                await stream.send_events()
                await woken.wait()
        finally:
            session.wakes_at_end.discard(woken)
            self._end(subscription)

    async def _send_snapshot(self, session: Session, stream: _Stream) -> None:
        """What is sent of the snapshot is sent before the events that came after it was true."""
        parts = self._storage.store.snapshot(session.tenant.digest)
        while not session.ended:
            part = await self._storage.ask_bulk(lambda: next(parts, None), timeout_s=self._step_timeout_s)
            if part is None:
                await stream.send_synced()
                return
            await stream.send_present(part)
            await stream.send_events()

    def _end(self, subscription: Subscription) -> None:
        end = partial(self._storage.store.unwatch, subscription)
        try:
            self._storage.control.submit(end)
        except QueueFull:
            end()


class _Stream:
    """The messages of one watch."""

    def __init__(self, send: Send, subscription: Subscription) -> None:
        self._send = send
        self._subscription = subscription
        self._sequence = 0

    async def send_present(self, keys: Sequence[bytes]) -> None:
        for part in _of_one_length(keys):
            await self._send_keys(pb.WatchEvents(kind=pb.WatchEvents.PRESENT), part)

    async def send_synced(self) -> None:
        await self._send(pb.WatchEvents(kind=pb.WatchEvents.SYNCED, sequence=self._sequence))

    async def send_events(self) -> None:
        """Everything that is queued, in order."""
        lost, events = self._subscription.take()
        if lost:
            self._sequence += lost
            await self._send(pb.WatchEvents(kind=pb.WatchEvents.LOST, lost=lost, sequence=self._sequence))
        for removal, alike in groupby(events, key=lambda event: event.removal):
            for keys in _of_one_length([event.key for event in alike]):
                self._sequence += len(keys)
                if removal is None:
                    await self._send_keys(pb.WatchEvents(kind=pb.WatchEvents.STORED), keys)
                else:
                    message = pb.WatchEvents(kind=pb.WatchEvents.REMOVED)
                    message.removal = pb.WatchEvents.Removal.ValueType(removal)
                    await self._send_keys(message, keys)

    async def _send_keys(self, message: pb.WatchEvents, keys: Sequence[bytes]) -> None:
        """``keys`` are physical and of one length; the tenant stays here."""
        message.keys = b"".join(key[TENANT_BYTES:] for key in keys)
        message.key_bytes = len(keys[0]) - TENANT_BYTES
        message.sequence = self._sequence
        await self._send(message)


def _of_one_length(keys: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Consecutive keys of one length, KEYS_PER_MESSAGE_MAX at most."""
    for _, equally_long in groupby(keys, key=len):
        part = list(equally_long)
        for start in range(0, len(part), KEYS_PER_MESSAGE_MAX):
            yield part[start : start + KEYS_PER_MESSAGE_MAX]
