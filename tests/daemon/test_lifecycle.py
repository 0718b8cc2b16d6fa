"""How a daemon starts, refuses to start, stops, and comes back."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from hicache.backends.faulty import Fault, FaultKind
from hicache.daemon.config import load_config
from hicache.daemon.notify import Ready, write_ready_file
from hicache.daemon.recovery import OpenedStore
from hicache.daemon.server import Daemon
from hicache.outcome import Outcome
from hicache.wire import hicached_pb2 as pb
from hicache.wire.bulk import BulkKind
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.daemon.raw_links import CALL_S, Memory, object_key, payload_of
from tests.daemon.rig import (
    START_S,
    TOKEN,
    DaemonProcess,
    flags_of,
    http_get,
    refused_start,
    settings_in,
    tenants_file,
    wait_until,
)

Start = Callable[..., DaemonProcess]

PAGE = 64 * 1024
KEYS = [object_key(number) for number in range(4)]
STOP_S_MAX = 5.0


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_acknowledged_objects_survive_sigkill_in_the_middle_of_puts(start: Start, backend: str) -> None:
    acknowledged: list[int] = []
    enough, gone = threading.Event(), threading.Event()
    daemon = start(backend=backend)

    def put_until_the_daemon_is_gone() -> None:
        with Client(daemon.target) as client, Memory(PAGE) as memory:
            region = client.attach(memory).region_id
            for number in range(100_000):
                memory.bytes[:] = payload_of(number, PAGE)
                try:
                    outcomes = client.put(region, [object_key(number)], [0], [PAGE])
                except ConnectionError:
                    break
                acknowledged.extend([number] if outcomes == [Outcome.OK] else [])
                if number == 30:
                    enough.set()
        gone.set()

    writer = threading.Thread(target=put_until_the_daemon_is_gone)
    writer.start()
    assert enough.wait(START_S)
    daemon.kill()
    assert gone.wait(START_S)
    writer.join()

    again = start(backend=backend)
    with Client(again.target) as client:
        kept = acknowledged[-200:]
        results = client.get_stream([object_key(number) for number in kept], [PAGE] * len(kept))
        assert results == [payload_of(number, PAGE) for number in kept]
        assert client.stats().objects in (len(acknowledged), len(acknowledged) + 1)


@pytest.mark.parametrize("backend", ["lmdb", "file"])
def test_usage_is_exact_after_a_clean_restart(start: Start, backend: str) -> None:
    daemon = start(backend=backend)
    with Client(daemon.target) as client:
        client.put_stream(KEYS, [payload_of(number, 1000 * (number + 1)) for number in range(4)])
        before = client.stats()
        store_id = client.welcome.store_id
    daemon.terminate()
    assert daemon.process.returncode == 0

    with Client(start(backend=backend).target) as client:
        after = client.stats()
        assert (after.objects, after.used_bytes, after.tenant_used_bytes) == (
            before.objects,
            before.used_bytes,
            10_000,
        )
        assert client.welcome.store_id == store_id


def test_a_put_that_runs_at_sigterm_is_finished_or_leaves_nothing(start: Start) -> None:
    size = 48 << 20
    daemon = start(capacity_bytes="256MiB")
    with Client(daemon.target) as client, Memory(size) as memory:
        region = client.attach(memory).region_id
        memory.bytes[:] = payload_of(1, size)
        running = client.begin(client.put, region, KEYS[:1], [0], [size])
        daemon.terminate()
        assert daemon.process.returncode == 0
        error = running.exception()
        acknowledged = error is None and running.result() == [Outcome.OK]

    with Client(start(capacity_bytes="256MiB").target) as client:
        if acknowledged or client.present(KEYS[:1]) == [True]:
            assert client.get_stream(KEYS[:1], [size]) == [payload_of(1, size)]
        else:
            assert client.stats().objects == 0


def test_a_second_sigterm_ends_the_process_at_once(start: Start, folder: Path) -> None:
    daemon = start(listen="127.0.0.1:0", tenants_file=tenants_file(folder))
    with Client(daemon.ready["listen"], token=TOKEN) as client:
        client.put_stream(KEYS[:1], [payload_of(1, 32 << 20)])
        client.bulk().request(BulkKind.GET, KEYS[:1], [32 << 20])
        daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: http_get(daemon.ready["http"], "/readyz")[0] == 503, what="the daemon is stopping")
        assert daemon.terminate() < 1.5, "the unread stream would have been waited for longer"
        assert daemon.process.returncode == -signal.SIGTERM


def test_sigint_stops_as_cleanly_as_sigterm(start: Start) -> None:
    daemon = start()
    daemon.process.send_signal(signal.SIGINT)
    assert daemon.wait_end() == 0


def test_calls_are_refused_while_the_daemon_stops(daemon: ThreadedDaemon, client: Client) -> None:
    stub, secret = client.stub, client.secret
    daemon.stop()
    assert daemon.stopped_clean
    with pytest.raises(grpc.RpcError) as caught:
        stub.Stats(_stats(secret), timeout=CALL_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


class TestConfigurationErrors:
    """One line on stderr with the setting, the value and what would be right; exit code 2; no traceback."""

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"io_threads": "many"}, ["io_threads", "many", "1 to 64"]),
            ({"listen": "127.0.0.1:0"}, ["listen", "tenants_file"]),
            ({"http": "example.com:80"}, ["http", "example.com:80", "IP address"]),
            ({"low_watermark": "0.99"}, ["low_watermark", "0.99", "high_watermark"]),
            ({"backend": "redis"}, ["backend", "redis", "lmdb"]),
            ({"socket": "/no/such/folder/s.sock"}, ["socket", "/no/such/folder"]),
            ({"path": "/proc/nothing/here"}, ["/proc/nothing/here"]),
            ({"tenants_file": "/no/such/file"}, ["tenants_file", "/no/such/file"]),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )
    def test_a_wrong_flag(self, start: Start, settings: dict[str, object], words: list[str]) -> None:
        code, line = refused_start(start(wait=False, **settings))
        assert code == 2
        assert all(word in line for word in words), line

    def test_an_unknown_setting_in_the_file_names_the_nearest_one(self, folder: Path) -> None:
        file = folder / "hicached.toml"
        file.write_text("capacity_byte = 5\n")
        code, output = run_cli("--config", str(file))
        assert code == 2
        assert "did you mean capacity_bytes" in output
        assert "Traceback" not in output

    def test_an_unknown_flag(self) -> None:
        code, output = run_cli("--capacity-byte", "5")
        assert code == 2
        assert "--capacity-bytes" in output

    def test_what_print_config_prints_is_read_back_to_the_same(self, folder: Path) -> None:
        code, printed = run_cli("--print-config", *flags_of(settings_in(folder)))
        assert code == 0
        (folder / "printed.toml").write_text(printed)
        assert run_cli("--print-config", "--config", str(folder / "printed.toml")) == (0, printed)

    def test_version_and_help(self) -> None:
        assert run_cli("--version") == (0, "hicached, version 0.1.0\n")
        assert "--capacity-bytes" in run_cli("--help")[1]


def run_cli(*arguments: str) -> tuple[int, str]:
    result = subprocess.run([sys.executable, "-m", "hicache.daemon", *arguments], capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


def test_the_ready_file_tells_where_the_daemon_is_and_goes_with_it(start: Start, folder: Path) -> None:
    daemon = start(ready_file=str(folder / "where.json"))
    told = json.loads((folder / "where.json").read_text())
    assert told == {
        "pid": daemon.process.pid,
        "socket": str(folder / "s.sock"),
        "listen": "",
        "bulk_listen": "",
        "http": daemon.ready["http"],
    }
    daemon.terminate()
    assert not (folder / "where.json").exists()


def test_sockets_are_for_their_owner_alone(start: Start, folder: Path) -> None:
    start(http=str(folder / "h.sock"))
    for name in ("s.sock", "s.sock.memory", "s.sock.bulk", "h.sock"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600


def test_socket_mode_is_obeyed(start: Start, folder: Path) -> None:
    start(socket_mode="0660")
    assert stat.S_IMODE((folder / "s.sock").stat().st_mode) == 0o660
    assert stat.S_IMODE((folder / "s.sock.memory").stat().st_mode) == 0o660


def lines_of(manager: socket.socket) -> dict[str, str]:
    """One message of sd_notify(3)."""
    return dict(line.split("=", 1) for line in manager.recv(1000).decode().splitlines())


@pytest.mark.parametrize("abstract", [False, True], ids=["path", "abstract"])
def test_systemd_is_told_when_the_daemon_is_ready_and_when_it_stops(start: Start, folder: Path, abstract: bool) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        name = f"@{folder.name}" if abstract else str(folder / "notify")
        manager.bind(name.replace("@", "\0") if abstract else name)
        manager.settimeout(START_S)
        daemon = start(environment={"NOTIFY_SOCKET": name})
        while "READY" not in (told := lines_of(manager)):  # how far the start has come
            assert "EXTEND_TIMEOUT_USEC" in told or "STATUS" in told
        assert told["READY"] == "1"
        daemon.terminate()
        assert lines_of(manager)["STOPPING"] == "1"


def test_a_stop_during_recovery_does_not_wait_for_it(folder: Path) -> None:
    entered, release = threading.Event(), threading.Event()

    def never_ends(*_: object) -> OpenedStore:
        entered.set()
        release.wait()
        raise AssertionError("nobody waits for this")

    async def steps() -> bool:
        config = load_config(None, settings_in(folder, http=str(folder / "h.sock")))
        daemon = Daemon(config, environment={}, opener=never_ends)
        starting = asyncio.ensure_future(daemon.start())
        await asyncio.to_thread(entered.wait, START_S)
        assert await asyncio.to_thread(_get_unix, config.http, "/readyz") == (503, "recovering\n")
        assert await asyncio.to_thread(_get_unix, config.http, "/healthz") == (200, "ok\n")
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return await asyncio.wait_for(daemon.stop(), STOP_S_MAX)

    assert asyncio.run(steps()) is False
    release.set()


def test_a_store_that_is_stuck_does_not_hold_up_the_stop(daemon: ThreadedDaemon, client: Client) -> None:
    with Memory(PAGE) as memory:
        attachment = client.attach(memory)
        stuck = daemon.backend.arm("put", Fault(FaultKind.LATE))
        running = client.begin(client.put, attachment.region_id, KEYS[:1], [0], [8])
        wait_until(stuck.entered.is_set, what="the put is stuck")

        daemon.stop(release_faults=False)

        assert daemon.stopped_clean is False
        assert running.exception() is not None
        assert not attachment.is_at_end(within_s=0.3), "a thread may still read the memory"
        stuck.release()


def _stats(secret: bytes) -> pb.StatsRequest:
    return pb.StatsRequest(session_secret=secret)


def _get_unix(path: str, target: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(path)
    connection.request("GET", target)
    response = connection.getresponse()
    result = response.status, response.read().decode()
    connection.close()
    return result


def test_what_a_daemon_that_was_killed_left_of_its_ready_file_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    (tmp_path / "ready.json.part").write_text('{"pid": 4')
    write_ready_file(str(path), Ready(5, socket="/run/hicached.sock", listen="", bulk_listen="", http=""))
    assert json.loads(path.read_text())["pid"] == 5
    assert list(tmp_path.iterdir()) == [path]
