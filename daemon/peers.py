"""Which user's process a client is, as the kernel says: asked for on a socket of ours, since gRPC does not tell."""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from hicache.daemon.refusals import Refusal
from hicache.wire.protocol import SECRET_BYTES, RefusalCode

TICKET_S = 10.0  # between the ticket and the hello that brings it
TICKETS_MAX = 1024  # one more drops the oldest of the user who has most: whoever floods them harms himself alone

_UCRED = struct.Struct("3i")
_SO_PEERGROUPS = 59


@dataclass(frozen=True, slots=True)
class Peer:
    """A process at the other end of a Unix socket, as it was when it connected."""

    uid: int
    gids: frozenset[int]


def peer_of(connection: socket.socket) -> Peer | None:
    """Who is at the other end; None where that is not a Unix socket."""
    if connection.family != socket.AF_UNIX:
        return None
    _, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    groups = b""
    with contextlib.suppress(OSError):  # before Linux 4.13: the first group alone
        groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * 256)
    return Peer(uid, frozenset([gid, *struct.unpack(f"{len(groups) // 4}I", groups)]))


class PeerTickets:
    """Each is good for one hello, and soon for none. Event loop only."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._peers: dict[bytes, tuple[Peer, float]] = {}  # by hash of the ticket; until when; oldest first

    def issue(self, connection: socket.socket) -> bytes:
        """A ticket for whoever is at the other end. Raises Refusal where nobody knows who that is."""
        peer = peer_of(connection)
        if peer is None:
            raise Refusal(RefusalCode.MALFORMED, "only the Unix socket tells whose process a client is")
        if len(self._peers) >= TICKETS_MAX:
            self._make_room()
        ticket = secrets.token_bytes(SECRET_BYTES)
        self._peers[_hashed(ticket)] = peer, self._clock() + TICKET_S
        return ticket

    def _make_room(self) -> None:
        counts = Counter(peer.uid for peer, _ in self._peers.values())
        [(most, _)] = counts.most_common(1)
        del self._peers[next(ticket for ticket, (peer, _) in self._peers.items() if peer.uid == most)]

    def redeem(self, ticket: bytes) -> Peer | None:
        """Whose ticket this is; None for one that was never issued, is used up, or is too old."""
        peer, ends_s = self._peers.pop(_hashed(ticket), (None, 0.0))
        return peer if self._clock() < ends_s else None


def _hashed(ticket: bytes) -> bytes:
    return blake2b(ticket, digest_size=32).digest()
