"""An L3 in memory: a dict of objects, with gates that hold calls up and faults that a test chooses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from hicache.checksum import payload_checksum
from hicache.l3 import Done, L3Item
from hicache.outcome import Outcome
from hicache.shared_memory import SharedMemory

Objects = dict[bytes, tuple[int, bytes]]  # key -> checksum, payload
Fault = Callable[[str, bytes], Outcome | None]  # (operation, key)


class MemoryL3:
    """Several may share one ``objects``, as engines share a daemon.

    A call waits for its gate (``lookup``, ``get``, ``put``; open unless closed by the test) and gives its caller the
    thread back at the deadline all the same; its bytes move, and ``done`` is called, when the gate opens.
    """

    def __init__(self, memory: SharedMemory, objects: Objects | None = None) -> None:
        self.objects: Objects = {} if objects is None else objects
        self.gates = {operation: threading.Event() for operation in ("lookup", "get", "put")}
        self.calls: dict[str, int] = dict.fromkeys(self.gates, 0)
        self.arrived = threading.Semaphore(0)  # released once for every call, when it has reached its gate
        self.fault: Fault = lambda operation, key: None
        self.is_closed = False
        self._memory = memory
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        for gate in self.gates.values():
            gate.set()

    def lookup(self, keys: Sequence[bytes], *, timeout_s: float) -> list[Outcome]:
        """See ``L3.lookup``."""
        self._enter("lookup")
        if not self.gates["lookup"].wait(timeout_s):
            return [Outcome.DEADLINE] * len(keys)
        with self._lock:
            return [
                self.fault("lookup", key) or (Outcome.OK if key in self.objects else Outcome.ABSENT) for key in keys
            ]

    def get(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        """See ``L3.get``."""
        self._transfer("get", items, self._get, timeout_s, done)

    def put(self, items: Sequence[L3Item], *, timeout_s: float, done: Done) -> None:
        """See ``L3.put``."""
        self._transfer("put", items, self._put, timeout_s, done)

    def close(self) -> None:
        """See ``L3.close``. What waits at a gate is cancelled."""
        self.is_closed = True
        for gate in self.gates.values():
            gate.set()
        for thread in self._threads:
            thread.join()

    def _enter(self, operation: str) -> None:
        with self._lock:
            self.calls[operation] += 1
        self.arrived.release()

    def _transfer(
        self,
        operation: str,
        items: Sequence[L3Item],
        move: Callable[[L3Item], Outcome],
        timeout_s: float,
        done: Done,
    ) -> None:
        self._enter(operation)
        ended = threading.Event()

        def work() -> None:
            was_open = self.gates[operation].is_set()
            self.gates[operation].wait()
            if self.is_closed and not was_open:
                done([Outcome.CANCELLED] * len(items))
            else:
                done([self.fault(operation, item.key) or move(item) for item in items])
            ended.set()

        thread = threading.Thread(target=work, name=f"memory-l3-{operation}", daemon=True)
        self._threads.append(thread)
        thread.start()
        ended.wait(timeout_s)

    def _get(self, item: L3Item) -> Outcome:
        with self._lock:
            stored = self.objects.get(item.key)
        if stored is None:
            return Outcome.ABSENT
        checksum, payload = stored
        if len(payload) != item.size_bytes:
            return Outcome.SIZE_MISMATCH
        if payload_checksum(item.key, payload) != checksum:
            return Outcome.CORRUPT
        with self._memory.buffer[item.offset : item.offset + item.size_bytes] as target:
            target[:] = payload
        return Outcome.OK

    def _put(self, item: L3Item) -> Outcome:
        with self._memory.buffer[item.offset : item.offset + item.size_bytes] as source:
            payload = bytes(source)
        with self._lock:
            if item.key in self.objects:
                return Outcome.EXISTS
            self.objects[item.key] = payload_checksum(item.key, payload), payload
        return Outcome.OK
