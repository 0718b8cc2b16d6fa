"""Host memory of exactly the size asked for, in a memfd that another process can map, touched before it is used."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch

from hicache.errors import ConfigError, UsageError
from hicache.memory_limits import AvailableMemory, available_memory
from hicache.pools.numa import prefer_node
from hicache.pools.registration import HostRegistrar, Region, register_all, unregister_all

_LOG = logging.getLogger(__name__)

SIZE_TOLERANCE = 0.02  # how much more than asked the kernel may take before start-up refuses
AVAILABLE_SHARE_MAX = 0.95  # of the memory that is available: the rest keeps the kernel from killing somebody
_TOUCH_CHUNK_BYTES = 64 * 1024 * 1024  # one step of first touch: some 20 ms, so that neighbours are not held up
_TOUCH_REPORT_CHUNKS = 256  # a line in the log for each 16 GiB: some seconds
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
        self,
        name: str,
        size_bytes: int,
        *,
        setting: str,
        available: AvailableMemory | None = None,
        registrar: HostRegistrar | None = None,
        region_starts: Sequence[int] = (0,),
        numa_node: int | None = None,
    ) -> None:
        """Reserve, touch and pin ``size_bytes``. Raises ConfigError in terms of ``setting``, and then holds nothing.

        ``available`` bounds the size; None asks the machine. Memory is pinned region by region, each from one of
        ``region_starts`` to the next, in order: a copy of a device may not go beyond one of them.
        It comes from ``numa_node``, as far as that has room.
        """
        limit = available or available_memory()
        available_max = int(limit.size_bytes * AVAILABLE_SHARE_MAX)
        if not 0 < size_bytes <= available_max:
            expected = (
                f"1 to {available_max} bytes ({AVAILABLE_SHARE_MAX:.0%} of the {limit.size_bytes} that are left, by "
                f"{limit.limit}); lower it, or free memory, or raise that limit"
            )
            raise ConfigError(setting, size_bytes, expected)
        self.size_bytes = size_bytes
        self._descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._release: weakref.finalize[..., HostMemory] = weakref.finalize(self, os.close, self._descriptor)
        try:
            self._mapping: mmap.mmap | None = self._map(setting, numa_node)
            if registrar is not None:
                self._register(registrar, region_starts, setting)
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

    def _map(self, setting: str, numa_node: int | None) -> mmap.mmap:
        os.ftruncate(self._descriptor, self.size_bytes)
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
        mapping = mmap.mmap(self._descriptor, self.size_bytes)
        self.description = f"memfd of {self.size_bytes} bytes, {_advise_huge_pages(mapping)}"
        if numa_node is not None:
            self.description += f", {prefer_node(mapping, numa_node)}"
        whole = torch.frombuffer(memoryview(mapping), dtype=torch.uint8)
        _touch(whole)
        taken_bytes = os.fstat(self._descriptor).st_blocks * 512
        if taken_bytes > self.size_bytes * (1 + SIZE_TOLERANCE):
            raise ConfigError(
                setting, self.size_bytes, f"a size that the kernel keeps to: it takes {taken_bytes} bytes"
            )
        return mapping

    def _register(self, registrar: HostRegistrar, starts: Sequence[int], setting: str) -> None:
        base = self.tensor().data_ptr()
        regions = [Region(base + start, end - start) for start, end in pairwise((*starts, self.size_bytes))]
        register_all(registrar, regions, setting=setting)
        self._release.detach()
        self._release = weakref.finalize(self, _unregister_and_close, registrar, regions, self._descriptor, os.getpid())
        self.description += f", registered with {registrar.name}"


def _unregister_and_close(registrar: HostRegistrar, regions: Sequence[Region], descriptor: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child has the descriptor, but not the registration
        for error in unregister_all(registrar, regions):
            _LOG.warning("a part of L2 stays pinned until the process ends: %s", error)
    os.close(descriptor)


def _touch(whole: torch.Tensor) -> None:
    """Make the kernel provide every page now, in parallel, not in the middle of a request.

    One chunk is a call that holds neither the interpreter nor the memory map of the process for long.
    """

    def touch_chunk(start: int) -> None:
        whole[start : start + _TOUCH_CHUNK_BYTES : mmap.PAGESIZE].zero_()

    starts = range(0, len(whole), _TOUCH_CHUNK_BYTES)
    if len(starts) == 1:
        touch_chunk(0)
        return
    with ThreadPoolExecutor(min(_TOUCH_THREADS_MAX, os.cpu_count() or 1), "hicache-touch") as threads:
        for done, _ in enumerate(threads.map(touch_chunk, starts), 1):
            if done % _TOUCH_REPORT_CHUNKS == 0:
                _LOG.info("L2: %d of %d MiB touched", done * _TOUCH_CHUNK_BYTES >> 20, len(whole) >> 20)


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
