"""A Mooncake store over loopback TCP: a master, a node process that owns the memory, and this client."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import numpy as np

from bench.mooncake_servers import ENVIRONMENT, MooncakeServers
from bench.peers_child import SERVER_BYTES


class MooncakeStore:
    """Registered buffers and batch calls only. It verifies nothing."""

    def __init__(self, folder: Path, memory: memoryview) -> None:
        os.environ.update(ENVIRONMENT)
        store_class = import_module("mooncake.store").MooncakeDistributedStore  # of the peers' Python

        self._servers = MooncakeServers(folder, segment_bytes=SERVER_BYTES * 3 // 2)
        try:
            self._store = store_class()
            address = self._servers.address
            if status := self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", address):
                raise OSError(f"setup returned {status}")
            self._memory = np.frombuffer(memory, dtype=np.uint8)
            if status := self._store.register_buffer(self._memory.ctypes.data, self._memory.nbytes):
                raise OSError(f"register_buffer returned {status}")
        except BaseException:
            self._servers.close()
            raise

    def put(self, keys: Sequence[str], parts: Sequence[memoryview]) -> None:
        """One batch_put_from."""
        pointers, sizes = self._places(parts)
        self._require(self._store.batch_put_from(list(keys), pointers, sizes), [0] * len(sizes))

    def get(self, keys: Sequence[str], parts: Sequence[memoryview]) -> None:
        """One batch_get_into."""
        pointers, sizes = self._places(parts)
        self._require(self._store.batch_get_into(list(keys), pointers, sizes), sizes)

    def delete(self, keys: Sequence[str]) -> None:
        """Forced: reads have left leases on the objects."""
        for key in keys:
            self._store.remove(key, True)

    def close(self) -> None:
        """End every process."""
        self._store.unregister_buffer(self._memory.ctypes.data)
        self._store.close()
        self._servers.close()

    @staticmethod
    def _places(parts: Sequence[memoryview]) -> tuple[list[int], list[int]]:
        arrays = [np.frombuffer(part, dtype=np.uint8) for part in parts]
        return [array.ctypes.data for array in arrays], [array.nbytes for array in arrays]

    @staticmethod
    def _require(statuses: Sequence[int], expected: Sequence[int]) -> None:
        if list(statuses) != list(expected):
            wrong = sorted({status for status, wanted in zip(statuses, expected, strict=True) if status != wanted})
            raise ValueError(f"Mooncake answered {wrong}")
