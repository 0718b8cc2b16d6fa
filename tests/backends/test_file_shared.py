"""Several processes on one folder: what one does the others see, and nobody harms what another writes."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache.backends import file_peers
from hicache.backends.base import PutItem
from hicache.backends.file_accounts import Counts
from hicache.backends.file_calls import FileCalls
from hicache.backends.file_layout import object_path, stored_bytes_of
from hicache.backends.file_settings import FileSettings
from hicache.backends.file_shared import PROTECTED_S, SETTLE_INTERVAL_S, UPKEEP_INTERVAL_S, SharedFileBackend
from hicache.backends.file_store import FileBackend
from hicache.backends.file_writer import remove_dead_writers
from hicache.backends.open import open_backend, open_store
from hicache.backends.shared_store import SharedStore
from hicache.errors import ConfigError, StorageInUse
from hicache.outcome import Outcome
from tests.backends.payloads import get, key, payload, put, scanned
from tests.backends.sharing_process import Sharer
from tests.backends.tampering import files_under

MIB = 1 << 20
CAPACITY_BYTES = 8 * MIB
SHARED = FileSettings(shared=True)


class Opened:
    """Backends over one folder in this process; all are closed at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._backends: list[SharedFileBackend] = []

    def __call__(self, *, calls: FileCalls | None = None, capacity_bytes: int = CAPACITY_BYTES) -> SharedFileBackend:
        backend = SharedFileBackend.open(self.directory, capacity_bytes=capacity_bytes, settings=SHARED, calls=calls)
        self._backends.append(backend)
        return backend

    def close(self) -> None:
        for backend in self._backends:
            backend.close()


@pytest.fixture
def opened(directory: Path) -> Iterator[Opened]:
    opened = Opened(directory)
    yield opened
    opened.close()


@pytest.fixture
def sharers(directory: Path) -> Iterator[tuple[Sharer, Sharer]]:
    pair = tuple(Sharer(f"file://{directory}?shared=1", CAPACITY_BYTES) for _ in range(2))
    yield pair[0], pair[1]
    for sharer in pair:
        sharer.end()


def walked_bytes(directory: Path) -> int:
    """What the files of all objects take."""
    return sum(stored_bytes_of(path.stat().st_size - 4096) for path in files_under(directory / "objects"))


def unfinished_of(directory: Path) -> list[Path]:
    """Files in the folders of writers."""
    return [path for path in files_under(directory / "unfinished") if path.suffix not in (".alive", ".lock")]


