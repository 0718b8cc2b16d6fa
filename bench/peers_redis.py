"""Redis over loopback TCP, by its own client and by LMCache's."""

from __future__ import annotations

import select
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.mooncake_servers import free_port

START_TIMEOUT_S = 10.0


class RedisServer:
    """redis-server without persistence."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise FileNotFoundError("redis-server is not installed (Debian: redis-server)")
        self.port = free_port()
        settings = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self._process = subprocess.Popen([program, *settings], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                if time.monotonic() > deadline_s or self._process.poll() is not None:
                    self.close()
                    raise
                time.sleep(0.02)

    def close(self) -> None:
        """End it; it keeps nothing."""
        self._process.kill()
        self._process.wait()


class RedisPy:
    """redis-py with one pipeline a batch."""

    def __init__(self, folder: Path, memory: memoryview) -> None:
        client_class = import_module("redis").Redis  # of the peers' Python
        self._server = RedisServer(folder)
        self._client = client_class(port=self._server.port)

    def put(self, keys: Sequence[str], parts: Sequence[memoryview]) -> None:
        """One SET each."""
        pipeline = self._client.pipeline(transaction=False)
        for key, part in zip(keys, parts, strict=True):
            pipeline.set(key, part)
        if not all(pipeline.execute()):
            raise ValueError("an object was not stored")

    def get(self, keys: Sequence[str], parts: Sequence[memoryview]) -> None:
        """One GET each, copied to where it belongs."""
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.get(key)
        for part, value in zip(parts, pipeline.execute(), strict=True):
            part[:] = value

    def delete(self, keys: Sequence[str]) -> None:
        """One DEL for all."""
        self._client.delete(*keys)

    def close(self) -> None:
        """Stop the server."""
        self._server.close()


class NativeClient:
    """LMCache's native clients: batches are submitted, an event descriptor says when some are complete."""

    def __init__(self, client: Any) -> None:  # Any: a class of a C++ extension
        self._client = client

    def named(self, keys: Sequence[str]) -> list[str]:
        """The keys as the client wants them."""
        return list(keys)

    def run(self, future: int) -> None:
        """Wait for one batch. Raises ValueError unless all of it went well."""
        while True:
            select.select([self._client.event_fd()], [], [], 30.0)
            for number, is_ok, error, _ in self._client.drain_completions():
                if number != future or not is_ok:
                    raise ValueError(f"a batch failed: {error}")
                return

    def put(self, keys: Sequence[str], parts: Sequence[memoryview]) -> None:
        """One native batch."""
        self.run(self._client.submit_batch_set(self.named(keys), list(parts)))

    def get(self, keys: Sequence[str], parts: Sequence[memoryview]) -> None:
        """One native batch, straight into ``parts``."""
        self.run(self._client.submit_batch_get(self.named(keys), list(parts)))

    def delete(self, keys: Sequence[str]) -> None:
        """One native batch."""
        self.run(self._client.submit_batch_delete(self.named(keys)))

    def close(self) -> None:
        """Stop its threads."""
        self._client.close()


class LmcacheRedis(NativeClient):
    """LMCache's C++ client of Redis, with as many workers as its adapter starts."""

    def __init__(self, folder: Path, memory: memoryview) -> None:
        client_class = import_module("lmcache.lmcache_redis").LMCacheRedisClient
        self._server = RedisServer(folder)
        super().__init__(client_class("127.0.0.1", self._server.port, 4))

    def close(self) -> None:
        """Stop the client and the server."""
        super().close()
        self._server.close()
