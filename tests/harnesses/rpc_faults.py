"""What a client sees of each fault of the connection, in every call that hicached has."""

from __future__ import annotations

import contextlib
import signal
import tempfile
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc

from hicache.admin.client import Admin
from hicache.admin.verbs import EXPORT, NAMESPACES, RELOAD, STATUS, TENANTS, VERIFY
from hicache.client import DaemonL3
from hicache.errors import AdminRefused, DaemonUnreachable
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.wire import hicached_pb2 as pb
from tests.client.hicached import HicachedProcess
from tests.client.memory import SmallMemory
from tests.client.support import SPEC, Answer, key, open_descriptors, payload, put, wait_until
from tests.daemon.client import Client
from tests.daemon.rig import DaemonThread
from tests.faults.other_client import SETTINGS, connected
from tests.harnesses.cells import Bound, Cell, Part, Place, Table
from tests.harnesses.storage_faults import BASE_METRICS, CALL_S, KILLED, PATIENT_S, SIZE_BYTES
from tests.harnesses.stores import StoreOpener
from tests.harnesses.wire import Wire

CONTROL = ("Session", "Lookup", "Delete", "Lease", "Pin", "Watch", "Stats", "Report")
BULK = ("LOAD", "STORE", "GET", "PUT")
ADMIN = {verb.name: verb for verb in (STATUS, NAMESPACES, EXPORT, VERIFY, TENANTS, RELOAD)}
CALLS = (*CONTROL, *BULK, "memory", *ADMIN)
AT_BYTE = dict.fromkeys(BULK, 1) | dict.fromkeys(ADMIN, 40) | {"GET": 1000}  # an outcome, the head, the payload
SOCKETS = {"control": "", "bulk": ".bulk", "memory": ".memory", "admin": ".admin"}


def _socket_of(call: str) -> str:
    if call in BULK:
        return "bulk"
    if call == "memory":
        return "memory"
    return "admin" if call in ADMIN else "control"


