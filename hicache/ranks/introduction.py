"""How a rank introduces itself: what it says of itself, and the leader's answer."""

from __future__ import annotations

import socket
import time

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


def introduce(leader: Ranks, hello: Hello) -> tuple[Link, Welcome]:
    """A link to the leader that has taken this rank. Raises ConfigError."""
    until_s = time.monotonic() + leader.start_timeout_s
    connection = connect(leader, until_s=until_s)
    try:
        answer = _answer(connection, frame(hello), until_s=until_s)
    except (OSError, Garbage) as error:
        connection.close()
        expected = f"a leader that takes rank {hello.rank} within {leader.start_timeout_s:g} s ({error})"
        raise ConfigError("leader.address", leader.address, expected) from error
    if isinstance(answer, Welcome):
        return Link(connection, FrameReader(bytes_max=FRAME_BYTES_MAX)), answer
    connection.close()
    reason = answer.reason if isinstance(answer, Refused | Farewell) else f"it says {type(answer).__name__}"
    raise ConfigError("rank", hello.rank, f"one that the leader takes; where leader != worker: {reason}")


def _answer(connection: socket.socket, framed: bytes, *, until_s: float) -> ToWorker:
    """The first message of the leader, and not a byte more. Raises OSError or Garbage."""
    connection.settimeout(max(0.001, until_s - time.monotonic()))
    connection.sendall(framed)
    length = int.from_bytes(_exactly(connection, FRAME_LENGTH_BYTES, until_s=until_s), "little")
    if length > HELLO_BYTES_MAX:
        raise Garbage(f"an answer of {length} bytes")
    return decoded(WORKER_DECODER, _exactly(connection, length, until_s=until_s))


def _exactly(connection: socket.socket, size_bytes: int, *, until_s: float) -> bytes:
    received = b""
    while len(received) < size_bytes:
        connection.settimeout(max(0.001, until_s - time.monotonic()))
        part = connection.recv(size_bytes - len(received))
        if not part:
            raise ConnectionResetError("it hung up")
        received += part
    return received
