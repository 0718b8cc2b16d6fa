"""The process that another system is measured in: `PYTHON -m bench.peers_child NAME FOLDER OBJECT_BYTES BATCH`.

It runs under the Python that has the system installed, and uses nothing of hicache. Commands come as lines on stdin
(``put``, ``get``, ``close``), answers go as lines of JSON to stdout.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

ROUND_BYTES = 128 << 20  # what one command moves, at least
SERVER_BYTES = 3 * ROUND_BYTES  # room in the other system: two rounds are there at a time
PEERS = {
    "redis-py": "bench.peers_redis:RedisPy",
    "lmcache-redis": "bench.peers_redis:LmcacheRedis",
    "mooncake-store": "bench.peers_mooncake:MooncakeStore",
    "lmcache-fs": "bench.peers_files:LmcacheFs",
    "sglang-file": "bench.peers_files:SglangFile",
    "lmcache-server": "bench.peers_lmcache:LmcacheServer",
    "lmcache-tcp-server": "bench.peers_lmcache:LmcacheTcpServer",
}


class Peer(Protocol):
    """Another system, started in ``folder``. Every method raises when an object is not stored, there, or gone."""

    def put(self, keys: Sequence[str], parts: Sequence[memoryview]) -> None:
        """Store a batch of new objects."""
        ...

    def get(self, keys: Sequence[str], parts: Sequence[memoryview]) -> None:
        """Bring a batch into ``parts``: bytes that the system returns otherwise are copied there."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Make room."""
        ...

    def close(self) -> None:
        """Stop whatever was started."""
        ...


class Rounds:
    """Puts new objects round after round, and keeps the last two."""

    def __init__(self, peer: Peer, memory: memoryview, *, object_bytes: int, batch: int) -> None:
        self._peer = peer
        self._memory = memory
        self._object_bytes = object_bytes
        self._batches = len(memory) // object_bytes // batch
        self._batch = batch
        self._round = 0

    def put(self) -> dict[str, Any]:  # Any: a JSON object
        """A round of new objects. The one before the last is deleted first, off the clock."""
        if self._round >= 2:
            for number in range(self._batches):
                self._peer.delete(self._keys(self._round - 1, number))
        self._round += 1
        for place in range(self._batches * self._batch):
            self._part(place)[:8] = (self._round << 32 | place).to_bytes(8, "little")
        return self._timed("put")

    def get(self) -> dict[str, Any]:  # Any: as above
        """The last round, compared afterwards."""
        for place in range(self._batches * self._batch):
            self._part(place)[:8] = bytes(8)
        answer = self._timed("get")
        for place in range(self._batches * self._batch):
            if int.from_bytes(self._part(place)[:8], "little") != self._round << 32 | place:
                raise ValueError(f"object {place} came back with other bytes")
        return answer

    def _timed(self, op: str) -> dict[str, Any]:  # Any: as above
        call = getattr(self._peer, op)
        call_s: list[float] = []
        for number in range(self._batches):
            keys = self._keys(self._round, number)
            parts = [self._part(place) for place in range(number * self._batch, (number + 1) * self._batch)]
            start_s = time.perf_counter()
            call(keys, parts)
            call_s.append(time.perf_counter() - start_s)
        moved_bytes = self._batches * self._batch * self._object_bytes
        return {"moved_bytes": moved_bytes, "elapsed_s": sum(call_s), "call_s": call_s}

    def _keys(self, round_number: int, batch_number: int) -> list[str]:
        first = batch_number * self._batch
        return [f"bench-{round_number}-{place}" for place in range(first, first + self._batch)]

    def _part(self, place: int) -> memoryview:
        return self._memory[place * self._object_bytes : (place + 1) * self._object_bytes]


def open_peer(name: str, folder: Path, memory: memoryview) -> Peer:
    """Import and start a peer. Raises ImportError, or whatever it raises when it cannot start."""
    module, _, attribute = PEERS[name].partition(":")
    peer: Peer = getattr(importlib.import_module(module), attribute)(folder, memory)
    return peer


def main(name: str, folder: str, object_bytes: int, batch: int) -> None:
    """Answer commands until stdin ends. Whatever the peer prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:  # Any: a JSON object
        answers.write(json.dumps(value) + "\n")

    batch_bytes = object_bytes * batch
    memory = memoryview(mmap.mmap(-1, max(1, -(-ROUND_BYTES // batch_bytes)) * batch_bytes))
    for start in range(0, len(memory), 4096):
        memory[start] = start // 4096 & 0xFF
    try:
        peer = open_peer(name, Path(folder), memory)
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        return
    try:
        rounds = Rounds(peer, memory, object_bytes=object_bytes, batch=batch)
        answer({"ready": True})
        for line in sys.stdin:
            if line.strip() == "close":
                break
            answer(rounds.put() if line.strip() == "put" else rounds.get())
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
    finally:
        peer.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)  # threads of some systems never end
