"""A real hicached and a service manager that is played: start, sockets, watchdog, reload, drain."""

from __future__ import annotations

import http.client
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import structlog

from hicache.daemon.config import DaemonConfig, load_config
from hicache.daemon.process_limits import check_limits, files_needed
from hicache.daemon.service_manager import ServiceManager
from hicache.errors import ConfigError
from hicache.outcome import Outcome
from hicache.wire import hicached_pb2 as pb
from tests.daemon.client import Client, refusal_code
from tests.daemon.raw_links import CALL_S, Memory, object_key, payload_of
from tests.daemon.rig import TOKEN, http_get, tenants_file, wait_until
from tests.systemd.manager import Manager

PAGE = 64 * 1024
KEYS = [object_key(number) for number in range(4)]


def put_and_get(client: Client) -> None:
    with Memory(PAGE) as memory:
        region = client.attach(memory).region_id
        memory.bytes[:] = payload_of(1, PAGE)
        assert client.put(region, KEYS[:1], [0], [PAGE]) in ([Outcome.OK], [Outcome.EXISTS])
    assert client.get_stream(KEYS[:1], [PAGE]) == [payload_of(1, PAGE)]


class TestSocketActivation:
    def test_all_unix_sockets_can_be_passed_and_outlive_the_service(self, manager: Manager) -> None:
        manager.listen_unix()
        http_address = manager.listen("127.0.0.1:0")
        files = {path: path.stat().st_ino for path in manager.folder.glob("s.sock*")}
        target = f"unix:{manager.folder}/s.sock"
        early = grpc.insecure_channel(target)  # connects while there is no service yet
        waiting = grpc.channel_ready_future(early)
        for _ in range(2):
            manager.start(http=http_address)
            manager.wait_ready()
            with Client(target) as client:
                put_and_get(client)
                assert client.welcome.memory_socket
            assert http_get(http_address, "/readyz") == (200, "ready\n")
            manager.signal(signal.SIGTERM)
            assert manager.wait_end() == 0, manager.log
            assert {path: path.stat().st_ino for path in manager.folder.glob("s.sock*") if path in files} == files
            assert {path.name for path in manager.folder.glob("s.sock*")} == {*(f.name for f in files), "s.sock.lock"}
        waiting.cancel()
        early.close()

    def test_who_comes_over_tcp_that_was_passed_is_not_taken_for_somebody_of_this_node(self, manager: Manager) -> None:
        listen, bulk = manager.listen("127.0.0.1:0"), manager.listen("127.0.0.1:0")
        manager.start(listen=listen, bulk_listen=bulk, tenants_file=tenants_file(manager.folder))
        manager.wait_ready()
        with Client(listen, token=TOKEN) as client:
            assert (client.welcome.memory_socket, client.welcome.bulk_port) == ("", int(bulk.rpartition(":")[2]))
            client.put_stream(KEYS[:1], [payload_of(1, PAGE)])
            assert client.get_stream(KEYS[:1], [PAGE]) == [payload_of(1, PAGE)]
        with pytest.raises(grpc.RpcError) as caught:
            Client(listen, token="no such token, ever")
        assert refusal_code(caught.value) == "BAD_TOKEN"

    def test_a_name_says_what_a_socket_is_for(self, manager: Manager) -> None:
        manager.listen(str(manager.folder / "other.sock"), name="socket")
        manager.listen(str(manager.folder / "probes.sock"), name="http")
        manager.start()
        manager.wait_ready()
        with Client(f"unix:{manager.folder}/other.sock") as client:
            put_and_get(client)
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(manager.folder / "probes.sock"))
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
        connection.close()

    def test_a_socket_that_no_setting_names_stops_the_start(self, manager: Manager) -> None:
        address = manager.listen("127.0.0.1:0")
        manager.start()
        assert manager.wait_end() == 2
        assert address in manager.log
        assert "FileDescriptorName=" in manager.log
        assert "Traceback" not in manager.log

    def test_sockets_of_another_process_are_left_alone(self, manager: Manager) -> None:
        manager.start(environment={"LISTEN_PID": "1", "LISTEN_FDS": "3"})
        manager.wait_ready()


