"""Whatever strangers and clients send to a running daemon, it serves the next one as if nothing had been."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc

from hicache.backends.open import open_store
from hicache.backends.tenant_limits import StoreLimits
from hicache.daemon.config import DaemonConfig
from hicache.daemon.recovery import OpenedStore
from hicache.daemon.store_look import StoreLook
from hicache.outcome import Outcome
from hicache.wire import hicached_pb2 as pb
from hicache.wire.bulk import BULK_HELLO, BULK_MAGIC, PEER_MAGIC
from hicache.wire.protocol import MEMORY_HELLO
from tests.daemon.client import Client
from tests.daemon.raw_links import object_key
from tests.daemon.rig import DaemonThread
from tests.security.fuzz.parsers import _HELLO, Target, _request_seeds

PAYLOAD = b"what must never change" * 100
ANSWER_S = 0.02  # what does not answer by then waits for more


class Attacked:
    """A daemon with one honest client, whose object must stay as it is."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.daemon = DaemonThread(folder, _open)
        stack.callback(self.daemon.stop)
        self.client = stack.enter_context(Client(self.daemon.target))
        assert self.client.put_stream([object_key(1)], [PAYLOAD]) == [Outcome.OK]
        self.channel = stack.enter_context(grpc.insecure_channel(self.daemon.target))
        self.runs = 0

    def check(self) -> None:
        """Everybody is served, and nothing failed inside."""
        assert self.client.get_stream([object_key(1)], [len(PAYLOAD)]) == [PAYLOAD]
        assert _internal_errors(self.daemon) == 0

    def checked(self, attack: Callable[[bytes], object]) -> Callable[[bytes], None]:
        """The same, with a look at the honest client now and then."""

        def run(data: bytes) -> None:
            attack(data)
            self.runs += 1
            if self.runs % 32 == 0:
                self.check()

        return run

    def bulk_hello(self, data: bytes) -> None:
        """From somebody who has not said who he is."""
        _exchange(self.daemon.config.bulk_socket, data)

    def bulk_call(self, data: bytes) -> None:
        """From a client within its session."""
        _exchange(self.daemon.config.bulk_socket, BULK_HELLO.pack(BULK_MAGIC, self.client.secret) + data)

    def memory_hello(self, data: bytes) -> None:
        """With descriptors, some of which are no memory."""
        kinds = [os.memfd_create, lambda name: os.open("/dev/null", os.O_RDWR), lambda name: os.eventfd(0)]
        descriptors = [kinds[number % 3]("fuzz") for number in data[-1:] * (len(data) % 4)]
        secret = self.client.secret if data[:1] < b"\x80" else b""
        try:
            _exchange(self.daemon.config.memory_socket, secret + data, descriptors=descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def grpc_message(self, data: bytes) -> None:
        """As the request of each unary method, with a secret that is right or not."""
        secret = b"\x0a\x20" + self.client.secret if data[:1] < b"\xc0" else b""
        for method in ("Lookup", "Lease", "Pin", "Stats"):
            with contextlib.suppress(grpc.RpcError):
                self.channel.unary_unary(f"/hicached.v1.HiCached/{method}")(secret + data, timeout=5)

    def grpc_hello(self, data: bytes) -> None:
        """As what a session begins with."""
        stream = self.channel.stream_stream("/hicached.v1.HiCached/Session")(iter([data]), timeout=5)
        with contextlib.suppress(grpc.RpcError):
            for _ in stream:
                pass

    def http_request(self, data: bytes) -> None:
        """As bytes, and as a body."""
        host, _, port = self.daemon.ready.http.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.settimeout(ANSWER_S)
            with contextlib.suppress(OSError):
                connection.sendall(data)
                connection.recv(4096)

    def targets(self) -> Iterator[Target]:
        """What to try, with what is nearly right."""
        lookup = pb.LookupRequest(keys=b"k" * 72, key_bytes=36, lease_ms=5).SerializeToString()
        requests = tuple(_request_seeds())
        hellos = (BULK_HELLO.pack(BULK_MAGIC, b"w" * 32), BULK_HELLO.pack(PEER_MAGIC, b""))
        web = (
            b"GET /v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
            b"POST /v1/drain HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: 20\r\nAuthorization: Bearer x\r\n\r\n" + b'{"within_s": 1}' + b" " * 5,
        )
        for name, attack, seeds in (
            ("bulk_hello", self.bulk_hello, hellos),
            ("bulk_call", self.bulk_call, requests),
            (
                "memory_hello",
                self.memory_hello,
                (MEMORY_HELLO.pack(b"w" * 32, 4096)[32:], MEMORY_HELLO.pack(b"w" * 32, 1)),
            ),
            ("grpc_message", self.grpc_message, (lookup,)),
            ("grpc_hello", self.grpc_hello, (_HELLO,)),
            ("http_request", self.http_request, web),
        ):
            yield Target(name, self.checked(attack), seeds)


@contextmanager
def attacked() -> Iterator[Attacked]:
    """Stopped, and seen to be well, at the end."""
    with tempfile.TemporaryDirectory(prefix="hf-") as folder, ExitStack() as stack:
        victim = Attacked(Path(folder), stack)
        yield victim
        victim.check()


def _exchange(path: str, data: bytes, *, descriptors: list[int] | None = None) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(5)
        connection.connect(path)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        with contextlib.suppress(OSError):
            connection.sendmsg([data or b"\0"], rights)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(ANSWER_S)
            while connection.recv(65_536):
                pass


def _internal_errors(daemon: DaemonThread) -> float:
    samples = [sample for family in daemon.daemon.metrics.registry.collect() for sample in family.samples]
    return sum(sample.value for sample in samples if sample.labels.get("result") == "error")


def _open(config: DaemonConfig, limits: StoreLimits) -> OpenedStore:
    store = open_store(
        config.backend_url,
        capacity_bytes=config.capacity_bytes,
        object_bytes_max=config.object_bytes_max,
        free_space_floor_bytes=0,
        limits=limits,
    )
    return OpenedStore(store, store.store_id, StoreLook.at(store))
