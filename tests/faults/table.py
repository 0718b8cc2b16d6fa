"""What a client sees of each fault of the storage: run for real, and written as tables for docs/faults.md.

``python -m tests.faults.table --write`` refreshes the document; without it the tables go to stdout.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from hicache.backends.faulty import Fault, FaultKind, Operation
from hicache.client import DaemonL3
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.tenancy import DEFAULT_TENANT, physical_key, tenant_digest
from hicache.wire import hicached_pb2 as wire
from hicache.wire.protocol import pack_keys
from tests.client.hicached import HicachedProcess
from tests.client.memory import SmallMemory
from tests.client.support import Answer, get, key, payload, put, wait_until
from tests.daemon.client import Client
from tests.daemon.conftest import ThreadedDaemon
from tests.faults.other_client import OtherClient, connected

DOCUMENT = Path(__file__).parents[2] / "docs" / "faults.md"
BACKENDS = ("lmdb", "file")
OPERATIONS = ("get", "put", "delete", "lookup")
BULK = ("memory", "stream")
KILLED = "killed"
FAULTS = (*(kind.value for kind in FaultKind), KILLED)
CALL_S = 0.4  # the deadline of a call that meets a fault which outlives it
PATIENT_S = 10.0  # of any other
DELAY_S = 0.02
BOUND_S = 2.0  # a call is over so long after its deadline, on a machine however busy
SIZE_BYTES = 48 << 10
FILLER_OBJECTS = 64
FILLER = 2_000  # number of the first object that only fills the store
BASE_METRICS = (
    "hicache_inflight_bytes",
    "hicache_storage_queued_chunks",
    "hicache_storage_busy_threads",
    "hicache_regions",
    "hicache_region_bytes",
    "hicache_sessions",
    "hicache_store_leases",
)


@dataclass(frozen=True, slots=True)
class Cell:
    """What an operation came to while the fault lasted, and the same one when it was over."""

    during: str
    after: str

    def __str__(self) -> str:
        return f"`{self.during}`, then `{self.after}`"


Table = dict[tuple[str, str], str]  # by fault and operation


class TableRun:
    """One daemon over one backend that fails on command, and the clients that meet its faults."""

    def __init__(self, backend: str, folder: Path) -> None:
        self._daemon = ThreadedDaemon(folder, backend=backend, io_threads=3)
        address = self._daemon.target.replace("unix:", "unix://")
        self._memories = {"memory": SmallMemory(), "stream": SmallMemory(is_sealed=False)}
        self._clients = {bulk: connected(address, memory) for bulk, memory in self._memories.items()}
        self._raw = Client(self._daemon.target)
        self._other = OtherClient(address, SmallMemory(2 * SIZE_BYTES), size_bytes=SIZE_BYTES)
        self._number = 0
        for number in range(FILLER, FILLER + FILLER_OBJECTS):
            assert self._move("put", "memory", number) == "OK"
        wait_until(lambda: not self._readings()["hicache_storage_busy_threads"], what="the end of the puts")
        self._base = self._readings()

    def close(self) -> None:
        self._daemon.backend.disarm()
        for client in self._clients.values():
            client.close()
        for memory in self._memories.values():
            memory.close()
        self._other.close()
        self._raw.close()
        self._daemon.stop()

    def table(self) -> Table:
        """Every fault that a backend can have, for every operation."""
        return {(kind.value, operation): self._row(kind, operation) for kind in FaultKind for operation in OPERATIONS}

    def _row(self, kind: FaultKind, operation: str) -> str:
        bulks = BULK if operation in ("get", "put") else BULK[:1]
        return text_of([self._cell(kind, operation, bulk) for bulk in bulks])

    def _cell(self, kind: FaultKind, operation: str, bulk: str) -> Cell:
        """Meet the fault, with another client at work beside, and require that nothing of it stays."""
        self._number += 1
        number = self._number
        if operation != "put":
            assert self._move("put", "memory", number) == "OK"
        with self._other:
            rounds_before = self._other.rounds
            faults = self._arm(kind, number)
            started_s = time.monotonic()
            with ThreadPoolExecutor(1) as pool:
                call = pool.submit(self._do, operation, bulk, number, faults)
                during = call.result()
            elapsed_s = time.monotonic() - started_s
            assert elapsed_s < _deadline_s(faults) + BOUND_S, f"{kind.value}: a {operation} took {elapsed_s:.2f} s"
            wait_until(lambda: self._other.rounds > rounds_before, what="a round of the other client")
        self._daemon.backend.disarm()
        assert not self._other.wrong, f"{kind.value} of a {operation} disturbed another client: {self._other.wrong}"
        wait_until(lambda: self._readings() == self._base, what=f"{self._base} after {kind.value}: {self._readings()}")
        wait_until(lambda: not any(client.status().items_in_doubt for client in self._clients.values()))
        after = self._do(operation, bulk, number, [])
        self._raw.delete([key(number)])
        return Cell(during, after)

    def _arm(self, kind: FaultKind, number: int) -> list[Fault]:
        """On every call of the backend that the operation may make, for this object alone."""
        keys = frozenset({physical_key(tenant_digest(DEFAULT_TENANT), key(number))})
        operations: tuple[Operation, ...] = ("put", "get_into", "contains", "delete")
        return [
            self._daemon.backend.arm(operation, Fault(kind, keys=keys, delay_s=DELAY_S)) for operation in operations
        ]

    def _do(self, operation: str, bulk: str, number: int, faults: Sequence[Fault]) -> str:
        """One operation; what hangs in a fault is released when the client has its answer, or has given up."""
        if operation in ("get", "put"):
            return self._move(operation, bulk, number, faults)
        outcome = (
            deleted(self._raw, number, timeout_s=_deadline_s(faults))
            if operation == "delete"
            else self._look_up(number)
        )
        for fault in faults:
            fault.release()
        return outcome

    def _move(self, operation: str, bulk: str, number: int, faults: Sequence[Fault] = ()) -> str:
        client, view = self._clients[bulk], self._memories[bulk].buffer
        content = payload(number, SIZE_BYTES)
        view[:SIZE_BYTES] = content if operation == "put" else bytes(SIZE_BYTES)
        answer = Answer()
        move = client.get if operation == "get" else client.put
        started_s = time.monotonic()
        move([L3Item(key(number), 0, SIZE_BYTES)], timeout_s=_deadline_s(faults), done=answer)
        assert time.monotonic() - started_s < _deadline_s(faults) + BOUND_S, f"a {operation} kept its thread too long"
        for fault in faults:
            fault.release()
        (outcome,) = answer.wait()
        assert outcome is not Outcome.OK or view[:SIZE_BYTES] == content, f"a {operation} is OK with wrong bytes"
        return outcome.name

    def _look_up(self, number: int) -> str:
        outcomes, lease = self._raw.lookup([key(number)], lease_ms=10_000, timeout_s=PATIENT_S)
        assert (lease > 0) == (outcomes == [Outcome.OK])
        assert not lease or self._raw.lease(lease, lease_ms=0)
        return outcomes[0].name

    def _readings(self) -> dict[str, float]:
        return {name: self._daemon.metric(name) for name in BASE_METRICS}


def _deadline_s(faults: Sequence[Fault]) -> float:
    outlives = (FaultKind.NEVER, FaultKind.LATE)
    return CALL_S if any(fault.kind in outlives for fault in faults) else PATIENT_S


def killed_column(backend: str, folder: Path) -> Table:
    """What a client sees of a daemon that is killed while a call waits for it, and of the next daemon."""
    daemon = HicachedProcess(folder, backend=backend, capacity_bytes="64MiB")
    daemon.start()
    memory = SmallMemory()
    client = connected(daemon.address, memory)
    try:
        table = {}
        for number, operation in enumerate(OPERATIONS):
            table[KILLED, operation] = str(_killed_in(daemon, client, memory, operation, number))
        return table
    finally:
        client.close()
        memory.close()
        daemon.end()


def _killed_in(daemon: HicachedProcess, client: DaemonL3, memory: SmallMemory, operation: str, number: int) -> Cell:
    item = L3Item(key(number), 0, SIZE_BYTES)
    memory.buffer[:SIZE_BYTES] = payload(number, SIZE_BYTES)
    if operation != "put":
        assert put(client, [item]) == [Outcome.OK]
    is_called = threading.Event()

    def call(raw: Client) -> str:
        is_called.set()
        if operation == "delete":
            return deleted(raw, number, timeout_s=10.0)
        if operation == "lookup":
            return client.lookup([item.key], timeout_s=10.0)[0].name
        return (get if operation == "get" else put)(client, [item])[0].name

    with ThreadPoolExecutor(1) as pool, Client(daemon.address.replace("unix://", "unix:")) as raw:
        daemon.signal(signal.SIGSTOP)
        running = pool.submit(call, raw)
        wait_until(is_called.is_set, what="the call")
        daemon.signal(signal.SIGKILL)
        during = running.result(10.0 + BOUND_S)
    daemon.start()
    wait_until(lambda: client.lookup([key(0)], timeout_s=10.0) == [Outcome.OK], what="the next daemon answers")
    with Client(daemon.address.replace("unix://", "unix:")) as raw:
        after = call(raw)
    assert after != "OK" or memory.buffer[:SIZE_BYTES] == payload(number, SIZE_BYTES)
    return Cell(during, after)


def deleted(raw: Client, number: int, *, timeout_s: float) -> str:
    """The outcome of a delete, or the gRPC status that came in its place."""
    packed, key_bytes = pack_keys([key(number)])
    request = wire.KeysRequest(session_secret=raw.secret, keys=packed, key_bytes=key_bytes)
    try:
        return Outcome(raw.stub.Delete(request, timeout=timeout_s).outcomes[0]).name
    except grpc.RpcError as error:
        return str(error.code().name)


def text_of(cells: Sequence[Cell]) -> str:
    """One text where memory and stream agree, else both."""
    if len(set(cells)) == 1:
        return str(cells[0])
    return "; ".join(f"{bulk}: {cell}" for bulk, cell in zip(BULK, cells, strict=True))


def run_backend(backend: str) -> Table:
    """All of the table of one backend."""
    with tempfile.TemporaryDirectory(prefix="hft-") as folder, tempfile.TemporaryDirectory(prefix="hft-") as other:
        with contextlib.closing(TableRun(backend, Path(folder))) as run:
            table = run.table()
        return table | killed_column(backend, Path(other))


def markdown(backend: str, table: Table) -> str:
    """The table as docs/faults.md has it."""
    lines = [f"| `{backend}` | {' | '.join(OPERATIONS)} |", "| --- " * (len(OPERATIONS) + 1) + "|"]
    lines += [f"| {fault} | {' | '.join(table[fault, operation] for operation in OPERATIONS)} |" for fault in FAULTS]
    return "\n".join(lines) + "\n"


def marks(backend: str) -> tuple[str, str]:
    """What surrounds the table of a backend in the document."""
    return f"<!-- {backend}: python -m tests.faults.table --write -->\n", f"<!-- end of {backend} -->"


def documented(backend: str) -> str:
    """The table of a backend in the document."""
    begin, end = marks(backend)
    return DOCUMENT.read_text().split(begin, 1)[1].split(end, 1)[0]


def _write(tables: Iterator[tuple[str, str]]) -> None:
    for backend, table in tables:
        begin, end = marks(backend)
        text = DOCUMENT.read_text()
        head, rest = text.split(begin, 1)
        DOCUMENT.write_text(f"{head}{begin}{table}{end}{rest.split(end, 1)[1]}")


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    logging.disable(logging.WARNING)
    generated = ((backend, markdown(backend, run_backend(backend))) for backend in BACKENDS)
    if sys.argv[1:] == ["--write"]:
        _write(generated)
    else:
        print("\n".join(table for _, table in generated))
