"""What others met in the environment that their daemon was started in, and in what became of it later."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.daemon.config import load_config
from hicache.daemon.log_stream import PIECE_BYTES, LogStream
from hicache.daemon.tenants import Tenants
from hicache.outcome import Outcome
from tests.daemon.client import Client
from tests.daemon.raw_links import Memory, object_key, payload_of
from tests.daemon.rig import (
    ALICE,
    TOKEN,
    DaemonProcess,
    flags_of,
    http_get,
    scrape,
    settings_in,
    tenants_file,
    wait_until,
)

Start = Callable[..., DaemonProcess]

PAGE = 64 * 1024
KEY = object_key(1)
NOBODY = 65534


def serves(target: str, *, token: str = "") -> bool:
    """Whether an object can be stored there and comes back right."""
    with Client(target, token=token) as client:
        assert client.put_stream([KEY], [payload_of(1, PAGE)])[0].is_ok
        return client.get_stream([KEY], [PAGE]) == [payload_of(1, PAGE)]


def end(process: subprocess.Popen[bytes]) -> None:
    """It stops when it is asked to, and else is left behind in no case."""
    process.terminate()
    try:
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_ot_001_a_daemon_without_standard_files_does_not_take_its_store_for_one(folder: Path) -> None:
    settings = settings_in(folder)
    command = [sys.executable, "-m", "hicache.daemon", *flags_of(settings)]
    ready = Path(str(settings["ready_file"]))
    process = subprocess.Popen(["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", *command])
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, what="it has started, or ended")
        assert [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)] == ["/dev/null"] * 3
        assert serves(f"unix:{settings['socket']}")
    finally:
        end(process)


def test_ot_002_a_log_that_nobody_reads_or_that_is_gone_holds_up_nobody(folder: Path) -> None:
    settings = settings_in(folder, log_level="debug")
    command = [sys.executable, "-m", "hicache.daemon", *flags_of(settings)]
    ready, target = Path(str(settings["ready_file"])), f"unix:{settings['socket']}"
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIECE_BYTES)
    process = subprocess.Popen(command, stdout=writer, stderr=writer)
    os.close(writer)
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, what="it has started, or ended")
        http = json.loads(ready.read_text())["http"]
        for _ in range(40):  # four lines each: more than the pipe holds
            with Client(target) as client, Memory(PAGE) as memory:
                client.attach(memory)
        assert http_get(http, "/healthz") == (200, "ok\n")
        assert serves(target)
        os.close(reader)
        reader = -1
        assert serves(target)
        assert http_get(http, "/healthz") == (200, "ok\n")
    finally:
        if reader >= 0:
            os.close(reader)
        end(process)


def test_ot_002_lines_that_were_lost_are_counted_where_they_are_missing() -> None:
    reader, writer = os.pipe()
    stream = LogStream(writer)
    line = "x" * 99 + "\n"
    written = 0
    while stream._lost_count == 0:
        stream.write(line)
        written += 1
    stream.write(line * 3)
    read = b""
    while len(read) < (written - 1) * len(line):
        read += os.read(reader, 1 << 20)
    assert read == line.encode() * (written - 1)
    stream.write("y" * (PIECE_BYTES * 2) + "\n")
    assert os.read(reader, 1 << 20).decode() == (
        "4 log lines were lost: nobody read them\n" + "y" * (PIECE_BYTES * 2) + "\n"
    )
    os.close(reader)
    stream.write(line)  # raises nothing
    os.close(writer)


@pytest.mark.parametrize("exists", [True, False])
def test_ot_003_an_engines_folder_for_metrics_is_not_hicacheds(start: Start, folder: Path, exists: bool) -> None:
    shared = folder / "prometheus"
    if exists:
        shared.mkdir()
    daemon = start(environment={"PROMETHEUS_MULTIPROC_DIR": str(shared), "prometheus_multiproc_dir": str(shared)})
    assert serves(daemon.target)
    assert scrape(daemon.ready["http"])["hicache_sessions_opened_total"] == 1
    assert not exists or list(shared.iterdir()) == []


def test_ot_004_a_proxy_for_the_web_is_not_asked_for_hicached(start: Start, folder: Path) -> None:
    daemon = start(listen="127.0.0.1:0", tenants_file=tenants_file(folder))
    code = f"""
