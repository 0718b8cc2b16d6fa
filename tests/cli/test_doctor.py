"""Every check of `hicache doctor` tells a good machine from a bad one, and says what to do."""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bench.certificates import Authority
from hicache.cli.doctor_checks import CHECKS, DAY_S, Check, Level
from hicache.cli.doctor_readings import UNLIMITED, Disk, Machine, read_machine
from tests.cli.conftest import run
from tests.daemon.conftest import ThreadedDaemon

GIB = 1 << 30
SOCKET = stat.S_IFSOCK | 0o600
DISK = Disk("/data", "ext4", 900 * GIB, 1 << 24, 0, True)
GOOD = Machine(
    version="0.1.0",
    open_files_max=1 << 20,
    memlock_bytes=UNLIMITED,
    memory_bytes=64 * GIB,
    shm_bytes=32 * GIB,
    thp_mode="madvise",
    thp_shmem_mode="advise",
    dirty_background_bytes=30 * GIB,
    kernel=(6, 1, 0),
    python=(3, 11, 7),
    clock_is_synchronised=True,
    clock_error_s=0.001,
    clock_step_s=0.0,
    backend="lmdb",
    capacity_bytes=100 * GIB,
    floor_bytes=GIB,
    has_tenants=False,
    disk=DISK,
    admin="/run/s.admin",
    disk_write_bytes_per_s=2.0 * GIB,
    disk_read_bytes_per_s=3.0 * GIB,
    libraries={"lmdb": "1.6"},
    daemon_version="0.1.0",
    sockets={"/run/s": SOCKET},
    certificates_left_s={"/etc/server.pem": 90 * DAY_S},
)

BAD: list[tuple[str, Level, Mapping[str, Any], str]] = [
    ("open files", Level.BAD, {"open_files_max": 1024}, "LimitNOFILE"),
    ("locked memory", Level.HINT, {"memlock_bytes": 8 << 20}, "LimitMEMLOCK"),
    ("huge pages", Level.HINT, {"thp_mode": "never"}, "transparent_hugepage/enabled"),
    ("huge pages of shared memory", Level.HINT, {"thp_shmem_mode": "never"}, "shmem_enabled"),
    ("/dev/shm", Level.HINT, {"shm_bytes": 64 << 20}, "--shm-size"),
    ("/dev/shm", Level.HINT, {"shm_bytes": None}, "mount a tmpfs"),
    ("store directory", Level.BAD, {"disk": replace(DISK, is_writable=False, why_not="Read-only")}, "remount,rw"),
    ("free space", Level.BAD, {"disk": replace(DISK, free_bytes=50 * GIB)}, "lower capacity_bytes"),
    ("free inodes", Level.BAD, {"backend": "file", "disk": replace(DISK, free_inodes=100)}, "more inodes"),
    ("file system", Level.BAD, {"disk": replace(DISK, kind="nfs4")}, "file_shared"),
    ("file system", Level.HINT, {"backend": "file", "disk": replace(DISK, kind="nfs4")}, "file_shared"),
    ("file system", Level.HINT, {"disk": replace(DISK, kind="tmpfs")}, "a disk or a volume"),
    ("disk speed", Level.HINT, {"disk_write_bytes_per_s": 50.0 * (1 << 20)}, "NVMe"),
    ("dirty pages", Level.HINT, {"dirty_background_bytes": 6 * GIB}, "vm.dirty_background_ratio"),
    ("clock", Level.HINT, {"clock_is_synchronised": False}, "chronyd"),
    ("clock", Level.HINT, {"clock_error_s": 4.0}, "chronyc tracking"),
    ("clock step", Level.BAD, {"clock_step_s": -3600.0}, "let NTP slew it"),
    ("python", Level.BAD, {"python": (3, 10, 2)}, "3.11"),
    ("kernel", Level.HINT, {"kernel": (4, 18)}, "5.10"),
    ("library", Level.BAD, {"library_problems": {"lmdb": "is 1.0, 1.6 is needed"}}, "pip install --upgrade"),
    ("hicached", Level.HINT, {"daemon_version": "", "daemon_problem": "nobody listens"}, "systemctl start hicached"),
    ("hicached", Level.BAD, {"daemon_version": "0.0.9"}, "restart hicached after an upgrade"),
    ("socket", Level.BAD, {"sockets": {"/run/s": stat.S_IFSOCK | 0o666}}, "socket_mode"),
    ("socket", Level.BAD, {"sockets": {"/run/s": stat.S_IFREG | 0o600}}, "remove it"),
    ("certificate", Level.HINT, {"certificates_left_s": {"/etc/server.pem": 13 * DAY_S}}, "mv"),
    ("certificate", Level.BAD, {"certificates_left_s": {"/etc/server.pem": -1.0}}, "mv"),
    ("certificate", Level.BAD, {"certificates_left_s": {"/etc/server.pem": None}}, "readable PEM"),
]


