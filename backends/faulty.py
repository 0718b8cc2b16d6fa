"""A backend in front of another one that fails on command: for tests, and for drills on a running store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

from hicache.backends.base import Backend, GetItem, Number, PutItem, StoredBatch, Usage, WalkedObject
from hicache.backends.shared_store import SharedBackend
from hicache.errors import UsageError
from hicache.outcome import Outcome

Operation: TypeAlias = Literal["put", "get_into", "contains", "delete", "touch"]


class FaultKind(Enum):
    """What an armed fault does to the items it meets."""

    DELAY = "delay"  # the operation takes ``delay_s`` longer
    SHORT = "short"  # a get fills half of the target and finds the end: CORRUPT, dropped; a put fails with IO_ERROR
    EIO = "EIO"  # IO_ERROR, nothing done
    ENOSPC = "ENOSPC"  # a put finds no space, anything else an I/O error; nothing done
    WRONG_BYTES = "wrong bytes"  # a get finds one byte changed: CORRUPT, dropped; a put stores nothing: IO_ERROR
    NEVER = "never answers"  # hangs until released, then IO_ERROR with nothing done
    LATE = "answers late"  # hangs until released, then does what was asked


@dataclass(slots=True)
class Fault:
    """One armed fault. ``entered`` is set when an operation has met it; ``release`` ends what hangs in it."""

    kind: FaultKind
    times: int | None = None  # how many operations it meets; None: all
    keys: frozenset[bytes] | None = None  # only items with these keys; None: all
    delay_s: float = 0.0
    entered: threading.Event = field(default_factory=threading.Event)
    _released: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        """Let every operation that hangs, or will hang, in this fault go on."""
        self._released.set()

    def hang(self) -> None:
        """Wait for ``release``."""
        self._released.wait()


class FaultyBackend:
    """Implements ``Backend`` by another one; the same as that one while no fault is armed."""

    def __init__(self, inner: Backend, *, wait: Callable[[float], None] = time.sleep) -> None:
        self._inner = inner
        self._wait = wait
        self._lock = threading.Lock()
        self._armed: dict[Operation, Fault] = {}
        self.name = inner.name
        self.store_id = inner.store_id

    def arm(self, operation: Operation, fault: Fault) -> Fault:
        """Let ``fault`` meet the next calls of ``operation``, instead of whatever was armed for it."""
        if operation == "touch" and fault.kind in (FaultKind.SHORT, FaultKind.WRONG_BYTES):
            raise UsageError(f"{fault.kind.value} means nothing for {operation}")
        with self._lock:
            self._armed[operation] = fault
        return fault

    def disarm(self) -> None:
        """Forget all faults, and release what hangs in them."""
        with self._lock:
            faults = list(self._armed.values())
            self._armed.clear()
        for fault in faults:
            fault.release()

    def _meet(self, operation: Operation, keys: Sequence[bytes]) -> tuple[Fault | None, list[bool]]:
        """The fault that this call meets, if any, and which of its items."""
        with self._lock:
            fault = self._armed.get(operation)
            hit = [fault is not None and (fault.keys is None or key in fault.keys) for key in keys]
            if fault is None or not any(hit):
                return None, [False] * len(keys)
            if fault.times is not None:
                fault.times -= 1
                if fault.times == 0:
                    del self._armed[operation]
        fault.entered.set()
        if fault.kind is FaultKind.DELAY:
            self._wait(fault.delay_s)
        elif fault.kind in (FaultKind.NEVER, FaultKind.LATE):
            fault.hang()
        is_harmless = fault.kind in (FaultKind.DELAY, FaultKind.LATE)
        return fault, [False] * len(keys) if is_harmless else hit

    def put(self, items: Sequence[PutItem]) -> list[Outcome]:
        """See ``Backend.put``."""
        fault, hit = self._meet("put", [item.key for item in items])
        failed = Outcome.NO_SPACE if fault is not None and fault.kind is FaultKind.ENOSPC else Outcome.IO_ERROR
        passed = iter(self._inner.put([item for item, is_hit in zip(items, hit, strict=True) if not is_hit]))
        return [failed if is_hit else next(passed) for is_hit in hit]

    def get_into(self, items: Sequence[GetItem]) -> list[Outcome]:
        """See ``Backend.get_into``."""
        fault, hit = self._meet("get_into", [item.key for item in items])
        passed = iter(self._inner.get_into([item for item, is_hit in zip(items, hit, strict=True) if not is_hit]))
        outcomes = []
        for item, is_hit in zip(items, hit, strict=True):
            outcomes.append(self._spoil(fault, item) if is_hit and fault is not None else next(passed))
        return outcomes

    def _spoil(self, fault: Fault, item: GetItem) -> Outcome:
        if fault.kind not in (FaultKind.SHORT, FaultKind.WRONG_BYTES):
            return Outcome.IO_ERROR
        raw = bytearray(item.target.nbytes)
        outcome = self._inner.get_into([GetItem(item.key, memoryview(raw))])[0]
        if outcome is not Outcome.OK:
            return outcome
        if fault.kind is FaultKind.SHORT:
            del raw[len(raw) // 2 :]
        else:
            raw[len(raw) // 2] ^= 0x01
        item.target.cast("B")[: len(raw)] = raw
        self._inner.delete([item.key])
        return Outcome.CORRUPT

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See ``Backend.contains``."""
        _, hit = self._meet("contains", keys)
        found = self._inner.contains(keys)
        return [is_found and not is_hit for is_found, is_hit in zip(found, hit, strict=True)]

    def delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        """See ``Backend.delete``."""
        _, hit = self._meet("delete", keys)
        passed = iter(self._inner.delete([key for key, is_hit in zip(keys, hit, strict=True) if not is_hit]))
        return [Outcome.IO_ERROR if is_hit else next(passed) for is_hit in hit]

    def forget(self, gone: Sequence[tuple[bytes, int]]) -> None:
        """See ``Backend.forget``."""
        self._inner.forget(gone)

    def touch(self, used: Sequence[tuple[bytes, float]]) -> None:
        """See ``Backend.touch``."""
        _, hit = self._meet("touch", [key for key, _ in used])
        self._inner.touch([entry for entry, is_hit in zip(used, hit, strict=True) if not is_hit])

    def scan(self) -> Iterator[StoredBatch]:
        """See ``Backend.scan``."""
        return self._inner.scan()

    def walk(self, *, after: bytes = b"", tenant: bytes = b"") -> Iterator[list[WalkedObject]]:
        """See ``Backend.walk``."""
        return self._inner.walk(after=after, tenant=tenant)

    def usage(self) -> Usage:
        """See ``Backend.usage``."""
        return self._inner.usage()

    def numbers(self) -> Iterator[Number]:
        """See ``Backend.numbers``."""
        return self._inner.numbers()

    def problem(self) -> str:
        """See ``Backend.problem``."""
        return self._inner.problem()

    def stored_bytes(self, size_bytes: int) -> int:
        """See ``Backend.stored_bytes``."""
        return self._inner.stored_bytes(size_bytes)

    def free_bytes(self) -> int | None:
        """See ``Backend.free_bytes``."""
        return self._inner.free_bytes()

    def resize(self, capacity_bytes: int, *, floor_bytes: int) -> None:
        """See ``Backend.resize``."""
        self._inner.resize(capacity_bytes, floor_bytes=floor_bytes)

    def close(self) -> None:
        """See ``Backend.close``. Releases what hangs."""
        self.disarm()
        self._inner.close()


class FaultySharedBackend(FaultyBackend):
    """Implements ``SharedBackend`` by another one; faults of ``contains`` meet what is looked up, too."""

    def __init__(self, inner: SharedBackend) -> None:
        super().__init__(inner)
        self._shared = inner

    def find(self, keys: Sequence[bytes]) -> list[Outcome]:
        """See ``SharedBackend.find``. What meets a fault is UNAVAILABLE: it cannot be told."""
        _, hit = self._meet("contains", keys)
        passed = iter(self._shared.find([key for key, is_hit in zip(keys, hit, strict=True) if not is_hit]))
        return [Outcome.UNAVAILABLE if is_hit else next(passed) for is_hit in hit]

    def numbers(self) -> Iterator[Number]:
        """See ``SharedBackend.numbers``."""
        return self._shared.numbers()
