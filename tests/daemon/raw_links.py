"""The connections of a client of hicached, message by message: memory and bulk."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
from collections.abc import Sequence
from typing import Self

from hicache.checksum import payload_checksum
from hicache.outcome import Outcome
from hicache.wire.bulk import (
    BULK_ACCEPTED,
    BULK_CHECKSUM,
    BULK_HELLO,
    BULK_MAGIC,
    BULK_OBJECT,
    BULK_REASON,
    BULK_REGION,
    BULK_REQUEST,
    BulkKind,
    pack_numbers,
)
from hicache.wire.protocol import (
    MEMORY_ACCEPTED,
    MEMORY_HELLO,
    MEMORY_REFUSED,
    MEMORY_STATUS_OK,
    pack_keys,
)

CALL_S = 20.0
EOF_S = 20.0


def object_key(number: int, *, length: int = 36) -> bytes:
    """A key as clients make them, told apart by ``number``."""
    return number.to_bytes(8, "big").rjust(length, b"k")


def payload_of(number: int, size_bytes: int) -> bytes:
    """Bytes that differ for each number, at every position that matters."""
    seed = (number * 2654435761 + 1).to_bytes(8, "little", signed=False)
    return (seed * (size_bytes // 8 + 1))[:size_bytes]


class Memory:
    """A memfd of a client, mapped here too."""

    def __init__(self, size_bytes: int, *, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) -> None:
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("test-l2", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(self.fd, 0, size_bytes)
        if seals:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        self.bytes = mmap.mmap(self.fd, size_bytes)

    def close(self) -> None:
        self.bytes.close()
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MemoryRefused(Exception):
    """The daemon did not take the memory."""


class Attachment:
    """A connection to the memory socket with a region behind it."""

    def __init__(self, memory_socket: str, secret: bytes, fds: Sequence[int], size_bytes: int) -> None:
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.connection.settimeout(EOF_S)
            self.connection.connect(memory_socket)
            hello = MEMORY_HELLO.pack(secret, size_bytes)
            with contextlib.suppress(BrokenPipeError):  # refused before it was asked; the answer is there
                if fds:
                    socket.send_fds(self.connection, [hello], list(fds))
                else:
                    self.connection.sendall(hello)
            self.region_id = self._answer()
        except BaseException:
            self.connection.close()
            raise

    def _answer(self) -> int:
        status = self._read(1)
        if status[0] == MEMORY_STATUS_OK:
            return int(MEMORY_ACCEPTED.unpack(status + self._read(MEMORY_ACCEPTED.size - 1))[1])
        _, length = MEMORY_REFUSED.unpack(status + self._read(MEMORY_REFUSED.size - 1))
        reason = self._read(length).decode()
        assert self.connection.recv(1) == b"", "a refusal closes the connection"
        raise MemoryRefused(reason)

    def _read(self, size_bytes: int) -> bytes:
        received = b""
        while len(received) < size_bytes:
            part = self.connection.recv(size_bytes - len(received))
            if not part:
                raise MemoryRefused("the connection ended without an answer")
            received += part
        return received

    def half_close(self) -> None:
        self.connection.shutdown(socket.SHUT_WR)

    def is_at_end(self, *, within_s: float) -> bool:
        """Whether the daemon has closed the connection: nobody touches the memory any more."""
        self.connection.settimeout(within_s)
        try:
            return self.connection.recv(1) == b""
        except TimeoutError:
            return False

    def close(self) -> None:
        self.connection.close()


class BulkRefused(Exception):
    """The daemon did not serve a bulk connection, or a call on it, and said why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.code = reason.partition(":")[0]


class Bulk:
    """A connection to the bulk socket. Raises ConnectionError when the daemon ends it."""

    def __init__(self, address: str | tuple[str, int], secret: bytes | None) -> None:
        """Without a secret nothing is said."""
        self.connection = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        self.connection.settimeout(CALL_S)
        try:
            self.connection.connect(address)
            if secret is not None:
                self.send(BULK_HELLO.pack(BULK_MAGIC, secret))
                self.receive_status()
        except BaseException:
            self.close()
            raise

    def send(self, sent: bytes) -> None:
        self.connection.sendall(sent)

    def receive(self, size_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < size_bytes:
            part = self.connection.recv(size_bytes - len(received))
            if not part:
                raise ConnectionResetError(f"the connection ended after {len(received)} of {size_bytes} bytes")
            received += part
        return bytes(received)

    def receive_status(self) -> None:
        if self.receive(1) == BULK_ACCEPTED:
            return
        [length] = BULK_REASON.unpack(self.receive(BULK_REASON.size))
        reason = self.receive(length).decode()
        self.connection.shutdown(socket.SHUT_WR)
        assert self.is_at_end(), "a refusal closes the connection"
        raise BulkRefused(reason)

    def is_at_end(self) -> bool:
        """Whether the daemon ends the connection; waits for that."""
        try:
            return self.connection.recv(1) == b""
        except ConnectionError:
            return True
        except TimeoutError:
            return False

    def send_request(
        self, kind: BulkKind, keys: Sequence[bytes], sizes: Sequence[int], *, timeout_s: float = CALL_S
    ) -> None:
        packed, key_bytes = pack_keys(keys)
        self.send(BULK_REQUEST.pack(kind, key_bytes, len(keys), int(timeout_s * 1000)) + packed + pack_numbers(sizes))

    def request(
        self, kind: BulkKind, keys: Sequence[bytes], sizes: Sequence[int], *, timeout_s: float = CALL_S
    ) -> None:
        self.send_request(kind, keys, sizes, timeout_s=timeout_s)
        self.receive_status()

    def move(
        self,
        kind: BulkKind,
        region_id: int,
        keys: Sequence[bytes],
        offsets: Sequence[int],
        sizes: Sequence[int],
        *,
        timeout_s: float = CALL_S,
    ) -> list[Outcome]:
        """Registered memory."""
        self.send_request(kind, keys, sizes, timeout_s=timeout_s)
        self.send(pack_numbers(offsets) + BULK_REGION.pack(region_id))
        self.receive_status()
        return outcomes_of(self.receive(len(keys)))

    def begin_put(self, keys: Sequence[bytes], sizes: Sequence[int], *, timeout_s: float = CALL_S) -> list[Outcome]:
        """Which objects the daemon wants: those that are OK."""
        self.request(BulkKind.PUT, keys, sizes, timeout_s=timeout_s)
        return outcomes_of(self.receive(len(keys)))

    def send_object(self, key: bytes, payload: bytes) -> None:
        self.send(payload + BULK_CHECKSUM.pack(payload_checksum(key, payload)))

    def end_put(self, count: int) -> list[Outcome]:
        self.receive_status()
        return outcomes_of(self.receive(count))

    def receive_object(self, keys: Sequence[bytes], sizes: Sequence[int]) -> tuple[int, bytes | Outcome]:
        """One object of a get: where it stands in the request, and its payload or outcome."""
        index, outcome = BULK_OBJECT.unpack(self.receive(BULK_OBJECT.size))
        if outcome != Outcome.OK:
            return index, Outcome(outcome)
        payload = self.receive(sizes[index])
        [checksum] = BULK_CHECKSUM.unpack(self.receive(BULK_CHECKSUM.size))
        assert payload_checksum(keys[index], payload) == checksum
        return index, payload

    def close(self) -> None:
        self.connection.close()


def outcomes_of(raw: bytes) -> list[Outcome]:
    return [Outcome(value) for value in raw]
