"""A Mooncake store over loopback TCP: a master, a node process that owns the memory, and this client."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import numpy as np

from bench.peers_child import SERVER_BYTES
from bench.peers_redis import free_port

START_TIMEOUT_S = 20.0
_ENVIRONMENT = {
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_TIMEOUT_MS": "2000",
}
_NODE = """
import sys, threading
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
status = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1])
print(status, flush=True)
sys.stdin.read()
"""


class MooncakeStore:
    """Registered buffers and batch calls only. It verifies nothing."""

    def __init__(self, folder: Path, memory: memoryview) -> None:
        os.environ.update(_ENVIRONMENT)
        store_class = import_module("mooncake.store").MooncakeDistributedStore  # of the peers' Python

        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            address = self._start_master(folder)
            self._start_node(address, folder)
            self._store = store_class()
            if status := self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", address):
                raise OSError(f"setup returned {status}")
            self._memory = np.frombuffer(memory, dtype=np.uint8)
            if status := self._store.register_buffer(self._memory.ctypes.data, self._memory.nbytes):
                raise OSError(f"register_buffer returned {status}")
        except BaseException:
            self._kill()
            raise

    def _start_master(self, folder: Path) -> str:
        port, metrics_port = free_port(), free_port()
        program = Path(sys.executable).with_name("mooncake_master")
        flags = {
            "rpc_address": "127.0.0.1",
            "rpc_port": port,
            "metrics_host": "127.0.0.1",
            "metrics_port": metrics_port,
        }
        with (folder / "master.log").open("wb") as log:
            command = [str(program), *(f"--{name}={value}" for name, value in flags.items()), "--logtostderr=true"]
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        return f"127.0.0.1:{port}"

    def _start_node(self, address: str, folder: Path) -> None:
        """The master takes a second to listen, so a node may have to be started more than once."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            with (folder / "node.log").open("ab") as log:
                node = subprocess.Popen(
                    [sys.executable, "-c", _NODE, address, str(SERVER_BYTES * 3 // 2)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
            self._processes.append(node)
            assert node.stdout is not None
            if node.stdout.readline().strip() == b"0":
                return
            node.kill()
            node.wait()
            if time.monotonic() > deadline_s:
                raise TimeoutError("the store node did not start")

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
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    @staticmethod
    def _places(parts: Sequence[memoryview]) -> tuple[list[int], list[int]]:
        arrays = [np.frombuffer(part, dtype=np.uint8) for part in parts]
        return [array.ctypes.data for array in arrays], [array.nbytes for array in arrays]

    @staticmethod
    def _require(statuses: Sequence[int], expected: Sequence[int]) -> None:
        if list(statuses) != list(expected):
            wrong = sorted({status for status, wanted in zip(statuses, expected, strict=True) if status != wanted})
            raise ValueError(f"Mooncake answered {wrong}")
