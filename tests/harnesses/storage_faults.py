"""What a client sees of each fault of the storage, in every kind of store and over every way that objects go."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from bench.certificates import Authority
from hicache.backends.faulty import Fault, FaultKind, Operation
from hicache.client import DaemonL3
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.tenancy import physical_key, tenant_digest
from tests.client.hicached import HicachedProcess
from tests.client.memory import SmallMemory, UnshareableMemory
from tests.client.support import Answer, key, open_descriptors, payload, put, wait_until
from tests.daemon.rig import ALICE, DaemonThread
from tests.faults.other_client import OtherClient, connected
from tests.harnesses.cells import FAULTS, Bound, Cell, Part, Place, Table
from tests.harnesses.stores import STORES, StoreOpener, process_settings

OPERATIONS = ("get", "put", "delete", "lookup")
WAYS = ("memory", "bounce", "stream", "TLS")
KILLED = "killed"
CALL_S = 0.4  # the deadline of a call that meets a fault which outlives it
PATIENT_S = 10.0  # of any other
DELAY_S = 0.02
SIZE_BYTES = 48 << 10
FILLER_OBJECTS = 16
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
MEMORIES: dict[str, Callable[[], SmallMemory]] = {
    "memory": SmallMemory,
    "bounce": UnshareableMemory,
    "stream": partial(SmallMemory, is_sealed=False),
    "TLS": SmallMemory,
}


class StorageRun:
    """One daemon over one store that fails on command, and clients that meet its faults over every way."""

    def __init__(self, store: str, folder: Path) -> None:
        self._opener = StoreOpener(store)
        certificates = Authority(folder)
        own = certificates.issue("server")
        (folder / "tenants").write_text(f"alice {ALICE}\n")
        (folder / "tenants").chmod(0o600)
        self._daemon = DaemonThread(
            folder,
            self._opener,
            io_threads=3,
            listen="127.0.0.1:0",
            tls_certificate=str(own),
            tls_key=str(own),
            tls_clients="token",
            tenants_file=str(folder / "tenants"),
        )
        local = self._daemon.target.replace("unix:", "unix://")
        tls = f"tls://{self._daemon.ready.listen}?ca={certificates.file}"
        self._memories = {way: MEMORIES[way]() for way in WAYS}
        self._clients = {
            way: connected(tls if way == "TLS" else local, memory, token=ALICE)
            for way, memory in self._memories.items()
        }
        self._other_memory = SmallMemory(2 * SIZE_BYTES)
        self._other = OtherClient(local, self._other_memory, size_bytes=SIZE_BYTES, token=ALICE)
        self._bound = Bound()
        self._number = 0
        for number in range(FILLER, FILLER + FILLER_OBJECTS):
            for way in WAYS:
                self._bound.learn("put", lambda number=number, way=way: self._move("put", way, number))  # type: ignore[misc]  # bound now
                self._bound.learn("get", lambda number=number, way=way: self._move("get", way, number))  # type: ignore[misc]  # bound now
        wait_until(lambda: not self._readings()["hicache_storage_busy_threads"], what="the end of the puts")
        self._base = self._readings()
        self._descriptors = open_descriptors().total()

    def close(self) -> None:
        self._opener.faults.disarm()
        for client in self._clients.values():
            client.close()
        for memory in self._memories.values():
            memory.close()
        self._other.close()
        self._daemon.stop()

    def row(self, kind: FaultKind, operation: str) -> str:
        """The cell of one fault and operation, over every way that the operation has."""
        ways = WAYS if operation in ("get", "put") else WAYS[:1]
        return text_of({way: self._cell(kind, operation, way) for way in ways})

    def _cell(self, kind: FaultKind, operation: str, way: str) -> Cell:
        """Meet the fault, with another client at work beside, and require that nothing of it stays."""
        self._number += 1
        number = self._number
        self._opener.remember()
        if operation != "put":
            assert self._move("put", "memory", number) == "OK"
        is_damaged = operation == "get" and self._damage(kind)
        with self._other:
            rounds_before = self._other.rounds
            faults = [] if is_damaged else self._arm(kind, number)
            with ThreadPoolExecutor(1) as pool, self._bound.within(_deadline_s(faults), operation):
                during = pool.submit(self._counted, operation, way, number, faults).result()
            wait_until(lambda: self._other.rounds > rounds_before, what="a round of the other client")
        self._opener.faults.disarm()
        assert not self._other.wrong, f"{kind.value} of a {operation} disturbed another client: {self._other.wrong}"
        wait_until(lambda: self._readings() == self._base, what=f"{self._base} after {kind.value}: {self._readings()}")
        wait_until(lambda: not any(client.status().items_in_doubt for client in self._clients.values()))
        after = self._counted(operation, way, number, [])
        self._clients["memory"].delete([key(number)], timeout_s=PATIENT_S)
        wait_until(
            lambda: open_descriptors().total() <= self._descriptors + len(WAYS) * 2,  # connections that are kept idle
            what=f"{self._descriptors} descriptors after {kind.value}: {open_descriptors()}",
        )
        return Cell(during, after)

    def _damage(self, kind: FaultKind) -> bool:
        """On the medium itself, where there is a way to: then the store has to find out."""
        if kind is FaultKind.WRONG_BYTES:
            self._opener.flip_bit()
            return True
        return kind is FaultKind.SHORT and self._opener.cut()

    def _arm(self, kind: FaultKind, number: int) -> list[Fault]:
        """On every call of the backend that the operation may make, for this object alone."""
        keys = frozenset({physical_key(tenant_digest("alice"), key(number))})
        operations: tuple[Operation, ...] = ("put", "get_into", "contains", "delete")
        return [self._opener.faults.arm(operation, Fault(kind, keys=keys, delay_s=DELAY_S)) for operation in operations]

    def _counted(self, operation: str, way: str, number: int, faults: Sequence[Fault]) -> str:
        """What the call came to, which the client has counted once."""
        before = self._count(operation, way)
        name = self._do(operation, way, number, faults)
        after = self._count(operation, way)
        changed = {outcome: after[outcome] - before.get(outcome, 0) for outcome in after}
        assert {outcome.name: count for outcome, count in changed.items() if count} == {name: 1}, (
            f"{name} was counted as {changed}"
        )
        return name

    def _count(self, operation: str, way: str) -> dict[Outcome, int]:
        counts = self._clients[way].status().operations.get(operation)
        return {} if counts is None else dict(counts.objects)

    def _do(self, operation: str, way: str, number: int, faults: Sequence[Fault]) -> str:
        """One operation; what hangs in a fault is released when the client has its answer, or has given up."""
        if operation in ("get", "put"):
            return self._move(operation, way, number, faults)
        client = self._clients[way]
        ask = client.delete if operation == "delete" else client.lookup
        [outcome] = ask([key(number)], timeout_s=_deadline_s(faults))
        for fault in faults:
            fault.release()
        return outcome.name

    def _move(self, operation: str, way: str, number: int, faults: Sequence[Fault] = ()) -> str:
        client, view = self._clients[way], self._memories[way].buffer
        content = payload(number, SIZE_BYTES)
        view[:SIZE_BYTES] = content if operation == "put" else bytes(SIZE_BYTES)
        answer = Answer()
        move = client.get if operation == "get" else client.put
        with self._bound.within(_deadline_s(faults), operation):
            move([L3Item(key(number), 0, SIZE_BYTES)], timeout_s=_deadline_s(faults), done=answer)
        for fault in faults:
            fault.release()
        (outcome,) = answer.wait()
        assert outcome is not Outcome.OK or view[:SIZE_BYTES] == content, f"a {operation} is OK with wrong bytes"
        return outcome.name

    def _readings(self) -> dict[str, float]:
        return {name: self._daemon.metric(name) for name in BASE_METRICS}


def _deadline_s(faults: Sequence[Fault]) -> float:
    outlives = (FaultKind.NEVER, FaultKind.LATE)
    return CALL_S if any(fault.kind in outlives for fault in faults) else PATIENT_S


def text_of(cells: dict[str, Cell]) -> str:
    """One text where all ways agree, else what those that do have in common."""
    ways: dict[Cell, list[str]] = {}
    for way, cell in cells.items():
        ways.setdefault(cell, []).append(way)
    if len(ways) == 1:
        return str(next(iter(ways)))
    return "; ".join(f"{', '.join(names)}: {cell}" for cell, names in ways.items())


class KilledRun:
    """A daemon that is killed while a call waits for it, and the next one."""

    def __init__(self, store: str, folder: Path) -> None:
        self._daemon = HicachedProcess(folder, capacity_bytes="64MiB", **process_settings(store, folder))
        self._daemon.start()
        self._memories = {way: MEMORIES[way]() for way in WAYS[:3]}
        self._clients = {way: connected(self._daemon.address, memory) for way, memory in self._memories.items()}
        self._bound = Bound()
        self._number = 0

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        for memory in self._memories.values():
            memory.close()
        self._daemon.end()

    def row(self, operation: str) -> str:
        """Over every way; one that goes over TCP ends with its connection, as a stream does."""
        ways = WAYS[:3] if operation in ("get", "put") else WAYS[:1]
        return text_of({way: self._cell(operation, way) for way in ways})

    def _cell(self, operation: str, way: str) -> Cell:
        self._number += 1
        client, memory, number = self._clients[way], self._memories[way], self._number
        item = L3Item(key(number), 0, SIZE_BYTES)
        memory.buffer[:SIZE_BYTES] = payload(number, SIZE_BYTES)
        if operation != "put":
            assert put(client, [item]) == [Outcome.OK]
        is_called = threading.Event()

        def call() -> str:
            is_called.set()
            if operation in ("delete", "lookup"):
                return str(getattr(client, operation)([item.key], timeout_s=PATIENT_S)[0].name)
            answer = Answer()
            getattr(client, operation)([item], timeout_s=PATIENT_S, done=answer)
            return answer.wait()[0].name

        with ThreadPoolExecutor(1) as pool, self._bound.within(PATIENT_S, operation):
            self._daemon.signal(signal.SIGSTOP)
            running = pool.submit(call)
            wait_until(is_called.is_set, what="the call")
            self._daemon.signal(signal.SIGKILL)
            during = running.result()
        self._daemon.start()
        for other in self._clients.values():
            assert other.wait_ready(timeout_s=20)
            wait_until(_answers(other), what="the next daemon answers")
        assert not any(other.status().items_in_doubt for other in self._clients.values())
        after = call()
        assert after != "OK" or memory.buffer[:SIZE_BYTES] == payload(number, SIZE_BYTES)
        return Cell(during, after)


def _answers(client: DaemonL3) -> Callable[[], bool]:
    return lambda: client.lookup([key(0)], timeout_s=PATIENT_S) == [Outcome.ABSENT]


def run_store(store: str, places: Collection[Place]) -> Table:
    """These places of the table of one kind of store."""
    table: Table = {}
    wanted = [place for place in places if place[0] != KILLED]
    if wanted:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hfm-")))
            run = stack.enter_context(contextlib.closing(StorageRun(store, folder)))
            table |= {place: run.row(FaultKind(place[0]), place[1]) for place in wanted}
    killed = [place for place in places if place[0] == KILLED]
    if killed:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hfm-")))
            deaths = stack.enter_context(contextlib.closing(KilledRun(store, folder)))
            table |= {place: deaths.row(place[1]) for place in killed}
    return table


_IN_PROCESS = (
    "the stand-in for Mooncake lives in the process of the harness; daemons over a real one are killed in "
    "`tests/backends/test_mooncake_daemon.py`"
)


def storage_parts() -> list[Part]:
    """One table for each kind of store."""
    return [
        Part(
            store,
            OPERATIONS,
            partial(run_store, store),
            {(KILLED, operation): _IN_PROCESS for operation in OPERATIONS} if store.startswith("mooncake") else {},
        )
        for store in STORES
    ]


assert {kind.value for kind in FaultKind} | {KILLED} == set(FAULTS)
