"""The rounds of the crash harness: load, a kill, a start, and everything that must hold then."""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import statistics
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

from bench.crash_client import BULK, IDLE, LEASE_S, Report, Role, run_crash_client
from bench.crash_medium import count_medium
from bench.crash_objects import LARGEST_SHARE, Belief, ObjectMaker, Record
from bench.daemon_process import BenchError, DaemonProcess
from hicache.outcome import Outcome

LOW_WATERMARK = 0.9
ROOMY_SHARE = 0.7  # of the capacity, which all clients together stay below where nothing may be missing
IDLE_AT_ZERO = ("hicache_inflight_bytes", "hicache_storage_queued_chunks")
READY_S_MAX = 30.0  # again; a first start takes the space of its store, however slow the disk is
ANSWER_S_MAX = 120.0
MOMENTS = ("load", "start", "load", "stop", "load")  # of kills: in equal parts, in an order by chance
SPARE_DESCRIPTORS = 16  # that gRPC may hold a moment longer
STOP_S_MAX = 0.5  # a kill comes within so long after SIGTERM


@dataclass(frozen=True, slots=True)
class Part:
    """A store that is loaded and killed ``kills`` times."""

    backend: str
    is_full: bool  # eviction runs; else nothing may ever be missing
    kills: int
    clients: int = 3
    capacity_bytes: int = 384 << 20
    load_s_max: float = 1.5

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.backend} {'full' if self.is_full else 'roomy'}"


@dataclass(slots=True)
class Tally:
    """What came out of a part."""

    part: str
    kills: Counter[str] = field(default_factory=Counter)  # by moment
    calls: Counter[str] = field(default_factory=Counter)
    intact: int = 0  # acknowledged objects, compared byte by byte after a kill
    evicted: int = 0  # acknowledged ones that were missing by rule
    protected: int = 0  # acknowledged ones that no rule would have let go in a full store
    unanswered_whole: int = 0  # puts without an answer whose object is there, whole
    unanswered_absent: int = 0
    deleted: int = 0  # acknowledged deletes, absent after a kill
    compared_bytes: int = 0
    ready_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """The figures that scripts rely on."""
        ready = self.ready_s or [math.nan]
        times = {"ready_s_p50": round(statistics.median(ready), 2), "ready_s_max": round(max(ready), 2)}
        counts = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "ready_s"}
        return counts | {"kills": dict(self.kills), "calls": dict(sorted(self.calls.items()))} | times


