"""What `hicache doctor` reads of the machine, in one value, so that every check can be shown a bad one."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import msgspec

from hicache.admin.client import Admin
from hicache.admin.verbs import STATUS
from hicache.certificates import earliest_expiration_s
from hicache.daemon.config import DaemonConfig, load_config
from hicache.errors import AdminRefused, ConfigError, DaemonUnreachable

UNLIMITED = -1
TRIAL_BYTES = 64 << 20
TRIAL_PIECE_BYTES = 4 << 20
DAEMON_TIMEOUT_S = 3.0
_LIBRARY = re.compile(r"([A-Za-z0-9_.-]+)\s*>=\s*([0-9.]+)")
_STA_UNSYNC = 0x0040  # of adjtimex: the clock follows nobody
_TIMEX_BYTES = 208


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system under a store."""

    path: str
    kind: str  # as /proc/mounts calls it
    free_bytes: int
    free_inodes: int
    stored_bytes: int  # of the store that is there
    is_writable: bool
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """What was read. None: it does not tell."""

    version: str
    open_files_max: int  # UNLIMITED, or the hard limit
    memlock_bytes: int  # UNLIMITED, or the hard limit
    memory_bytes: int
    shm_bytes: int | None
    thp_mode: str
    thp_shmem_mode: str
    dirty_background_bytes: int
    kernel: tuple[int, ...]
    python: tuple[int, ...]
    clock_is_synchronised: bool | None
    clock_error_s: float
    clock_step_s: float  # by how much the wall clock moved against the monotonic one while all this was read
    backend: str
    capacity_bytes: int
    floor_bytes: int
    has_tenants: bool
    disk: Disk | None
    admin: str
    disk_write_bytes_per_s: float | None = None
    disk_read_bytes_per_s: float | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)
    library_problems: Mapping[str, str] = field(default_factory=dict)
    daemon_version: str = ""
    daemon_problem: str = ""
    sockets: Mapping[str, int] = field(default_factory=dict)  # st_mode by path
    certificates_left_s: Mapping[str, float | None] = field(default_factory=dict)  # by path; None: it has none


