"""The faults that can be armed, and what each of them does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.backends.base import GetItem
from hicache.backends.faulty import Fault, FaultKind, FaultyBackend
from hicache.backends.file_store import FileBackend
from hicache.errors import UsageError
from hicache.outcome import Outcome
from tests.backends.payloads import get, key, payload, put, scanned


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def backend(tmp_path: Path, waits: list[float]) -> Iterator[FaultyBackend]:
    backend = FaultyBackend(FileBackend.open(tmp_path, capacity_bytes=1 << 24), wait=waits.append)
    put(backend, (key(1), payload(1, 1000)), (key(2), payload(2, 1000)))
    yield backend
    backend.close()


def test_errors_are_outcomes_and_change_nothing(backend: FaultyBackend) -> None:
    for operation in ("put", "get_into", "contains", "delete", "touch"):
        backend.arm(operation, Fault(FaultKind.EIO))
    assert put(backend, (key(3), b"x")) == [Outcome.IO_ERROR]
    assert get(backend, key(1), 1000) == (Outcome.IO_ERROR, bytes(1000))
    assert backend.contains([key(1)]) == [False]
    assert backend.delete([key(1)]) == [Outcome.IO_ERROR]
    backend.touch([(key(1), 1.0)])
    backend.disarm()
    assert backend.contains([key(1), key(3)]) == [True, False]
    assert min(stored.used_at_s for stored in scanned(backend)) > 1.0


def test_no_space_is_what_a_put_finds(backend: FaultyBackend) -> None:
    backend.arm("put", Fault(FaultKind.ENOSPC))
    assert put(backend, (key(3), b"x")) == [Outcome.NO_SPACE]


def test_a_fault_meets_only_its_keys_and_only_so_many_times(backend: FaultyBackend) -> None:
    backend.arm("get_into", Fault(FaultKind.EIO, times=2, keys=frozenset({key(2)})))
    targets = [bytearray(1000), bytearray(1000)]
    items = [GetItem(key(number), memoryview(target)) for number, target in zip((1, 2), targets, strict=True)]
    assert get(backend, key(1), 1000)[0] is Outcome.OK
    assert backend.get_into(items) == [Outcome.OK, Outcome.IO_ERROR]
    assert backend.get_into(items[::-1]) == [Outcome.IO_ERROR, Outcome.OK]
    assert backend.get_into(items) == [Outcome.OK, Outcome.OK]


@pytest.mark.parametrize("kind", [FaultKind.WRONG_BYTES, FaultKind.SHORT])
def test_wrong_and_missing_bytes_are_corrupt_in_the_target_and_dropped(backend: FaultyBackend, kind: FaultKind) -> None:
    backend.arm("get_into", Fault(kind, times=1))
    outcome, content = get(backend, key(1), 1000)
    assert outcome is Outcome.CORRUPT
    assert content != payload(1, 1000)
    assert content[:500] == payload(1, 1000)[:500]
    assert backend.contains([key(1), key(2)]) == [False, True]
    backend.arm("get_into", Fault(kind))
    assert get(backend, key(1), 1000)[0] is Outcome.ABSENT


def test_a_delay_waits_and_then_does_what_was_asked(backend: FaultyBackend, waits: list[float]) -> None:
    backend.arm("get_into", Fault(FaultKind.DELAY, delay_s=2.5))
    assert get(backend, key(1), 1000) == (Outcome.OK, payload(1, 1000))
    assert waits == [2.5]


@pytest.mark.parametrize(("kind", "outcome"), [(FaultKind.NEVER, Outcome.IO_ERROR), (FaultKind.LATE, Outcome.OK)])
def test_what_hangs_goes_on_when_it_is_released(backend: FaultyBackend, kind: FaultKind, outcome: Outcome) -> None:
    fault = backend.arm("get_into", Fault(kind))
    answers: list[tuple[Outcome, bytes]] = []
    reader = threading.Thread(target=lambda: answers.append(get(backend, key(1), 1000)))
    reader.start()
    assert fault.entered.wait(timeout=30)
    assert answers == []
    fault.release()
    reader.join(timeout=30)
    assert answers == [(outcome, payload(1, 1000) if outcome is Outcome.OK else bytes(1000))]


def test_faults_that_mean_nothing_are_refused(backend: FaultyBackend) -> None:
    with pytest.raises(UsageError, match="touch"):
        backend.arm("touch", Fault(FaultKind.SHORT))
