"""The bulk socket: objects move on connections of their own, each of them with a thread of hicached behind it.

The client says BULK_HELLO and gets a status (over TCP, TLS comes before that where hicached has a certificate). Then it
makes one request after another, each of them a BULK_REQUEST, the keys (as ``pack_keys`` has them) and the size of each
object (``pack_numbers``), and each is answered by a status first:

    GET  for each object, in any order, a BULK_OBJECT; if its outcome is OK, as many bytes as were asked for follow, and
         then their BULK_CHECKSUM
    PUT  an outcome for each object, one byte each; the client sends those that are OK, in order, each followed by its
         BULK_CHECKSUM, and gets a status and an outcome for each object once more
    LOAD, STORE  for registered memory, which hicached writes to and reads by itself: after the sizes come the offset of
         each object in the region (``pack_numbers``) and a BULK_REGION; an outcome for each object is all of the answer

Where the number of bytes of a key has BULK_TRACED in it, a BULK_CALLER comes between the BULK_REQUEST and the keys: the
span that the call is within. It is sent only to a hicached that has said that it makes spans (Welcome).

A status is one byte. After BULK_REFUSED come the length of a reason (BULK_REASON) and the reason, ``CODE: text``; then
the daemon closes. A connection that has not been used up to the end of an answer is of no use any more.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

from hicache.wire.protocol import SECRET_BYTES

BULK_CONNECTIONS_PER_SESSION_MAX = 8
BULK_PIECE_BYTES = 512 * 1024  # hashed while it is in the cache, then sent; or received, then hashed
BULK_SOCKET_BUFFER_BYTES = 2 * 1024 * 1024  # asked for at either end; the system may allow less

BULK_HELLO = struct.Struct(f"<8s{SECRET_BYTES}s")  # BULK_MAGIC, session secret
BULK_MAGIC = b"hicbulk1"
PEER_MAGIC = (
    b"hicpeer1"  # instead, over a Unix socket, with a secret of zeros: asks for a ticket of SECRET_BYTES (Hello)
)
BULK_ACCEPTED = b"\0"
BULK_REFUSED = b"\1"
BULK_REASON = struct.Struct("<H")  # bytes of the reason that follows
BULK_REQUEST = struct.Struct("<HHII")  # BulkKind, bytes of a key, number of keys, time for the call in ms
BULK_TRACED = 0x8000
BULK_CALLER = struct.Struct("<16s8sB")  # W3C trace context: trace id, span id, flags
BULK_OBJECT = struct.Struct("<IB")  # position in the request, outcome
BULK_CHECKSUM = struct.Struct("<Q")  # xxh3_64 bound to the object key without the tenant (hicache/checksum.py)
BULK_REGION = struct.Struct("<Q")  # id of the region that the offsets are in
BULK_NUMBER_BYTES = 8


class BulkKind(IntEnum):
    """What is asked for. Bytes that are no request hardly look like one."""

    GET = 0xB1C4
    PUT = 0xB1D7
    LOAD = 0xB1E3  # backend -> registered memory
    STORE = 0xB1F5  # registered memory -> backend


def pack_request(kind: BulkKind, key_bytes: int, key_count: int, *, timeout_ms: int, caller: bytes) -> bytes:
    """What a request begins with. ``caller`` is a BULK_CALLER or empty."""
    return BULK_REQUEST.pack(kind, key_bytes | BULK_TRACED if caller else key_bytes, key_count, timeout_ms) + caller


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Sizes or offsets in bytes, each as 64 bits."""
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack_numbers(packed: bytes) -> tuple[int, ...]:
    """What ``pack_numbers`` put together."""
    return struct.unpack(f"<{len(packed) // BULK_NUMBER_BYTES}Q", packed)