def findings(machine: Machine) -> list[Any]:
    return [finding for check in CHECKS for finding in check(machine)]


def test_a_good_machine_has_nothing_to_be_done() -> None:
    found = findings(GOOD)
    assert [finding for finding in found if finding.level is not Level.GOOD or finding.advice] == []
    assert len(found) >= len(CHECKS)


@pytest.mark.parametrize(("check", "level", "changes", "advice"), BAD)
def test_what_is_bad_is_found_alone_and_says_what_to_do(
    check: str, level: Level, changes: Mapping[str, Any], advice: str
) -> None:
    [finding] = [finding for finding in findings(replace(GOOD, **changes)) if finding.level is not Level.GOOD]
    assert (finding.check, finding.level) == (check, level)
    assert advice in finding.advice


@pytest.mark.parametrize("check", CHECKS)
def test_every_check_can_fail(check: Check) -> None:
    worst = [finding for _, _, changes, _ in BAD for finding in check(replace(GOOD, **changes))]
    assert any(finding.level is not Level.GOOD for finding in worst)


def test_everybody_may_open_a_socket_where_tenants_need_tokens() -> None:
    machine = replace(GOOD, has_tenants=True, sockets={"/run/s": stat.S_IFSOCK | 0o666})
    assert all(finding.level is Level.GOOD for finding in findings(machine))


def test_mooncake_has_no_disk() -> None:
    machine = replace(GOOD, backend="mooncake", disk=None, disk_write_bytes_per_s=None)
    assert all(finding.level is Level.GOOD for finding in findings(machine))


@pytest.mark.parametrize(("changes", "code"), [({}, 0), ({"thp_mode": "never"}, 0), ({"open_files_max": 100}, 1)])
def test_the_exit_code_is_1_where_something_is_bad(
    changes: Mapping[str, Any], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("hicache.cli.doctor")  # which commands are loaded depends on what ran before
    monkeypatch.setattr(module, "read_machine", lambda **_: replace(GOOD, **changes))
    ran = run("doctor", "--json", "-")
    assert (ran.code, ran.json["is_good"]) == (code, code == 0)
    assert len(ran.json["findings"]) == len(findings(GOOD))
    text = run("doctor")
    assert (text.code, f"{code} bad" in text.out) == (code, True)


def test_the_certificates_of_the_configuration_are_read(folder: Path, admin: str) -> None:
    ca = Authority(folder)
    server = ca.issue("server", ends=timedelta(days=7))
    config = folder / "hicached.toml"
    config.write_text(
        f'socket = "{folder}/s.sock"\npath = "{folder}/store"\ntenants_file = "{folder}/t"\nlisten = "127.0.0.1:0"\n'
        f'tls_certificate = "{server}"\ntls_key = "{server}"\ntls_client_ca = "{ca.file}"\n'
    )

    def left_days() -> dict[str, int | None]:
        machine = read_machine(config_file=str(config), path=None, admin=admin, token="", measures_disk=False)
        return {Path(k).name: None if s is None else round(s / DAY_S) for k, s in machine.certificates_left_s.items()}

    assert left_days() == {"server.pem": 7, "ca.pem": 1}
    ca.issue("server", ends=timedelta(days=90))
    ca.file.write_bytes(b"no certificate")
    assert left_days() == {"server.pem": 90, "ca.pem": None}


def test_this_machine_is_read(start_thread: Callable[..., ThreadedDaemon], folder: Path, admin: str) -> None:
    start_thread()
    config = folder / "hicached.toml"
    config.write_text(f'socket = "{folder}/s.sock"\npath = "{folder}/store"\ncapacity_bytes = "64MiB"\n')
    machine = read_machine(config_file=str(config), path=None, admin=admin, token="", measures_disk=True)
    assert (machine.daemon_version, machine.daemon_problem) == (machine.version, "")
    assert machine.disk is not None
    assert machine.disk.is_writable
    assert machine.disk.stored_bytes >= 64 << 20
    assert machine.disk.kind
    assert machine.capacity_bytes == 64 << 20
    assert machine.memory_bytes > GIB
    assert machine.kernel >= (3,)
    assert not machine.library_problems
    assert {"lmdb", "aiohttp", "click"} <= machine.libraries.keys()
    assert len(machine.sockets) == 4
    assert (machine.disk_write_bytes_per_s or 1) > 0
    assert abs(machine.clock_step_s) < 60
    assert not list(folder.glob("**/hicache-doctor-*"))


def test_bad_input_is_named(folder: Path) -> None:
    config = folder / "bad.toml"
    config.write_text("capacity_byte = 1\n")
    ran = run("doctor", "--config", config)
    assert (ran.code, "did you mean capacity_bytes?" in ran.err) == (2, True)
