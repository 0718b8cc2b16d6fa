"""Nobody takes what belongs to all: memory, descriptors, connections, control threads and sessions are bounded."""

from __future__ import annotations

import array
import asyncio
import contextlib
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import grpc
import pytest
import structlog

from hicache.backends.faulty import Fault, FaultKind
from hicache.backends.tenant_limits import StoreLimits
from hicache.daemon.acceptor import STRANGERS_MAX
from hicache.daemon.config import DaemonConfig, load_config
from hicache.daemon.control import DELETE_CHUNK_KEYS
from hicache.daemon.http import CONNECTIONS_MAX
from hicache.daemon.recovery import OpenedStore, open_store
from hicache.daemon.server import Daemon
from hicache.daemon.sessions import CALLS_PER_SESSION_MAX
from hicache.errors import ConfigError
from hicache.outcome import Outcome
from hicache.wire import hicached_pb2 as pb
from hicache.wire.protocol import pack_keys
from hicache.workers import Workers
from tests.daemon.client import Client, refusal_code
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import CALL_S, Attachment, Bulk, Memory, MemoryRefused, object_key
from tests.daemon.rig import ALICE, BOB, DaemonProcess, http_get, scrape, settings_in, wait_until

StartThread = Callable[..., ThreadedDaemon]

MIB = 1 << 20
EARLY_S = 10.0  # long enough for what takes 0.2 s, and shorter than what gRPC does of its own accord
SETTINGS, GOAWAY, MAX_CONCURRENT_STREAMS = 4, 7, 3  # numbers of HTTP/2 (RFC 9113)
SOON_S = 1.0  # a deadline that is meant to pass; a tenth of it is left for the answer


def control_of(daemon: ThreadedDaemon) -> Workers:
    """The daemon's control threads."""
    storage = daemon.daemon._storage
    assert storage is not None
    return storage.control


def read_frames(connection: socket.socket) -> Iterator[tuple[int, bytes]]:
    """Kind and payload of each HTTP/2 frame until the end of the connection."""
    stream = connection.makefile("rb")
    while header := stream.read(9):
        yield header[3], stream.read(int.from_bytes(header[:3], "big"))


def delete_request(client: Client, keys: Sequence[bytes]) -> pb.KeysRequest:
    packed, key_bytes = pack_keys(keys)
    return pb.KeysRequest(session_secret=client.secret, keys=packed, key_bytes=key_bytes)


