"""A small hicached: the protocol for real over a dict, with faults that a test turns on. Never the product."""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import BinaryIO

import grpc

from hicache.checksum import payload_checksum
from hicache.outcome import Outcome
from hicache.wire import hicached_pb2 as wire
from hicache.wire.bulk import (
    BULK_ACCEPTED,
    BULK_CHECKSUM,
    BULK_HELLO,
    BULK_NUMBER_BYTES,
    BULK_OBJECT,
    BULK_REGION,
    BULK_REQUEST,
    BulkKind,
    unpack_numbers,
)
from hicache.wire.hicached_pb2_grpc import HiCachedServicer, add_HiCachedServicer_to_server
from hicache.wire.protocol import (
    MEMORY_ACCEPTED,
    MEMORY_HELLO,
    MEMORY_REFUSED,
    MEMORY_STATUS_OK,
    MEMORY_STATUS_REFUSED,
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    server_options,
    split_keys,
)
from tests.client.small_parts import Faults, Region, _refused, _unix_listener

MIB = 1 << 20


class SmallDaemon(HiCachedServicer):
    """Serves until ``stop``. ``objects`` is the store, shared by daemons that are started one after another."""

    def __init__(
        self,
        folder: Path,
        *,
        objects: dict[bytes, bytes] | None = None,
        token: str = "",
        tcp: bool = False,
        has_memory_socket: bool = True,
        limits: wire.Limits | None = None,
    ) -> None:
        self.folder = folder
        self.objects = {} if objects is None else objects
        self.token = token
        self.faults = Faults()
        self.limits = limits or wire.Limits(
            object_bytes_max=64 * MIB,
            batch_keys_max=4096,
            batch_bytes_max=256 * MIB,
            lease_ms_max=60_000,
            key_bytes_max=112,
        )
        self.requests: dict[str, list[object]] = {}
        self.sessions: dict[bytes, list[Region]] = {}
        self._regions: dict[int, Region] = {}
        self._region_count = 0
        self._lock = threading.Lock()
        self._has_memory_socket = has_memory_socket
        self.memory_path = str(folder / "memory.sock")
        self.bulk_path = str(folder / "bulk.sock")
        self._tcp = tcp
        self._listeners: list[socket.socket] = []
        self.bulk_connections: set[socket.socket] = set()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(64),
            options=server_options(message_bytes_max=MESSAGE_BYTES_MAX, keepalive_ms=20_000),
        )
        add_HiCachedServicer_to_server(self, self._server)
        self.address = self._bind(tcp=tcp)

    def start(self) -> SmallDaemon:
        if self._has_memory_socket:
            self._listen(_unix_listener(self.memory_path), self._serve_memory)
        bulk = socket.create_server(("127.0.0.1", 0)) if self._tcp else _unix_listener(self.bulk_path)
        self._bulk_port = bulk.getsockname()[1] if self._tcp else 0
        self._listen(bulk, self._serve_bulk)
        self._server.start()
        return self

    def stop(self) -> None:
        """As a daemon that ends in good order; memory connections end when their regions are untouched."""
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self._listeners.clear()
        for connection in list(self.bulk_connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.stop(grace=0).wait(10)

    def _listen(self, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        self._listeners.append(listener)
        threading.Thread(target=self._accept, args=(listener, serve), daemon=True).start()

    def _bind(self, *, tcp: bool) -> str:
        if tcp:
            return f"tcp://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        path = self.folder / "hicached.sock"
        path.unlink(missing_ok=True)
        self._server.add_insecure_port(f"unix:{path}")
        return f"unix://{path}"

    # the service

    def Session(
        self, request_iterator: Iterator[wire.SessionRequest], context: grpc.ServicerContext
    ) -> Iterator[wire.SessionEvent]:
        hello = next(request_iterator).hello
        self._note("session", hello, context)
        if hello.token != self.token:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "BAD_TOKEN: no tenant has this token")
        if hello.protocol_version != PROTOCOL_VERSION:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_VERSION: this daemon speaks another one")
        secret = os.urandom(32)
        self.sessions[secret] = []
        try:
            yield wire.SessionEvent(
                welcome=wire.Welcome(
                    session_id=len(self.sessions),
                    session_secret=secret,
                    tenant="default",
                    memory_socket=self.memory_path if self._has_memory_socket else "",
                    bulk_socket="" if self._tcp else self.bulk_path,
                    bulk_port=self._bulk_port,
                    limits=self.limits,
                    store_id=b"s" * 16,
                    daemon_version="small",
                )
            )
            for _ in request_iterator:
                pass
        except grpc.RpcError:
            pass
        finally:
            self.sessions.pop(secret, None)

    def Lookup(self, request: wire.LookupRequest, context: grpc.ServicerContext) -> wire.LookupReply:
        self._note("lookup", request, context)
        self._authenticate(request.session_secret, context)
        keys = split_keys(request.keys, request.key_bytes)
        if len(keys) > self.limits.batch_keys_max:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "BATCH_TOO_LARGE: too many keys")
        self.faults.before_reply("lookup")
        outcomes = bytes(Outcome.OK if key in self.objects else Outcome.ABSENT for key in keys)
        return wire.LookupReply(outcomes=outcomes, lease_id=1)

    def Delete(self, request: wire.KeysRequest, context: grpc.ServicerContext) -> wire.OutcomesReply:
        self._note("delete", request, context)
        self._authenticate(request.session_secret, context)
        keys = split_keys(request.keys, request.key_bytes)
        dropped = [self.objects.pop(key, None) for key in keys]
        return wire.OutcomesReply(outcomes=bytes(Outcome.ABSENT if it is None else Outcome.OK for it in dropped))

    def Lease(self, request: wire.LeaseRequest, context: grpc.ServicerContext) -> wire.LeaseReply:
        self._note("lease", request, context)
        self._authenticate(request.session_secret, context)
        self.faults.before_reply("lease")
        return wire.LeaseReply(held=request.lease_id == 1)

    def Watch(self, request: wire.WatchRequest, context: grpc.ServicerContext) -> Iterator[wire.WatchEvents]:
        self._note("watch", request, context)
        self._authenticate(request.session_secret, context)
        if self.faults.watch is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "NOT_SUPPORTED: this daemon has no watches")
            raise AssertionError("abort raises")
        yield from self.faults.watch()

    def Stats(self, request: wire.StatsRequest, context: grpc.ServicerContext) -> wire.StatsReply:
        self._note("stats", request, context)
        self._authenticate(request.session_secret, context)
        self.faults.before_reply("stats")
        return wire.StatsReply(objects=len(self.objects))

    # inside

    def _note(self, operation: str, request: object, context: grpc.ServicerContext) -> None:
        with self._lock:
            self.requests.setdefault(operation, []).append(request)
        if operation in self.faults.refuse:
            context.abort(*self.faults.refuse[operation])

    def _authenticate(self, secret: bytes, context: grpc.ServicerContext) -> None:
        if secret not in self.sessions:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "UNKNOWN_SESSION: this daemon did not open it")

    def _transfer(
        self,
        operation: str,
        keys: list[bytes],
        offsets: Sequence[int],
        sizes: Sequence[int],
        region_id: int,
        move: Callable[[mmap.mmap, bytes, int, int], Outcome],
    ) -> bytes:
        """The answer to a request about registered memory."""
        with self._lock:
            self.requests.setdefault(operation, []).append(keys)
        if operation in self.faults.refuse:
            return _refused(self.faults.refuse[operation][1])
        region = self._regions.get(region_id)
        if region is None:
            return _refused("UNKNOWN_REGION: it was detached")
        late = self.faults.late(operation)
        holding = threading.Event()
        outcomes: list[Outcome] = []

        def work() -> None:
            with region.held() as is_held:
                holding.set()
                if late is not None:
                    late.wait(30)
                self.faults.before_bytes(operation)
                for key, offset, size in zip(keys, offsets, sizes, strict=True):
                    outcomes.append(move(region.mapping, key, offset, size) if is_held else Outcome.CANCELLED)

        if late is not None:
            threading.Thread(target=work, daemon=True).start()
            holding.wait(10)
            return BULK_ACCEPTED + bytes([Outcome.DEADLINE] * len(keys))
        work()
        self.faults.before_reply(operation)
        return BULK_ACCEPTED + self.faults.outcomes(bytes(outcomes))

    def _read_one(self, mapping: mmap.mmap, key: bytes, offset: int, size: int) -> Outcome:
        payload = self.objects.get(key)
        if payload is None:
            return Outcome.ABSENT
        if len(payload) != size:
            return Outcome.SIZE_MISMATCH
        mapping[offset : offset + size] = payload
        return Outcome.OK

    def _write_one(self, mapping: mmap.mmap, key: bytes, offset: int, size: int) -> Outcome:
        return self._store(key, mapping[offset : offset + size])

    def _store(self, key: bytes, payload: bytes) -> Outcome:
        if key in self.objects:
            return Outcome.EXISTS
        self.objects[key] = payload
        return Outcome.OK

    def _accept(self, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    def _serve_bulk(self, connection: socket.socket) -> None:
        self.bulk_connections.add(connection)
        try:
            with connection, connection.makefile("rb") as received, contextlib.suppress(OSError):
                _, secret = BULK_HELLO.unpack(received.read(BULK_HELLO.size))
                if secret not in self.sessions or "bulk" in self.faults.refuse:
                    _, reason = self.faults.refuse.get("bulk", (None, "UNKNOWN_SESSION: this daemon did not open it"))
                    connection.sendall(_refused(reason))
                    return
                connection.sendall(BULK_ACCEPTED)
                while header := received.read(BULK_REQUEST.size):
                    if not self._answer_bulk(connection, received, header):
                        return
        finally:
            self.bulk_connections.discard(connection)

    def _answer_bulk(self, connection: socket.socket, received: BinaryIO, header: bytes) -> bool:
        kind, key_bytes, count, _ = BULK_REQUEST.unpack(header)
        keys = split_keys(received.read(key_bytes * count), key_bytes)
        sizes = unpack_numbers(received.read(BULK_NUMBER_BYTES * count))
        if kind in (BulkKind.LOAD, BulkKind.STORE):
            offsets = unpack_numbers(received.read(BULK_NUMBER_BYTES * count))
            [region_id] = BULK_REGION.unpack(received.read(BULK_REGION.size))
            operation, move = ("get", self._read_one) if kind == BulkKind.LOAD else ("put", self._write_one)
            answer = self._transfer(operation, keys, offsets, sizes, region_id, move)
            connection.sendall(answer)
            return answer.startswith(BULK_ACCEPTED)
        operation = "get_stream" if kind == BulkKind.GET else "put_stream"
        with self._lock:
            self.requests.setdefault(operation, []).append(keys)
        connection.sendall(BULK_ACCEPTED)
        if kind == BulkKind.GET:
            objects = [
                self._object_of(index, key, size) for index, (key, size) in enumerate(zip(keys, sizes, strict=True))
            ]
            end = self.faults.objects_end  # of this call: the client may arm that of its next one when it has all bytes
            for sent in self.faults.objects(objects):
                connection.sendall(sent)
            return end()
        outcomes = [Outcome.EXISTS if key in self.objects else Outcome.OK for key in keys]
        connection.sendall(bytes(outcomes))
        for index, (key, size) in enumerate(zip(keys, sizes, strict=True)):
            if outcomes[index] is Outcome.OK:
                payload = received.read(size)
                [checksum] = BULK_CHECKSUM.unpack(received.read(BULK_CHECKSUM.size))
                is_right = payload_checksum(key, payload) == checksum
                outcomes[index] = self._store(key, payload) if is_right else Outcome.CORRUPT
        self.faults.before_reply("put_stream")
        connection.sendall(BULK_ACCEPTED + bytes(outcomes))
        return True

    def _object_of(self, index: int, key: bytes, size: int) -> bytes:
        payload = self.objects.get(key)
        if payload is None or len(payload) != size:
            return BULK_OBJECT.pack(index, Outcome.ABSENT if payload is None else Outcome.SIZE_MISMATCH)
        return BULK_OBJECT.pack(index, Outcome.OK) + payload + BULK_CHECKSUM.pack(payload_checksum(key, payload))

    def _serve_memory(self, connection: socket.socket) -> None:
        with connection:
            hello, descriptors, _, _ = socket.recv_fds(connection, MEMORY_HELLO.size, 1)
            secret, size_bytes = MEMORY_HELLO.unpack(hello)
            with contextlib.ExitStack() as opened:
                for descriptor in descriptors:
                    opened.callback(os.close, descriptor)
                if self.faults.refuse_memory or secret not in self.sessions:
                    reason = (self.faults.refuse_memory or "unknown session").encode()
                    connection.sendall(MEMORY_REFUSED.pack(MEMORY_STATUS_REFUSED, len(reason)) + reason)
                    return
                region = Region(mmap.mmap(descriptors[0], size_bytes))
            with self._lock:
                self._region_count += 1
                region_id = self._region_count
                self._regions[region_id] = region
            with contextlib.suppress(OSError):
                connection.sendall(MEMORY_ACCEPTED.pack(MEMORY_STATUS_OK, region_id))
                while connection.recv(1):
                    pass
            del self._regions[region_id]
            region.detach()


def main() -> None:
    """A small daemon as a process of its own, for what only a process can suffer. Ends with its standard input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    daemon = SmallDaemon(arguments.folder).start()
    sys.stdout.buffer.write(struct.pack("<I", len(daemon.address)) + daemon.address.encode())
    sys.stdout.buffer.flush()
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
