"""Clients that die, lie, flood and never read: only they suffer."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
import secrets
import select
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import grpc
import pytest

from hicache.daemon.bulk_calls import IDLE_STAGING_SHARE
from hicache.daemon.config import DaemonConfig
from hicache.daemon.process_limits import raise_open_files_limit
from hicache.outcome import Outcome
from hicache.wire import hicached_pb2 as pb
from hicache.wire.bulk import BULK_REQUEST, BulkKind
from hicache.wire.protocol import MEMORY_HELLO, pack_keys
from tests.daemon.client import Client
from tests.daemon.raw_links import CALL_S, Attachment, Bulk, BulkRefused, Memory, MemoryRefused, object_key, payload_of
from tests.daemon.rig import http_get, wait_until
from tests.faults.besieged import BOB, MALLORY, MIB, Besieged, victims

SEED = int(os.environ.get("HICACHE_TEST_SEED", Random().randrange(2**32)))
CONNECTIONS = 400  # to each socket
LOG_LINES_MAX = 100  # but for those about sessions
# Of the daemon's own memory over all of it, with the staging memory that it keeps.
GROWTH_BYTES_MAX = 96 * MIB + DaemonConfig().inflight_bytes_max // IDLE_STAGING_SHARE
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.fixture(scope="module")
def besieged_daemon() -> Iterator[Besieged]:
    with TemporaryDirectory(prefix="hh-") as folder, contextlib.closing(Besieged(Path(folder))) as besieged:
        yield besieged


@pytest.fixture
def besieged(besieged_daemon: Besieged) -> Iterator[Besieged]:
    """In the end the daemon is as before, and the neighbours have got everything right, and go on."""
    with contextlib.ExitStack() as working:
        for neighbour in besieged_daemon.neighbours:
            working.enter_context(neighbour)
        yield besieged_daemon
        besieged_daemon.let_neighbours_work()
    assert [neighbour.wrong for neighbour in besieged_daemon.neighbours] == [[], []]
    assert besieged_daemon.daemon.process.poll() is None, besieged_daemon.daemon.log
    wait_until(besieged_daemon.is_as_before, what=f"{besieged_daemon.base}, but {besieged_daemon.readings()}")
    assert besieged_daemon.read_own_bytes() < besieged_daemon.own_bytes + GROWTH_BYTES_MAX
    log = besieged_daemon.daemon.log
    assert "Traceback" not in log
    assert log.count("\n") - log.count(" session ") < LOG_LINES_MAX, "nobody fills the log"


@pytest.fixture
def mallory(besieged: Besieged) -> Iterator[Client]:
    with Client(besieged.daemon.target, token=MALLORY) as client:
        yield client


class TestDeath:
    def test_clients_that_are_killed_in_the_middle_of_transfers(self, besieged: Besieged) -> None:
        random = Random(SEED)
        for _ in range(3):
            with victims(besieged) as processes:
                for process in random.sample(processes, len(processes)):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(random.uniform(0, 0.1))
                    process.kill()

    def test_clients_that_stop_and_never_read_again(self, besieged: Besieged) -> None:
        with victims(besieged) as processes:
            besieged.let_neighbours_work()
            for process in processes:
                process.send_signal(signal.SIGSTOP)
            for _ in range(3):
                besieged.let_neighbours_work()


@contextlib.contextmanager
def descriptor(make: Callable[[], int]) -> Iterator[int]:
    opened = make()
    try:
        yield opened
    finally:
        os.close(opened)


def memfd(*, size_bytes: int = MIB, seals: int = fcntl.F_SEAL_SHRINK, has_pages: bool = True) -> int:
    made = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(made, size_bytes)
    if has_pages and size_bytes:
        os.posix_fallocate(made, 0, size_bytes)
    if seals:
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, seals)
    return made


def reopened(made: int, flags: int) -> int:
    """Another descriptor of a memfd, with other rights."""
    try:
        return os.open(f"/proc/self/fd/{made}", flags)
    finally:
        os.close(made)


def epoll() -> int:
    with select.epoll() as polled:
        return os.dup(polled.fileno())


class TestMemory:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: os.open("/dev/zero", os.O_RDWR),
            lambda: os.open("/dev/shm", os.O_RDWR | os.O_TMPFILE),
            lambda: os.open("/", os.O_RDONLY | os.O_DIRECTORY),
            lambda: os.eventfd(1),
            epoll,
            lambda: memfd(seals=0),
            lambda: memfd(seals=fcntl.F_SEAL_GROW),
            lambda: memfd(has_pages=False),
            lambda: memfd(size_bytes=2**46, has_pages=False),
            lambda: memfd(size_bytes=0),
            lambda: memfd(seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE),
            lambda: reopened(memfd(), os.O_RDONLY),
            lambda: reopened(memfd(), os.O_PATH),
        ],
        ids=[
            "zeros",
            "a file without a name",
            "a directory",
            "an eventfd",
            "an epoll",
            "may shrink",
            "may shrink and not grow",
            "sparse",
            "huge and sparse",
            "empty",
            "sealed against writing",
            "read only",
            "a path",
        ],
    )
    @pytest.mark.parametrize("size_bytes", [MIB, 2**64 - 1])
    def test_what_is_no_memory_is_refused(self, mallory: Client, make: Callable[[], int], size_bytes: int) -> None:
        with descriptor(make) as offered, pytest.raises(MemoryRefused):
            Attachment(mallory.welcome.memory_socket, mallory.secret, [offered], size_bytes)

    def test_pages_that_are_taken_away_during_transfers(self, mallory: Client) -> None:
        count = 16
        keys = [object_key(number) for number in range(count)]
        offsets, sizes = [number * MIB for number in range(count)], [MIB] * count
        is_over = threading.Event()

        def punch(memory: Memory) -> None:
            while not is_over.is_set():
                memory.bytes.madvise(mmap.MADV_REMOVE, 0, memory.size_bytes)

        with Memory(count * MIB, seals=fcntl.F_SEAL_SHRINK) as memory, ThreadPoolExecutor(1) as pool:
            region = mallory.attach(memory).region_id
            punching = pool.submit(punch, memory)
            for _ in range(5):
                assert set(mallory.put(region, keys, offsets, sizes)) <= {Outcome.OK, Outcome.EXISTS, Outcome.CORRUPT}
                assert set(mallory.get(region, keys, offsets, sizes)) <= {Outcome.OK, Outcome.ABSENT, Outcome.CORRUPT}
                mallory.delete(keys)
            is_over.set()
            punching.result()
            memory.bytes[:MIB] = payload_of(1, MIB)
            assert mallory.put(region, keys[:1], [0], [MIB]) == [Outcome.OK]
            assert mallory.get(region, keys[:1], [MIB], [MIB]) == [Outcome.OK]
            assert memory.bytes[MIB : 2 * MIB] == payload_of(1, MIB)

    def test_memory_that_grows_is_used_as_far_as_it_was_attached(self, mallory: Client) -> None:
        with Memory(MIB, seals=fcntl.F_SEAL_SHRINK) as memory:
            region = mallory.attach(memory).region_id
            os.ftruncate(memory.fd, 2**40)
            assert mallory.put(region, [object_key(1)] * 2, [MIB, MIB - 1], [1, 2]) == [Outcome.BAD_RANGE] * 2

    def test_floods_of_descriptors(self, besieged: Besieged, mallory: Client) -> None:
        with Memory(MIB) as memory, contextlib.ExitStack() as open_ones:
            hello = MEMORY_HELLO.pack(mallory.secret, MIB)
            for count in (253, 253, 4, 2, 0) * 8:
                connection = open_ones.enter_context(socket.socket(socket.AF_UNIX))
                connection.connect(besieged.memory_socket)
                with contextlib.suppress(OSError):  # hicached has had enough
                    for part in (hello[:3], hello[3:9], hello[9:]):
                        socket.send_fds(connection, [part], [memory.fd] * count)
            besieged.let_neighbours_work()
            assert besieged.readings()["descriptors"] < besieged.base["descriptors"] + 64

    def test_a_hello_of_single_bytes_is_as_good_as_any(self, besieged: Besieged, mallory: Client) -> None:
        with Memory(MIB) as memory, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(CALL_S)
            connection.connect(besieged.memory_socket)
            for byte in MEMORY_HELLO.pack(mallory.secret, MIB)[:-1]:
                connection.sendall(bytes([byte]))
            socket.send_fds(connection, [MEMORY_HELLO.pack(mallory.secret, MIB)[-1:]], [memory.fd])
            assert connection.recv(1) == b"\0"


class TestRequests:
    def test_messages_of_any_bytes_and_numbers(self, besieged: Besieged, mallory: Client) -> None:
        """Every call of the protocol, with fields that contradict each other, wrap around, or are no message at all."""
        random = Random(SEED)
        for _ in range(40):
            for method in ("Lookup", "Delete", "Lease", "Stats"):
                raw = _some_request(random, mallory.secret, method)
                call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = mallory.channel.unary_unary(f"/{_SERVICE}/{method}")
                with contextlib.suppress(grpc.RpcError):
                    call(raw, timeout=CALL_S)
        assert mallory.stats().sessions >= 1

    def test_requests_of_any_numbers_about_registered_memory(self, mallory: Client) -> None:
        random = Random(SEED)
        with Memory(MIB) as memory:
            region = mallory.attach(memory).region_id
            for _ in range(80):
                count = random.randrange(1, 6)
                keys = [random.randbytes(36) for _ in range(count)]
                offsets, sizes = ([random.choice(_NUMBERS) for _ in range(count)] for _ in range(2))
                region_id = random.choice((region, region, region, 0, 2**64 - 1))
                call = random.choice((mallory.get, mallory.put))
                with contextlib.suppress(BulkRefused):
                    outcomes = call(region_id, keys, offsets, sizes)
                    inside = [1 <= size <= MIB - offset for size, offset in zip(sizes, offsets, strict=True)]
                    moved = [outcome in (Outcome.OK, Outcome.ABSENT) for outcome in outcomes]
                    assert moved == inside

    def test_requests_of_any_numbers_on_the_bulk_socket(self, mallory: Client) -> None:
        random = Random(SEED)
        for _ in range(60):
            bulk = Bulk(mallory.bulk_address, mallory.secret)
            count, key_bytes = random.choice((0, 1, 3, 2**14, 2**32 - 1)), random.choice((0, 1, 36, 112, 2**16 - 1))
            kind = random.choice((*BulkKind, 0))
            keys = random.randbytes(min(count, 3) * min(key_bytes, 112))
            sizes = b"".join(random.choice(_NUMBERS).to_bytes(8, "little") for _ in range(min(count, 3)))
            with contextlib.suppress(BulkRefused, OSError):  # hicached has had enough
                bulk.send(BULK_REQUEST.pack(kind, key_bytes, count, random.choice((0, 1000, 2**32 - 1))))
                bulk.send(keys + sizes + random.randbytes(random.choice((0, 0, 1, 5000))))
                bulk.connection.shutdown(socket.SHUT_WR)
                bulk.receive_status()
                while bulk.connection.recv(65536):
                    pass
            bulk.close()

    def test_a_message_above_every_limit(self, mallory: Client) -> None:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = mallory.channel.unary_unary(f"/{_SERVICE}/Lookup")
        with pytest.raises(grpc.RpcError) as caught:
            call(bytes(80 * MIB), timeout=CALL_S)
        assert caught.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL)

    def test_objects_and_secrets_of_others(self, besieged: Besieged, mallory: Client) -> None:
        with Client(besieged.daemon.target, token=BOB) as bob, Memory(MIB) as memory:
            region = bob.attach(memory).region_id
            assert bob.put(region, [object_key(7)], [0], [100]) == [Outcome.OK]
            own = mallory.attach(memory).region_id
            assert mallory.get(own, [object_key(7)], [0], [100]) == [Outcome.ABSENT]
            for secret in (bob.secret[:-1], bob.secret[:-1] + b"\0", b"", secrets.token_bytes(32)):
                with pytest.raises(grpc.RpcError):
                    mallory.stub.Stats(pb.StatsRequest(session_secret=secret), timeout=CALL_S)
            with pytest.raises(BulkRefused, match="UNKNOWN_REGION"):
                mallory.get(region, [object_key(7)], [0], [100])
            assert mallory.delete([object_key(7)]) == [Outcome.ABSENT]
            assert bob.delete([object_key(7)]) == [Outcome.OK]


_SERVICE = pb.DESCRIPTOR.services_by_name["HiCached"].full_name
_NUMBERS = (0, 1, 36, MIB - 1, MIB, MIB + 1, 2**31, 2**32 - 1, 2**63, 2**64 - MIB, 2**64 - 1)


def _some_request(random: Random, secret: bytes, method: str) -> bytes:
    """A request that is wrong in some way, most of the time."""
    if random.random() < 0.2:
        return random.randbytes(random.randrange(200))
    key_bytes = random.choice((0, 1, 36, 36, 36, 112, 113, 2**32 - 1))
    count = random.randrange(6)
    keys = random.randbytes(random.choice((0, count * min(key_bytes, 200), count * 36, 71)))
    if method == "Lookup":
        lease_ms = random.choice((0, 1, 2**32 - 1))
        request = pb.LookupRequest(
            session_secret=secret, keys=keys, key_bytes=key_bytes, lease_ms=lease_ms
        ).SerializeToString()
    elif method == "Lease":
        request = pb.LeaseRequest(session_secret=secret, lease_id=random.choice(_NUMBERS)).SerializeToString()
    elif method == "Delete":
        request = pb.KeysRequest(session_secret=secret, keys=keys, key_bytes=key_bytes).SerializeToString()
    else:
        request = pb.StatsRequest(session_secret=secret).SerializeToString()
    if random.random() < 0.3:
        at = random.randrange(len(request) + 1)
        request = request[:at] + random.randbytes(random.randrange(9)) + request[at + random.randrange(9) :]
    return request


def _addresses(besieged: Besieged) -> list[tuple[int, str | tuple[str, int]]]:
    """Family and address of every socket that the daemon listens on."""
    path = str(besieged.daemon.settings["socket"])
    unix = [(socket.AF_UNIX, name) for name in (path, f"{path}.memory", f"{path}.bulk")]
    hosts = [besieged.daemon.ready[name].rsplit(":", 1) for name in ("listen", "bulk_listen", "http")]
    return [*unix, *((socket.AF_INET, (host, int(port))) for host, port in hosts)]


class TestConnections:
    def test_garbage_on_every_socket(self, besieged: Besieged) -> None:
        random = Random(SEED)
        starts = (
            b"",
            PREFACE,
            PREFACE + b"\0\0\0\4\0\0\0\0\0",
            b"GET / HTTP/1.1\r\n",
            b"POST ",
            secrets.token_bytes(32),
        )
        for family, address in _addresses(besieged) * 12:
            with socket.socket(family) as connection:
                connection.settimeout(CALL_S)
                connection.connect(address)
                with contextlib.suppress(OSError):  # hicached has had enough
                    for _ in range(random.randrange(4)):
                        connection.sendall(random.choice(starts) + random.randbytes(random.randrange(5000)))
                if random.random() < 0.3:  # the peer sees a reset
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def test_thousands_of_connections_that_say_nothing(self, besieged: Besieged) -> None:
        raise_open_files_limit()
        room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // len(_addresses(besieged)) // 2
        with contextlib.ExitStack() as open_ones:
            for family, address in _addresses(besieged):
                for _ in range(min(CONNECTIONS, room)):
                    connection = open_ones.enter_context(socket.socket(family))
                    connection.settimeout(CALL_S)
                    with contextlib.suppress(ConnectionError, BlockingIOError):
                        connection.connect(address)
            besieged.let_neighbours_work()
            assert http_get(besieged.daemon.ready["http"], "/healthz")[0] == 200
            with Client(besieged.daemon.target, token=MALLORY) as late, Memory(MIB) as memory:
                region = late.attach(memory).region_id
                assert late.get(region, [object_key(1)], [0], [1]) == [Outcome.ABSENT]

    def test_http_requests_that_never_end(self, besieged: Besieged) -> None:
        family, address = _addresses(besieged)[-1]
        with contextlib.ExitStack() as open_ones:
            slow = [open_ones.enter_context(socket.socket(family)) for _ in range(200)]
            for part in (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n", b"X", b": ", b"y" * 4000, b"\r\nZ: "):
                for connection in slow:
                    with contextlib.suppress(OSError):  # the oldest make way
                        if part.startswith(b"GET"):
                            connection.connect(address)
                        connection.sendall(part)
                assert http_get(besieged.daemon.ready["http"], "/healthz")[0] == 200

    def test_batches_as_large_as_they_may_be(self, besieged: Besieged, mallory: Client) -> None:
        limits = mallory.welcome.limits
        packed, key_bytes = pack_keys([object_key(number) for number in range(limits.batch_keys_max)])
        request = pb.LookupRequest(session_secret=mallory.secret, keys=packed, key_bytes=key_bytes, lease_ms=1)
        calls = [mallory.stub.Lookup.future(request, timeout=CALL_S) for _ in range(60)]
        besieged.let_neighbours_work()
        for call in calls:
            assert len(call.result().outcomes) == limits.batch_keys_max
