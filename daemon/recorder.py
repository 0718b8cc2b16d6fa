"""A trace of what clients ask for, as `python -m bench.admission` replays it. No key, name or token is in it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, Self

import structlog

from hicache.errors import ConfigError

QUEUED_MAX = 256  # lookups that wait to be written; more are left out, and counted
_CLOSE_S = 1.0

log = structlog.get_logger("hicache.daemon")


class Target(Protocol):
    """What a trace is written to."""

    def write(self, line: bytes, /) -> object:
        """One whole line. Raises OSError where that ends the recording."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class Recorders:
    """Those that record at the moment. Event loop only."""

    def __init__(self) -> None:
        self._recorders: list[TraceRecorder] = []

    def __len__(self) -> int:
        return len(self._recorders)

    def add(self, recorder: TraceRecorder) -> None:
        """From now on it is told of every lookup."""
        self._recorders.append(recorder)

    def remove(self, recorder: TraceRecorder) -> None:
        """It is told of nothing more."""
        self._recorders.remove(recorder)

    def lookup(self, tenant: str, keys: Sequence[bytes]) -> None:
        """See ``TraceRecorder.lookup``."""
        for recorder in self._recorders:
            recorder.lookup(tenant, keys)


class TraceRecorder:
    """Writes a line for each lookup, from a thread of its own, until the file has ``bytes_max``.

    Blocks are named by a hash under a key that is drawn at the start and kept nowhere, tenants by their order: two
    traces cannot be joined, nor a trace with a store. ``lookup`` never waits. What cannot be written ends the recording
    only.
    """

    def __init__(
        self, target: Target, *, bytes_max: int, block_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Closes ``target`` at the end."""
        self.left_out = 0  # lookups that came while too many waited
        self._target = target
        self._left_bytes = bytes_max
        self._block_tokens = block_tokens
        self._clock = clock
        self._start_s = clock()
        self._secret = secrets.token_bytes(32)
        self._tenants: dict[str, int] = {}
        self._queue: queue.Queue[tuple[float, str, Sequence[bytes]] | None] = queue.Queue(QUEUED_MAX)
        self._is_over = False
        self._thread = threading.Thread(target=self._write_all, name="trace-recorder", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: str, *, bytes_max: int, block_tokens: int) -> Self:
        """Raises ConfigError where the file cannot be made; one that is there is replaced."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError("trace_file", path, f"a file that can be written ({error.strerror})") from error
        return cls(os.fdopen(descriptor, "wb"), bytes_max=bytes_max, block_tokens=block_tokens)

    def lookup(self, tenant: str, keys: Sequence[bytes]) -> None:
        """A client has asked for ``keys``, root first. They are not changed until they have been written."""
        if not keys or self._is_over:
            return
        try:
            self._queue.put_nowait((self._clock() - self._start_s, tenant, keys))
        except queue.Full:
            self.left_out += 1

    def end(self) -> None:
        """Take no more lookups; what waits is written, or left out where too much waits. Never waits."""
        self._is_over = True
        while True:
            try:
                self._queue.put_nowait(None)
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._queue.get_nowait()

    def close(self) -> None:
        """Write what waits, for at most a second, and close the file."""
        self._is_over = True
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)

    def _write_all(self) -> None:
        try:
            with contextlib.closing(self._target):
                while (lookup := self._queue.get()) is not None:
                    line = self._line(*lookup)
                    if len(line) > self._left_bytes:
                        log.info("the trace is full", trace_bytes_left=self._left_bytes)
                        break
                    self._left_bytes -= len(line)
                    self._target.write(line)
        except OSError as error:
            log.warning("the trace cannot be written any more", error=str(error))
        self._is_over = True

    def _line(self, at_s: float, tenant: str, keys: Sequence[bytes]) -> bytes:
        number = self._tenants.setdefault(tenant, len(self._tenants))
        request = {
            "timestamp": round(at_s * 1000),
            "input_length": len(keys) * self._block_tokens,
            "output_length": 0,
            "block_size": self._block_tokens,
            "hash_ids": [self._name(key) for key in keys],
            "tenant": f"tenant {number}",
        }
        return json.dumps(request, separators=(",", ":")).encode() + b"\n"

    def _name(self, key: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(key, digest_size=6, key=self._secret).digest())
