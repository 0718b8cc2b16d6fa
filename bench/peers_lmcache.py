"""LMCache's two servers: the one that engines of a node share memory with, and the older one over TCP."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from bench.mooncake_servers import free_port

START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 30.0
CHUNK_TOKENS = 256
MODEL = "bench"
ENVIRONMENT = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_LOG_LEVEL": "WARNING"}


class ServerProcess:
    """A server of LMCache with a TCP port. Raises OSError when it does not come up."""

    def __init__(self, folder: Path, command: Sequence[str], *, port: int) -> None:
        os.environ.update(ENVIRONMENT)
        with (folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError as error:
                if time.monotonic() > deadline_s or self._process.poll() is not None:
                    self.close()
                    said = (folder / "server.log").read_text(errors="replace").strip()
                    raise OSError(f"the server did not start: {said[-300:]}") from error
                time.sleep(0.05)

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class LmcacheServer:
    """The server of its multi-process mode, driven by the engine: shared memory, one request for each batch.

    Objects are chunks of a model with one layer whose pages are the benchmark's memory: each is one plain copy. A get
    is the look-up that reserves the chunks, and the retrieve. Nothing is verified.
    """

    def __init__(self, folder: Path, memory: memoryview) -> None:
        self._folder = folder
        self._memory = memory
        self._object_bytes = 0
        port = free_port()
        self._address = f"tcp://127.0.0.1:{port}"
        program = str(Path(sys.executable).with_name("lmcache"))
        command = [program, "server", "--host", "127.0.0.1", "--port", str(port), "--http-port", str(free_port())]
        command += ["--l1-size-gb", str(4 * len(memory) / (1 << 30)), "--eviction-policy", "noop"]
        command += ["--chunk-size", str(CHUNK_TOKENS), "--disable-observability"]
        command += ["--supported-transfer-mode", "engine_driven", "--shm-name", f"bench{os.getpid()}"]
        self._server = ServerProcess(folder, command, port=port)
        try:
            self._types = import_module("lmcache.v1.multiprocess.custom_types")
            factory = import_module("lmcache.v1.multiprocess.transport.factory").RequestClientFactory
            self._client = factory.create(self._address, context=import_module("zmq").Context())
        except BaseException:
            self._server.close()
            raise

    def _register(self, object_bytes: int) -> None:
        """The layout needs the size of an object, which the first batch tells."""
        torch = import_module("torch")
        context = import_module("lmcache.v1.multiprocess.transfer_context")
        pages = torch.from_numpy(np.frombuffer(self._memory, dtype=np.uint8)).view(torch.float16)
        self._pages = {"layer.0": pages.view(-1, CHUNK_TOKENS, object_bytes // 2 // CHUNK_TOKENS)}
        self._transfers = context.EngineDrivenTransferContext(1000, self._client)
        hints = {"kv_layout": "NHD"}
        self._transfers.register(self._pages, MODEL, 1, 1, CALL_TIMEOUT_S, layout_hints=hints)
        self._object_bytes = object_bytes
        self._start = np.frombuffer(self._memory, dtype=np.uint8).ctypes.data

    def _key(self, keys: Sequence[str], *, worker_id: int | None) -> Any:  # Any: a class of LMCache
        """One request of as many chunks as the batch has keys: tokens that no other batch begins with."""
        tokens = tuple(keys[0].encode()) + (0,) * (len(keys) * CHUNK_TOKENS - len(keys[0]))
        return self._types.IPCCacheServerKey(
            model_name=MODEL,
            world_size=1,
            num_kv_readers=1,
            worker_id=worker_id,
            token_ids=tokens,
            start=0,
            end=len(tokens),
            request_id=keys[0],
        )

    def _blocks(self, parts: Sequence[memoryview]) -> list[list[int]]:
        starts = [np.frombuffer(part, dtype=np.uint8).ctypes.data - self._start for part in parts]
        return [[start // self._object_bytes for start in starts]]

    def put(self, keys: Sequence[str], parts: Sequence[memoryview]) -> None:
        """One store."""
        if not self._object_bytes:
            self._register(parts[0].nbytes)
        self._run(self._transfers.submit_store, keys, parts)

    def get(self, keys: Sequence[str], parts: Sequence[memoryview]) -> None:
        """One look-up, and one retrieve of what it reserved."""
        key = self._key(keys, worker_id=None)
        self._client.lookup(key, 1).result(timeout=CALL_TIMEOUT_S)
        found = self._client.wait_prefetch_status(keys[0], CALL_TIMEOUT_S).result(timeout=2 * CALL_TIMEOUT_S)
        if found != len(keys):
            raise ValueError(f"{found} of {len(keys)} objects are there")
        self._run(self._transfers.submit_retrieve, keys, parts, skip_first_n_tokens=0)
        self._client.end_session(keys[0]).result(timeout=CALL_TIMEOUT_S)

    def _run(self, submit: Any, keys: Sequence[str], parts: Sequence[memoryview], **more: int) -> None:  # Any: a method
        event = self._transfers.create_recorded_event()
        key = self._key(keys, worker_id=0)
        future = submit(keys[0], key, self._pages, self._blocks(parts), event, 1, **more)
        if not future.result(timeout=CALL_TIMEOUT_S):
            raise ValueError("a batch failed")

    def delete(self, keys: Sequence[str]) -> None:
        """It has no delete: everything goes, also the last round, which is not read again."""
        self._client.clear().result(timeout=CALL_TIMEOUT_S)

    def close(self) -> None:
        """Stop the client and the server."""
        self._client.close()
        self._server.close()


class LmcacheTcpServer:
    """Its older server, by its own messages on one connection, as its connector sends them. Nothing is verified.

    A put has no answer; each batch ends with a question for its last object, which is answered after all puts before.
    """

    def __init__(self, folder: Path, memory: memoryview) -> None:
        port = free_port()
        command = [str(Path(sys.executable).with_name("lmcache_server")), "127.0.0.1", str(port), "cpu"]
        self._server = ServerProcess(folder, command, port=port)
        try:
            self._protocol = import_module("lmcache.v1.protocol")
            self._key_class = import_module("lmcache.utils").CacheEngineKey
            self._format = import_module("lmcache.v1.memory_management").MemoryFormat(1)
            self._torch = import_module("torch")
            self._socket = socket.create_connection(("127.0.0.1", port))
        except BaseException:
            self._server.close()
            raise

    def _send(self, command: str, key: str, size_bytes: int = 0) -> None:
        kind = self._protocol.ClientCommand[command]
        name = self._key_class(MODEL, 1, 0, int.from_bytes(key.encode(), "little"), self._torch.uint8)
        shape = self._torch.Size([1, 1, 1, size_bytes])
        message = self._protocol.ClientMetaMessage(kind, name, size_bytes, self._format, self._torch.uint8, shape)
        self._socket.sendall(message.serialize())

    def _answer(self) -> Any:  # Any: a class of LMCache
        raw = self._socket.recv(self._protocol.ServerMetaMessage.packlength(), socket.MSG_WAITALL)
        answer = self._protocol.ServerMetaMessage.deserialize(raw)
        if answer.code != self._protocol.ServerReturnCode.SUCCESS:
            raise ValueError("an object is not there")
        return answer

    def put(self, keys: Sequence[str], parts: Sequence[memoryview]) -> None:
        """One message each, and one question."""
        for key, part in zip(keys, parts, strict=True):
            self._send("PUT", key, part.nbytes)
            self._socket.sendall(part)
        self._send("EXIST", keys[-1])
        self._answer()

    def get(self, keys: Sequence[str], parts: Sequence[memoryview]) -> None:
        """One message and one answer each, into ``parts``."""
        for key, part in zip(keys, parts, strict=True):
            self._send("GET", key)
            if self._answer().length != part.nbytes:
                raise ValueError("an object has another size")
            received = 0
            while received < part.nbytes:
                received += self._socket.recv_into(part[received:])

    def delete(self, keys: Sequence[str]) -> None:
        """Nothing: the server never forgets."""

    def close(self) -> None:
        """Stop the client and the server."""
        self._socket.close()
        self._server.close()
