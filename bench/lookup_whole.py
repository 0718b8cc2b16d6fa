"""What work on the whole of a store costs in a real hicached, and how long others wait beside it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from bench.daemon_process import OTHER, OTHER_TOKEN, BenchError
from bench.lookup_daemon import LEAVING_PART, CountBench, object_key
from hicache.admin.client import Admin
from hicache.admin.store_messages import VerifyRequest
from hicache.admin.verbs import NAMESPACES, TENANT_ERASE, VERIFY, Verb

ASK_EVERY_S = 0.02
ASK_TIMEOUT_S = 30.0
WHOLE_TIMEOUT_S = 3600.0
IDLE_S = 3.0
EVICTING_PART = 20  # of the objects: so many are put into the full store


@dataclass(frozen=True, slots=True)
class WholeRow:
    """One operation on so many objects, and what another client waited meanwhile for look-ups of one key."""

    operation: str
    objects: int
    seconds: float
    longest_call_s: float
    us_per_object: float
    lookups: int
    lookup_ms_p50: float
    lookup_ms_p99: float
    lookup_ms_max: float
    health_ms_p99: float  # of /healthz
    health_ms_max: float
    unhealthy: str  # how many of these were not 200, and what the last one said; empty: none


class Bystander:
    """Looks up one key and asks /healthz, every ASK_EVERY_S, until its block ends."""

    def __init__(self, bench: CountBench) -> None:
        self._bench = bench
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bystander")
        self._error: BaseException | None = None
        self.lookup_s: list[float] = []
        self.health_s: list[float] = []
        self.unhealthy: list[str] = []

    def __enter__(self) -> Bystander:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise BenchError(f"a client beside it got no answer: {self._error!r}") from self._error

    def _run(self) -> None:
        try:
            self._ask()
        except BaseException as error:
            self._error = error

    def _ask(self) -> None:
        http_address = self._bench.daemon.address("http")
        with closing(self._bench.connect()) as l3:
            while not self._over.wait(ASK_EVERY_S):
                self.lookup_s.append(_seconds(lambda: l3.lookup([object_key(0)], timeout_s=ASK_TIMEOUT_S)))
                self.health_s.append(_seconds(lambda: self._ask_health(http_address)))

    def _ask_health(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=ASK_TIMEOUT_S)
        with closing(connection):
            connection.request("GET", "/healthz")
            answer = connection.getresponse()
            if answer.status != 200:
                self.unhealthy.append(answer.read().decode().strip())

    def row(self, operation: str, objects: int, seconds: float, longest_call_s: float) -> WholeRow:
        """What it has seen."""
        lookup_ms, health_ms = 1e3 * np.array(self.lookup_s or [0.0]), 1e3 * np.array(self.health_s or [0.0])
        return WholeRow(
            operation,
            objects,
            seconds=round(seconds, 3),
            longest_call_s=round(longest_call_s, 3),
            us_per_object=round(seconds / max(objects, 1) * 1e6, 2),
            lookups=len(self.lookup_s),
            lookup_ms_p50=round(float(np.percentile(lookup_ms, 50)), 1),
            lookup_ms_p99=round(float(np.percentile(lookup_ms, 99)), 1),
            lookup_ms_max=round(float(lookup_ms.max()), 1),
            health_ms_p99=round(float(np.percentile(health_ms, 99)), 1),
            health_ms_max=round(float(health_ms.max()), 1),
            unhealthy=f"{len(self.unhealthy)}: {self.unhealthy[-1]}" if self.unhealthy else "",
        )


def measure_whole(bench: CountBench) -> list[WholeRow]:
    """Lists, verifies, evicts and erases a tenant in the daemon of ``bench``, with a bystander all the while."""
    admin = Admin(bench.daemon.address("unix").removeprefix("unix://") + ".admin")
    rows: list[WholeRow] = []

    def measure(operation: str, objects: int, work: Callable[[], float | None]) -> None:
        with Bystander(bench) as others:
            start_s = time.perf_counter()
            longest_call_s = work()
            seconds = time.perf_counter() - start_s
        rows.append(others.row(operation, objects, seconds, seconds if longest_call_s is None else longest_call_s))

    leaving, evicting = bench.count // LEAVING_PART, bench.count // EVICTING_PART
    measure("nothing", 0, lambda: time.sleep(IDLE_S))
    with closing(bench.connect(OTHER_TOKEN)) as other:
        measure("put of another tenant", leaving, lambda: bench.put(range(leaving), other))
    measure("list namespaces", bench.count + leaving, lambda: _ask_namespaces(admin))
    measure("verify", bench.count + leaving, lambda: _follow(admin, VERIFY, VerifyRequest(bytes_per_s=1 << 40)))
    measure("put into the full store", evicting, lambda: bench.put_new(evicting))
    measure("erase of that tenant", leaving, lambda: _follow(admin, TENANT_ERASE, tenant=OTHER))
    return rows


def _ask_namespaces(admin: Admin) -> None:
    admin.ask(NAMESPACES, timeout_s=WHOLE_TIMEOUT_S)


def _follow(admin: Admin, verb: Verb[Any, Any], body: object = None, **names: str) -> None:  # Any: of two verbs
    """Until its last line. Raises BenchError where that tells an error."""
    with admin.open(verb, body, names=names, timeout_s=WHOLE_TIMEOUT_S) as parts:
        last = json.loads(b"".join(parts).splitlines()[-1])
    if "error" in last or not last["is_done"]:
        raise BenchError(f"{verb.name} ended with {last}")


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s
