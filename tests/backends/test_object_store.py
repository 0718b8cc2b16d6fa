"""The object store: what is evicted and what is not, leases, usage, counters, faults below it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hicache.backends.base import Backend, GetItem, PutItem
from hicache.backends.faulty import Fault, FaultKind
from hicache.backends.file_store import FileBackend
from hicache.backends.lmdb_store import LmdbBackend
from hicache.backends.store import ObjectStore
from hicache.errors import BackendError, ConfigError
from hicache.outcome import Outcome
from tests.backends.payloads import OTHER_TENANT, TENANT, key, payload
from tests.backends.store_rig import CAPACITY_BYTES, MIB, OBJECT_BYTES, Rig, owned


def test_the_same_key_twice_in_a_batch_exists_the_second_time(rig: Rig) -> None:
    assert rig.put(1, 1) == [Outcome.OK, Outcome.EXISTS]
    assert owned(rig.store, TENANT) == (OBJECT_BYTES, 1)


def test_tenants_are_accounted_apart(rig: Rig) -> None:
    rig.put(1, 2)
    rig.store.put([PutItem(key(1, OTHER_TENANT), memoryview(b"abc"))])
    assert owned(rig.store, TENANT) == (2 * OBJECT_BYTES, 2)
    assert owned(rig.store, OTHER_TENANT) == (3, 1)
    assert rig.store.delete([key(1), key(1, OTHER_TENANT)]) == [Outcome.OK, Outcome.OK]
    assert owned(rig.store, OTHER_TENANT) == (0, 0)
    assert rig.store.tenants() == [TENANT]


def test_an_object_dropped_while_others_are_put_is_forgotten(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.put(1)
    get_into = rig.faulty.get_into

    def overtaken(items: Sequence[GetItem]) -> list[Outcome]:
        assert rig.put(2) == [Outcome.OK]
        return get_into(items)

    rig.faulty.arm("get_into", Fault(FaultKind.WRONG_BYTES, times=1))
    monkeypatch.setattr(rig.faulty, "get_into", overtaken)
    assert rig.get(1) is Outcome.CORRUPT
    assert rig.store.lookup([key(1), key(2)])[0] == [Outcome.ABSENT, Outcome.OK]
    assert rig.put(1) == [Outcome.OK]


def test_an_object_stored_anew_while_its_old_bytes_were_read_stays_known(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.put(1)
    get_into = rig.faulty.get_into

    def overtaken(items: Sequence[GetItem]) -> list[Outcome]:
        outcomes = get_into(items)
        rig.store.delete([key(1)])
        assert rig.put(1) == [Outcome.OK]
        return outcomes

    rig.faulty.arm("get_into", Fault(FaultKind.WRONG_BYTES, times=1))
    monkeypatch.setattr(rig.faulty, "get_into", overtaken)
    assert rig.get(1) is Outcome.CORRUPT
    assert rig.store.lookup([key(1)])[0] == [Outcome.OK]


def test_a_corrupt_object_is_a_miss_forgotten_and_counted(rig: Rig) -> None:
    rig.put(1)
    rig.faulty.arm("get_into", Fault(FaultKind.WRONG_BYTES, times=1))
    assert rig.get(1) is Outcome.CORRUPT
    assert rig.store.lookup([key(1)])[0] == [Outcome.ABSENT]
    assert rig.store.stats().corrupt_dropped == 1
    assert owned(rig.store, TENANT) == (0, 0)
    assert rig.put(1) == [Outcome.OK]


def test_an_io_error_is_an_outcome_and_the_object_stays_known(rig: Rig) -> None:
    rig.put(1)
    rig.faulty.arm("get_into", Fault(FaultKind.EIO, times=1))
    assert rig.get(1) is Outcome.IO_ERROR
    assert rig.get(1) is Outcome.OK


def test_an_object_that_cannot_be_deleted_stays_known_also_when_it_is_named_twice(rig: Rig) -> None:
    rig.put(1)
    rig.faulty.arm("delete", Fault(FaultKind.EIO, times=1))
    assert rig.store.delete([key(1), key(1)]) == [Outcome.IO_ERROR] * 2
    assert rig.get(1) is Outcome.OK


def test_an_object_that_vanished_below_is_forgotten(rig: Rig) -> None:
    rig.put(1)
    rig.files.delete([key(1)])
    assert rig.get(1) is Outcome.ABSENT
    assert rig.store.lookup([key(1)])[0] == [Outcome.ABSENT]


def test_counters_tell_what_happened(rig: Rig) -> None:
    rig.put(1, 2)
    rig.put(1)
    rig.get(1)
    rig.get(9)
    _, lease = rig.store.lookup([key(1), key(2), key(9)], lease_s=5.0)
    stats = rig.store.stats()
    assert stats.puts == {Outcome.OK: 2, Outcome.EXISTS: 1}
    assert stats.gets == {Outcome.OK: 1, Outcome.ABSENT: 1}
    assert (stats.lookup_hits, stats.lookup_misses) == (2, 1)
    assert (stats.bytes_written, stats.bytes_read) == (2 * OBJECT_BYTES, OBJECT_BYTES)
    assert (stats.holds.leases, stats.holds.leased_keys) == (1, 2)
    assert lease != 0


def test_a_lookup_does_not_wait_for_a_backend_that_hangs(rig: Rig) -> None:
    rig.put(1)
    fault = rig.faulty.arm("get_into", Fault(FaultKind.NEVER))
    outcomes: list[Outcome] = []
    reader = threading.Thread(target=lambda: outcomes.append(rig.get(1)))
    reader.start()
    assert fault.entered.wait(timeout=30)
    assert rig.store.lookup([key(1)])[0] == [Outcome.OK]
    assert rig.put(2) == [Outcome.OK]
    rig.faulty.disarm()
    reader.join(timeout=30)
    assert outcomes == [Outcome.IO_ERROR]


def test_an_object_deleted_while_it_is_written_is_gone_afterwards(rig: Rig) -> None:
    fault = rig.faulty.arm("put", Fault(FaultKind.LATE))
    writer = threading.Thread(target=rig.put, args=(1,))
    writer.start()
    assert fault.entered.wait(timeout=30)
    assert rig.store.delete([key(1)]) == [Outcome.ABSENT]
    rig.faulty.disarm()
    writer.join(timeout=30)
    assert rig.get(1) is Outcome.ABSENT
    assert rig.present(1) == []
    assert rig.put(1) == [Outcome.OK]


def test_an_object_put_while_it_is_evicted_is_there_afterwards(rig: Rig) -> None:
    rig.put(1)
    fault = rig.faulty.arm("delete", Fault(FaultKind.LATE, times=1))
    remover = threading.Thread(target=lambda: rig.store.delete([key(1)]))
    remover.start()
    assert fault.entered.wait(timeout=30)
    outcomes: list[Outcome] = []
    writer = threading.Thread(target=lambda: outcomes.extend(rig.put(1)))
    writer.start()
    fault.release()
    for thread in (remover, writer):
        thread.join(timeout=30)
    assert outcomes in ([Outcome.OK], [Outcome.EXISTS])
    assert rig.get(1) is Outcome.OK
    assert owned(rig.store, TENANT) == (OBJECT_BYTES, 1)


def test_what_two_threads_put_at_once_is_known_to_both(rig: Rig) -> None:
    fault = rig.faulty.arm("put", Fault(FaultKind.LATE, times=1))
    first = threading.Thread(target=rig.put, args=(1,))
    first.start()
    assert fault.entered.wait(timeout=30)
    assert rig.put(1) == [Outcome.OK]
    fault.release()
    first.join(timeout=30)
    assert rig.get(1) is Outcome.OK
    assert owned(rig.store, TENANT) == (OBJECT_BYTES, 1)


def test_closing_twice_is_nothing_and_a_closed_store_says_so(rig: Rig) -> None:
    rig.put(1)
    rig.store.close()
    rig.store.close()
    with pytest.raises(BackendError, match="closed"):
        rig.get(1)


@pytest.mark.parametrize(
    ("setting", "settings"),
    [
        ("high_watermark", {"high_watermark": 1.5}),
        ("high_watermark", {"high_watermark": 0.0}),
        ("low_watermark", {"low_watermark": 0.95}),
        ("low_watermark", {"low_watermark": 0.0}),
        ("object_bytes_max", {"object_bytes_max": 0}),
        ("free_space_floor_bytes", {"free_space_floor_bytes": -1}),
    ],
)
def test_contradicting_settings_are_config_errors_that_name_them(
    tmp_path: Path, setting: str, settings: dict[str, float]
) -> None:
    backend = FileBackend.open(tmp_path, capacity_bytes=CAPACITY_BYTES)
    with pytest.raises(ConfigError) as caught:
        ObjectStore(backend, **{"object_bytes_max": MIB, **settings})  # type: ignore[arg-type]  # the point
    assert caught.value.setting == setting
    backend.close()


@pytest.mark.parametrize("open_backend", [LmdbBackend.open, FileBackend.open])
def test_many_threads_keep_a_store_within_its_bounds(tmp_path: Path, open_backend: Callable[..., Backend]) -> None:
    backend = open_backend(tmp_path / "store", capacity_bytes=4 * MIB)
    store = ObjectStore(backend, object_bytes_max=MIB, free_space_floor_bytes=0)
    wrong: list[str] = []

    def work(seed: int) -> None:
        for step in range(150):
            number = (seed * 7919 + step * 31) % 60
            size = 1000 + number * 3001
            outcome = store.put([PutItem(key(number), memoryview(payload(number, size)))])[0]
            if not outcome.is_ok:
                wrong.append(f"put {number}: {outcome!r}")
            _, lease = store.lookup([key(number)], lease_s=60.0)
            if lease:
                target = bytearray(size)
                outcome = store.get_into([GetItem(key(number), memoryview(target))])[0]
                if outcome is not Outcome.OK or bytes(target) != payload(number, size):
                    wrong.append(f"leased get {number}: {outcome!r}")
                store.release(lease)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert wrong == []
    usage = store.usage()
    assert usage.stored_bytes <= usage.capacity_bytes
    assert owned(store, TENANT) == (usage.payload_bytes, usage.objects)
    store.close()