def read_machine(*, config_file: str | None, path: str | None, admin: str, token: str, measures_disk: bool) -> Machine:
    """Reads all. Raises ConfigError for a configuration that hicached would not start with, too."""
    offset_s = time.time() - time.monotonic()
    config = _config(config_file)
    directory = Path(path or config.path)
    speeds = _disk_speeds(directory) if measures_disk and config.backend != "mooncake" else (None, None)
    daemon_version, daemon_problem = _ask(admin, token)
    libraries, problems = _libraries()
    is_synchronised, error_s = _clock()
    return Machine(
        version=metadata.version("hicache"),
        open_files_max=_limit(resource.RLIMIT_NOFILE),
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        shm_bytes=_size_of(Path("/dev/shm")),
        thp_mode=_chosen(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
        thp_shmem_mode=_chosen(_read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        dirty_background_bytes=_dirty_background_bytes(),
        kernel=_numbers(platform.release()),
        python=tuple(sys.version_info[:3]),
        clock_is_synchronised=is_synchronised,
        clock_error_s=error_s,
        clock_step_s=time.time() - time.monotonic() - offset_s,
        backend=config.backend,
        capacity_bytes=config.capacity_bytes,
        floor_bytes=config.free_space_floor_bytes,
        has_tenants=bool(config.tenants_file),
        disk=None if config.backend == "mooncake" else _disk(directory),
        admin=admin,
        disk_write_bytes_per_s=speeds[0],
        disk_read_bytes_per_s=speeds[1],
        libraries=libraries,
        library_problems=problems,
        daemon_version=daemon_version,
        daemon_problem=daemon_problem,
        sockets=_sockets(admin.removesuffix(".admin")),
        certificates_left_s={path: _certificates_left_s(path) for path in _certificate_files(config)},
    )


def _config(file: str | None) -> DaemonConfig:
    """The default one has its socket where packages make a folder, which need not be there to be doctored."""
    return DaemonConfig() if file is None else load_config(file, {})


def _certificate_files(config: DaemonConfig) -> list[str]:
    return [path for path in (config.tls_certificate, config.tls_client_ca) if path]


def _certificates_left_s(path: str) -> float | None:
    """Until the first certificate in a file ends; None where it has none, or cannot be read."""
    try:
        end_s = earliest_expiration_s(Path(path).read_bytes())
    except OSError:
        return None
    return None if end_s is None else end_s - time.time()


def _limit(which: int) -> int:
    _, hard = resource.getrlimit(which)
    return UNLIMITED if hard == resource.RLIM_INFINITY else hard


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _chosen(text: str) -> str:
    """The word in brackets of `always [madvise] never`."""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else ""


def _numbers(release: str) -> tuple[int, ...]:
    """The version in front of `6.1.0-18-amd64`."""
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", release)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _dirty_background_bytes() -> int:
    fixed = _read("/proc/sys/vm/dirty_background_bytes")
    if fixed.isdecimal() and int(fixed):
        return int(fixed)
    ratio = _read("/proc/sys/vm/dirty_background_ratio")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return memory * int(ratio) // 100 if ratio.isdecimal() else memory // 10


def _size_of(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _disk(directory: Path) -> Disk:
    """Of the nearest folder that exists: hicached makes the others."""
    nearest = directory.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    space = os.statvfs(nearest)
    is_writable, why_not = _try_to_write(nearest)
    return Disk(
        path=str(nearest),
        kind=_file_system(nearest),
        free_bytes=space.f_bavail * space.f_frsize,
        free_inodes=space.f_favail,
        stored_bytes=_stored_bytes(directory),
        is_writable=is_writable,
        why_not=why_not,
    )


def _try_to_write(directory: Path) -> tuple[bool, str]:
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True, ""
    except OSError as error:
        return False, error.strerror or str(error)


def _stored_bytes(directory: Path) -> int:
    """Of the large files of a store: those of the file backend are not walked through."""
    names = ("chunks.slab", "data.mdb")
    return sum((directory / name).stat().st_blocks * 512 for name in names if (directory / name).exists())


def _file_system(path: Path) -> str:
    """The kind of the mount with the longest name that ``path`` lies under."""
    best, kind = "", ""
    for line in _read("/proc/mounts").splitlines():
        _, place, found, *_ = line.split()
        place = place.encode().decode("unicode_escape")
        if (str(path) + "/").startswith(place.rstrip("/") + "/") and len(place) >= len(best):
            best, kind = place, found
    return kind


def _disk_speeds(directory: Path) -> tuple[float | None, float | None]:
    """Bytes a second that reach the medium, and that come from it past the page cache. None where it cannot be told."""
    nearest = directory.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    piece = memoryview(os.urandom(TRIAL_PIECE_BYTES))
    try:
        with tempfile.NamedTemporaryFile(dir=nearest, prefix="hicache-doctor-") as trial:
            started_s = time.perf_counter()
            for _ in range(TRIAL_BYTES // TRIAL_PIECE_BYTES):
                trial.write(piece)
            trial.flush()
            os.fsync(trial.fileno())
            write_s = time.perf_counter() - started_s
            os.posix_fadvise(trial.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started_s = time.perf_counter()
            for offset in range(0, TRIAL_BYTES, TRIAL_PIECE_BYTES):
                os.pread(trial.fileno(), TRIAL_PIECE_BYTES, offset)
            read_s = time.perf_counter() - started_s
    except OSError:
        return None, None
    return TRIAL_BYTES / max(write_s, 1e-9), TRIAL_BYTES / max(read_s, 1e-9)


def _clock() -> tuple[bool | None, float]:
    """Whether the kernel's clock follows another one, and how far it may be off, in seconds: adjtimex(2)."""
    raw = (ctypes.c_char * _TIMEX_BYTES)()
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(raw))
    except (OSError, AttributeError):
        return None, 0.0
    if state < 0:
        return None, 0.0
    longs = (ctypes.c_long * 5).from_buffer(raw)  # modes (with padding), offset, freq, maxerror, esterror
    status = ctypes.c_int.from_buffer(raw, 5 * ctypes.sizeof(ctypes.c_long))
    return not status.value & _STA_UNSYNC, longs[3] / 1e6


def _libraries() -> tuple[dict[str, str], dict[str, str]]:
    """Versions of what the plain install needs, and what is wrong with them."""
    found: dict[str, str] = {}
    problems: dict[str, str] = {}
    for requirement in metadata.requires("hicache") or []:
        match = _LIBRARY.match(requirement)
        if match is None or "extra ==" in requirement:
            continue
        name, floor = match[1], match[2]
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            problems[name] = f"is not installed, {floor} or newer is needed"
            continue
        if _numbers(found[name]) < _numbers(floor):
            problems[name] = f"is {found[name]}, {floor} or newer is needed"
    return found, problems


def _ask(admin: str, token: str) -> tuple[str, str]:
    """The version of the daemon, or why it is not known."""
    try:
        status = Admin(admin, token=token).ask(STATUS, timeout_s=DAEMON_TIMEOUT_S)
    except (DaemonUnreachable, AdminRefused, ConfigError) as error:
        return "", str(error)
    return str(msgspec.to_builtins(status).get("version", "")), ""


def _sockets(socket: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for suffix in ("", ".memory", ".bulk", ".admin"):
        try:
            found[socket + suffix] = os.stat(socket + suffix).st_mode
        except OSError:
            continue
    return found
