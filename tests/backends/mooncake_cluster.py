"""A real Mooncake master and its store nodes, on loopback and ports of their own, ended with the test."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from hicache.backends.mooncake_client import ENVIRONMENT, load_wheel
from hicache.backends.mooncake_settings import MooncakeSettings
from hicache.backends.mooncake_store import MooncakeBackend
from hicache.errors import ConfigError

MIB = 1 << 20
LEASE = "2s"
CLIENT_TTL_S = 5
READY_S = 20.0
REQUIRED = "HICACHE_REQUIRE_MOONCAKE"
NODE = Path(__file__).with_name("mooncake_node.py")


def require_wheel() -> Any:  # Any: the wheel has no types
    """The wheel's module; skips the test module without it, or fails where CI says that it must be there."""
    for name, value in {**ENVIRONMENT, "MC_TCP_BIND_ADDRESS": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    try:
        return load_wheel()
    except ConfigError as error:
        reason = f"MOONCAKE IS NOT TESTED: {error}"
        if os.environ.get(REQUIRED):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason, allow_module_level=True)


class MooncakeCluster:
    """One master and any number of nodes. A context manager."""

    def __init__(self, folder: Path, *, lease: str = LEASE, client_ttl_s: int = CLIENT_TTL_S) -> None:
        self.rpc_port, self.http_port = _free_ports(2)
        self.nodes: list[subprocess.Popen[str]] = []
        self.node_names: list[str] = []
        self._folder = folder
        self._flags = (f"--default_kv_lease_ttl={lease}", f"--client_ttl={client_ttl_s}")
        self._clients: list[Any] = []  # Any: as above
        self.master = self._start_master()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.rpc_port}"

    def settings(self, **changes: Any) -> MooncakeSettings:  # Any: what MooncakeSettings takes
        return MooncakeSettings(self.address, metrics=f"127.0.0.1:{self.http_port}", **changes)

    def open(self, **changes: Any) -> MooncakeBackend:  # Any: as above
        return MooncakeBackend.open(self.settings(**changes), reading_age_max_s=0.0)

    def start_node(self, segment_bytes: int) -> subprocess.Popen[str]:
        """A node that is ready when this returns."""
        log = (self._folder / f"node-{len(self.nodes)}.log").open("w")
        with log:
            node = subprocess.Popen(
                [sys.executable, str(NODE), self.address, str(segment_bytes)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.nodes.append(node)
        assert node.stdout is not None
        line = node.stdout.readline()
        assert line.startswith("READY"), (line, Path(log.name).read_text())
        self.node_names.append(line.split()[1])
        return node

    def client(self) -> Any:  # Any: as above
        """A client of the wheel itself, for what backends do not do."""
        client = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", self.address) == 0
        self._clients.append(client)
        return client

    def restart_master(self) -> None:
        self.kill_master()
        self.master = self._start_master()

    def hang(self, process: subprocess.Popen[str]) -> None:
        """Stop a process; none of its threads runs any more when this returns."""
        process.send_signal(signal.SIGSTOP)
        tasks = list(Path(f"/proc/{process.pid}/task").iterdir())
        eventually(lambda: all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks), 10)

    def kill_master(self) -> None:
        self.master.kill()
        self.master.wait()

    def http(self, path: str) -> str:
        url = f"http://127.0.0.1:{self.http_port}{path}"
        with urllib.request.urlopen(url, timeout=5) as response:
            return str(response.read().decode())

    def segments(self) -> list[dict[str, Any]]:  # Any: JSON
        return list(json.loads(self.http("/get_segments_detail"))["segments"])

    def overwrite(self, found: bytes, replacement: bytes) -> int:
        """Replace bytes in the memory of the first node; returns how often."""
        count = 0
        for segment in self.segments():
            start, size_bytes = int(segment["base_address"], 16), int(segment["size_bytes"])
            with open(f"/proc/{self.nodes[0].pid}/mem", "r+b", buffering=0) as memory:
                memory.seek(start)
                raw = memory.read(size_bytes)
                at = raw.find(found)
                while at >= 0:
                    count += 1
                    memory.seek(start + at)
                    memory.write(replacement)
                    at = raw.find(found, at + 1)
        return count

    def _start_master(self) -> subprocess.Popen[str]:
        with (self._folder / "master.log").open("a") as log:
            master = subprocess.Popen(
                [
                    str(Path(sys.executable).with_name("mooncake_master")),
                    "--rpc_address=127.0.0.1",
                    f"--rpc_port={self.rpc_port}",
                    "--metrics_host=127.0.0.1",
                    f"--metrics_port={self.http_port}",
                    "--logtostderr=true",
                    *self._flags,
                ],
                stderr=log,
                stdout=log,
                text=True,
            )
        eventually(self._is_ready, READY_S)
        return master

    def _is_ready(self) -> bool:
        try:
            return '"status":"ok"' in self.http("/health")
        except OSError:
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()
        for process in (*self.nodes, self.master):
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def eventually(is_so: Any, timeout_s: float) -> None:  # Any: whatever is true or false
    """Wait for another process, looking ten times a second."""
    until_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until_s, "it did not come to pass in time"
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports
