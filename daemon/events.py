"""Server-sent events: what is published goes to every subscriber, and none of them can hold up another."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, field

from aiohttp import ClientConnectionError, web

SUBSCRIBERS_MAX = 64
UNSENT_MAX = 8  # events that a subscriber has not taken yet; one more, and it is dropped
RETRY_MS = 1000  # after so long a browser comes back

HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@dataclass(slots=True, eq=False)
class _Subscriber:
    transport: asyncio.Transport
    unsent: deque[bytes] = field(default_factory=deque)
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False

    def drop(self) -> None:
        """Ends the connection at once, whatever it has not taken."""
        self.is_over = True
        self.unsent.clear()
        self.woken.set()
        self.transport.abort()


class EventHub:
    """Event loop only."""

    def __init__(self) -> None:
        self._subscribers: set[_Subscriber] = set()
        self._is_closed = False
        self.dropped_count = 0

    def __len__(self) -> int:
        return len(self._subscribers)

    @property
    def is_full(self) -> bool:
        """Whether one more subscriber would be too many, or none is taken any more."""
        return self._is_closed or len(self._subscribers) >= SUBSCRIBERS_MAX

    def publish(self, kind: str, document: bytes) -> None:
        """Hands an event to every subscriber. One that has not taken the last UNSENT_MAX is dropped."""
        event = encode_event(kind, document)
        for subscriber in list(self._subscribers):
            if len(subscriber.unsent) >= UNSENT_MAX:
                self.dropped_count += 1
                subscriber.drop()
                continue
            subscriber.unsent.append(event)
            subscriber.woken.set()

    async def serve(self, request: web.Request, *first: bytes) -> web.StreamResponse:
        """Sends ``first``, and then what is published until the client goes, is dropped, or the hub is closed."""
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        assert request.transport is not None, "a prepared response has a transport"
        subscriber = _Subscriber(request.transport, deque((b"retry: %d\n\n" % RETRY_MS, *first)))
        self._subscribers.add(subscriber)
        try:
            with contextlib.suppress(ClientConnectionError, ConnectionError):
                await self._send_all(subscriber, response)
        finally:
            self._subscribers.discard(subscriber)
        return response

    async def _send_all(self, subscriber: _Subscriber, response: web.StreamResponse) -> None:
        while True:
            while subscriber.unsent:
                await response.write(subscriber.unsent.popleft())
            if subscriber.is_over or self._is_closed:
                return
            subscriber.woken.clear()
            await subscriber.woken.wait()

    def close(self) -> None:
        """Every subscriber gets what it has not taken yet, and the end. Idempotent."""
        self._is_closed = True
        for subscriber in self._subscribers:
            subscriber.woken.set()


def encode_event(kind: str, document: bytes) -> bytes:
    """One event, whose document has no line breaks."""
    assert b"\n" not in document, "a line break would end the event"
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), document)
