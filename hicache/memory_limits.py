"""How much memory this process can still get, and what stands in the way of more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hicache.errors import ConfigError


class AvailableMemory(NamedTuple):
    """Bytes that can still be had, and what allows no more."""

    size_bytes: int
    limit: str


class _Controller(NamedTuple):
    """Where one version of cgroups says what; all in bytes."""

    folder: str
    limit: str
    used: str
    droppable: str  # page cache that the kernel would give up, in memory.stat; of the group and all below it


_VERSION_1 = _Controller("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Controller("", "memory.max", "memory.current", "inactive_file")


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> AvailableMemory:
    """The tightest of the machine's own limit and those of the cgroups, of either version, that this process is in."""
    meminfo = proc / "meminfo"
    available = [AvailableMemory(_meminfo_bytes(meminfo, "MemAvailable"), f"MemAvailable in {meminfo}")]
    for folder, controller in _cgroups(proc, cgroups):
        if (left := _left_bytes(folder, controller)) is not None:
            available.append(AvailableMemory(left, str(folder / controller.limit)))
    size_bytes, limit = min(available)
    return AvailableMemory(max(0, size_bytes), limit)


def total_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """All that this process could ever have: the memory of the machine, or of the container where that has less."""
    limits = [_meminfo_bytes(proc / "meminfo", "MemTotal")]
    for folder, controller in _cgroups(proc, cgroups):
        if (limit := _limit_bytes(folder, controller)) is not None:
            limits.append(limit)
    return min(limits)


def _cgroups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, _Controller]]:
    """Those that bound the memory of this process, with what reads them."""
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            yield from _cgroups_of(line, cgroups)


def _cgroups_of(line: str, cgroups: Path) -> Iterator[tuple[Path, _Controller]]:
    """``line``: of /proc/self/cgroup, such as ``0::/user.slice`` or ``4:memory:/docker/1f``."""
    number, controllers, path = line.split(":", 2)
    if number != "0" and "memory" not in controllers.split(","):
        return
    controller = _VERSION_2 if number == "0" else _VERSION_1
    root = cgroups / controller.folder
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):  # in a container the path may be the host's, and its limit at the root
        if folder.is_relative_to(root):
            yield folder, controller


def _limit_bytes(group: Path, controller: _Controller) -> int | None:
    """The limit of one cgroup; None without one."""
    try:
        limit = (group / controller.limit).read_text().strip()
        return None if limit == "max" else int(limit)
    except (OSError, ValueError):
        return None


def _left_bytes(group: Path, controller: _Controller) -> int | None:
    """What the limit of one cgroup leaves, counting page cache that the kernel would drop; None without a limit."""
    limit_bytes = _limit_bytes(group, controller)
    if limit_bytes is None:
        return None
    try:
        used = int((group / controller.used).read_text())
        stat = dict(line.split(maxsplit=1) for line in (group / "memory.stat").read_text().splitlines())
        return limit_bytes - used + int(stat.get(controller.droppable, 0))
    except (OSError, ValueError):
        return None


def _meminfo_bytes(path: Path, field: str) -> int:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ConfigError(str(path), field, f"a line {field}, which this kernel does not give")
