"""Host memory of exactly the size asked for, in a memfd that another process can map, touched before it is used."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from hicache.errors import ConfigError, UsageError
from hicache.pools.registration import HostRegistrar, RegistrationFailed, register_whole

_LOG = logging.getLogger(__name__)

SIZE_TOLERANCE = 0.02  # how much more than asked the kernel may take before start-up refuses
AVAILABLE_SHARE_MAX = 0.95  # of the memory that is available: the rest keeps the kernel from killing somebody
_TOUCH_CHUNK_BYTES = 64 * 1024 * 1024  # one step of first touch: some 20 ms, so that neighbours are not held up
_TOUCH_THREADS_MAX = 8
_HUGE_PAGE_POOL_BYTES_MIN = 128 * 1024 * 1024  # a half-used huge page at the end stays within the tolerance
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


class HostMemory:
    """A sealed memfd and its mapping: what L3 clients call SharedMemory.

    The mapping goes away with the last tensor or buffer over it, never before: ``close`` gives up the descriptor, the
    registration and this object's own hold. A forked child shares the bytes and must not close for the parent.
    """

    def __init__(
        self, name: str, size_bytes: int, *, setting: str, available_bytes: int, registrar: HostRegistrar | None = None
    ) -> None:
        """Reserve, touch and pin ``size_bytes``. Raises ConfigError in terms of ``setting``, and then holds nothing."""
        available_max = int(available_bytes * AVAILABLE_SHARE_MAX)
        if not 0 < size_bytes <= available_max:
            expected = (
                f"1 to {available_max} bytes ({AVAILABLE_SHARE_MAX:.0%} of the {available_bytes} that are available to "
                "this process now); lower it, or free memory, or raise the memory limit of the cgroup"
            )
            raise ConfigError(setting, size_bytes, expected)
        self.size_bytes = size_bytes
        self._descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._release: weakref.finalize[..., HostMemory] = weakref.finalize(self, os.close, self._descriptor)
        try:
            self._mapping: mmap.mmap | None = self._map(setting, registrar)
        except BaseException:
            self.close()
            raise

    @property
    def fd(self) -> int:
        """The memfd, which stays owned here. Raises UsageError after ``close``."""
        self._open_mapping()
        return self._descriptor

    @property
    def buffer(self) -> memoryview:
        """All bytes, writable; a view keeps the mapping alive. Raises UsageError after ``close``."""
        return memoryview(self._open_mapping())

    @property
    def is_open(self) -> bool:
        """Whether ``close`` has not been called."""
        return self._release.alive

    def tensor(self) -> torch.Tensor:
        """All bytes as uint8 [size_bytes]; it keeps the mapping alive. Raises UsageError after ``close``."""
        # Of a memoryview: torch keeps that, and with it an export that no one can unmap under the tensor.
        return torch.frombuffer(self.buffer, dtype=torch.uint8)

    def close(self) -> None:
        """Unpin, close the descriptor, and let go of the mapping. Idempotent."""
        self._release()
        self._mapping = None

    def _open_mapping(self) -> mmap.mmap:
        if not self.is_open or self._mapping is None:
            raise UsageError("this memory has been closed")
        return self._mapping

    def _map(self, setting: str, registrar: HostRegistrar | None) -> mmap.mmap:
        os.ftruncate(self._descriptor, self.size_bytes)
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
        mapping = mmap.mmap(self._descriptor, self.size_bytes)
        self.description = f"memfd of {self.size_bytes} bytes, {_advise_huge_pages(mapping)}"
        whole = torch.frombuffer(memoryview(mapping), dtype=torch.uint8)
        _touch(whole)
        taken_bytes = os.fstat(self._descriptor).st_blocks * 512
        if taken_bytes > self.size_bytes * (1 + SIZE_TOLERANCE):
            raise ConfigError(
                setting, self.size_bytes, f"a size that the kernel keeps to: it takes {taken_bytes} bytes"
            )
        if registrar is not None:
            self._register(registrar, whole.data_ptr(), setting)
            self.description += f", registered with {registrar.name}"
        return mapping

    def _register(self, registrar: HostRegistrar, address: int, setting: str) -> None:
        register_whole(registrar, address=address, size_bytes=self.size_bytes, setting=setting)
        self._release.detach()
        self._release = weakref.finalize(self, _unregister_and_close, registrar, address, self._descriptor, os.getpid())


def _unregister_and_close(registrar: HostRegistrar, address: int, descriptor: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child has the descriptor, but not the registration
        try:
            registrar.unregister(address)
        except RegistrationFailed as error:
            _LOG.warning("L2 stays pinned until the process ends: %s", error)
    os.close(descriptor)


def _touch(whole: torch.Tensor) -> None:
    """Make the kernel provide every page now, in parallel, not in the middle of a request."""

    def touch_chunk(start: int) -> None:
        whole[start : start + _TOUCH_CHUNK_BYTES : mmap.PAGESIZE].zero_()

    starts = range(0, len(whole), _TOUCH_CHUNK_BYTES)
    if len(starts) == 1:
        touch_chunk(0)
        return
    with ThreadPoolExecutor(min(_TOUCH_THREADS_MAX, os.cpu_count() or 1), "hicache-touch") as threads:
        for _ in threads.map(touch_chunk, starts):
            pass


def _advise_huge_pages(mapping: mmap.mmap) -> str:
    """Ask for huge pages where they can be had. Returns what came of it; never fails."""
    choice = "unknown"
    with contextlib.suppress(OSError, ValueError, IndexError):
        choice = _SHMEM_HUGE.read_text().split("[")[1].split("]")[0]
    if choice in ("never", "deny", "unknown") or len(mapping) < _HUGE_PAGE_POOL_BYTES_MIN:
        return f"pages of {mmap.PAGESIZE} bytes (shmem_enabled={choice})"
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        return f"pages of {mmap.PAGESIZE} bytes (huge pages refused: {error.strerror})"
    return f"huge pages (shmem_enabled={choice})"


def available_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process can still get: of the machine, and of each cgroup (version 2) that it is in."""
    available: list[int | None] = [_meminfo_bytes(proc / "meminfo", "MemAvailable")]
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                group = cgroups / line[3:].lstrip("/")
                available += [_cgroup_bytes(path) for path in (group, *group.parents) if path.is_relative_to(cgroups)]
    return max(0, min(size for size in available if size is not None))


def _meminfo_bytes(path: Path, field: str) -> int:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ConfigError(str(path), field, f"a line {field}, which this kernel does not give")


def _cgroup_bytes(group: Path) -> int | None:
    """What the limit of one cgroup leaves, counting page cache that the kernel would drop; None without a limit."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text())
        droppable = [
            line for line in (group / "memory.stat").read_text().splitlines() if line.startswith("inactive_file ")
        ]
        return int(limit) - used + sum(int(line.split()[1]) for line in droppable)
    except (OSError, ValueError):
        return None
