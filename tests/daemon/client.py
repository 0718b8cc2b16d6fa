"""A raw client of hicached: the generated stubs and the memory socket, with nothing clever between."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self

import grpc
import msgspec

from hicache.checksum import payload_checksum
from hicache.keys import FieldValue
from hicache.outcome import Outcome
from hicache.spec import namespace_digest
from hicache.wire import hicached_pb2 as pb
from hicache.wire.bulk import (
    BULK_ACCEPTED,
    BULK_CHECKSUM,
    BULK_CONNECTIONS_PER_SESSION_MAX,
    BULK_HELLO,
    BULK_MAGIC,
    BULK_OBJECT,
    BULK_REASON,
    BULK_REGION,
    BULK_REQUEST,
    BulkKind,
    pack_numbers,
)
from hicache.wire.hicached_pb2_grpc import HiCachedStub
from hicache.wire.protocol import (
    MEMORY_ACCEPTED,
    MEMORY_HELLO,
    MEMORY_REFUSED,
    MEMORY_STATUS_OK,
    PROTOCOL_VERSION,
    SALT_FINGERPRINT_BYTES,
    channel_options,
    pack_keys,
    parse_refusal,
)

CALL_S = 20.0
EOF_S = 20.0

DESCRIPTOR: dict[str, FieldValue] = {
    "format_version": 1,
    "model": "tiny",
    "revision": "1",
    "page_tokens": 64,
    "key_hash": "blake2b",
}


def object_key(number: int, *, length: int = 36) -> bytes:
    """A key as clients make them, told apart by ``number``."""
    return number.to_bytes(8, "big").rjust(length, b"k")


def payload_of(number: int, size_bytes: int) -> bytes:
    """Bytes that differ for each number, at every position that matters."""
    seed = (number * 2654435761 + 1).to_bytes(8, "little", signed=False)
    return (seed * (size_bytes // 8 + 1))[:size_bytes]


def refusal_code(error: grpc.RpcError) -> str:
    """The code of a typed refusal; fails the test when it is some other error."""
    parsed = parse_refusal(error.details())
    assert parsed is not None, f"not a typed refusal: {error.code()} {error.details()}"
    return str(parsed[0])


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


class Client:
    """One session. ``target`` is a gRPC target: ``unix:/path`` or ``host:port``."""

    def __init__(
        self,
        target: str,
        *,
        token: str = "",
        descriptor: dict[str, FieldValue] | None = None,
        name: str = "test",
        version: int = PROTOCOL_VERSION,
        digest: bytes | None = None,
        raw_descriptor: bytes | None = None,
        deployment: str = "",
        salt_fingerprint: bytes = b"s" * SALT_FINGERPRINT_BYTES,
    ) -> None:
        described = DESCRIPTOR if descriptor is None else descriptor
        hello = pb.Hello(
            protocol_version=version,
            token=token,
            namespace_digest=namespace_digest(described) if digest is None else digest,
            namespace_descriptor=msgspec.msgpack.encode(described) if raw_descriptor is None else raw_descriptor,
            client_name=name,
            deployment=deployment,
            salt_fingerprint=salt_fingerprint,
        )
        self.channel = grpc.insecure_channel(target, options=channel_options())
        self.stub = HiCachedStub(self.channel)
        self._requests: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        self._requests.put(pb.SessionRequest(hello=hello))
        self._attachments: list[Attachment] = []
        self._target = target
        self._bulks: list[Bulk] = []
        self._idle_bulks: list[Bulk] = []
        self._bulk_slots = threading.Semaphore(BULK_CONNECTIONS_PER_SESSION_MAX)
        self.stream = self.stub.Session(iter(self._requests.get, None))
        try:
            self.welcome = next(self.stream).welcome
        except BaseException:
            self.close()
            raise
        self.secret = self.welcome.session_secret

    def attach(self, memory: Memory, *, size_bytes: int | None = None) -> Attachment:
        size = memory.size_bytes if size_bytes is None else size_bytes
        attachment = Attachment(self.welcome.memory_socket, self.secret, [memory.fd], size)
        self._attachments.append(attachment)
        return attachment

    def lookup(
        self, keys: Sequence[bytes], *, lease_ms: int = 0, timeout_s: float = CALL_S
    ) -> tuple[list[Outcome], int]:
        packed, key_bytes = pack_keys(keys)
        request = pb.LookupRequest(session_secret=self.secret, keys=packed, key_bytes=key_bytes, lease_ms=lease_ms)
        reply = self.stub.Lookup(request, timeout=timeout_s)
        return outcomes_of(reply.outcomes), reply.lease_id

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        return [outcome is Outcome.OK for outcome in self.lookup(keys)[0]]

    def put(
        self,
        region_id: int,
        keys: Sequence[bytes],
        offsets: Sequence[int],
        sizes: Sequence[int],
        *,
        timeout_s: float = CALL_S,
    ) -> list[Outcome]:
        with self._idle_bulk() as bulk:
            return bulk.move(BulkKind.STORE, region_id, keys, offsets, sizes, timeout_s=timeout_s)

    def get(
        self,
        region_id: int,
        keys: Sequence[bytes],
        offsets: Sequence[int],
        sizes: Sequence[int],
        *,
        timeout_s: float = CALL_S,
    ) -> list[Outcome]:
        with self._idle_bulk() as bulk:
            return bulk.move(BulkKind.LOAD, region_id, keys, offsets, sizes, timeout_s=timeout_s)

    def begin(self, call: Callable[..., list[Outcome]], *arguments: object) -> Future[list[Outcome]]:
        """A call, such as ``put``, in a thread of its own."""
        future: Future[list[Outcome]] = Future()

        def run() -> None:
            try:
                future.set_result(call(*arguments))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future

    def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        packed, key_bytes = pack_keys(keys)
        request = pb.KeysRequest(session_secret=self.secret, keys=packed, key_bytes=key_bytes)
        return outcomes_of(self.stub.Delete(request, timeout=CALL_S).outcomes)

    def lease(self, lease_id: int, *, lease_ms: int) -> bool:
        request = pb.LeaseRequest(session_secret=self.secret, lease_id=lease_id, lease_ms=lease_ms)
        return bool(self.stub.Lease(request, timeout=CALL_S).held)

    def pin(self, keys: Sequence[bytes], *, pin_ms: int) -> list[Outcome]:
        packed, key_bytes = pack_keys(keys)
        request = pb.PinRequest(session_secret=self.secret, keys=packed, key_bytes=key_bytes, pin_ms=pin_ms)
        return outcomes_of(self.stub.Pin(request, timeout=CALL_S).outcomes)

    def watch(self, *, snapshot: bool = False) -> Iterator[pb.WatchEvents]:
        """Ends with its session, or after CALL_S."""
        request = pb.WatchRequest(session_secret=self.secret, snapshot=snapshot)
        yield from self.stub.Watch(request, timeout=CALL_S)

    def stats(self) -> pb.StatsReply:
        return self.stub.Stats(pb.StatsRequest(session_secret=self.secret), timeout=CALL_S)

    def bulk(self) -> Bulk:
        """A new connection to the bulk socket; closed with the client."""
        bulk = Bulk(self.bulk_address, self.secret)
        self._bulks.append(bulk)
        return bulk

    @contextlib.contextmanager
    def _idle_bulk(self) -> Iterator[Bulk]:
        """A connection for one call, as many at a time as a session may have."""
        with self._bulk_slots:
            try:
                bulk = self._idle_bulks.pop()
            except IndexError:
                bulk = self.bulk()
            try:
                yield bulk
            except BaseException:
                bulk.close()
                raise
            self._idle_bulks.append(bulk)

    def put_stream(self, keys: Sequence[bytes], payloads: Sequence[bytes]) -> list[Outcome]:
        with self._idle_bulk() as bulk:
            known = bulk.begin_put(keys, [len(payload) for payload in payloads])
            for key, payload, outcome in zip(keys, payloads, known, strict=True):
                if outcome is Outcome.OK:
                    bulk.send_object(key, payload)
            return bulk.end_put(len(keys))

    def get_stream(
        self, keys: Sequence[bytes], sizes: Sequence[int], *, timeout_s: float = CALL_S
    ) -> list[bytes | Outcome]:
        """The payload of each object, checked against its checksum, or its outcome."""
        with self._idle_bulk() as bulk:
            bulk.request(BulkKind.GET, keys, sizes, timeout_s=timeout_s)
            results: list[bytes | Outcome | None] = [None] * len(keys)
            for _ in keys:
                index, result = bulk.receive_object(keys, sizes)
                assert results[index] is None
                results[index] = result
        return [result for result in results if result is not None]

    @property
    def bulk_address(self) -> str | tuple[str, int]:
        if self.welcome.bulk_socket:
            return self.welcome.bulk_socket
        return self._target.rpartition(":")[0], self.welcome.bulk_port

    def close(self) -> None:
        self._requests.put(None)
        for bulk in self._bulks:
            bulk.close()
        for attachment in self._attachments:
            attachment.close()
        with contextlib.suppress(grpc.RpcError):
            for _ in self.stream:
                pass
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def outcomes_of(raw: bytes) -> list[Outcome]:
    return [Outcome(value) for value in raw]
