"""hicache's plugin for SGLang: host memory that hicached can share, and pages in doubt that are freed late.

SGLang loads it by itself, as the entry point ``hicache`` of ``sglang.srt.plugins``, where hicache is installed;
``SGLANG_PLUGINS`` chooses among plugins. Without it everything works through staging.
"""

from __future__ import annotations

import fcntl
import logging
import math
import mmap
import os
from collections.abc import Callable
from typing import Any

from hicache.connectors.host_pages_holds import clear_hook, free_hook

_POOLS = "sglang.srt.mem_cache.pool_host"
_HOOKS = (
    (f"{_POOLS}.base.HostKVCache.free", free_hook),
    (f"{_POOLS}.base.HostKVCache.clear", clear_hook),
    (f"{_POOLS}.mamba.MambaPoolHost.free", free_hook),
    (f"{_POOLS}.mamba.MambaPoolHost.clear", clear_hook),
)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_log = logging.getLogger(__name__)


def register() -> None:
    """What SGLang calls in each of its processes, before it makes anything."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # only there is it to be had

    HookRegistry.register(f"{_POOLS}.common.ShmHostTensorAllocator.allocate", allocate_sealed, HookType.AROUND)
    for target, hook in _HOOKS:
        HookRegistry.register(target, hook, HookType.AROUND)


def allocate_sealed(
    original: Callable[..., Any],  # Any here and below: SGLang's allocator, and its tensor
    allocator: Any,
    dims: tuple[int, ...],
    dtype: Any,
    device: str,
) -> Any:
    """Around the allocator of ``"allocator": "shm"``: the same memory, in a memfd that can never shrink.

    SGLang's own could, and hicached would be killed with SIGBUS if it did: it refuses such memory.
    """
    import torch

    if device != "cpu":
        return original(allocator, dims, dtype, device)
    size_bytes = math.prod(dims) * torch.empty([], dtype=dtype).element_size()
    fd = os.memfd_create("sglang_host_pool_sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        mapping = mmap.mmap(fd, size_bytes)
        _populate(mapping)
    except (OSError, ValueError) as error:
        os.close(fd)
        _log.warning("no sealed memory for a host pool, which hicached will not share: %s", error)
        return original(allocator, dims, dtype, device)
    allocator.dims, allocator.dtype = dims, dtype
    allocator.fds.append(fd)
    allocator.mms.append(mapping)
    return torch.frombuffer(mapping, dtype=dtype, count=math.prod(dims)).reshape(dims)


def _populate(mapping: mmap.mmap) -> None:
    """Page tables for the pages that are there, before a device registers them."""
    try:
        mapping.madvise(23)  # MADV_POPULATE_WRITE, since Linux 5.14
    except OSError:
        for start in range(0, len(mapping), mmap.PAGESIZE):
            mapping[start] = 0
