"""What `hicache doctor` looks at: each check is a plain function of what was read, and says what to do."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from hicache.cli.amounts import size_text
from hicache.cli.doctor_readings import UNLIMITED, Machine

OPEN_FILES_MIN = 8192
SHM_PART_MIN = 0.25  # of the memory
DISK_BYTES_PER_S_MIN = 200 << 20
DIRTY_BACKGROUND_PART_MIN = 0.2  # of the store's capacity
CLOCK_ERROR_S_MAX = 1.0
CLOCK_STEP_S_MAX = 1.0
KERNEL_MIN = (5, 10)
PYTHON_MIN = (3, 11)
FREE_INODES_MIN = 1 << 16
DAY_S = 86_400.0
CERTIFICATE_DAYS_MIN = 14  # as the alert has it


class Level(Enum):
    """How much it matters."""

    GOOD = "good"
    HINT = "hint"  # it works; it could be faster, or safer
    BAD = "bad"  # it does not work, or will not


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found, and what to do."""

    check: str
    level: Level
    found: str
    advice: str = ""


Check = Callable[[Machine], Iterator[Finding]]


def check_open_files(machine: Machine) -> Iterator[Finding]:
    """Each client, its memory and each file of the file backend takes a descriptor."""
    limit = machine.open_files_max
    found = "unlimited" if limit == UNLIMITED else str(limit)
    if limit != UNLIMITED and limit < OPEN_FILES_MIN:
        advice = f"raise it to {OPEN_FILES_MIN} or more: LimitNOFILE= in the unit, or `ulimit -n` before hicached"
        yield Finding("open files", Level.BAD, f"{found} (hard limit)", advice)
    else:
        yield Finding("open files", Level.GOOD, found)


def check_memlock(machine: Machine) -> Iterator[Finding]:
    """Engines pin host memory with the driver, which the limit on locked memory bounds for some of them."""
    limit = machine.memlock_bytes
    if limit == UNLIMITED:
        yield Finding("locked memory", Level.GOOD, "unlimited")
    else:
        advice = "engines that register host memory for RDMA need it: `ulimit -l unlimited`, or LimitMEMLOCK=infinity"
        yield Finding("locked memory", Level.HINT, f"{size_text(limit)}", advice)


def check_huge_pages(machine: Machine) -> Iterator[Finding]:
    """Host memory of engines and the index of hicached ask for transparent huge pages."""
    mode, shmem = machine.thp_mode, machine.thp_shmem_mode
    if mode == "never":
        advice = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: look-ups in a large index are faster"
        yield Finding("huge pages", Level.HINT, "transparent huge pages are off", advice)
    else:
        yield Finding("huge pages", Level.GOOD, f"transparent, {mode or 'not told by this kernel'}")
    if shmem in ("never", "deny"):
        advice = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled: engines share their memory by memfd"
        yield Finding("huge pages of shared memory", Level.HINT, shmem, advice)
    elif shmem:
        yield Finding("huge pages of shared memory", Level.GOOD, shmem)


def check_shared_memory(machine: Machine) -> Iterator[Finding]:
    """Memory that engines share is a memfd, which counts as shared memory, and containers bound /dev/shm."""
    size, memory = machine.shm_bytes, machine.memory_bytes
    if size is None:
        yield Finding("/dev/shm", Level.HINT, "is not there", "mount a tmpfs on it: ranks of an engine meet there")
    elif size < SHM_PART_MIN * memory:
        advice = "ranks of an engine meet there: `mount -o remount,size=50% /dev/shm`, or --shm-size of the container"
        yield Finding("/dev/shm", Level.HINT, f"{size_text(size)} of {size_text(memory)} memory", advice)
    else:
        yield Finding("/dev/shm", Level.GOOD, size_text(size))