class TestStrangers:
    """Whoever has no token, and no secret, holds up nobody."""

    def test_connections_without_a_hello_do_not_keep_clients_out(
        self, daemon: ThreadedDaemon, client: Client, memory: Memory
    ) -> None:
        with ExitStack() as stack:
            silent = []
            for _ in range(3 * STRANGERS_MAX):
                stranger = stack.enter_context(socket.socket(socket.AF_UNIX))
                stranger.connect(client.welcome.memory_socket)
                stranger.settimeout(CALL_S)
                silent.append(stranger)
            client.attach(memory)
            for stranger in silent[:STRANGERS_MAX]:
                assert stranger.recv(1) == b"", "the oldest are dropped"
            assert daemon.metric("hicache_region_refusals_total") >= 2 * STRANGERS_MAX

    def test_bulk_connections_without_a_hello_do_not_keep_clients_out(
        self, daemon: ThreadedDaemon, client: Client
    ) -> None:
        with ExitStack() as stack:
            silent = []
            for _ in range(3 * STRANGERS_MAX):
                silent.append(stack.enter_context(contextlib.closing(Bulk(client.bulk_address, None))))
            assert client.put_stream([object_key(1)], [b"x"]) == [Outcome.OK]
            for stranger in silent[:STRANGERS_MAX]:
                assert stranger.is_at_end(), "the oldest are dropped"

    def test_descriptors_of_one_hello_do_not_pile_up(self, client: Client, memory: Memory) -> None:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(CALL_S)
            stranger.connect(client.welcome.memory_socket)
            for _ in range(2):
                fds = array.array("i", [memory.fd] * 4)
                stranger.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            assert b"more descriptors" in stranger.recv(1000)

    def test_refusals_do_not_flood_the_log(
        self, client: Client, memory: Memory, caplog: pytest.LogCaptureFixture
    ) -> None:
        with structlog.testing.capture_logs() as lines:
            for _ in range(20):
                with pytest.raises(MemoryRefused):
                    Attachment(client.welcome.memory_socket, b"?" * 32, [memory.fd], memory.size_bytes)
        said = [record for record in caplog.records if "memory refused" in record.getMessage()]
        assert len(said) + sum("refused" in line["event"] for line in lines) == 1

    def test_http_connections_are_few_and_a_probe_gets_through(self, daemon: ThreadedDaemon) -> None:
        host, port = daemon.ready.http.split(":")
        with ExitStack() as stack:
            silent = []
            for _ in range(2 * CONNECTIONS_MAX):
                silent.append(stack.enter_context(closing(socket.create_connection((host, int(port)), CALL_S))))
            assert http_get(daemon.ready.http, "/healthz") == (200, "ok\n")
            for stranger in silent[:CONNECTIONS_MAX]:
                assert stranger.recv(1) == b"", "the oldest are dropped"

    def test_connections_of_a_stranger_who_does_not_speak_http2_are_closed(
        self, start_thread: StartThread, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hicache.daemon.grpc_server.HANDSHAKE_S", 0.2)
        daemon = start_thread()
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(EARLY_S)
            stranger.connect(daemon.config.socket)
            with suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass

    def test_connections_that_call_nothing_are_closed_and_those_of_sessions_are_not(
        self, start_thread: StartThread, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hicache.daemon.grpc_server.IDLE_CONNECTION_S", 0.2)
        daemon = start_thread()
        with Client(daemon.target) as client, self.http2_connection(daemon) as stranger:
            frames = read_frames(stranger)
            assert GOAWAY in [kind for kind, _ in frames]
            assert client.lookup([object_key(1)]) == ([Outcome.ABSENT], 0)
            assert daemon.metric("hicache_sessions_opened_total") == 1

    def test_one_connection_carries_a_bounded_number_of_calls(self, start_thread: StartThread) -> None:
        daemon = start_thread(sessions_max=7)
        with self.http2_connection(daemon) as stranger:
            kind, payload = next(read_frames(stranger))
            assert kind == SETTINGS
            settings = dict(struct.iter_unpack(">HI", payload))
            assert settings[MAX_CONCURRENT_STREAMS] == 7 + 2 * CALLS_PER_SESSION_MAX

    @contextmanager
    def http2_connection(self, daemon: ThreadedDaemon) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(EARLY_S)
            stranger.connect(daemon.config.socket)
            stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">IBI", SETTINGS, 0, 0))
            yield stranger

    def test_the_limit_on_open_files_is_raised(self, start: Callable[..., DaemonProcess]) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        low = min(256, hard - 1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
        try:
            daemon = start(wait=False)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        daemon.wait_ready()
        assert scrape(daemon.ready["http"])["hicache_process_max_fds"] == hard


class TestControlThreads:
    """Long work never occupies the threads that answer lookups, pings and probes."""

    def test_lookups_and_probes_do_not_wait_for_deletes(self, daemon: ThreadedDaemon, client: Client) -> None:
        keys = [object_key(number) for number in range(8)]
        client.put_stream(keys, [b"x"] * 8)
        stuck = daemon.backend.arm("delete", Fault(FaultKind.LATE))
        request = delete_request(client, keys)
        calls = [client.stub.Delete.future(request, timeout=CALL_S) for _ in range(4)]
        wait_until(stuck.entered.is_set, what="a delete is in the backend")

        assert client.lookup([object_key(100)]) == ([Outcome.ABSENT], 0)
        assert http_get(daemon.ready.http, "/healthz") == (200, "ok\n")
        stuck.release()
        for call in calls:
            assert set(call.result().outcomes) <= {Outcome.OK, Outcome.ABSENT}

    def test_deletes_go_in_chunks_and_their_outcomes_stay_in_order(
        self, daemon: ThreadedDaemon, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys = [object_key(number) for number in range(2 * DELETE_CHUNK_KEYS + 1)]
        client.put_stream(keys[::2], [b"x"] * len(keys[::2]))
        sizes: list[int] = []
        delete = daemon.store.delete

        def watched(chunk: Sequence[bytes]) -> list[Outcome]:
            sizes.append(len(chunk))
            return delete(chunk)

        monkeypatch.setattr(daemon.store, "delete", watched)
        expected = [Outcome.ABSENT if number % 2 else Outcome.OK for number in range(len(keys))]
        assert client.delete(keys) == expected
        assert sizes == [DELETE_CHUNK_KEYS, DELETE_CHUNK_KEYS, 1]

    def test_at_its_deadline_a_delete_keeps_the_outcomes_that_it_has(
        self, daemon: ThreadedDaemon, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys = [object_key(number) for number in range(3 * DELETE_CHUNK_KEYS)]
        opened, calls = threading.Event(), []
        delete = daemon.store.delete

        def stuck_from_the_second_on(chunk: Sequence[bytes]) -> list[Outcome]:
            calls.append(len(chunk))
            if len(calls) > 1:
                assert opened.wait(CALL_S)
            return delete(chunk)

        monkeypatch.setattr(daemon.store, "delete", stuck_from_the_second_on)
        reply = client.stub.Delete(delete_request(client, keys), timeout=SOON_S)
        opened.set()
        assert list(reply.outcomes) == [Outcome.ABSENT] * 256 + [Outcome.DEADLINE] * 512
        assert len(calls) == 2, "the rest was never started"

    def test_lookups_do_not_wait_for_memory_that_is_unmapped(
        self, daemon: ThreadedDaemon, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened, entered = threading.Event(), threading.Event()

        def slow(_: object) -> None:
            entered.set()
            assert opened.wait(CALL_S)

        monkeypatch.setattr("hicache.daemon.memory.Region._close_mapping", slow)
        with Memory(4096) as memory:
            for _ in range(4):  # more than there are control threads
                attachment = client.attach(memory)
                attachment.half_close()
                assert attachment.is_at_end(within_s=CALL_S)
            assert entered.wait(CALL_S)
            assert client.lookup([object_key(1)]) == ([Outcome.ABSENT], 0)
        opened.set()

    def test_the_leases_of_an_ended_session_are_released_in_one_job(
        self, daemon: ThreadedDaemon, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        control = control_of(daemon)
        with Client(daemon.target) as client:
            client.put_stream([object_key(1)], [b"x"])
            for _ in range(20):
                assert client.lookup([object_key(1)], lease_ms=60_000)[1]
            jobs: list[object] = []
            submit = control.submit

            def watched(work: Callable[[], object]) -> object:
                jobs.append(work)
                return submit(work)

            monkeypatch.setattr(control, "submit", watched)
        wait_until(lambda: daemon.store.stats().holds.leases == 0, what="the leases are released")
        assert len(jobs) == 1


class TestLeases:
    """A lease whose release or renewal is not answered in time still ends with its session."""

    @pytest.mark.parametrize("lease_ms", [0, 60_000])
    def test_a_lease_is_kept_until_the_answer_is_known(
        self, daemon: ThreadedDaemon, monkeypatch: pytest.MonkeyPatch, lease_ms: int
    ) -> None:
        opened = threading.Event()
        with Client(daemon.target) as client:
            client.put_stream([object_key(1)], [b"x"])
            _, lease = client.lookup([object_key(1)], lease_ms=60_000)
            usage = daemon.store.usage

            def slow() -> object:
                assert opened.wait(CALL_S)
                return usage()

            with monkeypatch.context() as patch:  # both control threads are busy: the change is never started
                patch.setattr(daemon.store, "usage", slow)
                busy = [
                    client.stub.Stats.future(pb.StatsRequest(session_secret=client.secret), timeout=CALL_S)
                    for _ in range(2)
                ]
                wait_until(lambda: len(control_of(daemon).busy_for_s()) == 2, what="both are busy")
                request = pb.LeaseRequest(session_secret=client.secret, lease_id=lease, lease_ms=lease_ms)
                assert not client.stub.Lease(request, timeout=SOON_S).held
                opened.set()
                for call in busy:
                    call.result()
            assert daemon.store.stats().holds.leases == 1
            assert client.lease(lease, lease_ms=60_000), "it is still this session's"
        wait_until(lambda: daemon.store.stats().holds.leases == 0, what="it ends with the session")


class TestSessions:
    """One tenant leaves places for the others."""

    def refusal(self, target: str, token: str) -> tuple[str, str]:
        with pytest.raises(grpc.RpcError) as caught:
            Client(target, token=token)
        return refusal_code(caught.value), str(caught.value.details())

    def test_one_of_several_tenants_gets_half_of_the_sessions(
        self, start_thread: StartThread, two_tenants: str
    ) -> None:
        daemon = start_thread(tenants_file=two_tenants, sessions_max=4)
        with Client(daemon.target, token=ALICE), Client(daemon.target, token=ALICE):
            code, text = self.refusal(daemon.target, ALICE)
            assert code == "TOO_MANY_SESSIONS"
            assert "tenant_sessions_max is 2" in text
            with Client(daemon.target, token=BOB), Client(daemon.target, token=BOB):
                code, text = self.refusal(daemon.target, BOB)
                assert (code, text.partition(": ")[2]) == ("TOO_MANY_SESSIONS", "sessions_max is 4")

    def test_the_share_can_be_set(self, start_thread: StartThread, two_tenants: str) -> None:
        daemon = start_thread(tenants_file=two_tenants, sessions_max=4, tenant_sessions_max=3)
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(Client(daemon.target, token=ALICE))
            assert "tenant_sessions_max is 3" in self.refusal(daemon.target, ALICE)[1]

    @pytest.mark.parametrize(
        ("lower", "upper"),
        [("tenant_sessions_max", "sessions_max"), ("tenant_regions_bytes_max", "regions_bytes_max")],
    )
    def test_a_share_above_the_whole_is_a_contradiction(self, folder: Path, lower: str, upper: str) -> None:
        with pytest.raises(ConfigError, match=f"{lower}.*at most {upper}"):
            load_config(None, settings_in(folder, **{lower: 3, upper: 2}))


class TestStopDuringRecovery:
    """A stop that overtakes the recovery leaves the store as after any other run, if there is time."""

    async def stop_while_opening(
        self, config: DaemonConfig, opener: Callable[[DaemonConfig, StoreLimits], OpenedStore]
    ) -> bool:
        daemon = Daemon(config, environment={}, opener=opener)
        starting = asyncio.ensure_future(daemon.start())
        assert await asyncio.to_thread(self.entered.wait, CALL_S)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        stopping = asyncio.ensure_future(daemon.stop())
        await asyncio.sleep(0)
        self.opened.set()
        return await stopping

    @pytest.fixture(autouse=True)
    def gates(self) -> Iterator[None]:
        self.entered, self.opened = threading.Event(), threading.Event()
        yield
        self.opened.set()

    async def test_what_it_opens_is_closed(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = load_config(None, settings_in(folder, backend="file"))
        closed: list[bool] = []

        def opener(config: DaemonConfig, limits: StoreLimits) -> OpenedStore:
            self.entered.set()
            assert self.opened.wait(CALL_S)
            opened = open_store(config, limits)
            close = opened.store.close

            def watched() -> None:
                closed.append(True)
                close()

            monkeypatch.setattr(opened.store, "close", watched)
            return opened

        assert await self.stop_while_opening(config, opener)
        assert closed == [True]
        open_store(config, StoreLimits()).store.close()  # its lock is free

    async def test_one_that_fails_then_is_not_a_clean_stop(self, folder: Path) -> None:
        config = load_config(None, settings_in(folder, backend="file"))

        def opener(_: DaemonConfig, __: StoreLimits) -> OpenedStore:
            self.entered.set()
            assert self.opened.wait(CALL_S)
            raise OSError("the medium is gone")

        assert not await self.stop_while_opening(config, opener)
