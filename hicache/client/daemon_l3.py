"""L3 as hicached serves it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from hicache.breaker import CircuitBreaker, Permit
from hicache.client.address import parse_address
from hicache.client.batch import decode_outcomes, key_batches
from hicache.client.bounce import Bounce, through_bounce
from hicache.client.fault import NEVER_SENT, OUT_OF_TIME, Fault, FaultKind, call
from hicache.client.leases import release_after, renew_for
from hicache.client.memory_link import LinkState
from hicache.client.probe import probe_daemon
from hicache.client.session import Identity, ObjectsSpec, Session, is_session_lost
from hicache.client.settings import ClientSettings
from hicache.client.status import Counters, L3Status, ProbeReport
from hicache.client.stream import through_stream
from hicache.client.supervisor import Supervisor
from hicache.client.transfer import Direction, Transfer, through_memory
from hicache.client.watch import Watch
from hicache.l3 import Done, L3Item, TierFills
from hicache.notices import Notices
from hicache.outcome import Outcome
from hicache.shared_memory import SharedMemory
from hicache.wire import hicached_pb2 as wire
from hicache.wire.protocol import RefusalCode, pack_keys

_log = logging.getLogger(__name__)

AskPart = Callable[[Session, Sequence[bytes], float], list[Outcome] | Fault]  # session, keys, seconds left


class DaemonL3:
    """The client of hicached: an ``L3`` that connects in the background and never fails its engine.

    Without a session, or with the breaker open, calls return at once with UNAVAILABLE. Where hicached shares the node,
    objects move through registered memory: that of the caller where it has a file descriptor, else a bounce buffer,
    from and to which this client copies. On other nodes, and where hicached refuses the memory, through streams.

    A get or put over registered memory that ends without an answer leaves its bytes **in doubt**: hicached may still be
    writing or reading them. The caller gets its thread back at the deadline, and ``done`` when hicached has let go of
    the memory, which the end of file on the memory connection says and nothing else does. Until then those items, and
    only those, are held.

    After a fork, the child has no L3: every call there is UNAVAILABLE. Fork first and make clients afterwards.
    """

    def __init__(
        self,
        address: str,
        *,
        spec: ObjectsSpec,
        memory: SharedMemory | None,
        token: str = "",
        client_name: str = "",
        deployment: str = "",
        salt: bytes | None = None,
        settings: ClientSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start connecting to ``address`` (``unix:///path`` or ``tcp://host:port``) and return at once.

        Without ``memory`` only lookups are of use: every range of a get or put is BAD_RANGE. hicached refuses this
        client while others of its tenant are connected that name the same ``deployment`` and have another spec or
        ``salt`` (that of the engine's keys: it is only compared). ``clock`` gives seconds, for deadlines of calls and
        for the breaker. Raises ConfigError for an address that cannot be one.
        """
        self._address = parse_address(address)
        self._identity = Identity.of(spec, token=token, client_name=client_name, deployment=deployment, salt=salt)
        self._memory = memory
        self._bounce = _bounce_for(memory, self._identity) if self._address.is_local else None
        self._settings = settings or ClientSettings()
        self._clock = clock
        self._notices = Notices(_log, interval_s=self._settings.notice_interval_s, clock=clock)
        self._breaker = CircuitBreaker(self._settings.breaker, clock=clock)
        self._counters = Counters()
        self._pid = os.getpid()
        self._calls_changed = threading.Condition()
        self._calls_running = 0
        self._is_closed = False
        self._last_welcome = wire.Welcome()
        self._supervisor = Supervisor(
            self._address,
            self._identity,
            memory=self._bounce or memory,
            breaker=self._breaker,
            notices=self._notices,
            settings=self._settings,
            on_refused=self._counters.count_refusal,
        )

    def tell_fills(self, read_fills: Callable[[], TierFills]) -> None:
        """Has hicached show how full this engine's L1 and L2 are: told every ``ClientSettings.report_s``."""
        self._supervisor.report_from(read_fills)

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float) -> list[Outcome]:
        """See ``L3.lookup``. A batch above the limits of the session goes in parts; each key has its own outcome.

        Present keys are leased for ``ClientSettings.lease_s``. Nothing is remembered between calls: an object that
        somebody else has stored is found by the next lookup.
        """
        return self._by_parts("lookup", keys, self._look_up, timeout_s=timeout_s)

    def pin(self, keys: Sequence[bytes], *, pin_s: float, timeout_s: float) -> list[Outcome]:
        """Keep objects of this tenant in hicached for ``pin_s``, whatever becomes of this client.

        OK; ABSENT; REFUSED at the limits of the tenant, or where hicached takes no pins. hicached may cut the time, and
        ends all pins when it restarts. ``pin_s`` is more than 0.
        """
        pin_ms = max(1, round(pin_s * 1000))
        return self._by_parts("pin", keys, partial(self._pin, pin_ms), timeout_s=timeout_s)

    def unpin(self, keys: Sequence[bytes], *, timeout_s: float) -> list[Outcome]:
        """End pins, whoever asked for them; ABSENT for what is not pinned."""
        return self._by_parts("unpin", keys, partial(self._pin, 0), timeout_s=timeout_s)

    def delete(self, keys: Sequence[bytes], *, timeout_s: float) -> list[Outcome]:
        """Remove objects of this tenant: OK; ABSENT for what is not there."""
        return self._by_parts("delete", keys, self._delete, timeout_s=timeout_s)

    def watch(self) -> Watch:
        """An iterator over what is stored and removed of this tenant, beginning with what is there."""
        return Watch(self._supervisor, is_over=lambda: self._is_closed or os.getpid() != self._pid)

    def get(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        """See ``L3.get``."""
        self._transfer(Direction.GET, items, timeout_s=timeout_s, done=done)

    def put(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        """See ``L3.put``. Over streams, objects that hicached has already cost a lookup and no bytes."""
        self._transfer(Direction.PUT, items, timeout_s=timeout_s, done=done)

    def probe(self, *, timeout_s: float = 5.0) -> ProbeReport:
        """Try hicached synchronously, on a session of its own, for a start-up check or a command line.

        Blocks for at most about ``timeout_s`` and changes nothing here. Raises nothing: the report says what is wrong.
        """
        return probe_daemon(self._address, self._identity, memory=self._memory, timeout_s=timeout_s)

    def wait_ready(self, *, timeout_s: float) -> bool:
        """Whether hicached is connected, memory and all, within ``timeout_s``. An engine need not wait for this."""
        return self._supervisor.wait_ready(timeout_s=timeout_s)

    def wait_first_answer(self, *, timeout_s: float | None = None) -> Fault | None:
        """Why the first attempt to connect gave no session; None when it did, or has not ended within ``timeout_s``.

        By default as long as one attempt may take, ``ClientSettings.connect_timeout_s``.
        """
        patience_s = self._settings.connect_timeout_s if timeout_s is None else timeout_s
        return self._supervisor.wait_first_answer(timeout_s=patience_s)

    @property
    def shares_memory(self) -> bool:
        """Whether hicached moves bytes of the memory itself, as things are. Otherwise it is never in doubt."""
        session = self._supervisor.session
        link = session.link if session is not None and self._bounce is None else None
        return link is not None and link.state is LinkState.OPEN

    def certificate_expirations_s(self) -> Mapping[str, float]:
        """See ``TlsFiles.expirations_s``; nothing without TLS. Reads the files."""
        return {} if self._address.tls is None else self._address.tls.expirations_s()

    def status(self) -> L3Status:
        """The client as it is now."""
        supervisor = self._supervisor
        session, fault = supervisor.session, supervisor.fault
        welcome = self._last_welcome = session.welcome if session is not None else self._last_welcome
        return L3Status(
            address=self._address.text,
            state=supervisor.state,
            reason=str(fault) if fault is not None else "",
            refusal=fault.code if fault is not None and fault.is_lasting else "",
            breaker=self._breaker.status(),
            bulk=self._bulk_of(session),
            bulk_reason=session.stream_reason if session is not None else "",
            tenant=welcome.tenant,
            daemon_version=welcome.daemon_version,
            store_id=welcome.store_id,
            sessions_opened=supervisor.sessions_opened,
            regions_draining=supervisor.watch.draining_count,
            items_in_doubt=supervisor.watch.items_in_doubt,
            refusals=self._counters.refusals,
            operations=self._counters.operations(),
        )

    def close(self) -> None:
        """Give up what is in flight, disconnect, and wait up to ``close_timeout_s`` for the memory to be let go of.

        Idempotent; a second call waits again. When bytes are still in doubt then (a stopped daemon), that is logged and
        stands in ``status().items_in_doubt``. A background thread then calls ``done`` for them when hicached lets go or
        dies, never before: whoever owns the memory must not use those ranges again until it did, and may exit.
        """
        if os.getpid() != self._pid:
            return
        with self._calls_changed:
            self._is_closed = True
        self._supervisor.close()
        deadline_s = time.monotonic() + self._settings.close_timeout_s
        with self._calls_changed:
            self._calls_changed.wait_for(lambda: not self._calls_running, self._settings.close_timeout_s)
        in_doubt = self._supervisor.watch.close(timeout_s=deadline_s - time.monotonic())
        if self._bounce is not None:
            self._bounce.close()
        if in_doubt:
            self._notices.warning(
                "doubt", "L3 %s was closed while it may still touch %d objects in L2", self._address.text, in_doubt
            )

    def _by_parts(self, operation: str, keys: Sequence[bytes], ask: AskPart, *, timeout_s: float) -> list[Outcome]:
        """``ask`` for part after part, until all keys have an outcome or one part is not answered."""
        deadline_s = self._clock() + timeout_s
        outcomes: list[Outcome] = []
        with self._admitted() as admitted:
            if admitted is None:
                outcomes = [self._not_admitted_outcome()] * len(keys)
            else:
                session, permit = admitted
                fault: Fault | None = None
                for part in key_batches(keys, batch_keys_max=session.limits.batch_keys_max):
                    answer = ask(session, part, deadline_s - self._clock())
                    if isinstance(answer, Fault):
                        fault = answer
                        break
                    outcomes += answer
                self._report(session, permit, fault)
                if fault is not None:
                    outcomes += [fault.outcome] * (len(keys) - len(outcomes))
        self._counters.count(operation, outcomes)
        return outcomes

    def _look_up(self, session: Session, keys: Sequence[bytes], timeout_s: float) -> list[Outcome] | Fault:
        lease_ms = min(int(self._settings.lease_s * 1000), session.limits.lease_ms_max)
        packed, key_bytes = pack_keys(keys)
        request = wire.LookupRequest(session_secret=session.secret, keys=packed, key_bytes=key_bytes, lease_ms=lease_ms)
        reply = call(session.stub.Lookup, request, timeout_s=timeout_s)
        if isinstance(reply, Fault):
            return reply
        outcomes = decode_outcomes(reply.outcomes, count=len(keys))
        if reply.lease_id:
            present = (key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.OK)
            session.leases.note(reply.lease_id, present, lease_s=lease_ms / 1000)
        return outcomes

    def _pin(self, pin_ms: int, session: Session, keys: Sequence[bytes], timeout_s: float) -> list[Outcome] | Fault:
        packed, key_bytes = pack_keys(keys)
        request = wire.PinRequest(session_secret=session.secret, keys=packed, key_bytes=key_bytes, pin_ms=pin_ms)
        reply = call(session.stub.Pin, request, timeout_s=timeout_s)
        return reply if isinstance(reply, Fault) else decode_outcomes(reply.outcomes, count=len(keys))

    def _delete(self, session: Session, keys: Sequence[bytes], timeout_s: float) -> list[Outcome] | Fault:
        packed, key_bytes = pack_keys(keys)
        request = wire.KeysRequest(session_secret=session.secret, keys=packed, key_bytes=key_bytes)
        reply = call(session.stub.Delete, request, timeout_s=timeout_s)
        return reply if isinstance(reply, Fault) else decode_outcomes(reply.outcomes, count=len(keys))

    def _transfer(self, direction: Direction, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        transfer = Transfer(
            direction,
            items,
            timeout_s=timeout_s,
            done=lambda outcomes: self._finish(direction, items, outcomes, done),
            clock=self._clock,
        )
        is_in_doubt = False
        with self._admitted() as admitted:
            if admitted is None:
                transfer.fail(self._not_admitted_outcome())
            else:
                session, permit = admitted
                if direction is Direction.GET:
                    renew_for(session, items, lease_s=self._settings.lease_s)
                is_in_doubt = self._carry_out(transfer, session, permit)
                if direction is Direction.GET:
                    release_after(session, items)
        if not is_in_doubt:
            transfer.settle()

    def _carry_out(self, transfer: Transfer, session: Session, permit: Permit) -> bool:
        """Move the bytes. True when they are in doubt, so that the memory watch settles the transfer."""
        memory_bytes = self._memory.size_bytes if self._memory is not None else 0
        transfer.sort_out_unfit(limits=session.limits, memory_bytes=memory_bytes)
        if self._memory is None or not transfer.pending:
            self._breaker.abandon(permit)
            return False
        memory, link = self._memory, session.link
        if link is None or not link.acquire():
            fault = _safely(lambda: through_stream(session, memory.buffer, transfer))
            self._report(session, permit, fault)
            transfer.fail(fault.outcome if fault is not None else Outcome.IO_ERROR)
            return False
        bounce = self._bounce
        try:
            if bounce is not None:
                fault = _safely(lambda: through_bounce(session, link, bounce, memory.buffer, transfer))
            else:
                fault = _safely(lambda: through_memory(session, link, transfer))
            self._report(session, permit, fault)
            if fault is None:
                return False
            transfer.fail(fault.outcome)
            is_in_doubt = bounce is None and not fault.leaves_bytes_alone
            if is_in_doubt:
                link.doubt(len(transfer.items), transfer.settle)
            if link.state is not LinkState.OPEN or fault.code == RefusalCode.UNKNOWN_REGION:
                self._supervisor.want_memory(session, link)
            return is_in_doubt
        finally:
            link.release()

    def _bulk_of(self, session: Session | None) -> str:
        if session is None:
            return "none"
        if session.link is None:
            return "stream"
        return "memory" if self._bounce is None else "bounce"

    @contextmanager
    def _admitted(self) -> Iterator[tuple[Session, Permit] | None]:
        """The session to call on, and the breaker's leave, to be reported back; None when no call is to be made."""
        session = self._supervisor.session
        if session is None or os.getpid() != self._pid:
            yield None
            return
        with self._calls_changed:
            permit = None if self._is_closed else self._breaker.acquire()
            self._calls_running += permit is not None
        if permit is None:
            yield None
            return
        try:
            yield session, permit
        finally:
            self._breaker.abandon(permit)  # changes nothing for a permit that was reported
            with self._calls_changed:
                self._calls_running -= 1
                self._calls_changed.notify_all()

    def _not_admitted_outcome(self) -> Outcome:
        return Outcome.CANCELLED if self._is_closed else Outcome.UNAVAILABLE

    def _report(self, session: Session, permit: Permit, fault: Fault | None) -> None:
        """What a call says about hicached: to the breaker, the supervisor, the counters and the log."""
        if fault is None:
            session.answered_at_s = time.monotonic()
            self._breaker.succeed(permit)
            return
        if fault.is_answer:
            self._breaker.succeed(permit)
            self._counters.count_refusal(fault.code)
            self._notices.warning(f"refused.{fault.code}", "L3 %s refused a call: %s", self._address.text, fault)
            if is_session_lost(fault):
                self._supervisor.lost(session, fault)
            return
        if fault in (NEVER_SENT, OUT_OF_TIME):
            return  # that was here
        self._breaker.fail(permit)
        self._supervisor.suspect(session)
        if not self._is_closed:
            self._notices.warning(f"fault.{fault.kind}", "L3 %s did not answer a call: %s", self._address.text, fault)

    def _finish(self, direction: Direction, items: Sequence[L3Item], outcomes: list[Outcome], done: Done) -> None:
        self._counters.count(direction, outcomes, (item.size_bytes for item in items))
        try:
            done(outcomes)
        except Exception:  # the caller's own mistake; it must not look like a fault of L3, nor stop the watch
            _log.exception("the done of an L3 %s raised", direction)


def _safely(move: Callable[[], Fault | None]) -> Fault | None:
    """A mistake of ours, or memory that its owner has closed, is a call without an answer: its end is unknown."""
    try:
        return move()
    except Exception as error:
        _log.exception("an L3 transfer failed on this side")
        return Fault(FaultKind.LOST, "INTERNAL", repr(error))


def _bounce_for(memory: SharedMemory | None, identity: Identity) -> Bounce | None:
    """Memory to pass objects through where ``memory`` itself cannot be shared; None where there is none for that."""
    if memory is None or memory.fd is not None:
        return None
    try:
        return Bounce(object_bytes_max=identity.object_bytes_max)
    except OSError as error:
        _log.warning("there is no memory for the bounce buffer of L3, which goes through streams: %s", error)
        return None
