"""A host pool as SGLang has it: slots by number, pages of several, freed by whoever frees them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hicache.connectors.host_pages_holds import HOLDS_ATTRIBUTE, clear_hook, free_hook
from tests.connectors.engine_memory import PAGES, EngineMemory

Indices = NDArray[np.int64]


class BareHostPool:
    """Slots are handed out first in, first out; freeing what is free is a fault."""

    page_size = 4

    def __init__(self, memory: EngineMemory) -> None:
        self.memory = memory
        self.size = PAGES * self.page_size
        self._lock = threading.RLock()
        self.clear()

    def clear(self) -> Any:
        with self._lock:
            self._free: list[int] = list(range(self.size))

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self, need_size: int) -> Indices:
        with self._lock:
            taken, self._free = self._free[:need_size], self._free[need_size:]
            assert len(taken) == need_size
            return np.array(taken, dtype=np.int64)

    def free(self, indices: Any) -> int:
        with self._lock:
            freed = indices.tolist()
            assert not set(freed) & set(self._free), "freed twice"
            self._free += freed
            return len(freed)


class HostPool(BareHostPool):
    """With the hooks of hicache's plugin, and the holds of its memory."""

    def __init__(self, memory: EngineMemory) -> None:
        super().__init__(memory)
        self.holds = memory.holds
        setattr(self, HOLDS_ATTRIBUTE, memory.holds)

    def free(self, indices: Any) -> int:
        return free_hook(BareHostPool.free, self, indices)

    def clear(self) -> Any:
        return clear_hook(BareHostPool.clear, self)