from tests.scenarios.test_others_environment import serves
print(serves({daemon.ready["listen"]!r}, token={TOKEN!r}))
"""
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), "http://127.0.0.1:1")
    environment = os.environ | proxies
    for word in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        environment.pop(word, None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "True", done.stderr


SUFFIXES = ("", ".bulk", ".memory", ".admin")  # the last one that was bound first: health tells the first it finds


def test_ot_005_a_socket_that_a_cleaner_has_removed_makes_the_daemon_unhealthy(start: Start, folder: Path) -> None:
    daemon = start()
    assert http_get(daemon.ready["http"], "/healthz") == (200, "ok\n")
    for suffix in SUFFIXES:
        (folder / f"s.sock{suffix}").unlink()
        status, text = http_get(daemon.ready["http"], "/healthz")
        assert status == 503
        assert f"the socket {folder}/s.sock{suffix} is gone" in text
    assert daemon.terminate() < 20
    assert daemon.process.returncode == 0


def test_ot_006_the_stop_of_a_daemon_whose_socket_was_removed_leaves_that_of_the_next_one(
    start: Start, folder: Path
) -> None:
    first = start()
    for path in folder.glob("s.sock*"):
        path.unlink()  # its lock, too: nothing shows that there is a daemon
    second = start(path=folder / "store2", ready_file=folder / "ready2.json")
    first.terminate()
    assert serves(second.target)
    assert http_get(second.ready["http"], "/healthz")[0] == 200
    second.terminate()
    assert [path.name for path in folder.glob("s.sock*")] == ["s.sock.lock"]


PIDS = Path("/sys/fs/cgroup/pids")


def test_ot_007_a_connection_that_finds_no_thread_is_refused_by_the_limit_and_harms_nobody(start: Start) -> None:
    group = PIDS / f"hicache-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup of version 1 that limits tasks can be made here: {error}")
    try:
        daemon = start()
        with Client(daemon.target) as client:
            assert client.put_stream([KEY], [payload_of(1, PAGE)]) == [Outcome.OK]
            (group / "cgroup.procs").write_text(str(daemon.process.pid))
            (group / "pids.max").write_text("1")
            with Client(daemon.target) as other:
                assert other.present([KEY]) == [True]
                with pytest.raises(Exception, match=r"can't start new thread: raise the limit .*pids\.max"):
                    other.get_stream([KEY], [PAGE])
                assert client.get_stream([KEY], [PAGE]) == [payload_of(1, PAGE)]
                assert http_get(daemon.ready["http"], "/healthz")[0] == 200
                (group / "pids.max").write_text("max")
                assert other.get_stream([KEY], [PAGE]) == [payload_of(1, PAGE)]
        assert "Traceback" not in daemon.log
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (PIDS / "cgroup.procs").write_text(pid)  # or it would be in use
        group.rmdir()


def test_ot_008_out_of_descriptors_nothing_spins_and_all_is_well_again_when_there_are_some(start: Start) -> None:
    daemon = start()
    pid = daemon.process.pid
    with Client(daemon.target) as client:
        assert client.put_stream([KEY], [payload_of(1, PAGE)]) == [Outcome.OK]
        taken = {int(number) for number in os.listdir(f"/proc/{pid}/fd")}
        before, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(set(range(len(taken) + 1)) - taken), hard))
        refused = begin_connecting(str(daemon.settings["socket"]))
        wait_until(lambda: "cannot accept: [Errno 24]" in daemon.log, what="it has no descriptor for a connection")
        used_s = cpu_s(pid)
        time.sleep(0.5)
        assert cpu_s(pid) - used_s < 0.4, "a loop that accepts, fails and begins again takes all of it"
        assert client.get_stream([KEY], [PAGE]) == [payload_of(1, PAGE)], "who is connected is served"
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (before, hard))
        assert serves(daemon.target)
        for connection in refused:
            connection.close()


def begin_connecting(path: str) -> list[socket.socket]:
    """To every socket of a daemon; each connection waits in the backlog when it cannot be accepted."""
    connections = []
    for suffix in SUFFIXES:
        connections.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connections[-1].connect(path + suffix)
    return connections


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_ot_009_sockets_that_were_passed_to_another_process_are_not_taken(start: Start) -> None:
    left_over = {"LISTEN_PID": "1", "LISTEN_FDS": "3", "LISTEN_FDNAMES": "a:b:c"}
    daemon = start(environment=left_over | {"NOTIFY_SOCKET": "/nowhere/notify", "WATCHDOG_USEC": "1000000"})
    assert serves(daemon.target)
    assert http_get(daemon.ready["http"], "/healthz")[0] == 200


def test_ot_010_files_that_were_edited_on_windows_mean_what_they_say(tmp_path: Path) -> None:
    settings = tmp_path / "hicached.toml"
    settings.write_bytes(f'\ufeffcapacity_bytes = "1GiB"\r\nsocket = "{tmp_path}/s"\r\n'.encode())
    assert load_config(str(settings), {}).capacity_bytes == 1 << 30
    tenants = tmp_path / "tenants"
    tenants.write_bytes(f"\ufeff# who\r\nalice {ALICE} quota_bytes=1GiB\r\n".encode())
    loaded = Tenants.load(str(tenants))
    assert [tenant.name for tenant in loaded.settings] == ["alice"]
    tenants.write_bytes(f"\ufeffalice {ALICE}\r\n".encode())
    assert [tenant.name for tenant in Tenants.load(str(tenants)).settings] == ["alice"]


@pytest.mark.parametrize(("backend", "foreign"), [("lmdb", "hicache.lock"), ("file", "hicache.store")])
def test_ot_011_a_store_that_another_user_has_made_is_refused_in_one_line_that_names_the_file(
    folder: Path, backend: str, foreign: str
) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can start it as another user, with setpriv(1)")
    folder.chmod(0o777)
    first = DaemonProcess(folder, backend=backend).wait_ready()
    first.close()
    for path in [folder / "store", *(folder / "store").rglob("*"), *folder.glob("s.sock*")]:
        os.chown(path, NOBODY, NOBODY)
    os.chown(folder / "store" / foreign, 0, 0)
    (folder / "store" / foreign).chmod(0o600)
    settings = settings_in(folder, backend=backend)
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    command = [*user, sys.executable, "-m", "hicache.daemon", *flags_of(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "No module named" in done.stderr or "can't open file" in done.stderr:
        pytest.skip("another user cannot read the program here")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"Permission denied: '{folder}/store/{foreign}'" in done.stderr
