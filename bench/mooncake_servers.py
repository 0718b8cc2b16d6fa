"""A Mooncake master and a store node on loopback. Uses nothing of hicache: it also runs under a peer's Python."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

START_TIMEOUT_S = 20.0
ENVIRONMENT = {
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_TIMEOUT_MS": "2000",
}
_NODE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
print(store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1]), flush=True)
sys.stdin.read()
"""


def free_port() -> int:
    """A port of the loopback interface that nobody has just now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class MooncakeServers:
    """One master, and one node that lends ``segment_bytes``, until ``close``; the node ends with this process, too."""

    def __init__(self, folder: Path, *, segment_bytes: int) -> None:
        """Returns when both serve. Raises OSError or TimeoutError."""
        self._folder = folder
        self._environment = {**ENVIRONMENT, **os.environ}
        self._processes: list[subprocess.Popen[bytes]] = []
        self.address, self.metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
        try:
            self._start_master()
            self._start_node(segment_bytes)
        except BaseException:
            self.close()
            raise

    def _start_master(self) -> None:
        program = Path(sys.executable).with_name("mooncake_master")
        (rpc, rpc_port), (metrics, metrics_port) = (each.split(":") for each in (self.address, self.metrics))
        flags = {"rpc_address": rpc, "rpc_port": rpc_port, "metrics_host": metrics, "metrics_port": metrics_port}
        # Short leases and early eviction: what a benchmark has put or read must make way for what it puts next.
        flags |= {"default_kv_lease_ttl": "200ms", "eviction_high_watermark_ratio": "0.7", "eviction_ratio": "0.2"}
        flags |= {"logtostderr": "true"}
        with (self._folder / "master.log").open("wb") as log:
            command = [str(program), *(f"--{name}={value}" for name, value in flags.items())]
            master = subprocess.Popen(command, stdout=log, stderr=log, env=self._environment)
        self._processes.append(master)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._serves():
            if master.poll() is not None or time.monotonic() > deadline_s:
                raise TimeoutError("the Mooncake master did not start")
            time.sleep(0.02)

    def _serves(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.metrics}/health", timeout=1) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _start_node(self, segment_bytes: int) -> None:
        with (self._folder / "node.log").open("wb") as log:
            node = subprocess.Popen(
                [sys.executable, "-c", _NODE, self.address, str(segment_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
            )
        self._processes.append(node)
        assert node.stdout is not None
        answer = node.stdout.readline().strip()
        if answer != b"0":
            raise OSError(f"the store node did not start: setup returned {answer.decode()}")

    def close(self) -> None:
        """End both."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._processes.clear()
