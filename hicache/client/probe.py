"""One synchronous try at hicached: what a start-up check or a person wants to know."""

from __future__ import annotations

import time

from hicache.client.address import DaemonAddress
from hicache.client.fault import Fault
from hicache.client.memory_link import NotRegistered, register
from hicache.client.session import Identity, Session
from hicache.client.status import ProbeReport
from hicache.shared_memory import SharedMemory


def probe_daemon(
    address: DaemonAddress, identity: Identity, *, memory: SharedMemory | None, timeout_s: float
) -> ProbeReport:
    """Agree on a session, ping it, register ``memory`` where that is possible, and let go of all of it.

    Blocks for at most about ``timeout_s``. Raises nothing for a fault of the peer.
    """
    started_s = time.monotonic()
    session = Session.open(address, identity, timeout_s=timeout_s, on_end=_ignore)
    if isinstance(session, Fault):
        return _failed(session, seconds=time.monotonic() - started_s)
    try:
        fault = session.ping(timeout_s=started_s + timeout_s - time.monotonic())
        if fault is not None:
            return _failed(fault, seconds=time.monotonic() - started_s)
        bulk, bulk_reason = _try_memory(session, address, memory, timeout_s=started_s + timeout_s - time.monotonic())
        fault = session.try_bulk(timeout_s=started_s + timeout_s - time.monotonic())
        if fault is not None:
            return _failed(fault, seconds=time.monotonic() - started_s)
        welcome = session.welcome
        return ProbeReport(
            is_ok=True,
            code="OK",
            detail=f"hicached {welcome.daemon_version} at {address.text} serves tenant {welcome.tenant}",
            is_lasting=False,
            seconds=time.monotonic() - started_s,
            daemon_version=welcome.daemon_version,
            tenant=welcome.tenant,
            store_id=welcome.store_id,
            bulk=bulk,
            bulk_reason=bulk_reason,
            namespace_differs=tuple(welcome.namespace_differs),
        )
    finally:
        session.close()


def _try_memory(
    session: Session, address: DaemonAddress, memory: SharedMemory | None, *, timeout_s: float
) -> tuple[str, str]:
    """How bulk would go, and why not through memory."""
    if not address.is_local or memory is None or not session.welcome.memory_socket:
        return "stream", "the memory cannot be shared, or hicached offers no memory socket"
    if memory.fd is None:
        return "bounce", "the memory cannot be shared: what passes through it is copied"
    link = register(
        session.welcome.memory_socket,
        session_secret=session.secret,
        fd=memory.fd,
        size_bytes=memory.size_bytes,
        timeout_s=max(timeout_s, 0.001),
    )
    if isinstance(link, NotRegistered):
        return "stream", link.reason
    link.end()  # no transfer ever named it
    return "memory", ""


def _failed(fault: Fault, *, seconds: float) -> ProbeReport:
    return ProbeReport(is_ok=False, code=fault.code, detail=fault.detail, is_lasting=fault.is_lasting, seconds=seconds)


def _ignore() -> None:
    """The end of the session is what this wants."""