class Caller:
    """Makes every call that there is at the daemon with this socket, and names what it came to."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._address = f"unix://{path}"
        self._memories = {way: SmallMemory(is_sealed=way == "memory") for way in ("memory", "stream")}
        self.clients = {way: connected(self._address, memory) for way, memory in self._memories.items()}
        self._deadline_s = PATIENT_S
        self._raw: Client | None = None

    def close(self) -> None:
        self.end_raw()
        for client in self.clients.values():
            client.close()
        for memory in self._memories.values():
            memory.close()

    def end_raw(self) -> None:
        """The client without anything clever has one session, which does not come back by itself."""
        if self._raw is not None:
            self._raw.close()
            self._raw = None

    def prepare(self, call: str, number: int) -> None:
        """Everything up to the call itself."""
        if call not in ("STORE", "PUT"):
            item = L3Item(key(number), 0, SIZE_BYTES)
            self._memories["memory"].buffer[:SIZE_BYTES] = payload(number, SIZE_BYTES)
            assert put(self.clients["memory"], [item]) in ([Outcome.OK], [Outcome.EXISTS])
        if call in ("Lease", "Watch", "Stats", "Report") and self._raw is None:
            self._raw = Client(f"unix:{self._path}")
        for way, buffer in self._memories.items():
            content = payload(number, SIZE_BYTES) if call in ("STORE", "PUT") else bytes(SIZE_BYTES)
            buffer.buffer[:SIZE_BYTES] = content
            assert self.clients[way].status().bulk == way

    def call(self, call: str, number: int, *, deadline_s: float, then: Callable[[], None] = lambda: None) -> str:
        """The outcome. ``then`` comes when the caller has its thread back."""
        self._deadline_s = deadline_s
        if call in BULK:
            return self._move(call, number, then)
        try:
            return str(self._ask(call, number))
        finally:
            then()

    def _ask(self, call: str, number: int) -> str:
        if call in ("Lookup", "Delete", "Pin"):
            return self._of_keys(call, number)
        if call in ADMIN:
            return self._administrate(call)
        if call == "Session":
            return self.clients["memory"].probe(timeout_s=self._deadline_s).code
        if call == "memory":
            return self._register()
        try:
            return self._raw_call(call, number)
        except grpc.RpcError as error:
            return "DEADLINE" if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else "UNAVAILABLE"

    def _of_keys(self, call: str, number: int) -> str:
        client, keys = self.clients["memory"], [key(number)]
        before = self._counted(client, call.lower())
        if call == "Pin":
            [outcome] = client.pin(keys, pin_s=30.0, timeout_s=self._deadline_s)
        else:
            [outcome] = getattr(client, call.lower())(keys, timeout_s=self._deadline_s)
        assert self._counted(client, call.lower()) == before + 1, "every call is counted"
        return str(outcome.name)

    @staticmethod
    def _counted(client: DaemonL3, operation: str) -> int:
        counts = client.status().operations.get(operation)
        return 0 if counts is None else sum(counts.objects.values())

    def _raw_call(self, call: str, number: int) -> str:
        raw, timeout_s = self._raw, self._deadline_s
        assert raw is not None
        if call == "Lease":
            request = pb.LeaseRequest(session_secret=raw.secret, lease_id=number, lease_ms=0)
            return "OK" if not raw.stub.Lease(request, timeout=timeout_s).held else "held"
        if call == "Stats":
            raw.stub.Stats(pb.StatsRequest(session_secret=raw.secret), timeout=timeout_s)
            return "OK"
        if call == "Report":
            fill = pb.TierFill(name="l1", used_bytes=1, capacity_bytes=2)
            raw.stub.Report(pb.ReportRequest(session_secret=raw.secret, tiers=[fill]), timeout=timeout_s)
            return "OK"
        stream = raw.stub.Watch(pb.WatchRequest(session_secret=raw.secret, snapshot=True), timeout=timeout_s)
        while next(stream).kind != pb.WatchEvents.SYNCED:
            pass
        stream.cancel()
        return "OK"

    def _administrate(self, call: str) -> str:
        admin = Admin(f"{self._path}.admin", timeout_s=self._deadline_s)
        names: dict[str, object] = {"tenant": "default"} if call in ("namespaces", "export") else {}
        if call == "export":
            names["namespace"] = SPEC.namespace.hex()
        try:
            with admin.open(ADMIN[call], {} if call == "verify" else None, names=names) as parts:
                b"".join(parts)
        except (DaemonUnreachable, AdminRefused) as error:
            return type(error).__name__
        return "OK"

    def _register(self) -> str:
        """How objects go of a client that comes now."""
        settings = replace(SETTINGS, connect_timeout_s=self._deadline_s)
        memory = SmallMemory()
        client = DaemonL3(self._address, spec=SPEC, memory=memory, settings=settings)
        try:
            assert client.wait_ready(timeout_s=PATIENT_S)
            return client.status().bulk
        finally:
            client.close()
            memory.close()

    def _move(self, call: str, number: int, then: Callable[[], None]) -> str:
        way = "memory" if call in ("LOAD", "STORE") else "stream"
        client, view = self.clients[way], self._memories[way].buffer
        answer = Answer()
        move = client.get if call in ("LOAD", "GET") else client.put
        before = self._counted(client, move.__name__)
        move([L3Item(key(number), 0, SIZE_BYTES)], timeout_s=self._deadline_s, done=answer)
        then()
        (outcome,) = answer.wait()
        wait_until(lambda: self._counted(client, move.__name__) == before + 1, what="every call is counted")
        assert outcome is not Outcome.OK or view[:SIZE_BYTES] == payload(number, SIZE_BYTES), f"wrong bytes by {call}"
        return outcome.name

    def settle(self) -> None:
        """Wait until all clients are served again, as before, and no byte is in doubt."""
        self.end_raw()
        for way, client in self.clients.items():
            wait_until(lambda client=client: client.lookup([key(0)], timeout_s=PATIENT_S) == [Outcome.ABSENT])  # type: ignore[misc]  # bound now
            wait_until(lambda client=client, way=way: client.status().bulk == way, what=f"{way} again")  # type: ignore[misc]  # bound now
            wait_until(lambda client=client: not client.status().items_in_doubt, what="the end of doubt")  # type: ignore[misc]  # bound now


class WireRun:
    """A daemon behind wires, one for each of its sockets."""

    def __init__(self, folder: Path) -> None:
        self._daemon = DaemonThread(folder, StoreOpener("lmdb"))
        path = str(self._daemon.config.socket)
        self._wires = {name: Wire(path + suffix) for name, suffix in SOCKETS.items()}
        self._caller = Caller(path)
        self._bound = Bound()
        self._number = 0
        for call in CALLS:
            self._next(call)
            self._bound.learn(call, lambda call=call: self._caller.call(call, self._number, deadline_s=PATIENT_S))  # type: ignore[misc]  # bound now
        self._caller.settle()
        self._caller.clients["memory"].unpin([key(n) for n in range(1, self._number + 1)], timeout_s=PATIENT_S)
        wait_until(lambda: not self._readings()["hicache_storage_busy_threads"], what="the end of the calls")
        self._base = self._readings()
        self._descriptors = open_descriptors().total()

    def close(self) -> None:
        self._caller.close()
        for wire in self._wires.values():
            wire.close()
        self._daemon.stop()

    def _next(self, call: str) -> None:
        self._number += 1
        self._caller.prepare(call, self._number)

    def cell(self, fault: str, call: str) -> Cell:
        """Meet the fault, and require that nothing of it stays."""
        self._next(call)
        wire = self._wires[_socket_of(call)]
        deadline_s = CALL_S if fault in ("never answers", "answers late") else PATIENT_S
        wire.arm(fault, at_byte=AT_BYTE.get(call, 0) if fault == "short" or call in BULK else 0)
        try:
            with self._bound.within(deadline_s, call):
                during = self._caller.call(call, self._number, deadline_s=deadline_s, then=wire.release)
        finally:
            wire.release()
        self._caller.settle()
        wait_until(lambda: self._readings() == self._base, what=f"{self._base} after {fault}: {self._readings()}")
        if call not in ("STORE", "PUT"):
            self._caller.prepare(call, self._number)
        after = self._caller.call(call, self._number, deadline_s=PATIENT_S)
        self._caller.end_raw()
        client = self._caller.clients["memory"]
        client.unpin([key(self._number)], timeout_s=PATIENT_S)
        client.delete([key(self._number)], timeout_s=PATIENT_S)
        wait_until(
            lambda: open_descriptors().total() <= self._descriptors,
            what=f"{self._descriptors} descriptors after {fault} of {call}: {open_descriptors()}",
        )
        return Cell(during, after)

    def _readings(self) -> dict[str, float]:
        return {name: self._daemon.metric(name) for name in BASE_METRICS}


class KilledCalls:
    """A daemon process that is killed while a call waits for it, and the next one."""

    def __init__(self, folder: Path) -> None:
        self._daemon = HicachedProcess(folder, capacity_bytes="64MiB")
        self._daemon.start()
        self._caller = Caller(f"{folder}/hicached.sock")
        self._bound = Bound()
        self._number = 0

    def close(self) -> None:
        self._caller.close()
        self._daemon.end()

    def cell(self, call: str) -> Cell:
        """Stopped, called, killed, started again."""
        self._number += 1
        self._caller.prepare(call, self._number)
        is_called = threading.Event()

        def run() -> str:
            is_called.set()
            return self._caller.call(call, self._number, deadline_s=PATIENT_S)

        with ThreadPoolExecutor(1) as pool, self._bound.within(PATIENT_S, call):
            self._daemon.signal(signal.SIGSTOP)
            running = pool.submit(run)
            wait_until(is_called.is_set, what="the call")
            self._daemon.signal(signal.SIGKILL)
            if call == "memory":  # a client that comes waits for a daemon
                self._daemon.start()
            during = running.result()
        if call != "memory":
            self._daemon.start()
        self._caller.settle()
        if call not in ("STORE", "PUT"):
            self._caller.prepare(call, self._number)
        return Cell(during, self._caller.call(call, self._number, deadline_s=PATIENT_S))


def run_calls(places: Collection[Place]) -> Table:
    """These places of the table."""
    table: Table = {}
    with tempfile.TemporaryDirectory(prefix="hfm-") as folder:
        wanted = [place for place in places if place[0] != KILLED]
        if wanted:
            with contextlib.closing(WireRun(Path(folder))) as run:
                table |= {place: str(run.cell(*place)) for place in wanted}
    with tempfile.TemporaryDirectory(prefix="hfm-") as folder:
        killed = [place for place in places if place[0] == KILLED]
        if killed:
            with contextlib.closing(KilledCalls(Path(folder))) as deaths:
                table |= {place: str(deaths.cell(place[1])) for place in killed}
    return table


_NO_SPACE = (
    "a connection takes no space: what has none is the storage (above), the session's bounds, which refuse by name "
    "(`tests/daemon/test_bounds.py`), or the disk of the daemon (below)"
)


def rpc_part() -> Part:
    """Every call, over sockets that fail."""
    return Part("calls", CALLS, run_calls, {("ENOSPC", call): _NO_SPACE for call in CALLS})
