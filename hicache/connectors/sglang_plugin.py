"""hicache's plugin for SGLang: host memory that hicached can share, pages in doubt that are freed late, and word of new
weights.

SGLang loads it by itself, as the entry point ``hicache`` of ``sglang.srt.plugins``, where hicache is installed;
``SGLANG_PLUGINS`` chooses among plugins. Where it is not loaded, or a hook does not fit, pages go through staging.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from hicache.connectors.host_pages_holds import clear_hook, free_hook
from hicache.sealed_memory import sealed_memory

_POOLS = "sglang.srt.mem_cache.pool_host"
_WITH_SLOTS = (  # classes with a free and a clear of their own
    f"{_POOLS}.base.HostKVCache",
    f"{_POOLS}.mamba.MambaPoolHost",
    "sglang.srt.mem_cache.memory_pool_host.LogicalHostPool",
)
_UPDATES = tuple(
    f"sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_{source}"
    for source in ("disk", "distributed", "tensor", "ipc")
)

_log = logging.getLogger(__name__)


def register() -> None:
    """What SGLang calls in each of its processes, before it makes anything."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # only there is it to be had

    for target, hook in TARGETS.items():
        kind = HookType.BEFORE if target in _UPDATES else HookType.AROUND
        HookRegistry.register(target, hook, kind)


class _NamedAfterWeights(Protocol):
    def weights_will_change(self) -> None:
        """What it stores from now on would have the name of other weights."""
        ...


class LiveWeights:
    """Whether this process still has the weights that it loaded at its start. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_changed = False
        self._stores: weakref.WeakSet[_NamedAfterWeights] = weakref.WeakSet()

    @property
    def has_changed(self) -> bool:
        """Whether they have been replaced in place, in whole or in part."""
        with self._lock:
            return self._has_changed

    def tell(self, store: _NamedAfterWeights) -> None:
        """Tell ``store`` of every change from now on, for as long as it is there."""
        with self._lock:
            self._stores.add(store)

    def will_change(self, *update: Any) -> None:  # Any: SGLang's updater and its request
        """Before an update in place. Returns when every store knows."""
        with self._lock:
            self._has_changed = True
            stores = list(self._stores)
        for store in stores:
            store.weights_will_change()


LIVE_WEIGHTS = LiveWeights()  # of the process, as its weights are: SGLang's hooks are made before there is a store


def allocate_sealed(original: Callable[..., Any], allocator: Any, *shape: Any, **options: Any) -> Any:  # Any: SGLang's
    """Around the allocator of ``"allocator": "shm"``: the same memory, in a memfd that can never shrink.

    SGLang's own could, and hicached would be killed with SIGBUS if it did: it refuses such memory. Where there is none,
    or the allocator is not as it was when this was written, it is SGLang's own.
    """
    try:
        return _allocate_sealed(allocator, *shape, **options)
    except Exception as error:
        _log.warning("no sealed memory for a host pool, which hicached will not share: %r", error)
        return original(allocator, *shape, **options)


def _allocate_sealed(allocator: Any, dims: tuple[int, ...], dtype: Any, device: str) -> Any:  # Any: as above
    import torch

    if device != "cpu":
        raise ValueError(f"{device} is not the host")
    fds, mappings = allocator.fds, allocator.mms
    size_bytes = math.prod(dims) * torch.empty([], dtype=dtype).element_size()
    fd, mapping = sealed_memory("sglang_host_pool_sealed", size_bytes)
    try:
        _populate(mapping)
        tensor = torch.frombuffer(mapping, dtype=dtype, count=math.prod(dims)).reshape(dims)
    except BaseException:
        os.close(fd)
        raise
    allocator.dims, allocator.dtype = dims, dtype
    fds.append(fd)
    mappings.append(mapping)
    return tensor


def _populate(mapping: mmap.mmap) -> None:
    """Page tables for the pages that are there, before a device registers them."""
    try:
        mapping.madvise(23)  # MADV_POPULATE_WRITE, since Linux 5.14
    except OSError:
        for start in range(0, len(mapping), mmap.PAGESIZE):
            mapping[start] = 0


TARGETS: dict[str, Callable[..., Any]] = {
    f"{_POOLS}.common.ShmHostTensorAllocator.allocate": allocate_sealed,
    **{f"{owner}.free": free_hook for owner in _WITH_SLOTS},
    **{f"{owner}.clear": clear_hook for owner in _WITH_SLOTS},
    **dict.fromkeys(_UPDATES, LIVE_WEIGHTS.will_change),
}
