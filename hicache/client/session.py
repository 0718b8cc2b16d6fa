"""One session with hicached: agreed on, kept by an open stream, and over when the stream is."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import grpc
import msgspec

from hicache.client.address import DaemonAddress
from hicache.client.bulk_link import BulkClosed, BulkLinks, BulkRefused, peer_ticket
from hicache.client.fault import NEVER_SENT, Fault, FaultKind, call, fault_of, refusal_fault
from hicache.client.memory_link import MemoryLink
from hicache.client.tls import TlsUnusable, diagnose, unusable_fault
from hicache.keys import FieldValue, digest_fields
from hicache.l3 import TierFills
from hicache.lease_book import LeaseBook
from hicache.tracing import tracer
from hicache.wire import hicached_pb2 as wire
from hicache.wire.hicached_pb2_grpc import HiCachedStub
from hicache.wire.protocol import (
    KEY_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    RefusalCode,
    message_bytes_needed,
)

READER_JOIN_S = 2.0  # a cancelled stream ends at once; longer means that gRPC itself hangs, and nobody waits for that


class ObjectsSpec(Protocol):
    """What a session asks of a cache description: a ``CacheSpec`` is one."""

    @property
    def namespace(self) -> bytes:
        """The 32-byte digest of ``descriptor``."""
        ...

    @property
    def descriptor(self) -> dict[str, FieldValue]:
        """What two clients must have equal to share bytes, by name."""
        ...

    @property
    def object_bytes_max(self) -> int:
        """Payload bytes of the largest object."""
        ...


@dataclass(frozen=True, slots=True)
class Identity:
    """Who the client says it is, and what it needs from a session."""

    hello: wire.Hello
    object_bytes_max: int  # the largest object of the cache description

    @classmethod
    def of(
        cls,
        spec: ObjectsSpec,
        *,
        token: str,
        client_name: str = "",
        deployment: str = "",
        salt: bytes | None = None,
    ) -> Identity:
        """The identity of an engine that caches ``spec``. ``client_name`` is for logs and status pages.

        Engines that name one ``deployment`` must have equal specs and salts; of the salt only a hash is told.
        """
        return cls(
            wire.Hello(
                protocol_version=PROTOCOL_VERSION,
                token=token,
                namespace_digest=spec.namespace,
                namespace_descriptor=msgspec.msgpack.encode(spec.descriptor),
                client_name=client_name or f"{socket.gethostname()}:{os.getpid()}",
                deployment=deployment,
                salt_fingerprint=digest_fields([("salt", salt)]) if deployment else b"",
            ),
            object_bytes_max=spec.object_bytes_max,
        )


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What both sides can take. Counts and bytes are at least 1."""

    object_bytes_max: int
    batch_keys_max: int
    batch_bytes_max: int
    lease_ms_max: int
    key_bytes_max: int


