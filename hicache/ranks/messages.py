"""What a leader and its workers say to each other: length-prefixed msgpack, bounded."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, TypeAlias, TypeVar

import msgspec

from hicache.jobs import Completion, CopyJob, FetchJob, LookupJob, StoreJob

RANK_PROTOCOL_VERSION = 1
HELLO_BYTES_MAX = 256 * 1024  # a descriptor has at most 64 KiB
FRAME_BYTES_MAX = 64 * 1024 * 1024  # a copy of some millions of pages

_LENGTH = struct.Struct("<I")
FRAME_LENGTH_BYTES = _LENGTH.size


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first frame of a worker: who it is, and everything that must be equal on all ranks."""

    version: int
    token: str
    rank: int
    descriptor: dict[str, Any]  # of FieldValue: msgspec cannot check a union of str and bytes
    l1_slots: tuple[int, ...]  # none at all: of a leader without a rank, which takes what its ranks have
    l2_slots: tuple[int, ...]  # all zero: no L2
    l1_bytes: int  # of an arena, from which its layout follows; 0: no arena
    has_l3: bool


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The leader takes the worker as a rank; jobs and pulses follow. Whoever hears nothing for so long is alone."""

    silence_timeout_s: float


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The leader does not take the worker: ``reason`` names what differs. The connection is over."""

    reason: str


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """I am here. Both sides say it several times within the silence that they allow each other."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """A worker has done its part of a job."""

    completion: Completion


class Farewell(msgspec.Struct, frozen=True, tag=True):
    """The sender closes the link on purpose."""

    reason: str


ToLeader: TypeAlias = Hello | Done | Pulse | Farewell
ToWorker: TypeAlias = Welcome | Refused | CopyJob | FetchJob | StoreJob | LookupJob | Pulse | Farewell
Message: TypeAlias = ToLeader | ToWorker
M = TypeVar("M", bound=Message)

_ENCODER = msgspec.msgpack.Encoder()
LEADER_DECODER = msgspec.msgpack.Decoder(ToLeader)
WORKER_DECODER = msgspec.msgpack.Decoder(ToWorker)


class Garbage(Exception):
    """The peer said something that is no message: nothing it says can be trusted."""


def frame(message: Message) -> bytes:
    """A message as it goes over the wire. Raises ValueError when it is larger than a frame may be."""
    payload = _ENCODER.encode(message)
    if len(payload) > FRAME_BYTES_MAX:
        raise ValueError(f"a {type(message).__name__} of {len(payload)} bytes: a frame has {FRAME_BYTES_MAX} at most")
    return _LENGTH.pack(len(payload)) + payload


def decoded(decoder: msgspec.msgpack.Decoder[M], payload: bytes) -> M:
    """The message in a payload. Raises Garbage."""
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Garbage(str(error)) from error


class FrameReader:
    """Cuts a stream of bytes into payloads. Holds no more than one frame of ``bytes_max`` and what was fed last."""

    def __init__(self, *, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._buffer = bytearray()

    def feed(self, received: bytes | memoryview) -> Iterator[bytes]:
        """The payloads that are whole now. Raises Garbage for a length that no frame has."""
        self._buffer += received
        while len(self._buffer) >= _LENGTH.size:
            [length] = _LENGTH.unpack_from(self._buffer)
            if not 0 < length <= self.bytes_max:
                raise Garbage(f"a frame of {length} bytes: expected 1 to {self.bytes_max}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield payload
