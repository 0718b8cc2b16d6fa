"""Bad input gets a typed error for that client, and disturbs nothing else."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache.outcome import Outcome
from hicache.spec import namespace_digest
from hicache.wire import hicached_pb2 as pb
from hicache.wire.hicached_pb2_grpc import HiCachedStub
from hicache.wire.protocol import MEMORY_HELLO, PROTOCOL_VERSION, channel_options
from tests.daemon.client import DESCRIPTOR, Client, refusal_code
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import CALL_S, Attachment, BulkRefused, Memory, MemoryRefused, object_key
from tests.daemon.rig import wait_until

StartThread = Callable[..., ThreadedDaemon]
TOKEN = "a-long-enough-token"


def refused_hello(target: str, **options: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        Client(target, **options)  # type: ignore[arg-type]  # a test of many options
    return caught.value.code(), refusal_code(caught.value)


def test_a_wrong_token_is_refused_and_the_right_one_is_not(start_thread: StartThread, folder: Path) -> None:
    tenants = folder / "tenants"
    tenants.write_text(f"alice {TOKEN}\n")
    daemon = start_thread(tenants_file=str(tenants))

    unauthenticated = grpc.StatusCode.UNAUTHENTICATED
    assert refused_hello(daemon.target, token=TOKEN + "x") == (unauthenticated, "BAD_TOKEN")
    assert refused_hello(daemon.target, token="") == (unauthenticated, "BAD_TOKEN")
    with Client(daemon.target, token=TOKEN) as client:
        assert client.welcome.tenant == "alice"
    assert daemon.metric("hicache_session_refusals_total", code="BAD_TOKEN") == 2


def test_a_token_is_refused_where_there_are_no_tenants(daemon: ThreadedDaemon, bystander: Client) -> None:
    assert refused_hello(daemon.target, token=TOKEN) == (grpc.StatusCode.UNAUTHENTICATED, "BAD_TOKEN")


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, 4_000_000_000])
def test_an_unknown_protocol_version_is_refused(daemon: ThreadedDaemon, bystander: Client, version: int) -> None:
    refused = refused_hello(daemon.target, version=version)
    assert refused == (grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_VERSION")


@pytest.mark.parametrize(
    "wrong",
    [
        {"digest": b"\0" * 32},
        {"digest": b"short"},
        {"digest": b""},
        {"raw_descriptor": b""},
        {"raw_descriptor": b"\xff not msgpack"},
        {"raw_descriptor": msgspec.msgpack.encode(["a", "list"])},
        {"raw_descriptor": msgspec.msgpack.encode({"model": 1.5})},
        {"raw_descriptor": b"\x91" * 60_000},
        {"raw_descriptor": b"\0" * 70_000},
        {"descriptor": {"model": "no key hash"}},
        {"descriptor": DESCRIPTOR | {"key_hash": "md5"}},
    ],
    ids=lambda wrong: next(iter(wrong)) + str(next(iter(wrong.values())))[:12],
)
def test_a_wrong_namespace_is_refused(daemon: ThreadedDaemon, bystander: Client, wrong: dict[str, object]) -> None:
    assert refused_hello(daemon.target, **wrong) == (grpc.StatusCode.FAILED_PRECONDITION, "BAD_NAMESPACE")


def test_fast_keys_are_refused_once_there_is_a_second_tenant(start_thread: StartThread, folder: Path) -> None:
    fast = DESCRIPTOR | {"key_hash": "xxh3_128"}
    tenants = folder / "tenants"
    tenants.write_text(f"alice {TOKEN}\nalice {TOKEN}2\n")
    one = start_thread(tenants_file=str(tenants))
    with Client(one.target, token=TOKEN, descriptor=fast):
        pass
    one.stop()

    tenants.write_text(f"alice {TOKEN}\nbob {TOKEN}2\n")
    two = start_thread(tenants_file=str(tenants))
    refused = refused_hello(two.target, token=TOKEN, descriptor=fast)
    assert refused == (grpc.StatusCode.FAILED_PRECONDITION, "KEY_HASH_NOT_ALLOWED")


def test_a_welcome_names_the_fields_in_which_the_nearest_known_namespace_differs(daemon: ThreadedDaemon) -> None:
    with Client(daemon.target) as first, Client(daemon.target, descriptor=DESCRIPTOR | {"page_tokens": 32}) as second:
        assert list(first.welcome.namespace_differs) == []
        assert list(second.welcome.namespace_differs) == ["page_tokens: 64 != 32"]
    with Client(daemon.target) as again, Client(daemon.target, descriptor=DESCRIPTOR | {"model": "other"}) as other:
        assert list(again.welcome.namespace_differs) == []
        assert list(other.welcome.namespace_differs) == []


def test_one_session_too_many_is_refused_and_may_come_in_when_another_leaves(start_thread: StartThread) -> None:
    daemon = start_thread(sessions_max=2)
    with Client(daemon.target), Client(daemon.target):
        assert refused_hello(daemon.target) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_SESSIONS")
    wait_until(lambda: daemon.metric("hicache_sessions") == 0, what="both sessions have ended")
    with Client(daemon.target):
        pass


def test_a_session_that_says_something_else_than_hello_is_refused(daemon: ThreadedDaemon, bystander: Client) -> None:
    with grpc.insecure_channel(daemon.target, options=channel_options()) as channel:
        session = channel.stream_stream(
            "/hicached.v1.HiCached/Session", pb.SessionRequest.SerializeToString, pb.SessionEvent.FromString
        )
        for requests in ([], [pb.SessionRequest()]):
            with pytest.raises(grpc.RpcError) as caught:
                list(session(iter(requests), timeout=CALL_S))
            assert refusal_code(caught.value) == "MALFORMED"


def test_streams_that_say_nothing_are_soon_gone(
    daemon: ThreadedDaemon, bystander: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache.daemon.first_messages.FIRST_MESSAGE_S", 0.3)
    silence = threading.Event()

    def nothing() -> Iterator[pb.SessionRequest]:
        silence.wait(CALL_S)
        yield from ()

    with grpc.insecure_channel(daemon.target, options=channel_options()) as channel:
        silent = [HiCachedStub(channel).Session(nothing(), timeout=CALL_S) for _ in range(2)]
        for call in silent:
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert refusal_code(caught.value) == "MALFORMED"
        silence.set()


@pytest.mark.parametrize("secret", [b"", b"x", b"\0" * 32, b"\xff" * 1000])
def test_a_call_without_a_session_is_refused(daemon: ThreadedDaemon, bystander: Client, secret: bytes) -> None:
    with grpc.insecure_channel(daemon.target, options=channel_options()) as channel:
        lookup = channel.unary_unary(
            "/hicached.v1.HiCached/Lookup", pb.LookupRequest.SerializeToString, pb.LookupReply.FromString
        )
        with pytest.raises(grpc.RpcError) as caught:
            lookup(pb.LookupRequest(session_secret=secret, keys=b"k" * 36, key_bytes=36), timeout=CALL_S)
    assert (caught.value.code(), refusal_code(caught.value)) == (grpc.StatusCode.UNAUTHENTICATED, "UNKNOWN_SESSION")


def test_a_session_that_has_ended_is_unknown(daemon: ThreadedDaemon, bystander: Client) -> None:
    ended = Client(daemon.target)
    ended.close()
    bystander_stub, request = bystander.stub, pb.StatsRequest(session_secret=ended.secret)
    with pytest.raises(grpc.RpcError) as caught:
        bystander_stub.Stats(request, timeout=CALL_S)
    assert refusal_code(caught.value) == "UNKNOWN_SESSION"


@pytest.mark.parametrize(
    ("packed", "key_bytes"), [(b"k" * 35, 36), (b"k" * 36, 0), (b"k" * 226, 113), (b"k", 4_000_000_000)]
)
def test_keys_that_are_no_keys_are_malformed(client: Client, bystander: Client, packed: bytes, key_bytes: int) -> None:
    request = pb.LookupRequest(session_secret=client.secret, keys=packed, key_bytes=key_bytes)
    with pytest.raises(grpc.RpcError) as caught:
        client.stub.Lookup(request, timeout=CALL_S)
    assert (caught.value.code(), refusal_code(caught.value)) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED")


def test_batches_above_the_limits_are_refused_whole(start_thread: StartThread, memory: Memory) -> None:
    daemon = start_thread(batch_keys_max=10, batch_bytes_max=1 << 20, object_bytes_max=1 << 19)
    with Client(daemon.target) as client:
        region = client.attach(memory).region_id
        eleven = [object_key(number) for number in range(11)]
        calls: list[Callable[[], object]] = [
            lambda: client.lookup(eleven),
            lambda: client.delete(eleven),
        ]
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert refusal_code(caught.value) == "BATCH_TOO_LARGE"
        streams: list[Callable[[], object]] = [
            lambda: client.get(region, eleven, [0] * 11, [1] * 11),
            lambda: client.get(region, eleven[:3], [0, 0, 0], [1 << 19] * 3),
            lambda: client.put(region, eleven[:3], [0, 0, 0], [1 << 19] * 3),
            lambda: client.get_stream(eleven, [1] * 11),
            lambda: client.get_stream(eleven[:3], [1 << 19] * 3),
            lambda: client.put_stream(eleven, [b"x"] * 11),
            lambda: client.put_stream(eleven[:3], [bytes(1 << 19)] * 3),
        ]
        for call in streams:
            with pytest.raises(BulkRefused, match="BATCH_TOO_LARGE"):
                call()
        assert client.lookup(eleven[:10])[0] != []


def test_an_oversized_object_is_too_large_and_its_neighbours_are_stored(start_thread: StartThread) -> None:
    daemon = start_thread(object_bytes_max=1000)
    keys = [object_key(number) for number in range(3)]
    with Client(daemon.target) as client, Memory(1 << 16) as memory:
        expected = [Outcome.OK, Outcome.TOO_LARGE, Outcome.OK]
        assert client.put_stream(keys, [b"a", bytes(1001), bytes(1000)]) == expected
        assert client.present(keys) == [True, False, True]
        region = client.attach(memory).region_id
        more = [object_key(number) for number in range(10, 13)]
        assert client.put(region, more, [0, 0, 0], [1, 1001, 1000]) == expected
        assert client.present(more) == [True, False, True]


@pytest.mark.parametrize("operation", ["get", "put"])
@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (0, 0),
        (4 << 20, 1),
        ((4 << 20) - 3, 4),
        (2**64 - 1, 4),
        (2**64 - 4, 4),
        (2**63, 4),
        (2**64 - 1, 2**64 - 1),
        (4, 2**64 - 4),
        (2**32, 4),
    ],
)
def test_a_range_that_leaves_the_region_touches_nothing(
    client: Client, memory: Memory, operation: str, offset: int, size: int
) -> None:
    region = client.attach(memory).region_id
    memory.bytes[:] = b"\xaa" * memory.size_bytes
    client.put_stream([object_key(2)], [b"good"])
    move = client.get if operation == "get" else client.put

    wrong, fine = move(region, [object_key(1), object_key(2)], [offset, 0], [size, 4])

    assert wrong in (Outcome.BAD_RANGE, Outcome.TOO_LARGE)
    assert fine in (Outcome.OK, Outcome.EXISTS)
    assert memory.bytes[4:] == b"\xaa" * (memory.size_bytes - 4)
    assert client.present([object_key(1)]) == [False]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), max_size=8))
def test_no_offset_and_size_at_all_gets_more_than_an_outcome(
    client: Client, memory: Memory, items: list[tuple[int, int]]
) -> None:
    region = client.attach(memory) if not client._attachments else client._attachments[0]
    keys = [object_key(number) for number in range(len(items))]
    inside = [0 < size <= memory.size_bytes and offset + size <= memory.size_bytes for offset, size in items]

    outcomes = client.get(region.region_id, keys, [offset for offset, _ in items], [size for _, size in items])

    assert [outcome is Outcome.ABSENT for outcome in outcomes] == inside


def test_a_region_of_another_session_or_a_detached_one_is_unknown(daemon: ThreadedDaemon, memory: Memory) -> None:
    with Client(daemon.target) as owner, Client(daemon.target) as other:
        attachment = owner.attach(memory)
        for client, region in ((other, attachment.region_id), (owner, attachment.region_id + 1), (owner, 2**64 - 1)):
            with pytest.raises(BulkRefused, match="UNKNOWN_REGION"):
                client.get(region, [object_key(1)], [0], [4])
        assert owner.get(attachment.region_id, [object_key(1)], [0], [4]) == [Outcome.ABSENT]

        attachment.half_close()
        assert attachment.is_at_end(within_s=CALL_S)
        with pytest.raises(BulkRefused, match="UNKNOWN_REGION"):
            owner.get(attachment.region_id, [object_key(1)], [0], [4])


class TestMemorySocket:
    """What is offered on the memory socket and must not be taken."""

    def offer(self, client: Client, *, fds: list[int], size_bytes: int, secret: bytes | None = None) -> str:
        with pytest.raises(MemoryRefused) as caught:
            Attachment(client.welcome.memory_socket, client.secret if secret is None else secret, fds, size_bytes)
        return str(caught.value)

    def test_a_memfd_that_could_shrink_is_refused(self, client: Client, bystander: Client) -> None:
        for seals in (0, fcntl.F_SEAL_GROW):
            with Memory(4096, seals=seals) as unsealed:
                assert "F_SEAL_SHRINK" in self.offer(client, fds=[unsealed.fd], size_bytes=4096)

    def test_a_memfd_that_cannot_be_written_is_refused(self, client: Client, bystander: Client) -> None:
        fd = os.memfd_create("read-only", os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
        assert "mapped" in self.offer(client, fds=[fd], size_bytes=4096)
        os.close(fd)

    def test_a_file_a_pipe_and_a_socket_are_no_memory(self, client: Client, bystander: Client, tmp_path: Path) -> None:
        file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        os.ftruncate(file, 4096)
        reader, writer = os.pipe()
        for fd in (file, reader, writer):
            assert "memfd" in self.offer(client, fds=[fd], size_bytes=4096)
            os.close(fd)
        with socket.socket() as plain:
            assert "memfd" in self.offer(client, fds=[plain.fileno()], size_bytes=4096)

    @pytest.mark.parametrize("size_bytes", [0, (4 << 20) + 1, 2**63, 2**64 - 1])
    def test_a_size_that_is_a_lie_is_refused(
        self, client: Client, bystander: Client, memory: Memory, size_bytes: int
    ) -> None:
        assert "announced" in self.offer(client, fds=[memory.fd], size_bytes=size_bytes)

    def test_no_descriptor_or_too_many_are_refused(self, client: Client, bystander: Client, memory: Memory) -> None:
        for count in (0, 2, 4, 10):
            assert "descriptors" in self.offer(client, fds=[memory.fd] * count, size_bytes=memory.size_bytes)

    def test_an_unknown_secret_is_refused(self, client: Client, bystander: Client, memory: Memory) -> None:
        refusal = self.offer(client, fds=[memory.fd], size_bytes=memory.size_bytes, secret=b"\1" * 32)
        assert "UNKNOWN_SESSION" in refusal

    def test_one_region_too_many_is_refused(self, client: Client, bystander: Client, memory: Memory) -> None:
        for _ in range(8):
            client.attach(memory)
        assert "8 regions" in self.offer(client, fds=[memory.fd], size_bytes=memory.size_bytes)

    def test_a_truncated_hello_is_refused_when_its_connection_ends(
        self, daemon: ThreadedDaemon, client: Client, bystander: Client, memory: Memory
    ) -> None:
        hello = MEMORY_HELLO.pack(client.secret, memory.size_bytes)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(client.welcome.memory_socket)
            socket.send_fds(connection, [hello[:20]], [memory.fd])
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(CALL_S)
            assert b"20 of 40 bytes" in connection.recv(1000)
            assert connection.recv(1) == b""
        assert daemon.metric("hicache_region_refusals_total") == 1

    def test_a_hello_that_never_comes_is_given_up(
        self, client: Client, bystander: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hicache.daemon.memory_socket.HELLO_TIMEOUT_S", 0.1)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(CALL_S)
            connection.connect(client.welcome.memory_socket)
            assert b"no complete hello" in connection.recv(1000)
            assert connection.recv(1) == b""

    def test_a_hello_in_two_pieces_is_accepted(self, client: Client, memory: Memory) -> None:
        hello = MEMORY_HELLO.pack(client.secret, memory.size_bytes)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(client.welcome.memory_socket)
            socket.send_fds(connection, [hello[:20]], [memory.fd])
            connection.sendall(hello[20:])
            connection.settimeout(CALL_S)
            assert connection.recv(100)[0] == 0

    def test_refused_descriptors_do_not_pile_up(self, client: Client, memory: Memory) -> None:
        self.offer(client, fds=[memory.fd] * 3, size_bytes=memory.size_bytes)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(50):
            self.offer(client, fds=[memory.fd] * 3, size_bytes=memory.size_bytes)
        assert len(os.listdir("/proc/self/fd")) <= before + 5


def test_a_message_above_the_negotiated_ceiling_is_refused_by_grpc(client: Client, bystander: Client) -> None:
    request = pb.LookupRequest(session_secret=client.secret, keys=bytes(17 << 20), key_bytes=32)
    with pytest.raises(grpc.RpcError) as caught:
        client.stub.Lookup(request, timeout=CALL_S)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_digest_of_a_descriptor_does_not_depend_on_the_order_of_its_fields(daemon: ThreadedDaemon) -> None:
    shuffled = dict(reversed(DESCRIPTOR.items()))
    raw = msgspec.msgpack.encode(shuffled)
    with Client(daemon.target, raw_descriptor=raw, digest=namespace_digest(DESCRIPTOR)) as client:
        assert client.welcome.session_id > 0
