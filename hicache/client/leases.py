"""Renews and releases the leases of a session. Nobody waits for an answer: a lease that is not reached runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from hicache.client.session import Session
from hicache.l3 import L3Item
from hicache.wire import hicached_pb2 as wire

LEASE_CALL_S = 2.0
RENEWED_SHARE = 0.5  # of a lease that may be left when a fetch begins; with less it is renewed


def renew_for(session: Session, items: Sequence[L3Item], *, lease_s: float) -> None:
    """A fetch of ``items`` begins: the leases on them should not end meanwhile."""
    keys = (item.key for item in items)
    lease_ms = min(int(lease_s * 1000), session.limits.lease_ms_max)
    within_s = RENEWED_SHARE * lease_ms / 1000
    for lease_id in session.leases.renew(keys, ending_within_s=within_s, lease_s=lease_ms / 1000):
        _change(session, lease_id, lease_ms=lease_ms)


def release_after(session: Session, items: Sequence[L3Item]) -> None:
    """A fetch of ``items`` has ended: leases with nothing else under them are released."""
    for lease_id in session.leases.settle(item.key for item in items):
        _change(session, lease_id, lease_ms=0)


def _change(session: Session, lease_id: int, *, lease_ms: int) -> None:
    request = wire.LeaseRequest(session_secret=session.secret, lease_id=lease_id, lease_ms=lease_ms)
    with contextlib.suppress(ValueError):  # the session was closed just now
        # gRPC cancels a call that nobody refers to; the callback refers to it until its end.
        session.stub.Lease.future(request, timeout=LEASE_CALL_S).add_done_callback(_ignore)


def _ignore(answer: object) -> None:
    pass