def check_free_space(machine: Machine) -> Iterator[Finding]:
    """The store has to fit, and leave the floor."""
    disk = machine.disk
    if disk is None:
        return
    if not disk.is_writable:
        advice = f"make it writable for hicached's user: chown it, or `mount -o remount,rw` its {disk.kind}"
        yield Finding("store directory", Level.BAD, f"{disk.path} cannot be written ({disk.why_not})", advice)
    missing = max(0, machine.capacity_bytes - disk.stored_bytes) + machine.floor_bytes
    found = f"{size_text(disk.free_bytes)} free, {size_text(missing)} needed"
    if disk.free_bytes < missing:
        advice = f"lower capacity_bytes, make room on {disk.path}, or choose another path"
        yield Finding("free space", Level.BAD, found, advice)
    else:
        yield Finding("free space", Level.GOOD, found)
    if machine.backend == "file" and disk.free_inodes and disk.free_inodes < FREE_INODES_MIN:
        advice = "each object is a file: make the file system with more inodes, or use backend = 'lmdb'"
        yield Finding("free inodes", Level.BAD, str(disk.free_inodes), advice)


def check_disk_kind(machine: Machine) -> Iterator[Finding]:
    """A mapped store over a network is slow, and two machines would take each other for dead without locks."""
    disk = machine.disk
    if disk is None:
        return
    if disk.kind in ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p"):
        advice = "lmdb maps its files: use a local disk, or backend = 'file' with file_shared = true"
        level = Level.BAD if machine.backend == "lmdb" else Level.HINT
        yield Finding("file system", level, f"{disk.kind} at {disk.path}", advice)
    elif disk.kind in ("tmpfs", "ramfs", "overlay"):
        advice = "the store goes with it: give hicached a disk or a volume, unless that is what you want"
        yield Finding("file system", Level.HINT, f"{disk.kind} at {disk.path}", advice)
    else:
        yield Finding("file system", Level.GOOD, f"{disk.kind or 'unknown'} at {disk.path}")


def check_disk_speed(machine: Machine) -> Iterator[Finding]:
    """What comes back after a restart is read at the speed of the medium."""
    speed = machine.disk_write_bytes_per_s, machine.disk_read_bytes_per_s
    if None in speed:
        return
    write, read = (value or 0.0 for value in speed)
    found = f"writes {size_text(write)}/s, reads {size_text(read)}/s past the page cache"
    if min(write, read) < DISK_BYTES_PER_S_MIN:
        advice = "slower than prefill for many models: use an NVMe drive, or let the read policy compute instead"
        yield Finding("disk speed", Level.HINT, found, advice)
    else:
        yield Finding("disk speed", Level.GOOD, found)


def check_dirty_pages(machine: Machine) -> Iterator[Finding]:
    """A store larger than what may be dirty is written to the disk all the time."""
    allowed = machine.dirty_background_bytes
    found = f"the kernel writes back from {size_text(allowed)} of dirty pages on"
    if machine.backend == "lmdb" and allowed < DIRTY_BACKGROUND_PART_MIN * machine.capacity_bytes:
        advice = (
            "sysctl -w vm.dirty_background_ratio=60 vm.dirty_ratio=80: puts are several times faster, and lmdb "
            "promises nothing after a power loss anyway"
        )
        yield Finding("dirty pages", Level.HINT, found, advice)
    else:
        yield Finding("dirty pages", Level.GOOD, found)


def check_clock(machine: Machine) -> Iterator[Finding]:
    """Times to live and shared folders go by the wall clock."""
    if machine.clock_is_synchronised is None:
        yield Finding("clock", Level.HINT, "this kernel does not tell whether it is synchronised")
    elif not machine.clock_is_synchronised:
        advice = "start chronyd or systemd-timesyncd: ttl_s and file_shared go by the wall clock"
        yield Finding("clock", Level.HINT, "is not synchronised", advice)
    elif machine.clock_error_s > CLOCK_ERROR_S_MAX:
        advice = "see `chronyc tracking`: daemons that share a folder must agree within seconds"
        yield Finding("clock", Level.HINT, f"may be {machine.clock_error_s:.1f} s off", advice)
    else:
        yield Finding("clock", Level.GOOD, f"synchronised, at most {machine.clock_error_s:.3f} s off")
    if abs(machine.clock_step_s) > CLOCK_STEP_S_MAX:
        advice = "it was set while this command looked: let NTP slew it (chrony: makestep at the start only)"
        yield Finding("clock step", Level.BAD, f"jumped by {machine.clock_step_s:+.1f} s", advice)