class CrashPart:
    """Runs one part in a folder of its own, which is left for study when something failed."""

    def __init__(self, part: Part, folder: Path, *, seed: int) -> None:
        self._part = part
        self._folder = folder
        self._random = Random(f"{seed} {part.name}")
        self._objects = ObjectMaker(capacity_bytes=part.capacity_bytes)
        self.tally = Tally(part.name)
        settings = {"http": "127.0.0.1:0", "object-bytes-max": str(self._objects.largest_bytes)}
        settings |= {"low-watermark": str(LOW_WATERMARK)}
        self._daemon = DaemonProcess(
            folder, backend=part.backend, capacity_bytes=part.capacity_bytes, settings=settings
        )
        self._clients = [_ClientProcess(self._role(number, seed)) for number in range(part.clients)]
        self._descriptors: list[int] = []  # of each client, after the first start
        self._moment = ""  # of the last kill
        self._killed_s = self._leases_end_s = 0.0
        self._reports: list[Report] = []

    def run(self, *, show: Callable[[str], None]) -> Tally:
        """All kills and their checks. Failures are in the tally, a broken harness raises BenchError."""
        shared_before = set(os.listdir("/dev/shm"))
        try:
            moments = [MOMENTS[number % len(MOMENTS)] for number in range(self._part.kills)]
            self._random.shuffle(moments)
            for moment in moments:
                show(f"{self._part.name}: {self.tally.kills.total()} of {self._part.kills} kills")
                self._kill_in_start() if moment == "start" else self._kill_in_life(moment)
                self._moment = moment
                self.tally.kills[moment] += 1
            self._start_and_check()
            self._daemon.stop()
            self._check_what_is_left(shared_before)
        finally:
            for client in self._clients:
                client.close()
            self._daemon.kill()
        if not self.tally.failures:
            shutil.rmtree(self._folder)
        return self.tally

    def _role(self, number: int, seed: int) -> Role:
        part = self._part
        return Role(
            number=number,
            clients=part.clients,
            address=self._daemon.address("unix"),
            bulk=BULK[number % len(BULK)],
            capacity_bytes=part.capacity_bytes,
            resident_bytes_max=None if part.is_full else int(part.capacity_bytes * ROOMY_SHARE / part.clients),
            seed=f"{seed} {part.name} {number}",
        )

    def _kill_in_start(self) -> None:
        """After half of the usual time: before that it only imports."""
        usual_s = statistics.median(self.tally.ready_s or [1.0])
        self._daemon.spawn()
        time.sleep(usual_s * self._random.uniform(0.4, 1.0))
        self._daemon.kill()

    def _kill_in_life(self, moment: str) -> None:
        self._start_and_check()
        self._all("run")  # each has put something
        time.sleep(self._random.uniform(0.02, self._part.load_s_max))
        self._killed_s = self._leases_end_s = time.monotonic()
        if moment == "stop":
            self._leases_end_s = math.inf  # with the sessions, while puts may still go on
            self._daemon.terminate()
            time.sleep(self._random.uniform(0, STOP_S_MAX))
        self._daemon.kill()
        for client in self._clients:
            client.interrupt()
        self._reports = [client.end() for client in self._clients]
        for report in self._reports:
            self.tally.calls += report.calls
            self._fail(report.wrong)
            self._fail([text for at_s, text in report.odd if at_s < self._killed_s])

    def _start_and_check(self) -> None:
        ready_s = self._daemon.start()
        if self.tally.kills:
            self.tally.ready_s.append(ready_s)
        if self.tally.kills and ready_s > READY_S_MAX:
            self._fail([f"ready after {ready_s:.1f} s"])
        self._check_medium()
        self._all("reconnect")
        records = [record for part in self._all("verify") for record in part]
        self._check_objects(records)
        self._check_daemon()
        descriptors = self._all("descriptor_count")
        self._descriptors = self._descriptors or descriptors
        for now, before in zip(descriptors, self._descriptors, strict=True):
            self._fail(
                [f"a client has {now} descriptors, {before} after the first start"] * (now > before + SPARE_DESCRIPTORS)
            )

    def _check_medium(self) -> None:
        """Usage equals what is on the medium, and nothing else is there. Nobody has changed anything yet."""
        counted = count_medium(self._part.backend, self._folder / "store")
        samples = self._scrape()
        told = [int(samples[f"hicache_store_{name}"]) for name in ("objects", "payload_bytes", "used_bytes")]
        on_disk = [counted.objects, counted.payload_bytes, counted.stored_bytes]
        if told != on_disk:
            self._fail([f"objects, payload and stored bytes: told {told}, on the medium {on_disk}"])
        self._fail([f"an orphan: {orphan}" for orphan in counted.orphans])

    def _check_objects(self, records: Sequence[Record]) -> None:
        missing: list[Record] = []
        for record in records:
            self._check_object(record, missing)
        if not self._part.is_full:
            self._fail([f"{_text(record)} is missing, and nothing was evicted" for record in missing])
        else:
            self._check_missing(missing, records)

    def _check_object(self, record: Record, missing: list[Record]) -> None:
        tally, is_there = self.tally, record.found == Outcome.OK.name
        if is_there:
            tally.compared_bytes += record.size_bytes
        if not is_there and record.found != Outcome.ABSENT.name:
            self._fail([f"{_text(record)} was read as {record.found}"])
        elif record.belief is Belief.DELETED:
            tally.deleted += 1
            self._fail([f"{_text(record)} was deleted and is back"] if is_there else [])
        elif record.belief is Belief.UNKNOWN:
            tally.unanswered_whole += is_there
            tally.unanswered_absent += not is_there
        elif is_there:
            tally.intact += 1
        else:
            missing.append(record)

    def _check_missing(self, missing: Sequence[Record], records: Sequence[Record]) -> None:
        """Eviction takes what was used least recently, nothing that is leased, and stops at the low watermark.

        An object can go only when what was used after it began to be put, with what is being put, fills the store up to
        the low watermark. So one that too little was used after is protected, whatever the daemon remembers of the
        order of use. And when anything is missing, the store is as full as an eviction leaves it.
        """
        self.tally.evicted += len(missing)
        low_bytes = int(self._part.capacity_bytes * LOW_WATERMARK)
        margin_bytes = 2 * sum(report.refused_bytes for report in self._reports) + 2 * self._objects.largest_bytes
        for record in records:
            if record.belief is not Belief.STORED:
                continue
            newer_bytes = sum(
                other.stored_bytes for other in records if max(other.used_s, other.kept_until_s) >= record.put_s
            )
            is_leased = record.leased_until_s > self._leases_end_s
            if is_leased or newer_bytes + margin_bytes <= low_bytes:
                self.tally.protected += 1
                why = "leased" if is_leased else "used too recently to be evicted"
                self._fail([f"{_text(record)} is missing, and was {why}"] if record in missing else [])
        gone_bytes = sum(report.unanswered_bytes + report.deleted_bytes for report in self._reports)
        # Chunks of evicted objects that a get still reads are of no use to a put: it evicts as much again.
        read_bytes = self._part.clients * self._part.capacity_bytes // LARGEST_SHARE
        used_bytes = int(self._scrape()["hicache_store_used_bytes"])
        if missing and used_bytes < low_bytes - gone_bytes - read_bytes - margin_bytes:
            self._fail([f"{len(missing)} objects are missing from a store of {used_bytes} used bytes"])

    def _check_daemon(self) -> None:
        """What nobody uses is free again, and beside the store there are only the files of a running daemon."""
        samples = self._scrape()
        deadline_s = time.monotonic() + READY_S_MAX
        while any(samples[name] for name in IDLE_AT_ZERO) and time.monotonic() < deadline_s:
            time.sleep(0.01)  # an answer may arrive before what it held is let go
            samples = self._scrape()
        for name in (*IDLE_AT_ZERO, "hicache_storage_errors_total"):
            if samples[name]:
                self._fail([f"{name} is {samples[name]}"])
        shared = sum(number % 3 != 1 for number in range(self._part.clients))
        if samples["hicache_regions"] != shared:
            self._fail([f"{samples['hicache_regions']:.0f} regions are mapped, of {shared} clients"])
        sockets = {f"d.sock{end}" for end in ("", ".memory", ".bulk", ".admin", ".lock")}
        expected = sockets | {"log", "ready.json", "store", "tenants"}
        found = {path.name for path in self._folder.iterdir()}
        self._fail([f"{name} lies beside the store" for name in sorted(found - expected)])

    def _check_what_is_left(self, shared_before: set[str]) -> None:
        """After a clean stop."""
        left = {path.name for path in self._folder.iterdir()} - {"d.sock.lock", "log", "store", "tenants"}
        self._fail([f"{name} is left after the stop" for name in sorted(left)])
        leaked = set(os.listdir("/dev/shm")) - shared_before
        self._fail([f"/dev/shm/{name} is left" for name in sorted(leaked) if "hicache" in name])
        self._fail(
            [f"an orphan: {orphan}" for orphan in count_medium(self._part.backend, self._folder / "store").orphans]
        )

    def _scrape(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://{self._daemon.address('http')}/metrics", timeout=ANSWER_S_MAX) as answer:
            lines = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[:1] not in ("", "#")]
        return {name: float(value) for name, value in lines}

    def _all(self, name: str) -> list[Any]:  # Any: each method has its own result
        for client in self._clients:
            client.begin(name)
        return [client.end() for client in self._clients]

    def _fail(self, texts: Sequence[str]) -> None:
        self.tally.failures += [
            f"after {self.tally.kills.total()} kills, the last in {self._moment}: {text}" for text in texts
        ]


class _ClientProcess:
    """A client, seen from the harness."""

    def __init__(self, role: Role) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection: Connection
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=run_crash_client, args=(theirs, role), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, name: str) -> None:
        """Let it call a method."""
        self._connection.send(name)

    def interrupt(self) -> None:
        """End its load: it looks whether it is asked for something else."""
        self._connection.send(IDLE)

    def end(self) -> Any:  # Any: each method has its own result
        """What the method returned. Raises BenchError."""
        try:
            if not self._connection.poll(ANSWER_S_MAX):
                raise BenchError(f"a client did not answer within {ANSWER_S_MAX:g} s")
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise BenchError("a client process has died") from error
        if isinstance(answer, BenchError):
            raise answer
        return answer

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(LEASE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _text(record: Record) -> str:
    return f"{record.key[:12].hex()} of {record.size_bytes} bytes"
