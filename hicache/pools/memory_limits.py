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
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            available += _cgroup_limits(line, cgroups)
    size_bytes, limit = min(available)
    return AvailableMemory(max(0, size_bytes), limit)


def _cgroup_limits(line: str, cgroups: Path) -> Iterator[AvailableMemory]:
    """``line``: of /proc/self/cgroup, such as ``0::/user.slice`` or ``4:memory:/docker/1f``."""
    number, controllers, path = line.split(":", 2)
    if number != "0" and "memory" not in controllers.split(","):
        return
    controller = _VERSION_2 if number == "0" else _VERSION_1
    root = cgroups / controller.folder
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):  # in a container the path may be the host's, and its limit at the root
        if folder.is_relative_to(root) and (left := _left_bytes(folder, controller)) is not None:
            yield AvailableMemory(left, str(folder / controller.limit))


def _left_bytes(group: Path, controller: _Controller) -> int | None:
    """What the limit of one cgroup leaves, counting page cache that the kernel would drop; None without a limit."""
    try:
        limit = (group / controller.limit).read_text().strip()
        if limit == "max":
            return None
        used = int((group / controller.used).read_text())
        stat = dict(line.split(maxsplit=1) for line in (group / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(stat.get(controller.droppable, 0))
    except (OSError, ValueError):
        return None


def _meminfo_bytes(path: Path, field: str) -> int:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ConfigError(str(path), field, f"a line {field}, which this kernel does not give")
