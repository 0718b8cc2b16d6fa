"""A raw client of hicached: the generated stubs and the memory socket, with nothing clever between."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self

import grpc
import msgspec

from hicache.keys import FieldValue
from hicache.outcome import Outcome
from hicache.spec import namespace_digest
from hicache.wire import hicached_pb2 as pb
from hicache.wire.bulk import (
    BULK_CONNECTIONS_PER_SESSION_MAX,
    BulkKind,
)
from hicache.wire.hicached_pb2_grpc import HiCachedStub
from hicache.wire.protocol import (
    PROTOCOL_VERSION,
    SALT_FINGERPRINT_BYTES,
    channel_options,
    pack_keys,
    parse_refusal,
)
from tests.daemon.raw_links import CALL_S, Attachment, Bulk, Memory, outcomes_of

DESCRIPTOR: dict[str, FieldValue] = {
    "format_version": 1,
    "model": "tiny",
    "revision": "1",
    "page_tokens": 64,
    "key_hash": "blake2b",
}


def refusal_code(error: grpc.RpcError) -> str:
    """The code of a typed refusal; fails the test when it is some other error."""
    parsed = parse_refusal(error.details())
    assert parsed is not None, f"not a typed refusal: {error.code()} {error.details()}"
    return str(parsed[0])


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