class Session:
    """An agreed session. Its end, however it comes, is told once to ``on_end``, from another thread."""

    def __init__(self, address: DaemonAddress, identity: Identity, *, on_end: Callable[[], None]) -> None:
        """Ask for a session; use ``open``, which waits for the answer. Raises TlsUnusable."""
        self._address = address
        self._on_end = on_end
        self._goodbye = threading.Event()
        self._channel = address.open_channel()
        self.stub = HiCachedStub(self._channel)
        self._answered = threading.Event()
        self._fault: Fault | None = None
        self.welcome = wire.Welcome()
        self.limits = SessionLimits(1, 1, 1, 0, KEY_BYTES_MAX)
        self.bulk = BulkLinks("", b"")  # of no use before the welcome
        self.link: MemoryLink | None = None  # the registered memory, while there is any
        self.can_share_memory = False  # whether it is worth trying to register the memory
        self.stream_reason = ""  # why bulk goes through streams; empty while it need not
        self.answered_at_s = 0.0
        self.report_at_s = 0.0  # when the next report is due
        self.leases = LeaseBook(clock=time.monotonic)  # those of lookups, while they last
        self._stream = self.stub.Session(self._requests(identity.hello))
        self._reader = threading.Thread(target=self._read, name="hicache-l3-session", daemon=True)
        self._reader.start()

    @classmethod
    def open(
        cls, address: DaemonAddress, identity: Identity, *, timeout_s: float, on_end: Callable[[], None]
    ) -> Session | Fault:
        """Agree on a session, or say why there is none. Blocks for at most about ``timeout_s``."""
        try:
            session = cls(address, identity, on_end=on_end)
        except TlsUnusable as error:
            return unusable_fault(error)
        fault = session._agree(identity, timeout_s=timeout_s)
        if fault is None:
            return session
        session.close()
        if fault.is_answer or address.is_local:
            return fault
        return diagnose(*address.host_and_port, address.tls) or fault

    @property
    def secret(self) -> bytes:
        """Authenticates every call of the session."""
        return self.welcome.session_secret

    @property
    def fault(self) -> Fault | None:
        """Why the session is over; None while it lives."""
        return self._fault

    def ping(self, *, timeout_s: float) -> Fault | None:
        """Whether hicached answers and still knows the session; None means yes."""
        reply = call(self.stub.Stats, wire.StatsRequest(session_secret=self.secret), timeout_s=timeout_s)
        fault = reply if isinstance(reply, Fault) else None
        if fault is None or fault.is_answer:
            self.answered_at_s = time.monotonic()
        return fault

    def report(self, fills: TierFills, *, timeout_s: float) -> None:
        """Tells how full the tiers of this engine are. Nothing depends on it: a daemon that does not know the call, or
        does not answer, is left alone."""
        tiers = [wire.TierFill(name=name, used_bytes=used, capacity_bytes=all_) for name, (used, all_) in fills.items()]
        request = wire.ReportRequest(session_secret=self.secret, tiers=tiers)
        if not isinstance(call(self.stub.Report, request, timeout_s=timeout_s), Fault):
            self.answered_at_s = time.monotonic()

    def caller(self) -> bytes:
        """The span that a request on the bulk socket is within, as a BULK_CALLER; empty where either end makes none."""
        return tracer().caller() if self.welcome.bulk_traces else b""

    def try_bulk(self, *, timeout_s: float) -> Fault | None:
        """Why no object could be moved over the bulk socket; None when one could."""
        ends_at_s = time.monotonic() + timeout_s
        try:
            self.bulk.connect_once(left_s=lambda: ends_at_s - time.monotonic())
        except OSError as error:
            return Fault(FaultKind.LOST, "BULK_LOST", f"the bulk socket of hicached cannot be reached: {error}")
        except BulkRefused as refusal:
            return refusal_fault(str(refusal)) or Fault(FaultKind.LOST, "BULK_REFUSED", str(refusal))
        except BulkClosed:
            return NEVER_SENT
        return None

    def close(self) -> None:
        """End the session. Calls that run on it end at once, without an answer. Idempotent."""
        self._goodbye.set()
        if self.link is not None:
            self.link.detach()
        self.bulk.close()
        self._stream.cancel()
        self._channel.close()
        if self._reader is not threading.current_thread():
            self._reader.join(READER_JOIN_S)

    def _agree(self, identity: Identity, *, timeout_s: float) -> Fault | None:
        if not self._answered.wait(timeout_s):
            return Fault(FaultKind.DEADLINE, "NO_WELCOME", f"hicached did not answer within {timeout_s:g} s")
        if self._fault is not None:
            return self._fault
        self.answered_at_s = time.monotonic()
        limits = _agreed_limits(self.welcome.limits, identity)
        if isinstance(limits, Fault):
            return limits
        self.limits = limits
        self.bulk = BulkLinks(self._address.bulk_address(self.welcome), self.secret, tls=self._address.tls)
        return None

    def _requests(self, hello: wire.Hello) -> Iterator[wire.SessionRequest]:
        if self._address.is_local and not hello.token:
            ticket = peer_ticket(self._address.peer_socket)
            hello = wire.Hello.FromString(hello.SerializeToString())
            hello.peer_ticket = ticket
        yield wire.SessionRequest(hello=hello)
        self._goodbye.wait()

    def _read(self) -> None:
        fault = Fault(FaultKind.LOST, "SESSION_ENDED", "hicached ended the session")
        try:
            for event in self._stream:
                if not self._answered.is_set():
                    self.welcome = event.welcome
                    self._answered.set()
        except grpc.RpcError as error:
            fault = fault_of(error)
        self._fault = fault
        self._answered.set()
        with contextlib.suppress(Exception):  # nobody is there to hear it
            self._on_end()


def _agreed_limits(limits: wire.Limits, identity: Identity) -> SessionLimits | Fault:
    """The limits of the session, or which of them cannot work: found when connecting, not at the first big page."""
    if not (limits.object_bytes_max and limits.batch_keys_max and limits.batch_bytes_max):
        return _unusable("BAD_LIMITS", "hicached named a limit of zero")
    object_bytes_max = min(limits.object_bytes_max, limits.batch_bytes_max)
    if identity.object_bytes_max > object_bytes_max:
        return _unusable(
            "OBJECT_TOO_LARGE",
            f"this cache has objects of {identity.object_bytes_max} bytes and hicached takes {object_bytes_max}:"
            " raise its object_bytes_max and batch_bytes_max, or use fewer page_tokens",
        )
    return SessionLimits(
        object_bytes_max=object_bytes_max,
        batch_keys_max=_keys_that_fit(limits.batch_keys_max),
        batch_bytes_max=limits.batch_bytes_max,
        lease_ms_max=limits.lease_ms_max,
        key_bytes_max=limits.key_bytes_max or KEY_BYTES_MAX,
    )


def _keys_that_fit(batch_keys_max: int) -> int:
    """No more keys than one message can carry, whatever the daemon would take."""
    while message_bytes_needed(batch_keys_max=batch_keys_max) > MESSAGE_BYTES_MAX:
        batch_keys_max //= 2
    return batch_keys_max


def _unusable(code: str, detail: str) -> Fault:
    return Fault(FaultKind.REFUSED, code, detail, is_lasting=True)


def is_session_lost(fault: Fault) -> bool:
    """Whether hicached no longer knows the session."""
    return fault.code == RefusalCode.UNKNOWN_SESSION