def check_versions(machine: Machine) -> Iterator[Finding]:
    """What hicache is made with."""
    python = ".".join(map(str, machine.python))
    if machine.python < PYTHON_MIN:
        yield Finding("python", Level.BAD, python, f"install {'.'.join(map(str, PYTHON_MIN))} or newer")
    else:
        yield Finding("python", Level.GOOD, python)
    kernel = ".".join(map(str, machine.kernel))
    if machine.kernel < KERNEL_MIN:
        advice = f"{'.'.join(map(str, KERNEL_MIN))} or newer is tested: memfd seals and preadv2 are needed"
        yield Finding("kernel", Level.HINT, kernel, advice)
    else:
        yield Finding("kernel", Level.GOOD, kernel)
    for name, problem in machine.library_problems.items():
        yield Finding(
            "library", Level.BAD, f"{name}: {problem}", "install hicache again: pip install --upgrade hicache"
        )
    if not machine.library_problems:
        yield Finding("libraries", Level.GOOD, f"{len(machine.libraries)} as hicache {machine.version} needs them")


def check_daemon(machine: Machine) -> Iterator[Finding]:
    """Whether it answers, and is of this version."""
    if machine.daemon_problem:
        advice = f"start it (systemctl start hicached), or name its admin socket with --admin; asked: {machine.admin}"
        yield Finding("hicached", Level.HINT, f"does not answer: {machine.daemon_problem}", advice)
    elif machine.daemon_version != machine.version:
        advice = "restart hicached after an upgrade: engines with another protocol version are refused"
        yield Finding("hicached", Level.BAD, f"is {machine.daemon_version}, this hicache is {machine.version}", advice)
    else:
        yield Finding("hicached", Level.GOOD, f"answers, version {machine.daemon_version}")


def check_sockets(machine: Machine) -> Iterator[Finding]:
    """Whoever may open the sockets is trusted where there are no tenants; who may not has no L3."""
    for path, mode in machine.sockets.items():
        bits = stat.S_IMODE(mode)
        if not stat.S_ISSOCK(mode):
            yield Finding("socket", Level.BAD, f"{path} is no socket", "remove it, and start hicached again")
        elif bits & 0o002 and not machine.has_tenants:
            advice = (
                "without tenants_file everybody on this machine reads and writes: socket_mode = '0660', and a group"
            )
            yield Finding("socket", Level.BAD, f"{path} has mode {bits:04o}", advice)
        else:
            yield Finding("socket", Level.GOOD, f"{path} has mode {bits:04o}")


def check_certificates(machine: Machine) -> Iterator[Finding]:
    """Clients over TCP are turned away when one has ended; nobody is told before but by this and by an alert."""
    advice = "write a renewed one over it in one step (mv): new connections get it, nothing is to be reloaded"
    for path, left_s in machine.certificates_left_s.items():
        if left_s is None:
            yield Finding("certificate", Level.BAD, f"{path} has none that can be read", f"make {path} readable PEM")
        elif left_s <= 0:
            yield Finding("certificate", Level.BAD, f"one in {path} ended {-left_s / DAY_S:.1f} days ago", advice)
        elif left_s < CERTIFICATE_DAYS_MIN * DAY_S:
            yield Finding("certificate", Level.HINT, f"one in {path} ends in {left_s / DAY_S:.1f} days", advice)
        else:
            yield Finding("certificate", Level.GOOD, f"{path} holds for {left_s / DAY_S:.0f} days")


CHECKS: tuple[Check, ...] = (
    check_open_files,
    check_memlock,
    check_huge_pages,
    check_shared_memory,
    check_free_space,
    check_disk_kind,
    check_disk_speed,
    check_dirty_pages,
    check_clock,
    check_versions,
    check_daemon,
    check_sockets,
    check_certificates,
)
