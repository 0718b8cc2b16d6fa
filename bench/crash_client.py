"""One client of the crash harness: a process that puts, gets, looks up and deletes until it is told to stop."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from random import Random

from bench.crash_objects import LARGEST_SHARE, Belief, ObjectMaker, Record
from bench.daemon_process import TOKEN, BenchError
from bench.store_client import SPEC, BenchMemory
from hicache.client import ClientSettings, DaemonL3
from hicache.client.address import parse_address
from hicache.client.batch import decode_outcomes
from hicache.client.fault import Fault, call
from hicache.client.session import Identity, Session
from hicache.l3 import L3Item
from hicache.outcome import Outcome
from hicache.wire import hicached_pb2 as wire
from hicache.wire.protocol import pack_keys

BATCH_ITEMS_MAX = 6
CALL_TIMEOUT_S = 10.0
LEASE_S = 5.0
RECONNECT_S = 20.0
PAUSE_S = 0.02  # between calls that find no daemon
LEASE_KEPT_SHARE = 0.5  # of lookups, that no get follows
LEASED_SHARE = 0.2  # of the capacity, by all clients: far below what leases may protect
QUICK = ClientSettings(lease_s=LEASE_S, backoff_s=0.01, backoff_s_max=0.05, refused_retry_s=0.1)
IDLE = "idle"  # a message that only ends a load
BEGUN = "begun"  # what a load sends when it has put something
UNANSWERED = frozenset({Outcome.UNAVAILABLE, Outcome.DEADLINE, Outcome.CANCELLED})


BULK = ("memory", "stream", "bounce")  # ways of the objects; memory without a seal is refused, and leaves streams


@dataclass(frozen=True, slots=True)
class Role:
    """Who a client is and how it behaves."""

    number: int
    clients: int
    address: str
    bulk: str  # one of BULK
    capacity_bytes: int
    resident_bytes_max: int | None  # it deletes its oldest objects beyond that; None: eviction has to make room
    seed: str


@dataclass(slots=True)
class Report:
    """What one life of the daemon looked like from a client."""

    calls: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # never right, whatever the daemon went through
    odd: list[tuple[float, str]] = field(default_factory=list)  # wrong unless the daemon was dying by then
    unanswered_bytes: int = 0  # of puts
    refused_bytes: int = 0  # of puts that found no space
    deleted_bytes: int = 0


class CrashClient:
    """Runs in the client's process."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._random = Random(role.seed)
        self._objects = ObjectMaker(capacity_bytes=role.capacity_bytes)
        self._batch_bytes_max = role.capacity_bytes // LARGEST_SHARE
        self._memory = BenchMemory(
            self._batch_bytes_max, is_shared=role.bulk != "bounce", is_sealed=role.bulk != "stream"
        )
        self._l3 = DaemonL3(role.address, spec=SPEC, memory=self._memory, token=TOKEN, settings=QUICK)
        self._session: Session | None = None  # for what an engine never asks for: deletes
        self._records: dict[bytes, Record] = {}
        self._last_number = 0
        self._report = Report()

    def reconnect(self) -> None:
        """Be connected to the daemon that runs now. Raises BenchError."""
        if self._session is not None:
            self._session.close()
        identity = Identity.of(SPEC, token=TOKEN)
        address = parse_address(self._role.address)
        opened = Session.open(address, identity, timeout_s=RECONNECT_S, on_end=lambda: None)
        if isinstance(opened, Fault):
            raise BenchError(f"no session: {opened}")
        self._session = opened
        deadline_s = time.monotonic() + RECONNECT_S
        probe = [self._objects.key(self._role.number, 0)]
        while self._l3.lookup(probe, timeout_s=CALL_TIMEOUT_S) != [Outcome.ABSENT]:
            if time.monotonic() > deadline_s:
                raise BenchError(f"not served within {RECONNECT_S:g} s: {self._l3.status().reason}")
            time.sleep(PAUSE_S)
        if not self._l3.wait_ready(timeout_s=RECONNECT_S):
            raise BenchError(f"the memory was not registered within {RECONNECT_S:g} s")
        if (bulk := self._l3.status().bulk) != self._role.bulk:
            raise BenchError(f"objects would go through {bulk}")

    def run(self, is_over: Callable[[], bool], *, on_begun: Callable[[], None]) -> Report:
        """Put load on the daemon until ``is_over``, whatever becomes of it. ``on_begun`` is told of the first put."""
        steps = (self._put, self._get, self._get_of_others, self._delete, self._lookup)
        self._report = Report()
        while not self._report.calls["put OK"] and not is_over():
            self._put()
        on_begun()
        while not is_over():
            (step,) = self._random.choices(steps, (45, 25, 8, 8, 14))
            if not step():
                time.sleep(PAUSE_S)
        return self._report

    def verify(self) -> list[Record]:
        """Read every object that may be there; what was found is in the records. Forgets those that are gone."""
        self._report = Report()
        believed = {record.key: replace(record) for record in self._records.values()}
        for batch in self._batches(list(self._records.values())):
            deadline_s = time.monotonic() + RECONNECT_S
            while UNANSWERED & set(self._read(batch)) and time.monotonic() < deadline_s:
                time.sleep(PAUSE_S)
        for record in list(self._records.values()):
            believed[record.key].found = record.found
            record.belief, record.leased_until_s = Belief.STORED, 0.0  # leases ended with the daemon before
            if record.found != Outcome.OK.name:
                del self._records[record.key]
        return list(believed.values())

    def descriptor_count(self) -> int:
        """How many files, sockets and memory of daemons dead and alive this process holds."""
        return len(os.listdir("/proc/self/fd"))

    def close(self) -> None:
        """Leave."""
        if self._session is not None:
            self._session.close()
        self._l3.close()
        self._memory.close()

    # steps; each returns whether the daemon answered

    def _put(self) -> bool:
        if not self._make_room():
            return False
        batch = self._fitting([self._some_record_to_put() for _ in range(self._random.randint(1, BATCH_ITEMS_MAX))])
        started_s = time.monotonic()
        for record in batch:
            self._records[record.key] = record
            record.used_s = math.inf
            if record.belief is not Belief.STORED:
                record.put_s = started_s
        for item in self._items(batch):
            self._objects.write(item.key, self._memory.buffer[item.offset : item.offset + item.size_bytes])
        outcomes = self._move(self._l3.put, batch)
        for record, outcome in zip(batch, outcomes, strict=True):
            self._note_put(record, outcome, started_s)
        return self._note("put", outcomes)

    def _note(self, operation: str, outcomes: Sequence[Outcome]) -> bool:
        """Count outcomes; whether the daemon answered."""
        self._report.calls.update(f"{operation} {outcome.name}" for outcome in outcomes)
        if not (missed := UNANSWERED & set(outcomes)):
            return True
        self._report.odd.append((time.monotonic(), f"a {operation}: {', '.join(outcome.name for outcome in missed)}"))
        return False

    def _note_put(self, record: Record, outcome: Outcome, started_s: float) -> None:
        report = self._report
        if outcome in UNANSWERED:
            report.unanswered_bytes += record.stored_bytes
            if record.belief is Belief.DELETED:
                record.belief = Belief.UNKNOWN
            return
        record.used_s = time.monotonic()
        if outcome is Outcome.OK:
            record.put_s = started_s
        if outcome.is_ok:
            record.belief = Belief.STORED
        elif outcome is Outcome.NO_SPACE and self._role.resident_bytes_max is None:
            report.refused_bytes += record.stored_bytes
        else:
            report.odd.append((record.used_s, f"a put of {record.size_bytes} bytes: {outcome.name}"))

    def _get(self) -> bool:
        batch = self._some(BATCH_ITEMS_MAX)
        return self._note("get", self._read(batch))

    def _get_of_others(self) -> bool:
        other = self._random.randrange(self._role.clients)
        numbers = [max(1, self._last_number - self._random.randrange(60)) for _ in range(BATCH_ITEMS_MAX)]
        foreign = [self._objects.record(other, number) for number in sorted(set(numbers))]
        return self._note("get of another's", self._read(self._fitting(foreign)))

    def _delete(self) -> bool:
        return self._delete_records(self._some(3))

    def _lookup(self) -> bool:
        """Look up and lease: what is leased is there for the get that may follow, with which its lease ends."""
        now_s = time.monotonic()
        leased_bytes = sum(record.stored_bytes for record in self._records.values() if record.kept_until_s > now_s)
        bytes_max = self._role.capacity_bytes * LEASED_SHARE / self._role.clients
        batch = [record for record in self._some(BATCH_ITEMS_MAX) if record.belief is Belief.STORED]
        if leased_bytes + sum(record.stored_bytes for record in batch) > bytes_max:
            return True
        for record in batch:
            record.used_s = math.inf
        outcomes = self._l3.lookup([record.key for record in batch], timeout_s=CALL_TIMEOUT_S)
        leased = []
        for record, outcome in zip(batch, outcomes, strict=True):
            if outcome not in UNANSWERED:
                record.used_s = time.monotonic()
            if outcome is Outcome.OK:
                record.leased_until_s = record.kept_until_s = now_s + LEASE_S
                leased.append(record)
        if self._random.random() < LEASE_KEPT_SHARE:
            return self._note("lookup", outcomes)
        for outcome in self._read(leased):
            if outcome not in UNANSWERED | {Outcome.OK} and time.monotonic() < now_s + LEASE_S:
                self._report.odd.append((time.monotonic(), f"a get of a leased object: {outcome.name}"))
        return self._note("lookup", outcomes)

    # what steps are made of

    def _read(self, batch: Sequence[Record]) -> list[Outcome]:
        """Get objects and compare them, every byte. The leases on them end with that."""
        for record in batch:
            record.used_s = math.inf
            if own := self._records.get(record.key):  # which may have been read as that of another
                own.leased_until_s = 0.0
        outcomes = self._move(self._l3.get, batch)
        for record, item, outcome in zip(batch, self._items(batch), outcomes, strict=True):
            record.found = outcome.name
            if outcome not in UNANSWERED:
                record.used_s = time.monotonic()
            if outcome in (Outcome.CORRUPT, Outcome.SIZE_MISMATCH):
                self._report.wrong.append(f"{record.key.hex()}: {outcome.name}")
            elif outcome not in UNANSWERED | {Outcome.OK, Outcome.ABSENT}:
                self._report.odd.append((time.monotonic(), f"a get: {outcome.name}"))
            elif outcome is Outcome.OK and not self._is_right(item):
                record.found = "WRONG_BYTES"
                self._report.wrong.append(f"{record.key.hex()}: wrong bytes were served")
        return outcomes

    def _is_right(self, item: L3Item) -> bool:
        found = self._memory.buffer[item.offset : item.offset + item.size_bytes]
        is_right = self._objects.is_payload(item.key, found)
        found[:8] = bytes(8) if item.size_bytes >= 8 else found[:8]  # what the next get does not fill shows
        return is_right

    def _move(self, move: Callable[..., None], batch: Sequence[Record]) -> list[Outcome]:
        answers: list[list[Outcome]] = []
        items = self._items(batch)
        move(items, timeout_s=CALL_TIMEOUT_S, done=answers.append)
        deadline_s = time.monotonic() + RECONNECT_S
        while not answers:  # hicached may still touch the memory; its end gives it back
            if time.monotonic() > deadline_s:
                raise BenchError(f"bytes of a dead daemon stayed in doubt for {RECONNECT_S:g} s")
            time.sleep(0.001)
        return answers[0]

    def _delete_records(self, batch: list[Record]) -> bool:
        assert self._session is not None
        for record in batch:
            record.used_s, record.leased_until_s = math.inf, 0.0  # a lease does not keep its owner from deleting
        packed, key_bytes = pack_keys([record.key for record in batch]) if batch else (b"", 0)
        if not batch:
            return True
        request = wire.KeysRequest(session_secret=self._session.secret, keys=packed, key_bytes=key_bytes)
        reply = call(self._session.stub.Delete, request, timeout_s=CALL_TIMEOUT_S)
        self._report.deleted_bytes += sum(record.stored_bytes for record in batch)
        if isinstance(reply, Fault):
            for record in batch:
                record.belief = Belief.UNKNOWN
            return False
        for record, outcome in zip(batch, decode_outcomes(reply.outcomes, count=len(batch)), strict=True):
            self._report.calls[f"delete {outcome.name}"] += 1
            is_settled = outcome in (Outcome.OK, Outcome.ABSENT)
            record.belief = Belief.DELETED if is_settled else Belief.UNKNOWN
            record.used_s = time.monotonic() if is_settled else math.inf
            if not is_settled:
                self._report.odd.append((time.monotonic(), f"a delete: {outcome.name}"))
        return True

    def _make_room(self) -> bool:
        """Stay within what this client may keep, its oldest objects first."""
        if self._role.resident_bytes_max is None:
            return True
        kept = [record for record in self._records.values() if record.belief is not Belief.DELETED]
        excess_bytes = (
            sum(record.stored_bytes for record in kept) + self._batch_bytes_max - self._role.resident_bytes_max
        )
        oldest = []
        while excess_bytes > 0 and kept:
            oldest.append(kept.pop(0))
            excess_bytes -= oldest[-1].stored_bytes
        return self._delete_records(oldest)

    def _some_record_to_put(self) -> Record:
        """Mostly a new object, sometimes one that was there before."""
        if self._records and self._random.random() < 0.1:
            return self._random.choice(list(self._records.values()))
        self._last_number += 1
        return self._objects.record(self._role.number, self._last_number)

    def _some(self, count: int) -> list[Record]:
        """Objects of this client, most of them put lately."""
        records = list(self._records.values())
        if self._random.random() < 0.7:
            records = records[-20:]
        return self._fitting(self._random.sample(records, min(count, len(records))))

    def _fitting(self, records: Sequence[Record]) -> list[Record]:
        """Each once, as many as fit into the memory."""
        fitting: dict[bytes, Record] = {}
        total_bytes = 0
        for record in records:
            if record.key not in fitting and total_bytes + record.size_bytes <= self._batch_bytes_max:
                fitting[record.key] = record
                total_bytes += record.size_bytes
        return list(fitting.values())

    def _batches(self, records: list[Record]) -> list[list[Record]]:
        batches: list[list[Record]] = []
        while records:
            batches.append(self._fitting(records[:64]))
            taken = {record.key for record in batches[-1]}
            records = [record for record in records if record.key not in taken]
        return batches

    def _items(self, batch: Sequence[Record]) -> list[L3Item]:
        items, offset = [], 0
        for record in batch:
            items.append(L3Item(record.key, offset, record.size_bytes))
            offset += record.size_bytes
        return items


def run_crash_client(connection: Connection, role: Role) -> None:
    """The process: names of methods come in, results or errors go out; a load ends when the next name comes in."""
    logging.disable(logging.WARNING)  # a daemon that is killed is nothing to be told of here
    client = CrashClient(role)
    while True:
        try:
            name = connection.recv()
        except (EOFError, OSError):
            client.close()
            return
        if name == IDLE:
            continue
        try:
            if name == "run":
                connection.send(client.run(connection.poll, on_begun=lambda: connection.send(BEGUN)))
            else:
                connection.send(getattr(client, name)())
        except Exception as error:
            connection.send(BenchError(f"client {role.number}, {name}: {error!r}"))