class TestNotify:
    def test_a_start_says_how_far_the_recovery_is_and_asks_for_time(self, manager: Manager) -> None:
        manager.start(backend="file")
        manager.wait_ready()
        with Client(f"unix:{manager.folder}/s.sock") as client:
            client.put_stream(KEYS, [payload_of(number, 100) for number in range(4)])
        manager.signal(signal.SIGTERM)
        manager.wait_end()
        manager.heard.clear()
        manager.start(backend="file")
        manager.wait_ready()
        progress = [
            message for message in manager.heard if "EXTEND_TIMEOUT_USEC" in message and "STOPPING" not in message
        ]
        assert progress
        assert int(progress[0]["EXTEND_TIMEOUT_USEC"]) > 0
        assert progress[0]["STATUS"].startswith("recovering: ")

    def test_a_reload_is_begun_and_ended_and_a_wrong_one_says_why(self, manager: Manager) -> None:
        file = manager.folder / "hicached.toml"
        file.write_text('capacity_bytes = "32MiB"\nlog_level = "warning"\n')
        manager.start(config=str(file), capacity_bytes=None, object_bytes_max="1MiB")
        manager.wait_ready()
        for text, status in (
            ('capacity_bytes = "16MiB"\n', "serving clients"),
            ('capacity_bytes = "banana"\n', "serving clients; the last reload failed: capacity_bytes"),
        ):
            file.write_text(text)
            manager.signal(signal.SIGHUP)
            begun = manager.hear_until(lambda message: "RELOADING" in message)
            assert int(begun["MONOTONIC_USEC"]) > 0
            ended = manager.hear()
            assert ended["READY"] == "1"
            assert ended["STATUS"].startswith(status)

    def test_a_stop_says_so_and_for_how_long(self, manager: Manager) -> None:
        manager.start(drain_s=30)
        manager.wait_ready()
        with Client(f"unix:{manager.folder}/s.sock") as client:
            client.put_stream(KEYS[:1], [b"bytes"])
            _, lease = client.lookup(KEYS[:1], lease_ms=60_000)
            manager.signal(signal.SIGTERM)
            stopping = manager.hear_until(lambda message: "STOPPING" in message)
            assert int(stopping["EXTEND_TIMEOUT_USEC"]) > 30_000_000
            assert "1 leases" in stopping["STATUS"]
            client.stub.Lease(pb.LeaseRequest(session_secret=client.secret, lease_id=lease), timeout=CALL_S)
        assert manager.wait_end() == 0, manager.log

    def test_a_text_with_line_breaks_is_one_line(self, manager: Manager) -> None:
        told = ServiceManager({"NOTIFY_SOCKET": str(manager.folder / "notify")})
        told.status("an error\nREADY=1\r\nof two lines")
        assert manager.hear() == {"STATUS": "an error READY=1 of two lines"}


class TestWatchdog:
    def test_a_manager_that_hears_nothing_holds_up_nobody(
        self, manager: Manager, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told = ServiceManager({"NOTIFY_SOCKET": str(manager.folder / "notify")})
        monkeypatch.setattr("hicache.daemon.service_manager.SEND_TIMEOUT_S", 600.0)
        for _ in range(1000):  # more than wait in any queue
            told.alive()
            told.busy("recovering", within_s=1.0)
        assert manager.hear() == {"WATCHDOG": "1"}

    def test_it_is_fed_while_requests_are_served_and_not_when_the_process_stands_still(self, manager: Manager) -> None:
        manager.start(environment={"WATCHDOG_USEC": "300000"})
        manager.wait_ready()
        for _ in range(3):
            manager.hear_until(lambda message: message.get("WATCHDOG") == "1")
        manager.signal(signal.SIGSTOP)
        while not manager.is_silent(for_s=0.5):  # what was said before
            pass
        manager.signal(signal.SIGCONT)
        manager.hear_until(lambda message: message.get("WATCHDOG") == "1")

    @pytest.mark.parametrize(
        ("environment", "watchdog_s"),
        [
            ({"WATCHDOG_USEC": "30000000"}, 30.0),
            ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
            ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, 0.0),
            ({"WATCHDOG_USEC": "soon"}, 0.0),
            ({}, 0.0),
        ],
        ids=["ours", "ours by pid", "of another", "nonsense", "none"],
    )
    def test_who_wants_it(self, environment: dict[str, str], watchdog_s: float) -> None:
        assert ServiceManager(environment).watchdog_s == watchdog_s


