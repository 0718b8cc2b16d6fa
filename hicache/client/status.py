"""What a client of hicached tells about itself, and the counters behind it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hicache.breaker import BreakerState, BreakerStatus
from hicache.client.supervisor import ClientState
from hicache.outcome import Outcome


@dataclass(frozen=True, slots=True)
class OperationCounts:
    """One operation (lookup, get, put) since the client was made, by the outcome of its items."""

    calls: int
    objects: Mapping[Outcome, int]
    bytes: Mapping[Outcome, int]  # payload bytes of the objects; none for lookups


@dataclass(frozen=True, slots=True)
class L3Status:
    """The client at one moment."""

    address: str
    state: ClientState
    reason: str  # why it is not ready, or what ended the session before; empty while all is well
    refusal: str  # the stable code of a refusal that lasts; empty without one
    breaker: BreakerStatus
    bulk: str  # "memory", "bounce", "stream" or "none"
    bulk_reason: str  # why bulk goes through streams
    tenant: str
    daemon_version: str
    store_id: bytes  # 16 bytes, another one when the store was made anew; empty before the first session
    sessions_opened: int
    regions_draining: int
    items_in_doubt: int  # their calls have ended and hicached may still touch their bytes
    refusals: Mapping[str, int]  # calls and hellos refused by hicached, by code
    operations: Mapping[str, OperationCounts]

    @property
    def is_degraded(self) -> bool:
        """Whether L3 is of no use at the moment."""
        return self.state is not ClientState.READY or self.breaker.state is not BreakerState.CLOSED


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What a synchronous attempt to use hicached found. Only ``is_ok`` means that an engine will be served."""

    is_ok: bool
    code: str  # "OK", or the stable code of what is in the way
    detail: str  # for people
    is_lasting: bool  # it stays like this until somebody changes something
    seconds: float  # until the answer
    daemon_version: str = ""
    tenant: str = ""
    store_id: bytes = b""
    bulk: str = "none"
    bulk_reason: str = ""
    namespace_differs: tuple[str, ...] = ()  # fields in which the nearest known namespace of this model differs


class Counters:
    """Thread-safe counts by operation and outcome."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._objects: dict[str, Counter[Outcome]] = {}
        self._bytes: dict[str, Counter[Outcome]] = {}
        self._refusals: Counter[str] = Counter()

    def count(self, operation: str, outcomes: list[Outcome], sizes_bytes: Iterable[int] = ()) -> None:
        """One call with the outcome, and the bytes where there are any, of each of its items."""
        objects = Counter(outcomes)
        moved: Counter[Outcome] = Counter()
        for outcome, size_bytes in zip(outcomes, sizes_bytes, strict=False):
            moved[outcome] += size_bytes
        with self._lock:
            self._calls[operation] += 1
            self._objects.setdefault(operation, Counter()).update(objects)
            self._bytes.setdefault(operation, Counter()).update(moved)

    def count_refusal(self, code: str) -> None:
        """One call or hello that hicached refused."""
        with self._lock:
            self._refusals[code] += 1

    @property
    def refusals(self) -> Mapping[str, int]:
        """Refused calls and hellos by code."""
        with self._lock:
            return dict(self._refusals)

    def operations(self) -> Mapping[str, OperationCounts]:
        """A copy of everything counted."""
        with self._lock:
            return {
                operation: OperationCounts(calls, dict(self._objects[operation]), dict(self._bytes[operation]))
                for operation, calls in self._calls.items()
            }
