"""How a rank introduces itself: what it says of itself, and the leader's answer."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from hicache.errors import ConfigError
from hicache.pools import ArenaPool, L1Pool, L2Pool
from hicache.ranks.link import Link
from hicache.ranks.messages import (
    FRAME_BYTES_MAX,
    FRAME_LENGTH_BYTES,
    HELLO_BYTES_MAX,
    RANK_PROTOCOL_VERSION,
    WORKER_DECODER,
    Farewell,
    FrameReader,
    Garbage,
    Hello,
    Refused,
    ToWorker,
    Welcome,
    decoded,
    frame,
)
from hicache.ranks.settings import Ranks, connect
from hicache.spec import CacheSpec

_LOOK_UP_S = 0.2  # how soon a wait ends that was given up


def hello_of(spec: CacheSpec, *, rank: int, token: str, l1: L1Pool | None, l2: L2Pool | None, has_l3: bool) -> Hello:
    """What a rank says of itself, and the leader expects of it; without ``l1`` the leader has no rank."""
    return Hello(
        version=RANK_PROTOCOL_VERSION,
        token=token,
        rank=rank,
        descriptor={**spec.descriptor, "tp_size": spec.tp_size, "pp_size": spec.pp_size},
        l1_slots=() if l1 is None else l1.slot_counts,
        l2_slots=l2.slot_counts if l2 is not None else (0,) * len(spec.groups),
        l1_bytes=l1.l1_bytes if isinstance(l1, ArenaPool) else 0,
        has_l3=has_l3,
    )


def introduce(leader: Ranks, hello: Hello, *, given_up: threading.Event) -> tuple[Link, Welcome]:
    """A link to the leader that has taken this rank. Raises ConfigError, also soon after it was ``given_up``."""
    wait = _Wait(time.monotonic() + leader.start_timeout_s, given_up)
    connection = connect(leader, until_s=wait.until_s, given_up=given_up)
    try:
        answer = _answer(connection, frame(hello), wait)
    except (OSError, Garbage) as error:
        connection.close()
        expected = f"a leader that takes rank {hello.rank} within {leader.start_timeout_s:g} s ({error})"
        raise ConfigError("leader.address", leader.address, expected) from error
    if isinstance(answer, Welcome):
        return Link(connection, FrameReader(bytes_max=FRAME_BYTES_MAX)), answer
    connection.close()
    reason = answer.reason if isinstance(answer, Refused | Farewell) else f"it says {type(answer).__name__}"
    raise ConfigError("rank", hello.rank, f"one that the leader takes; where leader != worker: {reason}")


@dataclass(frozen=True, slots=True)
class _Wait:
    until_s: float
    given_up: threading.Event

    def receive(self, connection: socket.socket, size_bytes: int) -> bytes:
        """Some bytes, as soon as they come. Raises OSError."""
        while True:
            left_s = self.until_s - time.monotonic()
            if self.given_up.is_set() or left_s <= 0:
                raise TimeoutError("given up" if self.given_up.is_set() else "timed out")
            connection.settimeout(min(left_s, _LOOK_UP_S))
            with suppress(TimeoutError):
                return connection.recv(size_bytes)


def _answer(connection: socket.socket, framed: bytes, wait: _Wait) -> ToWorker:
    """The first message of the leader, and not a byte more. Raises OSError or Garbage."""
    connection.settimeout(max(0.001, wait.until_s - time.monotonic()))
    connection.sendall(framed)
    length = int.from_bytes(_exactly(connection, FRAME_LENGTH_BYTES, wait), "little")
    if length > HELLO_BYTES_MAX:
        raise Garbage(f"an answer of {length} bytes")
    return decoded(WORKER_DECODER, _exactly(connection, length, wait))


def _exactly(connection: socket.socket, size_bytes: int, wait: _Wait) -> bytes:
    received = b""
    while len(received) < size_bytes:
        part = wait.receive(connection, size_bytes - len(received))
        if not part:
            raise ConnectionResetError("it hung up")
        received += part
    return received