class TestCredentials:
    def test_tenants_come_from_a_credential(self, manager: Manager) -> None:
        credentials = manager.folder / "credentials"
        credentials.mkdir()
        (credentials / "tenants").write_text(f"alice {TOKEN}\n")
        manager.start(tenants_file="credential:tenants", environment={"CREDENTIALS_DIRECTORY": str(credentials)})
        manager.wait_ready()
        with Client(f"unix:{manager.folder}/s.sock", token=TOKEN) as client:
            assert client.welcome.tenant == "alice"

    @pytest.mark.parametrize("name", ["nothing", "../tenants", "", "."])
    def test_one_that_was_not_passed_stops_the_start(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "tenants").write_text(f"alice {TOKEN}\n")
        (tmp_path / "credentials").mkdir()
        flags = {"tenants_file": f"credential:{name}", "socket": str(tmp_path / "s")}
        for environment in ({"CREDENTIALS_DIRECTORY": str(tmp_path / "credentials")}, {}):
            with pytest.raises(ConfigError, match="LoadCredential="):
                load_config(None, flags, environment)


class TestEarlySignals:
    """A signal that comes while Python still imports is answered when there is somebody to answer."""

    def test_sighup_is_a_reload_and_sigterm_a_clean_stop(self, manager: Manager) -> None:
        manager.start()
        wait_until(lambda: holds_signals(manager), what="the first line has run")
        manager.signal(signal.SIGHUP)
        manager.wait_ready()
        manager.hear_until(lambda message: "RELOADING" in message)
        assert manager.hear()["READY"] == "1"
        manager.signal(signal.SIGTERM)
        assert manager.wait_end() == 0

        manager.start()
        wait_until(lambda: holds_signals(manager), what="the first line has run")
        manager.signal(signal.SIGTERM)
        assert manager.wait_end() == 0, manager.log
        assert "Traceback" not in manager.log


def holds_signals(manager: Manager) -> bool:
    assert manager.process is not None
    status = Path(f"/proc/{manager.process.pid}/status").read_text(encoding="utf-8")
    blocked = next(line for line in status.splitlines() if line.startswith("SigBlk"))
    return bool(int(blocked.split()[1], 16) & 1 << (signal.SIGHUP - 1))


def test_a_limit_on_open_files_that_is_far_too_low_stops_the_start(manager: Manager) -> None:
    command = f"ulimit -n 100 && exec {sys.executable} -m hicache.daemon --socket={manager.folder}/s.sock"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.returncode == 2
    assert "LimitNOFILE=" in result.stderr
    assert "ulimit -n" in result.stderr


def test_limits_that_may_not_do_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_NOFILE: 700, resource.RLIMIT_MEMLOCK: 1 << 16}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], limits[which]))
    rdma = DaemonConfig(backend="mooncake", mooncake_master="10.0.0.1:1", mooncake_protocol="rdma")
    with structlog.testing.capture_logs() as told:
        check_limits(rdma)
    assert [line["log_level"] for line in told] == ["warning"] * 2
    assert ["LimitNOFILE=" in told[0]["event"], "LimitMEMLOCK=" in told[1]["event"]] == [True] * 2
    limits[resource.RLIMIT_NOFILE] = files_needed(DaemonConfig())
    with structlog.testing.capture_logs() as told:
        check_limits(DaemonConfig())
    assert told == []