def file_bytes(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def told_until(directory: Path, *backends: SharedFileBackend) -> None:
    """Every backend hears what the others told, and has walked if it must."""
    for backend in backends:
        backend.keep_up()
        assert backend.usage().stored_bytes == walked_bytes(directory)


def test_what_one_process_stores_or_deletes_the_other_finds_or_misses(sharers: tuple[Sharer, Sharer]) -> None:
    first, second = sharers
    assert second.ask("find", 1) == "ABSENT"
    assert first.ask("put", 1, 300_000) == "OK"
    assert second.ask("find", 1) == "OK"
    assert second.ask("get", 1, 300_000) == "OK"
    assert second.ask("put", 1, 300_000) == "EXISTS"
    assert second.ask("delete", 1) == "OK"
    assert first.ask("find", 1) == "ABSENT"
    assert first.ask("get", 1, 300_000) == "ABSENT"
    assert first.ask("delete", 1) == "ABSENT"
    assert first.ask("put", 1, 300_000) == "OK"
    assert second.ask("get", 1, 300_000) == "OK"


def test_the_same_keys_put_by_both_at_once_are_stored_once_and_intact(
    sharers: tuple[Sharer, Sharer], directory: Path
) -> None:
    first, second = sharers
    for start in (0, 100, 200):
        for sharer in sharers:
            sharer.say("race", start, 90_000, 16)
        for outcomes in zip(first.hear().split(), second.hear().split(), strict=True):
            assert sorted(outcomes) == ["EXISTS", "OK"]
    for number in (*range(16), *range(100, 116), *range(200, 216)):
        assert second.ask("get", number, 90_000) == "OK"
    assert len(files_under(directory / "objects")) == 48


def test_both_churn_a_full_folder_and_it_stays_within_bounds_with_whole_objects(
    sharers: tuple[Sharer, Sharer], directory: Path
) -> None:
    first, second = sharers
    batch = 4
    for start in range(0, 60, batch):
        assert first.ask("keep_up") == second.ask("keep_up") == "done"  # each has heard of the last round
        first.say("race", start, 200_000, batch)
        second.say("race", 1000 + start, 200_000, batch)
        assert first.hear() == second.hear() == " ".join(["OK"] * batch)
    assert walked_bytes(directory) <= CAPACITY_BYTES
    found = 0
    for number in (*range(60), *range(1000, 1060)):
        outcomes = {first.ask("get", number, 200_000), second.ask("get", number, 200_000)}
        assert outcomes in ({"OK"}, {"ABSENT"})
        found += outcomes == {"OK"}
    assert found * stored_bytes_of(200_000) == walked_bytes(directory)


def test_br_063_one_is_killed_in_the_middle_of_puts_and_the_other_goes_on_and_cleans(
    directory: Path, opened: Opened
) -> None:
    survivor = opened()
    assert put(survivor, (key(1), payload(1, 100_000))) == [Outcome.OK]
    for _ in range(3):
        sharer = Sharer(f"file://{directory}?shared=1", CAPACITY_BYTES)
        sharer.say("churn", 1000, 700_000)
        for _ in range(15):
            assert sharer.hear().startswith("put")
        assert len(list((directory / "unfinished").glob("*.alive"))) == 2
        sharer.end(is_killed=True)
        assert put(survivor, (key(2), payload(2, 100_000)))[0] in (Outcome.OK, Outcome.EXISTS)
        survivor.keep_up()
        assert len(list((directory / "unfinished").glob("*.alive"))) == 1
        assert survivor.usage().stored_bytes == walked_bytes(directory)
    for stored in scanned(survivor):
        assert get(survivor, stored.key, stored.size_bytes)[0] is Outcome.OK


def test_a_running_backend_cleans_by_itself_while_it_is_used(
    opened: Opened, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened()
    has_cleaned = threading.Event()

    def clean(root: Path) -> int:
        removed = remove_dead_writers(root)
        has_cleaned.set()
        return removed

    monkeypatch.setattr("hicache.backends.file_shared.remove_dead_writers", clean)
    (directory / "unfinished" / "1-dead").mkdir(parents=True)
    (directory / "unfinished" / "1-dead" / "0").write_bytes(bytes(50_000))
    (directory / "unfinished" / "1-dead.alive").touch()
    put(backend, (key(1), b"not due yet"))
    assert not has_cleaned.is_set()
    monkeypatch.setattr("hicache.backends.file_shared.UPKEEP_INTERVAL_S", 0.0)
    put(backend, (key(2), b"due"))
    assert has_cleaned.wait(timeout=30)
    assert not (directory / "unfinished" / "1-dead").exists()


def test_cleaning_never_touches_what_a_live_writer_is_writing(opened: Opened, directory: Path) -> None:
    class CleaningCalls(FileCalls):
        """Has another process clean when a file is written and has no name yet."""

        cleaned = 0

        def link(self, source: str, target: str) -> None:
            other.keep_up()
            self.cleaned += 1
            assert os.path.exists(source)
            super().link(source, target)

    other = opened()
    calls = CleaningCalls()
    writer = opened(calls=calls)
    assert put(writer, (key(1), payload(1, 500_000))) == [Outcome.OK]
    assert calls.cleaned == 2  # once more for the folder that had to be made
    assert get(other, key(1), 500_000) == (Outcome.OK, payload(1, 500_000))
    assert other.orphans_removed == 0
    assert unfinished_of(directory) == []


def test_an_idle_process_gives_up_its_spare_files_when_another_fills_the_folder(
    opened: Opened, directory: Path
) -> None:
    idle, busy = opened(), opened()
    put(idle, *[(key(number), payload(number, MIB)) for number in range(7)])
    idle.delete([key(number) for number in range(7)])
    told_until(directory, idle, busy)
    assert file_bytes(unfinished_of(directory)) > MIB
    put(busy, *[(key(number), payload(number, MIB)) for number in range(10, 17)])
    told_until(directory, idle, busy)
    for backend in (idle, busy):
        backend.keep_up()
    assert file_bytes(unfinished_of(directory)) + walked_bytes(directory) <= CAPACITY_BYTES


def test_usage_of_both_converges_to_what_is_there(opened: Opened, directory: Path) -> None:
    first, second = opened(), opened()
    put(first, *[(key(number), payload(number, 10_000 + number)) for number in range(10)])
    put(second, *[(key(number), payload(number, 20_000)) for number in range(5, 20)])
    first.delete([key(12), key(13)])
    told_until(directory, first, second)
    second.close()
    put(first, (key(30), payload(30, 5000)))
    third = opened()
    third.delete([key(30), key(0)])
    told_until(directory, first, third)
    assert first.usage().objects == 17


def test_a_writer_whose_report_cannot_be_read_for_a_moment_counts_once(
    opened: Opened, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = opened(), opened()
    put(second, *[(key(number), payload(number, 10_000)) for number in range(5)])
    told_until(directory, first, second)

    def refuse(alive: Path) -> tuple[Counts, int]:
        raise OSError(errno.EIO, str(alive))

    with monkeypatch.context() as patch:
        patch.setattr(file_peers, "read_report", refuse)
        assert first._peers.refreshed()[0].objects == 5
    assert first._peers.refreshed()[0].objects == 5


def test_a_file_that_one_recycles_while_another_reads_it_is_a_miss_and_never_torn(
    opened: Opened, directory: Path
) -> None:
    class RecyclingCalls(FileCalls):
        """Lets the other process write the file anew in the middle of a read."""

        def __init__(self) -> None:
            self.action: list[object] = []

        def read(self, fd: int, targets: list[memoryview], offset: int) -> int:
            count = super().read(fd, targets, offset)
            if self.action and offset == 0:
                self.action.clear()
                other.delete([key(1)])
                assert put(other, (key(2), payload(2, 2 * MIB))) == [Outcome.OK]
                assert os.stat(object_path(str(directory / "objects"), key(2))).st_ino == inode
            return count

    other = opened()
    calls = RecyclingCalls()
    reader = opened(calls=calls)
    put(other, (key(1), payload(1, 2 * MIB)))
    inode = os.stat(object_path(str(directory / "objects"), key(1))).st_ino
    calls.action = [None]
    assert get(reader, key(1), 2 * MIB)[0] is Outcome.ABSENT
    assert get(reader, key(2), 2 * MIB) == (Outcome.OK, payload(2, 2 * MIB))
    told_until(directory, other, reader)


def test_the_least_recently_used_goes_first_whoever_stored_it_and_what_was_looked_up_stays(
    opened: Opened, directory: Path
) -> None:
    first, second = opened(), opened()
    put(first, *[(key(number), payload(number, MIB)) for number in range(4)])
    put(second, *[(key(number), payload(number, MIB)) for number in range(4, 7)])
    first.touch([(key(number), 1_000_000.0 + number) for number in range(7)])
    assert first.find([key(0)]) == [Outcome.OK]
    second.keep_up()
    assert put(second, (key(7), payload(7, MIB))) == [Outcome.OK]
    assert first.contains([key(number) for number in range(8)]) == [True, False, *[True] * 6]
    protected_until_s = os.stat(object_path(str(directory / "objects"), key(0))).st_atime
    mtime_s = os.stat(object_path(str(directory / "objects"), key(0))).st_mtime
    assert protected_until_s - mtime_s == pytest.approx(PROTECTED_S, abs=0.01)


def test_what_is_there_already_is_put_again_without_evicting_anything(opened: Opened) -> None:
    backend = opened()
    objects = [(key(number), payload(number, MIB)) for number in range(7)]
    put(backend, *objects)
    assert put(backend, *objects) == [Outcome.EXISTS] * 7
    assert backend.usage().objects == 7


def test_an_object_beyond_the_capacity_evicts_nothing(opened: Opened) -> None:
    backend = opened(capacity_bytes=MIB)
    outcomes = put(backend, (key(1), b"a" * 100), (key(2), bytes(2 * MIB)), (key(3), b"c" * 100))
    assert outcomes == [Outcome.OK, Outcome.NO_SPACE, Outcome.OK]


def test_what_everybody_protects_is_not_evicted_and_puts_find_no_space(opened: Opened) -> None:
    backend = opened()
    put(backend, *[(key(number), payload(number, MIB)) for number in range(7)])
    assert backend.find([key(number) for number in range(7)]) == [Outcome.OK] * 7
    assert put(backend, (key(8), payload(8, MIB))) == [Outcome.NO_SPACE]
    assert backend.contains([key(number) for number in range(7)]) == [True] * 7


def test_a_corrupt_object_is_dropped_for_both(opened: Opened, directory: Path) -> None:
    first, second = opened(), opened()
    put(first, (key(1), payload(1, 50_000)), (key(2), payload(2, 50_000)))
    with open(object_path(str(directory / "objects"), key(1)), "r+b") as file:
        file.seek(10_000)
        file.write(b"damage")
    assert get(second, key(1), 50_000)[0] is Outcome.CORRUPT
    assert first.find([key(1), key(2)]) == [Outcome.ABSENT, Outcome.OK]
    told_until(directory, first, second)


def test_a_folder_is_either_shared_or_owned(opened: Opened, directory: Path) -> None:
    opened()
    with pytest.raises(StorageInUse, match=f"pid {os.getpid()} "):
        FileBackend.open(directory, capacity_bytes=CAPACITY_BYTES)
    opened.close()
    alone = FileBackend.open(directory, capacity_bytes=CAPACITY_BYTES)
    with pytest.raises(StorageInUse, match=f"pid {os.getpid()} "):
        opened()
    alone.close()
    opened().put([PutItem(key(1), memoryview(b"shared again"))])


def test_a_url_shares_a_folder_and_its_store_is_asked(directory: Path) -> None:
    url = f"file://{directory}?shared=1"
    store = open_store(url, capacity_bytes=CAPACITY_BYTES, object_bytes_max=MIB, free_space_floor_bytes=0)
    other = open_backend(url, capacity_bytes=CAPACITY_BYTES)
    assert isinstance(store, SharedStore)
    put(other, (key(1), b"of the other"))
    assert store.lookup([key(1), key(2)])[0] == [Outcome.OK, Outcome.ABSENT]
    assert store.store_id == other.store_id
    other.close()
    store.close()


@pytest.mark.parametrize("query", ["?shared=2", "?fsync", "?direct=maybe", "?size=1", "?shared=1&shared"])
def test_a_query_that_says_nothing_known_is_a_config_error(directory: Path, query: str) -> None:
    with pytest.raises(ConfigError):
        open_backend(f"file://{directory}{query}", capacity_bytes=CAPACITY_BYTES)
    assert not directory.exists()


def test_settings_are_read_back_from_their_url() -> None:
    assert FileSettings().url("/store") == "file:///store"
    assert FileSettings(shared=True, direct="on").url("/store") == "file:///store?shared=1&direct=on"


def test_a_folder_that_is_never_quiet_is_not_counted_all_the_time(directory: Path) -> None:
    now_s = 0.0
    files = FileBackend.open(directory, capacity_bytes=CAPACITY_BYTES, settings=SHARED)
    backend = SharedFileBackend(files, watermarks=(0.9, 0.95), floor_bytes=0, clock=lambda: now_s)
    walks: list[float] = []
    count = files.count

    def slow_count() -> Counts:
        nonlocal now_s
        walks.append(now_s)
        now_s += 60.0
        assert put(files, (key(len(walks)), b"x")) == [Outcome.OK]
        return count()

    files.count = slow_count  # type: ignore[method-assign]
    now_s = SETTLE_INTERVAL_S
    while now_s < SETTLE_INTERVAL_S + 2000:
        backend.keep_up()
        now_s += UPKEEP_INTERVAL_S
    assert walks == [600.0, 1250.0, 1900.0, 2550.0]
    assert backend.usage().objects == len(walks)
    backend.close()
