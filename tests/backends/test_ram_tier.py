"""The RAM tier: the contract of backends in front of files, and what it does in front of a store that others share."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.backends.base import Backend, GetItem
from hicache.backends.faulty import Fault, FaultKind, FaultyBackend
from hicache.backends.file_store import FileBackend
from hicache.backends.mooncake_layout import object_name
from hicache.backends.ram_residents import OBJECT_SHARE_MAX, RamResidents, Resident
from hicache.backends.ram_tier import RamTier, SharedRamTier
from hicache.backends.shared_store import SharedStore
from hicache.errors import BackendError
from hicache.outcome import Outcome
from tests.backends.contract import BackendContract
from tests.backends.fake_mooncake import FakeMooncake, open_fake
from tests.backends.payloads import get, get_many, key, payload, put
from tests.backends.test_file_contract import TestFileBackend as FileContract

MIB = 1 << 20
PAGE = 4096
RAM = 64 * PAGE
ROOT = Path(__file__).parents[2]


class TestRamTier(FileContract):
    """Whatever a test of the contract reads twice comes from memory the second time."""

    def open(self, directory: Path, *, capacity_bytes: int) -> Backend:
        return RamTier(super().open(directory, capacity_bytes=capacity_bytes), capacity_bytes=8 * MIB)


del FileContract  # its own tests run where it is defined
assert issubclass(TestRamTier, BackendContract)


@pytest.fixture
def fake() -> FakeMooncake:
    return FakeMooncake()


@pytest.fixture
def tier(fake: FakeMooncake) -> SharedRamTier:
    return SharedRamTier(open_fake(fake), capacity_bytes=RAM)


def read(tier: RamTier, number: int, size_bytes: int = PAGE) -> None:
    assert get(tier, key(number), size_bytes) == (Outcome.OK, payload(number, size_bytes))


def store(fake: FakeMooncake, *numbers: int, size_bytes: int = PAGE) -> None:
    """Let another machine put objects."""
    other = open_fake(fake)
    assert set(put(other, *[(key(number), payload(number, size_bytes)) for number in numbers])) <= {
        Outcome.OK,
        Outcome.EXISTS,
    }
    other.close()
    fake.calls.clear()


def test_what_is_read_for_the_second_time_stays_and_the_third_time_comes_from_memory(
    fake: FakeMooncake, tier: SharedRamTier
) -> None:
    store(fake, 1)
    read(tier, 1)
    assert tier.ram_stats().objects == 0
    read(tier, 1)
    assert tier.ram_stats().objects == 1
    fake.calls.clear()
    read(tier, 1)
    assert fake.calls == ["exist"]  # the store is asked whether it is there still, and that is its use
    stats = tier.ram_stats()
    assert (stats.hits, stats.misses, stats.hit_bytes, stats.admitted) == (1, 2, PAGE, 1)
    assert stats.used_bytes == PAGE


def test_what_was_put_here_stays_when_it_is_read_once(fake: FakeMooncake, tier: SharedRamTier) -> None:
    put(tier, (key(1), payload(1, PAGE)))
    assert tier.ram_stats().used_bytes == 0
    read(tier, 1)
    assert tier.ram_stats().objects == 1


def test_a_scan_flushes_nothing_and_a_loop_over_too_much_does_not_either(
    fake: FakeMooncake, tier: SharedRamTier
) -> None:
    store(fake, *range(300))
    for _ in range(2):
        for number in range(8):
            read(tier, number)
    for _ in range(3):
        for number in range(100, 300):
            read(tier, number)
    before = tier.ram_stats()
    assert (before.objects, before.evicted) == (8, 0)
    for number in range(8):
        read(tier, number)
    assert tier.ram_stats().hits == before.hits + 8


def test_the_least_recently_used_makes_room(fake: FakeMooncake, tier: SharedRamTier) -> None:
    size_bytes = RAM // 8
    store(fake, *range(9), size_bytes=size_bytes)
    for number in range(8):
        read(tier, number, size_bytes)
        read(tier, number, size_bytes)
    read(tier, 0, size_bytes)
    read(tier, 8, size_bytes)
    read(tier, 8, size_bytes)
    assert tier.ram_stats().used_bytes == RAM
    assert tier.ram_stats().evicted == 1
    fake.calls.clear()
    read(tier, 0, size_bytes)
    assert "get" not in fake.calls
    read(tier, 1, size_bytes)
    assert "get" in fake.calls


def test_an_object_that_would_turn_out_too_many_is_left_out(fake: FakeMooncake, tier: SharedRamTier) -> None:
    size_bytes = RAM // OBJECT_SHARE_MAX + 1
    store(fake, 1, size_bytes=size_bytes)
    for _ in range(4):
        read(tier, 1, size_bytes)
    assert tier.ram_stats().objects == 0


def test_what_another_machine_deletes_is_absent_at_once_and_what_it_puts_anew_is_read_anew(
    fake: FakeMooncake, tier: SharedRamTier
) -> None:
    store(fake, 1, 2)
    for _ in range(2):
        read(tier, 1)
        read(tier, 2)
    other = open_fake(fake)
    assert other.delete([key(1)]) == [Outcome.OK]
    found = get_many(tier, [(key(1), PAGE), (key(2), PAGE)])
    assert [outcome for outcome, _ in found] == [Outcome.ABSENT, Outcome.OK]
    assert tier.ram_stats().objects == 1
    put(other, (key(1), b"other bytes"))
    assert get(tier, key(1), 11) == (Outcome.OK, b"other bytes")


def test_a_lookup_that_misses_drops_the_copy_too(fake: FakeMooncake, tier: SharedRamTier) -> None:
    store(fake, 1)
    read(tier, 1)
    read(tier, 1)
    del fake.values[object_name(key(1))]  # evicted
    assert tier.find([key(1)]) == [Outcome.ABSENT]
    assert tier.ram_stats().used_bytes == 0


def test_without_a_master_a_hot_object_is_unavailable_like_any_other_and_stays(
    fake: FakeMooncake, tier: SharedRamTier
) -> None:
    store(fake, 1)
    read(tier, 1)
    read(tier, 1)
    fake.is_unreachable = True
    assert get(tier, key(1), PAGE)[0] is Outcome.UNAVAILABLE
    assert (tier.ram_stats().objects, tier.ram_stats().hits) == (1, 0)


def test_an_object_that_is_deleted_while_it_is_read_is_not_kept(fake: FakeMooncake, tier: SharedRamTier) -> None:
    store(fake, 1)
    read(tier, 1)
    fake.on_get = lambda names: tier.delete([key(1)])  # type: ignore[assignment,return-value]  # its result is ignored
    get(tier, key(1), PAGE)
    fake.on_get = lambda names: None
    assert tier.ram_stats().objects == tier.ram_stats().used_bytes == 0
    assert get(tier, key(1), PAGE)[0] is Outcome.ABSENT


def test_a_read_that_fails_leaves_neither_object_nor_memory(fake: FakeMooncake, tier: SharedRamTier) -> None:
    store(fake, 1, 2)
    read(tier, 1)
    fake.codes[object_name(key(1))] = [-800]
    assert get(tier, key(1), PAGE)[0] is Outcome.IO_ERROR
    tier.close()
    with pytest.raises(BackendError, match="closed"):
        get(tier, key(1), PAGE)
    assert tier.ram_stats().used_bytes == 0


def test_memory_that_changed_by_itself_is_dropped_and_the_store_read_instead(
    fake: FakeMooncake, tier: SharedRamTier
) -> None:
    store(fake, 1)
    read(tier, 1)
    read(tier, 1)
    resident = tier._residents.acquire(key(1), PAGE)
    assert resident is not None
    resident.view[17] ^= 1
    tier._residents.release(resident, was_read=False)
    read(tier, 1)
    assert (tier.ram_stats().corrupt, tier.ram_stats().used_bytes) == (1, 0)


def test_a_client_that_writes_to_its_target_changes_nobody_elses_bytes(fake: FakeMooncake, tier: SharedRamTier) -> None:
    store(fake, 1)
    target = memoryview(bytearray(PAGE))
    for _ in range(3):
        assert tier.get_into([GetItem(key(1), target)]) == [Outcome.OK]
        target[:] = bytes(PAGE)
    read(tier, 1)


def test_the_same_key_twice_in_a_batch_is_kept_once(fake: FakeMooncake, tier: SharedRamTier) -> None:
    store(fake, 1)
    for _ in range(3):
        assert get_many(tier, [(key(1), PAGE)] * 3) == [(Outcome.OK, payload(1, PAGE))] * 3
    assert tier.ram_stats().used_bytes == PAGE


@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind is not FaultKind.DELAY])
def test_whatever_the_backend_does_hot_objects_are_served_and_no_memory_is_lost(
    tmp_path: Path, kind: FaultKind
) -> None:
    faulty = FaultyBackend(FileBackend.open(tmp_path, capacity_bytes=1 << 24))
    tier = RamTier(faulty, capacity_bytes=RAM)
    put(tier, *[(key(number), payload(number, PAGE)) for number in (1, 2)])
    read(tier, 1)
    fault = faulty.arm("get_into", Fault(kind, times=1))
    with ThreadPoolExecutor(1) as pool:
        cold = pool.submit(get, tier, key(2), PAGE)
        assert fault.entered.wait(30)
        read(tier, 1)  # meanwhile
        fault.release()
        outcome, content = cold.result(30)
    assert outcome is not Outcome.OK or content == payload(2, PAGE)
    assert (outcome is Outcome.OK) == (kind is FaultKind.LATE)
    assert tier.ram_stats().used_bytes == tier.ram_stats().objects * PAGE
    tier.close()
    assert tier.ram_stats().used_bytes == 0


@given(seed=st.integers(0, 2**32))
def test_memory_is_counted_exactly_and_nobody_loses_what_it_was_given(seed: int) -> None:
    """A model: what is held has its bytes, and all that is used is resident, being filled, or still held."""
    random = Random(seed)
    residents = RamResidents(RAM)
    held: list[tuple[Resident, bytes]] = []
    filling: list[Resident] = []

    def begin(number: int, size_bytes: int) -> None:
        residents.note(key(number), size_bytes)
        if (room := residents.reserve(key(number), size_bytes)) is not None:
            filling.append(room)

    def end(number: int, size_bytes: int) -> None:
        if filling:
            room = filling.pop(random.randrange(len(filling)))
            room.view[:] = payload(len(room.key), room.size_bytes)
            random.choice([lambda: residents.publish(room, 7), lambda: residents.abandon(room)])()

    def acquire(number: int, size_bytes: int) -> None:
        if (resident := residents.acquire(key(number), size_bytes)) is not None:
            held.append((resident, bytes(resident.view)))

    def give_back(number: int, size_bytes: int) -> None:
        if held:
            resident, content = held.pop(random.randrange(len(held)))
            assert resident.view == content
            residents.release(resident, was_read=True)

    def drop(number: int, size_bytes: int) -> None:
        residents.drop(key(number))

    actions: list[Callable[[int, int], None]] = [begin, begin, end, end, acquire, acquire, give_back, drop]
    for _ in range(120):
        number = random.randrange(12)
        random.choice(actions)(number, PAGE * (1 + number % 3 * 5) - number)
        everything = {id(one): one for one in (*residents._residents.values(), *filling, *(one for one, _ in held))}
        pages = sum(-(-one.size_bytes // PAGE) * PAGE for one in everything.values())
        assert residents.stats().used_bytes == pages <= RAM
        assert residents.stats().objects == len(residents._residents)
    while filling:
        end(0, 0)
    while held:
        give_back(0, 0)
    residents.close()
    assert residents.stats().used_bytes == 0


def test_every_number_is_documented(fake: FakeMooncake, tmp_path: Path) -> None:
    files = FileBackend.open(tmp_path, capacity_bytes=MIB)
    shared = SharedStore(SharedRamTier(open_fake(fake), capacity_bytes=RAM), object_bytes_max=MIB)
    names = [
        number.name + ("_total" if number.is_counter else "") for store in (files, shared) for number in store.numbers()
    ]
    section = (ROOT / "docs" / "metrics.md").read_text().split("\n### Other backends\n")[1].split("\n### ")[0]
    assert re.findall(r"^\| `(\w+)`", section, flags=re.MULTILINE) == names
    files.close()
