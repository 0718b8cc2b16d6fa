"""The thread that keeps a session with hicached alive, and gets a new one when it is lost."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from enum import StrEnum

from hicache.breaker import CircuitBreaker
from hicache.client.address import DaemonAddress
from hicache.client.fault import Fault, FaultKind
from hicache.client.memory_link import MemoryLink, NotRegistered, register
from hicache.client.memory_watch import MemoryWatch
from hicache.client.session import Identity, Session, is_session_lost
from hicache.client.settings import ClientSettings
from hicache.l3 import TierFills
from hicache.notices import Notices
from hicache.shared_memory import SharedMemory

LINKS_DRAINING_MAX = 4  # registrations that hicached has not let go of; at so many, bulk goes through streams
THREAD_JOIN_S = 2.0  # beyond the timeouts of whatever the thread may be doing

_log = logging.getLogger(__name__)


class ClientState(StrEnum):
    """Where the client stands with hicached."""

    CONNECTING = "connecting"  # never connected yet
    READY = "ready"  # there is a session
    UNAVAILABLE = "unavailable"  # no session: hicached is gone, or does not answer
    REFUSED = "refused"  # hicached said no, for a reason that lasts; tried again rarely
    CLOSED = "closed"


class Supervisor:
    """Owns the session and its registered memory. Thread-safe; only ``wait_ready`` and ``close`` block.

    Calls read ``session`` and tell what they saw: ``suspect`` after a call without an answer, ``lost`` when hicached
    no longer knows the session, ``want_memory`` when the registered memory can no longer be used.
    """

    def __init__(
        self,
        address: DaemonAddress,
        identity: Identity,
        *,
        memory: SharedMemory | None,
        breaker: CircuitBreaker,
        notices: Notices,
        settings: ClientSettings,
        on_refused: Callable[[str], None],
    ) -> None:
        """``on_refused`` is told the code of every hello that was refused."""
        self._address = address
        self._identity = identity
        self._moves_objects = memory is not None
        self._memory = memory if address.is_local and memory is not None and memory.fd is not None else None
        self._breaker = breaker
        self._notices = notices
        self._settings = settings
        self._on_refused = on_refused
        self.watch = MemoryWatch(on_end=self._link_ended)
        self._changed = threading.Condition()
        self._needs_look = False
        self._suspected: Session | None = None
        self._is_closing = False
        self.session: Session | None = None  # None: no call can succeed now
        self._state = ClientState.CONNECTING
        self._fault: Fault | None = None
        self._sessions_opened = 0
        self._read_fills: Callable[[], TierFills] | None = None  # what is reported to hicached, if anything
        self._register_at_s = 0.0
        self._register_backoff_s = settings.backoff_s
        self._idle_channel = address.open_idle_channel()
        self._thread = threading.Thread(target=self._run, name="hicache-l3", daemon=True)
        self._thread.start()

    @property
    def state(self) -> ClientState:
        """Where the client stands."""
        return self._state

    @property
    def fault(self) -> Fault | None:
        """Why there is no session, or why the one before ended; None while all is well."""
        return self._fault

    @property
    def sessions_opened(self) -> int:
        """More than one means that hicached was lost and found again."""
        return self._sessions_opened

    def suspect(self, session: Session) -> None:
        """A call on ``session`` had no answer: find out whether it still lives."""
        with self._changed:
            self._suspected = session
        self._wake()

    def lost(self, session: Session, fault: Fault) -> None:
        """hicached does not know ``session`` any more."""
        with self._changed:
            if self.session is not session:
                return
            self.session = None
            self._fault = fault
            self._state = ClientState.UNAVAILABLE
        self._wake()

    def want_memory(self, session: Session, link: MemoryLink) -> None:
        """``link`` is of no use any more: register the memory anew. Its bytes stay in doubt as they are."""
        with self._changed:
            if session.link is link:
                session.link = None
        link.detach()
        self._wake()

    def _link_ended(self, link: MemoryLink) -> None:
        with self._changed:
            if self.session is not None and self.session.link is link:
                self.session.link = None
            # There is room for another one; a peer that drops each at once still gets a bounded number of them.
            self._register_at_s = min(self._register_at_s, time.monotonic() + self._settings.backoff_s)
        self._wake()

    def report_from(self, read_fills: Callable[[], TierFills]) -> None:
        """What hicached is told from here on; ``read_fills`` is called in the thread of the supervisor."""
        self._read_fills = read_fills
        self._wake()

    def wait_ready(self, *, timeout_s: float) -> bool:
        """Whether there is a session with its memory registered (where it can be) within ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready() or self._is_closing, timeout_s)
            return self._is_ready()

    def wait_session(self, *, timeout_s: float) -> Session | None:
        """A session as soon as there is one, within ``timeout_s``; None without one, or at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self.session is not None or self._is_closing, timeout_s)
            return self.session

    def wait_first_answer(self, *, timeout_s: float) -> Fault | None:
        """Why the first attempt to connect gave no session; None when it did, or has not ended within ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._state is not ClientState.CONNECTING, timeout_s)
            return self._fault

    def close(self) -> None:
        """End the session and the thread. Calls that run end at once. Idempotent."""
        with self._changed:
            self._is_closing = True
            session, self.session = self.session, None
            self._state = ClientState.CLOSED
        self._wake()
        if session is not None:
            session.close()
        self._thread.join(self._settings.connect_timeout_s + self._settings.ping_timeout_s + THREAD_JOIN_S)
        self._idle_channel.close()

    def _is_ready(self) -> bool:
        session = self.session
        return session is not None and (session.link is not None or bool(session.stream_reason))

    def _wake(self) -> None:
        with self._changed:
            self._needs_look = True
            self._changed.notify_all()

    def _wait(self, timeout_s: float) -> None:
        """Until woken, closing, or ``timeout_s`` have passed."""
        with self._changed:
            self._changed.wait_for(lambda: self._needs_look or self._is_closing, max(0.0, timeout_s))
            self._needs_look = False

    def _run(self) -> None:
        backoff_s = self._settings.backoff_s
        while not self._is_closing:
            session = self._connect_safely()
            if isinstance(session, Session):
                opened_at_s = time.monotonic()
                self._tend_safely(session)
                if time.monotonic() - opened_at_s > self._settings.backoff_s_max:
                    backoff_s = self._settings.backoff_s
            if isinstance(session, Fault) and session.is_lasting:
                self._pause(self._settings.refused_retry_s)
            else:
                self._pause(backoff_s)
                backoff_s = min(2 * backoff_s, self._settings.backoff_s_max)

    def _connect_safely(self) -> Session | Fault:
        try:
            return self._connect()
        except Exception as error:  # a mistake of ours must cost this engine its L3 for a while, never for good
            _log.exception("connecting to L3 failed")
            return Fault(FaultKind.LOST, "INTERNAL", repr(error))

    def _tend_safely(self, session: Session) -> None:
        try:
            self._tend(session)
        except Exception as error:
            _log.exception("looking after the L3 session failed")
            self._drop(session, Fault(FaultKind.LOST, "INTERNAL", repr(error)))
            session.close()

    def _pause(self, seconds: float) -> None:
        """Wait between two attempts, a little shorter at random so that many engines do not come back at once."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing, seconds * random.uniform(0.75, 1.0))

    def _connect(self) -> Session | Fault:
        session = self._open_session()
        if isinstance(session, Fault):
            self._note_no_session(session)
            return session
        session.can_share_memory = not session.stream_reason
        with self._changed:
            is_closing = self._is_closing
            if not is_closing:
                self.session = session
                self._state = ClientState.READY
                self._fault = None
                self._sessions_opened += 1
                self._register_at_s = 0.0
                self._register_backoff_s = self._settings.backoff_s
                self._changed.notify_all()
        if is_closing:
            session.close()
        else:
            self._breaker.retry_now()
            self._note_session(session)
        return session

    def _open_session(self) -> Session | Fault:
        """A session over which objects can move: look-ups alone would promise what no fetch could bring in time."""
        timeout_s = self._settings.connect_timeout_s
        session = Session.open(self._address, self._identity, timeout_s=timeout_s, on_end=self._wake)
        if isinstance(session, Fault):
            return session
        session.stream_reason = self._why_stream(session)
        fault = session.try_bulk(timeout_s=timeout_s) if self._moves_objects else None
        if fault is None:
            return session
        session.close()
        return fault

    def _why_stream(self, session: Session) -> str:
        if not self._address.is_local:
            return "the address is not a Unix socket"
        if self._memory is None:
            return "there is no memory that can be shared"
        return "" if session.welcome.memory_socket else "hicached offers no memory socket"

    def _tend(self, session: Session) -> None:
        """Look after the session until it is over."""
        while not self._is_closing:
            self._report_if_due(session)
            fault = self._register_if_due(session) or session.fault or self._check(session)
            if fault is not None:
                self._drop(session, fault)
            if self.session is not session:
                session.close()
                return
            self._wait(self._next_look_s(session))

    def _report_if_due(self, session: Session) -> None:
        if self._read_fills is None or time.monotonic() < session.report_at_s:
            return
        session.report_at_s = time.monotonic() + self._settings.report_s
        session.report(self._read_fills(), timeout_s=self._settings.ping_timeout_s)

    def _check(self, session: Session) -> Fault | None:
        """Ping the session when a call on it had no answer, or when it has been idle for long."""
        with self._changed:
            is_suspect = self._suspected is session
            self._suspected = None
        if not is_suspect and time.monotonic() - session.answered_at_s < self._settings.heartbeat_s:
            return None
        return self._ping(session)

    def _ping(self, session: Session) -> Fault | None:
        """Why the session is over; None when hicached answers and knows it."""
        fault = session.ping(timeout_s=self._settings.ping_timeout_s)
        return None if fault is None or (fault.is_answer and not is_session_lost(fault)) else fault

    def _drop(self, session: Session, fault: Fault) -> None:
        with self._changed:
            if self.session is session:
                self.session = None
            if not self._is_closing:
                self._state = ClientState.UNAVAILABLE
                self._fault = fault
        self._notices.warning("lost", "L3 %s is gone (%s): going on without it", self._address.text, fault)

    def _register_if_due(self, session: Session) -> Fault | None:
        """Hand the memory over where it is time to. Returns why the session is over when that is what was found."""
        if session.link is not None or not session.can_share_memory or self._memory is None:
            return None
        if time.monotonic() < self._register_at_s or self.watch.draining_count >= LINKS_DRAINING_MAX:
            return None
        assert self._memory.fd is not None
        link = register(
            session.welcome.memory_socket,
            session_secret=session.secret,
            fd=self._memory.fd,
            size_bytes=self._memory.size_bytes,
            timeout_s=self._settings.connect_timeout_s,
        )
        if isinstance(link, NotRegistered):
            fault = session.fault or self._ping(session)
            if fault is None:
                self._note_not_registered(session, link)
            return fault
        self._register_backoff_s = self._settings.backoff_s
        self.watch.add(link)  # before the first transfer can doubt it
        with self._changed:
            self._register_at_s = time.monotonic() + self._settings.backoff_s
            session.link = link
            session.stream_reason = ""
            self._changed.notify_all()
        return None

    def _note_not_registered(self, session: Session, refusal: NotRegistered) -> None:
        self._notices.warning("memory", "L3 goes through streams: %s", refusal.reason)
        with self._changed:
            session.stream_reason = refusal.reason
            again_s = self._settings.refused_retry_s if refusal.is_lasting else self._register_backoff_s
            self._register_at_s = time.monotonic() + again_s
            self._register_backoff_s = min(2 * self._register_backoff_s, self._settings.backoff_s_max)
            self._changed.notify_all()

    def _next_look_s(self, session: Session) -> float:
        now_s = time.monotonic()
        look_s = session.answered_at_s + self._settings.heartbeat_s - now_s
        if self._read_fills is not None:
            look_s = min(look_s, session.report_at_s - now_s)
        if session.link is None and session.can_share_memory:
            look_s = min(look_s, max(self._register_at_s - now_s, self._settings.backoff_s))
        return look_s

    def _note_session(self, session: Session) -> None:
        self._notices.info(
            "ready",
            "L3 %s is ready: hicached %s, tenant %s",
            self._address.text,
            session.welcome.daemon_version,
            session.welcome.tenant,
        )
        if session.welcome.namespace_differs:
            self._notices.info(
                "namespace",
                "L3 knows this model with other settings, whose pages cannot be used: %s",
                ", ".join(session.welcome.namespace_differs),
            )

    def _note_no_session(self, fault: Fault) -> None:
        with self._changed:
            if self._is_closing:
                return
            self._fault = fault
            self._state = ClientState.REFUSED if fault.is_lasting else ClientState.UNAVAILABLE
            self._changed.notify_all()
        if fault.is_answer:
            self._on_refused(fault.code)
        if fault.is_lasting:
            self._notices.error("refused", "L3 %s refused: %s", self._address.text, fault)
        else:
            self._notices.warning("unavailable", "L3 %s cannot be reached: %s", self._address.text, fault)
