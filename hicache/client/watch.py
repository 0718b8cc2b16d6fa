"""What comes and goes in hicached, for a router that wants to know which engine's prefix is where."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from enum import StrEnum

import grpc

from hicache.client.fault import NEVER_SENT, Fault, fault_of, is_closed_channel
from hicache.client.session import Session, is_session_lost
from hicache.client.supervisor import Supervisor
from hicache.wire import hicached_pb2 as wire
from hicache.wire.protocol import split_keys

RETRY_S = 0.5  # after a stream that ended by itself
SESSION_WAIT_S = 1.0  # at a time, so that a close is noticed


class WatchKind(StrEnum):
    """What a watch says."""

    RESET = "reset"  # forget everything: what follows is a new snapshot
    PRESENT = "present"  # of the snapshot
    SYNCED = "synced"  # the snapshot is complete
    STORED = "stored"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One step of the picture. Whoever applies all of them in order has the keys that hicached has of this tenant."""

    kind: WatchKind
    keys: tuple[bytes, ...] = ()
    removal: str = ""  # of REMOVED: evicted, expired, deleted or corrupt
    lost: int = 0  # of RESET: events that came too fast for this reader


class Watch:
    """An endless iterator over events, for one thread. Lives on when hicached restarts: that is a RESET, too.

    Ends with ``close``, with its client, and where hicached refuses watches: ``fault`` then says why. While hicached is
    away the iterator waits.
    """

    def __init__(self, supervisor: Supervisor, *, is_over: Callable[[], bool]) -> None:
        self._supervisor = supervisor
        self._is_over = is_over
        self._closed = threading.Event()
        self._call: grpc.Call | None = None
        self.fault: Fault | None = None  # why the last stream ended

    def close(self) -> None:
        """End the iteration, from any thread. Idempotent."""
        self._closed.set()
        call = self._call
        if call is not None:
            call.cancel()

    def __iter__(self) -> Iterator[WatchEvent]:
        lost = 0
        while not self._closed.is_set() and not self._is_over():
            session = self._supervisor.wait_session(timeout_s=SESSION_WAIT_S)
            if session is None:
                continue
            yield WatchEvent(WatchKind.RESET, lost=lost)
            lost = yield from self._follow(session)
            if self.fault is not None and self.fault.is_lasting:
                return
            if not lost:
                self._closed.wait(RETRY_S)

    def _follow(self, session: Session) -> Generator[WatchEvent, None, int]:
        """One stream. Returns how many events were lost at its end."""
        try:
            stream = session.stub.Watch(wire.WatchRequest(session_secret=session.secret, snapshot=True))
            self._call = stream
            if self._closed.is_set():
                stream.cancel()
            for message in stream:
                if message.kind == wire.WatchEvents.LOST:
                    return message.lost
                yield _event_of(message)
            self.fault = None
        except grpc.RpcError as error:
            self.fault = fault_of(error)
            if is_session_lost(self.fault):
                self._supervisor.lost(session, self.fault)
        except ValueError as error:
            if not is_closed_channel(error):
                raise
            self.fault = NEVER_SENT
        finally:
            if self._call is not None:
                self._call.cancel()  # says nothing to a stream that has ended
        return 0


def _event_of(message: wire.WatchEvents) -> WatchEvent:
    kind = WatchKind(wire.WatchEvents.Kind.Name(message.kind).lower())
    removal = wire.WatchEvents.Removal.Name(message.removal).lower() if message.removal else ""
    return WatchEvent(kind, tuple(split_keys(message.keys, message.key_bytes)), removal)
