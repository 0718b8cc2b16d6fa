"""What both ends of the hicached protocol must agree on beside the messages of hicached.proto."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import StrEnum

PROTOCOL_VERSION = 4
SECRET_BYTES = 32
NAMESPACE_DIGEST_BYTES = 32
SALT_FINGERPRINT_BYTES = 32
DEPLOYMENT_CHARS_MAX = 128
KEY_BYTES_MAX = 112  # an object key; the daemon puts the tenant's 16 bytes before it
DESCRIPTOR_BYTES_MAX = 64 * 1024
DIFFERING_FIELDS_MAX = 16  # how many fields Welcome.namespace_differs, or a refusal, names
REQUEST_OVERHEAD_BYTES = 512  # everything in a request beside its keys

# Fixed by this protocol version: hicached refuses a configuration that could need more, so a client that opens its
# channel before it knows the negotiated limits is never surprised by a bigger message.
MESSAGE_BYTES_MAX = 16 * 1024 * 1024

KEEPALIVE_TIMEOUT_MS = 10_000
PING_INTERVAL_MS_MIN = 5_000

# The memory socket, one exchange per connection: the client's hello with its memfd attached to the same sendmsg, then
# the daemon's answer. Refused: REFUSED, reason length, reason in UTF-8, and the connection is closed. Afterwards the
# client's half-close (or close) detaches the region, and the daemon closes once no transfer touches it any more.
MEMORY_HELLO = struct.Struct(f"<{SECRET_BYTES}sQ")  # session secret, region size in bytes
MEMORY_STATUS_OK = 0
MEMORY_STATUS_REFUSED = 1
MEMORY_ACCEPTED = struct.Struct("<BQ")  # MEMORY_STATUS_OK, region id
MEMORY_REFUSED = struct.Struct("<BH")  # MEMORY_STATUS_REFUSED, length of the reason that follows


class RefusalCode(StrEnum):
    """Why hicached refused a whole call. The details of the gRPC status are ``CODE: text for people``."""

    BAD_TOKEN = "BAD_TOKEN"
    UNKNOWN_SESSION = "UNKNOWN_SESSION"
    PROTOCOL_VERSION = "PROTOCOL_VERSION"
    BAD_NAMESPACE = "BAD_NAMESPACE"
    KEY_HASH_NOT_ALLOWED = "KEY_HASH_NOT_ALLOWED"
    DEPLOYMENT_MISMATCH = "DEPLOYMENT_MISMATCH"
    MALFORMED = "MALFORMED"
    BATCH_TOO_LARGE = "BATCH_TOO_LARGE"
    TOO_MANY_SESSIONS = "TOO_MANY_SESSIONS"
    TOO_MANY_CALLS = "TOO_MANY_CALLS"
    RATE_LIMITED = "RATE_LIMITED"
    NOT_SUPPORTED = "NOT_SUPPORTED"
    UNKNOWN_REGION = "UNKNOWN_REGION"
    BAD_STREAM = "BAD_STREAM"
    DRAINING = "DRAINING"
    SHUTTING_DOWN = "SHUTTING_DOWN"


def parse_refusal(details: str | None) -> tuple[RefusalCode, str] | None:
    """Code and text of a typed refusal, or None where ``details`` is some other gRPC error."""
    code, separator, text = (details or "").partition(": ")
    if not separator or code not in RefusalCode.__members__:
        return None
    return RefusalCode(code), text


def pack_keys(keys: Sequence[bytes]) -> tuple[bytes, int]:
    """Keys of equal length as one string, and that length. Raises ValueError where the lengths differ."""
    key_bytes = len(keys[0]) if keys else 0
    if any(len(key) != key_bytes for key in keys):
        raise ValueError("the keys of one batch must have the same length")
    return b"".join(keys), key_bytes


def count_keys(packed: bytes, key_bytes: int) -> int:
    """How many keys ``pack_keys`` put together. Raises ValueError unless ``packed`` is whole keys of a legal length."""
    if not packed:
        return 0
    if not 1 <= key_bytes <= KEY_BYTES_MAX:
        raise ValueError(f"key_bytes is {key_bytes}: expected 1 to {KEY_BYTES_MAX}")
    if len(packed) % key_bytes:
        raise ValueError(f"{len(packed)} bytes are not whole keys of {key_bytes} bytes")
    return len(packed) // key_bytes


def split_keys(packed: bytes, key_bytes: int) -> list[bytes]:
    """The keys that ``pack_keys`` put together. Raises ValueError as ``count_keys``."""
    count_keys(packed, key_bytes)
    return [packed[start : start + key_bytes] for start in range(0, len(packed), max(key_bytes, 1))]


def message_bytes_needed(*, batch_keys_max: int) -> int:
    """The largest message that a client within this limit can send or get: a full batch."""
    return max(batch_keys_max * KEY_BYTES_MAX + REQUEST_OVERHEAD_BYTES, DESCRIPTOR_BYTES_MAX + 16 * 1024)


def channel_options(*, keepalive_ms: int = 20_000) -> list[tuple[str, int]]:
    """gRPC options of a client's channel. What ``http_proxy`` names is for the web, and nowhere near a daemon."""
    return [
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.keepalive_time_ms", max(keepalive_ms, PING_INTERVAL_MS_MIN)),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # else a ping is waited for as long as 60 s
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(*, message_bytes_max: int, keepalive_ms: int) -> list[tuple[str, int]]:
    """gRPC options of hicached: a peer that is silent for ``keepalive_ms`` is pinged, and dropped if it stays so."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_send_message_length", message_bytes_max),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # else a ping is waited for as long as 60 s
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", PING_INTERVAL_MS_MIN),
        ("grpc.http2.max_ping_strikes", 0),
    ]
